"""Collectives that autograd differentiates: one for a tensor, another one for its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Collective = Callable[[Tensor], Tensor]


def differentiable(x: Tensor, collective: Collective, of_gradient: Collective) -> Tensor:
    """Return ``collective(x)``, whose gradient is ``of_gradient`` of that of the result."""
    return _Differentiable.apply(x, collective, of_gradient)


def unchanged(x: Tensor) -> Tensor:
    """Return the tensor: no communication in this direction."""
    return x.view_as(x)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: Collective, of_gradient: Collective) -> Tensor:
        ctx.of_gradient = of_gradient
        return collective(x)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.of_gradient(d_y), None, None
