"""The fingerprint of a training state: a homomorphic hash of the set of its blocks, equal for every layout and engine.

    block       = as many whole rows of an array as 32 KiB hold, a power of two, at least one, the last block shorter; a
                  row is ``array[i]``
    element     = 1,024 lanes of 16 bits: SHAKE-256(name | type | shape | number of the block | SHA-256 of its bytes)
    fingerprint = BLAKE2b-256(counters | sum of all elements, modulo 2^16 in each lane)

Ranks add up the blocks of the rows that they hold, and their sums are added in any order (``core/row_set_hash.py``).
Rows of a block that several ranks divide travel with the sum until the block is whole; rows above 16 KiB never do.
Another state of the same fingerprint cannot be found, so a chain that records it commits to every bit.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vorox.core.engine import NamedArray, PartReport
from vorox.core.errors import CheckpointError
from vorox.core.platform.environment import usable_cores
from vorox.core.row_set_hash import LaneArray, decode_lanes, encode_lanes, expand, no_lanes

BLOCK_BYTES = 1 << 15
_BLOCK, _STATE = b"vorox block/1", b"vorox state/1"
_BLOCKS_PER_TASK = 32
_MAX_THREADS = 8


class _Array(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    row_bytes: int

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return 1 << max(BLOCK_BYTES // max(self.row_bytes, 1), 1).bit_length() - 1

    def end_of(self, block: int) -> int:
        """Return the row after the last one of a block."""
        return min((block + 1) * self.block_rows, self.num_rows)

    def element(self, block: int, data: Any) -> LaneArray:
        """Return the lanes of a whole block."""
        shape = struct.pack(f"<I{len(self.shape)}Q", len(self.shape), *self.shape)
        head = _text(self.name) + _text(self.dtype) + shape + struct.pack("<Q", block)
        return expand(_BLOCK + head + hashlib.sha256(data).digest())


_Block = tuple[_Array, int]


@dataclass(slots=True)
class StateHash:
    """The sum over the blocks of some rows. Sums of disjoint rows are merged in any order."""

    _lanes: LaneArray = field(default_factory=no_lanes)
    _open: dict[_Block, dict[int, bytes]] = field(default_factory=dict[_Block, dict[int, bytes]])
    """Rows of blocks that are not whole yet: first row to bytes."""
    _spans: dict[_Array, list[tuple[int, int]]] = field(default_factory=dict[_Array, list[tuple[int, int]]])
    """Rows that were added: the first one, and the one after the last."""

    def add(self, name: str, rows: npt.NDArray[Any], first_row: int = 0, shape: tuple[int, ...] | None = None) -> None:
        """Add consecutive rows of an array.

        Args:
            name: Name of the array.
            rows: The rows.
            first_row: Index of the first one in the whole array.
            shape: Shape of the whole array; by default these rows are all.
        """
        shape = rows.shape if shape is None else shape
        array = _Array(name, str(rows.dtype), shape, row_bytes := rows.dtype.itemsize * prod(shape[1:]))
        flat = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        end_row = first_row + (flat.size // row_bytes if row_bytes else 0)
        if end_row > first_row:
            self._spans.setdefault(array, []).append((first_row, end_row))
        whole: list[tuple[int, npt.NDArray[np.uint8]]] = []
        row = first_row
        while row < end_row:
            block = row // array.block_rows
            end = min(array.end_of(block), end_row)
            data = flat[(row - first_row) * row_bytes : (end - first_row) * row_bytes]
            if row == block * array.block_rows and end == array.end_of(block):
                whole.append((block, data))
            else:
                self._keep(array, block, {row: data.tobytes()})
            row = end
        self._add_whole(array, whole)

    def _add_whole(self, array: _Array, blocks: Sequence[tuple[int, npt.NDArray[np.uint8]]]) -> None:
        def lanes_of(first: int) -> LaneArray:
            total = no_lanes()
            for block, data in blocks[first : first + _BLOCKS_PER_TASK]:
                total += array.element(block, data)
            return total

        tasks = range(0, len(blocks), _BLOCKS_PER_TASK)
        if len(tasks) <= 1:
            self._lanes = sum(map(lanes_of, tasks), self._lanes)
            return
        with ThreadPoolExecutor(min(len(tasks), usable_cores(), _MAX_THREADS)) as threads:
            self._lanes = sum(threads.map(lanes_of, tasks), self._lanes)

    def _keep(self, array: _Array, block: int, pieces: Mapping[int, bytes]) -> None:
        """Add rows of a block, which is hashed once it is whole."""
        kept = self._open.setdefault((array, block), {})
        kept.update(pieces)
        num_rows = array.end_of(block) - block * array.block_rows
        if sum(map(len, kept.values())) == num_rows * array.row_bytes:
            data = b"".join(data for _, data in sorted(self._open.pop((array, block)).items()))
            self._lanes = self._lanes + array.element(block, data)

    def merge(self, other: StateHash) -> None:
        """Add the sum over other rows."""
        self._lanes = self._lanes + other._lanes
        for array, spans in other._spans.items():
            self._spans.setdefault(array, []).extend(spans)
        for (array, block), pieces in other._open.items():
            self._keep(array, block, pieces)

    def report(self) -> PartReport:
        """Return the sum for a message to another rank."""
        pieces = [
            [*array, block, first_row, base64.b64encode(data).decode()]
            for (array, block), kept in self._open.items() for first_row, data in kept.items()
        ]  # fmt: skip
        spans = [[*array, spans] for array, spans in self._spans.items()]
        return {"lanes": encode_lanes(self._lanes), "rows": pieces, "spans": spans}

    @classmethod
    def from_report(cls, report: PartReport) -> StateHash:
        """Return the sum of ``report``."""
        found = cls(decode_lanes(report["lanes"]))
        for name, dtype, shape, row_bytes, block, first_row, data in report["rows"]:
            array = _Array(name, dtype, tuple(shape), row_bytes)
            found._keep(array, block, {first_row: base64.b64decode(data)})
        for name, dtype, shape, row_bytes, spans in report["spans"]:
            found._spans[_Array(name, dtype, tuple(shape), row_bytes)] = [tuple(span) for span in spans]
        return found

    def fingerprint(self, counters: Mapping[str, float]) -> str:
        """Return the fingerprint, in hex, of a state whose arrays were added whole.

        Args:
            counters: Scalars of the optimizer.

        Raises:
            CheckpointError: Rows of an array were not added, or more than once.
        """
        for array, spans in self._spans.items():
            end = 0
            for first, after in sorted(spans):
                if first != end:
                    raise CheckpointError(
                        f"Rows of {array.name} are on {'no rank' if first > end else 'several ranks'}"
                    )
                end = after
            if end != array.num_rows and array.row_bytes:
                raise CheckpointError(f"Rows of {array.name} are on no rank")
        found = hashlib.blake2b(digest_size=32, person=_STATE)
        for name, value in sorted(counters.items()):
            found.update(_text(name) + struct.pack("<d", value))
        found.update(self._lanes.astype("<u2").tobytes())
        return found.hexdigest()


def fingerprint(arrays: Iterable[NamedArray], counters: Mapping[str, float] | None = None) -> str:
    """Return the fingerprint of whole arrays and of counters, in any order."""
    total = StateHash()
    for name, array in arrays:
        total.add(name, array)
    return total.fingerprint(counters or {})


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data
