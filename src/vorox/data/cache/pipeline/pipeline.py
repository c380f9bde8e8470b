"""Run stages in threads with bounded queues between them, or serially.

Each stage takes items from the queue before it and puts results into the queue after it. A ``BuildStage`` maps one item
to one item and may have several threads; a ``Flow`` sees all items in order, in one thread, and yields any number of
them. A thread takes an item and reserves the place of its result in one step, so that results have the order of the
items whichever is ready first. ``BuildPipeline.statistics`` reports the counters of stages and queues at any time.

Invariants: output, and the place of a failure, equal those of ``run_serial``; no thread is left running however a
pipeline ends; a queue holds at most its limit, or one larger result, plus the excess of results over their
reservations.
"""

from __future__ import annotations

import contextvars
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Protocol

from vorox.data.cache.pipeline.statistics import BuildStageStatistics, BuildStatistics, QueueStatistics

_JOIN_SECONDS = 10.0
"""How long an ending pipeline waits for a busy thread, such as one in a hanging read."""
_POLL_SECONDS = 0.1


class Item(Protocol):
    """A value that flows through a pipeline: its size, and its place for messages."""

    @property
    def size_bytes(self) -> int: ...
    @property
    def place(self) -> str: ...


@dataclass(frozen=True, slots=True)
class BuildStage:
    """A pure function of one item.

    Attributes:
        name: For statistics and messages.
        work: Maps an item to an item.
        threads: Number of threads.
        reserve_bytes: Bytes to reserve for the result before it is computed, by default the size of the input. If it
            raises, the stage fails at this item.
    """

    name: str
    work: Callable[[Any], Item]
    threads: int = 1
    reserve_bytes: Callable[[Any], int] = attrgetter("size_bytes")


@dataclass(frozen=True, slots=True)
class Flow:
    """A function of all items in order, which may yield more or fewer items.

    Attributes:
        name: For statistics and messages.
        work: Takes an iterator of items, yields items.
    """

    name: str
    work: Callable[[Iterator[Any]], Iterator[Item]]
    threads: int = 1


class _Failure:
    """An exception that travels to the consumer in order, after all earlier items."""

    size_bytes = 0

    def __init__(self, error: BaseException, stage: str, place: str) -> None:
        self.error = error
        error.add_note(f"in stage {stage!r} of the data pipeline" + (f", at {place}" if place else ""))


@dataclass(slots=True)
class _Slot:
    """The place of a result in a queue, reserved before the result exists."""

    size_bytes: int
    item: Any = None


class ResultQueue:
    """The results of a stage in the order of their reservations, with bounded bytes. Thread-safe.

    Args:
        name: For statistics.
        limit_bytes: Capacity in bytes, at least 1. A larger result passes when the queue is empty.
    """

    def __init__(self, name: str, limit_bytes: int) -> None:
        if limit_bytes < 1:
            raise ValueError(f"limit_bytes is {limit_bytes}, but must be at least 1")
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._slots: deque[_Slot] = deque()
        self._ended = False
        self._counters = QueueStatistics(name)

    def reserve(self, size_bytes: int) -> _Slot | None:
        """Wait for room and return the place of the next result; None after the end."""

        def has_room() -> bool:
            return self._ended or not self._slots or self._counters.held_bytes + size_bytes <= self._limit_bytes

        with self._changed:
            if not has_room():
                started = time.perf_counter()
                self._changed.wait_for(has_room)
                self._counters.producer_wait_seconds += time.perf_counter() - started
            if self._ended:
                return None
            self._slots.append(slot := _Slot(size_bytes))
            self._counters.held_bytes += size_bytes
            return slot

    def fill(self, slot: _Slot, item: Any) -> None:
        """Put a result into its place; its actual size replaces the estimate."""
        with self._changed:
            self._counters.held_bytes += item.size_bytes - slot.size_bytes
            slot.size_bytes, slot.item = item.size_bytes, item
            self._changed.notify_all()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until ``get`` would not block. False: timeout."""

        def is_ready() -> bool:
            return self._slots[0].item is not None if self._slots else self._ended

        with self._changed:
            if is_ready():
                return True
            started = time.perf_counter()
            found = self._changed.wait_for(is_ready, timeout_seconds)
            self._counters.consumer_wait_seconds += time.perf_counter() - started
            return found

    def get(self) -> Any:
        """Wait for the next result and return it; None at the end."""
        with self._changed:
            self.wait()
            if not self._slots:
                return None
            slot = self._slots.popleft()
            self._counters.held_bytes -= slot.size_bytes
            self._changed.notify_all()
            return slot.item

    def finish(self) -> None:
        """Mark the end: no more results are reserved."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """Drop all results and release all waiting threads."""
        with self._changed:
            self._slots.clear()
            self.finish()

    def statistics(self) -> QueueStatistics:
        with self._changed:
            return replace(self._counters, depth=sum(slot.item is not None for slot in self._slots))


class _Input:
    """The items that the first stage takes; one thread at a time may call ``get``."""

    def __init__(self, items: Iterable[Any], stop: Callable[[], bool], most_in_flight: int) -> None:
        self._items, self._stop = iter(items), stop
        self._room = threading.Semaphore(most_in_flight)
        self._ended = False

    def get(self) -> Any:
        """Wait until another item may be in flight and return it; None at the end."""
        self._room.acquire()
        try:
            item = None if self._ended or self._stop() else next(self._items, None)
        except BaseException as error:
            item = _Failure(error, "input", "")
        if item is None or isinstance(item, _Failure):
            self.end()
        return item

    def finish_one(self) -> None:
        """Count an item that the consumer is done with, which makes room for another."""
        self._room.release()

    def end(self) -> None:
        """Read no more items."""
        self._ended = True
        self._room.release()


_Source = ResultQueue | _Input


def run_serial(items: Iterable[Any], stages: Sequence[BuildStage | Flow]) -> Generator[Any]:
    """Run the stages in the calling thread; yields the same items as a ``BuildPipeline`` of them."""
    flow = iter(items)
    for stage in stages:
        flow = stage.work(flow) if isinstance(stage, Flow) else map(stage.work, flow)
    yield from flow


class BuildPipeline:
    """Stages that run concurrently. Iterate over it once.

    Args:
        items: Input; read one item at a time, in a thread, when there is room.
        stages: In the order of the flow, at least one.
        queue_bytes: Capacity of each queue.
        consumer: Name of the caller's work on the results, for statistics.
        stop: Called before an item is read; once it returns true, items in flight are finished and no more are read.
        most_in_flight: Limit on items read but not yet consumed, where the stages map items one to one.
        poll: Called in the iterating thread before every item, at the end, and ten times a second while it waits.
    """

    def __init__(
        self,
        items: Iterable[Any],
        stages: Sequence[BuildStage | Flow],
        *,
        queue_bytes: int,
        consumer: str = "write",
        stop: Callable[[], bool] | None = None,
        most_in_flight: int = sys.maxsize,
        poll: Callable[[], None] | None = None,
    ) -> None:
        self._stages = tuple(stages)
        self._poll = poll
        self._input = _Input(items, stop or (lambda: False), most_in_flight)
        self._counters = [
            *(BuildStageStatistics(stage.name, stage.threads) for stage in stages),
            BuildStageStatistics(consumer, 1),
        ]
        names = [counters.name for counters in self._counters]
        self._queues = [ResultQueue(f"{before}>{after}", queue_bytes) for before, after in itertools.pairwise(names)]
        self._counting = threading.Lock()
        self._orders = [threading.Lock() for _ in stages]
        self._threads = [
            threading.Thread(  # threads inherit the caller's context, such as its retry budget
                target=contextvars.copy_context().run,
                args=(self._run, index),
                name=f"vorox-{stage.name}-{number}",
                daemon=True,
            )
            for index, stage in enumerate(stages)
            for number in range(stage.threads)
        ]
        self._started_seconds = self._ended_seconds = 0.0

    def __iter__(self) -> Generator[Any]:
        """Yield the results of the last stage, in order.

        Raises:
            BaseException: The exception of a stage, raised after all earlier items, with a note that names the stage
                and the place.
        """
        self._started_seconds = time.perf_counter()
        for thread in self._threads:
            thread.start()
        try:
            while (item := self._next_result()) is not None:
                if isinstance(item, _Failure):
                    raise item.error
                self._count(-1, item, 0.0)
                yield item
                self._input.finish_one()
        finally:
            self._close()

    def _next_result(self) -> Any:
        if self._poll is not None:
            while not self._queues[-1].wait(_POLL_SECONDS):
                self._poll()
            self._poll()
        return self._queues[-1].get()

    def statistics(self) -> BuildStatistics:
        """Return a snapshot of the counters."""
        now = self._ended_seconds or time.perf_counter()
        seconds = now - self._started_seconds if self._started_seconds else 0.0
        queues = tuple(queue.statistics() for queue in self._queues)
        self._counters[-1].busy_seconds = max(seconds - queues[-1].consumer_wait_seconds, 0.0)
        stages = tuple(
            replace(counters, wait_seconds=max(counters.threads * seconds - counters.busy_seconds, 0.0))
            for counters in self._counters
        )
        return BuildStatistics(seconds, stages, queues)

    def _close(self) -> None:
        self._input.end()
        for queue in self._queues:
            queue.cancel()
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        self._ended_seconds = time.perf_counter()

    def _count(self, index: int, item: Any, busy_seconds: float) -> None:
        with self._counting:
            counters = self._counters[index]
            counters.busy_seconds += busy_seconds
            if item is not None and not isinstance(item, _Failure):
                counters.items += 1
                counters.size_bytes += item.size_bytes

    def _run(self, index: int) -> None:
        """The main function of one thread."""
        stage, target = self._stages[index], self._queues[index]
        source = self._queues[index - 1] if index else self._input
        try:
            if isinstance(stage, BuildStage):
                self._run_stage(index, stage, source, target)
            else:
                self._run_flow(index, stage, source, target)
        except BaseException as error:  # such as an item without a size; without a failure it would look like the end
            if (slot := target.reserve(0)) is not None:
                target.fill(slot, self._fail(error, stage.name, ""))
        finally:
            target.finish()

    def _run_stage(self, index: int, stage: BuildStage, source: _Source, target: ResultQueue) -> None:
        item: Any = None
        while not isinstance(item, _Failure):
            with self._orders[index]:
                if (item := source.get()) is None:
                    return
                size_bytes = 0
                if not isinstance(item, _Failure):
                    try:
                        size_bytes = stage.reserve_bytes(item)
                    except BaseException as error:
                        item = self._fail(error, stage.name, item.place)
                if (slot := target.reserve(size_bytes)) is None:
                    return
            if not isinstance(item, _Failure):
                started = time.perf_counter()
                try:
                    item = stage.work(item)
                except BaseException as error:
                    item = self._fail(error, stage.name, item.place)
                self._count(index, item, time.perf_counter() - started)
            target.fill(slot, item)

    def _run_flow(self, index: int, flow: Flow, source: _Source, target: ResultQueue) -> None:
        inputs = _Inputs(source)
        outputs = run_serial(inputs, [flow])  # calls the flow at the first ``next``, which catches its errors
        item: Any = None
        while not isinstance(item, _Failure):
            started, waited_seconds = time.perf_counter(), inputs.wait_seconds
            try:
                item = next(outputs, None)
            except BaseException as error:
                item = inputs.failure or self._fail(error, flow.name, inputs.place)
            self._count(index, item, time.perf_counter() - started - (inputs.wait_seconds - waited_seconds))
            if item is None or (slot := target.reserve(item.size_bytes)) is None:
                return
            target.fill(slot, item)

    def _fail(self, error: BaseException, stage: str, place: str) -> _Failure:
        self._input.end()
        return _Failure(error, stage, place)


class _Inputs:
    """The inputs of a flow: the latest, and the failure of an earlier stage that ended them, if any."""

    def __init__(self, source: _Source) -> None:
        self._source = source
        self.failure: _Failure | None = None
        self._latest: Item | None = None
        self.wait_seconds = 0.0

    def __iter__(self) -> Iterator[Any]:
        while True:
            started = time.perf_counter()
            item = self._source.get()
            self.wait_seconds += time.perf_counter() - started
            if item is None:
                return
            if isinstance(item, _Failure):
                self.failure = item
                raise item.error
            self._latest = item
            yield item

    @property
    def place(self) -> str:
        return self._latest.place if self._latest else ""
