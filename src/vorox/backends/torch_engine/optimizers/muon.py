"""Muon: momentum that is orthogonalised, matrix by matrix, before it is applied.

Every matrix is orthogonalised on its own: query, key and value are three matrices, though stored fused, and each
expert has its own (``models/matrix_layout.py``). It takes five Newton-Schulz iterations of Keller Jordan's quintic;
matrices of one shape are batched.

Shape legend: G matrices of one shape, C matrices in a stack, O rows (outputs), I columns (inputs).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vorox.backends.torch_engine.layouts.parameters import ParameterPart, Parameters
from vorox.models.matrix_layout import MatrixLayout
from vorox.models.optimizer_groups import Group

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 5
EPS = 1e-7


@dataclass(slots=True)
class _Update:
    """A parameter, or its part on this rank, with the directions of its matrices.

    Attributes:
        part: The part on this rank.
        layout: The matrices of the whole parameter.
        shape: Shape of the whole parameter.
        matrices_COI: The directions of each fused projection, then its orthogonal matrices.
        missing: Projections that are not yet orthogonal.
    """

    part: ParameterPart
    layout: MatrixLayout
    shape: torch.Size
    matrices_COI: list[Tensor]
    missing: int

    def apply(self, applied: Tensor, *, lr: float, weight_decay: float) -> None:
        """Update the parameter once all its matrices are orthogonal."""
        factors = [_shape_factor(matrix_COI) for matrix_COI in self.matrices_COI]
        rate = lr * factors[0]
        for index, factor in enumerate(factors):
            if factor != factors[0]:
                self.matrices_COI[index] = self.matrices_COI[index] * (factor / factors[0])
        orthogonal = self.layout.join(self.matrices_COI, self.shape, torch.cat)
        changed = self.part.view.mul(1 - lr * weight_decay).sub_(orthogonal[self.part.place], alpha=rate)
        self.part.view.copy_(torch.where(applied, changed, self.part.view))
        self.matrices_COI.clear()


def update(
    parameters: Parameters,
    group: Group,
    gradients: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    divisor: Tensor,
    applied: Tensor,
    *,
    layouts: Mapping[str, MatrixLayout],
    lr: float,
    weight_decay: float,
    momentum: float,
) -> None:
    """Update an orthogonal group with Nesterov momentum; changes nothing unless ``applied``.

    Sharded directions are gathered: every rank orthogonalises whole matrices and updates its own part.
    """
    directions = [
        _direction(gradient / divisor, buffer, applied, momentum)
        for gradient, buffer in zip(gradients, momentum_buffers, strict=True)
    ]
    by_shape: dict[tuple[int, ...], list[tuple[_Update, int]]] = {}
    parts = parameters.local_parts({group: parameters.values[group]})
    for part, (name, direction) in zip(parts, parameters.whole({group: directions}), strict=True):
        matrices_COI = layouts[name].split(direction)
        one = _Update(part, layouts[name], direction.shape, matrices_COI, len(matrices_COI))
        for index, matrix_COI in enumerate(matrices_COI):
            by_shape.setdefault(tuple(matrix_COI.shape[1:]), []).append((one, index))
    for _, entries in sorted(by_shape.items(), key=lambda item: item[0]):
        _orthogonalise_shape(entries)
        for one, _ in entries:
            if not one.missing and one.matrices_COI:
                one.apply(applied, lr=lr, weight_decay=weight_decay)


def _orthogonalise_shape(entries: Sequence[tuple[_Update, int]]) -> None:
    """Replace directions of one shape by their orthogonal matrices, all in one batch."""
    counts = [one.layout.count for one, _ in entries]
    orthogonal_GOI = orthogonalise(torch.cat([one.matrices_COI[index] for one, index in entries]))
    for (one, index), matrices_COI in zip(entries, orthogonal_GOI.split(counts), strict=True):
        one.matrices_COI[index] = matrices_COI
        one.missing -= 1


def _direction(scaled: Tensor, buffer: Tensor, applied: Tensor, momentum: float) -> Tensor:
    """Update the momentum of a scaled gradient, and return Nesterov's direction in place of the gradient."""
    new_momentum = buffer.lerp(scaled, 1 - momentum)
    torch.where(applied, new_momentum, buffer, out=buffer)
    return scaled.lerp_(new_momentum, momentum)


def _shape_factor(matrix_COI: Tensor) -> float:
    """Return the factor of the learning rate of matrices with O outputs and I inputs."""
    return math.sqrt(max(1.0, matrix_COI.shape[-2] / matrix_COI.shape[-1]))


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
