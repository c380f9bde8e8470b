"""Fingerprints of a training state: a hash over arrays, or a sum over elements.

Equal states have equal fingerprints on every engine. *Arrays*: xxh3-128 over the hash of every array, for states that
one rank holds. *Elements* (prefix ``elements/1:``): a sum over all elements, for states that no rank holds: each rank
adds up its elements, and the sums are added. It does not depend on how the arrays are divided. A recorded fingerprint
shows its form, so either can be recomputed from any layout. Elements take about ten times as long as arrays, divided by
the number of ranks.

An element with the bits ``b`` (uint32) at the flat index ``i`` of the array ``name`` adds to two sums modulo 2^64:

    K(name, i // 8192)[k] * T[k, i % 8192] * mix(b)        for k = 0, 1

``mix(b)`` is ``x ^ (x >> 32)`` with ``x = b * 0x9E3779B97F4A7C15``; ``T`` are fixed random odd numbers, and ``K`` is a
hash made odd. One changed element always changes the sums; several almost certainly do, also if values are exchanged or
moved. Names, shapes and counters are hashed with the sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from vorox.core.engine import NamedArray

ELEMENTS = "elements/1:"

_BLOCK = 8192  # 64 KiB of 64-bit words, which stay in the second-level cache
_MIX = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_ONE_LANE = 1 << 64


def _factors() -> npt.NDArray[np.uint64]:
    words = np.arange(1, 2 * _BLOCK + 1, dtype=np.uint64) * _MIX  # SplitMix64 with seed 0
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((words ^ (words >> np.uint64(31))) | np.uint64(1)).reshape(2, _BLOCK)


_FACTORS = _factors()


@dataclass(slots=True)
class ElementSum:
    """The two sums over some elements. Sums of disjoint elements are added in any order."""

    first: int = 0
    second: int = 0

    def add(self, name: str, array: npt.NDArray[np.float32], first_element: int = 0) -> None:
        """Add consecutive elements of an array.

        Args:
            name: Name of the array.
            array: The elements, fp32, in C order.
            first_element: Flat index of the first one in the whole array.
        """
        bits = np.ascontiguousarray(array).reshape(-1).view(np.uint32)
        mixed, shifted = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint64)
        start = 0
        while start < bits.size:
            block, offset = divmod(first_element + start, _BLOCK)
            count = min(_BLOCK - offset, bits.size - start)
            x, y = mixed[:count], shifted[:count]
            np.multiply(bits[start : start + count], _MIX, out=x, dtype=np.uint64)
            np.right_shift(x, _HALF, out=y)
            np.bitwise_xor(x, y, out=x)
            keys = divmod(xxhash.xxh3_128_intdigest(f"{name}|{block}".encode()), _ONE_LANE)
            first, second = (int(np.dot(x, factors[offset : offset + count])) for factors in _FACTORS)
            self.first = (self.first + (keys[0] | 1) * first) % _ONE_LANE
            self.second = (self.second + (keys[1] | 1) * second) % _ONE_LANE
            start += count

    def merge(self, other: ElementSum) -> None:
        """Add the sums over other elements."""
        self.first = (self.first + other.first) % _ONE_LANE
        self.second = (self.second + other.second) % _ONE_LANE

    def hex(self) -> str:
        return f"{self.first:016x}{self.second:016x}"

    @classmethod
    def from_hex(cls, text: str) -> ElementSum:
        return cls(int(text[:16], 16), int(text[16:], 16))


def is_elementwise(fingerprint: str) -> bool:
    """Whether a recorded fingerprint is a sum over elements."""
    return fingerprint.startswith(ELEMENTS)


def array_fingerprint(arrays: Iterable[NamedArray], counters: Mapping[str, float]) -> str:
    """Return an xxh3-128 digest over name, dtype, shape and hash of all arrays and counters, in name order."""
    lines = [_line(name, array) for name, array in arrays]
    return _digest([*lines, *_counter_lines(counters)])


def element_fingerprint(shapes: Mapping[str, tuple[int, ...]], counters: Mapping[str, float], total: ElementSum) -> str:
    """Return the fingerprint of a state whose elements were added up.

    Args:
        shapes: Shape of each array by name.
        counters: Scalars of the optimizer.
        total: The sum over all elements of all arrays.
    """
    lines = [f"{name}|float32|{shape}\n" for name, shape in shapes.items()]
    return ELEMENTS + _digest([*lines, *_counter_lines(counters), f"|{total.hex()}\n"])


def _counter_lines(counters: Mapping[str, float]) -> list[str]:
    return [_line(name, np.asarray(value, np.float32)) for name, value in counters.items()]


def _line(name: str, array: npt.NDArray[Any]) -> str:
    return f"{name}|{array.dtype}|{array.shape}|{xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).data)}\n"


def _digest(lines: list[str]) -> str:
    return xxhash.xxh3_128_hexdigest("".join(sorted(lines)).encode())
