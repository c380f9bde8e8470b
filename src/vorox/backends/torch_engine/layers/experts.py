"""Mixture of experts: router, dispatch, grouped products, losses and metrics of routers.

Every token reaches all experts that its router chose (dropless). The positions are sorted by expert, so that each
expert multiplies one contiguous segment, and sorted back. Both are permutations, whose gradient is the inverse
permutation: no sum of floats depends on the order of threads.

The losses of routers do not change the value of the objective. Their gradient is added where the backward pass reaches
the routers, so that activation checkpointing and FSDP2 need no special case for them.

Shape legend: M positions, D width, F width of an expert, E experts, K experts per token, S = M x K slots, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vorox.backends.torch_engine.layers.kernels import Kernels, activation
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.backends.torch_engine.ranks.expert_parallel import Compute, ExpertGroup, Permute
from vorox.core.schema import LossConfig
from vorox.models.decoder.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class RouterStep:
    """What routers need in the training of a micro-batch besides their input.

    Attributes:
        config: Weights of the losses.
        scale: Factor of the losses: one over the global number of targets, times the loss scale of fp16.
        kept_M: The positions with a target, which count; ``None`` for all.
        measured: Layer to load per expert, load-balancing loss and z-loss, ``[E + 2]``, summed over targets. A layer
            that runs again in the backward pass measures the same again.
    """

    config: LossConfig
    scale: float | Tensor
    kept_M: Tensor | None
    measured: dict[int, Tensor] = field(default_factory=dict[int, Tensor])


class _Weight(nn.Module):
    """A parameter under its name."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class Experts(nn.Module):
    """Takes the place of the MLP in a block.

    Attributes:
        num_experts: Experts of the block on all ranks.
        parallel: The ranks that divide them.
    """

    parallel: ExpertGroup | None = None

    def __init__(self, spec: DecoderSpec, parameters: Mapping[str, nn.Parameter], kernels: Kernels, layer: int) -> None:
        super().__init__()
        name = f"blocks.{layer}.mlp"
        assert spec.num_experts is not None
        assert spec.experts_per_token is not None
        self._layer, self.num_experts, self._num_chosen = layer, spec.num_experts, spec.experts_per_token
        self._normalizes = spec.normalize_expert_weights
        self._gate, self._gate_kind, self._grouped = kernels.gate, spec.activation, kernels.grouped
        self._activate = None if spec.is_gated else activation(spec.activation)
        self._into = "gate_up" if spec.is_gated else "up"
        self.router = _Weight(parameters[f"{name}.router.weight"])
        self.experts = nn.ModuleDict(
            {part: _Weight(parameters[f"{name}.experts.{part}.weight"]) for part in (self._into, "down")}
        )

    def forward(self, x_MD: Tensor, step: RouterStep | None) -> Tensor:
        weights_MK, experts_MK = self._route(x_MD, step)
        compute = self._compute if self.parallel is None else partial(self.parallel.run, self._compute)
        y_MKD = apply_experts(x_MD, experts_MK, self.num_experts, compute)
        return (y_MKD * weights_MK[..., None].to(y_MKD.dtype)).sum(1)

    def _compute(self, x_SD: Tensor, ends_E: Tensor) -> Tensor:
        into, down = (cast("nn.Parameter", self.experts[part].weight) for part in (self._into, "down"))
        hidden_S2F = self._grouped(x_SD, into, ends_E)
        if self._activate is None:
            return self._grouped(self._gate(hidden_S2F, self._gate_kind), down, ends_E)
        return self._grouped(self._activate(hidden_S2F), down, ends_E)

    def _route(self, x_MD: Tensor, step: RouterStep | None) -> tuple[Tensor, Tensor]:
        """Return weights and indices of the chosen experts; in fp32, because rounding would change the choice."""
        with torch.autocast(x_MD.device.type, enabled=False):
            logits_ME = F.linear(x_MD.float(), self.router.weight.float())
            probabilities_ME = logits_ME.softmax(-1)
            weights_MK, experts_MK = probabilities_ME.topk(self._num_chosen, dim=-1)
            if step is not None:
                losses = self._losses(logits_ME, probabilities_ME, experts_MK, step)
                weights_MK = _AddGradient.apply(weights_MK, losses, step.scale)
            if self._normalizes:
                weights_MK = weights_MK / weights_MK.sum(-1, keepdim=True)
        return weights_MK, experts_MK

    def _losses(self, logits_ME: Tensor, probabilities_ME: Tensor, experts_MK: Tensor, step: RouterStep) -> Tensor:
        """Return the weighted losses, summed over the targets, and measure load and losses.

        The load-balancing loss of a token is ``E x sum over experts of f_e p_e``, with ``f_e`` the share of the choices
        of the micro-batch that fell on an expert (Switch, arXiv 2101.03961, equation 4).
        """
        ids_E = torch.arange(self.num_experts, device=experts_MK.device)
        chosen_ME = (experts_MK[..., None] == ids_E).sum(1)
        square_M = logits_ME.logsumexp(-1).square()
        if step.kept_M is not None:
            chosen_ME = chosen_ME * step.kept_M[:, None]
            probabilities_ME = probabilities_ME.masked_fill(~step.kept_M[:, None], 0.0)
            square_M = square_M.masked_fill(~step.kept_M, 0.0)
        load_E = chosen_ME.sum(0).float()
        share_E = load_E / load_E.sum().clamp(min=1)
        balance = self.num_experts * (share_E * probabilities_ME.sum(0)).sum()
        square = square_M.sum()
        step.measured[self._layer] = torch.cat([load_E, torch.stack([balance, square]).detach()])
        return step.config.load_balancing_weight * balance + step.config.router_z_loss_weight * square


def apply_experts(x_MD: Tensor, experts_MK: Tensor, num_experts: int, compute: Compute) -> Tensor:
    """Return the outputs of the chosen experts, ``[M, K, D]``; ``compute`` receives the slots sorted by expert."""
    order_S = experts_MK.flatten().argsort(stable=True)
    inverse_S = order_S.argsort()
    ids_E = torch.arange(num_experts, device=x_MD.device)
    ends_E = torch.searchsorted(experts_MK.flatten()[order_S], ids_E, right=True).int()
    y_SD = compute(_Dispatch.apply(x_MD, order_S, inverse_S, experts_MK.shape[1]), ends_E)
    return Permute.apply(y_SD, inverse_S, order_S).view(*experts_MK.shape, -1)


class RouterMetrics:
    """Load and losses of all routers over the micro-batches of a step."""

    def __init__(self, spec: DecoderSpec, config: LossConfig, ranks: Ranks) -> None:
        assert spec.num_experts is not None
        self._num_experts, self._num_layers, self._config, self._ranks = (
            spec.num_experts,
            spec.num_layers,
            config,
            ranks,
        )
        self._num_chosen = spec.experts_per_token or 1
        self._total: Tensor | None = None

    def add(self, step: RouterStep) -> None:
        """Add what a micro-batch measured."""
        parts_LX = torch.stack([step.measured[layer] for layer in range(self._num_layers)])
        parts_LX = parts_LX if parts_LX.device.type == "mps" else parts_LX.double()
        self._total = parts_LX if self._total is None else self._total + parts_LX

    def take(self, count: int) -> dict[str, Tensor]:
        """Return the metrics since the last call over all ranks, by name, and reset; ``count`` targets."""
        if self._total is None:
            return {}
        load_LE, losses_L2 = self._ranks.sum_micro_batches(self._total[..., None]).split([self._num_experts, 2], dim=1)
        self._total = None
        share_LE = load_LE / load_LE.sum(1, keepdim=True).clamp(min=1)
        busiest_L, entropy_L = share_LE.amax(1), -torch.special.xlogy(share_LE, share_LE).sum(1)
        losses_2 = losses_L2.mean(0) / count
        found = {
            "router/load_balancing_loss": losses_2[0],
            "router/load_max_to_mean": busiest_L.mean() * self._num_experts,
            "router/load_entropy_fraction": entropy_L.mean() / math.log(self._num_experts),
            "router/busiest_expert_fraction": busiest_L.max() * self._num_chosen,
        }
        return found | ({"router/z_loss": losses_2[1]} if self._config.router_z_loss_weight else {})


class _AddGradient(torch.autograd.Function):
    """The identity, which adds the gradient of ``scale * losses`` to the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, losses: Tensor, scale: float | Tensor) -> Tensor:
        ctx.scale, ctx.like = scale, losses.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return d_x, torch.ones_like(ctx.like) * ctx.scale, None


class _Dispatch(torch.autograd.Function):
    """Copy each position to its slots, sorted by expert."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, order_S: Tensor, inverse_S: Tensor, num_chosen: int) -> Tensor:
        ctx.save_for_backward(inverse_S)
        ctx.num_chosen = num_chosen
        return x_MD[order_S // num_chosen]

    @staticmethod
    def backward(ctx: Any, d_SD: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (inverse_S,) = ctx.saved_tensors
        return d_SD[inverse_S].view(-1, ctx.num_chosen, d_SD.shape[1]).sum(1), None, None, None
