"""The schedule against values worked out by hand, and its laws over random settings."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vorox.core.batch_sizes import BatchSizes
from vorox.core.config.schema_fields import LENGTHS, schema_fields
from vorox.core.errors import ConfigError
from vorox.core.schema import OptimizerConfig, RunConfig, ScheduleConfig
from vorox.core.schema.optimizer import BUILT_IN_SCHEDULES
from vorox.training.steps.schedule import Horizon, Schedule, holding_overrides, horizon, learning_rate_warnings


def configuration(train: dict[str, object], schedule: dict[str, object] | None = None) -> RunConfig:
    return RunConfig.model_validate(
        {
            "data": {"sources": [{"name": "text", "format": "txt"}], "sequence_length_tokens": 100},
            "train": {"global_batch_sequences": 10, "micro_batch_sequences": 10, **train},
            "schedule": schedule or {},
        }
    )


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({"num_steps": 7}, 7),
        ({"num_tokens": 1}, 1),
        ({"num_tokens": 5_000}, 5),
        ({"num_tokens": 5_001}, 6),
        ({"num_epochs": 1.0}, 7),  # 65 rows, 10 a step
        ({"num_epochs": 0.1}, 1),
        ({"num_epochs": 2.0}, 13),
    ],
)
def test_length_in_steps(train: dict[str, object], expected: int) -> None:
    found = horizon(configuration(train), num_train_rows=65, full_dataset_tokens=6_500)
    assert found.total_steps == expected
    assert found.tokens_per_step == 1_000


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({}, 0),
        ({"warmup_steps": 3}, 3),
        ({"warmup_tokens": 2_001}, 3),
        ({"warmup_fraction": 0.1}, 5),  # of the full dataset, not of the rows that are cached
    ],
)
def test_warmup_in_steps(schedule: dict[str, object], expected: int) -> None:
    config = configuration({"num_steps": 20}, schedule)
    assert horizon(config, num_train_rows=10, full_dataset_tokens=50_000).warmup_steps == expected


def test_lengths_and_warmups_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exactly one length; 2 are set"):
        horizon(configuration({"num_steps": 1, "num_tokens": 5}), num_train_rows=1, full_dataset_tokens=1)
    with pytest.raises(ConfigError, match="exactly one length; 0 are set"):
        horizon(configuration({}), num_train_rows=1, full_dataset_tokens=1)
    config = configuration({"num_steps": 1}, {"warmup_steps": 1, "warmup_tokens": 5})
    with pytest.raises(ConfigError, match="More than one warm-up"):
        horizon(config, num_train_rows=1, full_dataset_tokens=1)


@pytest.mark.parametrize("name", [one for one in schema_fields()["schedule.name"].choices if isinstance(one, str)])
def test_a_schedule_falls_as_its_row_says(name: str) -> None:
    length, facts = Horizon(100, 10, 1), BUILT_IN_SCHEDULES[name]
    schedule = Schedule.from_config(ScheduleConfig(name=name), OptimizerConfig(lr=1.0), length)
    assert (schedule.lr(99) < schedule.lr(9)) == facts.falls
    assert (schedule.lr(9) < 1.0) == facts.starts_low
    assert (holding_overrides(schedule.config, length) != "") == facts.falls


def test_a_length_is_read_from_each_of_its_keys() -> None:
    for key in LENGTHS:
        config = configuration({key.removeprefix("train."): 3})
        assert horizon(config, num_train_rows=10**6, full_dataset_tokens=10**9).total_steps > 0


def test_warns_when_the_warmup_outlasts_the_run() -> None:
    assert Horizon(10, 9, 1).warning is None
    assert Horizon(10, 0, 1).warning is None
    assert "10 steps, the run only 10" in str(Horizon(10, 10, 1).warning)
    assert Horizon.from_json(Horizon(10, 3, 5).to_json()) == Horizon(10, 3, 5)


def schedule(total_steps: int, warmup_steps: int, peak_lr: float = 1.0, **settings: object) -> Schedule:
    return Schedule(ScheduleConfig.model_validate(settings), peak_lr, 0.5, total_steps, warmup_steps)


def test_cosine_by_hand() -> None:
    cosine = schedule(9, 4, name="cosine", min_lr_fraction=0.2)
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2 + 0.4 * (1 - math.sqrt(0.5)), 0.2]
    assert [cosine.lr(step) for step in range(9)] == pytest.approx(expected, abs=1e-15)
    assert cosine.lr(1_000) == pytest.approx(0.2)


def test_linear_wsd_and_constant_by_hand() -> None:
    linear = schedule(7, 2, name="linear", min_lr_fraction=0.0)
    assert [linear.lr(step) for step in range(7)] == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])
    wsd = schedule(10, 2, name="wsd", min_lr_fraction=0.1, decay_fraction=0.3)
    assert [wsd.lr(step) for step in range(10)] == pytest.approx([0.5, *[1.0] * 6, 0.7, 0.4, 0.1])
    constant = schedule(5, 1, name="constant")
    assert [constant.lr(step) for step in range(5)] == [1.0] * 5
    assert schedule(10, 0, name="wsd", decay_fraction=0.0).lr(9) == 1.0


def test_weight_decay_by_hand() -> None:
    assert schedule(5, 3).weight_decay(4) == 0.5
    linear = schedule(5, 3, weight_decay="linear", final_weight_decay_fraction=2.0)
    assert [linear.weight_decay(step) for step in range(5)] == pytest.approx([0.5, 0.625, 0.75, 0.875, 1.0])
    cosine = schedule(3, 0, weight_decay="cosine")
    assert [cosine.weight_decay(step) for step in range(3)] == pytest.approx([0.5, 0.25, 0.0])


@settings(deadline=None, max_examples=200)
@given(
    total=st.integers(1, 300),
    warmup=st.integers(0, 400),
    name=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    final=st.floats(0, 1),
    decay=st.floats(0, 1),
)
def test_rises_then_never_rises_again(total: int, warmup: int, name: str, final: float, decay: float) -> None:
    subject = schedule(total, warmup, name=name, min_lr_fraction=final, decay_fraction=decay)
    rates = [subject.lr(step) for step in range(total)]
    assert all(0 <= rate <= 1.0 + 1e-12 for rate in rates)
    assert all(a < b for a, b in itertools.pairwise(rates[:warmup]))
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(rates[warmup:]))
    if warmup < total - 1 and name in {"cosine", "linear"}:
        assert rates[-1] == pytest.approx(final, abs=1e-12)
    again = schedule(total, warmup, name=name, min_lr_fraction=final, decay_fraction=decay)
    assert rates[::-1] == [again.lr(step) for step in reversed(range(total))]


def test_an_epoch_of_a_part_of_the_dataset() -> None:
    train = {"num_epochs": 2.0, "epoch_dataset_fraction": 0.8}  # 1.6 x 65 rows, 10 a step
    assert horizon(configuration(train), num_train_rows=65, full_dataset_tokens=6_500).total_steps == 11


def test_a_cache_that_is_too_small_for_the_warm_up() -> None:
    length = Horizon(100, 30, 1_000, 1_000_000)
    assert length.cache_warning(300, BatchSizes(10)) is None
    assert "30 steps is computed from the full dataset of about 1,000,000 tokens" in str(
        length.cache_warning(299, BatchSizes(10))
    )
    assert Horizon(100, 30, 1_000, 10_000).cache_warning(100, BatchSizes(10)) is None, "all of the text is cached"
    assert Horizon.from_json(length.to_json()) == length


def test_a_step_that_is_larger_than_the_text_is_said() -> None:
    length = Horizon(total_steps=2, warmup_steps=0, tokens_per_step=4_000_000)
    (warning,) = length.warnings(2_000_000)
    assert "4,000,000" in warning
    assert "data.sequence_length_tokens" in warning
    assert length.warnings(4_000_000) == []


def test_many_passes_over_the_text_are_said() -> None:
    length = Horizon(total_steps=100, warmup_steps=0, tokens_per_step=10)
    assert length.warnings(100) == [], "ten passes"
    (warning,) = length.warnings(10)
    assert "100 times" in warning
    assert "train.num_steps" in warning


@pytest.mark.parametrize(("rate", "meant"), [(2e5, "2e-5"), (1e9, "1e-9"), (3.5e4, "3.5e-4"), (3, "3e-4")])
def test_a_learning_rate_above_1_is_named_with_the_likely_slip(rate: float, meant: str) -> None:
    (said,) = learning_rate_warnings(OptimizerConfig(lr=rate))
    assert said.endswith(f"set optimizer.lr={meant}")
    (said,) = learning_rate_warnings(OptimizerConfig(name="muon", muon_lr=rate))
    assert said.endswith(f"set optimizer.muon_lr={meant}")
    assert not learning_rate_warnings(OptimizerConfig(muon_lr=rate)), "without muon it has no effect"
    assert not learning_rate_warnings(OptimizerConfig(lr=1))
