"""Configuration of DeepSpeed, from the settings of ``parallel`` or a JSON file of the user.

In: the run and the number of ranks. Out: the dictionary for ``deepspeed.initialize``. In a file, values that the run
determines are ``auto`` or equal to it; an entry that this program would not honour is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vorox.core.errors import ConfigError
from vorox.core.files.json_reader import read_json
from vorox.core.schema import RunConfig

_KEY = "parallel.deepspeed_config"
_AUTO = "auto"
_REMOVE = "remove it"
_PASSED_ON = frozenset(
    {
        "communication_data_type", "data_types.grad_accum_dtype", "dump_state", "gradient_predivide_factor",
        "memory_breakdown", "prescale_gradients", "steps_per_print", "wall_clock_breakdown",
        *(f"zero_optimization.{key}" for key in (
            "allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "ignore_unused_parameters",
            "overlap_comm", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients", "stage", "sub_group_size",
            "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_model_persistence_threshold",
            "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size",
        )),
        *(f"zero_optimization.{part}.{key}" for part, keys in (
            ("offload_optimizer", ("device", "pin_memory", "buffer_count", "fast_init")),
            ("offload_param", ("device", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu")),
        ) for key in keys),
    }
)  # fmt: skip
"""Entries that DeepSpeed gets as they are."""
_OUTPUT = ("dump_state", "memory_breakdown", "steps_per_print", "wall_clock_breakdown")
_MET = frozenset(
    {"zero_allow_untested_optimizer", "zero_optimization.stage3_gather_16bit_weights_on_model_save", "fp16.auto_cast"}
    | {f"fp16.{key}" for key in ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis")}
    | {"fp16.min_loss_scale", "optimizer.params.torch_adam"}
)
"""Entries whose purpose every run meets: checkpoints have all weights, the optimizer is of PyTorch, fp16 is off."""
_HINTS = {
    "scheduler": "remove it: schedule.* sets the learning rate of every step",
    "activation_checkpointing": "remove it and set train.activation_checkpointing",
    "zero_optimization.cpu_offload": 'use "offload_optimizer": {"device": "cpu"}',
}
_OFFLOAD_DEVICES = ("none", "cpu")


def deepspeed_config(config: RunConfig, world_size: int) -> dict[str, Any]:
    """Return the configuration of DeepSpeed.

    Raises:
        ConfigError: The file cannot be read, contradicts the run, or has an entry that is not supported.
    """
    path = config.parallel.deepspeed_config
    chosen = _own(config) if path is None else _from_file(config, Path(path), world_size)
    _, micro_batch, _ = _batch(config, world_size)
    zero = {"memory_efficient_linear": False, **chosen.pop("zero_optimization")}
    return {
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        **chosen,
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,  # a step ends where the engine ends it
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.optimizer.clip_norm or 0.0,
        "bf16": {"enabled": config.precision.dtype == "bf16", "check_grad_overflow": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def has_output(zero_config: Mapping[str, Any]) -> bool:
    """Whether a configuration of DeepSpeed asks for its own output."""
    return any(zero_config.get(key) for key in _OUTPUT)


def _own(config: RunConfig) -> dict[str, Any]:
    parallel = config.parallel
    zero: dict[str, Any] = {"stage": parallel.zero_stage}
    if parallel.zero_offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if parallel.zero_offload == "parameters":
        zero["offload_param"] = {"device": "cpu"}
    return {"zero_optimization": zero}


def _from_file(config: RunConfig, path: Path, world_size: int) -> dict[str, Any]:
    try:
        content = read_json(path)
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}", where=_KEY) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", where=_KEY) from error
    if not isinstance(content, dict) or not isinstance(content.get("zero_optimization"), dict):
        raise ConfigError(
            f"{path} has no zero_optimization",
            where=_KEY,
            hint='it is an object with "zero_optimization": {"stage": 2}',
        )
    determined = _determined(config, world_size)
    found: dict[str, Any] = {}
    stage = _stage(content["zero_optimization"], path)
    for key, value in _entries(content):
        if key in determined:
            setting, accepted = determined[key]
            if value != _AUTO and value not in accepted:
                raise ConfigError(
                    f"{path} has {key} = {_show(value)}, but {setting}", where=_KEY,
                    hint=f"make it {_show(accepted[0])} or auto, or change the setting",
                )  # fmt: skip
        elif key in _PASSED_ON:
            if key.endswith(".device") and value not in _OFFLOAD_DEVICES:
                raise ConfigError(
                    f"{path} has {key} = {_show(value)}, which is not supported", where=_KEY,
                    hint=f"use {' or '.join(_OFFLOAD_DEVICES)}",
                )  # fmt: skip
            if value != _AUTO:  # DeepSpeed has a default
                _set(found, key, value)
        elif key not in _MET:
            parents = (".".join(key.split(".")[:length]) for length in range(1, key.count(".") + 2))
            hint = next((_HINTS[parent] for parent in parents if parent in _HINTS), _REMOVE)
            raise ConfigError(f"{path} has {key}, which is not supported", where=_KEY, hint=hint)
    if stage == 1 and found["zero_optimization"].get("overlap_comm"):
        raise ConfigError(
            f"{path} has zero_optimization.overlap_comm = true, which stage 1 does not support: its gradients are "
            "summed once per step", where=_KEY, hint="make it false, or use stage 2",
        )  # fmt: skip
    return found


def _stage(zero: Mapping[str, Any], path: Path) -> int:
    stage = zero.get("stage", 0)
    if stage not in (1, 2, 3):
        raise ConfigError(
            f"{path} has zero_optimization.stage = {_show(stage)}", where=_KEY,
            hint="use 1, 2 or 3; whole replicas are parallel.kind=native",
        )  # fmt: skip
    return int(stage)


def _determined(config: RunConfig, world_size: int) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Return the entries that the run determines: what determines it, and the accepted values."""
    optimizer, dtype = config.optimizer, config.precision.dtype
    rows, micro_batch, num_micro_batches = _batch(config, world_size)
    rates = {"lr": optimizer.lr, "eps": optimizer.eps, "weight_decay": optimizer.weight_decay}
    betas = [optimizer.beta1, optimizer.beta2]
    clip_norm = optimizer.clip_norm
    return {
        "train_batch_size": (f"train.global_batch_sequences = {rows}", (rows,)),
        "train_micro_batch_size_per_gpu": (f"a micro-batch of the run has {micro_batch} rows", (micro_batch,)),
        "gradient_accumulation_steps": (
            f"a step of the run has {num_micro_batches} micro-batches per rank", (num_micro_batches,)
        ),
        "gradient_clipping": (f"optimizer.clip_norm = {_show(clip_norm)}", (clip_norm or 0.0,)),
        "bf16.enabled": (f"precision.dtype = {dtype}", (dtype == "bf16",)),
        "bf16.check_grad_overflow": ("steps that are not finite are always skipped", (True,)),
        "fp16.enabled": (f"precision.dtype = {dtype}", (dtype == "fp16",)),
        "optimizer.type": ("optimizer.name = adamw", ("AdamW", "Adam")),
        "optimizer.params.adam_w_mode": ("optimizer.name = adamw", (True,)),
        **{f"optimizer.params.{key}": (f"optimizer.{key} = {value:g}", (value,)) for key, value in rates.items()},
        "optimizer.params.betas": (f"optimizer.beta1, beta2 = {betas[0]:g}, {betas[1]:g}", (betas,)),
        "zero_force_ds_cpu_optimizer": ("the optimizer is AdamW of PyTorch, also on the host", (False,)),
    }  # fmt: skip


def _batch(config: RunConfig, world_size: int) -> tuple[int, int, int]:
    """Return the rows of a step, the rows of a micro-batch, and the micro-batches of a rank."""
    rows = config.train.global_batch_sequences
    micro_batch = config.parallel.micro_batch_sequences(config.train.micro_batch_rows, rows, world_size)
    return rows, micro_batch, -(-rows // (micro_batch * world_size))


def _entries(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values, which are not objects."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _entries(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _set(content: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    for parent in parents:
        content = content.setdefault(parent, {})
    content[leaf] = value


def _show(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
