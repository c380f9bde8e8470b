"""Run stages in threads with bounded queues between them, or serially.

Each stage takes items from the queue before it and puts results into the queue after it. A ``Stage`` maps one item to
one item and may have several threads; a ``Flow`` sees all items in order, in one thread, and yields any number of
them. ``Pipeline.statistics`` reports the counters of stages and queues at any time.

Invariants: output, and the place of a failure, equal those of ``run_serial``; no thread is left running however a
pipeline ends.
"""

from __future__ import annotations

import contextvars
import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vorox.data.pipeline.queues import CreditQueue, QueueStatistics

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
class Stage:
    """A pure function of one item.

    Attributes:
        name: For statistics and messages.
        work: Maps an item to an item.
        threads: Number of threads.
        reserve_bytes: Bytes to reserve for the result before it is computed; None: the size of the input.
    """

    name: str
    work: Callable[[Any], Item]
    threads: int = 1
    reserve_bytes: Callable[[Any], int] | None = None


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


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """Counters of a stage.

    Attributes:
        name: ``fetch``, ``decode``, ``filter``, ``tokenize``, ``augment``, ``gather``, ``pack`` or ``write``.
        threads: Number of threads.
        items: Items produced.
        size_bytes: Their bytes.
        busy_seconds: Working time, summed over the threads.
        wait_seconds: Time waiting for input or for room in the output queue, summed over the threads.
    """

    name: str
    threads: int
    items: int
    size_bytes: int
    busy_seconds: float
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class PipelineStatistics:
    """Counters of a pipeline at one moment.

    Attributes:
        seconds: Running time so far.
        stages: In the order of the flow; the last is the consumer.
        queues: The queues between them.
    """

    seconds: float
    stages: tuple[StageStatistics, ...]
    queues: tuple[QueueStatistics, ...]

    @property
    def bottleneck(self) -> str:
        """The stage whose threads were busy for the largest share of the time; empty before any item is done."""
        if self.seconds <= 0 or not any(stage.items for stage in self.stages):
            return ""
        return max(self.stages, key=lambda stage: stage.busy_seconds / stage.threads).name

    def metrics(self) -> dict[str, float]:
        """Return the counters under their names in the metric registry."""
        return dict(self._metrics())

    def _metrics(self) -> Iterator[tuple[str, float]]:
        for stage in self.stages:
            yield f"pipeline/{stage.name}/items", float(stage.items)
            yield f"pipeline/{stage.name}/bytes", float(stage.size_bytes)
            yield f"pipeline/{stage.name}/busy_seconds", stage.busy_seconds
            yield f"pipeline/{stage.name}/wait_seconds", stage.wait_seconds
        for queue in self.queues:
            place = queue.name.replace(">", "_to_")
            yield f"pipeline/{place}/depth", float(queue.depth)
            yield f"pipeline/{place}/held_bytes", float(queue.held_bytes)
            yield f"pipeline/{place}/producer_wait_seconds", queue.producer_wait_seconds
            yield f"pipeline/{place}/consumer_wait_seconds", queue.consumer_wait_seconds


class _Failure:
    """An exception that travels to the consumer in order, after all earlier items."""

    size_bytes = 0

    def __init__(self, error: BaseException, stage: str, place: str) -> None:
        self.error = error
        error.add_note(f"in stage {stage!r} of the data pipeline" + (f", at {place}" if place else ""))


@dataclass
class _Counter:
    """Counters shared by the threads of one stage."""

    items: int = 0
    size_bytes: int = 0
    busy_seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, items: int, size_bytes: int, busy_seconds: float) -> None:
        with self.lock:
            self.items += items
            self.size_bytes += size_bytes
            self.busy_seconds += busy_seconds


class InputQueue:
    """The input of the first stage, with the interface of a queue; thread-safe."""

    def __init__(self, items: Iterable[Any], stop: Callable[[], bool], most_in_flight: int | None) -> None:
        self._items = iter(items)
        self._stop = stop
        self._most_in_flight = most_in_flight
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._ended = False
        self._finished = 0
        self.num_taken = 0

    def get(self) -> tuple[int, Any] | None:
        with self._lock:
            with self._changed:
                self._changed.wait_for(self._has_room)
            if self._ended or self._stop():
                self._ended = True
                return None
            try:
                item = next(self._items)
            except StopIteration:
                self._ended = True
                return None
            except BaseException as error:
                self._ended = True
                item = _Failure(error, "input", "")
            self.num_taken += 1
            return self.num_taken - 1, item

    def _has_room(self) -> bool:
        most = self._most_in_flight
        return self._ended or most is None or self.num_taken - self._finished < most

    def finish_one(self) -> None:
        """Count an item that the consumer is done with, which makes room for another."""
        with self._changed:
            self._finished += 1
            self._changed.notify_all()

    def cancel(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()


_Source = CreditQueue | InputQueue


def run_serial(items: Iterable[Any], stages: Sequence[Stage | Flow]) -> Generator[Any]:
    """Run the stages in the calling thread; yields the same items as a ``Pipeline`` of them."""
    flow = iter(items)
    for stage in stages:
        flow = stage.work(flow) if isinstance(stage, Flow) else map(stage.work, flow)
    yield from flow


class Pipeline:
    """Stages that run concurrently. Iterate over it once.

    Args:
        items: Input; read one item at a time, in a thread, when there is room.
        stages: In the order of the flow, at least one.
        queue_bytes: Capacity of each queue.
        consumer: Name of the caller's work on the results, for statistics.
        stop: Called before an item is read; once it returns true, items in flight are finished and no more are read.
        most_in_flight: Limit on items read but not yet consumed, where the stages map items one to one; None: the
            queues alone set the limit.
        poll: Called in the iterating thread before every item, at the end, and ten times a second while it waits.
    """

    def __init__(
        self,
        items: Iterable[Any],
        stages: Sequence[Stage | Flow],
        *,
        queue_bytes: int,
        consumer: str = "write",
        stop: Callable[[], bool] | None = None,
        most_in_flight: int | None = None,
        poll: Callable[[], None] | None = None,
    ) -> None:
        self._stages = tuple(stages)
        self._poll = poll
        self._consumer = consumer
        self._failed = False
        self._input = InputQueue(items, lambda: self._failed or (stop is not None and stop()), most_in_flight)
        names = [*(stage.name for stage in stages), consumer]
        self._queues = [CreditQueue(f"{before}>{after}", queue_bytes) for before, after in itertools.pairwise(names)]
        self._counters = [_Counter() for _ in names]
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
            while (taken := self._next_result()) is not None:
                _, item = taken
                if isinstance(item, _Failure):
                    raise item.error
                self._counters[-1].add(1, item.size_bytes, 0.0)
                yield item
                self._input.finish_one()
        finally:
            self._close()

    def _next_result(self) -> tuple[int, Any] | None:
        if self._poll is not None:
            while not self._queues[-1].wait(_POLL_SECONDS):
                self._poll()
            self._poll()
        return self._queues[-1].get()

    def statistics(self) -> PipelineStatistics:
        """Return a snapshot of the counters."""
        now = self._ended_seconds or time.perf_counter()
        seconds = now - self._started_seconds if self._started_seconds else 0.0
        queues = tuple(queue.statistics() for queue in self._queues)
        starved = [0.0, *(queue.consumer_wait_seconds for queue in queues)]
        blocked = [*(queue.producer_wait_seconds for queue in queues), 0.0]
        names = [*((stage.name, stage.threads) for stage in self._stages), (self._consumer, 1)]
        busy = [counter.busy_seconds for counter in self._counters]
        busy[-1] = max(seconds - starved[-1], 0.0)
        stages = tuple(
            StageStatistics(name, threads, counter.items, counter.size_bytes, busy[i], starved[i] + blocked[i])
            for i, ((name, threads), counter) in enumerate(zip(names, self._counters, strict=True))
        )
        return PipelineStatistics(seconds, stages, queues)

    def _close(self) -> None:
        self._input.cancel()
        for queue in self._queues:
            queue.cancel()
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        self._ended_seconds = time.perf_counter()

    def _run(self, index: int) -> None:
        """The main function of one thread."""
        source = self._queues[index - 1] if index else self._input
        stage = self._stages[index]
        if isinstance(stage, Stage):
            self._run_stage(stage, source, self._queues[index], self._counters[index])
        else:
            self._run_flow(stage, source, self._queues[index], self._counters[index])

    def _run_stage(self, stage: Stage, source: _Source, target: CreditQueue, counter: _Counter) -> None:
        while (taken := source.get()) is not None:
            sequence, item = taken
            size_bytes = stage.reserve_bytes(item) if stage.reserve_bytes and _is_result(item) else item.size_bytes
            if not target.reserve(sequence, size_bytes):
                return
            if _is_result(item):
                started = time.perf_counter()
                try:
                    item = stage.work(item)
                except BaseException as error:
                    item = self._make_failure(error, stage.name, item.place)
                counter.add(int(_is_result(item)), item.size_bytes, time.perf_counter() - started)
            target.fill(sequence, item, item.size_bytes)
        target.finish(source.num_taken)

    def _run_flow(self, flow: Flow, source: _Source, target: CreditQueue, counter: _Counter) -> None:
        inputs = _Inputs(source)
        outputs = flow.work(iter(inputs))
        sequence = 0
        while True:
            started, waited = time.perf_counter(), inputs.wait_seconds
            try:
                item = next(outputs, None)
            except BaseException as error:
                item = self._make_failure(error, flow.name, inputs.item.place if inputs.item else "")
            busy_seconds = time.perf_counter() - started - (inputs.wait_seconds - waited)
            if item is None:
                item = inputs.failure
            is_result = item is not None and _is_result(item)
            counter.add(int(is_result), item.size_bytes if item else 0, busy_seconds)
            if item is None or not target.put(sequence, item, item.size_bytes):
                break
            sequence += 1
            if not _is_result(item):
                break
        target.finish(sequence)

    def _make_failure(self, error: BaseException, stage: str, place: str) -> _Failure:
        self._failed = True
        return _Failure(error, stage, place)


def _is_result(item: Any) -> bool:
    return not isinstance(item, _Failure)


class _Inputs:
    """The input items of a flow, the one in progress, and the failure that ended them, if any."""

    def __init__(self, source: _Source) -> None:
        self._source = source
        self.failure: _Failure | None = None
        self.item: Item | None = None
        self.wait_seconds = 0.0

    def __iter__(self) -> Iterator[Any]:
        while True:
            started = time.perf_counter()
            taken = self._source.get()
            self.wait_seconds += time.perf_counter() - started
            if taken is None:
                return
            if isinstance(taken[1], _Failure):
                self.failure = taken[1]
                return
            self.item = taken[1]
            yield taken[1]
