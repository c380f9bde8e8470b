"""A wall clock that is set back and forth by hours while runs train: order, resume, timings, saves and leases hold."""

from __future__ import annotations

import io
import itertools
import os
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from cache_corpus import build_corpus, small_corpus, work_of
from tiny_runs import configuration, run, use_numpy_engine
from vorox.cli.terminal.progress import LiveDisplay
from vorox.core.files import atomic
from vorox.core.run_layout import step_directories
from vorox.data.cache.build import BuildOptions, build
from vorox.data.cache.files.leases import Leases
from vorox.data.cache.files.manifest import chunk_path
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.upkeep import retention
from vorox.data.cache.upkeep.gc import find_caches, find_garbage, remove_unused
from vorox.data.cache.upkeep.replacement import replacing
from vorox.data.cache.upkeep.retention import mark_used
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_events import PlanSource, PlanStart
from vorox.experiments.tracking import read_metrics
from vorox.records.replay_chain import read_chain
from vorox.records.run_lookup import find_run
from vorox.training.loop.display import StepView

HOUR = 3600.0
DAY = 24 * HOUR


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the wall clock finds it hours away from the look before."""
    real, jumps = time.time, itertools.cycle([0.0, 5 * HOUR, -3 * HOUR, HOUR, -HOUR])
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))


@pytest.mark.usefixtures("jumping")
def test_a_run_and_its_resume_do_not_depend_on_the_wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    timed = ["checkpoint.every_steps=null", f"checkpoint.every_seconds={HOUR / 2}"]
    began = time.monotonic()
    straight = run(configuration(tmp_path / "straight", timed))
    assert list(step_directories(straight.run_directory)) == [12], "no hour has passed, whatever the clock says"
    first = run(configuration(tmp_path / "resumed", [*timed, "train.num_steps=6"]))
    second = run(configuration(tmp_path / "resumed", [*timed, "train.num_steps=12"]), resume_from=first.run_directory)
    assert second.run_directory == first.run_directory == find_run(tmp_path / "resumed" / "runs", "latest")
    assert (second.start_step, second.progress.step) == (6, 12)
    chains = [read_chain(outcome.run_directory) for outcome in (straight, second)]
    assert [chains[0][step].batch for step in chains[0]] == [chains[1][step].batch for step in chains[1]]
    elapsed_seconds = time.monotonic() - began
    for outcome in (straight, second):
        assert 0 < outcome.speed.seconds["compute"] <= elapsed_seconds
        for values in read_metrics(outcome.run_directory).values():
            assert 0 <= values.get("step_seconds", 0.0) <= elapsed_seconds
            assert 0 <= values.get("seconds_since_save", 0.0) <= elapsed_seconds
    assert elapsed_seconds < 120


@pytest.mark.usefixtures("jumping")
def test_no_builder_loses_its_lease_to_the_wall_clock(tmp_path: Path) -> None:
    with Leases(tmp_path) as first, Leases(tmp_path) as second:
        assert first.acquire(3)
        assert not any(second.acquire(3) for _ in range(10))
        first.release(3)
        assert second.acquire(3)


@pytest.mark.parametrize("jump_seconds", [-400 * DAY, 400 * DAY])
def test_garbage_collection_removes_nothing_in_use_when_the_clock_jumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_seconds: float
) -> None:
    """The wall clock and that of the disk jump after a cache was made, with a build, a rebuild and a run at work."""
    corpus, root = small_corpus(), tmp_path / "caches"
    made, built, rebuilt, read = (root / f"{name}-train-0-{number}" for number, name in enumerate("abcd"))
    for directory in (made, built, rebuilt, read):
        build_corpus(directory, corpus)
        mark_used(directory)
    reader = CacheReader.open(read)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    source = PlanSource("text", Fraction(1), reader.recipe.digest, reader.row_tokens)
    DataPlan.create(tmp_path / "runs" / "one" / "plan.jsonl", PlanStart(1, True, 4, (source,)), [reader])
    orphan = chunk_path(built, 3000, 0)
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(chunk_path(built, 1, 0).read_bytes())
    with replacing(rebuilt, wanted=True) as fresh, Leases(built) as leases:
        build(fresh, work_of(corpus), corpus.units, BuildOptions(last_unit=1))
        assert leases.acquire(3000)
        now, disk_now = time.time(), retention.disk_time
        monkeypatch.setattr(time, "time", lambda: now + jump_seconds)
        monkeypatch.setattr(retention, "disk_time", lambda directory: disk_now(directory) + jump_seconds)
        assert find_garbage(root) == []
        caches = {cache.directory: cache for cache in find_caches(root, tmp_path / "runs")}
        assert caches[built].is_busy
        assert caches[read].runs
        idle = [cache for cache in caches.values() if cache.idle_seconds > DAY]
        assert not [cache for cache in idle if cache.is_removable]
        assert caches[made].idle_seconds < DAY
        assert remove_unused([cache for cache in caches.values() if cache.directory == built]) == 0
        build(fresh, work_of(corpus), corpus.units)
    monkeypatch.undo()
    for directory in (made, built, rebuilt, read):
        CacheReader.open(directory).verify()
    assert [path.name for path in (rebuilt / "leases").iterdir()] == []


@pytest.mark.parametrize(("age_seconds", "is_swept"), [(2 * DAY, True), (HOUR, False), (-2 * DAY, False)])
def test_temporaries_of_another_host_are_swept_by_the_clock_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_seconds: float, is_swept: bool
) -> None:
    left = tmp_path / ".tmp-a-container-1-89abcdef-0123abcd-0123abcd-a.json"
    left.touch()
    then = left.stat().st_mtime - age_seconds
    os.utime(left, (then, then))
    for jump_seconds in (-400 * DAY, 400 * DAY):
        monkeypatch.setattr(time, "time", lambda jump_seconds=jump_seconds: then + jump_seconds)
        assert atomic.is_stale_temporary(left) == is_swept
    assert atomic.sweep_temporary(tmp_path) == ([left] if is_swept else [])
    assert [path.name for path in tmp_path.iterdir()] == ([] if is_swept else [left.name])


def test_the_display_goes_on_when_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    terminal, now = Terminal(), [10 * HOUR]
    display = LiveDisplay(terminal, clock=lambda: now[0])
    view = StepView(1, 300, 5.5, 4096, 1_228_800, 1e-4, 3.5)
    display.step(view)
    now[0] -= 3 * HOUR
    display.step(replace(view, step=77))
    display.close()
    assert "Step    77/300" in terminal.getvalue()
