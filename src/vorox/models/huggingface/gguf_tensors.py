"""GGUF, the format of llama.cpp: which decoders it holds, their metadata keys, and their tensors.

In: a spec and canonical parameters. Out: metadata keys and tensors under GGUF names, and back. The format is named
after what llama.cpp computes: its ``llama`` rotates neighbouring dimensions, so the rows of queries and keys are
reordered; its other architectures rotate halves, as we do. A model that its code would compute differently is refused.

Invariant: ``from_gguf(to_gguf(x))`` is ``x`` bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from vorox.core.engine import NamedArray
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.schema.model import Family
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.huggingface.families import require_family
from vorox.models.huggingface.weights import HuggingFaceTensor, group_parameters, join_parameters

GgufArchitecture = Literal["llama", "qwen2", "qwen3", "gpt2"]

_MODULES = {
    "embedding": "token_embd",
    "position_embedding": "position_embd",
    "attention_norm": "blk.{i}.attn_norm",
    "attention.query": "blk.{i}.attn_q",
    "attention.key": "blk.{i}.attn_k",
    "attention.value": "blk.{i}.attn_v",
    "attention.output": "blk.{i}.attn_output",
    "attention.query_norm": "blk.{i}.attn_q_norm",
    "attention.key_norm": "blk.{i}.attn_k_norm",
    "mlp_norm": "blk.{i}.ffn_norm",
    "mlp.gate": "blk.{i}.ffn_gate",
    "mlp.up": "blk.{i}.ffn_up",
    "mlp.down": "blk.{i}.ffn_down",
    "final_norm": "output_norm",
    "head": "output",
}
_GPT2_MODULES = _MODULES | dict.fromkeys(
    ("attention.query", "attention.key", "attention.value"), "blk.{i}.attn_qkv"
)  # llama.cpp reads one matrix
_ARCHITECTURES: Mapping[Family, GgufArchitecture] = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gpt2": "gpt2",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file: the parameters that it concatenates, and the heads whose rows are interleaved, if any."""

    tensor: HuggingFaceTensor
    interleaved_heads: int | None

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def encode(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Reorder the rows of each head from halves to neighbouring pairs, if llama.cpp expects that."""
        return array if self.interleaved_heads is None else _swap(array, self.interleaved_heads, 2, -1)

    def decode(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array if self.interleaved_heads is None else _swap(array, self.interleaved_heads, -1, 2)


def _swap(array: npt.NDArray[Any], num_heads: int, first: int, second: int) -> npt.NDArray[Any]:
    rows = array.reshape(num_heads, first, second, *array.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(array.shape))


def require_gguf(spec: DecoderSpec) -> GgufArchitecture:
    """Return the architecture of llama.cpp that computes exactly this model.

    Raises:
        ConfigError: There is none, or we cannot verify that it does; the message names the property.
    """
    family = require_family(spec)
    architecture = _ARCHITECTURES.get(family)
    if architecture is None:
        _refuse(f"its family is {family}, and implemented are {', '.join(_ARCHITECTURES)}")
    activation = "gelu_tanh" if architecture == "gpt2" else "swiglu"
    if spec.activation != activation:
        _refuse(f"model.activation is {spec.activation}, and {architecture} of llama.cpp computes {activation}")
    if spec.rope_scaling is not None:
        _refuse(f"model.rope_scaling is {spec.rope_scaling.rope_type}, which transformers does not read from GGUF")
    if any(spec.layer_windows):
        _refuse(f"model.sliding_window_tokens is set, and {architecture} of llama.cpp attends to all positions")
    if architecture in ("llama", "qwen3") and (spec.attention_bias or spec.mlp_bias):
        _refuse(f"it has biases (model.attention_bias, model.mlp_bias), and {architecture} of transformers reads none")
    return architecture


def _refuse(reason: str) -> NoReturn:
    raise ConfigError(f"GGUF cannot hold this model: {reason}", where="model", hint="export it with --to hf")


def gguf_keys(spec: DecoderSpec) -> dict[str, int | float | str]:
    """Return the metadata of the model; integers are stored as uint32, other numbers as float32."""
    name = require_gguf(spec)
    norm = "layer_norm_rms_epsilon" if spec.norm == "rms_norm" else "layer_norm_epsilon"
    keys: dict[str, int | float | str] = {
        "context_length": spec.max_positions_tokens,
        "embedding_length": spec.hidden_size,
        "block_count": spec.num_layers,
        "feed_forward_length": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        f"attention.{norm}": spec.norm_eps,
    }
    if spec.positions == "rope":
        keys |= {
            "attention.key_length": spec.head_dim,
            "attention.value_length": spec.head_dim,
            "rope.dimension_count": spec.head_dim,
            "rope.freq_base": spec.rope_theta,
        }
    return {f"{name}.{key}": value for key, value in keys.items()}


def gguf_tensors(spec: DecoderSpec) -> tuple[GgufTensor, ...]:
    """Return all tensors, in the order in which ``to_gguf`` yields them."""
    architecture = require_gguf(spec)
    heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads} if architecture == "llama" else {}
    modules = _GPT2_MODULES if architecture == "gpt2" else _MODULES
    return tuple(
        GgufTensor(tensor, heads.get(tensor.name.split(".")[-2]))
        for tensor in group_parameters(spec, modules, transposes=False)
    )


def to_gguf(spec: DecoderSpec, weights: Iterable[NamedArray]) -> Iterator[NamedArray]:
    """Convert canonical parameters, in table order, to the tensors of ``gguf_tensors``.

    Raises:
        CheckpointError: A parameter is missing, unknown, duplicated or has the wrong shape.
    """
    tensors = {tensor.name: tensor for tensor in gguf_tensors(spec)}
    for name, array in join_parameters([tensor.tensor for tensor in tensors.values()], weights):
        yield name, tensors[name].encode(array)


def from_gguf(spec: DecoderSpec, stored: Iterable[tuple[str, npt.NDArray[Any]]]) -> Iterator[NamedArray]:
    """Convert the tensors of a file, in any order, to canonical fp32 parameters.

    Raises:
        CheckpointError: A tensor is missing, unknown or has the wrong shape.
    """
    missing = {tensor.name: tensor for tensor in gguf_tensors(spec)}
    for name, array in stored:
        tensor = missing.pop(name, None)
        if tensor is None or array.shape != tensor.shape:
            raise CheckpointError(f"Tensor {name} with shape {array.shape} is not part of this model, or appears twice")
        yield from tensor.tensor.split(tensor.decode(array.astype(np.float32, copy=False)))
    if missing:
        raise CheckpointError(f"Tensor {min(missing)} is missing ({len(missing)} in total)")
