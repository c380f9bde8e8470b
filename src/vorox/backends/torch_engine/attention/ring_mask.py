"""Masks of ring attention: which queries of a tile of a row attend to which keys of another tile.

Every rank has read the documents of whole rows, so masks need no communication, and none of T x T elements is made.

Shape legend: B rows, T positions of a row, Q query and S key positions of a tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vorox.core.batch import Int32Array


@dataclass(frozen=True, slots=True)
class Tile:
    """Consecutive positions of a row that a rank holds.

    Attributes:
        start: The first position in the row.
        here: The positions among those of the rank.
    """

    start: int
    here: slice

    @property
    def end(self) -> int:
        return self.start + self.here.stop - self.here.start


@dataclass(frozen=True, slots=True)
class RingMask:
    """Causal attention within documents and a window, for any tile of a row.

    Attributes:
        segments_BT: Document of each position of whole rows; ``None`` if every row holds one document.
        on_device_BT: The same on the device.
        window_tokens: Positions that a position attends to, itself included; ``None``: all earlier ones.
    """

    segments_BT: Int32Array | None = None
    on_device_BT: Tensor | None = None
    window_tokens: int | None = None

    @classmethod
    def of_rows(cls, segments_BT: Int32Array | None, device: torch.device) -> RingMask:
        """Return the mask of a micro-batch, without a window."""
        if segments_BT is None:
            return cls()
        return cls(segments_BT, torch.from_numpy(np.ascontiguousarray(segments_BT)).to(device, non_blocking=True))

    def hides(self, query: Tile, key: Tile) -> bool:
        """Whether no query of a tile attends to a key of another one, as far as ranges of documents show it."""
        is_later = key.start >= query.end
        is_past = self.window_tokens is not None and query.start - (key.end - 1) >= self.window_tokens
        if is_later or is_past:
            return True
        if self.segments_BT is None:
            return False
        queries_BQ, keys_BS = (self.segments_BT[:, tile.start : tile.end] for tile in (query, key))
        overlaps_B = (queries_BQ.min(1) <= keys_BS.max(1)) & (keys_BS.min(1) <= queries_BQ.max(1))
        return not bool(overlaps_B.any())

    def visible(self, query: Tile, key: Tile, device: torch.device) -> Tensor | None:
        """Return which queries attend to which keys, ``[B or 1, 1, 1, Q, S]``; ``None`` if all do to all."""
        conditions: list[Tensor] = []
        is_cut = self.window_tokens is not None and query.end - 1 - key.start >= self.window_tokens
        if key.end - 1 > query.start or is_cut:
            query_Q, key_S = (torch.arange(tile.start, tile.end, device=device) for tile in (query, key))
            distance_QS = query_Q[:, None] - key_S
            near = math.inf if self.window_tokens is None else self.window_tokens
            conditions.append(((distance_QS >= 0) & (distance_QS < near))[None])
        if self.segments_BT is not None and self.on_device_BT is not None:
            first_B = self.segments_BT[:, key.start]
            if any((self.segments_BT[:, tile.start : tile.end] != first_B[:, None]).any() for tile in (query, key)):
                queries_BQ, keys_BS = (self.on_device_BT[:, tile.start : tile.end] for tile in (query, key))
                conditions.append(queries_BQ[:, :, None] == keys_BS[:, None, :])
        if not conditions:
            return None
        found = conditions[0] if len(conditions) == 1 else conditions[0] & conditions[1]
        return found[:, None, None]
