"""Linear layers that queue the gradients of their weights, against autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vorox.backends.torch_engine.kernels import PLAIN, Products
from vorox.backends.torch_engine.parallel.deferred_gradients import DeferredGradients

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_weights_are_added_when_the_queue_runs(dtype: torch.dtype) -> None:
    """Two layers with and without bias; the second of two micro-batches is queued before the first one runs."""
    torch.manual_seed(1)
    weights = [nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(3, 7))]
    bias, frozen = nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(3), requires_grad=False)
    inputs = [torch.randn(4, 5, requires_grad=True) for _ in range(2)]

    def objective(x: torch.Tensor, linear: Callable[..., torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            return linear(torch.tanh(linear(x, weights[0], bias)), weights[1], frozen).float().square().sum()

    for x in inputs:
        objective(x, F.linear).backward()
    expected = [tensor.grad for tensor in (*weights, bias, *inputs)]
    for tensor in (*weights, bias, *inputs):
        tensor.grad = torch.zeros_like(tensor)
    deferred = DeferredGradients(Products(use_onednn=False))
    kernels = deferred.defer(PLAIN)
    runs: list[Callable[[], None]] = []
    for x in inputs:
        objective(x, kernels.linear).backward()
        runs.append(deferred.take())
    assert all(tensor.grad is not None and not tensor.grad.any() for tensor in (*weights, bias))
    for run in reversed(runs):
        run()
    tolerance = 1e-6 if dtype == torch.float32 else 0.02  # of the largest element; bf16 has 8 bits
    for tensor, gradient in zip((*weights, bias, *inputs), expected, strict=True):
        assert gradient is not None
        torch.testing.assert_close(tensor.grad, gradient, rtol=0, atol=tolerance * float(gradient.abs().max()))
    assert frozen.grad is None
