"""Muon: momentum that is orthogonalised, matrix by matrix, before it is applied.

Every canonical matrix is orthogonalised on its own (query, key and value are three matrices, though stored fused) by
five Newton-Schulz iterations of Keller Jordan's quintic; matrices of one shape are batched.

Shape legend: G matrices of one shape, O rows (outputs), I columns (inputs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vorox.backends.torch_engine.parameters import Parameters, Piece
from vorox.models.optimizer_groups import Group

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 5
EPS = 1e-7


def update(
    parameters: Parameters,
    group: Group,
    gradients: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    divisor: Tensor,
    finite: Tensor,
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
) -> None:
    """Update an orthogonal group with Nesterov momentum; changes nothing unless ``finite``.

    Sharded directions are gathered: every rank orthogonalises whole matrices and updates its own part.
    """
    directions = [
        _direction(gradient / divisor, buffer, finite, momentum)
        for gradient, buffer in zip(gradients, momentum_buffers, strict=True)
    ]
    by_shape: dict[tuple[int, ...], list[tuple[Piece, Tensor]]] = {}
    pieces = parameters.pieces({group: parameters.values[group]})
    for piece, (_, direction) in zip(pieces, parameters.whole({group: directions}), strict=True):
        by_shape.setdefault(tuple(direction.shape), []).append((piece, direction))
    for _, pairs in sorted(by_shape.items()):
        _update_matrices(pairs, finite, lr=lr, weight_decay=weight_decay)


def _direction(scaled: Tensor, buffer: Tensor, finite: Tensor, momentum: float) -> Tensor:
    """Update the momentum of a scaled gradient, and return Nesterov's direction in place of the gradient."""
    new_momentum = buffer.lerp(scaled, 1 - momentum)
    torch.where(finite, new_momentum, buffer, out=buffer)
    return scaled.lerp_(new_momentum, momentum)


def _update_matrices(pairs: Sequence[tuple[Piece, Tensor]], finite: Tensor, *, lr: float, weight_decay: float) -> None:
    """Update matrices of one shape by their orthogonalised directions."""
    rows, columns = pairs[0][1].shape
    orthogonal_GOI = orthogonalise(torch.stack([direction for _, direction in pairs]))
    rate = lr * math.sqrt(max(1.0, rows / columns))
    for (piece, _), orthogonal in zip(pairs, orthogonal_GOI.unbind(), strict=True):
        changed = piece.view.mul(1 - lr * weight_decay).sub_(orthogonal[piece.place], alpha=rate)
        piece.view.copy_(torch.where(finite, changed, piece.view))


def orthogonalise(matrices_GOI: Tensor) -> Tensor:
    """Bring all singular values of each matrix near 1; in bf16 on CUDA, where it is much faster, else in fp32."""
    x = matrices_GOI.bfloat16() if matrices_GOI.is_cuda else matrices_GOI
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPS)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices_GOI.dtype)
