"""Two runs side by side, by hand."""

from __future__ import annotations

import math

from vorox.experiments.comparison import ComparedMetric, compare_metrics


def test_last_and_best_of_each_metric() -> None:
    first = {1: {"loss": 5.0, "accuracy": 0.1}, 2: {"loss": math.nan, "accuracy": 0.3}, 3: {"loss": 4.0}}
    second = {2: {"loss": 6.0, "learning_rate": 0.1, "of_another_version": 1.0}}
    assert compare_metrics(first, second) == [
        ComparedMetric("accuracy", ((2, 0.3), None), ((2, 0.3), None)),
        ComparedMetric("learning_rate", (None, (2, 0.1)), (None, None)),
        ComparedMetric("loss", ((3, 4.0), (2, 6.0)), ((3, 4.0), (2, 6.0))),
        ComparedMetric("of_another_version", (None, (2, 1.0)), (None, None)),
    ]


def test_higher_is_better_where_it_is_and_the_first_of_equals_counts() -> None:
    (row,) = compare_metrics(
        {1: {"accuracy": 0.2}, 2: {"accuracy": 0.4}, 3: {"accuracy": 0.4}, 4: {"accuracy": 0.1}}, {}
    )
    assert row.best == ((2, 0.4), None)
    assert row.last == ((4, 0.1), None)


def test_activations_are_left_out() -> None:
    assert compare_metrics({1: {"activation/3/mlp/std": 1.0}}, {}) == []
