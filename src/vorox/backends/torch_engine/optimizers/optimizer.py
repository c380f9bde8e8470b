"""AdamW and Muon with gradient clipping and a finite check, over the tensors of a rank.

Nothing here synchronises the host with the device. If the loss or the gradient norm is not finite, or the loss is above
``max_loss``, the update is not ``applied``: no bit of parameters, moments or counters changes; only the loss scale of
fp16 is lowered after a step that is not finite. All of this is decided on the device.

State: first and second moments of the AdamW groups, Muon's momentum, the number of updates, the loss scale, and the
moving average of the parameters (``train.ema_decay``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vorox.backends.torch_engine.device.devices import Compute
from vorox.backends.torch_engine.layouts.parameters import Buffers, Parameters
from vorox.backends.torch_engine.optimizers import muon
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.core.schema import RunConfig
from vorox.core.schema.runtime import LARGEST_LOSS_SCALE, SMALLEST_LOSS_SCALE
from vorox.models.matrix_layout import MatrixLayout
from vorox.models.optimizer_groups import DECAYED, ORTHOGONAL, PLAIN, Group
from vorox.models.stored.engine_state import AVERAGE

GROWTH_INTERVAL_STEPS = 2000
"""fp16: the loss scale doubles after so many consecutive finite steps, and halves at a non-finite one."""
NORM_PIECE_ELEMENTS = 1 << 14
AVERAGE_PIECE_ELEMENTS = 1 << 22
"""Elements of the moving average that are updated or exchanged at a time, which bounds the memory."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of an update, on the device: gradient norm before clipping, and whether loss and norm are finite."""

    grad_norm: Tensor
    finite: Tensor


class Optimizer:
    """The update rule and its state.

    Attributes:
        layouts: The matrices of each parameter that Muon orthogonalises, by name.
    """

    _exact_rules: tuple[str, ...] = (DECAYED.rule, PLAIN.rule)
    """Rules whose AdamW moments are fp32 buffers."""

    def __init__(self, config: RunConfig, parameters: Parameters, compute: Compute, ranks: Ranks) -> None:
        self._config, self._ema_decay, self._ema_warmup = (
            config.optimizer, config.train.ema_decay, config.train.ema_warmup,
        )  # fmt: skip
        self._parameters, self._ranks = parameters, ranks
        self._device = torch.device("cpu") if config.parallel.fsdp_offload else compute.device
        self._has_fused = self._device.type in {"cpu", "cuda"}
        self._initial_loss_scale = config.precision.initial_loss_scale
        self.is_scaled = compute.dtype == torch.float16
        self._kept_zeros: frozenset[str] = frozenset()
        self.layouts: dict[str, MatrixLayout] = {}
        self.reset()

    def reset(self) -> None:
        """Reset moments, counters and loss scale; the average starts at the present parameters."""
        self.exp_avg = self._new_buffers(self._exact_rules)
        self.exp_avg_sq = self._new_buffers(self._exact_rules)
        self.momentum = self._new_buffers((ORTHOGONAL.rule,))
        trained = [group for group in self._parameters.groups if not group.is_frozen]
        self._average = self._parameters.new_buffers(trained if self._ema_decay is not None else ())
        for group, tensors in self._average.items():
            for average, value in zip(tensors, self._parameters.values[group], strict=True):
                average.copy_(value)
        self.updates = torch.zeros((), device=self._device)
        self.loss_scale = torch.tensor(self._initial_loss_scale if self.is_scaled else 1.0, device=self._device)
        self.scale_age = torch.zeros((), device=self._device)

    def _new_buffers(self, rules: Sequence[str]) -> dict[Group, list[Tensor]]:
        return self._parameters.new_buffers([group for group in self._parameters.groups if group.rule in rules])

    @property
    def buffers(self) -> Mapping[str, Buffers]:
        """Optimizer state by kind and group, with the average of the parameters, for checkpoints and fingerprints."""
        return {**self.moments, **({AVERAGE: self._average} if self._average else {})}

    @property
    def moments(self) -> Mapping[str, Buffers]:
        """Optimizer state by kind and group."""
        kinds = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "momentum": self.momentum}
        return {kind: buffers for kind, buffers in kinds.items() if buffers}

    @property
    def counters(self) -> Mapping[str, Tensor]:
        """The scalars of the state."""
        scalars = {"updates": self.updates}
        return scalars | {"loss_scale": self.loss_scale, "scale_age": self.scale_age} if self.is_scaled else scalars

    def keep_zeros(self, names: Iterable[str]) -> None:
        """Keep elements of these parameters that are zero (``train.keep_zeros``).

        Which ones is a function of the parameters before each step, so it is no state of its own.
        """
        self._kept_zeros = frozenset(names)

    def facts(self) -> dict[str, str | int | bool]:
        """Return what affects the bits of an update besides the configuration."""
        return {}

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

    def begin_step(self, *, lr: float, weight_decay: float, max_loss: float | None = None) -> None:
        """Announce the step whose backward pass follows; for the arguments, see ``step``."""

    @torch.no_grad()
    def step(self, *, lr: float, weight_decay: float, loss: Tensor, max_loss: float | None = None) -> Outcome:
        """Update from the accumulated gradients.

        Args:
            lr: Learning rate of AdamW; Muon's is scaled by ``muon_lr / lr`` of the configuration, and each group's by
                its factor.
            weight_decay: Decoupled weight decay of the decayed groups.
            loss: The mean loss.
            max_loss: Change nothing if the loss is larger, at most the loss scale; with ``-inf`` not even that.
                ``None``: no limit.
        """
        if loss.device != self._device:  # parallel.fsdp_offload; FSDP has waited for the device already
            loss = loss.cpu()
        gradients, zeros = self._parameters.gradients, self._zeros()
        for _, gradient, is_zero in zeros:
            gradient.masked_fill_(is_zero, 0.0)
        scaled_norm = global_norm(self._parameters, gradients, self._ranks)
        grad_norm = scaled_norm / self.loss_scale if self.is_scaled else scaled_norm
        finite = torch.isfinite(scaled_norm) & torch.isfinite(loss)
        divisor = self.loss_scale.clone()
        if self._config.clip_norm is not None:
            divisor *= ((grad_norm + 1e-6) / self._config.clip_norm).clamp(min=1.0)
        applied = finite if max_loss is None else finite & (loss <= max_loss)
        self.updates += applied
        self._update(gradients, divisor, applied, lr=lr, weight_decay=weight_decay)
        for value, _, is_zero in zeros:  # Muon mixes the elements of a matrix
            value.masked_fill_(is_zero, 0.0)
        self._update_average(applied)
        if self.is_scaled and max_loss != -math.inf:
            self._adapt_loss_scale(finite)
        return Outcome(grad_norm, finite)

    def _zeros(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return value, gradient and zeros of each parameter whose zeros are kept and that is trained."""
        if not self._kept_zeros:
            return []
        values = {part.name: part.view for part in self._parameters.local_parts(self._parameters.values)}
        return [
            (values[part.name], part.view, values[part.name] == 0)
            for part in self._parameters.local_parts(self._parameters.gradients)
            if part.name in self._kept_zeros
        ]

    def _update(self, gradients: Buffers, divisor: Tensor, applied: Tensor, *, lr: float, weight_decay: float) -> None:
        """Update parameters and moments from gradients divided by ``divisor``; change nothing unless ``applied``."""
        for group, tensors in gradients.items():
            if group.rule == ORTHOGONAL.rule:
                muon.update(
                    self._parameters.local, group, tensors, self.momentum[group], divisor, applied,
                    layouts=self.layouts, lr=self._config.muon_lr * lr / self._config.lr * group.lr_scale,
                    weight_decay=weight_decay,
                    momentum=self._config.muon_momentum,
                )  # fmt: skip
            elif tensors:  # a stage of a pipeline may have none of a group
                decay = weight_decay if group.rule == DECAYED.rule else 0.0
                self._update_group(group, tensors, divisor, applied, lr=lr * group.lr_scale, weight_decay=decay)

    def _update_group(
        self,
        group: Group,
        gradients: Sequence[Tensor],
        divisor: Tensor,
        applied: Tensor,
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        """Update the parameters of a group that Muon does not: what another optimizer replaces."""
        self._adamw_tensors(
            self._parameters.values[group], gradients, self.exp_avg[group], self.exp_avg_sq[group], divisor, applied,
            lr=lr, weight_decay=weight_decay,
        )  # fmt: skip

    def _adamw_tensors(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Tensor],
        exp_avg: Sequence[Tensor],
        exp_avg_sq: Sequence[Tensor],
        divisor: Tensor,
        applied: Tensor,
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        config = self._config
        if self._has_fused:
            torch.ops.aten._fused_adamw_(
                values, gradients, exp_avg, exp_avg_sq, [], [self.updates] * len(values),
                lr=lr, beta1=config.beta1, beta2=config.beta2, weight_decay=weight_decay, eps=config.eps,
                amsgrad=False, maximize=False, grad_scale=divisor, found_inf=1.0 - applied.float(),
            )  # fmt: skip
            return
        for value, gradient, first, second in zip(values, gradients, exp_avg, exp_avg_sq, strict=True):
            vector_adamw(
                value, gradient / divisor, first, second, self.updates, applied,
                lr=lr, betas=(config.beta1, config.beta2), weight_decay=weight_decay, eps=config.eps,
            )  # fmt: skip

    def _update_average(self, applied: Tensor) -> None:
        """Move the average towards the updated parameters; change nothing unless ``applied``."""
        if self._ema_decay is None:
            return
        decay = torch.full_like(self.updates, self._ema_decay)
        if self._ema_warmup:
            decay = torch.minimum(decay, (1 + self.updates) / (10 + self.updates))
        for value, average in self._average_pieces():
            average.copy_(torch.where(applied, average.add((value - average).mul_(1 - decay)), average))

    @torch.no_grad()
    def exchange_average(self) -> None:
        """Exchange the parameters and their average."""
        for value, average in self._average_pieces():
            kept = value.clone()
            value.copy_(average)
            average.copy_(kept)

    def _average_pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pieces of parameters and average."""
        for group, tensors in self._average.items():
            for average, value in zip(tensors, self._parameters.values[group], strict=True):
                size = AVERAGE_PIECE_ELEMENTS
                yield from zip(value.view(-1).split(size), average.view(-1).split(size), strict=True)

    def _adapt_loss_scale(self, finite: Tensor) -> None:
        age = torch.where(finite, self.scale_age + 1, torch.zeros_like(self.scale_age))
        doubles = age >= GROWTH_INTERVAL_STEPS
        factor = torch.where(finite, torch.where(doubles, 2.0, 1.0), 0.5)
        self.loss_scale.mul_(factor).clamp_(SMALLEST_LOSS_SCALE, LARGEST_LOSS_SCALE)
        self.scale_age.copy_(torch.where(doubles, torch.zeros_like(age), age))


def global_norm(parameters: Parameters, buffers: Buffers, ranks: Ranks) -> Tensor:
    """Return the L2 norm of buffers over all groups and shards; every element counts once."""
    norms = [tensor_norm(tensor) for tensor in parameters.owned(buffers)]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if ranks.num_shards == 1:
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
    flat = values.flatten()
    whole, rest = flat.split((flat.numel() - flat.numel() % NORM_PIECE_ELEMENTS, flat.numel() % NORM_PIECE_ELEMENTS))
    norms = torch.linalg.vector_norm(whole.view(-1, NORM_PIECE_ELEMENTS), dim=1)
    if len(rest):
        norms = torch.cat([norms, torch.linalg.vector_norm(rest)[None]])
    return torch.linalg.vector_norm(norms)


def vector_adamw(
    values: Tensor,
    gradients: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    updates: Tensor,
    applied: Tensor,
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
        old.copy_(torch.where(applied, new, old))
