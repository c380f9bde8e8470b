"""The budget: measured on a clock that we turn by hand."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from numpy_engine import NumpyEngine
from tiny_runs import configuration, run, use_numpy_engine
from vorox.core.errors import ConfigError
from vorox.planning.time_limit import check_minutes
from vorox.training import time_budget
from vorox.training.steps.schedule import Schedule, horizon
from vorox.training.time_budget import Costs, fit_warmup, measure, steps_within, with_num_steps


class Clockwork:
    """An engine whose first step takes 5 s, every other 0.4 s, and a validation batch 0.1 s."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0

    def train_step(self, batch: Any, **kwargs: float) -> Clockwork:
        self.now += 5.0 if self.steps == 0 else 0.4
        self.steps += 1
        return self

    def fetch(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def eval_step(self, batch: Any) -> None:
        self.now += 0.1


def test_measures_what_a_run_costs() -> None:
    engine = Clockwork()
    costs = measure(
        engine, itertools.repeat(None), [None, None], 7, lr=0.1, clock=lambda: engine.now  # type: ignore[arg-type]
    )  # fmt: skip
    assert costs.step_seconds == pytest.approx(0.4)
    assert costs.evaluation_seconds == pytest.approx(0.7)
    assert costs.startup_seconds == pytest.approx(4.6)
    assert engine.steps == 1 + 2 + 5, "the first, half a second to warm up, then two seconds' worth"


def test_without_validation() -> None:
    engine = Clockwork()
    costs = measure(engine, itertools.repeat(None), [], 0, lr=0.1, clock=lambda: engine.now)  # type: ignore[arg-type]
    assert costs.evaluation_seconds == 0.0


def test_steps_and_their_validations_fit(tmp_path: Path) -> None:
    config = configuration(tmp_path, ["eval.every_steps=10"])
    costs = Costs(startup_seconds=4.0, step_seconds=0.5, evaluation_seconds=2.0)
    steps = steps_within(100.0, costs, config)
    spent = 4.0 + steps * 0.5 + (steps / 10 + 1) * 2.0
    assert 95.0 < spent <= 96.0, "with 4% kept back"
    assert steps_within(0.1, costs, config) == 1
    assert steps_within(-5.0, costs, config) == 1
    only_end = configuration(tmp_path, ["eval.every_steps=null"])
    assert steps_within(100.0, costs, only_end) == int((96 - 4 - 2) / 0.5)
    both_ends = configuration(tmp_path, ["eval.every_steps=null", "eval.at_start=true"])
    assert steps_within(100.0, costs, both_ends) == int((96 - 4 - 4) / 0.5)


def test_the_length_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    config = configuration(tmp_path, ["train.num_steps=null", "train.num_epochs=2.5"])
    fixed = with_num_steps(config, 33)
    assert (fixed.train.num_steps, fixed.train.num_epochs, fixed.train.num_tokens) == (33, None, None)
    assert with_num_steps(fixed, 33) == fixed
    assert fixed.data == config.data


@pytest.mark.parametrize(
    ("settings", "num_steps", "expected"),
    [
        (["schedule.warmup_steps=3"], 6, 3),
        (["schedule.warmup_steps=3"], 5, 0),
        (["schedule.warmup_steps=3000"], 84, 8),
        (["schedule.warmup_steps=null", "schedule.warmup_tokens=6400"], 120, 12),  # 100 steps of 64 tokens
        (["schedule.warmup_steps=null", "schedule.warmup_tokens=6400"], 200, None),
        (["schedule.warmup_steps=null", "schedule.warmup_fraction=0.5"], 1000, 100),  # 5,000 steps of the dataset below
        (["schedule.warmup_steps=null", "schedule.warmup_fraction=0.05"], 1000, None),
    ],
)
def test_a_warmup_that_would_take_most_of_the_time_is_a_tenth_of_it(
    tmp_path: Path, settings: list[str], num_steps: int, expected: int | None
) -> None:
    config = with_num_steps(configuration(tmp_path, settings), num_steps)
    fitted, note = fit_warmup(config, 640_000)
    assert fitted.schedule.warmup_steps == expected
    assert (note is None) == (fitted == config)
    if note is not None:
        length = horizon(fitted, num_train_rows=0, full_dataset_tokens=640_000)
        schedule = Schedule.from_config(fitted.schedule, fitted.optimizer, length)
        assert max(map(schedule.lr, range(num_steps))) == fitted.optimizer.lr, "the peak is reached"
        assert schedule.lr(num_steps - 1) < fitted.optimizer.lr, "and left"
        assert fit_warmup(fitted, 640_000) == (fitted, None)


@pytest.mark.parametrize("minutes", [0, -1, float("nan"), float("inf")])
def test_impossible_times_are_refused(minutes: float) -> None:
    with pytest.raises(ConfigError, match="not a valid training time"):
        check_minutes(minutes)
    assert check_minutes(0.5) == 30.0


def test_a_real_measurement_leaves_the_engine_of_the_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    monkeypatch.setattr(time_budget, "steps_within", lambda seconds, costs, config: 12)
    made: list[NumpyEngine] = []
    original = NumpyEngine.__init__
    monkeypatch.setattr(NumpyEngine, "__init__", lambda self, *a, **k: (made.append(self), original(self, *a, **k))[1])
    timed = run(configuration(tmp_path), minutes=1.0)
    plain = run(configuration(tmp_path), resume_from="never")
    assert len(made) == 3
    assert (timed.fingerprint, timed.progress.chain) == (plain.fingerprint, plain.progress.chain)


def test_one_pass_is_enough_even_where_more_are_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    monkeypatch.setattr(time_budget, "steps_within", lambda seconds, costs, config: 3)
    config = configuration(tmp_path, ["data.sources.0.max_epochs=1", "train.global_batch_sequences=64"])
    assert run(config, minutes=1.0).progress.step == 3
