"""Weight gradients that a backward pass queues, so that a pipeline computes them while it would idle.

Zero-bubble schedules (Qi et al., arXiv 2401.10241) divide a backward pass: the gradient of a stage's input, which the
stage before it waits for, and those of its weights, which no other rank needs. ``torch.distributed.pipelining`` can
divide any graph of autograd, but our kernels compute both gradients in one function. So the matrix products of the
blocks, which are nearly all of the work, queue the gradients of their weights here. Embeddings, norms and the head
compute theirs within the backward pass.

Shape legend: M rows (positions of a micro-batch), D inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vorox.backends.torch_engine.kernels import Kernels, Products


class DeferredGradients:
    """A queue of weight gradients.

    Args:
        products: Matrix products.
    """

    def __init__(self, products: Products) -> None:
        self._products = products
        self._queue: list[Callable[[], None]] = []

    def defer(self, kernels: Kernels) -> Kernels:
        """Return the kernels with linear layers whose backward pass queues the gradients of their parameters."""
        return replace(kernels, linear=lambda x_MD, weight, bias: _Linear.apply(x_MD, weight, bias, self))

    def take(self) -> Callable[[], None]:
        """Empty the queue; return a function that adds what was in it to the gradients."""
        queue, self._queue = self._queue, []

        @torch.no_grad()
        def run() -> None:
            for add in queue:
                add()

        return run

    def queue(self, weight_OD: nn.Parameter, bias_O: nn.Parameter | None, x_MD: Tensor, d_y_MO: Tensor) -> None:
        """Queue the gradients of a linear layer for its input and the gradient of its output."""

        def add() -> None:
            if weight_OD.requires_grad:
                assert weight_OD.grad is not None
                if d_y_MO.dtype == torch.float32:
                    self._products.add_to(weight_OD.grad, d_y_MO.t(), x_MD.t())
                else:
                    weight_OD.grad.add_(self._products(d_y_MO.t(), x_MD.to(d_y_MO.dtype).t()))
            if bias_O is not None and bias_O.requires_grad:
                assert bias_O.grad is not None
                bias_O.grad.add_(d_y_MO.sum(0))

        self._queue.append(add)

    def product(self, a_MK: Tensor, b_NK: Tensor) -> Tensor:
        """Return ``a @ b.T``."""
        return self._products(a_MK, b_NK)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MD: Tensor, weight_OD: nn.Parameter, bias_O: nn.Parameter | None, deferred: DeferredGradients
    ) -> Tensor:
        ctx.save_for_backward(x_MD)
        ctx.weight_OD, ctx.bias_O, ctx.deferred = weight_OD, bias_O, deferred
        y_MO = deferred.product(x_MD, weight_OD.detach())
        return y_MO if bias_O is None else y_MO + bias_O.detach().to(y_MO.dtype)

    @staticmethod
    def backward(ctx: Any, d_y_MO: Tensor) -> tuple[Tensor | None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x_MD,) = ctx.saved_tensors
        ctx.deferred.queue(ctx.weight_OD, ctx.bias_O, x_MD, d_y_MO)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        d_x_MD = ctx.deferred.product(d_y_MO, ctx.weight_OD.detach().to(d_y_MO.dtype).t())
        return d_x_MD.to(x_MD.dtype), None, None, None
