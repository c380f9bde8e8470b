"""Reader protocol for checkpoint arrays that can be read in slices (Orbax, sharded safetensors).

An array is named ``<kind>.<canonical name>``; kinds are ``weights`` and the optimizer moments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from types import EllipsisType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vorox.core.engine import NamedArray
from vorox.models.arrays.weights_file import TensorEntry
from vorox.models.spec import ModelSpec

WEIGHTS = "weights"

Index = tuple[slice, ...] | EllipsisType


class ArrayReader(Protocol):
    """The arrays of a verified checkpoint; data is read lazily."""

    @property
    def names(self) -> Collection[str]:
        """Names of all arrays."""
        ...

    def check_entries(self, expected: Iterable[TensorEntry]) -> None:
        """Check names, shapes and types of the arrays that the caller needs.

        Raises:
            CheckpointError: An array is missing or different; the message names the first one.
        """
        ...

    def read(self, name: str, index: Index = ...) -> npt.NDArray[np.float32]:
        """Read an array, or a slice of it without the rest.

        Raises:
            CheckpointError: The array does not exist, or the files are damaged.
        """
        ...


def read_weights_of(reader: ArrayReader, spec: ModelSpec) -> Iterator[NamedArray]:
    """Yield the parameters of a model under canonical names, in table order."""
    for parameter in spec.parameters:
        yield parameter.name, reader.read(f"{WEIGHTS}.{parameter.name}")


def weight_entries(spec: ModelSpec) -> tuple[TensorEntry, ...]:
    """Return the expected entries of a model's parameters."""
    return tuple(TensorEntry(f"{WEIGHTS}.{row.name}", "F32", row.shape) for row in spec.parameters)
