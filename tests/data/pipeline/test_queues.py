"""The queue between stages: ordered for any timing, bounded, free of deadlocks."""

from __future__ import annotations

import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventually import wait_until_blocked
from vorox.data.pipeline.queues import CreditQueue

PATIENCE_SECONDS = 20.0


def waits(function) -> threading.Thread:
    """Run ``function`` in a thread; the test asserts what changes when it continues."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_items_come_out_in_sequence_order():
    queue = CreditQueue("a>b", 100)
    for sequence in (2, 0, 1):
        assert queue.put(sequence, f"item {sequence}", 10)
    queue.finish(3)
    assert [queue.get() for _ in range(4)] == [(0, "item 0"), (1, "item 1"), (2, "item 2"), None]
    assert queue.num_taken == 3


def test_a_producer_without_credits_waits_until_an_item_is_taken():
    queue = CreditQueue("a>b", 100)
    queue.put(0, "first", 60)
    done = threading.Event()
    thread = waits(lambda: (queue.put(1, "second", 60), done.set()))
    wait_until_blocked(thread)
    began = time.perf_counter()
    assert not done.is_set()
    waited_seconds = time.perf_counter() - began
    assert queue.get() == (0, "first")
    assert done.wait(PATIENCE_SECONDS)
    thread.join()
    statistics = queue.statistics()
    assert statistics.producer_wait_seconds >= waited_seconds > 0
    assert statistics.consumer_wait_seconds == 0
    assert (statistics.depth, statistics.held_bytes, statistics.peak_bytes, statistics.items) == (1, 60, 60, 1)


def test_the_item_that_is_next_passes_a_full_queue():
    queue = CreditQueue("a>b", 100)
    queue.put(1, "later", 100)
    assert queue.reserve(0, 500)  # without this it would deadlock: it is the consumer's next item
    queue.fill(0, "now", 300)
    assert queue.statistics().held_bytes == 400
    assert [queue.get(), queue.get()] == [(0, "now"), (1, "later")]
    assert queue.statistics().held_bytes == 0


def test_an_item_larger_than_the_queue_passes_an_empty_one():
    queue = CreditQueue("a>b", 10)
    assert queue.reserve(5, 1000)
    assert queue.statistics().held_bytes == 1000


def test_cancelling_releases_all_threads():
    queue = CreditQueue("a>b", 10)
    results: list[object] = []
    queue.put(1, "item", 10)
    threads = [waits(lambda: results.append(queue.reserve(7, 10))), waits(lambda: results.append(queue.get()))]
    for thread in threads:
        wait_until_blocked(thread)
    assert results == []
    queue.cancel()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert sorted(results, key=str) == [False, None]
    queue.fill(1, "too late", 10)
    assert not queue.put(8, "item", 1)
    assert queue.get() is None


def test_a_queue_without_credits_is_refused():
    with pytest.raises(ValueError, match="limit_bytes is 0"):
        CreditQueue("a>b", 0)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), max_size=40),
    limit_bytes=st.integers(1, 80),
    producers=st.integers(1, 5),
    consumers=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_no_sizes_credits_or_delays_block_it_or_change_the_order(sizes, limit_bytes, producers, consumers, seed):
    queue = CreditQueue("a>b", limit_bytes)
    numbers = iter(range(len(sizes)))
    lock = threading.Lock()
    taken: list[tuple[int, int]] = []
    delays = random.Random(seed)

    def produce():
        while True:
            with lock:
                sequence = next(numbers, None)
                delay = delays.random() * 0.0004
            if sequence is None:
                return
            assert queue.reserve(sequence, sizes[sequence] // 2)  # an estimate
            time.sleep(delay)
            queue.fill(sequence, sequence, sizes[sequence])

    makers = [threading.Thread(target=produce, daemon=True) for _ in range(producers)]
    for thread in makers:
        thread.start()
    order = threading.Lock()

    def take():
        while True:
            with order:  # so that the record has the order of the queue
                item = queue.get()
                if item is None:
                    return
                taken.append(item)

    takers = [threading.Thread(target=take, daemon=True) for _ in range(consumers)]
    for thread in takers:
        thread.start()
    for thread in makers:
        thread.join(PATIENCE_SECONDS)
    queue.finish(len(sizes))
    for thread in takers:
        thread.join(PATIENCE_SECONDS)
    assert not any(thread.is_alive() for thread in (*makers, *takers))
    assert taken == [(number, number) for number in range(len(sizes))]
    statistics = queue.statistics()
    assert statistics.held_bytes == 0
    largest = max(sizes, default=0)
    # Credits, the next in order, and what each producer's item turned out larger than its estimate.
    assert statistics.peak_bytes <= limit_bytes + largest + producers * largest
