"""Tensor names in ``model.safetensors``: as in transformers if it has the architecture, else canonical."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy.typing as npt

from vorox.core.engine import NamedArray
from vorox.models.arrays.weights_file import TensorEntry
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.huggingface.families import huggingface_family
from vorox.models.huggingface.weights import from_huggingface, huggingface_entries, to_huggingface
from vorox.models.spec import ModelSpec


def stored_entries(spec: ModelSpec) -> tuple[TensorEntry, ...]:
    """Return the entries of the file, in fp32."""
    if isinstance(spec, DecoderSpec) and huggingface_family(spec) is not None:
        return huggingface_entries(spec)
    return tuple(TensorEntry(parameter.name, "F32", parameter.shape) for parameter in spec.parameters)


def to_stored(spec: ModelSpec, weights: Iterable[NamedArray]) -> Iterable[NamedArray]:
    """Convert canonical parameters, in table order, to the tensors of ``stored_entries``."""
    if isinstance(spec, DecoderSpec) and huggingface_family(spec) is not None:
        return to_huggingface(spec, iter(weights))
    return weights


def from_stored(spec: ModelSpec, tensors: Iterable[tuple[str, npt.NDArray[Any]]]) -> Iterable[NamedArray]:
    """Convert the tensors of a file to canonical fp32 parameters."""
    if isinstance(spec, DecoderSpec) and huggingface_family(spec) is not None:
        return from_huggingface(spec, tensors)
    return tensors
