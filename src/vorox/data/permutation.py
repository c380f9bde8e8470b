"""Stateless shuffling: a keyed permutation of ``[0, num_rows)``, computed and inverted at single indices.

``perm/1``: a balanced Feistel cipher on ``2h`` bits, ``h = ceil(max(2, bits of num_rows - 1) / 2)``, with six rounds of
murmur3's 32-bit finaliser and round keys from SplitMix64. Cycle-walking encrypts an image outside the range again until
it is inside (2.2 tries on average, at most 4). The *tweak* selects one of 2^64 independent permutations under the same
key: the epoch of a source, the index of a batch.

Invariant: the output for a key, tweak and size never changes. Plans record the name; tests freeze vectors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from vorox.core.files.atomic import canonical_json

NAME = "perm/1"

Index = npt.NDArray[np.int64]
_Unsigned = npt.NDArray[np.uint64]
_Half = npt.NDArray[np.uint32]
_Cipher = Callable[[_Unsigned, int, _Half], _Unsigned]

_NUM_ROUNDS = 6
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_COUNTERS = (np.arange(_NUM_ROUNDS, dtype=np.uint64) // np.uint64(2) + np.uint64(1)).reshape(-1, 1)
_13, _16, _FIRST, _SECOND = (np.uint32(value) for value in (13, 16, 0x85EBCA6B, 0xC2B2AE35))


def permutation_key(*parts: str | int) -> bytes:
    """Return the 128-bit key of a permutation, derived from the values that identify it."""
    return hashlib.blake2b(canonical_json([NAME, *parts]), digest_size=16).digest()


def permute(index: Index, num_rows: int, key: bytes, tweak: Index | int = 0) -> Index:
    """Return the images of ``index`` under the permutation of ``[0, num_rows)`` that ``key`` and ``tweak`` select.

    Args:
        index: Values in ``[0, num_rows)``.
        num_rows: Size of the range.
        key: A key returned by ``permutation_key``.
        tweak: One non-negative number for all indices, or one per index.
    """
    return _walk(index, num_rows, key, tweak, _encrypt)


def unpermute(index: Index, num_rows: int, key: bytes, tweak: Index | int = 0) -> Index:
    """Invert ``permute``."""
    return _walk(index, num_rows, key, tweak, _decrypt)


def _walk(index: Index, num_rows: int, key: bytes, tweak: Index | int, cipher: _Cipher) -> Index:
    if not index.size:
        return index.astype(np.int64)
    if int(index.min()) < 0 or int(index.max()) >= num_rows:
        raise ValueError(f"Indices {index.min()} to {index.max()} are not within [0, {num_rows})")
    half_bits = (max(2, (num_rows - 1).bit_length()) + 1) // 2
    round_keys = _keys_of(key, np.asarray(tweak, np.uint64).reshape(-1))
    result = cipher(index.astype(np.uint64), half_bits, round_keys)
    outside = np.flatnonzero(result >= num_rows)
    while outside.size:
        keys = round_keys if round_keys.shape[1] == 1 else round_keys[:, outside]
        again = cipher(result[outside], half_bits, keys)
        result[outside] = again
        outside = outside[again >= num_rows]
    return result.astype(np.int64)


def _encrypt(values: _Unsigned, half_bits: int, round_keys: _Half) -> _Unsigned:
    left, right, mask = _split(values, half_bits)
    for round_key in round_keys:
        left, right = right, left ^ (_scramble(right ^ round_key) & mask)
    return _join(left, right, half_bits)


def _decrypt(values: _Unsigned, half_bits: int, round_keys: _Half) -> _Unsigned:
    left, right, mask = _split(values, half_bits)
    for round_key in round_keys[::-1]:
        left, right = right ^ (_scramble(left ^ round_key) & mask), left
    return _join(left, right, half_bits)


def _split(values: _Unsigned, half_bits: int) -> tuple[_Half, _Half, np.uint32]:
    mask = np.uint32((1 << half_bits) - 1)
    return (values >> np.uint64(half_bits)).astype(np.uint32), values.astype(np.uint32) & mask, mask


def _join(left: _Half, right: _Half, half_bits: int) -> _Unsigned:
    return (left.astype(np.uint64) << np.uint64(half_bits)) | right


def _scramble(value: _Half) -> _Half:
    """Apply murmur3's fmix32 in place; all callers pass a temporary array."""
    value ^= value >> _16
    value *= _FIRST
    value ^= value >> _13
    value *= _SECOND
    value ^= value >> _16
    return value


def _keys_of(key: bytes, tweaks: _Unsigned) -> _Half:
    """Return round keys ``[rounds, tweaks]``; a single column if all tweaks are equal.

    Tweaks are epochs and batches, which come in long runs, so runs of equal tweaks are computed once.
    """
    starts = np.flatnonzero(np.append(True, tweaks[1:] != tweaks[:-1]))
    keys = _round_keys(key, tweaks[starts])
    return keys if len(starts) == 1 else np.repeat(keys, np.diff(starts, append=len(tweaks)), axis=1)


def _round_keys(key: bytes, tweaks: _Unsigned) -> _Half:
    """Return the upper halves of two alternating SplitMix64 streams, one per half of the key, three per tweak."""
    seeds = np.resize(np.frombuffer(key, "<u8"), (_NUM_ROUNDS, 1))
    state = (tweaks * np.uint64(_NUM_ROUNDS // 2) + _COUNTERS) * _GAMMA + seeds
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32)
