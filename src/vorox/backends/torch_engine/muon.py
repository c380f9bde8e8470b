"""Muon: momentum that is orthogonalised, matrix by matrix, before it is applied.

Every canonical matrix is orthogonalised on its own (query, key and value are three matrices, though stored fused) by
five Newton-Schulz iterations of Keller Jordan's quintic; matrices of one shape are batched.

Shape legend: G matrices of one shape, O rows (outputs), I columns (inputs).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vorox.backends.torch_engine.parameters import ParameterStore
from vorox.models.optimizer_groups import ORTHOGONAL

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 5
EPS = 1e-7


def update(
    store: ParameterStore,
    momentum_buffer: Tensor,
    divisor: Tensor,
    finite: Tensor,
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
) -> None:
    """Update the orthogonal group with Nesterov momentum; changes nothing unless ``finite``."""
    gradients = store.gradients[ORTHOGONAL] / divisor
    new_momentum = momentum_buffer.lerp(gradients, 1 - momentum)
    directions = {ORTHOGONAL: gradients.lerp_(new_momentum, momentum)}
    momentum_buffer.copy_(torch.where(finite, new_momentum, momentum_buffer))
    by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
    values = {ORTHOGONAL: store.values[ORTHOGONAL]}
    for (_, value), (_, direction) in zip(store.views(values), store.views(directions), strict=True):
        by_shape.setdefault(tuple(value.shape), []).append((value, direction))
    for (rows, columns), pairs in sorted(by_shape.items()):
        orthogonal_GOI = orthogonalise(torch.stack([direction for _, direction in pairs]))
        rate = lr * math.sqrt(max(1.0, rows / columns))
        for (value, _), orthogonal in zip(pairs, orthogonal_GOI.unbind(), strict=True):
            changed = value.mul(1 - lr * weight_decay).sub_(orthogonal, alpha=rate)
            value.copy_(torch.where(finite, changed, value))


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
