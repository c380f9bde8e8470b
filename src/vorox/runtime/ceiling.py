"""What bounds the speed of a device: its data-sheet peak, and the matmul ceiling that it really reaches.

The ceiling is how many FLOP/s this machine does on the matrices of this model. In: shapes and a function that times one
multiplication in the engine's framework and arithmetic (an engine's matter: numpy's product says nothing about
PyTorch's). Out: the rate over all shapes, weighted by how often a step needs each, which is what a step cannot beat
however it is written. Fairer between machines than a data-sheet, and it sees a throttled clock.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from vorox.core.errors import NumericalError

MIN_REPEATS = 20

Arithmetic = Literal["bf16", "fp16", "tf32", "fp32"]
"""Number format of the products; sums are fp32."""

_PEAKS: tuple[tuple[str, Mapping[Arithmetic, float]], ...] = (
    (r"\bGB200\b", {"bf16": 2500e12, "fp16": 2500e12, "tf32": 1250e12, "fp32": 80e12}),
    (r"\bB200\b", {"bf16": 2250e12, "fp16": 2250e12, "tf32": 1125e12, "fp32": 75e12}),
    (r"\bH100 PCIe\b", {"bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "fp32": 51.2e12}),
    (r"\bH100 NVL\b", {"bf16": 835.5e12, "fp16": 835.5e12, "tf32": 417.7e12, "fp32": 60e12}),
    (r"\b(?:GH200|H200|H100|H800)\b", {"bf16": 989.4e12, "fp16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12}),
    (r"\b(?:A100|A800)\b", {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12}),
    (r"\bL40S\b", {"bf16": 362e12, "fp16": 362e12, "tf32": 183e12, "fp32": 91.6e12}),
    (r"\bL4\b", {"bf16": 121e12, "fp16": 121e12, "tf32": 60e12, "fp32": 30.3e12}),
    (r"\bRTX A6000\b", {"bf16": 154.8e12, "fp16": 154.8e12, "tf32": 77.4e12, "fp32": 38.7e12}),
    (r"\bA10\b", {"bf16": 125e12, "fp16": 125e12, "tf32": 62.5e12, "fp32": 31.2e12}),
    (r"\bRTX 5090\b", {"bf16": 209.5e12, "fp16": 209.5e12, "tf32": 104.8e12, "fp32": 104.8e12}),
    (r"\bRTX 4090\b", {"bf16": 165.2e12, "fp16": 165.2e12, "tf32": 82.6e12, "fp32": 82.6e12}),
    (r"\bRTX 3090\b", {"bf16": 71e12, "fp16": 71e12, "tf32": 35.6e12, "fp32": 35.6e12}),
    (r"\bRTX 3080\b", {"bf16": 59.5e12, "fp16": 59.5e12, "tf32": 29.8e12, "fp32": 29.8e12}),
    (r"\bRTX 3070\b", {"bf16": 40.6e12, "fp16": 40.6e12, "tf32": 20.3e12, "fp32": 20.3e12}),
    (r"\bV100\b", {"fp16": 125e12, "fp32": 15.7e12}),
    (r"\bT4\b", {"fp16": 65e12, "fp32": 8.1e12}),
)
"""Dense peaks from the makers' data sheets, FLOP/s; consumer cards with fp32 sums, as PyTorch uses them. A name that
could mean several cards (laptop and Ti variants) is in no row."""


def peak_flops_per_second(device_name: str, arithmetic: Arithmetic) -> float | None:
    """Data-sheet peak of one device; ``None`` if we do not know it, which no guess replaces.

    Args:
        device_name: As the driver says it, for example ``NVIDIA H200``.
        arithmetic: Number format of the products.
    """
    if re.search(r"\b(?:Laptop|Max-Q|Ti|SUPER|D)\b", device_name):
        return None
    for pattern, peaks in _PEAKS:
        if re.search(pattern, device_name):
            return peaks.get(arithmetic)
    return None


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
class Ceiling:
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


def measure_ceiling(
    shapes: Mapping[MatmulShape, int],
    matmul: Callable[[int, int, int], float],
    *,
    warmup_seconds: float = 3.0,
    repeats: int = MIN_REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> Ceiling:
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
                where="runtime/ceiling.py",
                hint="the timing function must wait for the result",
            )
    seconds_per_step = sum(medians[shape] * shapes[shape] for shape in order)
    flops = sum(shape.flops * shapes[shape] for shape in order)
    return Ceiling(
        flops_per_second=flops / seconds_per_step,
        seconds_per_step=seconds_per_step,
        rates={shape: shape.flops / medians[shape] for shape in order},
    )
