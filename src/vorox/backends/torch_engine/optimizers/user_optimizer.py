"""Optimizers by import path: any class or function with the interface of ``torch.optim``.

It is called as ``f(groups, lr=...)``. Each canonical parameter is a tensor of its own, a view of the engine's buffers,
so optimizers that need whole matrices work. Clipping, accumulation, the finite check and the learning rate remain those
of the engine. State tensors with the shape of their parameter are moments of the checkpoint; numbers are counters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vorox.backends.torch_engine.device.devices import Compute
from vorox.backends.torch_engine.layouts.parameters import Buffers, Parameters
from vorox.backends.torch_engine.optimizers.optimizer import Optimizer
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.core.user_code.extensions import load_function
from vorox.models.optimizer_groups import DECAYED, Group

SAVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KEY = "optimizer.name"
_SCHEDULED = ("lr", "weight_decay", "initial_lr")


class UserOptimizer(Optimizer):
    """See ``Optimizer``. Waits for the device once per step, to skip steps that are not finite."""

    _exact_rules = ()

    def __init__(self, config: RunConfig, parameters: Parameters, compute: Compute, ranks: Ranks) -> None:
        self._name = config.optimizer.name
        self._factory = load_function(self._name, kind="optimizer", where=_KEY)
        super().__init__(config, parameters, compute, ranks)
        self._check()

    def reset(self) -> None:
        super().reset()
        self._tensors = self._views(self._parameters.values)
        self._optimizer = self._create(self._tensors)
        self._initial = dict(self._group_numbers())
        self._changed: set[str] = set()

    def _views(self, buffers: Buffers) -> dict[Group, dict[str, nn.Parameter]]:
        """Return one tensor per canonical parameter that is trained, by group and name."""
        return {
            group: {
                part.name: nn.Parameter(part.view.detach(), requires_grad=True)
                for part in self._parameters.local_parts({group: buffers[group]})
            }
            for group in buffers
            if not group.is_frozen
        }

    def _create(self, tensors: Mapping[Group, Mapping[str, nn.Parameter]]) -> torch.optim.Optimizer:
        groups = [
            {"params": list(named.values()), "weight_decay": self._config.weight_decay if _is_decayed(group) else 0.0}
            for group, named in tensors.items()
        ]
        try:
            optimizer = self._factory(groups, lr=self._config.lr)
        except Exception as error:  # a user's function can raise anything
            raise self._unusable(f"{type(error).__name__}: {error}") from error
        if not isinstance(getattr(optimizer, "param_groups", None), list) or not hasattr(optimizer, "state"):
            raise self._unusable("it has no param_groups or no state")
        return optimizer

    def _check(self) -> None:
        """Check before step 1, on copies of the parameters, that a step works and its state can be saved."""
        values = self._parameters.values
        copies = self._views({group: [tensor.clone() for tensor in tensors] for group, tensors in values.items()})
        optimizer = self._create(copies)
        if self._config.weight_decay and "weight_decay" not in getattr(optimizer, "defaults", {}):
            raise ConfigError(f"{self._name} has no weight decay", where="optimizer.weight_decay", hint="set it to 0")
        self._step_without_gradients(optimizer, copies)
        for named in copies.values():
            for name, tensor in named.items():
                for key, value in _state(optimizer, tensor):
                    if not (_is_moment(value, tensor) or _is_number(value)):
                        what = (
                            f"a tensor {value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else "an object"
                        )
                        raise self._unusable(
                            f"its state {key!r} of {name} is {what} and cannot be saved",
                            "keep tensors of the parameter's shape (fp32, bf16, fp16) and numbers",
                        )

    def _step_without_gradients(
        self, optimizer: torch.optim.Optimizer, tensors: Mapping[Group, Mapping[str, nn.Parameter]]
    ) -> None:
        """Take a step with zero gradients, which creates the state."""
        every = [tensor for named in tensors.values() for tensor in named.values()]
        for tensor in every:
            tensor.grad = torch.zeros_like(tensor)
        try:
            with torch.random.fork_rng(devices=[]):
                optimizer.step()
        except Exception as error:
            raise self._unusable(f"its step fails with {type(error).__name__}: {error}") from error
        for tensor in every:
            tensor.grad = None

    def _unusable(
        self, why: str, hint: str = "it must work as optimizer = f(groups, lr=...); optimizer.step()"
    ) -> ConfigError:
        return ConfigError(f"{self._name} is not usable as an optimizer: {why}", where=_KEY, hint=hint)

    def _update(self, gradients: Buffers, divisor: Tensor, applied: Tensor, *, lr: float, weight_decay: float) -> None:
        if not bool(applied):
            return
        for tensors in gradients.values():
            for tensor in tensors:
                tensor.div_(divisor)
        groups = {id(tensor): group for group, named in self._tensors.items() for tensor in named.values()}
        for settings in self._optimizer.param_groups:
            group = groups[id(settings["params"][0])]
            settings["lr"] = lr * group.lr_scale
            settings["weight_decay"] = weight_decay if _is_decayed(group) else 0.0
        tensors_by_name = {name: tensor for named in self._tensors.values() for name, tensor in named.items()}
        for part in self._parameters.local_parts(gradients):
            tensors_by_name[part.name].grad = part.view
        self._optimizer.step()

    # -- state --------------------------------------------------------------------------------------------------------

    def _moments(self) -> Iterator[tuple[str, Group, str, Tensor]]:
        """Yield (kind, group, name, tensor)."""
        for group, named in self._tensors.items():
            for name, tensor in named.items():
                for kind, value in _state(self._optimizer, tensor):
                    if _is_moment(value, tensor):
                        yield kind, group, name, value

    def _group_numbers(self) -> Iterator[tuple[str, float]]:
        """Yield the numbers of the parameter groups that some optimizers change."""
        for index, group in enumerate(self._optimizer.param_groups):
            for key, value in group.items():
                if key not in _SCHEDULED and _is_number(value):
                    yield f"group.{index}.{key}", float(value)

    @property
    def moments(self) -> Mapping[str, Buffers]:
        """The moments by kind and group, copied; zero where a parameter of the group has none."""
        found: dict[str, dict[Group, list[Tensor]]] = {}
        views: dict[tuple[str, Group], dict[str, Tensor]] = {}
        for kind, group, name, value in self._moments():
            if (kind, group) not in views:
                new = self._parameters.new_buffers((group,))
                found.setdefault(kind, {}).update(new)
                views[kind, group] = {part.name: part.view for part in self._parameters.local_parts(new)}
            views[kind, group][name].copy_(value)
        return found

    @property
    def counters(self) -> Mapping[str, Tensor]:
        found = dict(super().counters)
        for named in self._tensors.values():
            for name, tensor in named.items():
                for key, value in _state(self._optimizer, tensor):
                    if _is_number(value) and not _is_moment(value, tensor):
                        found[f"{key}.{name}"] = torch.tensor(float(value), dtype=torch.float64)
        numbers = dict(self._group_numbers())
        self._changed |= {key for key, value in numbers.items() if value != self._initial[key]}
        return found | {key: torch.tensor(numbers[key], dtype=torch.float64) for key in sorted(self._changed)}

    @torch.no_grad()
    def expect(self, counters: Mapping[str, float]) -> None:
        """Create the state of a run that has taken steps; discard the state for one that has taken none."""
        kept = {group: [tensor.clone() for tensor in tensors] for group, tensors in self._parameters.values.items()}
        self.reset()
        if counters.get("updates"):
            self._step_without_gradients(self._optimizer, self._tensors)
            for group, tensors in self._parameters.values.items():
                for tensor, value in zip(tensors, kept[group], strict=True):
                    tensor.copy_(value)
        self._changed = {key for key in counters if key in self._initial}

    @torch.no_grad()
    def restore(self, buffers: Mapping[str, Buffers], counters: Mapping[str, float]) -> None:
        super().restore(buffers, counters)
        views = {
            (kind, part.name): part.view
            for kind, groups in buffers.items()
            for part in self._parameters.local_parts(groups)
        }
        for kind, _, name, value in self._moments():
            value.copy_(views[kind, name])
        for named in self._tensors.values():
            for name, tensor in named.items():
                state = self._optimizer.state.get(tensor, {})
                for key, value in state.items():
                    if f"{key}.{name}" in counters:
                        state[key] = _number_like(value, counters[f"{key}.{name}"])
        for index, group in enumerate(self._optimizer.param_groups):
            for key in list(group):
                if f"group.{index}.{key}" in self._changed:
                    group[key] = _number_like(group[key], counters[f"group.{index}.{key}"])


def _is_decayed(group: Group) -> bool:
    return group.rule == DECAYED.rule


def _state(optimizer: torch.optim.Optimizer, tensor: Tensor) -> Iterator[tuple[str, Any]]:
    """Yield the entries of the state of a parameter that are not ``None``."""
    for key, value in optimizer.state.get(tensor, {}).items():
        if value is not None:
            yield str(key), value


def _is_moment(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype in SAVED_DTYPES


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)


def _number_like(before: Any, value: float) -> Any:
    """Return a number of the same type."""
    if isinstance(before, Tensor):
        return torch.full_like(before, value)
    return type(before)(value)
