"""Which units have their chunks on disk, and whether there is room for more.

A scheduler asks before it builds a unit and before it writes one. A cache that stays is ``Permanent``; one whose
chunks come and go within a disk budget has a residency of its own. Invariant: residency decides what is on disk and
when, never what is in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from vorox.data.cache.manifest import Manifest
from vorox.data.cache.options import Depth
from vorox.data.cache.verify import is_intact


class Residency(Protocol):
    """Whose chunks are on disk."""

    @property
    def damaged(self) -> Collection[int]:
        """Units that are done and must be built again."""
        ...

    def is_resident(self, manifest: Manifest, unit: int, /) -> bool:
        """Whether a unit is done and its chunks are on disk; asked right before it would be built."""
        ...

    def room(self, unit: int, size_bytes: int, /) -> AbstractContextManager[bool]:
        """Hold room for the chunks of a unit while they are written. False: given up, the unit is dropped."""
        ...

    def written(self, unit: int, /) -> None:
        """The chunks of a unit are on disk."""
        ...


class Permanent:
    """Chunks that stay; there is always room.

    Args:
        directory: The cache.
        damaged: Units with a chunk that is lost or damaged.
        depth: How closely to check whether another builder has rebuilt one of them meanwhile.
    """

    def __init__(self, directory: Path, damaged: Collection[int] = (), depth: Depth = "quick") -> None:
        self.damaged: set[int] = set(damaged)
        self.depth: Depth = depth
        self._directory = directory

    def is_resident(self, manifest: Manifest, unit: int, /) -> bool:
        if manifest.has_unit(unit) and unit in self.damaged and is_intact(self._directory, manifest, unit, self.depth):
            self.damaged.discard(unit)  # another builder was faster
        return manifest.has_unit(unit) and unit not in self.damaged

    @contextlib.contextmanager
    def room(self, unit: int, size_bytes: int, /) -> Generator[bool]:
        del unit, size_bytes
        yield True

    def written(self, unit: int, /) -> None:
        self.damaged.discard(unit)
