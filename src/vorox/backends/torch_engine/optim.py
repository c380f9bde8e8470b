"""AdamW and Muon with gradient clipping and a finite check, over the tensors of a rank.

Nothing here synchronises the host with the device. If the loss or the gradient norm is not finite, no bit of
parameters, moments or counters changes; only the loss scale of fp16 is lowered. All of this is decided on the device.

State: first and second moments of the AdamW groups, Muon's momentum, the number of updates, and the loss scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vorox.backends.torch_engine import muon
from vorox.backends.torch_engine.devices import Compute
from vorox.backends.torch_engine.distributed import Ranks
from vorox.backends.torch_engine.parameters import Buffers, Parameters
from vorox.core.schema import RunConfig
from vorox.core.schema.runtime import LARGEST_LOSS_SCALE, SMALLEST_LOSS_SCALE
from vorox.models.optimizer_groups import DECAYED, ORTHOGONAL, PLAIN

GROWTH_INTERVAL_STEPS = 2000
"""fp16: the loss scale doubles after so many consecutive finite steps, and halves at a non-finite one."""
NORM_PIECE_ELEMENTS = 1 << 14


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of an update, on the device: gradient norm before clipping, and whether loss and norm are finite."""

    grad_norm: Tensor
    finite: Tensor


class Optimizer:
    """The update rule and its state."""

    _exact_groups: tuple[str, ...] = (DECAYED, PLAIN)
    """Groups whose AdamW moments are fp32 buffers."""

    def __init__(self, config: RunConfig, parameters: Parameters, compute: Compute, ranks: Ranks) -> None:
        self._config = config.optimizer
        self._parameters, self._ranks = parameters, ranks
        self._device = compute.device
        self._has_fused = compute.device.type in {"cpu", "cuda"}
        self._initial_loss_scale = config.precision.initial_loss_scale
        self.is_scaled = compute.dtype == torch.float16
        self.reset()

    def reset(self) -> None:
        """Reset moments, counters and loss scale."""
        self.exp_avg = self._parameters.new_buffers(self._exact_groups)
        self.exp_avg_sq = self._parameters.new_buffers(self._exact_groups)
        self.momentum = self._parameters.new_buffers((ORTHOGONAL,))
        self.updates = torch.zeros((), device=self._device)
        self.loss_scale = torch.tensor(self._initial_loss_scale if self.is_scaled else 1.0, device=self._device)
        self.scale_age = torch.zeros((), device=self._device)

    @property
    def buffers(self) -> Mapping[str, Buffers]:
        """Optimizer state by kind and group, for checkpoints and fingerprints."""
        kinds = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "momentum": self.momentum}
        return {kind: buffers for kind, buffers in kinds.items() if buffers}

    @property
    def counters(self) -> Mapping[str, Tensor]:
        """The scalars of the state."""
        scalars = {"updates": self.updates}
        return scalars | {"loss_scale": self.loss_scale, "scale_age": self.scale_age} if self.is_scaled else scalars

    def expect(self, counters: Mapping[str, float]) -> None:
        """Prepare for loading a state that has these counters."""

    def restore(self, buffers: Mapping[str, Buffers], counters: Mapping[str, float]) -> None:
        """Finish loading: take over the moments that were loaded into ``buffers``, and the counters."""
        del buffers  # they are the state itself
        for name, value in {
            "updates": self.updates,
            "loss_scale": self.loss_scale,
            "scale_age": self.scale_age,
        }.items():
            if name in counters:
                value.fill_(counters[name])

    @torch.no_grad()
    def step(self, *, lr: float, weight_decay: float, loss: Tensor) -> Outcome:
        """Update from the accumulated gradients.

        Args:
            lr: Learning rate of AdamW; Muon's is scaled by ``muon_lr / lr`` of the configuration.
            weight_decay: Decoupled weight decay of the decayed groups.
            loss: The mean loss.
        """
        gradients = self._parameters.gradients
        scaled_norm = global_norm(gradients, self._ranks)
        grad_norm = scaled_norm / self.loss_scale if self.is_scaled else scaled_norm
        finite = torch.isfinite(scaled_norm) & torch.isfinite(loss)
        divisor = self.loss_scale.clone()
        if self._config.clip_norm is not None:
            divisor *= ((grad_norm + 1e-6) / self._config.clip_norm).clamp(min=1.0)
        self.updates += finite
        self._update(gradients, divisor, finite, lr=lr, weight_decay=weight_decay)
        if self.is_scaled:
            self._adapt_loss_scale(finite)
        return Outcome(grad_norm, finite)

    def _update(self, gradients: Buffers, divisor: Tensor, finite: Tensor, *, lr: float, weight_decay: float) -> None:
        """Update parameters and moments from gradients divided by ``divisor``; change nothing unless ``finite``."""
        for group in (DECAYED, PLAIN):
            if group in self._parameters.values:
                decay = weight_decay if group == DECAYED else 0.0
                self._adamw(group, gradients[group], divisor, finite, lr=lr, weight_decay=decay)
        if ORTHOGONAL in self._parameters.values:
            muon.update(
                self._parameters,
                gradients[ORTHOGONAL],
                self.momentum[ORTHOGONAL],
                divisor,
                finite,
                lr=self._config.muon_lr * lr / self._config.lr,
                weight_decay=weight_decay,
                momentum=self._config.muon_momentum,
            )

    def _adamw(
        self,
        group: str,
        gradients: Sequence[Tensor],
        divisor: Tensor,
        finite: Tensor,
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        self._adamw_tensors(
            self._parameters.values[group], gradients, self.exp_avg[group], self.exp_avg_sq[group], divisor, finite,
            lr=lr, weight_decay=weight_decay,
        )  # fmt: skip

    def _adamw_tensors(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Tensor],
        exp_avg: Sequence[Tensor],
        exp_avg_sq: Sequence[Tensor],
        divisor: Tensor,
        finite: Tensor,
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        config = self._config
        if self._has_fused:
            torch.ops.aten._fused_adamw_(
                values, gradients, exp_avg, exp_avg_sq, [], [self.updates] * len(values),
                lr=lr, beta1=config.beta1, beta2=config.beta2, weight_decay=weight_decay, eps=config.eps,
                amsgrad=False, maximize=False, grad_scale=divisor, found_inf=1.0 - finite.float(),
            )  # fmt: skip
            return
        for value, gradient, first, second in zip(values, gradients, exp_avg, exp_avg_sq, strict=True):
            vector_adamw(
                value, gradient / divisor, first, second, self.updates, finite,
                lr=lr, betas=(config.beta1, config.beta2), weight_decay=weight_decay, eps=config.eps,
            )  # fmt: skip

    def _adapt_loss_scale(self, finite: Tensor) -> None:
        age = torch.where(finite, self.scale_age + 1, torch.zeros_like(self.scale_age))
        doubles = age >= GROWTH_INTERVAL_STEPS
        factor = torch.where(finite, torch.where(doubles, 2.0, 1.0), 0.5)
        self.loss_scale.mul_(factor).clamp_(SMALLEST_LOSS_SCALE, LARGEST_LOSS_SCALE)
        self.scale_age.copy_(torch.where(doubles, torch.zeros_like(age), age))


def global_norm(buffers: Buffers, ranks: Ranks) -> Tensor:
    """Return the L2 norm of buffers over all groups and shards."""
    norms = [tensor_norm(tensor) for tensors in buffers.values() for tensor in tensors]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if ranks.fsdp_size == 1:
        return norm
    square = norm.square()
    ranks.sum_over_shards(square)
    return square.sqrt()


def tensor_norm(values: Tensor) -> Tensor:
    """Return the L2 norm of a tensor.

    The CPU kernel sums sequentially, with an error of 5e-4 at 10M elements, so there the norm is taken over pieces.
    """
    if values.device.type != "cpu":
        return torch.linalg.vector_norm(values)
    pieces = torch.ops.aten._foreach_norm(list(values.flatten().split(NORM_PIECE_ELEMENTS)))
    return torch.linalg.vector_norm(torch.stack(pieces))


def vector_adamw(
    values: Tensor,
    gradients: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    updates: Tensor,
    finite: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
) -> None:
    """Apply AdamW in plain operations, for devices without the fused kernel. ``updates`` includes this one."""
    first = exp_avg.lerp(gradients, 1 - betas[0])
    second = (exp_avg_sq * betas[1]).addcmul_(gradients, gradients, value=1 - betas[1])
    root = (second / (1 - betas[1] ** updates)).sqrt_().add_(eps)
    changed = (values * (1 - lr * weight_decay)).sub_(first / (1 - betas[0] ** updates) / root * lr)
    for old, new in ((values, changed), (exp_avg, first), (exp_avg_sq, second)):
        old.copy_(torch.where(finite, new, old))
