"""Loss per document: what a checkpoint predicts worst, and what it has memorised.

In: batches of a run, the documents behind their rows, and a model. Out: the mean loss of each document over its tokens
in these batches. It is computed after training with the engine's validation loss, one part of a document at a time, so
a training step costs nothing more, and any engine and model can do it.

Shape legend: N rows, T positions of a row, B rows of a micro-batch, L positions of a part, padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vorox.core.batch import IGNORED_LABEL, Batch, Int32Array
from vorox.core.engine import Engine
from vorox.core.errors import DataError
from vorox.data.provenance.queries import DocumentOrigin, RowOrigin

_LEAST_POSITIONS = 32
"""Parts are padded to powers of two from this one, so that an engine compiles few shapes."""


@dataclass(frozen=True, slots=True)
class DocumentLoss:
    """The loss of a document.

    Attributes:
        uri: File of the document.
        ordinal: Index of the record in the file, from 0.
        source: Name of the source.
        loss: Mean cross entropy in nats over the target tokens.
        num_target_tokens: Tokens in the mean: those in the batches, each once.
        document_tokens: Tokens of the whole document.
        steps: The steps whose batches have tokens of the document, ascending.
        text_xxh3: xxh3-64 of the record's whole text.
        copy: Index of the document among those that transforms made of the record.
    """

    uri: str
    ordinal: int
    source: str
    loss: float
    num_target_tokens: int
    document_tokens: int
    steps: tuple[int, ...]
    text_xxh3: int
    copy: int = 0


def document_losses(
    engine: Engine, batches: Iterable[Batch], rows_of_step: Callable[[int], Sequence[RowOrigin]]
) -> list[DocumentLoss]:
    """Return the loss of every document with target tokens in some batches, highest first.

    Args:
        engine: The engine; it is not changed.
        batches: Batches of whole steps, with their rows in slot order.
        rows_of_step: Returns the rows of a step (from 1), in slot order.

    Raises:
        DataError: The model's loss is not the cross entropy of tokens.
    """
    sums: dict[tuple[str, str, int, int], _Sum] = {}
    for batch in batches:
        rows = rows_of_step(batch.step + 1)
        by_row = _Rows.of(batch, len(rows))
        for index, row in enumerate(rows):
            for document in row.documents:
                key = (row.source, document.uri, document.ordinal, document.copy)
                known = sums.setdefault(key, _Sum(row.source, document))
                known.steps.add(batch.step + 1)
                part = (row.source_index, row.row, document.row_token, batch.row_tokens)
                if part not in known.parts:  # a later epoch reads the same row again
                    known.parts.add(part)
                    for found in by_row.parts(index, document, engine.data_shard.width):
                        known.add(engine, found)
    losses = [known.result() for known in sums.values() if known.num_targets]
    return sorted(losses, key=lambda found: (-found.loss, found.uri, found.ordinal, found.copy))


class _Sum:
    """The loss of one document so far."""

    def __init__(self, source: str, document: DocumentOrigin) -> None:
        self._source, self._document = source, document
        self.steps: set[int] = set()
        self.parts: set[tuple[int, ...]] = set()
        self._loss_sum, self.num_targets = 0.0, 0

    def add(self, engine: Engine, part: Batch) -> None:
        values = engine.eval_step(part)
        if not values.is_cross_entropy:
            raise DataError("The loss of this model is not the cross entropy of tokens", where="loss.name")
        self._loss_sum += values.loss_sum
        self.num_targets += values.num_target_tokens

    def result(self) -> DocumentLoss:
        document = self._document
        return DocumentLoss(
            document.uri, document.ordinal, self._source, self._loss_sum / self.num_targets, self.num_targets,
            document.document_tokens, tuple(sorted(self.steps)), document.text_xxh3, document.copy,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Rows:
    """A batch as rows of the cache. A row that the run splits has consecutive pieces of ``piece`` positions."""

    batch: Batch
    piece: int
    tokens_NT: Int32Array
    labels_NT: Int32Array
    positions_NT: Int32Array | None

    @classmethod
    def of(cls, batch: Batch, num_rows: int) -> _Rows:
        positions = None if batch.position_ids_ABT is None else batch.position_ids_ABT.reshape(num_rows, -1)
        tokens, labels = (array.reshape(num_rows, -1) for array in (batch.tokens_ABT, batch.labels_ABT))
        return cls(batch, batch.row_tokens, tokens, labels, positions)

    def parts(self, row: int, document: DocumentOrigin, num_rows: int) -> Iterator[Batch]:
        """Yield batches whose only targets are a document's tokens, with the context that the model trains with."""
        # Token i of a row is the label of position i - 1. With a document mask, no position predicts a first token.
        masked = self.positions_NT is not None
        first = document.row_token if masked else max(document.row_token - 1, 0)
        end = document.row_token + document.num_tokens - 1
        while first < end:
            border = (first // self.piece + 1) * self.piece
            context = first if masked else border - self.piece
            last = min(end, border)
            labels_T = self.labels_NT[row, context:last].copy()
            labels_T[: first - context] = IGNORED_LABEL
            if (labels_T != IGNORED_LABEL).any():
                yield self._batch(row, context, labels_T, num_rows)
            first = last

    def _batch(self, row: int, start: int, labels_T: Int32Array, num_rows: int) -> Batch:
        length = len(labels_T)
        padded = min(max(_LEAST_POSITIONS, 1 << (length - 1).bit_length()), self.piece)
        arrays = np.zeros((4, num_rows, padded), np.int32)  # further rows, one per data shard, are padding
        arrays[1] = IGNORED_LABEL
        arrays[0, 0, :length], arrays[1, 0, :length] = self.tokens_NT[row, start : start + length], labels_T
        arrays[2, 0, :length] = 1
        if self.positions_NT is not None:
            arrays[3, 0, :length] = self.positions_NT[row, start : start + length]
        tokens, labels, segments, positions = arrays[:, None]
        masked = self.positions_NT is not None
        return Batch(
            step=self.batch.step, tokens_ABT=tokens, labels_ABT=labels, segment_ids_ABT=segments if masked else None,
            position_ids_ABT=positions if masked else None, row_digests_AB=np.zeros((1, num_rows), np.uint64),
            num_target_tokens=int(np.count_nonzero(labels != IGNORED_LABEL)), cursor_after=self.batch.cursor_after,
        )  # fmt: skip
