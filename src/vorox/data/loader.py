"""Batches of a run: plan and caches in, ``Batch`` per step out, read ahead by threads.

Every step's batch is a function of (plan, step, shard). The rows of a step are the same at any number of shards; where
they do not come out even, shards differ by one row and the shorter ones are filled up with a row that nothing is
trained on. Opening costs the plan and one look at the cache's digests, wherever the cursor stands. Over caches that
grow, a step is located when the plan covers it, by readers that see its rows.

Shape legend: N rows of a step in this process, A micro-batches, B rows of a micro-batch, T positions.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.errors import ConfigError, DataError
from vorox.core.records import IGNORED_LABEL, Batch, DataCursor, DataShard
from vorox.data.assembly import AssembledRows, assemble, cut_rows, interleave
from vorox.data.batch_stream import BatchStream
from vorox.data.growth import PlanGrower
from vorox.data.plan import Plan, Readers
from vorox.data.records import RowBlock, RowReader

__all__ = ["BatchStream", "first_cursor", "open_batches", "slots_of_shard", "validation_batches"]

Int64Array = npt.NDArray[np.int64]

_LOCATED_ROWS = 4096
"""Rows whose places are computed together: numpy's cost per call disappears. Of the first step, only its own are."""

_ENDLESS_STEPS = 2**62


def first_cursor(plan: Plan, seed: int) -> DataCursor:
    """Where a run begins.

    Raises:
        ConfigError: The plan was begun with another seed.
    """
    if seed != plan.start.seed:
        raise ConfigError(f"the plan has seed {plan.start.seed}, the run has {seed}", where=str(plan.path))
    return DataCursor(plan_digest=plan.digest, plan_events=plan.num_events, step=0, position=0, seed=seed)


def open_batches(
    plan: Plan,
    readers: Readers,
    *,
    shard: DataShard,
    cursor: DataCursor,
    global_batch_sequences: int,
    micro_batch_sequences: int,
    document_mask: bool,
    num_threads: int = 1,
    prefetch_batches: int = 4,
    grower: PlanGrower | None = None,
    stop: Callable[[], bool] | None = None,
) -> BatchStream:
    """Read batches from ``cursor`` on, for as long as the plan covers them.

    Args:
        plan: The run's plan, extended as far as batches will be asked for. It may be extended further meanwhile.
        readers: Caches of the sources, in the plan's order; ``None`` for one that is not drawn from any more.
        shard: The part of every global batch that this process reads.
        cursor: Where to begin: ``first_cursor`` or a checkpoint's.
        global_batch_sequences: Rows of a step over all shards, as in the plan.
        micro_batch_sequences: Rows of a micro-batch of one shard.
        document_mask: Whether documents of a row are kept apart.
        num_threads: Reader threads; 0 reads when a batch is asked for.
        prefetch_batches: Batches kept ready by the threads.
        grower: Covers positions as the caches grow; its readers take the place of ``readers``.
        stop: Asked while a step waits for rows that are not built yet.

    Raises:
        ConfigError: A shard's part is no multiple of the micro-batch, or the plan has another size.
        DataError: The cursor is not of this plan, or a cache is no longer what the plan was made for.
    """
    if global_batch_sequences != plan.start.global_batch_sequences:
        raise ConfigError(
            f"the plan has {plan.start.global_batch_sequences} rows a step, asked for {global_batch_sequences}",
            where="train.global_batch_sequences", hint="a run keeps its batch size; start another run to change it",
        )  # fmt: skip
    slots = slots_of_shard(global_batch_sequences, micro_batch_sequences, shard)
    _check_cursor(plan, cursor)
    plan.check(readers)
    _check_alike([reader for reader in readers if reader is not None])
    closing = threading.Event()

    def read(step: int) -> Batch:
        if grower is not None:
            position = (step + 1) * global_batch_sequences
            grower.cover(position, stop=lambda: closing.is_set() or (stop is not None and stop()))
        return source.read(step)

    def num_steps() -> int:
        if grower is None:
            return plan.num_positions // global_batch_sequences
        return _ENDLESS_STEPS if grower.total_steps is None else grower.total_steps

    source = _BatchSource(plan, (lambda: grower.readers) if grower else (lambda: readers), slots, document_mask, cursor)
    return BatchStream(
        read, num_steps, first_step=cursor.step, num_threads=num_threads, prefetch_batches=prefetch_batches,
        on_close=closing.set,
    )  # fmt: skip


def slots_of_shard(global_batch_sequences: int, micro_batch_sequences: int, shard: DataShard) -> Int64Array:
    """Slots of the global batch that a process reads, ``[A, B]``: of each global micro-batch, its contiguous part.

    ``B`` is ``micro_batch_sequences`` for each shard of the process, side by side. A shard has the global batch over
    the shards, rounded up, in whole micro-batches. Where that does not come out even, the last global micro-batch is
    short: some shards have one row less of it, and -1 in its place.

    Raises:
        ConfigError: The rows of a shard are not a multiple of the micro-batch, or there are more shards than rows.
    """
    end = shard.index + shard.width
    if not 0 <= shard.index < end <= shard.count <= global_batch_sequences or micro_batch_sequences < 1:
        raise _uneven(global_batch_sequences, micro_batch_sequences, shard)
    share = -(-global_batch_sequences // shard.count)
    step_rows = micro_batch_sequences * shard.count
    if share % micro_batch_sequences or (shard.width > 1 and global_batch_sequences % step_rows):
        raise _uneven(global_batch_sequences, micro_batch_sequences, shard)
    slots = np.arange(share * shard.count).reshape(-1, shard.count, micro_batch_sequences)
    slots_AB = slots[:, shard.index : end].reshape(len(slots), -1).copy()
    if global_batch_sequences == slots.size:
        return slots_AB
    first = share * shard.count - step_rows
    short = global_batch_sequences - first  # rows of the last global micro-batch
    start, end = (first + number * short // shard.count for number in (shard.index, shard.index + 1))
    slots_AB[-1] = -1
    slots_AB[-1, : end - start] = np.arange(start, end)
    return slots_AB


def _uneven(global_batch_sequences: int, micro_batch_sequences: int, shard: DataShard) -> ConfigError:
    rows = -(-global_batch_sequences // max(1, shard.count))
    return ConfigError(
        f"{global_batch_sequences} rows a step on {shard.count} data-parallel processes are {rows} rows each, which "
        f"cannot be split evenly into micro-batches of {micro_batch_sequences}",
        where="train.micro_batch_sequences",
        hint=f"make train.micro_batch_sequences a divisor of {rows}, or train.global_batch_sequences a multiple of "
        f"{micro_batch_sequences * shard.count}",
    )


def validation_batches(
    readers: Sequence[RowReader],
    *,
    num_sequences: int,
    micro_batch_sequences: int,
    document_mask: bool,
    shard: DataShard | None = None,
) -> Iterator[Batch]:
    """The fixed validation set: rows spread evenly over the caches, in a fixed order, as batches ``[1, B, T]``.

    The last batch is filled up with rows of which every label is ignored, so that shapes stay fixed. With several
    shards, each reads its part of every batch of ``B * shard.count`` rows.

    Raises:
        DataError: The caches hold no row.
    """
    _check_alike(readers)
    starts = np.cumsum([0, *(reader.num_rows for reader in readers)])
    num_rows = int(starts[-1])
    if num_rows == 0:
        raise DataError("there is no validation text", where="data.validation", hint="hold out a larger share")
    shard = shard if shard is not None else DataShard()
    count = min(num_sequences, num_rows)
    step_rows = micro_batch_sequences * shard.count
    for step in range(-(-count // step_rows)):
        slots = slots_of_shard(step_rows, micro_batch_sequences, shard).reshape(-1) + step * step_rows
        rows = slots[slots < count] * num_rows // count
        source_index = np.searchsorted(starts, rows, side="right") - 1
        cursor = DataCursor(plan_digest="", plan_events=0, step=step + 1, position=(step + 1) * step_rows, seed=0)
        block = _read(readers, source_index, rows - starts[source_index])
        assembled = assemble(block, document_mask=document_mask)
        yield _batch(_filled(assembled, micro_batch_sequences - block.num_rows), step, 1, cursor)


@dataclass(frozen=True, slots=True)
class _Places:
    """Source and cache row of the rows of consecutive steps, one line per step, and the readers they are meant for."""

    first_step: int
    source_index: npt.NDArray[np.int32]
    rows: Int64Array
    readers: Readers


class _BatchSource:
    """Makes the batch of any step of one run on one shard."""

    def __init__(
        self,
        plan: Plan,
        readers: Callable[[], Readers],
        slots_AB: Int64Array,
        document_mask: bool,
        cursor: DataCursor,
    ) -> None:
        self._plan, self._readers, self._document_mask, self._cursor = plan, readers, document_mask, cursor
        self._slots = slots_AB[slots_AB >= 0]  # rows that are missing are the last of the last micro-batch
        self._shape_AB = slots_AB.shape
        self._window_steps = max(1, _LOCATED_ROWS // slots_AB.size)
        self._places: dict[int, _Places] = {}
        self._locating = threading.Lock()

    def read(self, step: int) -> Batch:
        places = self._locate(step)
        line = step - places.first_step
        block = _read(places.readers, places.source_index[line], places.rows[line])
        rows = assemble(block, document_mask=self._document_mask)
        batch = self._plan.start.global_batch_sequences
        pieces = self._plan.row_pieces_at(step * batch)
        if pieces > 1:
            rows = cut_rows(rows, pieces)
        missing = self._shape_AB[0] * self._shape_AB[1] - block.num_rows
        rows = _filled(rows, missing * pieces)
        return _batch(rows, step, self._shape_AB[0], self._cursor_after(step + 1, (step + 1) * batch))

    def _cursor_after(self, step: int, position: int) -> DataCursor:
        """Over a growing cache, the plan as far as it decides what lies before: however far it was extended by then."""
        events, digest = self._cursor.plan_events, self._cursor.plan_digest
        if self._plan.start.growth is not None:
            events = max(events, self._plan.tables.events_covering(position))
            digest = self._plan.digest_at(events) or digest
        return DataCursor(plan_digest=digest, plan_events=events, step=step, position=position, seed=self._cursor.seed)

    def _locate(self, step: int) -> _Places:
        window = step // self._window_steps
        with self._locating:
            places = self._places.get(window)
            if places is None or step >= places.first_step + len(places.rows):  # the plan may have been shorter then
                first_step = max(window * self._window_steps, self._cursor.step)  # earlier sources may be gone
                places = self._places[window] = self._locate_window(first_step, step)
                for old in sorted(self._places)[:-2]:
                    del self._places[old]
            return places

    def _locate_window(self, first_step: int, step: int) -> _Places:
        batch = self._plan.start.global_batch_sequences
        planned_steps = self._plan.num_positions // batch  # before the readers are asked: they see all that it covers
        readers = self._readers()
        window_end = (step // self._window_steps + 1) * self._window_steps if self._places else step + 1
        last_step = max(step + 1, min(window_end, planned_steps))
        positions = np.arange(first_step, last_step)[:, None] * batch + self._slots
        found = self._plan.locate(positions.reshape(-1))
        rows = found.row
        for index, reader in enumerate(readers):
            chosen = np.flatnonzero(found.source_index == index)
            if chosen.size and reader is not None:  # a step that needs one that is not there says so when it is read
                rows[chosen] += reader.unit_row_starts[found.unit_start[chosen]]
        return _Places(first_step, found.source_index.reshape(positions.shape), rows.reshape(positions.shape), readers)


def _present(reader: RowReader | None) -> RowReader:
    if reader is None:
        raise DataError(
            "the step needs rows of a source that the configuration no longer has", where="data.sources",
            hint="resume from a checkpoint behind the step at which it was taken out",
        )  # fmt: skip
    return reader


def _read(readers: Readers, source_index: npt.NDArray[np.integer], rows: Int64Array) -> RowBlock:
    """Rows of several sources in slot order."""
    if not rows.size:  # a shard of the last validation batch
        return next(reader for reader in readers if reader is not None).read_rows(rows)
    order = np.argsort(source_index, kind="stable")
    sources = source_index[order]
    if sources[0] == sources[-1]:
        return _present(readers[int(sources[0])]).read_rows(rows)
    cuts = [0, *(np.flatnonzero(sources[1:] != sources[:-1]) + 1).tolist(), len(order)]
    slots = [order[first:last] for first, last in itertools.pairwise(cuts)]
    blocks = [
        _present(readers[int(sources[first])]).read_rows(rows[at]) for first, at in zip(cuts[:-1], slots, strict=True)
    ]
    return interleave(blocks, slots)


def _batch(rows: AssembledRows, step: int, num_micro_batches: int, cursor: DataCursor) -> Batch:
    shape = (num_micro_batches, -1, rows.tokens_NT.shape[1])
    segment_ids, position_ids = rows.segment_ids_NT, rows.position_ids_NT
    return Batch(
        step=step,
        tokens_ABT=rows.tokens_NT.reshape(shape),
        labels_ABT=rows.labels_NT.reshape(shape),
        segment_ids_ABT=None if segment_ids is None else segment_ids.reshape(shape),
        position_ids_ABT=None if position_ids is None else position_ids.reshape(shape),
        row_digests_AB=rows.row_digests_N.reshape(num_micro_batches, -1),
        num_target_tokens=rows.num_target_tokens,
        cursor_after=cursor,
    )


def _filled(rows: AssembledRows, missing: int) -> AssembledRows:
    """The same rows with some added that nothing is trained on: token 0, no label, segment 0."""
    if not missing:
        return rows

    def fill(array: npt.NDArray[Any], value: int) -> npt.NDArray[Any]:
        return np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1), constant_values=value)

    segment_ids, position_ids = rows.segment_ids_NT, rows.position_ids_NT
    return replace(
        rows,
        tokens_NT=fill(rows.tokens_NT, 0),
        labels_NT=fill(rows.labels_NT, IGNORED_LABEL),
        segment_ids_NT=None if segment_ids is None else fill(segment_ids, 0),
        position_ids_NT=None if position_ids is None else fill(position_ids, 0),
        row_digests_N=fill(rows.row_digests_N, 0),
    )


def _check_cursor(plan: Plan, cursor: DataCursor) -> None:
    if plan.digest_at(cursor.plan_events) != cursor.plan_digest or cursor.seed != plan.start.seed:
        raise DataError(
            f"the data cursor of step {cursor.step:,} was not written under this plan", where=str(plan.path),
            hint="resume from a checkpoint of this run; if plan.jsonl was replaced, bring the original back",
        )  # fmt: skip
    if cursor.step < 0 or cursor.position != cursor.step * plan.start.global_batch_sequences:
        raise DataError(
            f"the data cursor has position {cursor.position:,} at step {cursor.step:,}, the plan has "
            f"{plan.start.global_batch_sequences} rows a step",
            where=str(plan.path),
        )


def _check_alike(readers: Sequence[RowReader]) -> None:
    """Rows of all sources go into the same arrays."""
    shapes = sorted({(reader.row_tokens, reader.recipe.dtype) for reader in readers})
    if len(shapes) > 1:
        raise DataError(f"the sources' caches differ in row length or token size: {shapes}", where="data.sources")
