"""The build queue: awaited units come first, errors reach the waiting threads, and closing releases them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from cache_corpus import build_corpus, small_corpus, work_of
from eventually import wait_until
from vorox.core.errors import DataError
from vorox.data.cache.building.build_queue import BuildQueue
from vorox.data.cache.building.initialize import prepare_directory
from vorox.data.cache.building.scheduler import BuildScheduler
from vorox.data.cache.files.manifest import Manifest
from vorox.data.cache.reader import CacheReader


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Four units, of which the first is committed."""
    corpus = small_corpus()
    build_corpus(tmp_path, corpus, last_unit=1)
    return Manifest.open(tmp_path)


def waiting(queue: BuildQueue, unit: int, errors: list[BaseException]) -> threading.Thread:
    def wait() -> None:
        try:
            queue.wait_for(unit)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    wait_until(lambda: unit in queue._awaited)
    return thread


def test_awaited_units_precede_planned_ones_and_the_backlog(manifest: Manifest) -> None:
    queue = BuildQueue(keep_open=True)
    assert queue.next_batch(manifest, ()) == [1, 2, 3]
    queue.plan([2])
    assert queue.next_batch(manifest, {0}) == [2, 0, 1, 3]
    assert not queue.preempts([2, 0, 1, 3])
    thread = waiting(queue, 3, [])
    assert queue.next_batch(manifest, ()) == [3, 2, 1]
    assert queue.preempts([2, 1]), "a thread waits for another unit"
    queue.mark_done(3)
    thread.join(20)
    assert not thread.is_alive()
    queue.close()
    assert queue.next_batch(manifest, ()) is None


def test_an_error_is_raised_in_waiting_threads_and_the_unit_is_retried_once_awaited(manifest: Manifest) -> None:
    queue, errors = BuildQueue(last_unit=0, keep_open=True), list[BaseException]()
    thread = waiting(queue, 2, errors)
    assert queue.fail(2, DataError("no text"))
    thread.join(20)
    assert [str(error) for error in errors] == ["no text"]
    queue.plan([1, 2])
    assert queue.next_batch(manifest, ()) == [1]
    thread = waiting(queue, 2, errors)
    assert queue.next_batch(manifest, ()) == [2, 1]
    queue.close()
    thread.join(20)
    assert isinstance(errors[1], RuntimeError)
    assert not BuildQueue().fail(2, DataError("a build command ends with it"))


def test_a_background_scheduler_builds_awaited_units_first(tmp_path: Path) -> None:
    corpus = small_corpus(lines_per_unit=5)
    prepare_directory(tmp_path, work_of(corpus), corpus.units)
    queue = BuildQueue(last_unit=0, keep_open=True)
    scheduler = BuildScheduler(tmp_path, work_of(corpus), corpus.units, queue)
    scheduler.start()
    try:
        queue.wait_for(7)
        assert Manifest.open(tmp_path).units["unit"].tolist() == [7]
        queue.plan([9, 8])
        wait_until(lambda: len(Manifest.open(tmp_path).units) == 3)
        assert scheduler.is_running
    finally:
        scheduler.close()
    assert not scheduler.is_running
    scheduler.check()
    report = build_corpus(tmp_path, corpus)
    assert report.units_built == len(corpus.units) - 3
    assert report.digest == build_corpus(tmp_path / "straight", corpus).digest
    CacheReader.open(tmp_path).verify()


def test_the_error_that_ends_the_thread_is_raised_in_waiting_threads(tmp_path: Path) -> None:
    corpus = small_corpus()
    queue = BuildQueue(keep_open=True)
    scheduler = BuildScheduler(tmp_path / "cache", work_of(corpus), corpus.units, queue)

    def fail() -> None:
        raise DataError("the thread ended")

    scheduler.start(fail)
    with pytest.raises(DataError, match="the thread ended"):
        queue.wait_for(0)
    scheduler.close()
    with pytest.raises(DataError, match="the thread ended"):
        scheduler.check()
