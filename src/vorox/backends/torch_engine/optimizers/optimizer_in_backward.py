"""Updates in the backward pass (optimizer.in_backward): each gradient is freed after its update.

In: a backward pass. Out: updated parameters, and no gradients. A hook on the autograd node that accumulates a gradient
runs when all uses of the parameter have added to it; it updates the parameter and frees the gradient. So at most the
gradients of the parameters that are computed together exist at a time, and that of a tied embedding from the loss on.
Updates are made by ``optimizer.py``, on views of the same buffers: bits, state and checkpoints are equal.

A gradient is seen once, so nothing may depend on all gradients or change them later: there is one backward pass per
step on one rank, without clipping by the global norm (``core/config/checks/training.py``). A loss that is not
finite changes nothing. A parameter whose own gradient is not finite keeps its value, and the run stops after the step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vorox.backends.torch_engine.device.devices import Compute
from vorox.backends.torch_engine.layouts.parameters import (
    ALIGNMENT_ELEMENTS,
    Buffers,
    BufferSlice,
    FlatParameters,
    fused_parts,
    register_gradient_hooks,
)
from vorox.backends.torch_engine.optimizers.optimizer import Optimizer, Outcome, tensor_norm
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.optimizer_groups import Group
from vorox.models.spec import ModelSpec, ParameterSpec

KEY = "optimizer.in_backward"


class TransientGradients(FlatParameters):
    """See ``FlatParameters``; without gradient buffers.

    Attributes:
        on_complete: Called with a name in ``modules`` when the gradient of the parameter is complete.
        objective: What the last backward pass started from.
    """

    def __init__(
        self,
        spec: ModelSpec,
        groups: Mapping[str, Group],
        *,
        device: torch.device,
        table: Sequence[ParameterSpec] | None = None,
    ) -> None:
        super().__init__(spec, groups, device=device, table=table)
        self._parts = {name: [part.name for part in parts] for name, parts in fused_parts(spec, table).items()}
        self.on_complete: Callable[[str], None] = lambda _: None
        self.objective: Tensor | None = None
        self._nodes = register_gradient_hooks(self.trained, lambda name: self.on_complete(name))
        self._head = self.modules.get(_head_name(spec))

    def _place_gradients(self, shapes: Mapping[str, tuple[Group, int, tuple[int, ...]]]) -> None:
        """Give each parameter a version of its own, so that autograd still detects a use after its update."""
        for name in shapes:
            self.modules[name] = nn.Parameter(self.modules[name].data, requires_grad=self.modules[name].requires_grad)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Name to parameter, of those that are not frozen."""
        return {name: parameter for name, parameter in self.modules.items() if parameter.requires_grad}

    @property
    def gradients(self) -> Buffers:
        """Copies of the gradients that exist: while a non-finite value is located, none is updated and freed."""
        found = {name: one.grad for name, one in self.trained.items() if one.grad is not None}
        buffers = self.new_buffers([self.slices[self._parts[name][0]].group for name in found])
        for name, gradient in found.items():
            first = self.slices[self._parts[name][0]]
            buffers[first.group][0][first.start : first.start + gradient.numel()] = gradient.reshape(-1)
        return buffers

    def zero_gradients(self) -> None:
        for parameter in self.modules.values():
            parameter.grad = None
        if self._head is not None and self._head.requires_grad:  # the loss adds to it, chunk by chunk
            self._head.grad = torch.zeros_like(self._head)

    def backward(self, objective: Tensor, loss_scale: Tensor | None = None) -> None:
        self.objective = objective.detach()
        super().backward(objective, loss_scale)

    def part(self, name: str) -> FlatParameters:
        """Return one parameter of the modules with all that it is fused of, as views of the buffers."""
        part, slices = copy.copy(self), [self.slices[one] for one in self._parts[name]]
        start, group = slices[0].start, slices[0].group
        part.slices = {one.parameter.name: BufferSlice(one.parameter, group, one.start - start) for one in slices}
        values = {group: [tensor.data] for group, (tensor,) in self.values.items()}  # without their common version
        part.groups, part.values = (group,), self.narrow(name, values)
        return part

    def narrow(self, name: str, buffers: Buffers) -> dict[Group, list[Tensor]]:
        """Return the range of a parameter of the modules in its group's buffer, up to the next aligned element."""
        first = self.slices[self._parts[name][0]]
        size = sum(self.slices[one].parameter.num_elements for one in self._parts[name])
        end = first.start + size + -size % ALIGNMENT_ELEMENTS
        return {first.group: [tensor[first.start : end] for tensor in buffers.get(first.group, ())]}


class InBackwardOptimizer(Optimizer):
    """See ``Optimizer``; parameters are updated between ``begin_step`` and ``step``."""

    def __init__(self, config: RunConfig, parameters: TransientGradients, compute: Compute, ranks: Ranks) -> None:
        if ranks.world_size > 1:
            raise ConfigError(
                f"{KEY} needs one device: with {ranks.world_size} ranks, gradients are summed before the update",
                where=KEY, hint="start one process, or set optimizer.in_backward=false",
            )  # fmt: skip
        self._transient = parameters
        super().__init__(config, parameters, compute, ranks)
        self._one = torch.ones((), device=self._device)
        self._rates: tuple[float, float] | None = None
        self._is_rehearsal = False
        self._applied: Tensor | None = None
        self._norms: dict[str, Tensor] = {}
        parameters.on_complete = self._update_parameter

    def reset(self) -> None:
        super().reset()
        self._parts = {name: self._part(name) for name in self._transient.trained}

    def _part(self, name: str) -> Optimizer:
        """Return the optimizer of one parameter; its state is views of this one's."""
        part, narrow = copy.copy(self), partial(self._transient.narrow, name)
        part._parameters = self._transient.part(name)
        part.exp_avg, part.exp_avg_sq = narrow(self.exp_avg), narrow(self.exp_avg_sq)
        part.momentum = narrow(self.momentum)
        return part

    def begin_step(self, *, lr: float, weight_decay: float, max_loss: float | None = None) -> None:
        self._rates, self._is_rehearsal = (lr, weight_decay), max_loss == -math.inf
        self._applied, self._norms = None, {}

    @torch.no_grad()
    def _update_parameter(self, name: str) -> None:
        """Update a parameter whose gradient is complete, and free the gradient."""
        if self._rates is None:  # a backward pass outside of a step
            return
        if name in self._norms:
            raise ConfigError(
                f"Parameter {name} got gradients from two backward passes, but {KEY} updates it in the first",
                where=KEY, hint="set optimizer.in_backward=false",
            )  # fmt: skip
        applied, parameter = self._is_applied(), self._transient.modules[name]
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = None
        self._norms[name] = norm = tensor_norm(gradient)
        flat, part = gradient.reshape(-1), self._parts[name]
        (group,) = part._parameters.groups
        size = part._parameters.values[group][0].numel()
        if flat.numel() < size:
            flat = F.pad(flat, (0, size - flat.numel()))
        lr, weight_decay = self._rates
        part._update({group: [flat]}, self._one, applied & norm.isfinite(), lr=lr, weight_decay=weight_decay)
        torch.autograd.graph.increment_version(parameter)

    def _is_applied(self) -> Tensor:
        """Return whether the step changes parameters, and count it when it is decided."""
        if self._applied is None:
            objective = self._transient.objective
            assert objective is not None
            self._applied = (
                torch.zeros_like(objective, dtype=torch.bool) if self._is_rehearsal else objective.isfinite()
            )
            self.updates += self._applied
        return self._applied

    @torch.no_grad()
    def step(self, *, lr: float, weight_decay: float, loss: Tensor, max_loss: float | None = None) -> Outcome:
        """Update the parameters that the loss does not depend on, and return the norm of all gradients."""
        del lr, weight_decay, max_loss  # those of ``begin_step``
        for name in self._parts:
            if name not in self._norms:
                self._update_parameter(name)
        applied, self._rates = self._is_applied(), None
        grad_norm = torch.linalg.vector_norm(torch.stack([self._norms[name] for name in self._parts]))
        self._update_average(applied & grad_norm.isfinite())
        return Outcome(grad_norm, grad_norm.isfinite() & loss.isfinite())


def flat_parameters(
    config: RunConfig,
    spec: ModelSpec,
    groups: Mapping[str, Group],
    *,
    device: torch.device,
    table: Sequence[ParameterSpec] | None = None,
) -> FlatParameters:
    """Create the parameters of one rank, with gradient buffers unless ``optimizer.in_backward``."""
    kind = TransientGradients if config.optimizer.in_backward else FlatParameters
    return kind(spec, groups, device=device, table=table)


def check_passes(config: RunConfig, separates_documents: bool) -> None:
    """Check that a step has one backward pass.

    Raises:
        ConfigError: Each document of a row runs in a pass of its own.
    """
    if config.optimizer.in_backward and config.data.document_mask and not separates_documents:
        raise ConfigError(
            f"{KEY} needs one backward pass per step, but this model carries state between the documents of a row, so "
            "they run in several passes", where=KEY,
            hint="set optimizer.in_backward=false, or data.document_mask=false",
        )  # fmt: skip


def _head_name(spec: ModelSpec) -> str:
    """Return the name of the matrix that the chunked loss of the native decoder adds to; empty for other models."""
    if not isinstance(spec, DecoderSpec):
        return ""
    return "embedding.weight" if spec.tie_embeddings else "head.weight"
