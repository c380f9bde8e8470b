"""What a retention policy costs is what re-executions of a run with this policy compute."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

import pytest

import tiny_runs
from vorox.cli import main
from vorox.core.config import load_config
from vorox.core.run_layout import step_directories
from vorox.core.schema import CheckpointConfig
from vorox.planning.retention import planned_steps, retention_cost
from vorox.training.checkpoints.store import steps_to_keep
from vorox.training.materialize import open_range


def simulated(rules: CheckpointConfig, total: int) -> tuple[list[int], list[int]]:
    """The steps that a run saves, and those that are left, by removing after every save as a run does."""
    saved: list[int] = []
    kept: list[int] = []
    for step in range(1, total + 1):
        if (rules.every_steps and step % rules.every_steps == 0) or (step == total and rules.at_end):
            saved.append(step)
            kept = sorted(steps_to_keep([*kept, step], rules, {}))
    return saved, kept


@pytest.mark.parametrize("seed", range(20))
def test_every_policy_costs_what_a_simulation_finds(seed: int) -> None:
    chooser = random.Random(seed)
    every, total = chooser.randint(1, 40), chooser.randint(1, 400)
    keep_every = chooser.choice([None, every * chooser.randint(1, 5), chooser.randint(1, 90)])
    rules = CheckpointConfig(
        every_steps=every, every_seconds=None, keep_last=chooser.randint(1, 4), keep_every_steps=keep_every,
        at_end=chooser.random() < 0.5,
    )  # fmt: skip
    saved, kept = simulated(rules, total)
    needed: list[int] = []
    for step in range(1, total + 1):
        start = max(one for one in (0, *kept) if one <= step)
        proof = start < step < total and step not in saved
        needed.append(step - start + proof)
    found = retention_cost(rules, total, start_seconds=3.0, step_seconds=0.5)
    assert found is not None
    assert (found.num_saved, found.num_kept) == (len(saved), len(kept))
    assert (found.worst_steps, found.median_steps) == (max(needed), int(statistics.median(needed)))
    expected = 3 + 0.5 * max(needed) if max(needed) else 0
    assert found.seconds(found.worst_steps) == pytest.approx(expected)


def test_the_steps_are_those_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    settings = [
        "checkpoint.every_steps=3",
        "checkpoint.keep_last=1",
        "checkpoint.keep_every_steps=6",
        "train.num_steps=14",
    ]
    config = tiny_runs.configuration(tmp_path, settings)
    run = tiny_runs.run(config).run_directory
    found = retention_cost(config.checkpoint, 14, start_seconds=0, step_seconds=1)
    assert found is not None
    kept = step_directories(run)
    executions = {step: open_range(run, [step]) for step in range(1, 15) if step not in kept}
    counts = [0] * len(kept) + [one.last_step - one.start_step for one in executions.values()]
    assert (found.num_kept, found.worst_steps) == (len(kept), max(counts))
    assert found.median_steps == int(statistics.median(counts))


def test_saves_by_time_need_a_speed() -> None:
    rules = CheckpointConfig(every_steps=None, every_seconds=60, keep_last=2)
    assert retention_cost(rules, 1000, start_seconds=0, step_seconds=None) is None
    found = retention_cost(rules, 1000, start_seconds=0, step_seconds=0.5)
    assert found is not None
    assert (found.num_saved, found.num_kept) == (9, 2), "every 120 steps, and at the end"


def test_the_length_of_a_run() -> None:
    assert planned_steps(load_config("gpt2-124m", ["train.num_steps=7", "train.num_tokens=null"])) == 7
    config = load_config("gpt2-124m", ["train.num_tokens=1000000"])
    per_step = config.train.global_batch_sequences * config.data.sequence_length_tokens
    assert planned_steps(config) == 1_000_000 // per_step


@pytest.mark.torch
@pytest.mark.slow
def test_the_command_prints_it_at_the_speed_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tiny_runs.run(tiny_runs.configuration(tmp_path, ["model.family=llama"])).run_directory
    capsys.readouterr()
    assert main(["plan", "tiny.yaml", "checkpoint.every_steps=2", "train.num_steps=100"]) == 0
    assert "keeps 2 of 50 saved states, 4% of their disk: any step again within 98 steps" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["plan", run.name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["retention"]
    assert (found["num_saved"], found["num_kept"], found["worst_steps"]) == (3, 2, 8)
    assert found["step_seconds"] > 0
    assert found["worst_seconds"] == pytest.approx(found["start_seconds"] + 8 * found["step_seconds"])
