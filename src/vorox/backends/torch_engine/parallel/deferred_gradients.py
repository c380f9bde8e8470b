"""Weight gradients that a backward pass queues, so that a pipeline computes them while it would idle.

Zero-bubble schedules (Qi et al., arXiv 2401.10241) divide a backward pass: the gradient of a stage's input, which the
stage before it waits for, and those of its weights, which no other rank needs. ``torch.distributed.pipelining`` can
divide any graph of autograd, but our kernels compute both gradients in one function, and FSDP2 frees the gathered
weights of a block after its backward pass. So the linear layers of the blocks, which are nearly all of the work, queue
the gradients of their weights here. Those need no weights; under FSDP2, they are added to the rows of each rank by a
reduce-scatter. Embeddings, norms and the head compute theirs within the backward pass.

Shape legend: M rows (positions of a micro-batch), D inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vorox.backends.torch_engine.device.matrix_products import Products
from vorox.backends.torch_engine.layers.model import Linear
from vorox.backends.torch_engine.parallel.divided_layers import DividedLayer
from vorox.backends.torch_engine.ranks.distributed import Ranks


class DeferredGradients:
    """A queue of weight gradients.

    Args:
        products: Matrix products.
        ranks: The layout.
    """

    def __init__(self, products: Products, ranks: Ranks) -> None:
        self._products, self._ranks = products, ranks
        self._queue: list[Callable[[], None]] = []

    def attach(self, blocks: Iterable[nn.Module]) -> None:
        """Make the linear layers of blocks queue the gradients of their parameters, which FSDP2 has sharded already."""
        for layer in (layer for block in blocks for layer in block.modules()):
            if not isinstance(layer, Linear | nn.Linear):
                continue
            weight, bias = cast("nn.Parameter", layer.weight), cast("nn.Parameter | None", layer.bias)
            if isinstance(layer, Linear | DividedLayer):
                cast("Any", layer).kernel = partial(self._linear, weight, bias)
            else:
                cast("Any", layer).forward = partial(self._forward, layer, weight, bias)

    def _forward(self, layer: Any, own_weight: nn.Parameter, own_bias: nn.Parameter | None, x: Tensor) -> Tensor:
        return self._linear(own_weight, own_bias, x, layer.weight, layer.bias)

    def _linear(
        self,
        own_weight: nn.Parameter,
        own_bias: nn.Parameter | None,
        x: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
    ) -> Tensor:
        """Return the outputs of a layer, whose own parameters FSDP2 replaces by gathered ones.

        A bias that is not passed, because tensor parallelism adds it to the sum over ranks, is left to autograd.
        """

        def queue(x: Tensor, d_y: Tensor) -> None:
            own = None if bias is None else own_bias
            self._queue.append(partial(self._add, own_weight, own, x.flatten(0, -2), d_y.flatten(0, -2)))

        return _Linear.apply(x, weight, bias, self._products, queue)

    def take(self) -> Callable[[], None]:
        """Empty the queue; return a function that adds what was in it to the gradients."""
        queue, self._queue = self._queue, []

        @torch.no_grad()
        def run() -> None:
            for add in queue:
                add()

        return run

    def _add(self, weight_OD: nn.Parameter, bias_O: nn.Parameter | None, x_MD: Tensor, d_y_MO: Tensor) -> None:
        """Add the gradients of a linear layer for its input and the gradient of its output."""
        if weight_OD.requires_grad:
            if self._ranks.num_fsdp_shards > 1:
                self._add_rows(weight_OD, self._products(d_y_MO.t(), x_MD.to(d_y_MO.dtype).t()))
            elif d_y_MO.dtype == torch.float32:
                self._products.add_to(_gradient(weight_OD), d_y_MO, x_MD)
            else:
                _gradient(weight_OD).add_(self._products(d_y_MO.t(), x_MD.to(d_y_MO.dtype).t()))
        if bias_O is not None and bias_O.requires_grad:
            d_bias_O = d_y_MO.sum(0)
            if self._ranks.num_fsdp_shards > 1:
                self._add_rows(bias_O, d_bias_O)
            else:
                _gradient(bias_O).add_(d_bias_O)

    def _add_rows(self, parameter: Any, gradient: Tensor) -> None:
        """Add the gradients of all ranks that share a parameter to its rows on each, in fp32 as FSDP2 does."""
        assert self._ranks.mesh is not None
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        local, size = cast("Any", parameter.grad).to_local(), self._ranks.num_fsdp_shards
        rows_per_rank = -(-len(gradient) // size)
        whole = torch.zeros(size * rows_per_rank, *gradient.shape[1:], device=gradient.device)
        whole[: len(gradient)] = gradient
        rows = torch.empty_like(whole[:rows_per_rank])
        dist.reduce_scatter_tensor(rows, whole, group=self._ranks.mesh.get_group("fsdp"))
        self._ranks.sum_over_replicas(rows)
        local.add_(rows[: len(local)])


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OD: nn.Parameter,
        bias_O: nn.Parameter | None,
        product: Products,
        queue: Callable[[Tensor, Tensor], None],
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight_OD, ctx.product, ctx.queue = weight_OD, product, queue
        y_MO = product(x.flatten(0, -2), weight_OD.detach())
        y_MO = y_MO if bias_O is None else y_MO + bias_O.detach().to(y_MO.dtype)
        return y_MO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        ctx.queue(x, d_y)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        d_x_MD = ctx.product(d_y.flatten(0, -2), ctx.weight_OD.detach().to(d_y.dtype).t())
        return d_x_MD.to(x.dtype).view(x.shape), None, None, None, None
