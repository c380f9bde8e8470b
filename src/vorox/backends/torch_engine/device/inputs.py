"""Batches on their way to the device, and the randomness of a micro-batch.

Shape legend: A micro-batches, B rows, T positions, P positions of this rank, M = B x T, D width.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor

from vorox.core.batch import IGNORED_LABEL, Batch, DataShard, Int32Array
from vorox.core.files.atomic import canonical_json


def rows_of_rank(batch: Batch, shard: DataShard, *, one_by_one: bool = False) -> list[Batch]:
    """Return a rank's part of the rows of every micro-batch, as one batch or as one per row.

    A rank without rows gets the first one without labels, because all ranks run equally many forward passes.
    """
    if shard.is_whole and not one_by_one:
        return [batch]
    rows = np.arange(batch.tokens_ABT.shape[1])[shard.index :: shard.count]
    is_empty = not len(rows)
    rows = np.zeros(1, np.int64) if is_empty else rows

    def select(chosen: npt.NDArray[np.int64]) -> Batch:
        labels_ABT = batch.labels_ABT[:, chosen]
        segments, positions, images = batch.segment_ids_ABT, batch.position_ids_ABT, batch.images_A
        return dataclasses.replace(
            batch,
            tokens_ABT=batch.tokens_ABT[:, chosen],
            labels_ABT=np.full_like(labels_ABT, IGNORED_LABEL) if is_empty else labels_ABT,
            segment_ids_ABT=None if segments is None else segments[:, chosen],
            position_ids_ABT=None if positions is None else positions[:, chosen],
            images_A=None if images is None else tuple(part.of_rows(chosen) for part in images),
        )

    return [select(rows[place : place + 1]) for place in range(len(rows))] if one_by_one else [select(rows)]


Array = TypeVar("Array", Int32Array, Tensor)


@dataclass(frozen=True, slots=True)
class PositionPart:
    """The part of the positions that a rank computes: one of ``size`` equal ones, of every row or of all in sequence.

    Attributes:
        index: Index of the part.
        size: Number of parts.
        num_chunks: 1 for consecutive positions; 2 for a chunk of the first half and the opposite one of the second
            half ("zigzag"), so that parts have equal work under a causal mask.
    """

    index: int
    size: int
    num_chunks: int = 1

    def at(self, index: int) -> PositionPart:
        """Return the part with another index."""
        return dataclasses.replace(self, index=index)

    def slices(self, num_positions: int) -> list[slice]:
        """Return the consecutive positions of this part."""
        count = self.num_chunks * self.size
        width = num_positions // count
        chunks = (self.index, count - 1 - self.index)[: self.num_chunks]
        return [slice(chunk * width, (chunk + 1) * width) for chunk in chunks]

    def select(self, array_BT: Array) -> Array:
        """Return the columns of this part."""
        parts = [array_BT[:, chunk] for chunk in self.slices(array_BT.shape[1])]
        if len(parts) == 1:
            return parts[0]
        join: Any = torch.cat if isinstance(array_BT, Tensor) else np.concatenate
        return join(parts, 1)


WHOLE = PositionPart(0, 1)


@dataclass(frozen=True, slots=True)
class RowPositions:
    """The rows of a micro-batch, of which this rank computes some positions.

    Attributes:
        tokens_BP: The tokens at the positions of this rank.
        positions_BP: Their positions in their documents, ``[B or 1, P]``; ``None`` if a rank has whole rows that each
            are one document.
        positions_BT: Those of whole rows, for masks.
        segments_BT: The documents of whole rows (``Batch.segment_ids_ABT``), for masks.
    """

    tokens_BP: Int32Array
    positions_BP: Int32Array | None
    positions_BT: Int32Array | None
    segments_BT: Int32Array | None

    @classmethod
    def of(cls, batch: Batch, index: int, part: PositionPart) -> RowPositions:
        """Select a part of the positions of micro-batch ``index``."""
        tokens_BT, segments_ABT, positions_ABT = batch.tokens_ABT[index], batch.segment_ids_ABT, batch.position_ids_ABT
        positions_BT = None if positions_ABT is None else positions_ABT[index]
        if positions_BT is None and part.size > 1:
            positions_BT = np.arange(tokens_BT.shape[1], dtype=np.int32)[None]
        positions_BP = None if positions_BT is None else part.select(positions_BT)
        segments_BT = None if segments_ABT is None else segments_ABT[index]
        return cls(part.select(tokens_BT), positions_BP, positions_BT, segments_BT)


def _sample(
    x_MD: Tensor, num_rows: int, row_part: PositionPart, stream_part: PositionPart, draw: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return this rank's part of ``draw(ones)``, which is drawn for whole rows, so it equals that of one process."""
    width, hidden_size = x_MD.shape[0] * row_part.size * stream_part.size // num_rows, x_MD.shape[1]
    mask_BPD = row_part.select(draw(torch.ones(num_rows, width, hidden_size, device=x_MD.device)))
    return stream_part.select(mask_BPD.reshape(1, -1, hidden_size)).reshape(x_MD.shape).to(x_MD.dtype)


def dropout(
    x_MD: Tensor, fraction: float, num_rows: int, row_part: PositionPart = WHOLE, stream_part: PositionPart = WHOLE
) -> Tensor:
    """Apply dropout to the residual stream.

    Args:
        x_MD: The positions that are here.
        fraction: Dropout rate.
        num_rows: Rows of the micro-batch.
        row_part: The part of each row that is here.
        stream_part: The part of all these positions in sequence that is here.
    """
    if fraction == 0:
        return x_MD
    if row_part.size == stream_part.size == 1:
        return F.dropout(x_MD, fraction)
    return x_MD * _sample(x_MD, num_rows, row_part, stream_part, lambda ones: F.dropout(ones, fraction))


def add_noise(x: Tensor, alpha: float, num_positions: int, part: PositionPart = WHOLE) -> Tensor:
    """Add noise to token embeddings: uniform in [-1, 1] x alpha / sqrt(T D), drawn in fp32 (NEFTune, arXiv 2310.05914).

    Args:
        x: Embeddings ``[..., D]``.
        alpha: ``train.embedding_noise``.
        num_positions: Positions of a row that are here, T.
        part: The part of each row that is here.
    """
    if part.size == 1:
        noise = torch.empty(x.shape, device=x.device).uniform_(-1, 1)
    else:
        noise = _sample(x, x.shape[0] // num_positions, part, WHOLE, lambda ones: ones.uniform_(-1, 1))
    return x + (noise * (alpha / math.sqrt(num_positions * part.size * x.shape[-1]))).to(x.dtype)


@contextlib.contextmanager
def keyed_randomness(seed: int, step: int, micro_batch: int, device: torch.device, *, active: bool) -> Iterator[None]:
    """Seed PyTorch's generators from (seed, step, micro-batch) inside the block, and restore them afterwards."""
    if not active:
        yield
        return
    key = xxhash.xxh3_64_intdigest(canonical_json(["dropout", 1, seed, step, micro_batch])) >> 1
    mps_state = torch.mps.get_rng_state() if device.type == "mps" else None
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(key)
        try:
            yield
        finally:
            if mps_state is not None:
                torch.mps.set_rng_state(mps_state)
