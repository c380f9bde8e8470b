"""The queue between two stages: ordered for any timing, bounded, free of deadlocks."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventually import wait_until_blocked
from vorox.data.cache.pipeline.pipeline import ResultQueue

PATIENCE_SECONDS = 20.0


@dataclass(frozen=True)
class Result:
    name: str | int
    size_bytes: int


def put(queue: ResultQueue, name: str, size_bytes: int) -> bool:
    slot = queue.reserve(size_bytes)
    if slot is not None:
        queue.fill(slot, Result(name, size_bytes))
    return slot is not None


def waits(function) -> threading.Thread:
    """Run ``function`` in a thread; the test asserts what changes when it continues."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_results_come_out_in_the_order_of_their_reservations():
    queue = ResultQueue("a>b", 100)
    slots = [queue.reserve(10) for _ in range(3)]
    for number in (2, 0, 1):
        queue.fill(slots[number], Result(number, 10))
        assert queue.wait(0) == (number != 2), "nothing comes out before the first"
    queue.finish()
    assert [queue.get().name for _ in range(3)] == [0, 1, 2]
    assert queue.get() is None


def test_a_producer_without_room_waits_until_a_result_is_taken():
    queue = ResultQueue("a>b", 100)
    put(queue, "first", 60)
    done = threading.Event()
    thread = waits(lambda: (put(queue, "second", 60), done.set()))
    wait_until_blocked(thread)
    began = time.perf_counter()
    assert not done.is_set()
    waited_seconds = time.perf_counter() - began
    assert queue.get().name == "first"
    assert done.wait(PATIENCE_SECONDS)
    thread.join()
    statistics = queue.statistics()
    assert statistics.producer_wait_seconds >= waited_seconds > 0
    assert statistics.consumer_wait_seconds == 0
    assert (statistics.depth, statistics.held_bytes) == (1, 60)


def test_the_actual_size_replaces_the_estimate():
    queue = ResultQueue("a>b", 100)
    slot = queue.reserve(50)
    assert (queue.statistics().depth, queue.statistics().held_bytes) == (0, 50)
    queue.fill(slot, Result("larger", 300))
    assert (queue.statistics().depth, queue.statistics().held_bytes) == (1, 300)
    thread = waits(lambda: queue.reserve(1))
    wait_until_blocked(thread)  # the queue is over its limit
    assert queue.get().name == "larger"
    thread.join(PATIENCE_SECONDS)
    assert queue.statistics().held_bytes == 1


def test_a_result_larger_than_the_queue_passes_an_empty_one():
    queue = ResultQueue("a>b", 10)
    assert queue.reserve(1000) is not None
    assert queue.statistics().held_bytes == 1000


@pytest.mark.parametrize("end", ["finish", "cancel"])
def test_the_end_releases_all_threads(end):
    queue, empty = ResultQueue("a>b", 10), ResultQueue("b>c", 10)
    results: list[object] = []
    slot = queue.reserve(10)
    threads = [waits(lambda: results.append(queue.reserve(7))), waits(lambda: results.append(empty.get()))]
    for thread in threads:
        wait_until_blocked(thread)
    assert results == []
    for each in (queue, empty):
        getattr(each, end)()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert results == [None, None]
    queue.fill(slot, Result("reserved before the end", 10))
    assert not put(queue, "too late", 1)
    found = queue.get()
    assert found is None if end == "cancel" else found.name == "reserved before the end"
    assert queue.get() is None


def test_cancelling_releases_a_consumer_that_waits_for_a_reserved_result():
    queue = ResultQueue("a>b", 10)
    results: list[object] = []
    queue.reserve(10)
    thread = waits(lambda: results.append(queue.get()))
    wait_until_blocked(thread)
    queue.cancel()
    thread.join(PATIENCE_SECONDS)
    assert results == [None]


def test_a_queue_without_capacity_is_refused():
    with pytest.raises(ValueError, match="limit_bytes is 0"):
        ResultQueue("a>b", 0)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), max_size=40),
    limit_bytes=st.integers(1, 80),
    producers=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_no_sizes_limits_or_delays_block_it_or_change_the_order(sizes, limit_bytes, producers, seed):
    queue = ResultQueue("a>b", limit_bytes)
    numbers = iter(range(len(sizes)))
    order = threading.Lock()
    taken: list[int] = []
    held_bytes = [0]
    delays = random.Random(seed)

    def produce():
        while True:
            with order:
                number = next(numbers, None)
                delay = delays.random() * 0.0004
                if number is None:
                    return
                slot = queue.reserve(sizes[number] // 2)  # an estimate
                held_bytes.append(queue.statistics().held_bytes)
            time.sleep(delay)
            queue.fill(slot, Result(number, sizes[number]))
            held_bytes.append(queue.statistics().held_bytes)

    def take():
        while (item := queue.get()) is not None:
            taken.append(item.name)

    makers = [threading.Thread(target=produce, daemon=True) for _ in range(producers)]
    taker = threading.Thread(target=take, daemon=True)
    for thread in (*makers, taker):
        thread.start()
    for thread in makers:
        thread.join(PATIENCE_SECONDS)
    queue.finish()
    taker.join(PATIENCE_SECONDS)
    assert not any(thread.is_alive() for thread in (*makers, taker))
    assert taken == list(range(len(sizes)))
    assert queue.statistics().held_bytes == 0
    largest = max(sizes, default=0)
    # The limit or one larger estimate, and what each producer's result turned out larger than its estimate.
    assert max(held_bytes) <= max(limit_bytes, largest) + producers * largest
