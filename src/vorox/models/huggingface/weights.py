"""Convert weights between canonical and Hugging Face names, in both directions, by tensor.

Maps each row of the parameter table (``models/spec.py``) to its transformers name, including fused tensors (GPT-2's
``c_attn``) and transposed ones (GPT-2's Conv1D). The names follow from what a model computes
(``huggingface/families.py``), never from its label.

Invariant: ``from_huggingface(to_huggingface(x))`` is ``x`` bit for bit. A missing, unknown, duplicated or misshapen
tensor is a ``CheckpointError`` that names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from vorox.core.engine import NamedArray
from vorox.core.errors import CheckpointError
from vorox.models.arrays.weights_file import TensorEntry
from vorox.models.decoder.experts import split_expert
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.huggingface.families import ARCHITECTURES, require_family
from vorox.models.spec import ParameterSpec

_CANONICAL = re.compile(r"(?:blocks\.(?P<block>\d+)\.)?(?P<module>.+?)(?P<kind>\.weight|\.bias)?")
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


def huggingface_tensors(spec: DecoderSpec) -> tuple[HuggingFaceTensor, ...]:
    """Return all tensors of the transformers model, in the order in which ``to_huggingface`` completes them."""
    family = require_family(spec)
    return group_parameters(spec, ARCHITECTURES[family].modules, transposes=family == "gpt2")


def group_parameters(
    spec: DecoderSpec, modules: Mapping[str, str], *, transposes: bool
) -> tuple[HuggingFaceTensor, ...]:
    """Return the tensors of a naming scheme, in the order in which ``join_parameters`` completes them.

    Args:
        spec: The model.
        modules: Canonical modules to its names; ``{i}`` is the block, ``{e}`` the expert. Several may share one, which
            concatenates them.
        transposes: Whether projections are stored transposed.
    """
    parts: dict[str, list[ParameterSpec]] = {}
    transposed: dict[str, bool] = {}
    for parameter in spec.parameters:
        match = _CANONICAL.fullmatch(parameter.name)
        assert match is not None, parameter.name
        module, expert = match["module"], ""
        if (split := split_expert(parameter.name)) is not None:
            module, expert = module.replace(f".{split[1]}.", "."), split[1]
        name = f"{modules[module].format(i=match['block'], e=expert)}{match['kind'] or ''}"
        parts.setdefault(name, []).append(parameter)
        is_projection = module.startswith(("attention.", "mlp.")) and match["kind"] == ".weight"
        transposed[name] = transposes and is_projection
    position = {parameter.name: index for index, parameter in enumerate(spec.parameters)}
    order = sorted(parts, key=lambda name: max(position[part.name] for part in parts[name]))
    return tuple(HuggingFaceTensor(name, tuple(parts[name]), transposed[name]) for name in order)


def huggingface_entries(spec: DecoderSpec) -> tuple[TensorEntry, ...]:
    """Return the entries of ``model.safetensors``, for ``weights_file.write_weights``."""
    return tuple(TensorEntry(tensor.name, "F32", tensor.shape) for tensor in huggingface_tensors(spec))


def to_huggingface(spec: DecoderSpec, weights: Iterable[NamedArray]) -> Iterator[NamedArray]:
    """Convert canonical parameters, in table order, to transformers tensors in the order of ``huggingface_entries``.

    Buffers only the parts of one fused tensor.

    Raises:
        CheckpointError: A parameter is missing, unknown, duplicated or has the wrong shape.
    """
    return join_parameters(huggingface_tensors(spec), weights)


def join_parameters(tensors: Iterable[HuggingFaceTensor], weights: Iterable[NamedArray]) -> Iterator[NamedArray]:
    """Concatenate canonical parameters, in table order, to tensors; see ``to_huggingface``."""
    missing = {part.name: tensor for tensor in tensors for part in tensor.parts}
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


def from_huggingface(spec: DecoderSpec, tensors: Iterable[tuple[str, npt.NDArray[Any]]]) -> Iterator[NamedArray]:
    """Convert transformers tensors, in any order, to canonical fp32 parameters.

    Accepts names with and without the prefix ``transformer.`` or ``model.``, with ``backbone.`` in Nemotron-H, and the
    fused projections of Phi-3 in any model with its parts. Skips stored constants, and checks that a tied head, if
    stored, equals the embedding.

    Raises:
        CheckpointError: A tensor is missing, unknown, duplicated or has the wrong shape, or a tied head differs.
    """
    family = require_family(spec)
    tensors_of_family = huggingface_tensors(spec)
    fused = (
        group_parameters(spec, ARCHITECTURES["phi3"].modules, transposes=False)
        if family in ("llama", "mistral")
        else ()
    )
    known = {tensor.name: tensor for tensor in (*fused, *tensors_of_family)}
    embedding_name = f"{ARCHITECTURES[family].modules['embedding']}.weight"
    prefix = embedding_name.split(".")[0]
    tied: dict[str, str] = {}
    seen: set[str] = set()
    for stored_name, stored in tensors:
        name = re.sub(r"^backbone\.", "model.", stored_name) if family == "nemotron_h" else stored_name
        name = name if name in known else f"{prefix}.{name}"
        if spec.tie_embeddings and stored_name == "lm_head.weight":
            tied[stored_name] = _digest(stored)
            continue
        if name not in known:
            if _BUFFERS.fullmatch(stored_name):
                continue
            raise CheckpointError(
                f"Tensor {stored_name} is not part of this {family} model", hint=_bias_hint(stored_name)
            )
        parts = {part.name for part in known[name].parts}
        if parts & seen:
            raise CheckpointError(f"Tensor {name} is duplicated")
        seen |= parts
        if stored.shape != known[name].shape:
            raise CheckpointError(f"Tensor {stored_name} has shape {stored.shape}; the model needs {known[name].shape}")
        if spec.tie_embeddings and name == embedding_name:
            tied[name] = _digest(stored)
        yield from known[name].split(stored.astype(np.float32, copy=False))
    missing = sorted(t.name for t in tensors_of_family if any(part.name not in seen for part in t.parts))
    if missing:
        raise CheckpointError(f"Tensor {missing[0]} is missing ({len(missing)} in total)")
    if len(set(tied.values())) > 1:
        raise CheckpointError(
            "lm_head.weight differs from the embedding, but the model ties them",
            hint="set tie_word_embeddings to false in its config.json",
        )


def _digest(array: npt.NDArray[Any]) -> str:
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array, dtype=np.float32).data)


def _bias_hint(name: str) -> str:
    return "the model configuration has no such bias" if name.endswith(".bias") else ""
