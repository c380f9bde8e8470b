"""Batches, cursors into the data, and the progress of a run.

Shapes: A micro-batches of a step, B rows of a micro-batch, T positions of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.row_set_hash import LaneArray, RowStream, finish, row_digest, row_stream, sum_elements

IGNORED_LABEL = -100
"""Label of a position that is not trained on (padding; the last token of a document under document masking)."""

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DataShard:
    """The part of every global batch that this rank reads.

    Attributes:
        index: Its first data-parallel shard, from 0.
        count: Number of shards over all ranks.
        width: Consecutive shards that this rank reads, one per group of its devices that share rows.
    """

    index: int = 0
    count: int = 1
    width: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether this rank reads all rows."""
        return self.width == self.count


@dataclass(frozen=True, slots=True)
class DataCursor:
    """The position of a run in its data: the entire data state of a checkpoint.

    Attributes:
        plan_digest: Head of the plan's hash chain.
        plan_events: Number of plan events that the digest covers.
        step: Next step to run.
        position: Next global position, in rows from the start of the run.
        seed: Seed of the data order.
    """

    plan_digest: str
    plan_events: int
    step: int
    position: int
    seed: int

    def to_json(self) -> dict[str, Any]:
        return {
            "plan_digest": self.plan_digest,
            "plan_events": self.plan_events,
            "step": self.step,
            "position": self.position,
            "seed": self.seed,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DataCursor:
        return cls(
            plan_digest=str(value["plan_digest"]),
            plan_events=int(value["plan_events"]),
            step=int(value["step"]),
            position=int(value["position"]),
            seed=int(value["seed"]),
        )


@dataclass(frozen=True, slots=True)
class BatchImages:
    """The images of a micro-batch, in the order of their positions.

    Attributes:
        pixels_ISSC: RGB, uint8, ``[images, side, side, 3]``.
        rows_I: Row of each image in the micro-batch.
        token_id: The id at their positions.
    """

    pixels_ISSC: npt.NDArray[np.uint8]
    rows_I: npt.NDArray[np.int64]
    token_id: int

    def of_rows(self, rows: npt.NDArray[np.int64]) -> BatchImages:
        """Return the images of some rows, for a batch that has these rows in this order."""
        chosen = [np.flatnonzero(self.rows_I == row) for row in rows.tolist()]
        index = np.concatenate([np.zeros(0, np.int64), *chosen])
        return BatchImages(
            self.pixels_ISSC[index], np.repeat(np.arange(len(rows)), list(map(len, chosen))), self.token_id
        )

    def arrays(self) -> Iterator[tuple[str, npt.NDArray[np.generic]]]:
        """Yield the image arrays, named for ``row_digest``."""
        for pixels_SSC in self.pixels_ISSC:
            yield "image", pixels_SSC


@dataclass(frozen=True, slots=True)
class BatchPatches:
    """The images of a micro-batch as patches, in the order of their positions, for models that read images of any size.

    Attributes:
        patches_PCSS: Patches of all images, uint8 RGB ``[patches, 3, side, side]``; the patches that become one token
            follow each other.
        grids_I2: Rows and columns of patches of each image, int64.
        rows_I: Row of each image in the micro-batch.
        token_id: The id at their positions.
    """

    patches_PCSS: npt.NDArray[np.uint8]
    grids_I2: npt.NDArray[np.int64]
    rows_I: npt.NDArray[np.int64]
    token_id: int

    def of_rows(self, rows: npt.NDArray[np.int64]) -> BatchPatches:
        """Return the images of some rows, for a batch that has these rows in this order."""
        chosen = [np.flatnonzero(self.rows_I == row) for row in rows.tolist()]
        index = np.concatenate([np.zeros(0, np.int64), *chosen])
        ends = np.cumsum(self.grids_I2.prod(axis=1))
        starts = ends - self.grids_I2.prod(axis=1)
        parts = [self.patches_PCSS[starts[image] : ends[image]] for image in index.tolist()]
        patches = [self.patches_PCSS[:0], *parts]
        rows_I = np.repeat(np.arange(len(rows)), list(map(len, chosen)))
        return BatchPatches(np.concatenate(patches), self.grids_I2[index], rows_I, self.token_id)

    def arrays(self) -> Iterator[tuple[str, npt.NDArray[np.generic]]]:
        """Yield the image arrays, named for ``row_digest``."""
        yield "grids", self.grids_I2
        yield "patches", self.patches_PCSS


AnyImages = BatchImages | BatchPatches


@dataclass(frozen=True, slots=True)
class TeacherLogits:
    """The largest logits of a teacher at every position, less the largest, by falling size (``train.distillation``).

    Attributes:
        ids_ABTK: Their tokens, int32.
        logits_ABTK: The logits, fp32.
    """

    ids_ABTK: Int32Array
    logits_ABTK: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Batch:
    """All micro-batches of one step, for this rank.

    Attributes:
        step: Step that trains on this batch, from 0.
        tokens_ABT: Input token ids, int32.
        labels_ABT: Token to predict at each position, int32; ``IGNORED_LABEL`` where there is none.
        segment_ids_ABT: Document of each position within its row, int32 from 1; 0 is padding. ``None`` when
            documents of a row may attend to each other.
        position_ids_ABT: Position within the document, int32. ``None`` when positions run through the whole row.
        row_digests_AB: 64-bit hash of each row's tokens and segments, uint64; 0 for a row that pads a shorter shard.
        num_target_tokens: What the loss of this rank is divided by: the number of its labels, and of those that are
            ignored because their document is masked.
        cursor_after: The data state after this batch.
        images_A: Images of each micro-batch; ``None`` for a model that reads text only.
        teacher: Stored logits of a teacher; ``None`` without ``train.distillation.logits``.
        lanes: Sum over the elements of its rows (``core/row_set_hash.py``); ``None`` for a batch without slots.
        masked_targets_ABT: Whether a position was a target before its document was masked; ``None``: none is masked.
        stored_digests_AB: ``row_digests_AB`` before documents were masked; ``None``: none is masked.
    """

    step: int
    tokens_ABT: Int32Array
    labels_ABT: Int32Array
    segment_ids_ABT: Int32Array | None
    position_ids_ABT: Int32Array | None
    row_digests_AB: npt.NDArray[np.uint64]
    num_target_tokens: int
    cursor_after: DataCursor
    images_A: tuple[AnyImages, ...] | None = None
    teacher: TeacherLogits | None = None
    lanes: LaneArray | None = None
    masked_targets_ABT: npt.NDArray[np.bool_] | None = None
    stored_digests_AB: npt.NDArray[np.uint64] | None = None

    @property
    def num_tokens(self) -> int:
        """All positions, whether trained on or not."""
        return int(self.tokens_ABT.size)

    @property
    def row_tokens(self) -> int:
        """Positions per row."""
        return int(self.tokens_ABT.shape[-1])

    def with_lanes(self, slots: npt.NDArray[np.int64]) -> Batch:
        """Return the batch with the sum over its rows.

        Args:
            slots: Place of each row in the global batch, without the padding rows at the end.
        """
        before = [self._stream("tokens", self.tokens_ABT), self._stream("labels", self.labels_ABT)]
        if self.segment_ids_ABT is not None:
            before.append(self._stream("segments", self.segment_ids_ABT))
        if self.position_ids_ABT is not None:
            before.append(self._stream("position", self.position_ids_ABT))
        after: list[RowStream] = []
        if self.teacher is not None:
            after = [
                self._stream("topids", self.teacher.ids_ABTK),
                self._stream("logits", self.teacher.logits_ABTK),
            ]
        digests = [
            row_digest([*(one.of(row) for one in before), *self._image_parts(row), *(one.of(row) for one in after)])
            for row in range(len(slots))
        ]
        return replace(self, lanes=sum_elements(self.step + 1, slots.tolist(), digests))

    @staticmethod
    def _stream(name: str, array_AB: npt.NDArray[np.generic]) -> RowStream:
        return row_stream(name, array_AB.reshape(-1, *array_AB.shape[2:]))

    def _image_parts(self, row: int) -> list[tuple[bytes, memoryview]]:
        """Return what the digest of a row is over of its images, of which every row has its own number."""
        if self.images_A is None:
            return []
        micro_batch, index = divmod(row, self.tokens_ABT.shape[1])
        arrays = self.images_A[micro_batch].of_rows(np.array([index])).arrays()
        return [row_stream(name, array[None]).of(0) for name, array in arrays]

    def digest(self) -> str:
        """Return the batch digest of the rows of this rank, in hex; with one rank, the replay chain records it."""
        assert self.lanes is not None, "the batch was not read by the loader of a run"
        return finish(self.lanes)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run. Immutable; ``advance`` returns the next one.

    Attributes:
        step: Number of finished steps, and index of the next step.
        num_tokens: Positions processed so far, over all ranks.
        cursor: Data state for the next batch.
        chain: Head of the replay chain over all finished steps.
        best_eval_loss: Lowest validation loss so far, nats per token.
    """

    step: int
    num_tokens: int
    cursor: DataCursor
    chain: str = ""
    best_eval_loss: float | None = None

    def advance(self, batch: Batch, shard: DataShard | None = None) -> Progress:
        """Return the progress after a batch."""
        return replace(
            self,
            step=batch.step + 1,
            num_tokens=self.num_tokens + self._global_tokens(batch, shard or DataShard()),
            cursor=batch.cursor_after,
        )

    def _global_tokens(self, batch: Batch, shard: DataShard) -> int:
        """Return the positions of a step over all ranks, without the rows that pad shorter shards."""
        rows = batch.cursor_after.position - self.cursor.position
        if shard.is_whole or rows % shard.count == 0:
            return batch.num_tokens // shard.width * shard.count
        return rows * (batch.num_tokens // -(-rows // shard.count))

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "num_tokens": self.num_tokens,
            "cursor": self.cursor.to_json(),
            "chain": self.chain,
            "best_eval_loss": self.best_eval_loss,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Progress:
        best = value["best_eval_loss"]
        return cls(
            step=int(value["step"]),
            num_tokens=int(value["num_tokens"]),
            cursor=DataCursor.from_json(value["cursor"]),
            chain=str(value["chain"]),
            best_eval_loss=None if best is None else float(best),
        )
