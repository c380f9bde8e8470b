"""Reading samples: one training row each, as a dictionary of arrays, with the origin of its text.

The index of a block goes in, the samples at its positions come out. Invariant: a sample is a function of (plan,
position); it does not depend on block size or prefetching.

Shape legend: T positions of a row.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from vorox.core.batch import DataCursor
from vorox.core.files.atomic import canonical_json
from vorox.data.cache.reader import CacheReader
from vorox.data.documents import DocumentSpan
from vorox.data.order.loader import LocatedRows, RowSource
from vorox.data.order.plan import DataPlan, Positions
from vorox.data.order.plan_events import encode_event
from vorox.data.rows import assemble

Sample = dict[str, Any]
"""``input_ids`` and ``labels``, int32 ``[T]``; with a document mask also ``segment_ids`` and ``position_ids``;
``metadata`` if requested."""

BLOCK_SAMPLES = 16
"""Number of samples read together."""


@dataclass(frozen=True, slots=True)
class Share:
    """The positions of one of several readers: every ``count``-th turn, starting with turn ``index``.

    Attributes:
        index: Index of the reader.
        count: Number of readers.
        turn: Number of consecutive samples in a turn.
        stride: Distance in positions between the samples of a turn.
        skip: Number of the reader's samples to skip at the start.
    """

    index: int = 0
    count: int = 1
    turn: int = 1
    stride: int = 1
    skip: int = 0

    def positions(self, start: int, block: int) -> Positions:
        """Return a block's ascending positions; ``start`` is the first position of the iteration, over all readers."""
        first = self.skip + block * BLOCK_SAMPLES
        turns, offsets = np.divmod(np.arange(first, first + BLOCK_SAMPLES), self.turn)
        return start + ((turns * self.count + self.index) * self.turn + offsets) * self.stride


class SampleStream(Protocol):
    """A dataset whose samples are shared by several readers, such as ``RemoteIterableDataset``."""

    rank: int
    world_size: int

    @property
    def start_state(self) -> dict[str, Any]: ...

    def samples(self, start: int, share: Share) -> Iterator[tuple[int, Sample]]:
        """Yield (position, sample) for the positions of a share."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class SampleReader:
    """Reads the samples of one share, a block at a time. For one thread.

    Args:
        source: The rows.
        start: Start position of all shares.
        share: The positions to read.
        document_mask: Whether attention is confined to a document.
        metadata: Whether samples name their documents.
        max_epochs: Number of passes after which the samples end; ``None`` for no end.
    """

    def __init__(
        self,
        source: RowSource,
        start: int,
        share: Share,
        *,
        document_mask: bool,
        metadata: bool,
        max_epochs: int | None,
    ) -> None:
        self._source, self._start, self._share = source, start, share
        self._document_mask, self._metadata, self._max_epochs = document_mask, metadata, max_epochs
        self._num_blocks = sys.maxsize

    def num_blocks(self) -> int:
        """Return the number of blocks; a very large number until the last block has been read."""
        return self._num_blocks

    def read(self, block: int) -> list[tuple[int, Sample]]:
        """Read the samples of a block, each with its position. A short block is the last one.

        Raises:
            DataError: A row cannot be read, or its rebuilt content differs.
        """
        positions = self._share.positions(self._start, block)
        self._source.cover(int(positions[-1]) + 1)
        located = self._source.locate(positions)
        if self._max_epochs is not None and int(located.epoch.max()) >= self._max_epochs:
            located = located[: int(np.argmax(located.epoch >= self._max_epochs))]
            self._num_blocks = block + 1
        if not len(located):
            return []
        batch = assemble(
            located.read(), document_mask=self._document_mask, step=block,
            cursor_after=DataCursor("", 0, block + 1, int(positions[-1]) + 1, self._source.plan.start.seed),
        )  # fmt: skip
        arrays = {"input_ids": batch.tokens_ABT[0], "labels": batch.labels_ABT[0]}
        if batch.segment_ids_ABT is not None and batch.position_ids_ABT is not None:
            arrays |= {"segment_ids": batch.segment_ids_ABT[0], "position_ids": batch.position_ids_ABT[0]}
        samples: list[tuple[int, Sample]] = []
        for n, position in enumerate(positions[: len(located)].tolist()):
            sample: Sample = {name: array[n] for name, array in arrays.items()}
            if self._metadata:
                sample["metadata"] = self._metadata_of(position, located, n)
            samples.append((position, sample))
        return samples

    def _metadata_of(self, position: int, located: LocatedRows, n: int) -> dict[str, Any]:
        source = int(located.source_index[n])
        reader = located.readers[source]
        assert isinstance(reader, CacheReader)
        spans: Sequence[DocumentSpan] = reader.documents_of(int(located.rows[n]))
        return {
            "position": position,
            "source": self._source.plan.sources[source].name,
            "epoch": int(located.epoch[n]),
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


def order_before(plan: DataPlan, position: int) -> str:
    """Return a hash of everything that determines the samples before a position."""
    counts = plan.state.mixture.counts(position)
    content = [
        [segment.content_digest for segment in group if segment.start_draw < count]
        for group, count in zip(plan.segments, counts, strict=True)
    ]
    return hashlib.sha256(canonical_json([encode_event(plan.start), content])).hexdigest()[:32]
