"""Reading the arrays of an Orbax checkpoint with tensorstore alone: no Orbax, no JAX, so that every engine can.

Orbax keeps a tree of arrays as one key-value store (OCDBT) in a folder; below ``<kind>.<canonical name>/`` lies one
array as zarr, cut into the parts that the devices held. Any slice is read without the rest. Kinds are ``weights`` and
the optimizer's moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.engine import NamedArray
from vorox.core.errors import CheckpointError
from vorox.core.installation import install_command
from vorox.models.spec import ModelSpec
from vorox.models.weights_file import TensorEntry

FOLDER = "orbax"
WEIGHTS = "weights"

Index = tuple[slice, ...] | EllipsisType


class OrbaxArrays:
    """The arrays below a folder. Opening lists their names; data is read when it is asked for.

    Args:
        directory: A verified checkpoint.

    Raises:
        CheckpointError: tensorstore is not installed, or what lies there is no such store.
    """

    def __init__(self, directory: Path) -> None:
        try:
            import tensorstore
        except ImportError as error:
            raise CheckpointError(
                "the arrays of this checkpoint are in the format of Orbax, and tensorstore, which reads it, is not "
                "installed",
                where=str(directory),
                hint=f"{install_command('orbax')}; without it, only safetensors can be read: export the run where it "
                "is installed (vorox export) and start from that directory (--from-weights)",
            ) from error
        self._tensorstore: Any = tensorstore
        self.path = directory.absolute() / FOLDER  # tensorstore takes no other path
        self._store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{self.path}/"}}
        self._opened: dict[str, Any] = {}
        try:
            keys: list[bytes] = tensorstore.KvStore.open(self._store).result().list().result()
        except (ValueError, OSError) as error:
            raise self._broken(error) from error
        self.names = sorted({key.decode().rpartition("/")[0] for key in keys})

    def _broken(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"the arrays cannot be read: {str(error).splitlines()[0]}", where=str(self.path))

    def check_entries(self, expected: Iterable[TensorEntry]) -> None:
        """Compare names, shapes and types with what the caller needs, which may be a part of what there is.

        Raises:
            CheckpointError: Naming the first array that is missing or different.
        """
        for entry in expected:
            if entry.name not in self.names:
                raise CheckpointError(f"array {entry.name} is missing", where=str(self.path))
            array = self._open(entry.name)
            if tuple(array.shape) != entry.shape or array.dtype.numpy_dtype != np.float32:
                raise CheckpointError(
                    f"array {entry.name} is {array.dtype.name} {tuple(array.shape)}, needed is float32 {entry.shape}",
                    where=str(self.path),
                )

    def read(self, name: str, index: Index = ...) -> npt.NDArray[np.float32]:
        """One array, or a slice of it; of its parts, only those that the slice touches are read.

        Raises:
            CheckpointError: There is no such array, or the files are damaged.
        """
        try:
            return np.asarray(self._open(name)[index].read().result())
        except (ValueError, OSError) as error:
            raise self._broken(error) from error

    def weights(self, spec: ModelSpec) -> Iterator[NamedArray]:
        """The parameters of a model under canonical names, in table order, one at a time."""
        for parameter in spec.parameters:
            yield parameter.name, self.read(f"{WEIGHTS}.{parameter.name}")

    def _open(self, name: str) -> Any:
        if name not in self._opened:
            if name not in self.names:
                raise CheckpointError(f"array {name} is missing", where=str(self.path))
            spec = {"driver": "zarr", "kvstore": {**self._store, "path": f"{name}/"}}
            try:
                self._opened[name] = self._tensorstore.open(spec, open=True, read=True).result()
            except (ValueError, OSError) as error:
                raise self._broken(error) from error
        return self._opened[name]


def weight_entries(spec: ModelSpec) -> tuple[TensorEntry, ...]:
    """What the parameters of a model look like in such a store."""
    return tuple(TensorEntry(f"{WEIGHTS}.{row.name}", "F32", row.shape) for row in spec.parameters)
