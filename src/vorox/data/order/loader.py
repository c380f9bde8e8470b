"""The data loader: plan and caches in, one ``Batch`` per step out, prefetched by threads.

A batch is a function of (plan, step, shard). The rows of a step are the same for any number of shards. If they do not
divide evenly, shards differ by one row, and a row without labels pads the shorter ones. The cost of opening does not
depend on the cursor: the plan is read and the caches' digests are compared. Batches read their rows by position through
``RowSource``, as streams do; over growing caches, it waits until the plan covers a position.

Shape legend: A micro-batches, B rows of a micro-batch, T positions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vorox.core.batch import Batch, DataCursor, DataShard, TeacherLogits
from vorox.core.config.checks.batch import fewer_rows
from vorox.core.errors import ConfigError, DataError
from vorox.data.images.decoding import ImageInput, PatchInput
from vorox.data.order.document_masks import DocumentMasks, check_erased, check_masks
from vorox.data.order.growth import PlanGrower
from vorox.data.order.plan import DataPlan, Positions, Readers
from vorox.data.prefetch import Prefetcher
from vorox.data.rows import RowBlock, RowReader, assemble, read_rows

Int64Array = npt.NDArray[np.int64]
BatchStream = Prefetcher[Batch]
"""An iterator over the batches of consecutive steps."""
ReadTeacher = Callable[[Batch], TeacherLogits]
"""Reads the stored logits of a teacher for the rows of a batch."""

_LOCATED_ROWS = 4096
"""Number of rows located together, to amortise numpy's cost per call. The first step locates only its own rows."""

_ENDLESS_STEPS = 2**62


def first_cursor(plan: DataPlan, seed: int) -> DataCursor:
    """Return the cursor of step 0.

    Raises:
        ConfigError: The plan has a different seed.
    """
    if seed != plan.start.seed:
        raise ConfigError(f"The data plan has seed {plan.start.seed}, the run has seed {seed}", where=str(plan.path))
    return DataCursor(plan_digest=plan.digest, plan_events=plan.num_events, step=0, position=0, seed=seed)


def open_batches(
    plan: DataPlan,
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
    image_input: ImageInput | PatchInput | None = None,
    read_teacher: ReadTeacher | None = None,
) -> BatchStream:
    """Open the batches from ``cursor`` on, up to the last step that the plan covers.

    Args:
        plan: The run's plan. It may be extended while batches are read.
        readers: Caches of the plan's sources, in its order; ``None`` for a source that is no longer sampled.
        shard: The part of each global batch that this process reads.
        cursor: Where to start: ``first_cursor`` or the cursor of a checkpoint.
        global_batch_sequences: Rows per step over all shards, before the first of the plan's batch stages; must equal
            the plan's.
        micro_batch_sequences: Rows per micro-batch of one shard.
        document_mask: Whether attention is confined to a document.
        num_threads: Reader threads; 0 reads each batch on request.
        prefetch_batches: Number of batches that the threads keep ready.
        grower: Extends the plan as the caches grow; its readers replace ``readers``.
        stop: Polled while a step waits for rows that are not built yet; true ends the wait.
        image_input: How the model reads images; ``None`` if it reads text only.
        read_teacher: Reads what a teacher predicts for a batch; ``None`` without stored logits.

    Raises:
        ConfigError: A shard's rows are not a multiple of the micro-batch, the plan has a different batch size, or it
            masks documents of rows in which that is not possible.
        DataError: The cursor does not belong to this plan, or a cache has changed since the plan was made.
    """
    if global_batch_sequences != plan.start.global_batch_sequences:
        raise ConfigError(
            f"The data plan has {plan.start.global_batch_sequences} rows per step, not {global_batch_sequences}",
            where="train.global_batch_sequences", hint="A run keeps its batch size; start a new run to change it",
        )  # fmt: skip
    sizes = plan.start.batch_sizes
    slots = {stage.rows: _StepSlots.of(stage.rows, micro_batch_sequences, shard) for stage in sizes.stages}
    _check_cursor(plan, cursor)
    plan.check(readers)
    _check_same_shape([reader for reader in readers if reader is not None])
    check_masks(plan.state, document_mask=document_mask)
    source = RowSource(plan, readers, grower=grower, stop=stop)
    batches = _BatchReader(source, slots, document_mask, cursor, image_input, read_teacher)

    def num_steps() -> int:
        if grower is None:
            return sizes.step_at(plan.num_positions)
        return _ENDLESS_STEPS if grower.total_steps is None else grower.total_steps

    return Prefetcher(
        batches.read, num_steps, first=cursor.step, num_threads=num_threads, depth=prefetch_batches,
        on_close=source.close,
    )  # fmt: skip


def slots_of_shard(global_batch_sequences: int, micro_batch_sequences: int, shard: DataShard) -> Int64Array:
    """Return the slots of the global batch that a process reads, ``[A, B]``: a contiguous part of each micro-batch.

    ``B`` is ``micro_batch_sequences`` times the number of shards that the process reads. Each shard reads an equal
    share of the global batch, rounded up to whole micro-batches. If the rows do not divide evenly, the last global
    micro-batch is short: some shards have one row less, marked by slot -1.

    Raises:
        ConfigError: A shard's rows are not a multiple of the micro-batch, or there are more shards than rows.
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
    if 0 < global_batch_sequences < shard.count:
        what, _, hint = fewer_rows(global_batch_sequences, shard.count, 1).partition("; ")
        return ConfigError(what, where="train.global_batch_sequences", hint=hint)
    rows = -(-global_batch_sequences // max(1, shard.count))
    return ConfigError(
        f"{global_batch_sequences} rows per step on {shard.count} data-parallel ranks are {rows} rows each, which "
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
    image_input: ImageInput | PatchInput | None = None,
) -> Iterator[Batch]:
    """Yield the fixed validation set: evenly spaced rows of the caches, in a fixed order, as batches ``[1, B, T]``.

    Rows with ignored labels pad the last batch, so that shapes are constant. Each of several shards reads its part of
    every batch of ``B * shard.count`` rows.

    Raises:
        DataError: The caches hold no rows.
    """
    _check_same_shape(readers)
    starts = np.cumsum([0, *(reader.num_rows for reader in readers)])
    num_rows = int(starts[-1])
    if num_rows == 0:
        raise DataError("No validation text is held out", where="data.validation", hint="hold out a larger share")
    shard = shard if shard is not None else DataShard()
    count = min(num_sequences, num_rows)
    step_rows = micro_batch_sequences * shard.count
    for step in range(-(-count // step_rows)):
        slots = slots_of_shard(step_rows, micro_batch_sequences, shard).reshape(-1) + step * step_rows
        rows = slots[slots < count] * num_rows // count
        source_index = np.searchsorted(starts, rows, side="right") - 1
        cursor = DataCursor(plan_digest="", plan_events=0, step=step + 1, position=(step + 1) * step_rows, seed=0)
        local = rows - starts[source_index]
        block = read_rows(readers, source_index, local)
        if block.erased_NC is not None:
            check_erased(block, source_index, local, readers)
        yield assemble(
            block, document_mask=document_mask, step=step, cursor_after=cursor,
            padding_rows=micro_batch_sequences - block.num_rows, image_input=image_input,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _StepSlots:
    """The slots of a step that a shard reads, for steps of one size.

    Attributes:
        slots: The slots, without the missing rows at the end of the last micro-batch.
        num_micro_batches: Micro-batches of the step.
        padding_rows: Rows that fill the last micro-batch up.
    """

    slots: Int64Array
    num_micro_batches: int
    padding_rows: int

    @classmethod
    def of(cls, rows: int, micro_batch_sequences: int, shard: DataShard) -> _StepSlots:
        slots_AB = slots_of_shard(rows, micro_batch_sequences, shard)
        slots = slots_AB[slots_AB >= 0]
        return cls(slots, len(slots_AB), slots_AB.size - slots.size)

    @property
    def num_rows(self) -> int:
        """Rows of the step, with those that fill it up."""
        return len(self.slots) + self.padding_rows


@dataclass(frozen=True, slots=True)
class LocatedRows:
    """The rows at some positions, and the caches that hold them.

    Attributes:
        source_index: Source of each row, an index into the plan's sources.
        epoch: Epoch of the source, from 0.
        rows: Row number in the source's cache.
        readers: The caches of the plan's sources.
        positions: Their positions.
        masks: The masked documents of the plan; ``None`` without any.
    """

    source_index: npt.NDArray[np.int32]
    epoch: Int64Array
    rows: Int64Array
    readers: Readers
    positions: Positions
    masks: DocumentMasks | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> LocatedRows:
        chosen = (self.source_index[part], self.epoch[part], self.rows[part])
        return LocatedRows(*chosen, self.readers, self.positions[part], self.masks)

    def read(self) -> RowBlock:
        """Read the rows in this order as they are trained on, and verify them.

        Raises:
            DataError: A row is damaged or has an erased document that the plan does not mask, or its source has been
                removed from the configuration.
        """
        block = read_rows(self.readers, self.source_index, self.rows)
        if self.masks is not None:
            block = self.masks.apply(block, self.positions, self.source_index, self.rows, self.readers)
        if block.erased_NC is not None:
            check_erased(block, self.source_index, self.rows, self.readers)
        return block


class RowSource:
    """The rows of a run or dataset, by position. Thread-safe.

    Args:
        plan: Maps positions to rows.
        readers: Caches of the plan's sources, in its order; ``None`` for a source that is no longer sampled.
        grower: Extends the plan while the caches grow; its readers replace ``readers``.
        stop: Polled while ``cover`` waits; true ends the wait.
    """

    def __init__(
        self,
        plan: DataPlan,
        readers: Readers,
        *,
        grower: PlanGrower | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self.plan = plan
        self._readers, self._grower, self._stop = readers, grower, stop
        self._closed = threading.Event()
        self._masks: DocumentMasks | None = None

    def cover(self, end_position: int) -> None:
        """Wait until the plan covers all positions below ``end_position``.

        Raises:
            DataNotReady: The rows are not built yet, and ``stop`` or ``close`` ended the wait.
            DataError: A source is exhausted, or a cache cannot be read.
        """
        if self._grower is not None:
            self._grower.cover(end_position, stop=self._is_stopped)

    def locate(self, positions: Positions) -> LocatedRows:
        """Return the rows at positions that the plan covers.

        Raises:
            DataError: A position is not covered.
        """
        readers = self._grower.readers if self._grower is not None else self._readers
        found = self.plan.locate(positions)
        rows = found.row
        for index, reader in enumerate(readers):
            chosen = np.flatnonzero(found.source_index == index)
            if chosen.size and reader is not None:  # reading a row without a reader raises
                rows[chosen] += reader.unit_row_starts[found.unit_start[chosen]]
        return LocatedRows(found.source_index, found.epoch, rows, readers, positions, self._masks_of_plan())

    def _masks_of_plan(self) -> DocumentMasks | None:
        state = self.plan.state
        if state.masks and (self._masks is None or self._masks.events is not state.masks):
            self._masks = DocumentMasks(state)
        return self._masks

    def close(self) -> None:
        """End every wait. Idempotent."""
        self._closed.set()

    def _is_stopped(self) -> bool:
        return self._closed.is_set() or (self._stop is not None and self._stop())


class _BatchReader:
    """Reads the batch of any step of a run for one shard. Rows are located one window of steps at a time."""

    def __init__(
        self,
        source: RowSource,
        slots: Mapping[int, _StepSlots],
        document_mask: bool,
        cursor: DataCursor,
        image_input: ImageInput | PatchInput | None,
        read_teacher: ReadTeacher | None,
    ) -> None:
        self._image_input, self._read_teacher = image_input, read_teacher
        self._source, self._plan, self._document_mask, self._cursor = source, source.plan, document_mask, cursor
        self._sizes, self._slots = source.plan.start.batch_sizes, slots
        self._window_steps = max(1, _LOCATED_ROWS // max(one.num_rows for one in slots.values()))
        self._windows: dict[int, tuple[int, LocatedRows]] = {}
        self._locating = threading.Lock()

    def read(self, step: int) -> Batch:
        self._source.cover(self._sizes.position_of(step + 1))
        slots, row_pieces = self._slots_of(step), self._plan.row_pieces_at(self._sizes.position_of(step))
        batch = assemble(
            self._locate(step).read(),
            document_mask=self._document_mask,
            step=step,
            cursor_after=self._cursor_after(step + 1),
            num_micro_batches=slots.num_micro_batches,
            padding_rows=slots.padding_rows,
            row_pieces=row_pieces,
            image_input=self._image_input,
        )
        if self._read_teacher is not None:
            batch = replace(batch, teacher=self._read_teacher(batch))
        return batch.with_lanes((slots.slots[:, None] * row_pieces + np.arange(row_pieces)).reshape(-1))

    def _cursor_after(self, step: int) -> DataCursor:
        """Return the cursor before a step. Over growing caches it includes all events that decide earlier rows."""
        position = self._sizes.position_of(step)
        events, digest = self._cursor.plan_events, self._cursor.plan_digest
        if self._plan.start.growth is not None:
            events = max(events, self._plan.state.events_covering(position))
            digest = self._plan.digest_at(events) or digest
        return DataCursor(plan_digest=digest, plan_events=events, step=step, position=position, seed=self._cursor.seed)

    def _locate(self, step: int) -> LocatedRows:
        window = step // self._window_steps
        with self._locating:
            first_step, located = self._windows.get(window, (0, None))
            if located is None or self._rows_between(first_step, step) >= len(located):  # the plan was extended since
                first_step = max(window * self._window_steps, self._cursor.step)  # sources of earlier steps may be gone
                located = self._locate_window(first_step, step)
                self._windows[window] = first_step, located
                for old in sorted(self._windows)[:-2]:
                    del self._windows[old]
            start = self._rows_between(first_step, step)
            return located[start : start + len(self._slots_of(step).slots)]

    def _locate_window(self, first_step: int, step: int) -> LocatedRows:
        window_end = (step // self._window_steps + 1) * self._window_steps if self._windows else step + 1
        end = max(step + 1, min(window_end, self._sizes.step_at(self._plan.num_positions)))
        steps = range(first_step, end)
        return self._source.locate(
            np.concatenate([self._sizes.position_of(one) + self._slots_of(one).slots for one in steps])
        )

    def _slots_of(self, step: int) -> _StepSlots:
        return self._slots[self._sizes.rows_of(step)]

    def _rows_between(self, first_step: int, step: int) -> int:
        """Return the number of rows that this shard reads from ``first_step`` up to ``step``."""
        if self._sizes.is_uniform(first_step, step):
            return (step - first_step) * len(self._slots_of(step).slots)
        return sum(len(self._slots_of(one).slots) for one in range(first_step, step))


def _check_cursor(plan: DataPlan, cursor: DataCursor) -> None:
    if plan.digest_at(cursor.plan_events) != cursor.plan_digest or cursor.seed != plan.start.seed:
        raise DataError(
            f"The data cursor of step {cursor.step:,} does not belong to this data plan", where=str(plan.path),
            hint="resume from a checkpoint of this run; if plan.jsonl was replaced, restore the original",
        )  # fmt: skip
    if cursor.step < 0 or cursor.position != plan.start.batch_sizes.position_of(cursor.step):
        raise DataError(
            f"The data cursor has position {cursor.position:,} at step {cursor.step:,}, but the data plan has "
            f"position {plan.start.batch_sizes.position_of(max(0, cursor.step)):,} there",
            where=str(plan.path),
        )


def _check_same_shape(readers: Sequence[RowReader]) -> None:
    """Refuse sources whose rows cannot be stacked into one array."""
    shapes = sorted({(reader.row_tokens, reader.recipe.dtype) for reader in readers})
    if len(shapes) > 1:
        raise DataError(f"The sources' caches differ in row length or token size: {shapes}", where="data.sources")
