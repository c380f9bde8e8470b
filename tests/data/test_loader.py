"""The loader: the batches of the plan for any threads, shards and interruptions; errors at the right step."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventually import PATIENCE_SECONDS, wait_until
from fake_rows import FakeRows
from processor_cost import cost
from vorox.core.batch import IGNORED_LABEL, Batch, DataCursor, DataShard, Progress
from vorox.core.errors import ConfigError, DataError
from vorox.core.files.chained_log import HashChainedLog
from vorox.core.row_set_hash import finish, no_lanes
from vorox.data import prefetch as prefetching
from vorox.data.cache.build import build
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.units.unit_builder import UnitBuilder
from vorox.data.documents import Document, SourceFile, Unit, UnitSpan
from vorox.data.order.loader import BatchStream, first_cursor, open_batches, validation_batches
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_events import PlanSource, PlanStart
from vorox.data.prefetch import Prefetcher, map_ordered
from vorox.data.recipe import Recipe
from vorox.data.rows import RowBlock

GLOBAL_BATCH = 8
STEPS = 12


def make_plan(directory: Path, readers: list[Any], *, batch: int = GLOBAL_BATCH, steps: int = STEPS) -> DataPlan:
    weights = [Fraction(number + 1, 3) for number in range(len(readers))]
    sources = tuple(
        PlanSource(str(reader.recipe.source["name"]), weight, reader.recipe.digest, reader.row_tokens)
        for reader, weight in zip(readers, weights, strict=True)
    )
    plan = DataPlan.create(directory / f"plan{batch}.jsonl", PlanStart(11, True, batch, sources), readers)
    plan.extend_to(steps * batch, readers)
    return plan


@pytest.fixture
def readers() -> list[FakeRows]:
    return [FakeRows("code", [20, 0, 13]), FakeRows("text", [41])]


@pytest.fixture
def plan(tmp_path: Path, readers: list[FakeRows]) -> DataPlan:
    return make_plan(tmp_path, readers)


def stream(plan: DataPlan, readers: list[Any], cursor: DataCursor | None = None, **options: Any) -> BatchStream:
    defaults: dict[str, Any] = {
        "shard": DataShard(),
        "global_batch_sequences": plan.start.global_batch_sequences,
        "micro_batch_sequences": 2,
        "document_mask": True,
        "num_threads": 0,
        "prefetch_batches": 3,
    }
    return open_batches(plan, readers, cursor=cursor or first_cursor(plan, 11), **{**defaults, **options})


def take(batches: BatchStream, count: int) -> list[Batch]:
    with batches:
        return [next(batches) for _ in range(count)]


def identity(batch: Batch) -> tuple[object, ...]:
    """Every bit of a batch."""
    arrays = (batch.tokens_ABT, batch.labels_ABT, batch.segment_ids_ABT, batch.position_ids_ABT, batch.row_digests_AB)
    hashes = tuple(None if a is None else (a.shape, hashlib.sha256(a.tobytes()).hexdigest()) for a in arrays)
    return batch.step, hashes, batch.num_target_tokens, batch.cursor_after


def digest_of(parts: list[Batch]) -> str:
    """The batch digest of the parts of all shards."""
    total = no_lanes()
    for part in parts:
        assert part.lanes is not None
        total += part.lanes
    return finish(total)


class Slow(FakeRows):
    """Takes a different time for every read, so that threads overtake each other."""

    def read_rows(self, rows: np.ndarray) -> RowBlock:
        time.sleep(int(rows.sum()) % 5 * 0.002)
        return super().read_rows(rows)


class Failing(FakeRows):
    """Refuses one row."""

    bad_row = 17

    def read_rows(self, rows: np.ndarray) -> RowBlock:
        if self.bad_row in rows.tolist():
            raise DataError(f"row {self.bad_row} does not match its hash", where="chunk 0")
        return super().read_rows(rows)


class Stuck(FakeRows):
    """Waits in its second read until it is let go."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.go, self.waiting = threading.Event(), threading.Event()

    def read_rows(self, rows: np.ndarray) -> RowBlock:
        if self.reads >= 1:
            self.waiting.set()
            self.go.wait(PATIENCE_SECONDS)
        return super().read_rows(rows)


def test_batches_hold_the_rows_of_the_plan_in_slot_order(plan: DataPlan, readers: list[FakeRows]) -> None:
    for step, batch in enumerate(take(stream(plan, readers), STEPS)):
        assert batch.step == step
        assert batch.tokens_ABT.shape == batch.labels_ABT.shape == (4, 2, 8)
        assert batch.row_digests_AB.shape == (4, 2)
        assert batch.num_target_tokens == np.count_nonzero(batch.labels_ABT != IGNORED_LABEL)
        assert batch.cursor_after == DataCursor(plan.digest, plan.num_events, step + 1, (step + 1) * GLOBAL_BATCH, 11)
        found = plan.locate(np.arange(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH))
        for slot, tokens in enumerate(batch.tokens_ABT.reshape(GLOBAL_BATCH, -1).tolist()):
            assert tokens == readers[found.source_index[slot]].tokens(int(found.row[slot]))[:-1]


def test_the_first_batch_waits_for_no_other_rows_to_be_located(
    plan: DataPlan, readers: list[FakeRows], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any cursor; later steps are located together."""
    asked: list[list[int]] = []
    locate = plan.locate
    monkeypatch.setattr(plan, "locate", lambda positions: asked.append(positions.tolist()) or locate(positions))
    whole = take(stream(plan, readers), STEPS)
    assert len(asked) == 2
    asked.clear()
    resumed = take(stream(plan, readers, whole[4].cursor_after), STEPS - 5)
    assert asked[0] == list(range(5 * GLOBAL_BATCH, 6 * GLOBAL_BATCH))
    assert len(asked) == 2
    assert [identity(batch) for batch in resumed] == [identity(batch) for batch in whole[5:]]


def test_segments_may_begin_at_any_unit(tmp_path: Path) -> None:
    """As a growing cache will add them: rows are counted from the segment's first unit."""
    reader = FakeRows("code", [6, 5, 4])
    path = make_plan(tmp_path, [reader], steps=0).path
    for start_draw, epoch, units, num_rows in [(0, 0, [1, 3], 9), (9, 1, [2, 3], 4), (13, 2, [0, 1], 6)]:
        event = {
            "kind": "segment", "source": "code", "start_draw": start_draw, "epoch": epoch, "num_epochs": 1,
            "ranges": [[*units, num_rows]], "content_digest": reader.content_digest(*units),
        }  # fmt: skip
        HashChainedLog(path).append([event])
    plan = DataPlan.open(path)
    batches = take(stream(plan, [reader], num_threads=1), 2)
    tokens = [tuple(row) for batch in batches for row in batch.tokens_ABT.reshape(GLOBAL_BATCH, -1).tolist()]
    row_of = {tuple(reader.tokens(row)[:-1]): row for row in range(15)}
    rows = [row_of[row] for row in tokens]
    for row in range(15):
        assert plan.positions_of(0, row, reader).tolist() == [at for at, found in enumerate(rows) if found == row]
    assert sorted(rows)[3:] == sorted([*range(6, 15), *range(11, 15)])  # and three of the last segment's six


@pytest.mark.parametrize("document_mask", [True, False])
def test_threads_and_prefetch_change_nothing(tmp_path: Path, document_mask: bool) -> None:
    slow = [Slow("code", [20, 0, 13]), Slow("text", [41])]
    plan = make_plan(tmp_path, slow)
    expected = [identity(batch) for batch in take(stream(plan, slow, document_mask=document_mask), STEPS)]
    for threads, prefetch in [(1, 1), (1, 4), (4, 1), (4, 3), (4, 16)]:
        options = {"document_mask": document_mask, "num_threads": threads, "prefetch_batches": prefetch}
        assert [identity(batch) for batch in take(stream(plan, slow, **options), STEPS)] == expected
    assert len({tuple(identity(batch)[1]) for batch in take(stream(plan, slow), STEPS)}) == STEPS


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("count", [2, 4])
def test_shards_concatenate_to_the_same_global_batch(
    plan: DataPlan, readers: list[FakeRows], count: int, micro: int
) -> None:
    """The global batch in slot order is the same at any number of data-parallel processes."""
    whole = take(stream(plan, readers, micro_batch_sequences=micro), STEPS)
    shards = [
        take(stream(plan, readers, shard=DataShard(index, count), micro_batch_sequences=micro), STEPS)
        for index in range(count)
    ]
    for step, batch in enumerate(whole):
        parts = [shard[step] for shard in shards]
        assert all(part.tokens_ABT.shape == (GLOBAL_BATCH // (micro * count), micro, 8) for part in parts)
        for name in ("tokens_ABT", "labels_ABT", "segment_ids_ABT", "position_ids_ABT", "row_digests_AB"):
            ranks_side_by_side = np.concatenate([getattr(part, name) for part in parts], axis=1)
            flat = getattr(batch, name).reshape(GLOBAL_BATCH, -1)
            assert np.array_equal(ranks_side_by_side.reshape(GLOBAL_BATCH, -1), flat)
        assert sum(part.num_target_tokens for part in parts) == batch.num_target_tokens
        assert {part.cursor_after for part in parts} == {batch.cursor_after}


@pytest.mark.parametrize("width", [1, 2, 4])
def test_shards_side_by_side_are_those_of_as_many_processes(
    plan: DataPlan, readers: list[FakeRows], width: int
) -> None:
    """A process that reads several shards has their micro-batches one beside the other."""
    single = [
        take(stream(plan, readers, shard=DataShard(index, 4), micro_batch_sequences=1), STEPS) for index in range(4)
    ]
    for first in range(0, 4, width):
        shard = DataShard(first, 4, width)
        progress = Progress(0, 0, first_cursor(plan, 11))
        for step, batch in enumerate(take(stream(plan, readers, shard=shard, micro_batch_sequences=1), STEPS)):
            parts = [one[step] for one in single[first : first + width]]
            assert np.array_equal(batch.tokens_ABT, np.concatenate([part.tokens_ABT for part in parts], axis=1))
            assert batch.num_target_tokens == sum(part.num_target_tokens for part in parts)
            progress = progress.advance(batch, shard)
        assert progress.num_tokens == STEPS * GLOBAL_BATCH * 8


def test_shards_side_by_side_must_come_out_even(plan: DataPlan, readers: list[FakeRows]) -> None:
    for shard in (DataShard(0, 3, 2), DataShard(3, 4, 2), DataShard(0, 4, 0)):
        with pytest.raises(ConfigError, match=r"cannot be split evenly|less than the 9 devices"):
            stream(plan, readers, micro_batch_sequences=1, shard=shard)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_geometry_resumes_to_the_same_rows(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any shards, micro-batch, threads; stopped anywhere and continued with others: the same rows in the same slots."""
    batch = data.draw(st.sampled_from([4, 6, 12]))
    names = ["a", "b", "c"][: data.draw(st.integers(1, 3))]
    readers = [FakeRows(name, data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))) for name in names]
    plan = make_plan(tmp_path_factory.mktemp("run"), readers, batch=batch, steps=6)
    straight = take(stream(plan, readers, micro_batch_sequences=1), 6)
    cursor, step = first_cursor(plan, 11), 0
    while step < 6:
        count = data.draw(st.sampled_from([n for n in (1, 2, 3) if batch % n == 0]))
        micro = data.draw(st.sampled_from([n for n in (1, 2, 3, 6) if batch % (n * count) == 0]))
        steps = data.draw(st.integers(1, 6 - step))
        options = {"num_threads": data.draw(st.integers(0, 2)), "micro_batch_sequences": micro}
        plan = DataPlan.open(plan.path)
        parts = [
            take(stream(plan, readers, cursor, shard=DataShard(index, count), **options), steps)
            for index in range(count)
        ]
        for number in range(steps):
            rows = np.concatenate([part[number].row_digests_AB for part in parts], axis=1)
            assert rows.reshape(-1).tolist() == straight[step + number].row_digests_AB.reshape(-1).tolist()
            assert digest_of([part[number] for part in parts]) == straight[step + number].digest()
        cursor = DataCursor.from_json(parts[0][-1].cursor_after.to_json())
        step += steps


def test_read_ahead_is_bounded(plan: DataPlan, readers: list[FakeRows]) -> None:
    started: list[int] = []

    def read(step: int) -> Any:
        started.append(step)
        return step

    with Prefetcher(read, lambda: 100, first=5, num_threads=3, depth=4) as batches:
        for step in range(5, 30):
            wait_until(lambda: batches.queue_depth == 4)
            assert sorted(started) == list(range(5, step + 4))
            assert next(batches) == step


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_a_reader_error_surfaces_at_its_step(tmp_path: Path, threads: int) -> None:
    readers = [Failing("code", [60])]
    plan = make_plan(tmp_path, readers, steps=7)
    bad_step = int(plan.positions_of(0, Failing.bad_row, readers[0])[0]) // GLOBAL_BATCH
    assert 0 < bad_step < 7
    batches = stream(plan, readers, num_threads=threads, prefetch_batches=7)
    for step in range(bad_step):
        assert next(batches).step == step
    with pytest.raises(DataError, match="row 17 does not match its hash"):
        next(batches)
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("vorox-prefetch")]


def test_an_interrupt_in_a_reader_thread_reaches_the_consumer() -> None:
    def read(step: int) -> Batch:
        raise KeyboardInterrupt

    batches = Prefetcher(read, lambda: 1, num_threads=1, depth=1)
    with pytest.raises(KeyboardInterrupt):
        next(batches)


def test_a_map_keeps_the_order_of_its_items_and_raises_at_the_item_that_fails() -> None:
    begun: list[int] = []

    def halved(number: int) -> float:
        begun.append(number)
        time.sleep(number % 3 * 0.002)
        return 1 / (number - 40)

    results = map_ordered(halved, range(100), 4)
    assert [next(results) for _ in range(40)] == [(number, 1 / (number - 40)) for number in range(40)]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert max(begun) < 45, "little is begun ahead"
    assert list(map_ordered(halved, [], 4)) == []
    assert [str(found) for _, found in map_ordered(ValueError, "ab", 2)] == ["a", "b"], "returned, not raised"


@pytest.mark.parametrize("threads", [0, 2])
def test_beyond_the_plan_is_an_error_and_extending_goes_on(
    plan: DataPlan, readers: list[FakeRows], threads: int
) -> None:
    planned = plan.num_positions // GLOBAL_BATCH
    batches = stream(plan, readers, num_threads=threads, prefetch_batches=5)
    first = [identity(next(batches)) for _ in range(planned)]
    plan.extend_to(plan.num_positions + 40 * GLOBAL_BATCH, readers)
    more = [identity(next(batches)) for _ in range(plan.num_positions // GLOBAL_BATCH - planned)]
    assert len(more) >= 40
    with pytest.raises(DataError, match="is not covered: the data plan has"):
        next(batches)
    again = [identity(batch) for batch in take(stream(plan, readers), len(first) + len(more))]
    assert [entry[:3] for entry in again] == [entry[:3] for entry in first + more]


def test_closing_never_hangs(plan: DataPlan, readers: list[FakeRows]) -> None:
    for threads in (0, 1, 4):
        for consumed in (0, 2):
            batches = stream(plan, readers, num_threads=threads, prefetch_batches=2)
            for _ in range(consumed):
                next(batches)
            batches.close()
            batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("vorox-prefetch")]


def test_closing_does_not_wait_for_a_read_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "_CLOSE_SECONDS", 0.1)
    readers = [Stuck("code", [60])]
    batches = stream(make_plan(tmp_path, readers, steps=7), readers, num_threads=1)
    next(batches)
    assert readers[0].waiting.wait(PATIENCE_SECONDS)
    batches.close()
    assert [thread for thread in threading.enumerate() if thread.name.startswith("vorox-prefetch")], "it hangs still"
    readers[0].go.set()


def test_closing_wakes_a_waiting_consumer(tmp_path: Path) -> None:
    readers = [Stuck("code", [60])]
    batches = stream(make_plan(tmp_path, readers, steps=7), readers, num_threads=1)
    next(batches)
    seen: list[BaseException] = []

    def consume() -> None:
        try:
            next(batches)
        except RuntimeError as error:
            seen.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert readers[0].waiting.wait(PATIENCE_SECONDS)
    closer = threading.Thread(target=batches.close)
    closer.start()
    wait_until(lambda: batches._closed)
    readers[0].go.set()
    for thread in (consumer, closer):
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    assert "closed" in str(seen[0])


@pytest.mark.parametrize(
    "change",
    [
        {"plan_digest": "0" * 64},
        {"plan_events": 1},
        {"plan_events": 99},
        {"seed": 12},
        {"position": 7},
        {"step": 1},
        {"step": -1, "position": -GLOBAL_BATCH},
    ],
)
def test_a_cursor_of_another_plan_is_refused(plan: DataPlan, readers: list[FakeRows], change: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="cursor"):
        stream(plan, readers, replace(first_cursor(plan, 11), **change))


def test_a_cursor_from_before_an_extension_is_good(plan: DataPlan, readers: list[FakeRows]) -> None:
    cursor = take(stream(plan, readers), 3)[-1].cursor_after
    plan.extend_to(plan.num_positions * 3, readers)
    assert take(stream(DataPlan.open(plan.path), readers, cursor), 1)[0].step == 3


def test_first_cursor_refuses_another_seed(plan: DataPlan) -> None:
    with pytest.raises(ConfigError, match="seed 11, the run has seed 12"):
        first_cursor(plan, 12)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("batch", "micro"), [(8, 1), (16, 2), (13, 1), (14, 1), (25, 1)])
def test_a_step_has_the_same_rows_on_any_number_of_shards(tmp_path: Path, batch: int, micro: int, count: int) -> None:
    """Where they do not come out even, shards differ by one row, filled with one that nothing is trained on."""
    share = -(-batch // count)
    if share % micro:
        micro = share
    readers = [FakeRows("code", [20, 0, 13]), FakeRows("text", [41])]
    plan = make_plan(tmp_path, readers, batch=batch, steps=5)
    whole = take(stream(plan, readers, micro_batch_sequences=batch), 5)
    shards = [
        take(stream(plan, readers, shard=DataShard(index, count), micro_batch_sequences=micro), 5)
        for index in range(count)
    ]
    for step, expected in enumerate(whole):
        parts = [shard[step] for shard in shards]
        assert {part.tokens_ABT.shape for part in parts} == {(share // micro, micro, 8)}
        real = [part.row_digests_AB != 0 for part in parts]
        counts = [int(rows.sum()) for rows in real]
        assert sum(counts) == batch
        assert max(counts) - min(counts) <= 1
        in_slot_order = [
            part.row_digests_AB[at][rows[at]]
            for at in range(share // micro)
            for part, rows in zip(parts, real, strict=True)
        ]
        assert np.array_equal(np.concatenate(in_slot_order), expected.row_digests_AB.reshape(-1))
        assert digest_of(parts) == expected.digest()
        assert sum(part.num_target_tokens for part in parts) == expected.num_target_tokens
        for part, rows in zip(parts, real, strict=True):
            assert (part.labels_ABT[~rows] == IGNORED_LABEL).all()
            assert part.segment_ids_ABT is not None
            assert (part.segment_ids_ABT[~rows] == 0).all()
            assert np.count_nonzero(part.labels_ABT != IGNORED_LABEL) == part.num_target_tokens
    for index, shard in enumerate(shards):
        progress = Progress(0, 0, first_cursor(plan, 11))
        for part in shard:
            progress = progress.advance(part, DataShard(index, count))
        assert (progress.step, progress.num_tokens) == (5, 5 * batch * 8)


@pytest.mark.parametrize(("micro", "count"), [(3, 1), (8, 2), (2, 3), (16, 1), (0, 1), (1, 9)])
def test_uneven_batches_are_refused(plan: DataPlan, readers: list[FakeRows], micro: int, count: int) -> None:
    with pytest.raises(ConfigError, match=r"cannot be split evenly|less than the 9 devices"):
        stream(plan, readers, micro_batch_sequences=micro, shard=DataShard(0, count))


def test_another_batch_size_or_cache_is_refused(plan: DataPlan, readers: list[FakeRows]) -> None:
    with pytest.raises(ConfigError, match="8 rows per step, not 16"):
        stream(plan, readers, global_batch_sequences=16)
    with pytest.raises(DataError, match="source 'text' changed"):
        stream(plan, [readers[0], FakeRows("text", [41], content=1)])


def test_caches_of_different_shape_are_refused(tmp_path: Path) -> None:
    readers = [FakeRows("code", [20]), FakeRows("text", [20], row_tokens=10)]
    with pytest.raises(DataError, match="differ in row length or token size"):
        stream(make_plan(tmp_path, readers), readers)
    readers = [FakeRows("code", [20]), FakeRows("text", [20], vocab_size=70_000)]
    with pytest.raises(DataError, match="differ in row length or token size"):
        list(validation_batches(readers, num_sequences=4, micro_batch_sequences=2, document_mask=True))


@pytest.mark.parametrize("document_mask", [True, False])
def test_validation_is_a_fixed_even_set(readers: list[FakeRows], document_mask: bool) -> None:
    options: dict[str, Any] = {"micro_batch_sequences": 4, "document_mask": document_mask}
    batches = list(validation_batches(readers, num_sequences=10, **options))
    assert [batch.tokens_ABT.shape for batch in batches] == [(1, 4, 8)] * 3
    assert [batch.labels_ABT.shape for batch in batches] == [(1, 4, 8)] * 3
    rows = np.concatenate([batch.tokens_ABT[0] for batch in batches]).tolist()
    spread = [number * 74 // 10 for number in range(10)]  # 33 rows of code, then 41 of text
    expected = [readers[0].tokens(n) if n < 33 else readers[1].tokens(n - 33) for n in spread]
    assert rows[:10] == [tokens[:-1] for tokens in expected]
    assert (batches[-1].labels_ABT[0, 2:] == IGNORED_LABEL).all()
    assert (batches[-1].tokens_ABT[0, 2:] == 0).all()
    if document_mask:
        assert batches[-1].segment_ids_ABT is not None
        assert (batches[-1].segment_ids_ABT[0, 2:] == 0).all()
        assert (batches[-1].segment_ids_ABT[0, :2, 0] == 1).all()
    for batch in batches:
        assert batch.num_target_tokens == np.count_nonzero(batch.labels_ABT != IGNORED_LABEL)
    again = list(validation_batches(readers, num_sequences=10, **options))
    assert [identity(batch) for batch in again] == [identity(batch) for batch in batches]


def test_validation_takes_every_row_once_when_there_are_few(readers: list[FakeRows]) -> None:
    batches = list(validation_batches(readers, num_sequences=1000, micro_batch_sequences=5, document_mask=True))
    digests = np.concatenate([batch.row_digests_AB.reshape(-1) for batch in batches])
    assert len(digests) == 75
    assert len(set(digests.tolist())) == 75  # 74 rows, and 0 for the one that fills up


def test_validation_shards_concatenate(readers: list[FakeRows]) -> None:
    whole = list(validation_batches(readers, num_sequences=9, micro_batch_sequences=4, document_mask=True))
    shards = [
        list(
            validation_batches(
                readers, num_sequences=9, micro_batch_sequences=2, document_mask=True, shard=DataShard(index, 2)
            )
        )
        for index in (0, 1)
    ]
    for step, batch in enumerate(whole):
        parts = [shard[step] for shard in shards]
        for name in ("tokens_ABT", "labels_ABT", "segment_ids_ABT", "row_digests_AB"):
            assert np.array_equal(np.concatenate([getattr(p, name) for p in parts], axis=1), getattr(batch, name))


def test_validation_without_rows_is_refused() -> None:
    for readers in ([FakeRows("a", [0])], []):
        with pytest.raises(DataError, match="No validation text"):
            next(validation_batches(readers, num_sequences=4, micro_batch_sequences=2, document_mask=True))


def test_first_batch_and_resume_do_not_depend_on_the_size(tmp_path: Path) -> None:
    """10^8 rows in 24,415 units, resumed in the middle of the second epoch."""
    reader = FakeRows("web", [4096] * 24_414 + [256], max_segments=1)
    plan = make_plan(tmp_path, [reader], batch=64, steps=2_400_000)
    middle = 2_345_678
    for step in (0, middle):
        cursor = replace(first_cursor(plan, 11), step=step, position=step * 64)
        found_first: list[Batch] = []

        def open_and_read(cursor: DataCursor = cursor, found_first: list[Batch] = found_first) -> None:
            found_first[:] = take(stream(DataPlan.open(plan.path), [reader], cursor), 1)

        assert cost(open_and_read) < 100
        (batch,) = found_first
        opened = DataPlan.open(plan.path)
        assert batch.step == step
        found = opened.locate(np.arange(step * 64, step * 64 + 64))
        rows = [reader.tokens(int(row))[:-1] for row in found.row]
        assert batch.tokens_ABT.reshape(64, -1).tolist() == rows


class Bytes:
    """A tokenizer of which the ids are known without it: UTF-8 bytes, and 256 for the end of a text."""

    fingerprint, vocab_size, end_of_text_id = "bytes", 257, 256

    def encode_batch(self, texts: Any) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in texts]


def make_cache(directory: Path, texts: list[str], *, row_tokens: int = 33) -> CacheReader:
    """A real cache: three texts a unit, four rows a chunk."""
    recipe = Recipe("bytes", 257, 256, row_tokens, {"name": directory.name}, {}, chunk_rows=4)
    files = [SourceFile(f"text{number}", len(text), str(number)) for number, text in enumerate(texts)]
    numbers = [range(first, min(first + 3, len(texts))) for first in range(0, len(texts), 3)]
    units = [
        Unit(unit, tuple(UnitSpan(number, 0, len(texts[number]), 0) for number in group))
        for unit, group in enumerate(numbers)
    ]

    def read_unit(unit: Unit) -> list[Document]:
        indices = [span.file_index for span in unit.spans]
        return [Document(index, 0, 0, len(texts[index]), texts[index]) for index in indices]

    build(directory, UnitBuilder(files, read_unit, Bytes(), recipe), units)
    return CacheReader.open(directory, recipe)


def some_texts(seed: int, count: int) -> list[str]:
    generator = np.random.Generator(np.random.Philox(seed))
    letters = np.array(list("abcdefgh \n"))
    return ["".join(generator.choice(letters, int(length))) for length in generator.integers(1, 120, count)]


@pytest.fixture
def caches(tmp_path: Path) -> list[CacheReader]:
    return [make_cache(tmp_path / "one", some_texts(1, 40)), make_cache(tmp_path / "two", some_texts(2, 25))]


def test_an_epoch_of_a_real_cache_predicts_every_token_once(tmp_path: Path) -> None:
    texts = some_texts(1, 40)
    reader = make_cache(tmp_path / "one", texts)
    plan = make_plan(tmp_path, [reader], batch=1, steps=reader.num_rows)
    batches = take(stream(plan, [reader], micro_batch_sequences=1, num_threads=2), reader.num_rows)
    expected = sorted(bytes(text.encode()) + b"$" for text in texts)
    pairs: list[tuple[int, int]] = []
    for batch in batches:
        trained = batch.labels_ABT != IGNORED_LABEL
        pairs += zip(batch.tokens_ABT[trained].tolist(), batch.labels_ABT[trained].tolist(), strict=True)
    bigrams = [(a, b) for text in expected for a, b in zip([*text[:-1]], [*text[1:-1], 256], strict=True)]
    assert sorted(pairs) == sorted(bigrams)
    assert sum(batch.num_target_tokens for batch in batches) == sum(len(text) - 1 for text in expected)


def test_real_caches_give_the_same_batches_to_any_reader(tmp_path: Path, caches: list[CacheReader]) -> None:
    plan = make_plan(tmp_path, caches, steps=20)
    expected = [identity(batch) for batch in take(stream(plan, caches), 20)]
    assert [identity(batch) for batch in take(stream(plan, caches, num_threads=4), 20)] == expected
    reopened = [CacheReader.open(cache.directory, max_open_chunks=2) for cache in caches]
    assert [
        identity(batch) for batch in take(stream(DataPlan.open(plan.path), reopened, num_threads=1), 20)
    ] == expected
    shards = [take(stream(plan, caches, shard=DataShard(index, 4)), 20) for index in range(4)]
    for step, (_, hashes, *_) in enumerate(expected):
        assert isinstance(hashes, tuple)
        rows = np.concatenate([shard[step].row_digests_AB for shard in shards], axis=1)
        assert ((4, 2), hashlib.sha256(rows.reshape(4, 2).tobytes()).hexdigest()) == hashes[-1]


def is_readable(cache: CacheReader, row: int) -> bool:
    try:
        cache.read_rows(np.array([row]))
    except DataError:
        return False
    return True


@pytest.mark.parametrize("threads", [0, 2])
def test_a_damaged_row_stops_the_step_that_needs_it(tmp_path: Path, caches: list[CacheReader], threads: int) -> None:
    plan = make_plan(tmp_path, caches, steps=20)
    good = [identity(batch) for batch in take(stream(plan, caches), 20)]
    path = sorted((caches[0].directory / "chunks").rglob("*.psc"))[3]
    data = bytearray(path.read_bytes())
    data[256 + 5] ^= 1  # in the first block, right behind the header
    path.write_bytes(data)
    damaged = [CacheReader.open(cache.directory) for cache in caches]
    bad_rows = [row for row in range(damaged[0].num_rows) if not is_readable(damaged[0], row)]
    bad_step = min(int(plan.positions_of(0, row, damaged[0])[0]) // GLOBAL_BATCH for row in bad_rows)
    assert 0 < bad_step < 20
    batches = stream(plan, damaged, num_threads=threads)
    assert [identity(next(batches)) for _ in range(bad_step)] == good[:bad_step]
    with pytest.raises(DataError, match="does not match its checksum") as caught:
        next(batches)
    assert caught.value.where == str(path)


def test_a_rebuilt_cache_of_other_text_is_refused(tmp_path: Path, caches: list[CacheReader]) -> None:
    plan = make_plan(tmp_path, caches)
    texts = some_texts(2, 25)
    same = make_cache(tmp_path / "again" / "two", texts)
    assert identity(take(stream(plan, [caches[0], same]), 1)[0]) == identity(take(stream(plan, caches), 1)[0])
    texts[7] = texts[7][:-1] + "z"
    other = make_cache(tmp_path / "other" / "two", texts)
    with pytest.raises(DataError, match="source 'two' changed"):
        stream(plan, [caches[0], other])
