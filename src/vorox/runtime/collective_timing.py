"""Check and time all-reduces over the ranks of a job, for vorox doctor --nodes.

In: the collectives of an engine (``Collectives``). Out: wrong elements, seconds by message size, and the time between
neighbouring ranks. Every rank calls the same functions in the same order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

LATENCY_BYTES = 8
HOST_SIZES_BYTES = (1 << 16, 1 << 20, 1 << 24)
DEVICE_SIZES_BYTES = (1 << 20, 1 << 24, 1 << 27)
PAIR_BYTES = 1 << 20

_NUM_CHECKED, _MAX_INTEGER = 1 << 14, 1000
_SEED = 20_240_229
_DTYPES = (np.int32, np.float32)
"""Sums of up to 16,000 ranks are integers below 2 ** 24, which float32 represents."""
_WARMUP = 2
_PAIR_REPEATS = 5


class Collectives(Protocol):
    """The collectives of an engine that is connected to the other ranks.

    Attributes:
        transport: What carries the messages, such as ``gloo on CPU``.
        is_on_host: Whether the messages are in host memory.
    """

    transport: str
    is_on_host: bool

    def sum(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the sum of the arrays of all ranks."""
        ...

    def all_reduce(self, num_bytes: int) -> Callable[[], None]:
        """Return a function that sums ``num_bytes`` of float32 over all ranks, and waits for the result."""
        ...

    def exchange(self, peer: int, num_bytes: int) -> Callable[[], None] | None:
        """Return a function that sends ``num_bytes`` to a rank, receives as many, and waits for both.

        ``None`` if the engine has no messages between two ranks.
        """
        ...


def count_wrong_elements(collectives: Collectives, rank: int, world_size: int) -> int:
    """Sum random integers over all ranks, as int32 and as float32; return how many elements are wrong. A collective."""
    num_wrong = 0
    for dtype in _DTYPES:
        expected = sum((_integers(number) for number in range(world_size)), start=np.zeros(_NUM_CHECKED, np.int64))
        found = collectives.sum(_integers(rank).astype(dtype))
        num_wrong += int(np.count_nonzero(found.astype(np.float64) != expected))
    return num_wrong


def _integers(rank: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((_SEED, rank)).integers(-_MAX_INTEGER, _MAX_INTEGER, _NUM_CHECKED, endpoint=True)


def time_all_reduces(collectives: Collectives) -> dict[int, float]:
    """Return the seconds of an all-reduce by its size in bytes: the median of this rank. A collective."""
    sizes = HOST_SIZES_BYTES if collectives.is_on_host else DEVICE_SIZES_BYTES
    return {size: _median_seconds(collectives.all_reduce(size), _repeats(size)) for size in (LATENCY_BYTES, *sizes)}


def time_pairs(collectives: Collectives, rank: int, pairs: Sequence[tuple[int, int]]) -> list[float | None]:
    """Return the seconds in which two ranks exchange ``PAIR_BYTES`` in both directions, by pair. A collective.

    Only one pair exchanges at a time. A rank knows the times of its own pairs.
    """
    small = collectives.all_reduce(LATENCY_BYTES)
    found: list[float | None] = []
    for pair in pairs:
        small()  # the pair before has finished
        if rank not in pair:
            found.append(None)
            continue
        exchange = collectives.exchange(pair[1] if rank == pair[0] else pair[0], PAIR_BYTES)
        found.append(None if exchange is None else _median_seconds(exchange, _PAIR_REPEATS))
    return found


def neighbours(machines: Sequence[str]) -> list[tuple[int, int]]:
    """Return the pairs of ranks of a ring: the first ranks of the machines, or all ranks of one machine.

    Args:
        machines: Machine of each rank.
    """
    ring = [machines.index(machine) for machine in dict.fromkeys(machines)]
    ring = ring if len(ring) > 1 else list(range(len(machines)))
    pairs = list(zip(ring, [*ring[1:], ring[0]], strict=True))
    return pairs[:1] if len(ring) == 2 else pairs


def bus_bytes_per_second(num_bytes: int, seconds: float, world_size: int) -> float:
    """Return the bus bandwidth of an all-reduce as NCCL's tests define it: 2 (n - 1) / n x bytes / seconds."""
    return 2 * (world_size - 1) / world_size * num_bytes / seconds


def _repeats(num_bytes: int) -> int:
    return 50 if num_bytes <= LATENCY_BYTES else 10 if num_bytes <= 1 << 20 else 5


def _median_seconds(action: Callable[[], None], repeats: int) -> float:
    seconds: list[float] = []
    for number in range(-_WARMUP, repeats):
        started = time.perf_counter()
        action()
        if number >= 0:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
