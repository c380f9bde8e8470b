"""Positions of a plan to training samples: arrays of one row each, with where the row comes from.

A block of positions goes in, one dictionary per position comes out, in the same order; a thread may make blocks ahead
of who takes them. Invariant: a sample is a function of (plan, position), whatever the size of the blocks and however
far they are made ahead.

Shape legend: N rows of a block, T positions of a row.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.data.assembly import assemble, interleave
from vorox.data.plan import Plan, Positions
from vorox.data.plan_tables import Addresses
from vorox.data.records import RowBlock
from vorox.data.streaming.reader import StreamReader

Sample = dict[str, Any]
"""``input_ids`` and ``labels``, int32 ``[T]``; under a document mask ``segment_ids`` and ``position_ids``; asked for,
``metadata``."""

_CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class SampleReader:
    """Makes the samples of any covered positions.

    Attributes:
        plan: Where each position's row is.
        readers: The sources, in the plan's order.
        document_mask: Whether documents of a row are kept apart.
        metadata: Whether samples say where they come from.
    """

    plan: Plan
    readers: Sequence[StreamReader]
    document_mask: bool
    metadata: bool

    def locate(self, positions: Positions) -> Addresses:
        return self.plan.locate(positions)

    def read(self, positions: Positions, found: Addresses) -> list[Sample]:
        """The samples at some positions.

        Raises:
            DataError: A row cannot be made again as it was.
        """
        rows_N = found.row.copy()
        blocks: list[RowBlock] = []
        slots: list[npt.NDArray[np.int64]] = []
        for index, reader in enumerate(self.readers):
            chosen = np.flatnonzero(found.source_index == index)
            if chosen.size:
                rows_N[chosen] += reader.unit_row_starts[found.unit_start[chosen]]
                blocks.append(reader.read_rows(rows_N[chosen]))
                slots.append(chosen)
        rows = assemble(interleave(blocks, slots), document_mask=self.document_mask)
        arrays = {"input_ids": rows.tokens_NT, "labels": rows.labels_NT}
        if rows.segment_ids_NT is not None and rows.position_ids_NT is not None:
            arrays |= {"segment_ids": rows.segment_ids_NT, "position_ids": rows.position_ids_NT}
        samples: list[Sample] = [{name: array[n] for name, array in arrays.items()} for n in range(len(positions))]
        if self.metadata:
            for n, sample in enumerate(samples):
                sample["metadata"] = self._metadata(int(positions[n]), found, rows_N, n)
        return samples

    def _metadata(self, position: int, found: Addresses, rows_N: Positions, n: int) -> dict[str, Any]:
        source = int(found.source_index[n])
        spans = self.readers[source].documents_of(int(rows_N[n]))
        return {
            "position": position,
            "source": self.plan.sources[source].name,
            "epoch": int(found.epoch[n]),
            "documents": [
                {
                    "uri": span.uri,
                    "start_byte": span.byte_offset,
                    "end_byte": span.byte_offset + span.byte_length,
                    "first_token": span.document_token_offset,
                    "num_tokens": span.length,
                }
                for span in spans
            ],
        }


def read_ahead(
    read: Callable[[Positions], list[Sample] | None], blocks: Iterable[Positions], num_blocks: int
) -> Generator[tuple[Positions, list[Sample]]]:
    """Blocks of samples in order, made by a thread that keeps some ready.

    Args:
        read: Makes a block; None says that the data ends before it.
        blocks: Which positions.
        num_blocks: Blocks kept ready; 0 makes each when it is asked for.
    """
    if num_blocks == 0:
        for positions in blocks:
            samples = read(positions)
            if samples is None:
                return
            yield positions, samples
        return
    ready: queue.Queue[tuple[Positions, list[Sample]] | BaseException | None] = queue.Queue(num_blocks)
    ended = threading.Event()

    def put(item: tuple[Positions, list[Sample]] | BaseException | None) -> bool:
        while not ended.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for positions in blocks:
                samples = read(positions)
                if samples is None or not put((positions, samples)):
                    break
            put(None)
        except BaseException as error:  # whatever it is, the consumer must see it, behind what came before it
            put(error)

    thread = threading.Thread(target=work, name="vorox-samples", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        ended.set()
        thread.join(_CLOSE_SECONDS)
