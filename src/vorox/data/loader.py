"""The data loader: plan and caches in, one ``Batch`` per step out, prefetched by threads.

Every batch is a function of (plan, step, shard). The rows of a step are the same for any number of shards. Where they
do not divide evenly, shards differ by one row, and the shorter ones are padded with a row that nothing is trained on.
Opening costs reading the plan and comparing the caches' digests, wherever the cursor stands. Over caches that grow, a
step is located once the plan covers it.

Shape legend: N rows of a step in this process, A micro-batches, B rows of a micro-batch, T positions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from vorox.core.batch import Batch, DataCursor, DataShard
from vorox.core.errors import ConfigError, DataError
from vorox.data.growth import PlanGrower
from vorox.data.plan import Plan, Readers
from vorox.data.prefetch import Prefetcher
from vorox.data.row_source import LocatedRows, RowSource, read_rows
from vorox.data.rows import RowReader, assemble

__all__ = ["BatchStream", "first_cursor", "open_batches", "slots_of_shard", "validation_batches"]

Int64Array = npt.NDArray[np.int64]
BatchStream = Prefetcher[Batch]
"""The batches of consecutive steps."""

_LOCATED_ROWS = 4096
"""Rows located together, so that numpy's cost per call is negligible. The first step locates only its own."""

_ENDLESS_STEPS = 2**62


def first_cursor(plan: Plan, seed: int) -> DataCursor:
    """Return the cursor of step 0.

    Raises:
        ConfigError: The plan has another seed.
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
    """Open the batches from ``cursor`` on, as far as the plan covers them.

    Args:
        plan: The run's plan. It may be extended while batches are read.
        readers: Caches of the sources, in the plan's order; ``None`` for one that is no longer drawn from.
        shard: The part of every global batch that this process reads.
        cursor: Where to start: ``first_cursor`` or a checkpoint's.
        global_batch_sequences: Rows of a step over all shards, as in the plan.
        micro_batch_sequences: Rows of a micro-batch of one shard.
        document_mask: Whether documents of a row are kept apart.
        num_threads: Reader threads; 0 reads each batch when it is requested.
        prefetch_batches: Batches that the threads keep ready.
        grower: Extends the plan as the caches grow; its readers replace ``readers``.
        stop: Polled while a step waits for rows that are not built yet.

    Raises:
        ConfigError: A shard's rows are not a multiple of the micro-batch, or the plan has another batch size.
        DataError: The cursor is not of this plan, or a cache has changed since the plan was made.
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
    source = RowSource(plan, readers, grower=grower, stop=stop)
    batches = _BatchReader(source, slots, document_mask, cursor)

    def num_steps() -> int:
        if grower is None:
            return plan.num_positions // global_batch_sequences
        return _ENDLESS_STEPS if grower.total_steps is None else grower.total_steps

    return Prefetcher(
        batches.read, num_steps, first=cursor.step, num_threads=num_threads, depth=prefetch_batches,
        on_close=source.close,
    )  # fmt: skip


def slots_of_shard(global_batch_sequences: int, micro_batch_sequences: int, shard: DataShard) -> Int64Array:
    """Return the slots of the global batch that a process reads, ``[A, B]``: a contiguous part of each micro-batch.

    ``B`` is ``micro_batch_sequences`` times the shards of the process, side by side. A shard has its share of the
    global batch, rounded up, in whole micro-batches. If the rows do not divide evenly, the last global micro-batch is
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
    """Yield the fixed validation set: rows spread evenly over the caches, in a fixed order, as batches ``[1, B, T]``.

    The last batch is padded with rows of ignored labels, so that shapes stay fixed. With several shards, each reads
    its part of every batch of ``B * shard.count`` rows.

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
        block = read_rows(readers, source_index, rows - starts[source_index])
        yield assemble(
            block, document_mask=document_mask, step=step, cursor_after=cursor,
            padding_rows=micro_batch_sequences - block.num_rows,
        )  # fmt: skip


class _BatchReader:
    """Reads the batch of any step of one run on one shard. Rows are located a window of steps at a time."""

    def __init__(self, source: RowSource, slots_AB: Int64Array, document_mask: bool, cursor: DataCursor) -> None:
        self._source, self._plan, self._document_mask, self._cursor = source, source.plan, document_mask, cursor
        self._batch_rows = source.plan.start.global_batch_sequences
        self._slots = slots_AB[slots_AB >= 0]  # missing rows are the last of the last micro-batch
        self._num_micro_batches, self._padding_rows = len(slots_AB), slots_AB.size - self._slots.size
        self._window_steps = max(1, _LOCATED_ROWS // slots_AB.size)
        self._windows: dict[int, tuple[int, LocatedRows]] = {}
        self._locating = threading.Lock()

    def read(self, step: int) -> Batch:
        self._source.cover((step + 1) * self._batch_rows)
        return assemble(
            self._locate(step).read(),
            document_mask=self._document_mask,
            step=step,
            cursor_after=self._cursor_after(step + 1),
            num_micro_batches=self._num_micro_batches,
            padding_rows=self._padding_rows,
            row_pieces=self._plan.row_pieces_at(step * self._batch_rows),
        )

    def _cursor_after(self, step: int) -> DataCursor:
        """The cursor before a step. Over a growing cache it covers the events that decide what lies before it."""
        position = step * self._batch_rows
        events, digest = self._cursor.plan_events, self._cursor.plan_digest
        if self._plan.start.growth is not None:
            events = max(events, self._plan.state.events_covering(position))
            digest = self._plan.digest_at(events) or digest
        return DataCursor(plan_digest=digest, plan_events=events, step=step, position=position, seed=self._cursor.seed)

    def _locate(self, step: int) -> LocatedRows:
        window, num_slots = step // self._window_steps, len(self._slots)
        with self._locating:
            first_step, located = self._windows.get(window, (0, None))
            if located is None or (step - first_step) * num_slots >= len(located):  # the plan may have been shorter
                first_step = max(window * self._window_steps, self._cursor.step)  # earlier sources may be gone
                located = self._locate_window(first_step, step)
                self._windows[window] = first_step, located
                for old in sorted(self._windows)[:-2]:
                    del self._windows[old]
            start = (step - first_step) * num_slots
            return located[start : start + num_slots]

    def _locate_window(self, first_step: int, step: int) -> LocatedRows:
        window_end = (step // self._window_steps + 1) * self._window_steps if self._windows else step + 1
        end = max(step + 1, min(window_end, self._plan.num_positions // self._batch_rows))
        positions = np.arange(first_step, end)[:, None] * self._batch_rows + self._slots
        return self._source.locate(positions.reshape(-1))


def _check_cursor(plan: Plan, cursor: DataCursor) -> None:
    if plan.digest_at(cursor.plan_events) != cursor.plan_digest or cursor.seed != plan.start.seed:
        raise DataError(
            f"the data cursor of step {cursor.step:,} was not written under this plan", where=str(plan.path),
            hint="resume from a checkpoint of this run; if plan.jsonl was replaced, restore the original",
        )  # fmt: skip
    if cursor.step < 0 or cursor.position != cursor.step * plan.start.global_batch_sequences:
        raise DataError(
            f"the data cursor has position {cursor.position:,} at step {cursor.step:,}, the plan has "
            f"{plan.start.global_batch_sequences} rows a step",
            where=str(plan.path),
        )


def _check_alike(readers: Sequence[RowReader]) -> None:
    """Refuse sources whose rows do not fit into one array."""
    shapes = sorted({(reader.row_tokens, reader.recipe.dtype) for reader in readers})
    if len(shapes) > 1:
        raise DataError(f"the sources' caches differ in row length or token size: {shapes}", where="data.sources")
