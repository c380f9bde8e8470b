"""Batches of a run: plan and caches in, ``Batch`` per step out, read ahead by threads.

Every step's batch is a function of (plan, step, shard). Threads claim steps in order and the consumer takes them in
order, so neither their number nor the read-ahead changes a batch, and an error surfaces at the step it belongs to.
Opening costs the plan and one look at the cache's digests, wherever the cursor stands.

Shape legend: N rows of a step in this process, A micro-batches, B rows of a micro-batch, T positions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.errors import ConfigError, DataError
from vorox.core.records import IGNORED_LABEL, Batch, DataCursor, DataShard
from vorox.data.assembly import assemble, interleave
from vorox.data.plan import Plan
from vorox.data.records import RowBlock, RowReader

Int64Array = npt.NDArray[np.int64]

_LOCATED_ROWS = 4096
"""Rows whose places are computed together: numpy's cost per call disappears, the first batch stays early."""

_CLOSE_SECONDS = 5.0
"""How long closing waits for a thread that hangs in a read; it is a daemon and keeps nobody alive."""


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
    readers: Sequence[RowReader],
    *,
    shard: DataShard,
    cursor: DataCursor,
    global_batch_sequences: int,
    micro_batch_sequences: int,
    document_mask: bool,
    num_threads: int = 1,
    prefetch_batches: int = 4,
) -> BatchStream:
    """Read batches from ``cursor`` on, for as long as the plan covers them.

    Args:
        plan: The run's plan, extended as far as batches will be asked for. It may be extended further meanwhile.
        readers: Caches of the sources, in the plan's order.
        shard: The part of every global batch that this process reads.
        cursor: Where to begin: ``first_cursor`` or a checkpoint's.
        global_batch_sequences: Rows of a step over all shards, as in the plan.
        micro_batch_sequences: Rows of a micro-batch of this process.
        document_mask: Whether documents of a row are kept apart.
        num_threads: Reader threads; 0 reads when a batch is asked for.
        prefetch_batches: Batches kept ready by the threads.

    Raises:
        ConfigError: The batch does not divide evenly, or the plan has another size.
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
    _check_alike(readers)
    source = _BatchSource(plan, tuple(readers), slots, document_mask, cursor)
    return BatchStream(
        source.read, lambda: plan.num_positions // global_batch_sequences, first_step=cursor.step,
        num_threads=num_threads, prefetch_batches=prefetch_batches,
    )  # fmt: skip


def slots_of_shard(global_batch_sequences: int, micro_batch_sequences: int, shard: DataShard) -> Int64Array:
    """Slots of the global batch that a shard reads, ``[A, B]``: of each global micro-batch, its contiguous part.

    Raises:
        ConfigError: The global batch is not a multiple of the micro-batch times the shards.
    """
    rows = micro_batch_sequences * shard.count
    if rows < 1 or global_batch_sequences % rows or not 0 <= shard.index < shard.count:
        raise ConfigError(
            f"{global_batch_sequences} rows a step cannot be split evenly into micro-batches of "
            f"{micro_batch_sequences} on {shard.count} data-parallel processes",
            where="train.micro_batch_sequences",
            hint=f"make train.global_batch_sequences a multiple of {rows}",
        )
    return np.arange(global_batch_sequences).reshape(-1, shard.count, micro_batch_sequences)[:, shard.index]


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
        yield _filled(_batch(block, step, 1, document_mask, cursor), micro_batch_sequences)


class BatchStream:
    """Batches of consecutive steps. Iterate, or leave the context, to close it.

    Args:
        read: Makes the batch of a step; called from several threads.
        num_steps: Steps that can be read by now.
    """

    def __init__(
        self,
        read: Callable[[int], Batch],
        num_steps: Callable[[], int],
        *,
        first_step: int,
        num_threads: int,
        prefetch_batches: int,
    ) -> None:
        self._read, self._num_steps = read, num_steps
        self._wanted = self._claimed = first_step
        self._prefetch_batches = prefetch_batches
        self._ready: dict[int, Batch | BaseException] = {}
        self._closed = False
        self._changed = threading.Condition()
        self.wait_seconds = 0.0
        """Time that the consumer has spent waiting for batches."""
        self._threads = [
            threading.Thread(target=self._work, name=f"vorox-loader-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def queue_depth(self) -> int:
        """Batches that are ready."""
        return len(self._ready)

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            DataError: The plan does not cover the step, or its rows could not be read. The stream is closed then.
        """
        if self._closed:
            raise RuntimeError("the stream of batches is closed")
        began = time.perf_counter()
        try:
            batch = self._take() if self._threads else self._read(self._wanted)
        except BaseException:
            self.close()
            raise
        finally:
            self.wait_seconds += time.perf_counter() - began
        if not self._threads:
            self._wanted += 1
        return batch

    def close(self) -> None:
        """Stop reading ahead. May be called from any thread, and again."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self) -> Batch:
        with self._changed:
            step = self._wanted
            if step >= self._num_steps():
                self._read(step)  # says why there is none
                raise AssertionError(f"step {step} is not planned, yet it was read")
            self._changed.notify_all()  # the plan may have been extended
            self._changed.wait_for(lambda: self._closed or step in self._ready)
            if self._closed:
                raise RuntimeError("the stream of batches was closed while a batch was waited for")
            result = self._ready.pop(step)
            self._wanted += 1
            self._changed.notify_all()
        if isinstance(result, BaseException):
            raise result
        return result

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._may_claim())
                if self._closed:
                    return
                step = self._claimed
                self._claimed += 1
            try:
                result: Batch | BaseException = self._read(step)
            except BaseException as error:  # whatever it is, the consumer must see it
                result = error
            with self._changed:
                if not self._closed:
                    self._ready[step] = result
                    self._changed.notify_all()

    def _may_claim(self) -> bool:
        return self._claimed < min(self._wanted + self._prefetch_batches, self._num_steps())


@dataclass(frozen=True, slots=True)
class _Places:
    """Source and cache row of the rows of consecutive steps, one line per step."""

    first_step: int
    source_index: npt.NDArray[np.int32]
    rows: Int64Array


class _BatchSource:
    """Makes the batch of any step of one run on one shard."""

    def __init__(
        self, plan: Plan, readers: tuple[RowReader, ...], slots_AB: Int64Array, document_mask: bool, cursor: DataCursor
    ) -> None:
        self._plan, self._readers, self._document_mask, self._cursor = plan, readers, document_mask, cursor
        self._slots = slots_AB.reshape(-1)
        self._num_micro_batches = slots_AB.shape[0]
        self._window_steps = max(1, _LOCATED_ROWS // self._slots.size)
        self._places: dict[int, _Places] = {}
        self._locating = threading.Lock()

    def read(self, step: int) -> Batch:
        places = self._locate(step)
        line = step - places.first_step
        position = (step + 1) * self._plan.start.global_batch_sequences
        block = _read(self._readers, places.source_index[line], places.rows[line])
        cursor = DataCursor(
            plan_digest=self._cursor.plan_digest, plan_events=self._cursor.plan_events, step=step + 1,
            position=position, seed=self._cursor.seed,
        )  # fmt: skip
        return _batch(block, step, self._num_micro_batches, self._document_mask, cursor)

    def _locate(self, step: int) -> _Places:
        window, line = divmod(step, self._window_steps)
        with self._locating:
            places = self._places.get(window)
            if places is None or line >= places.rows.shape[0]:  # the plan may have been shorter then
                places = self._places[window] = self._locate_window(window * self._window_steps, step)
                for old in sorted(self._places)[:-2]:
                    del self._places[old]
            return places

    def _locate_window(self, first_step: int, step: int) -> _Places:
        batch = self._plan.start.global_batch_sequences
        planned_steps = self._plan.num_positions // batch
        last_step = max(step + 1, min(first_step + self._window_steps, planned_steps))
        positions = np.arange(first_step, last_step)[:, None] * batch + self._slots
        found = self._plan.locate(positions.reshape(-1))
        rows = found.row
        for index, reader in enumerate(self._readers):
            chosen = np.flatnonzero(found.source_index == index)
            rows[chosen] += reader.unit_row_starts[found.unit_start[chosen]]
        return _Places(first_step, found.source_index.reshape(positions.shape), rows.reshape(positions.shape))


def _read(readers: Sequence[RowReader], source_index: npt.NDArray[np.integer], rows: Int64Array) -> RowBlock:
    """Rows of several sources in slot order."""
    blocks: list[RowBlock] = []
    slots: list[Int64Array] = []
    for index, reader in enumerate(readers):
        chosen = np.flatnonzero(source_index == index)
        if chosen.size == rows.size:
            return reader.read_rows(rows)
        if chosen.size:
            blocks.append(reader.read_rows(rows[chosen]))
            slots.append(chosen)
    return interleave(blocks, slots)


def _batch(block: RowBlock, step: int, num_micro_batches: int, document_mask: bool, cursor: DataCursor) -> Batch:
    rows = assemble(block, document_mask=document_mask)
    shape = (num_micro_batches, -1, block.row_tokens - 1)
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


def _filled(batch: Batch, num_rows: int) -> Batch:
    """The same batch with rows added that nothing is trained on: token 0, no label, segment 0."""
    missing = num_rows - batch.tokens_ABT.shape[1]
    if not missing:
        return batch

    def fill(array: npt.NDArray[Any], value: int) -> npt.NDArray[Any]:
        return np.pad(array, [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2), constant_values=value)

    segment_ids, position_ids = batch.segment_ids_ABT, batch.position_ids_ABT
    return replace(
        batch,
        tokens_ABT=fill(batch.tokens_ABT, 0),
        labels_ABT=fill(batch.labels_ABT, IGNORED_LABEL),
        segment_ids_ABT=None if segment_ids is None else fill(segment_ids, 0),
        position_ids_ABT=None if position_ids is None else fill(position_ids, 0),
        row_digests_AB=fill(batch.row_digests_AB, 0),
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
