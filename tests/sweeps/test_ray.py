"""Sweeps on Ray: a killed one continues, its trials equal plain runs, and ASHA decides as its definition says."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
from eventually import wait_until
from vorox.cli import main
from vorox.core.config import load_config
from vorox.experiments.artifacts import eval_losses, inspect_run
from vorox.sweeps.search_space import parse_parameter
from vorox.sweeps.sweep import Asha, Resources, Sweep
from vorox.sweeps.trial_log import Trial, TrialLog

pytestmark = [
    pytest.mark.slow,  # importing Ray takes a processor more than two seconds
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning", "ignore:os.fork"
    ),
]
NUM_STEPS = 200
START_SECONDS = 600.0  # of Ray and a whole trial, on a machine that does other things
LRS = (1e-3, 1e-2, 1e-5)  # the order in which seed 7 tries them: fair, best, worst


@pytest.mark.torch
def test_a_killed_sweep_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three trials, the first is finished and the second is killed with the sweep; ASHA stops the third."""
    pytest.importorskip("optuna")
    pytest.importorskip("ray")
    tiny_runs.configuration(tmp_path)
    settings = json.loads((tmp_path / "tiny.yaml").read_text())
    settings["train"]["num_steps"] = NUM_STEPS
    settings["eval"]["every_steps"] = settings["checkpoint"]["every_steps"] = NUM_STEPS // 10
    (tmp_path / "tiny.yaml").write_text(json.dumps(settings))
    monkeypatch.chdir(tmp_path)
    words = ["tune", "tiny.yaml", f"lr=choice({', '.join(map(str, sorted(LRS)))})", "--seed", "7", "--name", "lr"]
    child = subprocess.Popen([sys.executable, "-m", "vorox", *words], start_new_session=True)
    try:
        wait_until(
            lambda: child.poll() is not None or any(eval_losses(path) for path in tmp_path.glob("runs/lr-????-001-*")),
            START_SECONDS,
        )
        assert child.poll() is None, "the sweep ended"
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    (log,) = tmp_path.glob("runs/sweeps/lr-*/trials.jsonl")
    before = TrialLog(log).trials
    ended = [trial for trial in before if trial.outcome]  # on a slow machine also the second
    assert before[0] in ended

    assert main(words) == 0
    trials = TrialLog(log).trials
    assert tuple(trial.settings["optimizer.lr"] for trial in trials) == LRS
    assert [trials[trial.number] for trial in ended] == ended
    assert trials[1].settings == before[1].settings
    assert [trial.outcome for trial in trials] == ["finished", "finished", "stopped"]
    assert [inspect_run(Path(trial.run)).attempts for trial in trials] == [1, 1 if before[1] in ended else 2, 1]
    assert main(["train", "tiny.yaml", f"lr={LRS[1]}", "--name", "plain"]) == 0
    (plain,) = tmp_path.glob("runs/plain-*")
    assert trials[1].loss == eval_losses(plain)[NUM_STEPS]
    assert eval_losses(Path(trials[1].run)) == eval_losses(plain)
    stopped = inspect_run(Path(trials[2].run))
    assert stopped.state == "stopped"
    assert stopped.step < NUM_STEPS
    assert trials[2].loss == eval_losses(Path(trials[2].run))[trials[2].step or 0]
    assert (log.parent / "results.png").is_file()
    assert not (log.parent / "ray").exists()


@pytest.fixture
def ray_trials() -> Any:
    pytest.importorskip("optuna")
    return pytest.importorskip("vorox.sweeps.ray_trials")


def write_run(directory: Path, losses: dict[int, float]) -> str:
    directory.mkdir()
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in losses.items()]
    (directory / "evaluations.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "run.json").write_text(json.dumps({"attempts": [{"notes": {"total_steps": 100}}]}))
    return str(directory)


def test_asha_is_rebuilt_from_the_runs(tmp_path: Path, ray_trials: Any) -> None:
    """At 10, 30 and 90 percent, a trial goes on if it is among the best third of all that came that far before it."""
    curves = [{10: 3.0, 30: 2.0, 90: 1.0, 100: 0.9}, {10: 2.0, 30: 1.9, 90: 1.5, 100: 0.5}, {10: 4.0}, {10: 2.5}]
    outcomes: list[Any] = ["finished", "finished", "stopped", "stopped"]
    trials = [
        Trial(
            number, {}, write_run(tmp_path / str(number), losses), outcomes[number], max(losses), min(losses.values())
        )
        for number, losses in enumerate(curves)
    ]
    rungs: dict[int, list[float]] = {10: [], 30: [], 90: []}
    for losses in curves:
        for step, loss in losses.items():
            if step in rungs:
                rungs[step].append(loss)

    def goes_on(step: int, loss: float) -> bool:
        """Whether the loss is below the value that a third of the recorded ones is below, interpolated."""
        known = sorted(rungs[step])
        place = (len(known) - 1) / 3
        low = known[math.floor(place)]
        return loss <= low + (place % 1) * (known[math.ceil(place)] - low)

    trials.append(Trial(4, {}, write_run(tmp_path / "4", {10: 1.0}), None))  # it runs, and reports again
    controller: Any = None
    for step in rungs:
        for loss in (0.7, 1.0, 1.1, 1.2, 1.4, 1.6, 1.9, 1.95, 2.1, 2.2, 2.6, 3.5, 5.0):
            scheduler = ray_trials._asha_scheduler(Asha(), [trial for trial in reversed(trials) if trial.outcome])
            stand_in = ray_trials.SimpleNamespace(trial_id="new")
            scheduler.on_trial_add(controller, stand_in)
            decision = scheduler.on_trial_result(controller, stand_in, {"percent": float(step), "loss": loss})
            assert (decision == "CONTINUE") == goes_on(step, loss), (step, loss)


def test_failures_of_trials(tmp_path: Path, ray_trials: Any) -> None:
    """A failed trial is passed over until the next sweep; three in a row end this one."""
    tiny_runs.configuration(tmp_path)

    def open_sweep() -> Sweep:
        space = [parse_parameter("lr", "loguniform(1e-4, 1e-2)", where="test")]
        return Sweep(space, lambda more: load_config(tmp_path / "tiny.yaml", more), seed=0, asha=Asha())

    def run(search: Any, *exit_codes: int | None) -> None:
        for code in exit_codes:
            assert isinstance(search.suggest("now"), dict)
            search.on_trial_complete("now", {"exit_code": code, "step": 12, "loss": 1.0})

    sweep, said = open_sweep(), list[str]()
    search = ray_trials._Search(sweep, Resources(num_trials=8, num_concurrent=2), said.append)
    with sweep.opened([]):
        run(search, 0, 4, 1, 0)
        assert isinstance(search.suggest("first"), dict)
        assert isinstance(search.suggest("second"), dict)
        assert search.suggest("third") is None  # two at a time
        search.on_trial_complete("first", None, error=True)
        search.on_trial_complete("second", {"exit_code": -9})
        assert not search.must_stop
        run(search, 75)
        assert search.must_stop
        assert search.suggest("more") is None
    assert [trial.outcome for trial in sweep.trials] == ["finished", None, None, "finished", None, None, None]
    assert [error.exit_code for error in search.failures.values()] == [4, 1, 1, 1, 75]
    texts = [error.what for error in search.failures.values()]
    assert "Ray lost trial 4" in texts[2]
    assert "killed by SIGKILL" in texts[3]
    assert sum(": failed. " in line for line in said) == 5

    again = open_sweep()
    search = ray_trials._Search(again, Resources(num_trials=8), said.append)
    with again.opened([]):
        run(search, 0, 0, 0, 0, None, 0)
        assert search.suggest("more") == "FINISHED"
    assert [trial.outcome for trial in again.trials] == [*["finished"] * 6, "stopped", "finished"]
