"""The sequential test of paired differences: against its likelihood ratio by quadrature, and by simulation."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from vorox.experiments.paired_test import (
    EFFECT_VARIANCE,
    FEWEST_PAIRS,
    fewest_pairs,
    log_evidence,
    paired_test,
    smallest_effect,
)

NUM_CLAIMS, MOST_PAIRS, LEVEL = 2000, 20, 0.05


def ratio_by_quadrature(differences: list[float]) -> float:
    """The likelihood of differences under effects of N(0, g) over that under 0, both with the prior 1 / deviation."""
    log_sigma = np.linspace(-6, 6, 2401)[:, None]
    effect = np.linspace(-40, 40, 4001)[None, :]
    scaled = np.array(differences)[:, None, None] / np.exp(log_sigma)
    null = np.exp(-len(differences) * log_sigma - (scaled**2).sum(axis=0) / 2).sum()
    prior = np.exp(-(effect**2) / (2 * EFFECT_VARIANCE)) / math.sqrt(2 * math.pi * EFFECT_VARIANCE)
    sums, squares = scaled.sum(axis=0), (scaled**2).sum(axis=0)
    exponent = -(squares - 2 * effect * sums + len(differences) * effect**2) / 2 - len(differences) * log_sigma
    other = (np.exp(exponent) * prior).sum() * (effect[0, 1] - effect[0, 0])
    return float(other / null)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_evidence_is_the_likelihood_ratio(count: int) -> None:
    chooser = random.Random(count)
    differences = [chooser.gauss(0.8, 1.0) for _ in range(count)]
    assert math.exp(log_evidence(differences)) == pytest.approx(ratio_by_quadrature(differences), rel=1e-3)


@pytest.mark.parametrize("level", [0.05, 0.002])
def test_the_interval_has_the_means_that_are_not_rejected(level: float) -> None:
    chooser = random.Random()
    for count in (*range(fewest_pairs(level), 12), 40):
        differences = [chooser.gauss(3.0, chooser.uniform(0.1, 9)) for _ in range(count)]
        interval = paired_test(differences, level).interval
        assert interval is not None
        for mean in interval:
            shifted = [one - mean for one in differences]
            assert log_evidence(shifted) == pytest.approx(math.log(1 / level), rel=1e-6)


def test_scale_and_shift_of_differences() -> None:
    differences = [random.gauss(1.0, 0.3) for _ in range(9)]
    found, scaled = paired_test(differences, LEVEL), paired_test([1000 * one for one in differences], LEVEL)
    assert found.interval is not None
    assert scaled.interval == pytest.approx([1000 * one for one in found.interval])
    assert paired_test([-one for one in differences], LEVEL).interval == pytest.approx(
        [-one for one in reversed(found.interval)]
    )
    assert paired_test([0.0] * 9, LEVEL).sign == 0
    assert paired_test([], LEVEL) == paired_test([], 0.5)
    assert [paired_test([1.0, 1.1, 0.9, 1.0, 1.05][:count], LEVEL).sign for count in (1, 2, 4, 5)] == [0, 0, 0, 1]


def decided(draw: Callable[[np.random.Generator], float], seed: int) -> int:
    """How many of ``NUM_CLAIMS`` claims are decided, each stopped at once when it is."""
    generator, found = np.random.default_rng(seed), 0
    for _ in range(NUM_CLAIMS):
        differences = [draw(generator) for _ in range(MOST_PAIRS)]
        found += any(paired_test(differences[:n], LEVEL).sign for n in range(FEWEST_PAIRS, MOST_PAIRS + 1))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "most"),
    [
        (lambda g: g.normal(), LEVEL),
        (lambda g: g.standard_t(3), LEVEL),
        (lambda g: g.laplace(), LEVEL),
        (lambda g: g.uniform(-1, 1), LEVEL),
        (lambda g: g.exponential() - 1, 0.12),  # as skewed as this, the level does not hold: docs/claim.md says so
    ],
    ids=["normal", "t3", "laplace", "uniform", "exponential"],
)
def test_equal_arms_are_seldom_decided(draw: Callable[[np.random.Generator], float], most: float) -> None:
    """2,000 claims without an effect: at most the level and three standard errors of it."""
    found = decided(draw, 1) / NUM_CLAIMS
    assert found <= most + 3 * math.sqrt(most * (1 - most) / NUM_CLAIMS)


def test_an_effect_of_the_visible_size_is_seen() -> None:
    """About 0.8 of claims with the smallest visible effect are decided by their last pair."""
    for count in (6, 12):
        effect = smallest_effect(count, LEVEL)
        assert effect is not None
        generator, seen = np.random.default_rng(count), 0
        for _ in range(400):
            differences = generator.normal(effect, 1, count)
            seen += any(paired_test(list(differences[:n]), LEVEL).sign > 0 for n in range(FEWEST_PAIRS, count + 1))
        assert 0.72 < seen / 400 < 0.97


def test_too_few_pairs_decide_nothing() -> None:
    for level in (0.05, 1e-4, 1e-9):
        fewest = fewest_pairs(level)
        almost_equal = [1.0 + 1e-9 * index for index in range(fewest)]
        assert paired_test(almost_equal, level).sign == 1
        assert paired_test(almost_equal[:-1], level).sign == 0
        assert smallest_effect(fewest - 1, level) is None
