"""Parameters under ZeRO: DeepSpeed distributes parameters, gradients and optimizer state.

The modules run inside a ``DeepSpeedEngine``, which gathers their parameters and averages gradients; the engine
multiplies losses by ``gradient_divisor``, so the averages are sums over ranks. The master weights are fp32. The
partitions of DeepSpeed are ranges of flattened groups; checkpoints have rows of canonical parameters, so every rank
copies its rows of one whole parameter after the other into host memory.

Shape legend: the first dimension of a parameter ("rows") is sharded in checkpoints, as in ``sharded_parameters.py``.
"""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vorox.backends.torch_engine.device.host_copy import host_copy
from vorox.backends.torch_engine.layouts.deepspeed_config import deepspeed_config, has_output
from vorox.backends.torch_engine.layouts.parameters import Buffers
from vorox.backends.torch_engine.layouts.sharded_parameters import ShardedParameters
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.core.errors import ConfigError
from vorox.core.platform.installation import install_command
from vorox.core.ranks.distributed_context import LOCAL_RANK, LOCAL_WORLD_SIZE
from vorox.core.schema import RunConfig
from vorox.models.optimizer_groups import Group
from vorox.models.spec import ModelSpec


class ZeroParameters(ShardedParameters):
    """See ``Parameters``. ``values`` are copies in host memory, and reading them is a collective.

    Attributes:
        zero_config: The configuration of DeepSpeed.
        engine: The ``DeepSpeedEngine``, once ``shard_by_zero`` has created it.
        optimizer: AdamW of PyTorch over the partitions of this rank.
    """

    def __init__(
        self, config: RunConfig, spec: ModelSpec, groups: Mapping[str, Group], ranks: Ranks, device: torch.device,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__(spec, groups, ranks=ranks)
        self._config, self._device = config, device
        self.zero_config = deepspeed_config(config, ranks.world_size)
        self.stage: int = self.zero_config["zero_optimization"]["stage"]
        self._deepspeed = _load(device)
        logging.getLogger("DeepSpeed").setLevel(logging.INFO if has_output(self.zero_config) else logging.WARNING)
        self.gradient_divisor = ranks.world_size
        _VARIABLES.set_for(self, device)
        _connect()
        for one in self._sharded:
            self.modules[one.name] = self._new_parameter(self.modules[one.name].shape, dtype)
        self.engine: Any = None

    def _new_parameter(self, shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
        """Return a parameter; with stage 3, it is partitioned here, so that no rank ever has all of them."""
        holder = nn.Module()
        holder.weight = nn.Parameter(torch.zeros(shape, dtype=dtype, device=self._device))
        if self.stage == 3:
            self._deepspeed.zero.Init(
                module=holder, config_dict_or_path=self.zero_config, dtype=dtype, mem_efficient_linear=False
            )
        return holder.weight

    def shard_by_zero(self, model: nn.Module, external: Mapping[nn.Module, nn.Parameter]) -> Any:
        """Distribute a model that was built from ``modules``; return the ``DeepSpeedEngine`` that runs it.

        Args:
            model: The model.
            external: Modules that use a parameter of another one.
        """
        for module, parameter in external.items():
            if self.stage == 3:
                self._deepspeed.zero.register_external_parameter(module, parameter)
        buffers = dict(model.named_buffers())
        optimizer = self._config.optimizer
        by_group: dict[Group, list[nn.Parameter]] = {group: [] for group in self.groups}
        for one in self._sharded:
            by_group[one.group].append(self.modules[one.name])
        self.optimizer = torch.optim.AdamW(
            [{"params": parameters} for parameters in by_group.values()],
            lr=optimizer.lr, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.eps, fused=True,
        )  # fmt: skip
        with warnings.catch_warnings():  # DeepSpeed imports a module of PyTorch that PyTorch calls deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
            self.engine, *_ = self._deepspeed.initialize(
                model=model, optimizer=self.optimizer, config=self.zero_config
            )  # fmt: skip
        for name, buffer in buffers.items():  # converted to the precision of the parameters
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = buffer
        return self.engine

    @property
    def partitions(self) -> list[Tensor]:
        """The fp32 partitions of this rank, whose state AdamW has."""
        zero = self.engine.optimizer
        return zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups

    @property
    def version(self) -> str:
        return str(self._deepspeed.__version__)

    def link_moments(self) -> None:
        """Let DeepSpeed find the moments of a parameter; after its first step it would link one group only."""
        if self.stage < 3:
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def backward(self, objective: Tensor, loss_scale: Tensor | None = None) -> None:
        assert loss_scale is None  # fp16 is refused
        self.engine.backward(objective, scale_wrt_gas=False)

    def zero_gradients(self) -> None:
        """Discard the gradients of passes that no step followed."""
        zero = self.engine.optimizer
        zero.zero_grad(set_to_none=True)
        if "offload_optimizer" in self.zero_config["zero_optimization"]:
            zero.reset_cpu_buffers()
        if self.stage == 3:
            zero.averaged_gradients = {}
            return
        for gradients in (zero.averaged_gradients, zero.all_grad_tensors):
            for group in gradients:
                gradients[group] = None
        zero.micro_step_id = -1

    def release(self) -> None:
        """Do nothing: DeepSpeed frees what it gathers."""

    # -- copies of the state ------------------------------------------------------------------------------------------

    @property
    def values(self) -> Buffers:
        return self.read(self._deepspeed.utils.safe_get_full_fp32_param)

    @property
    def gradients(self) -> Buffers:
        """Nothing: DeepSpeed keeps them."""
        return {}

    def moments(self, kind: str) -> Buffers:
        """Return a copy of this rank's rows of AdamW's moments."""
        return self.read(lambda parameter: self._deepspeed.utils.safe_get_full_optimizer_state(parameter, kind))

    def set_moments(self, kind: str, buffers: Buffers) -> None:
        """Replace AdamW's moments. A collective."""
        functions = self._deepspeed.utils
        for parameter, whole in self._whole_parameters(buffers):
            if self.stage == 3:
                functions.safe_set_local_optimizer_state(parameter, self._partition(parameter, whole), kind)
            else:
                functions.safe_set_full_optimizer_state(parameter, whole, kind)

    @torch.no_grad()
    def store(self, values: Buffers) -> None:
        functions = self._deepspeed.utils
        for parameter, whole in self._whole_parameters(values):
            if self.stage == 3:
                functions.safe_set_local_fp32_param(parameter, self._partition(parameter, whole))
                with self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    parameter.data.copy_(whole)
            else:
                functions.safe_set_full_fp32_param(parameter, whole)
        if self.stage < 3:
            self.engine.optimizer.update_lp_params()

    def read(self, get: Callable[[nn.Parameter], Tensor]) -> Buffers:
        """Return a copy of this rank's rows of a tensor of every parameter. A collective."""
        found: list[Tensor] = []
        for one in self._sharded:
            whole = get(self.modules[one.name]).detach()
            found.append(host_copy(whole[one.first_row : one.first_row + one.num_rows]))
        return self._by_group(found)

    def new_buffers(self, groups: Sequence[Group]) -> dict[Group, list[Tensor]]:
        """Return nothing: AdamW's state is DeepSpeed's, and no other optimizer is supported."""
        del groups
        return {}

    def _whole_parameters(self, buffers: Buffers) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield every parameter with the whole tensor whose rows the ranks hold in ``buffers``. A collective."""
        for one in self._sharded:
            if one.group in buffers:
                num_rows = sum(part.shape[0] for part in one.parts)
                local = buffers[one.group][one.place]
                whole = self._gather(one, local)[:num_rows]
                yield self.modules[one.name], whole.to(self._device)

    def _partition(self, parameter: Any, whole: Tensor) -> Tensor:
        """Return the range of a tensor that is this rank's partition under stage 3."""
        size, index = parameter.ds_tensor.numel(), self._ranks.fsdp_index
        padded = whole.new_zeros(size * self._ranks.num_fsdp_shards)
        padded[: whole.numel()] = whole.flatten()
        return padded[size * index : size * (index + 1)]


def _load(device: torch.device) -> Any:
    """Import DeepSpeed for a device.

    Raises:
        ConfigError: It is not installed.
    """
    before = os.environ.get("DS_ACCELERATOR")
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        import deepspeed
        import deepspeed.ops
    except ImportError as error:
        raise ConfigError(
            f"DeepSpeed cannot be imported: {error}", where="parallel.kind", hint=install_command("deepspeed")
        ) from error
    finally:
        _restore("DS_ACCELERATOR", before)
    if device.type == "cpu":
        # A kernel that only inference uses, which DeepSpeed would compile for a minute at the first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It calls functions of torch.distributed that newer versions of PyTorch rename.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    return deepspeed


class _LocalVariables:
    """The variables of torchrun that DeepSpeed reads in every step: set as long as an object exists that needs them."""

    def __init__(self) -> None:
        self._num_users, self._before = 0, dict[str, str | None]()

    def set_for(self, user: object, device: torch.device) -> None:
        """Set the variables until the last user has been freed. On a CPU, those of a launcher stay."""
        if not self._num_users:
            self._before = {name: os.environ.get(name) for name in (LOCAL_RANK, LOCAL_WORLD_SIZE)}
            if device.type == "cuda":
                os.environ[LOCAL_RANK] = str(device.index)
            os.environ.setdefault(LOCAL_RANK, "0")
            os.environ.setdefault(LOCAL_WORLD_SIZE, "1")
        self._num_users += 1
        weakref.finalize(user, self._release)

    def _release(self) -> None:
        self._num_users -= 1
        if not self._num_users:
            for name, value in self._before.items():
                _restore(name, value)


_VARIABLES = _LocalVariables()


def _restore(name: str, value: str | None) -> None:
    """Set an environment variable to an earlier value; ``None``: it was not set."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _connect() -> None:
    """Create the process group of a run of one process."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=cast("Any", dist).HashStore(), rank=0, world_size=1)
