"""Positions of a plan to training samples: arrays of one row each, with where the row comes from.

A block of positions goes in, one dictionary per position comes out, in the same order; a thread may make blocks ahead
of who takes them. Invariant: a sample is a function of (plan, position), whatever the size of the blocks and however
far they are made ahead.

Shape legend: N rows of a block, T positions of a row.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.atomic import canonical_json
from vorox.data.assembly import assemble, interleave
from vorox.data.cache.reader import DocumentSpan
from vorox.data.growth import PlanGrower
from vorox.data.plan import Plan, Positions
from vorox.data.plan_format import encode_start
from vorox.data.plan_tables import Addresses
from vorox.data.records import RowBlock
from vorox.data.streaming.reader import StreamReader

Sample = dict[str, Any]
"""``input_ids`` and ``labels``, int32 ``[T]``; under a document mask ``segment_ids`` and ``position_ids``; asked for,
``metadata``."""

_CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class SampleReader:
    """Makes the samples of any positions; waits for rows that are not built yet.

    Attributes:
        plan: Where each position's row is.
        grower: Covers positions of the plan, and has the sources' readers.
        document_mask: Whether documents of a row are kept apart.
        metadata: Whether samples say where they come from.
        max_epochs: Passes after which the data ends; ``None`` for any number.
        closing: Set to end waiting.
    """

    plan: Plan
    grower: PlanGrower
    document_mask: bool
    metadata: bool
    max_epochs: int | None
    closing: threading.Event

    def read(self, positions: Positions) -> list[Sample]:
        """The samples at some positions, ascending; fewer where the data ends among them.

        Raises:
            DataError: A row cannot be made again as it was.
        """
        self.grower.cover(int(positions[-1]) + 1, stop=self.closing.is_set)
        found = self.plan.locate(positions)
        if self.max_epochs is not None and int(found.epoch.max()) >= self.max_epochs:
            positions = positions[: int(np.argmax(found.epoch >= self.max_epochs))]
            if not positions.size:
                return []
            found = self.plan.locate(positions)
        rows_N = found.row.copy()
        blocks: list[RowBlock] = []
        slots: list[npt.NDArray[np.int64]] = []
        readers = self.grower.readers
        for index, reader in enumerate(readers):
            chosen = np.flatnonzero(found.source_index == index)
            if not chosen.size:
                continue
            assert isinstance(reader, StreamReader)
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
                reader = readers[int(found.source_index[n])]
                assert isinstance(reader, StreamReader)
                sample["metadata"] = self._metadata(int(positions[n]), found, n, reader.documents_of(int(rows_N[n])))
        return samples

    def order_before(self, position: int) -> str:
        """Hash over everything that decides the samples before a position."""
        counts = self.plan.tables.mixture.counts(position)
        content = [
            [segment.content_digest for segment in group if segment.start_draw < count]
            for group, count in zip(self.plan.segments, counts, strict=True)
        ]
        return hashlib.sha256(canonical_json([encode_start(self.plan.start), content])).hexdigest()[:32]

    def _metadata(self, position: int, found: Addresses, n: int, spans: Sequence[DocumentSpan]) -> dict[str, Any]:
        return {
            "position": position,
            "source": self.plan.sources[int(found.source_index[n])].name,
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
    read: Callable[[Positions], list[Sample]], blocks: Iterable[Positions], num_blocks: int
) -> Generator[tuple[Positions, list[Sample]]]:
    """Blocks of samples in order, made by a thread that keeps some ready. The first short one is the last.

    Args:
        read: Makes a block; a short one says that the data ends in it.
        blocks: Which positions.
        num_blocks: Blocks kept ready; 0 makes each when it is asked for.
    """
    if num_blocks == 0:
        for positions in blocks:
            yield positions, (samples := read(positions))
            if len(samples) < len(positions):
                return
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
                if not put((positions, samples)) or len(samples) < len(positions):
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
