"""Parameters of a model that several ranks share by tensor parallelism, around another layout.

The layout inside holds the share of this rank as if it were a whole model; here its parts have their place in the
canonical parameters. A parameter is divided along rows, along columns, or replicated. Replicated parameters stay equal
bit by bit, because their gradients are made equal before every update.

Shape legend: R ranks of the group, O rows, C columns of a rank's part of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from vorox.backends.torch_engine.parallel.tensor_parallel import DIVIDED_AXES, TensorGroup
from vorox.backends.torch_engine.parameters import Buffers, Parameters, Piece, WrappedParameters
from vorox.models.decoder_spec import DecoderSpec
from vorox.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Division:
    """How a model is divided.

    Attributes:
        dims: Canonical name to the dimension that is divided; ``None`` for a replicated parameter.
        per_head: Replicated parameters that each rank applies to its heads, so its gradient is a part.
    """

    dims: Mapping[str, int | None]
    per_head: frozenset[str]

    @classmethod
    def of_decoder(cls, spec: DecoderSpec) -> Division:
        """Return the division of a decoder, by the logical axes of its parameters."""
        dims: dict[str, int | None] = {}
        for parameter in spec.parameters:
            divided = [dim for dim, axis in enumerate(parameter.axes) if axis in DIVIDED_AXES]
            dims[parameter.name] = divided[0] if divided else None
        return cls(dims, frozenset(one.name for one in spec.parameters if one.axes == ("head",)))


class TensorParallelParameters(WrappedParameters):
    """See ``Parameters``.

    Args:
        inner: The parameters of this rank's share.
        spec: The whole model.
        parallel: The ranks that share it.
        division: How it is divided.
    """

    def __init__(self, inner: Parameters, spec: ModelSpec, parallel: TensorGroup, division: Division) -> None:
        super().__init__(inner)
        self._spec, self._parallel, self._division = spec, parallel, division
        self._dims, self._per_head = division.dims, division.per_head
        self._sizes = {parameter.name: parameter.shape for parameter in spec.parameters}

    @property
    def local(self) -> TensorParallelParameters:
        return TensorParallelParameters(self._inner.local, self._spec, self._parallel, self._division)

    def finish_gradients(self) -> None:
        """Sum gradients of replicated parameters that each rank has a part of; give all ranks the others of rank 0."""
        self._inner.finish_gradients()
        pieces = [piece for piece in self._inner.pieces(self._inner.gradients) if self._dims[piece.name] is None]
        all_are_parts = self._parallel.divides_positions or self._parallel.index == 0
        parts = [
            piece.view if all_are_parts or piece.name in self._per_head else torch.zeros_like(piece.view)
            for piece in pieces
        ]
        if parts:
            total = torch.cat([part.reshape(-1) for part in parts])
            self._parallel.sum_(total)
            for piece, values in zip(pieces, total.split([part.numel() for part in parts]), strict=True):
                piece.view.copy_(values.view(piece.view.shape))

    def owned(self, buffers: Buffers) -> Iterator[Tensor]:
        for piece in self._inner.whole_rows(buffers):
            if self._dims[piece.name] is not None or self._parallel.index == 0:
                yield piece.view

    def pieces(self, buffers: Buffers) -> Iterator[Piece]:
        return self._placed(self._inner.pieces(buffers))

    def _placed(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Yield pieces with their place in the canonical parameters."""
        for piece in pieces:
            dim = self._dims[piece.name]
            first = 0 if dim is None else self._parallel.range_of(self._sizes[piece.name][dim])[0]
            if dim == 1:
                yield piece._replace(first_column=first)
            else:
                yield piece._replace(first_row=piece.first_row + first)

    def whole_rows(self, buffers: Buffers) -> Iterator[Piece]:
        """Yield rows; ranks exchange columns for rows, and the first one yields replicated parameters."""
        for piece in self._placed(self._inner.whole_rows(buffers)):
            dim = self._dims[piece.name]
            if dim == 1:
                yield self._exchange(piece)
            elif dim == 0 or self._parallel.index == 0:
                yield piece
            else:
                yield piece._replace(view=piece.view[:0])

    def _exchange(self, piece: Piece) -> Piece:
        """Return this rank's part of the rows of a piece, with the columns of all ranks. All have the same rows."""
        parallel, (num_rows, num_columns) = self._parallel, piece.view.shape
        first, count = parallel.range_of(num_rows)
        share = -(-num_rows // parallel.size)
        sent = piece.view.new_zeros(share * parallel.size, num_columns)
        sent[:num_rows] = piece.view
        received = torch.empty_like(sent)
        if share:
            dist.all_to_all_single(received, sent, group=parallel.group)
        parts_ROC = received.view(parallel.size, share, num_columns)
        rows = parts_ROC.transpose(0, 1).reshape(share, -1)[:count]
        return Piece(piece.name, piece.first_row + first, rows)

    def whole(self, buffers: Buffers) -> Iterator[tuple[str, Tensor]]:
        for name, local in self._inner.whole(buffers):
            dim = self._dims[name]
            yield name, local if dim is None else self._parallel.join(local, self._sizes[name][dim], dim)
