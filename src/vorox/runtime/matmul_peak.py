"""Matmul peak: the rate that a device reaches on the matrix shapes of a model.

In: matrix shapes, and a function that times one multiplication in the engine's framework and precision. Out: the rate
over all shapes, weighted by how often a step needs each: an upper bound of the speed of a step. It is a fairer
comparison between machines than the data sheet, and it reflects throttled clocks.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from vorox.core.errors import NumericalError

MIN_REPEATS = 20
MAX_ELEMENTS, MAX_ELEMENTS_ACCELERATOR = 1 << 24, 1 << 26
"""Largest matrix that is measured: larger products run at the same rate, and would take more memory than a step."""


@dataclass(frozen=True, slots=True, order=True)
class MatmulShape:
    """``[m, k] @ [k, n]``."""

    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n


def bounded_shape(shape: MatmulShape, max_elements: int = MAX_ELEMENTS) -> MatmulShape:
    """Return the shape with its largest dimensions lowered until no matrix has more elements than that."""
    m, k, n = shape.m, shape.k, shape.n
    while max(m * k, k * n, m * n) > max_elements:
        largest = max(m, k, n)
        m, k, n = (-(-size // 2) if size == largest else size for size in (m, k, n))
    return MatmulShape(m, k, n)


@dataclass(frozen=True, slots=True)
class MatmulPeak:
    """A measurement of the matmul peak.

    Attributes:
        flops_per_second: FLOPs of all multiplications of a step over their time: the weighted harmonic mean.
        seconds_per_step: Time of all multiplications of a step.
        rates: FLOP/s of each shape.
    """

    flops_per_second: float
    seconds_per_step: float
    rates: Mapping[MatmulShape, float]


def training_shapes(weights: Iterable[tuple[int, int]], num_positions: int) -> Counter[MatmulShape]:
    """Count the multiplications of one forward and backward pass over linear layers.

    Args:
        weights: ``(out, in)`` of every weight matrix, the head once.
        num_positions: Rows times positions of a micro-batch.

    Returns:
        The count of each shape: forward, input gradient and weight gradient.
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
    enough_seconds: float = math.inf,
    max_elements: int = MAX_ELEMENTS,
    clock: Callable[[], float] = time.perf_counter,
) -> MatmulPeak:
    """Time all shapes round-robin, so that they see the same clocks and load, and take medians.

    Of a product with larger matrices than ``max_elements``, the rate is measured at a smaller shape.

    Args:
        shapes: Count of each shape in a step.
        matmul: Multiplies ``[m, k] @ [k, n]`` of normal random numbers in the run's precision, waits for the result,
            and returns the seconds, without allocation.
        warmup_seconds: Warm-up before timing.
        repeats: Timed rounds.
        enough_seconds: No further round starts after that many seconds of warm-up and timing; one is always timed.
        max_elements: Elements of the largest matrix that is multiplied.
        clock: A monotonic clock in seconds.

    Raises:
        NumericalError: A measured time is not positive.
    """
    order = sorted(shapes)
    assert order, "no shapes to measure"

    def seconds_of(shape: MatmulShape) -> float:
        small = bounded_shape(shape, max_elements)
        return matmul(small.m, small.k, small.n) * (shape.flops / small.flops)

    started = clock()
    while True:
        for shape in order:
            seconds_of(shape)
        if clock() - started >= warmup_seconds:
            break
    times: dict[MatmulShape, list[float]] = {shape: [] for shape in order}
    for index in range(repeats):
        if index and clock() - started >= enough_seconds:
            break
        for shape in order:
            times[shape].append(seconds_of(shape))
    medians = {shape: statistics.median(times[shape]) for shape in order}
    for shape, seconds in medians.items():
        if not seconds > 0:
            raise NumericalError(
                f"Multiplying [{shape.m}, {shape.k}] by [{shape.k}, {shape.n}] took {seconds} s",
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
