"""Threaded stages behave like the serial run: same items, order and failures, and they terminate."""

from __future__ import annotations

import contextvars
import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vorox.core.errors import DataError
from vorox.data.cache.pipeline import pipeline as pipeline_module
from vorox.data.cache.pipeline.pipeline import BuildPipeline, BuildStage, Flow, run_serial

PATIENCE_SECONDS = 20.0


@dataclass(frozen=True)
class Number:
    value: int
    size_bytes: int = 8

    @property
    def place(self) -> str:
        return f"number {self.value}"


def numbers(count: int):
    return (Number(value) for value in range(count))


OTHER_THREADS = ("vorox-storage", "vorox-checkpoint")


def our_threads() -> list[str]:
    """Return the threads of pipelines.

    Not that of remote storage, which lives as long as the process, and not those that write checkpoints: a run that
    another test of this worker killed keeps its thread until it is collected.
    """
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("vorox-") and not name.startswith(OTHER_THREADS)]


def doubled(item: Number) -> Number:
    return Number(2 * item.value, item.size_bytes)


def repeated(items):
    """Yield each number as often as its last digit: a flow that drops and multiplies items."""
    for item in items:
        for _ in range(item.value % 3):
            yield item


def summed(items):
    """Sums of up to three neighbours."""
    while group := list(itertools.islice(items, 3)):
        yield Number(sum(item.value for item in group), sum(item.size_bytes for item in group))


@settings(max_examples=40, deadline=None)
@given(count=st.integers(0, 40), threads=st.integers(1, 4), queue_bytes=st.integers(1, 100), seed=st.integers(0, 10**6))
def test_the_output_equals_that_of_one_thread(count, threads, queue_bytes, seed):
    delays = random.Random(seed)
    waits = [delays.random() * 0.0005 for _ in range(64)]

    def slow(item: Number) -> Number:
        time.sleep(waits[item.value % 64])
        return Number(item.value + 1, delays.randrange(50))

    stages = [
        Flow("repeat", repeated),
        BuildStage("slow", slow, threads),
        BuildStage("double", doubled, 2),
        Flow("sum", summed),
    ]
    found = [item.value for item in BuildPipeline(numbers(count), stages, queue_bytes=queue_bytes)]
    flat = [2 * (value + 1) for value in range(count) for _ in range(value % 3)]
    assert found == [sum(flat[first : first + 3]) for first in range(0, len(flat), 3)]
    assert our_threads() == []


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("failing", ["stage", "flow", "input"])
def test_a_failure_follows_all_earlier_items_and_names_stage_and_place(threads, failing):
    def breaks(item: Number) -> Number:
        if item.value >= 5:
            time.sleep(0.001 * (9 - item.value))  # the later ones fail first
            raise DataError(f"bad {item.value}", where="file, record 5")
        return item

    def flow_breaks(items):
        for item in items:
            yield breaks(item) if failing == "flow" else item

    def source():
        for value in range(9):
            yield breaks(Number(value)) if failing == "input" else Number(value)

    stages = [BuildStage("work", breaks if failing == "stage" else doubled, threads), Flow("collect", flow_breaks)]
    if failing == "flow":
        stages = stages[1:]
    pipeline = BuildPipeline(source(), stages, queue_bytes=1000)
    found = []
    with pytest.raises(DataError, match="bad 5") as caught:
        found.extend(item.value for item in pipeline)
    assert found == [2 * value if failing == "input" else value for value in range(5)]
    assert caught.value.where == "file, record 5"
    stage = {"stage": "'work'", "flow": "'collect'", "input": "'input'"}[failing]
    (note,) = caught.value.__notes__
    assert stage in note
    assert failing == "input" or "number 5" in note
    assert our_threads() == []


def fail_after_patience() -> Callable[[], None]:
    """A ``poll`` that ends a pipeline whose consumer hangs."""
    deadline = time.monotonic() + PATIENCE_SECONDS

    def poll() -> None:
        assert time.monotonic() < deadline, "the consumer hangs"

    return poll


@pytest.mark.parametrize("threads", [1, 3])
def test_a_failed_estimate_of_the_size_is_the_failure_of_its_item(threads):
    def reserve_bytes(item: Number) -> int:
        if item.value >= 5:
            raise DataError(f"bad {item.value}", where="file, record 5")
        return 8

    stage = BuildStage("work", doubled, threads, reserve_bytes)
    found = []
    with pytest.raises(DataError, match="bad 5") as caught:
        found.extend(
            item.value for item in BuildPipeline(numbers(9), [stage], queue_bytes=1000, poll=fail_after_patience())
        )  # fmt: skip
    assert found == [0, 2, 4, 6, 8]
    assert caught.value.__notes__ == ["in stage 'work' of the data pipeline, at number 5"]
    assert our_threads() == []


@pytest.mark.parametrize("failing", ["flow", "input"])
def test_a_flow_that_fails_when_it_is_called(failing):
    """Not as a generator function, which fails at its first item."""

    def ordered(items):
        found = sorted(items, key=lambda item: -item.value)
        raise DataError(f"bad {len(found)}", where="file")

    def source():
        yield from numbers(3)
        if failing == "input":
            raise DataError("bad input", where="file")

    pipeline = BuildPipeline(source(), [Flow("order", ordered)], queue_bytes=1000, poll=fail_after_patience())
    with pytest.raises(DataError, match="bad 3" if failing == "flow" else "bad input") as caught:
        list(pipeline)
    note = "'order' of the data pipeline, at number 2" if failing == "flow" else "'input' of the data pipeline"
    assert caught.value.__notes__ == [f"in stage {note}"]
    assert our_threads() == []


def test_an_item_without_a_size_is_an_error_and_not_the_end():
    values = Flow("values", lambda items: (item.value for item in items))
    pipeline = BuildPipeline(numbers(3), [values], queue_bytes=1000, poll=fail_after_patience())
    with pytest.raises(AttributeError, match="size_bytes") as caught:
        list(pipeline)
    assert caught.value.__notes__ == ["in stage 'values' of the data pipeline"]
    assert our_threads() == []


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 30), threads=st.integers(1, 4), failing=st.integers(0, 40), queue_bytes=st.integers(1, 99))
def test_results_and_failure_equal_those_of_the_serial_run(count, threads, failing, queue_bytes):
    def breaks(item: Number) -> Number:
        if item.value == failing or item.value > failing + 3:
            raise DataError(f"bad {item.value}", where="here")
        return item

    stages = [
        BuildStage("double", doubled, threads),
        BuildStage("break", breaks, threads),
        Flow("sum", summed),
        BuildStage("x", doubled),
    ]

    def outcome(items) -> list[int | str]:
        found: list[int | str] = []
        try:
            found.extend(item.value for item in items)
        except DataError as error:
            found.append(error.what)
        return found

    expected = outcome(run_serial(numbers(count), stages))
    assert outcome(BuildPipeline(numbers(count), stages, queue_bytes=queue_bytes)) == expected
    assert our_threads() == []


def test_no_thread_remains_when_the_consumer_stops():
    taken = []
    source = (taken.append(value) or Number(value) for value in itertools.count())
    pipeline = BuildPipeline(source, [BuildStage("double", doubled, 2), Flow("sum", summed)], queue_bytes=40)
    results = iter(pipeline)
    assert next(results).value == 0 + 2 + 4
    results.close()
    assert our_threads() == []
    assert len(taken) < 60  # bounded by the queues, not by the consumer's patience


def test_a_stop_finishes_items_in_flight_and_starts_no_others():
    taken = []
    source = (taken.append(value) or Number(value) for value in itertools.count())
    pipeline = BuildPipeline(source, [BuildStage("double", doubled, 2)], queue_bytes=64, stop=lambda: len(taken) >= 10)
    assert [item.value for item in pipeline] == [2 * value for value in range(10)]
    assert taken == list(range(10))


def test_no_more_items_are_in_flight_than_allowed():
    taken, most = [], 3
    source = (taken.append(value) or Number(value) for value in range(50))
    stages = [BuildStage("double", doubled, 2), BuildStage("again", doubled)]
    pipeline = BuildPipeline(source, stages, queue_bytes=10**6, most_in_flight=most)
    for count, item in enumerate(pipeline):
        assert item.value == 4 * count
        time.sleep(0.001)
        assert len(taken) <= count + most
    assert len(taken) == 50
    numbers_without_end = (Number(value) for value in itertools.count())
    endless = BuildPipeline(numbers_without_end, [BuildStage("double", doubled)], queue_bytes=10**6, most_in_flight=1)
    results = iter(endless)
    assert [next(results).value, next(results).value] == [0, 2]
    results.close()
    assert our_threads() == []


def test_memory_is_bounded_by_credits_when_the_consumer_is_slow():
    made, held_bytes = [], []

    def make(item: Number) -> Number:
        made.append(item.value)
        held_bytes.append(pipeline.statistics().queues[0].held_bytes)
        return Number(item.value, 1000)

    stage = BuildStage("make", make, 3, reserve_bytes=lambda item: 1000)
    pipeline = BuildPipeline(numbers(200), [stage], queue_bytes=5000)
    for index, _ in enumerate(pipeline):
        if index == 20:
            time.sleep(0.05)
            assert len(made) <= 21 + 5
    (queue,) = pipeline.statistics().queues
    assert max(held_bytes) == 5000, "counted with the reservation of the item that is made"
    assert made[-1] == 199
    assert queue.held_bytes == 0


@pytest.mark.parametrize("slow", ["read", "work", "write"])
def test_the_bottleneck_is_the_stage_that_the_others_wait_for(slow, monkeypatch):
    """Uses a clock that advances only while the slow stage works, so machine load has no effect."""
    now = [1000.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic)
    monkeypatch.setattr(pipeline_module, "time", clock)
    ticking = threading.Lock()

    def pause(stage: str) -> None:
        if stage == slow:
            time.sleep(0.002)  # until the others wait
            with ticking:
                now[0] += 1

    def read(items):
        for item in items:
            pause("read")
            yield item

    def work(item: Number) -> Number:
        pause("work")
        return item

    stages = [Flow("read", read), BuildStage("work", work, 2), Flow("pack", lambda items: items)]
    pipeline = BuildPipeline(numbers(30), stages, queue_bytes=16)
    for _ in pipeline:
        pause("write")
    statistics = pipeline.statistics()
    assert statistics.bottleneck == slow
    assert [stage.name for stage in statistics.stages] == ["read", "work", "pack", "write"]
    assert [queue.name for queue in statistics.queues] == ["read>work", "work>pack", "pack>write"]
    assert all((stage.items, stage.size_bytes) == (30, 240) for stage in statistics.stages)
    assert statistics.seconds == 30
    for stage in statistics.stages:
        assert stage.busy_seconds + stage.wait_seconds <= 30 * stage.threads, "no time counts twice"
    by_name = {stage.name: stage for stage in statistics.stages}
    assert by_name[slow].busy_seconds >= 30
    if slow != "work":  # two threads: one may wait while the other works
        assert by_name[slow].wait_seconds == 0
    assert all(by_name[name].wait_seconds > 0 for name in {"read", "work", "pack", "write"} - {slow})


def test_threads_inherit_the_context_of_the_caller():
    holds = contextvars.ContextVar("holds", default=0)
    token = holds.set(7)
    try:
        stage = BuildStage("add", lambda item: Number(item.value + holds.get()), 2)
        assert [item.value for item in BuildPipeline(numbers(5), [stage], queue_bytes=100)] == [7, 8, 9, 10, 11]
    finally:
        holds.reset(token)


def test_an_idle_pipeline_has_no_bottleneck():
    pipeline = BuildPipeline([], [BuildStage("work", doubled)], queue_bytes=10)
    assert pipeline.statistics().bottleneck == ""
    assert list(pipeline) == []
    assert pipeline.statistics().bottleneck == ""
