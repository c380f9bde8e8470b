"""Matmul peak: the rate that a device reaches on the matrix shapes of a model.

The ceiling is how many FLOP/s this machine does on the matrices of this model. In: shapes and a function that times one
multiplication in the engine's framework and arithmetic (an engine's matter: numpy's product says nothing about
PyTorch's). Out: the rate over all shapes, weighted by how often a step needs each, which is what a step cannot beat
however it is written. Fairer between machines than a data-sheet, and it sees a throttled clock.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from vorox.core.errors import NumericalError

MIN_REPEATS = 20


@dataclass(frozen=True, slots=True, order=True)
class MatmulShape:
    """``[m, k] @ [k, n]``."""

    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n


@dataclass(frozen=True, slots=True)
class MatmulPeak:
    """What was measured.

    Attributes:
        flops_per_second: All multiplications of a step over the time they take: the weighted harmonic mean.
        seconds_per_step: That time.
        rates: FLOP/s of each shape.
        best_flops_per_second: The fastest shape.
    """

    flops_per_second: float
    seconds_per_step: float
    rates: Mapping[MatmulShape, float]

    @property
    def best_flops_per_second(self) -> float:
        return max(self.rates.values())


def training_shapes(weights: Iterable[tuple[int, int]], num_positions: int) -> Counter[MatmulShape]:
    """The multiplications of one forward and backward pass over linear layers.

    Args:
        weights: ``(out, in)`` of every weight matrix, the head once.
        num_positions: Rows times positions of a micro-batch.

    Returns:
        How often each shape occurs: forward, gradient of the input, gradient of the weight.
    """
    shapes: Counter[MatmulShape] = Counter()
    for num_out, num_in in weights:
        shapes[MatmulShape(num_positions, num_in, num_out)] += 1
        shapes[MatmulShape(num_positions, num_out, num_in)] += 1
        shapes[MatmulShape(num_out, num_positions, num_in)] += 1
    return shapes


def measure_matmul_peak(
    shapes: Mapping[MatmulShape, int],
    matmul: Callable[[int, int, int], float],
    *,
    warmup_seconds: float = 3.0,
    repeats: int = MIN_REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> MatmulPeak:
    """Time every shape in turn, so that all see the same clocks and neighbours; medians.

    Args:
        shapes: How often a step needs each shape.
        matmul: Multiplies ``[m, k] @ [k, n]`` of normal random numbers in the run's arithmetic, waits for the result,
            and returns the seconds it took, allocation not included.
        warmup_seconds: How long to warm the device up before timing.
        repeats: Timed rounds.
        clock: Seconds that only rise.

    Raises:
        NumericalError: A time is not positive, so no rate follows from it.
    """
    order = sorted(shapes)
    assert order, "no shapes to measure"
    began = clock()
    while True:
        for shape in order:
            matmul(shape.m, shape.k, shape.n)
        if clock() - began >= warmup_seconds:
            break
    times: dict[MatmulShape, list[float]] = {shape: [] for shape in order}
    for _ in range(repeats):
        for shape in order:
            times[shape].append(matmul(shape.m, shape.k, shape.n))
    medians = {shape: statistics.median(times[shape]) for shape in order}
    for shape, seconds in medians.items():
        if not seconds > 0:
            raise NumericalError(
                f"multiplying [{shape.m}, {shape.k}] by [{shape.k}, {shape.n}] took {seconds} s",
                where="runtime/matmul_peak.py",
                hint="the timing function must wait for the result",
            )
    seconds_per_step = sum(medians[shape] * shapes[shape] for shape in order)
    flops = sum(shape.flops * shapes[shape] for shape in order)
    return MatmulPeak(
        flops_per_second=flops / seconds_per_step,
        seconds_per_step=seconds_per_step,
        rates={shape: shape.flops / medians[shape] for shape in order},
    )
