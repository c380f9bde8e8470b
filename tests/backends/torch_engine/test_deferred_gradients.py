"""Linear layers that queue the gradients of their weights, against autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import nn

from vorox.backends.torch_engine.device.matrix_products import Products
from vorox.backends.torch_engine.parallel.deferred_gradients import DeferredGradients
from vorox.backends.torch_engine.ranks.distributed import Ranks

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_weights_are_added_when_the_queue_runs(dtype: torch.dtype) -> None:
    """Two layers with and without a trained bias; the second of two micro-batches is queued before the first runs."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    frozen = cast("nn.Linear", model[2]).bias.requires_grad_(False)
    inputs = [torch.randn(2, 4, 5, requires_grad=True) for _ in range(2)]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def objective(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            return model(x).float().square().sum()

    for x in inputs:
        objective(x).backward()
    expected = [tensor.grad for tensor in (*parameters, *inputs)]
    for tensor in (*parameters, *inputs):
        tensor.grad = torch.zeros_like(tensor)
    deferred = DeferredGradients(Products(use_onednn=False), Ranks())
    deferred.attach([model])
    runs: list[Callable[[], None]] = []
    for x in inputs:
        objective(x).backward()
        runs.append(deferred.take())
    assert all(tensor.grad is not None and not tensor.grad.any() for tensor in parameters)
    for run in reversed(runs):
        run()
    tolerance = 1e-6 if dtype == torch.float32 else 0.02  # of the largest element; bf16 has 8 bits
    for tensor, gradient in zip((*parameters, *inputs), expected, strict=True):
        assert gradient is not None
        torch.testing.assert_close(tensor.grad, gradient, rtol=0, atol=tolerance * float(gradient.abs().max()))
    assert frozen.grad is None
