"""Convert weights between canonical and Hugging Face names, in both directions, by tensor.

Maps each row of the parameter table (``models/spec.py``) to its transformers name, including fused tensors (GPT-2's
``c_attn``) and transposed ones (GPT-2's Conv1D). The transformers family of a model is derived from what it computes,
never from its label: a llama with learned positions has no family.

Invariant: ``from_huggingface(to_huggingface(x))`` is ``x`` bit for bit. A missing, unknown, duplicated or misshapen
tensor is a ``CheckpointError`` that names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from vorox.core.engine import NamedArray
from vorox.core.errors import CheckpointError, ConfigError
from vorox.models.spec import ModelSpec, ParameterSpec
from vorox.models.weights_file import TensorEntry

Family = Literal["gpt2", "llama", "qwen3"]

_GPT2 = {
    "embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "attention_norm": "transformer.h.{i}.ln_1",
    "attention.query": "transformer.h.{i}.attn.c_attn",
    "attention.key": "transformer.h.{i}.attn.c_attn",
    "attention.value": "transformer.h.{i}.attn.c_attn",
    "attention.output": "transformer.h.{i}.attn.c_proj",
    "mlp_norm": "transformer.h.{i}.ln_2",
    "mlp.up": "transformer.h.{i}.mlp.c_fc",
    "mlp.down": "transformer.h.{i}.mlp.c_proj",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}
_LLAMA = {
    "embedding": "model.embed_tokens",
    "attention_norm": "model.layers.{i}.input_layernorm",
    "attention.query": "model.layers.{i}.self_attn.q_proj",
    "attention.key": "model.layers.{i}.self_attn.k_proj",
    "attention.value": "model.layers.{i}.self_attn.v_proj",
    "attention.output": "model.layers.{i}.self_attn.o_proj",
    "attention.query_norm": "model.layers.{i}.self_attn.q_norm",
    "attention.key_norm": "model.layers.{i}.self_attn.k_norm",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm",
    "mlp.gate": "model.layers.{i}.mlp.gate_proj",
    "mlp.up": "model.layers.{i}.mlp.up_proj",
    "mlp.down": "model.layers.{i}.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}
_MODULES: dict[Family, dict[str, str]] = {"gpt2": _GPT2, "llama": _LLAMA, "qwen3": _LLAMA}
_CANONICAL = re.compile(r"(?:blocks\.(?P<block>\d+)\.)?(?P<module>.+)\.(?P<kind>weight|bias)")
_BUFFERS = re.compile(
    r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias|(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.\w+"
)
"""Constants that older versions of transformers store with the parameters."""


@dataclass(frozen=True, slots=True)
class HuggingFaceTensor:
    """A transformers tensor: the canonical parameters that it concatenates, and whether it is stored transposed."""

    name: str
    parts: tuple[ParameterSpec, ...]
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(part.shape[0] for part in self.parts)
        shape = (rows, *self.parts[0].shape[1:])
        return shape[::-1] if self.transposed else shape

    def join(self, arrays: list[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
        joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=0)
        return np.ascontiguousarray(joined.T) if self.transposed else joined

    def split(self, array: npt.NDArray[np.float32]) -> Iterator[NamedArray]:
        rows = array.T if self.transposed else array
        start = 0
        for part in self.parts:
            end = start + part.shape[0]
            yield part.name, np.ascontiguousarray(rows[start:end])
            start = end


def huggingface_family(spec: ModelSpec) -> Family | None:
    """Return the transformers architecture that computes exactly this model, or ``None``."""
    plain = spec.head_dim * spec.num_heads == spec.hidden_size and spec.num_kv_heads == spec.num_heads
    if spec.positions == "learned":
        layers = spec.norm == "layer_norm" and spec.norm_bias and spec.attention_bias and spec.mlp_bias
        is_gpt2 = plain and layers and not spec.is_gated and not spec.qk_norm
        return "gpt2" if is_gpt2 else None
    if spec.norm != "rms_norm" or not spec.is_gated:
        return None
    if spec.qk_norm:
        return None if spec.mlp_bias else "qwen3"
    return "llama" if spec.hidden_size % spec.num_heads == 0 else None


def require_family(spec: ModelSpec) -> Family:
    """Return ``huggingface_family``, or raise ``ConfigError`` with the properties that decide it."""
    family = huggingface_family(spec)
    if family is None:
        knobs = ("positions", "norm", "norm_bias", "activation", "qk_norm", "attention_bias", "mlp_bias")
        shape = f"{spec.num_heads} heads of {spec.head_dim}, {spec.num_kv_heads} key/value heads"
        raise ConfigError(
            "Transformers has no architecture that computes this model: "
            + ", ".join(f"{knob} = {getattr(spec, knob)}" for knob in knobs)
            + f", hidden_size = {spec.hidden_size}, {shape}",
            where="model",
            hint="only models equal to gpt2, llama or qwen3 can be exported to Hugging Face format",
        )
    return family


def huggingface_tensors(spec: ModelSpec) -> tuple[HuggingFaceTensor, ...]:
    """Return all tensors of the transformers model, in the order in which ``to_huggingface`` completes them."""
    family = require_family(spec)
    modules = _MODULES[family]
    parts: dict[str, list[ParameterSpec]] = {}
    transposed: dict[str, bool] = {}
    for parameter in spec.parameters:
        match = _CANONICAL.fullmatch(parameter.name)
        assert match is not None, parameter.name
        name = f"{modules[match['module']].format(i=match['block'])}.{match['kind']}"
        parts.setdefault(name, []).append(parameter)
        is_projection = match["module"].startswith(("attention.", "mlp.")) and match["kind"] == "weight"
        transposed[name] = family == "gpt2" and is_projection
    position = {parameter.name: index for index, parameter in enumerate(spec.parameters)}
    order = sorted(parts, key=lambda name: max(position[part.name] for part in parts[name]))
    return tuple(HuggingFaceTensor(name, tuple(parts[name]), transposed[name]) for name in order)


def huggingface_entries(spec: ModelSpec, dtype: str = "F32") -> tuple[TensorEntry, ...]:
    """Return the entries of ``model.safetensors``, for ``weights_file.write_weights``."""
    return tuple(TensorEntry(tensor.name, dtype, tensor.shape) for tensor in huggingface_tensors(spec))


def to_huggingface(spec: ModelSpec, weights: Iterable[NamedArray]) -> Iterator[NamedArray]:
    """Convert canonical parameters, in table order, to transformers tensors in the order of ``huggingface_entries``.

    Buffers only the parts of one fused tensor.

    Raises:
        CheckpointError: A parameter is missing, unknown, duplicated or has the wrong shape.
    """
    missing = {part.name: tensor for tensor in huggingface_tensors(spec) for part in tensor.parts}
    held: dict[str, npt.NDArray[np.float32]] = {}
    for name, array in weights:
        tensor = missing.pop(name, None)
        if tensor is None:
            raise CheckpointError(f"Parameter {name} is unknown or duplicated")
        expected = next(part.shape for part in tensor.parts if part.name == name)
        if array.shape != expected:
            raise CheckpointError(f"Parameter {name} has shape {array.shape}; the model needs {expected}")
        held[name] = array
        if all(part.name in held for part in tensor.parts):
            yield tensor.name, tensor.join([held.pop(part.name) for part in tensor.parts])
    if missing:
        raise CheckpointError(f"Parameter {min(missing)} is missing ({len(missing)} in total)")


def from_huggingface(spec: ModelSpec, tensors: Iterable[tuple[str, npt.NDArray[Any]]]) -> Iterator[NamedArray]:
    """Convert transformers tensors, in any order, to canonical fp32 parameters.

    Accepts names with and without the prefix ``transformer.`` or ``model.``, skips stored constants, and checks that a
    tied head, if stored, equals the embedding.

    Raises:
        CheckpointError: A tensor is missing, unknown, duplicated or has the wrong shape, or a tied head differs.
    """
    family = require_family(spec)
    known = {tensor.name: tensor for tensor in huggingface_tensors(spec)}
    embedding_name = f"{_MODULES[family]['embedding']}.weight"
    prefix = embedding_name.split(".")[0]
    tied: dict[str, str] = {}
    seen: set[str] = set()
    for stored_name, stored in tensors:
        name = stored_name if stored_name in known else f"{prefix}.{stored_name}"
        if spec.tie_embeddings and stored_name == "lm_head.weight":
            tied[stored_name] = _digest(stored)
            continue
        if name not in known:
            if _BUFFERS.fullmatch(stored_name):
                continue
            raise CheckpointError(
                f"Tensor {stored_name} is not part of this {family} model", hint=_bias_hint(stored_name)
            )
        if name in seen:
            raise CheckpointError(f"Tensor {name} is duplicated")
        seen.add(name)
        if stored.shape != known[name].shape:
            raise CheckpointError(f"Tensor {stored_name} has shape {stored.shape}; the model needs {known[name].shape}")
        if spec.tie_embeddings and name == embedding_name:
            tied[name] = _digest(stored)
        yield from known[name].split(stored.astype(np.float32, copy=False))
    missing = sorted(known.keys() - seen)
    if missing:
        raise CheckpointError(f"Tensor {missing[0]} is missing ({len(missing)} in total)")
    if len(set(tied.values())) > 1:
        raise CheckpointError(
            "lm_head.weight differs from the embedding, but the model ties them", hint="set tie_embeddings to false"
        )


def _digest(array: npt.NDArray[Any]) -> str:
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array, dtype=np.float32).data)


def _bias_hint(name: str) -> str:
    return "the model configuration has no such bias" if name.endswith(".bias") else ""
