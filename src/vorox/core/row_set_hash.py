"""The batch digest: a homomorphic hash of the set of rows of a step (LtHash), equal for every division among ranks.

    row digest = BLAKE2b-256 over the arrays that the model gets for a row
    element    = SHAKE-256(step | slot | row digest), 2,048 bytes as 1,024 lanes of 16 bits
    digest     = BLAKE2b-256 over the sum of all elements, modulo 2^16 in each lane

Each rank adds up the elements of its rows, and the sums of ranks are added in any order. Two sets of rows with the same
sum are a short vector of a lattice of dimension 1,024, which nobody can find; a sum of 64-bit hashes collides within
seconds (Wagner's attack). ``docs/reliability.md`` has the format byte by byte.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NUM_LANES = 1024
LaneArray = npt.NDArray[np.uint16]
_ROW, _ELEMENT, _BATCH = b"vorox row/1", b"vorox element/1", b"vorox batch/1"


class RowStream(NamedTuple):
    """What the digests of rows are over for one array: the same head for every row, then the bytes of the row."""

    head: bytes
    rows_NB: npt.NDArray[np.uint8]

    def of(self, row: int) -> tuple[bytes, memoryview]:
        """Return what the digest of a row is over."""
        return self.head, self.rows_NB[row].data


def row_stream(name: str, array_N: npt.NDArray[np.generic]) -> RowStream:
    """Return the stream of an array that the model gets.

    Args:
        name: Its name, of at most 8 letters; always for arrays of the same type.
        array_N: Of all rows, ``[N, ...]``.
    """
    shape = array_N.shape[1:]
    little = np.ascontiguousarray(array_N, array_N.dtype.newbyteorder("<")).reshape(len(array_N), -1)
    return RowStream(struct.pack(f"<8sI{len(shape)}I", name.encode(), len(shape), *shape), little.view(np.uint8))


def row_digest(parts: Iterable[tuple[bytes, memoryview]]) -> bytes:
    """Return the digest of a row from its parts of all streams, in a fixed order."""
    found = hashlib.blake2b(digest_size=32, person=_ROW)
    for head, data in parts:
        found.update(head)
        found.update(data)
    return found.digest()


def sum_elements(step: int, slots: Iterable[int], digests: Iterable[bytes]) -> LaneArray:
    """Return the sum of the lanes of rows.

    Args:
        step: The step that trains on them, from 1.
        slots: Their places in the global batch, from 0.
        digests: The ``row_digest`` of each.
    """
    seeds = (_ELEMENT + struct.pack("<QQ", step, slot) + digest for slot, digest in zip(slots, digests, strict=True))
    elements = b"".join(hashlib.shake_256(seed).digest(2 * NUM_LANES) for seed in seeds)
    return np.frombuffer(elements, "<u2").reshape(-1, NUM_LANES).sum(axis=0, dtype=np.uint16)


def expand(seed: bytes) -> LaneArray:
    """Return the lanes of an element of any set, from the bytes that name it."""
    return np.frombuffer(hashlib.shake_256(seed).digest(2 * NUM_LANES), "<u2").astype(np.uint16, copy=False)


def no_lanes() -> LaneArray:
    """Return the sum over no rows."""
    return np.zeros(NUM_LANES, np.uint16)


def finish(lanes: LaneArray) -> str:
    """Return the digest of the rows whose elements have been added up, in hex."""
    return hashlib.blake2b(lanes.astype("<u2").tobytes(), digest_size=32, person=_BATCH).hexdigest()


def encode_lanes(lanes: LaneArray) -> str:
    """Return lanes as text, for a message."""
    return base64.b64encode(lanes.astype("<u2").tobytes()).decode()


def decode_lanes(text: str) -> LaneArray:
    """Return the lanes of ``encode_lanes``."""
    return np.frombuffer(base64.b64decode(text), "<u2").astype(np.uint16)


def add_encoded(first: str, second: str) -> str:
    """Return the sum of two encoded sums."""
    return encode_lanes(decode_lanes(first) + decode_lanes(second))
