"""What another save interval would have gained, against the same run trained again with it, under the same kills.

The loop, its saves and its resumes are the real ones, under a virtual clock: a step, a save and a start take virtual
seconds, and an attempt is killed at a virtual moment.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vorox.run
from numpy_engine import NumpyEngine
from tiny_runs import Killed, NumpyBackend, configuration, run, use_clock
from vorox.records import log, run_record
from vorox.records.step_times import StepTimes
from vorox.training.checkpoints.writer import CheckpointWriter
from vorox.training.loop import session
from vorox.training.reports.run_time import RunTime, account
from vorox.training.reports.save_intervals import SaveIntervals

START = 1.7e9
STEPS = 120


@dataclass
class World:
    """Virtual time, and what takes how much of it."""

    seed: int
    now: float = START
    kill_at: float = float("inf")
    save_seconds: float = 0.0
    step_seconds: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        chooser = random.Random(self.seed)
        self.save_seconds = chooser.uniform(0.5, 4.0)
        self.step_seconds = {step: chooser.uniform(0.8, 1.2) for step in range(1, STEPS + 1)}

    def spend(self, seconds: float) -> None:
        """Let time pass; die on the way if the kill comes first."""
        self.now += seconds
        if self.now >= self.kill_at:
            self.now = self.kill_at
            raise Killed

    def time_stamp(self) -> str:
        return datetime.fromtimestamp(self.now, UTC).isoformat(timespec="microseconds")


def live_in(world: World, patch: pytest.MonkeyPatch) -> None:
    step, save, create = NumpyEngine.train_step, CheckpointWriter.save, NumpyBackend.create

    def train_step(self: NumpyEngine, batch: Any, **arguments: Any) -> Any:
        world.spend(world.step_seconds[batch.step + 1])
        return step(self, batch, **arguments)

    def slow_save(self: CheckpointWriter, *arguments: Any, **named: Any) -> None:
        world.spend(world.save_seconds)
        save(self, *arguments, **named)

    def slow_create(self: NumpyBackend, *arguments: Any) -> NumpyEngine:
        world.spend(5.0)
        return create(self, *arguments)

    use_clock(patch, lambda: world.now)
    patch.setattr(session, "StepTimes", functools.partial(StepTimes, clock=lambda: world.now))
    patch.setattr(vorox.run, "time", SimpleNamespace(time=lambda: world.now, perf_counter=lambda: world.now))
    for module in (log, run_record):
        patch.setattr(module, "time_stamp", world.time_stamp)
    patch.setattr(vorox.run.backends, "load", lambda name: NumpyBackend())
    patch.setattr(NumpyEngine, "train_step", train_step)
    patch.setattr(CheckpointWriter, "save", slow_save)
    patch.setattr(NumpyBackend, "create", slow_create)


def train(directory: Path, seed: int, every_steps: int) -> RunTime:
    """Train to the end under the kills of a seed, which come as long after the start of each attempt."""
    chooser, world = random.Random(seed + 1000), World(seed)
    config = configuration(directory, [
        f"train.num_steps={STEPS}", f"checkpoint.every_steps={every_steps}", "checkpoint.asynchronous=false",
        "eval.every_steps=null", "eval.at_end=false", "log.every_steps=100",
    ])  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        live_in(world, patch)
        for life in [chooser.uniform(20.0, 60.0) for _ in range(3)] + [float("inf")]:
            world.kill_at = world.now + life
            try:
                outcome = run(config, launched_at=world.now)
            except Killed:
                world.now += chooser.uniform(1.0, 30.0)
                continue
            return account(outcome.run_directory, now=world.now)
    raise AssertionError("the last life has no kill")


@pytest.mark.parametrize("_", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 5))])
def test_the_predicted_goodput_is_that_of_a_run_with_the_other_interval(tmp_path: Path, _: int) -> None:
    seed = random.randrange(10**6)
    intervals = random.Random(seed).sample([2, 3, 5, 8, 13, 21], 2)
    found = {every: train(tmp_path / str(every), seed, every) for every in intervals}
    for every, other in (intervals, intervals[::-1]):
        computed, actual = SaveIntervals(found[every]), found[other]
        assert computed.recorded == every
        for known, real in ((every, found[every]), (other, actual)):
            predicted = computed.outcome(known)
            assert real.goodput_fraction is not None
            assert predicted.goodput_fraction == pytest.approx(real.goodput_fraction, abs=0.02), (seed, every, known)
            assert predicted.wall_seconds == pytest.approx(real.wall_seconds, rel=0.03), (seed, every, known)
