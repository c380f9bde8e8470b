"""Exact mixing, also in stages: against a scalar oracle in Python integers; counts, bounded deviation, inverse."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vorox.core.errors import ConfigError
from vorox.data.order.mixture import NEVER, Mixture, MixtureStage, MixtureStages

weights_strategy = st.lists(
    st.fractions(min_value=Fraction(1, 1000), max_value=50, max_denominator=1000), min_size=1, max_size=9
)


def oracle_draws(weights: list[Fraction], num_draws: int) -> list[tuple[int, int]]:
    """The rule as told: a weight-balanced tree walked with counters, one draw after the other, no closed form."""

    def build(sources: list[int]) -> object:
        if len(sources) == 1:
            return sources[0]
        cuts = range(1, len(sources))
        total = sum(weights[s] for s in sources)
        cut = min(cuts, key=lambda c: (abs(total - 2 * sum(weights[s] for s in sources[:c])), c))
        left = sum(weights[s] for s in sources[:cut])
        return [Fraction(left, 1) / total, 0, 0, build(sources[:cut]), build(sources[cut:])]

    tree = build(sorted(range(len(weights)), key=lambda s: (-weights[s], s)))
    drawn = [0] * len(weights)
    result: list[tuple[int, int]] = []
    for _ in range(num_draws):
        node = tree
        while isinstance(node, list):
            node[1] += 1  # draws that reached this node; the left child is owed its share of them, to the nearest
            if node[1] * node[0] - node[2] >= Fraction(1, 2):
                node[2] += 1
                node = node[3]
            else:
                node = node[4]
        assert isinstance(node, int)
        result.append((node, drawn[node]))
        drawn[node] += 1
    return result


def test_frozen_vector() -> None:
    """Never to be changed: plans name "mix/1"."""
    source, draw = Mixture([Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)]).locate(np.arange(12))
    assert source.tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0, 1]
    assert draw.tolist() == [0, 0, 1, 0, 2, 1, 3, 2, 4, 1, 5, 3]


@settings(max_examples=60, deadline=None)
@given(weights_strategy)
def test_equals_the_walk(weights: list[Fraction]) -> None:
    source, draw = Mixture(weights).locate(np.arange(200))
    assert list(zip(source.tolist(), draw.tolist(), strict=True)) == oracle_draws(weights, 200)


@settings(max_examples=60, deadline=None)
@given(weights_strategy, st.integers(0, 10**12))
def test_inverse(weights: list[Fraction], start: int) -> None:
    mixture = Mixture(weights)
    draws = np.arange(start, start + 300)
    source, source_draw = mixture.locate(draws)
    assert np.array_equal(mixture.invert(source, source_draw), draws)


@settings(max_examples=40, deadline=None)
@given(weights_strategy, st.integers(0, 3))
def test_counts_are_exact_at_every_multiple_of_the_period(weights: list[Fraction], multiple: int) -> None:
    mixture = Mixture(weights)
    total = sum(weights)
    expected = [weight / total * mixture.period * multiple for weight in weights]
    assert [Fraction(count) for count in mixture.counts(mixture.period * multiple)] == expected


def test_the_period_is_the_common_denominator() -> None:
    mixture = Mixture([Fraction("0.693584"), Fraction("0.306416")])
    assert (mixture.shares, mixture.period) == ((43349, 19151), 62_500)
    source, _ = mixture.locate(np.arange(62_500))
    assert np.bincount(source).tolist() == [43349, 19151]


@pytest.mark.parametrize("num_sources", [1, 2, 3, 20, 200])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_prefixes_deviate_by_less_than_one_and_a_half(num_sources: int, seed: int) -> None:
    generator = np.random.Generator(np.random.Philox(seed))
    weights = [Fraction(int(value), 1000) for value in generator.integers(1, 100_000, num_sources)]
    source, source_draw = Mixture(weights).locate(np.arange(30_000))
    total = sum(weights)
    for index, weight in enumerate(weights):
        chosen = source == index
        counts = np.cumsum(chosen)
        assert np.array_equal(source_draw[chosen], np.arange(np.count_nonzero(chosen)))
        assert abs(counts - np.arange(1, 30_001) * float(weight / total)).max() < 1.5


@settings(max_examples=40, deadline=None)
@given(weights_strategy, st.integers(0, 2000))
def test_counts_agree_with_locate(weights: list[Fraction], num_draws: int) -> None:
    mixture = Mixture(weights)
    source, _ = mixture.locate(np.arange(num_draws))
    assert mixture.counts(num_draws) == tuple(np.bincount(source, minlength=len(weights)).tolist())


@pytest.mark.parametrize("denominator", [2**30, 2**31, 10**17])
def test_weights_beyond_64_bit_products_stay_exact(denominator: int) -> None:
    """A float such as 0.1 + 0.2, written out, has 17 digits; 10^12 draws of it do not fit into int64 products."""
    weights = [Fraction(denominator // 3, denominator), Fraction(1, denominator), Fraction(1, 7)]
    mixture = Mixture(weights)
    start = 10**12
    source, source_draw = mixture.locate(np.arange(start, start + 100))
    assert np.array_equal(mixture.invert(source, source_draw), np.arange(start, start + 100))
    before = mixture.counts(start)
    total = sum(weights)
    assert sum(before) == start
    assert all(abs(count - start * w / total) < 1.5 for count, w in zip(before, weights, strict=True))
    for index in range(3):
        assert source_draw[source == index].tolist() == [before[index] + n for n in range(sum(source == index))]


@pytest.mark.parametrize("period", [2**30 - 1, 2**30 + 1, 2**31 + 1, 2**32 - 1])
def test_no_product_overflows_at_the_largest_draws_of_a_period(period: int) -> None:
    """Where 64-bit products end lies between 2^30 and 2^32; ``counts`` computes with Python's integers."""
    left = period // 2 + 1
    mixture = Mixture([Fraction(left), Fraction(period - left)])
    assert mixture.period == period
    draws = np.array([0, 1, period // 2, period - 2, period - 1, 7 * period - 1])
    source, source_draw = mixture.locate(draws)
    before = [mixture.counts(draw) for draw in draws.tolist()]
    after = [mixture.counts(draw + 1) for draw in draws.tolist()]
    expected = [[one[index] for index in (0, 1)].index(1) for one in np.subtract(after, before).tolist()]
    assert source.tolist() == expected
    assert source_draw.tolist() == [count[index] for count, index in zip(before, expected, strict=True)]
    assert np.array_equal(mixture.invert(source, source_draw), draws)


def test_proportional_weights_are_the_same_mixture() -> None:
    first = Mixture([Fraction(1, 3), Fraction(2, 3)]).locate(np.arange(99))
    second = Mixture([Fraction(10), Fraction(20)]).locate(np.arange(99))
    assert np.array_equal(first, second)


@pytest.mark.parametrize(
    ("weights", "message"),
    [([], "no source"), ([Fraction(1), Fraction(0)], "data.sources.1.weight"), ([Fraction(-1)], "not above zero")],
)
def test_impossible_weights_are_refused(weights: list[Fraction], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mixture(weights)


def test_stages_with_sources_that_rest_and_come_back() -> None:
    thirds = {0: Fraction(2, 3), 2: Fraction(1, 3)}
    stages = MixtureStages(
        [MixtureStage(0, {0: Fraction(1)}), MixtureStage(5, thirds), MixtureStage(11, {1: Fraction(1)})], 3
    )
    source, draw = stages.locate(np.arange(14))
    assert source.tolist()[:5] == [0] * 5
    assert source.tolist()[11:] == [1] * 3
    for index in range(3):
        assert draw[source == index].tolist() == list(range(int((source == index).sum())))
    assert np.array_equal(stages.invert(source, draw), np.arange(14))
    assert [stages.counts(end) for end in range(15)] == [
        tuple(np.bincount(source[:end], minlength=3).tolist()) for end in range(15)
    ]
    assert stages.invert(np.array([0, 2], np.int32), np.array([9, 2])).tolist() == [NEVER, NEVER]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_stages_invert_and_count(data: st.DataObject) -> None:
    number = data.draw(st.integers(1, 6))
    weight = st.fractions(Fraction(1, 1000), 50, max_denominator=1000)
    starts = [0, *sorted(data.draw(st.sets(st.integers(1, 400), max_size=4)))]
    stages = MixtureStages(
        [
            MixtureStage(
                at, data.draw(st.dictionaries(st.integers(0, number - 1), weight, min_size=1, max_size=number))
            )
            for at in starts
        ],
        number,
    )
    draws = np.arange(600)
    source, draw = stages.locate(draws)
    assert np.array_equal(stages.invert(source, draw), draws)
    for end in [*starts, *(start + 1 for start in starts), 17, 401, 600]:
        assert stages.counts(end) == tuple(np.bincount(source[:end], minlength=number).tolist())
    far = np.arange(10**12, 10**12 + 100)
    assert np.array_equal(stages.invert(*stages.locate(far)), far)


def test_twenty_sources_deviate_by_less_than_two_draws_over_a_million() -> None:
    worst = 0.0
    for seed in (1, 2):
        generator = np.random.Generator(np.random.Philox(seed))
        weights = [Fraction(int(value), 1000) for value in generator.integers(1, 100_000, 20)]
        source, _ = Mixture(weights).locate(np.arange(1_000_000))
        total, draws = sum(weights), np.arange(1, 1_000_001)
        for index, weight in enumerate(weights):
            deviation = np.cumsum(source == index) - draws * float(weight / total)
            worst = max(worst, float(np.abs(deviation).max()))
    assert worst < 2  # measured: 1.25
