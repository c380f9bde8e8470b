"""Worker processes and Ray tasks: same digest, reported errors and deaths, orderly shutdown."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cache_corpus import ByteTokenizer, Corpus, build_corpus, small_corpus, work_of
from eventually import PATIENCE_SECONDS, wait_until
from vorox.core.errors import ConfigError, DataError, VoroxError
from vorox.core.ranks.ray_cluster import start_ray
from vorox.data.cache.build import BuildOptions, build, build_in_background
from vorox.data.cache.building import ray_workers
from vorox.data.cache.building.initialize import prepare_directory
from vorox.data.cache.building.report import BuildProgress
from vorox.data.cache.building.workers import Assignment
from vorox.data.cache.files.manifest import Manifest
from vorox.data.cache.reader import CacheReader
from vorox.data.documents import Record, Unit

CORPUS = small_corpus(num_files=3, lines_per_file=40, lines_per_unit=5)


@dataclasses.dataclass(frozen=True)
class SlowCorpus(Corpus):
    """Reads every unit slowly, so builds can be interrupted; one unit may kill its reader."""

    seconds: float = 0.05
    deadly: int = -1
    started: Path | None = None
    marks: Path | None = None
    deadly_to_take: Any = None
    ballast: bytes = b""

    def read_unit(self, unit: Unit) -> Iterator[Record]:
        if self.started is not None:
            self.started.touch()
        time.sleep(self.seconds)
        if unit.unit_id == self.deadly:
            assert self.marks is not None
            if len(list(self.marks.iterdir())) < 2:
                (self.marks / str(os.getpid())).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().read_unit(unit)


def slow(**changes: Any) -> SlowCorpus:
    return SlowCorpus(CORPUS.contents, CORPUS.files, CORPUS.units, **changes)


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_corpus(tmp_path_factory.mktemp("clean"), CORPUS).digest


def children() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and "spawn_main" in " ".join(child.cmdline())
    ]


@pytest.mark.parametrize(("workers", "mode"), [(2, "inverse"), pytest.param(4, "forward", marks=pytest.mark.slow)])
def test_any_number_of_processes_build_the_same(tmp_path: Path, digest: str, workers: int, mode: Any) -> None:
    seen: list[BuildProgress] = []
    report = build_corpus(tmp_path, slow(), workers=workers, mode=mode, on_progress=seen.append)
    assert report.digest == digest
    assert (report.units_built, report.units_missing) == (len(CORPUS.units), 0)
    assert report.built_text_bytes == report.text_bytes
    assert [progress.units_done for progress in seen] == sorted(progress.units_done for progress in seen)
    last = seen[-1]
    assert (last.units_done, last.documents, last.tokens) == (len(CORPUS.units), report.documents, report.tokens)
    assert (last.chunks, last.rows, last.source_bytes_done) == (report.chunks, report.rows, last.source_bytes)
    assert last.ratio_to_uint32 == report.compressed_bytes / (4 * report.rows * report.row_tokens)
    CacheReader.open(tmp_path).verify()
    assert children() == []


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_a_worker_that_dies_is_replaced(tmp_path: Path, digest: str) -> None:
    """Unit 7 kills the first two processes that read it."""
    marks = tmp_path / "marks"
    marks.mkdir()
    report = build_corpus(tmp_path / "cache", slow(seconds=0.0, deadly=7, marks=marks), workers=2)
    assert len(list(marks.iterdir())) == 2
    assert report.digest == digest
    CacheReader.open(tmp_path / "cache").verify()


class DeadlyToTake:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


def test_workers_that_die_before_their_assignment_do_not_block_the_build(tmp_path: Path) -> None:
    """The assignment exceeds the pipe's capacity: writing it to a pipe without a reader would block forever."""
    with pytest.raises(DataError, match=r"die without finishing a unit \(exit code 3"):
        build_corpus(tmp_path, slow(deadly_to_take=DeadlyToTake(), ballast=bytes(1 << 20)), workers=2)
    assert children() == []


@dataclasses.dataclass(frozen=True)
class FaultyTokenizer(ByteTokenizer):
    def encode(self, text: str) -> Any:
        if len(text) > 60:
            raise DataError("no token for that", hint="another vocabulary")
        return super().encode(text)


def test_the_error_of_a_worker_is_raised_in_the_caller(tmp_path: Path, digest: str) -> None:
    with pytest.raises(DataError, match="no token for that") as caught:
        build_corpus(tmp_path, slow(seconds=0.0), tokenizer=FaultyTokenizer(), workers=2)
    assert ", record " in caught.value.where
    assert caught.value.hint == "another vocabulary"
    assert children() == []
    assert build_corpus(tmp_path, CORPUS).digest == digest


def test_workers_stop_on_request_and_the_next_build_continues(tmp_path: Path, digest: str) -> None:
    stopped = threading.Event()

    def watch(progress: BuildProgress) -> None:
        if progress.units_done >= 3:
            stopped.set()

    report = build_corpus(tmp_path, slow(seconds=0.1), workers=2, on_progress=watch, stop=stopped.is_set)
    assert 0 < report.units_missing < len(CORPUS.units)
    assert children() == []
    CacheReader.open(tmp_path, complete=False).verify()
    again = build_corpus(tmp_path, CORPUS)
    assert (again.digest, again.units_built) == (digest, report.units_missing)


def test_a_background_build_fills_the_cache_that_is_read(tmp_path: Path, digest: str) -> None:
    corpus = slow(seconds=0.02)
    work = work_of(corpus)
    build(tmp_path, work, corpus.units, BuildOptions(last_unit=2))
    reader = CacheReader.open(tmp_path, complete=False)
    assert reader.manifest.units["unit"].tolist() == [0, 1]
    reader.background = build_in_background(tmp_path, work, corpus.units)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(reader.missing_units(0, len(corpus.units))):
        assert time.monotonic() < deadline
        reader = reader.refreshed(awaited_units=len(corpus.units))
        time.sleep(0.01)
    assert reader.digest == digest
    assert reader.background is not None
    reader.background.close()
    assert not reader.background.is_running


def test_the_error_of_a_background_build_is_raised_where_its_units_are_awaited(tmp_path: Path) -> None:
    work = work_of(slow(seconds=0.0), tokenizer=FaultyTokenizer())
    prepare_directory(tmp_path, work, CORPUS.units)
    reader = CacheReader.open(tmp_path, complete=False)
    reader.background = build_in_background(tmp_path, work, CORPUS.units)
    background = reader.background
    wait_until(lambda: not background.is_running)
    with pytest.raises(DataError, match="no token for that"):
        reader.refreshed(awaited_units=len(CORPUS.units))
    reader.background.close()


def test_a_background_build_stops_immediately(tmp_path: Path) -> None:
    """The unit in progress takes a day, so waiting for it would be noticed."""
    started = tmp_path / "started"
    corpus = slow(seconds=86_400.0, started=started)
    prepare_directory(tmp_path / "cache", work_of(corpus), corpus.units)
    background = build_in_background(tmp_path / "cache", work_of(corpus), corpus.units)
    wait_until(started.exists)
    background.close()
    assert children() == []


# Ray


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="needs Ray") as caught:
        build_corpus(tmp_path, CORPUS, executor="ray")
    assert "[ray]" in caught.value.hint


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore:os.fork")  # by Ray, to start its processes
def test_ray_tasks_build_the_same_and_report_errors(tmp_path: Path, digest: str) -> None:
    ray = pytest.importorskip("ray")
    here = str(Path(__file__).parents[2])
    environment = {"env_vars": {"PYTHONPATH": here, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
    start_ray(ray, num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    try:
        report = build_corpus(tmp_path / "ray", slow(seconds=0.02), executor="ray", workers=2)
        assert report.digest == digest
        assert (report.units_built, report.units_missing) == (len(CORPUS.units), 0)
        CacheReader.open(tmp_path / "ray").verify()
        with pytest.raises(DataError, match="no token for that") as caught:
            build_corpus(tmp_path / "faulty", CORPUS, tokenizer=FaultyTokenizer(), executor="ray", workers=2)
        assert ", record " in caught.value.where
        started = tmp_path / "started"
        corpus = slow(seconds=2.0, started=started)
        build_corpus(tmp_path / "stopped", corpus, executor="ray", workers=1, stop=started.exists)
        missing = Manifest.open(tmp_path / "stopped").missing_units()
        assert len(missing)
        assert build_corpus(tmp_path / "stopped", CORPUS).digest == digest
    finally:
        ray.shutdown()


def test_a_machine_that_does_not_see_the_cache_reports_it(tmp_path: Path) -> None:
    assignment = Assignment(tmp_path / "nowhere", work_of(CORPUS), 3, "forward", None, frozenset(), "quick")
    kind, value = ray_workers._work(assignment)
    assert kind == "DataError"
    assert "does not see the cache directory" in value["what"]
    assert issubclass(DataError, VoroxError)
