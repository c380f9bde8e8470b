"""A sweep over runs of the numpy engine: trials are plain runs, and a sweep continues where it was killed."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

import tiny_runs
from vorox.cli import main
from vorox.core.config import load_config
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.experiments.artifacts import eval_losses, list_runs
from vorox.records.run_context import recorded_config
from vorox.sweeps.search_space import Parameter, overrides_of
from vorox.sweeps.sweep import Asha, Sweep
from vorox.sweeps.trial_log import Trial

pytestmark = pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="optuna is not installed")

LR = Parameter("optimizer.lr", low=1e-4, high=0.1, is_log=True)
CLIP = Parameter("optimizer.clip_norm", choices=(None, 1.0))
NUM_TRIALS = 2


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_runs.use_numpy_engine(monkeypatch)
    tiny_runs.configuration(tmp_path)
    return tmp_path


def open_sweep(place: Path, *, seed: int = 0, space: Sequence[Parameter] = (LR, CLIP), **changes: Any) -> Sweep:
    def load(overrides: Sequence[str]) -> RunConfig:
        return load_config(place / "tiny.yaml", overrides)

    return Sweep(space, load, seed=seed, asha=changes.get("asha", Asha()), name="lr")


def train(sweep: Sweep, trial: Trial) -> None:
    """What ``vorox train`` does in the process of a trial."""
    outcome = tiny_runs.run(load_config(sweep.trial_config(trial.number)))
    assert outcome.run_directory == Path(trial.run).absolute()
    step = max(outcome.eval_losses)
    sweep.end_trial(trial.number, 0, step, outcome.eval_losses[step])


def train_all(sweep: Sweep) -> None:
    while (trial := sweep.next_trial(NUM_TRIALS, ())) is not None:
        train(sweep, trial)


def test_a_trial_is_a_plain_run(place: Path) -> None:
    sweep = open_sweep(place)
    with sweep.opened(["vorox", "tune"]):
        train_all(sweep)
        assert sweep.is_complete(NUM_TRIALS)
        assert not sweep.is_complete(NUM_TRIALS + 1)
    best = sweep.ranked()[0]
    assert [trial.loss for trial in sweep.ranked()] == sorted(trial.loss or 0.0 for trial in sweep.trials)
    plain = tiny_runs.run(load_config(place / "tiny.yaml", [*overrides_of(best.settings), "run.name=plain"]))
    assert best.loss == plain.eval_losses[max(plain.eval_losses)]
    assert plain.run_directory != Path(best.run)
    names = {run.run_id.rpartition("-")[0]: run.state for run in list_runs(place / "runs")}
    prefix = sweep.directory.name[: len("lr-1234")]
    assert names == {**{f"{prefix}-{n:03d}": "finished" for n in range(NUM_TRIALS)}, "plain": "finished"}
    record = json.loads((sweep.directory / "sweep.json").read_bytes())
    assert record["space"] == {"optimizer.lr": "loguniform(0.0001, 0.1)", "optimizer.clip_norm": "choice(null, 1.0)"}


@pytest.mark.slow
def test_a_killed_sweep_continues_and_repeats_nothing(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("uninterrupted")
    tiny_runs.configuration(elsewhere)
    whole = open_sweep(elsewhere)
    with whole.opened([]):
        train_all(whole)

    killed = open_sweep(place)
    with killed.opened([]):
        finished = killed.next_trial(NUM_TRIALS, ())
        assert finished is not None
        train(killed, finished)
        unfinished = killed.next_trial(NUM_TRIALS, ())
        assert unfinished is not None

    resumed = open_sweep(place)
    with resumed.opened([]):
        assert [trial.outcome for trial in resumed.trials] == ["finished", None]
        assert resumed.next_trial(NUM_TRIALS, ()) == unfinished
        assert resumed.next_trial(NUM_TRIALS, {unfinished.number}) is None
        beside = resumed.next_trial(NUM_TRIALS + 1, {unfinished.number})
        assert beside is not None
        assert beside.number == NUM_TRIALS
        resumed.end_trial(beside.number, 7, None, None)
        train_all(resumed)
    assert [(trial.settings, trial.loss) for trial in resumed.trials[:NUM_TRIALS]] == [
        (trial.settings, trial.loss) for trial in whole.trials
    ]
    assert [run.attempts for run in list_runs(place / "runs")] == [1] * NUM_TRIALS


def test_more_trials_extend_a_sweep_and_other_settings_start_another(place: Path) -> None:
    sweep = open_sweep(place)
    others = [
        open_sweep(place, seed=1),
        open_sweep(place, space=[LR]),
        open_sweep(place, asha=None),
        open_sweep(place, asha=Asha(grace_percent=20)),
    ]
    (place / "tiny.yaml").write_text(
        (place / "tiny.yaml").read_text().replace('"num_sequences": 5', '"num_sequences": 4')
    )
    others.append(open_sweep(place))
    assert len({sweep.directory, *(other.directory for other in others)}) == 6
    assert sweep.directory.parent == place / "runs" / "sweeps"
    runs: list[str] = []
    for each in (sweep, others[-1]):
        with each.opened([]):
            trial = each.next_trial(1, ())
            assert trial is not None
            runs.append(trial.run)
    assert runs[0] != runs[1]  # the settings are equal, their validation is not


def test_one_process_runs_a_sweep(place: Path) -> None:
    with (
        open_sweep(place).opened([]),
        pytest.raises(ConfigError, match=r"Sweep lr-[0-9a-f]{8} is in use"),
        open_sweep(place).opened([]),
    ):
        pass


def test_endings(place: Path) -> None:
    """What each exit code of a run says about its settings."""
    sweep = open_sweep(place, space=[LR])
    endings = [(0, 2.0), (None, 5.0), (7, 1.0), (0, float("nan")), (3, None), (0, 1.5), (None, float("inf"))]
    with sweep.opened([]):
        for code, loss in endings:
            trial = sweep.next_trial(10, ())
            assert trial is not None
            assert sweep.end_trial(trial.number, code, 12, loss) is not None
        failed = sweep.next_trial(10, ())
        assert failed is not None
        for code in (1, 2, 4, 75, -9):
            assert sweep.end_trial(failed.number, code, 12, 1.0) is None
        assert sweep.next_trial(10, ()) == failed
    outcomes = ["finished", "stopped", "diverged", "diverged", "refused", "finished", "diverged", None]
    assert [trial.outcome for trial in sweep.trials] == outcomes
    assert [trial.number for trial in sweep.ranked()] == [5, 0, 1, 2, 3, 6, 4]


def test_an_invalid_combination_is_recorded_and_passed_over(place: Path) -> None:
    """Both ends are valid; what is between them is checked when it is chosen."""
    heads = Parameter("model.num_heads", low=1, high=4, is_integer=True)  # 3 does not divide 16
    sweep = open_sweep(place, space=[heads])
    with sweep.opened([]):
        while (trial := sweep.next_trial(9, ())) is not None:
            sweep.end_trial(trial.number, 0, 12, 1.0)
    refused = [trial for trial in sweep.trials if trial.outcome == "refused"]
    assert [trial.settings["model.num_heads"] for trial in refused] == [3]
    assert "not divisible" in refused[0].reason
    assert len(sweep.trials) == 4


def run_command(place: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """``vorox tune`` with trials in this process, in the place of Ray."""

    def run_trials(sweep: Sweep, resources: Any, report: Any) -> None:
        while (trial := sweep.next_trial(resources.num_trials, ())) is not None:
            report(f"Trial {trial.number}")
            if trial.number == 1:
                tiny_runs.run(load_config(sweep.trial_config(1)))
                sweep.end_trial(1, None, 6, eval_losses(Path(trial.run))[6])
            elif trial.number == 2:
                sweep.end_trial(2, 7, None, None)
            else:
                train(sweep, trial)

    monkeypatch.setitem(sys.modules, "vorox.sweeps.ray_trials", SimpleNamespace(run_trials=run_trials))
    monkeypatch.chdir(place)
    return main(["tune", "tiny.yaml", "lr=loguniform(1e-4, 0.1)", "optimizer.clip_norm=choice(null, 1.0)", *words])


@pytest.mark.slow
def test_the_table_the_plot_and_json(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if any(importlib.util.find_spec(package) is None for package in ("ray", "pandas", "matplotlib")):
        pytest.skip("the extra tune is not installed")
    assert run_command(place, monkeypatch, "--trials", "3", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert run_command(place, monkeypatch, "--trials", "3") == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("RUN"))
    assert lines[start].split() == ["RUN", "STATE", "STEP", "EVAL", "lr", "clip_norm"]
    table = [line.split() for line in lines[start + 1 : start + 4]]
    assert [row[1] for row in table] == ["finished", "stopped", "diverged"]
    for row, trial in zip(table, said["trials"], strict=True):
        directory = place / "runs" / row[0]
        config = (
            recorded_config(directory) if directory.is_dir() else load_config(Path(said["sweep"]) / "trials/002.yaml")
        )
        assert float(row[4]) == config.optimizer.lr == trial["settings"]["optimizer.lr"]
        if trial["loss"] is not None:
            assert row[2:4] == [str(trial["step"]), f"{eval_losses(directory)[trial['step']]:.4f}"]
    best = said["trials"][0]
    command = next(line.split(maxsplit=1)[1] for line in lines if line.startswith("  train"))
    assert command == f"vorox train tiny.yaml {' '.join(overrides_of(best['settings']))}"
    png = place / next(line.split()[1] for line in lines if line.startswith("  plot"))
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_points_of_the_plot() -> None:
    pytest.importorskip("matplotlib")

    from vorox.dashboard.exports.sweep_plot import TrialResult, draw_sweep

    trials = [
        TrialResult({"optimizer.lr": 1e-2, "optimizer.name": "muon"}, True, {10: 3.0, 20: 1.0}),
        TrialResult({"optimizer.lr": 1e-3, "optimizer.name": "adamw"}, True, {10: 3.0, 20: 2.0}),
        TrialResult({"optimizer.lr": 1e-4, "optimizer.name": "adamw"}, False, {10: 4.0}),
    ]
    root = ElementTree.fromstring(draw_sweep(trials, {"optimizer.lr": True, "optimizer.name": False}, "svg"))
    groups = {element.get("id", ""): element for element in root.iter()}
    marks = "{http://www.w3.org/2000/svg}use"

    def places(name: str) -> list[tuple[float, float]]:
        return [(float(mark.get("x", 0)), float(mark.get("y", 0))) for mark in groups[name].iter(marks)]

    assert [len(places(f"trial-{n}")) for n in range(3)] == [2, 2, 1]
    x, y = zip(*(places(f"optimizer.lr-{n}")[0] for n in range(3)), strict=True)
    assert x[0] - x[1] == pytest.approx(x[1] - x[2], rel=1e-3)  # a logarithmic axis
    assert y[0] > y[1] > y[2]  # down is less
    assert y[0] - y[1] == pytest.approx((y[0] - y[2]) / 3, rel=1e-3)
    names = [places(f"optimizer.name-{n}")[0][0] for n in range(3)]
    assert names[1] == names[2] != names[0]


def test_a_missing_package_is_named_before_anything_starts(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(place)
    assert main(["tune", "tiny.yaml", "lr=loguniform(1e-4, 0.1)"]) == 2
    said = capsys.readouterr().err
    assert "Sweeps need the package ray" in said
    assert "[tune]" in said
    assert not (place / "runs").exists()
