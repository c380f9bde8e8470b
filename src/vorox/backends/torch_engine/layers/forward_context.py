"""Inputs of a forward pass of the decoder besides parameters and tokens.

Shape legend: B rows, T positions, M = B x T, K key/value heads, H head width, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from vorox.backends.torch_engine.attention.attention import AttentionMask
from vorox.backends.torch_engine.attention.context_parallel import ContextParallel
from vorox.backends.torch_engine.device.inputs import WHOLE, PositionPart, dropout
from vorox.backends.torch_engine.layers.experts import RouterStep
from vorox.backends.torch_engine.layers.state_space import MambaState
from vorox.backends.torch_engine.layers.vision import ImageInputs
from vorox.core.schema.train import ActivationCheckpointing


class Cache(Protocol):
    """Keys and values of earlier tokens, and the states behind them."""

    def extend(self, layer: int, key_BKTH: Tensor, value_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens to a layer and return all so far."""
        ...

    def mamba(self, layer: int) -> MambaState:
        """Return the state of a Mamba-2 layer, which the layer updates."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Inputs of a forward pass besides parameters and tokens.

    Attributes:
        shape_BT: Number of rows and positions.
        attention_mask: Which keys each query may attend to.
        rotary: Cosines and sines, ``[B or 1, T, 1, H / 2]``; ``None`` with learned positions.
        sliding_rotary: Those of layers with a sliding window; ``None`` if they are the same.
        documents: Document of each token, ``[B, T]``, for Mamba-2 layers; ``None`` if rows hold one document.
        positions: Position of each token, ``[B or 1, T]``, for learned positions and user blocks.
        dropout: Dropout rate; 0 in evaluation.
        embedding_noise: ``train.embedding_noise``; ``None`` in evaluation.
        cache: Key/value cache, for decoding.
        images: The images of the micro-batch, which take the place of token embeddings.
        recompute: Activation checkpointing: ``block`` saves only the inputs of blocks for the backward pass, ``dots``
            also matrix products and attention.
        part: With sequence parallelism, the part of the residual stream that is here; ``None`` for all.
        exchange: Attends to the positions of other ranks, if ``shape_BT`` is the part of every row that is here.
        router: Losses and metrics of the routers of experts; ``None`` in evaluation, and without experts.
    """

    shape_BT: tuple[int, int]
    attention_mask: AttentionMask
    rotary: tuple[Tensor, Tensor] | None = None
    sliding_rotary: tuple[Tensor, Tensor] | None = None
    documents: Tensor | None = None
    positions: Tensor | None = None
    dropout: float = 0.0
    embedding_noise: float | None = None
    cache: Cache | None = None
    images: ImageInputs | None = None
    recompute: ActivationCheckpointing = "none"
    part: PositionPart | None = None
    exchange: ContextParallel | None = None
    router: RouterStep | None = None

    @property
    def stream_BT(self) -> tuple[int, int]:
        """Number of rows and positions of the residual stream; with sequence parallelism, rows follow each other."""
        if self.part is None:
            return self.shape_BT
        return 1, math.prod(self.shape_BT) // self.part.size

    @property
    def stream_positions(self) -> Tensor:
        """``positions`` of the residual stream."""
        assert self.positions is not None
        if self.part is None:
            return self.positions
        return self.part.select(self.positions.expand(self.shape_BT).reshape(1, -1))

    @property
    def row_part(self) -> PositionPart:
        """The part of every row that is here."""
        return WHOLE if self.exchange is None else self.exchange.part

    def drop(self, x_MD: Tensor) -> Tensor:
        """Apply dropout to the residual stream."""
        return dropout(x_MD, self.dropout, self.shape_BT[0], self.row_part, self.part or WHOLE)
