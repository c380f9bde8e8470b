"""The ceiling by a machine whose speed we know."""

from __future__ import annotations

from collections import Counter

import pytest

from vorox.core.errors import NumericalError
from vorox.runtime.matmul_peak import MAX_ELEMENTS, MatmulShape, measure_matmul_peak, training_shapes


def test_a_weighted_harmonic_mean() -> None:
    fast, slow = MatmulShape(10, 10, 10), MatmulShape(1, 10, 10)  # 2,000 and 200 FLOP
    seconds = {(10, 10, 10): 2.0, (1, 10, 10): 1.0}
    calls: Counter[tuple[int, int, int]] = Counter()

    def matmul(m: int, k: int, n: int) -> float:
        calls[m, k, n] += 1
        return seconds[m, k, n] * (100.0 if calls[m, k, n] == 2 else 1.0)  # one outlier: the median ignores it

    ceiling = measure_matmul_peak({fast: 1, slow: 3}, matmul, warmup_seconds=0.0, repeats=5)
    assert ceiling.seconds_per_step == 2.0 + 3 * 1.0
    assert ceiling.flops_per_second == (2000 + 3 * 200) / 5.0
    assert ceiling.rates == {fast: 1000.0, slow: 200.0}
    assert set(calls.values()) == {6}, "one warm-up round and five timed ones"


def test_warm_up_takes_its_time() -> None:
    now = [0.0]

    def matmul(m: int, k: int, n: int) -> float:
        now[0] += 1.0
        return 1.0

    measure_matmul_peak({MatmulShape(1, 1, 1): 1}, matmul, warmup_seconds=10.0, repeats=3, clock=lambda: now[0])
    assert now[0] == 13.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_time_that_gives_no_rate_is_refused(seconds: float) -> None:
    with pytest.raises(NumericalError, match=r"\[2, 3\] by \[3, 4\]"):
        measure_matmul_peak({MatmulShape(2, 3, 4): 1}, lambda m, k, n: seconds, warmup_seconds=0.0)


def test_shapes_of_a_step_do_six_flops_per_weight_and_position() -> None:
    weights = [(768, 256), (256, 256), (4096, 256), (256, 256)]
    shapes = training_shapes(weights, num_positions=100)
    flops = sum(shape.flops * count for shape, count in shapes.items())
    assert flops == 6 * sum(a * b for a, b in weights) * 100
    assert shapes[MatmulShape(100, 256, 256)] == 4, "two layers of the same shape, forward and gradient of the input"


def test_a_large_product_is_measured_at_a_smaller_shape() -> None:
    """The logits of 32,768 positions would take 6.6 GB; a machine of constant speed measures the same rate."""
    shape, most = MatmulShape(32768, 768, 50257), [0]

    def matmul(m: int, k: int, n: int) -> float:
        most[0] = max(most[0], m * k, k * n, m * n)
        return 2 * m * k * n / 1e12

    found = measure_matmul_peak({shape: 2}, matmul, warmup_seconds=0.0, repeats=3)
    assert MAX_ELEMENTS / 4 < most[0] <= MAX_ELEMENTS
    assert found.flops_per_second == pytest.approx(1e12)
    assert found.seconds_per_step == pytest.approx(2 * shape.flops / 1e12)


def test_no_round_starts_after_enough_seconds() -> None:
    now, calls = [0.0], [0]

    def matmul(m: int, k: int, n: int) -> float:
        calls[0] += 1
        now[0] += 1.0
        return 1.0

    shapes = {MatmulShape(1, 1, 1): 1, MatmulShape(2, 2, 2): 1}
    measure_matmul_peak(shapes, matmul, warmup_seconds=0.0, repeats=5, enough_seconds=5.0, clock=lambda: now[0])
    assert calls[0] == 6, "one round of warm-up, and two timed ones: the third would start after 6 s"
    measure_matmul_peak(shapes, matmul, warmup_seconds=0.0, repeats=5, enough_seconds=0.0, clock=lambda: now[0])
    assert calls[0] == 6 + 4, "one is timed in any case"
