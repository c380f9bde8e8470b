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

import numpy as np
import numpy.typing as npt

NUM_LANES = 1024
LaneArray = npt.NDArray[np.uint16]
_ROW, _ELEMENT, _BATCH = b"vorox row/1", b"vorox element/1", b"vorox batch/1"


def row_digest(arrays: Iterable[tuple[str, npt.NDArray[np.generic]]]) -> bytes:
    """Return the digest of a row.

    Args:
        arrays: What the model gets, by name of at most 8 letters, in a fixed order; each with the type of its name.
    """
    found = hashlib.blake2b(digest_size=32, person=_ROW)
    for name, array in arrays:
        found.update(struct.pack(f"<8sI{array.ndim}I", name.encode(), array.ndim, *array.shape))
        found.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data)
    return found.digest()


def element(step: int, slot: int, digest: bytes) -> LaneArray:
    """Return the lanes of a row.

    Args:
        step: The step that trains on it, from 1.
        slot: Its place in the global batch, from 0.
        digest: Its ``row_digest``.
    """
    return expand(_ELEMENT + struct.pack("<QQ", step, slot) + digest)


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
