"""Reader of Orbax checkpoint arrays for every engine; needs tensorstore, not Orbax or JAX.

Orbax stores a tree of arrays as a key-value store (OCDBT) in a folder, with one zarr array per
``<kind>.<canonical name>/``, chunked by device shards. Slices are read without the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.errors import CheckpointError
from vorox.core.platform.installation import install_command
from vorox.models.arrays.array_reader import Index
from vorox.models.arrays.weights_file import TensorEntry

FOLDER = "orbax"


class OrbaxArrays:
    """The arrays of a checkpoint (``models.array_reader.ArrayReader``). Opening lists their names; data is read lazily.

    Args:
        directory: A verified checkpoint.

    Raises:
        CheckpointError: tensorstore is not installed, or the folder is not a valid store.
    """

    def __init__(self, directory: Path) -> None:
        try:
            import tensorstore
        except ImportError as error:
            raise CheckpointError(
                "The arrays of this checkpoint are in Orbax format, but tensorstore, which reads it, is not installed",
                where=str(directory),
                hint=f"{install_command('orbax')}; or export the run on a machine that has it (vorox export) and start "
                "from that directory (--from-weights)",
            ) from error
        self._tensorstore: Any = tensorstore
        self.path = directory.absolute() / FOLDER  # tensorstore needs an absolute path
        self._store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{self.path}/"}}
        self._opened: dict[str, Any] = {}
        try:
            keys: list[bytes] = tensorstore.KvStore.open(self._store).result().list().result()
        except (ValueError, OSError) as error:
            raise self._broken(error) from error
        self.names: Collection[str] = sorted({key.decode().rpartition("/")[0] for key in keys})

    def _broken(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"The arrays cannot be read: {str(error).splitlines()[0]}", where=str(self.path))

    def check_entries(self, expected: Iterable[TensorEntry]) -> None:
        for entry in expected:
            if entry.name not in self.names:
                raise CheckpointError(f"Array {entry.name} is missing", where=str(self.path))
            array = self._open(entry.name)
            if tuple(array.shape) != entry.shape or array.dtype.numpy_dtype != np.float32:
                raise CheckpointError(
                    f"Array {entry.name} is {array.dtype.name} {tuple(array.shape)}; expected float32 {entry.shape}",
                    where=str(self.path),
                )

    def read(self, name: str, index: Index = ...) -> npt.NDArray[np.float32]:
        try:
            return np.asarray(self._open(name)[index].read().result())
        except (ValueError, OSError) as error:
            raise self._broken(error) from error

    def _open(self, name: str) -> Any:
        if name not in self._opened:
            if name not in self.names:
                raise CheckpointError(f"Array {name} is missing", where=str(self.path))
            spec = {"driver": "zarr", "kvstore": {**self._store, "path": f"{name}/"}}
            try:
                self._opened[name] = self._tensorstore.open(spec, open=True, read=True).result()
            except (ValueError, OSError) as error:
                raise self._broken(error) from error
        return self._opened[name]
