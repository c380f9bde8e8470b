"""Profiled runs: traces hold the scheduled steps and nothing else, and no bit of the run changes."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from numpy_engine import NumpyEngine
from tiny_runs import Killed, configuration, events, kill, result, run, use_numpy_engine
from vorox.core.run_layout import RunLayout
from vorox.core.step_profile import Activity, Phase
from vorox.run import Outcome

NUM_MICRO_BATCHES = 2
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


def names(trace: Path) -> Counter[str]:
    """How often each complete event is in a Chrome trace."""
    with gzip.open(trace) as file:
        found = json.load(file)["traceEvents"]
    return Counter(event["name"] for event in found if event.get("ph") == "X")


def steps(found: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in found.items() if name.startswith("ProfilerStep")}


def check_shares(table: str) -> None:
    title = re.search(r": ([\d.,]+) ms\n", table)
    shares = re.findall(r"^  (?:[a-z]+(?: and host)?) +([\d.]+)% +([\d.,]+)$", table, re.MULTILINE)
    assert title is not None
    assert sum(float(fraction) for fraction, _ in shares) == pytest.approx(100, abs=0.5)  # of at most 6 rounded ones
    milliseconds = sum(float(spent.replace(",", "")) for _, spent in shares)
    assert milliseconds == pytest.approx(float(title[1].replace(",", "")), abs=0.5)


@pytest.mark.slow
def test_a_killed_profile_is_taken_by_the_resume_and_no_bit_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill of step 7 is inside of a profile; the resume repeats steps from 5 on."""
    from vorox.backends.torch_engine.engine import TorchEngine

    straight = run(configuration(tmp_path / "straight"))
    original: Callable[..., Any] = TorchEngine.train_step

    def train_step(self: TorchEngine, batch: Any, **arguments: Any) -> Any:
        if batch.step + 1 == 7:
            kill()
        return original(self, batch, **arguments)

    monkeypatch.setattr(TorchEngine, "train_step", train_step)
    with pytest.raises(Killed):
        run(configuration(tmp_path / "profiled", ["runtime.profile_steps=[3,4,7,8]"]))
    monkeypatch.setattr(TorchEngine, "train_step", original)
    profiled = run(configuration(tmp_path / "profiled", ["runtime.profile_steps=[7,8,99]"]))
    assert result(profiled) == result(straight)
    layout = RunLayout(profiled.run_directory)
    assert {path.name for path in layout.profile.iterdir()} == {
        f"step-0000000{step}-rank-00000{ending}" for step in (3, 7) for ending in (".json.gz", ".txt")
    }
    for first in (3, 7):
        found, table = names(layout.profile_trace(first, 0)), layout.profile_table(first, 0).read_text()
        assert steps(found) == {f"ProfilerStep#{first}": 1, f"ProfilerStep#{first + 1}": 1}
        assert found[ATTENTION] == found[f"{ATTENTION}_backward"] >= 2 * NUM_MICRO_BATCHES  # one layer
        assert found["aten::mm"] > 0
        assert found["vorox: data"] == found["vorox: settle"] - found["vorox: save"] == 2
        check_shares(table)
        assert "compute" in table
        calls = re.findall(r"^  (\S{1,54}) +([\d,]+) +[\d.,]+ +0\.00$", table, re.MULTILINE)
        assert len(calls) > 10
        assert ("aten::mm", f"{found['aten::mm']:,}") in calls
    assert len(events(profiled.run_directory, "profile")) == 2
    assert events(profiled.run_directory, "profile_failed") == []
    assert len(events(profiled.run_directory, "profile_steps")) == 1  # step 99 of 12


@pytest.mark.slow
def test_a_trace_of_jax(tmp_path: Path) -> None:
    settings = ["backend=jax", "runtime.num_threads=null"]
    straight = run(configuration(tmp_path / "straight", settings))
    profiled = run(configuration(tmp_path / "profiled", [*settings, "runtime.profile_steps=[3,4]"]))
    assert result(profiled) == result(straight)
    layout = RunLayout(profiled.run_directory)
    found = names(layout.profile_trace(3, 0))
    assert steps(found) == {"ProfilerStep#3": 1, "ProfilerStep#4": 1}
    assert found["vorox: data"] == 2
    assert list(layout.profile.glob("step-00000003-rank-00000/**/*.xplane.pb"))
    table = layout.profile_table(3, 0).read_text()
    check_shares(table)
    assert "compute and host" in table


class FailingRecording:
    """A profiler that fails at one point."""

    def __init__(self, point: str) -> None:
        self._point = point
        self.fail("start")

    def fail(self, point: str) -> None:
        if point == self._point:
            raise RuntimeError(f"no {point}")

    def annotate(self, name: str) -> contextlib.AbstractContextManager[object]:
        self.fail("annotate" if name.startswith("vorox") else "")
        return contextlib.nullcontext()

    def close(self) -> None:
        self.fail("close")

    def save(self) -> Activity:
        self.fail("save")
        return Activity([Phase("step", (0.0, 1.0))])


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        use_numpy_engine(patch)
        return run(configuration(tmp_path_factory.mktemp("straight")))


@pytest.mark.parametrize("point", ["start", "annotate", "close", "save", "nowhere", "no profiler"])
def test_a_failing_profiler_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: Outcome, point: str
) -> None:
    use_numpy_engine(monkeypatch)
    if point != "no profiler":
        monkeypatch.setattr(NumpyEngine, "start_profiler", lambda self, _: FailingRecording(point))
    outcome = run(configuration(tmp_path, ["runtime.profile_steps=[3,4,9]"]))
    assert result(outcome) == result(straight)
    fails = point != "nowhere"
    assert len(events(outcome.run_directory, "profile_failed")) == fails
    assert len(events(outcome.run_directory, "profile")) == (0 if fails else 2)
    assert len(list(RunLayout(outcome.run_directory).profile.glob("*.txt"))) == (0 if fails else 2)
