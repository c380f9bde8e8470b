"""AdamW over the partitions of ZeRO, stepped by DeepSpeed (see ``zero_parameters.py``).

DeepSpeed computes the norm, clips and skips a step whose norm is not finite, as ``optimizer.py`` does and with the same
formula; AdamW is the fused kernel of PyTorch, on the host too. DeepSpeed waits for the device in every step, so the
loss is checked there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256

import torch
from torch import Tensor

from vorox.backends.torch_engine.device.devices import Compute
from vorox.backends.torch_engine.layouts.parameters import Buffers
from vorox.backends.torch_engine.layouts.zero_parameters import ZeroParameters
from vorox.backends.torch_engine.optimizers.optimizer import Optimizer, Outcome
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.core.schema import RunConfig
from vorox.models.optimizer_groups import DECAYED

MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroOptimizer(Optimizer):
    """See ``Optimizer``. Moments are copies in host memory, and reading them is a collective."""

    def __init__(self, config: RunConfig, parameters: ZeroParameters, compute: Compute, ranks: Ranks) -> None:
        self._zero = parameters
        super().__init__(config, parameters, compute, ranks)

    def reset(self) -> None:
        super().reset()
        states = self._zero.optimizer.state
        for partition in self._zero.partitions:
            state = states[partition]
            state["step"] = torch.zeros((), device=partition.device)
            for kind in MOMENTS:
                if kind in state:
                    state[kind].zero_()
                else:
                    state[kind] = torch.zeros_like(partition)
        self._zero.link_moments()

    @property
    def moments(self) -> Mapping[str, Buffers]:
        return {kind: self._zero.moments(kind) for kind in MOMENTS}

    def restore(self, buffers: Mapping[str, Buffers], counters: Mapping[str, float]) -> None:
        super().restore(buffers, counters)
        for kind in MOMENTS:
            self._zero.set_moments(kind, buffers[kind])
        for partition in self._zero.partitions:
            self._zero.optimizer.state[partition]["step"].fill_(float(self.updates))

    def step(self, *, lr: float, weight_decay: float, loss: Tensor, max_loss: float | None = None) -> Outcome:
        assert max_loss is None  # train.spike_policy is refused
        engine = self._zero.engine
        for group, settings in zip(self._zero.groups, self._zero.optimizer.param_groups, strict=True):
            settings["lr"] = lr * group.lr_scale
            settings["weight_decay"] = weight_decay if group.rule == DECAYED.rule else 0.0
        if not bool(torch.isfinite(loss)):
            self._zero.zero_gradients()
            return Outcome(
                torch.full_like(self.updates, float("nan")), torch.zeros_like(self.updates, dtype=torch.bool)
            )
        engine.step()
        finite = torch.full_like(self.updates, engine.was_step_applied(), dtype=torch.bool)
        self.updates += finite
        return Outcome(torch.full_like(self.updates, float(engine.get_global_grad_norm())), finite)

    def facts(self) -> dict[str, str | int | bool]:
        text = json.dumps(self._zero.zero_config, sort_keys=True)
        return {"deepspeed": self._zero.version, "deepspeed_config": sha256(text.encode()).hexdigest()[:16]}
