"""The resource plan of a run on given hardware: memory, speed, duration, disk, and settings that fit.

Shapes and data-sheet figures go in; nothing is measured, loaded or built. Memory is an estimate
(``planning/memory_estimate.py``); the speed assumes a model FLOPs utilisation (MFU).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

from vorox.core.batch_sizes import batch_sizes_of
from vorox.core.schema import RunConfig
from vorox.models.spec import ModelSpec
from vorox.planning.auto_micro_batch import MicroBatch, check_estimable, is_auto, on_all_devices, with_micro_batch
from vorox.planning.disk_space import checkpoint_bytes
from vorox.planning.flops import flops_per_token
from vorox.planning.hardware import Hardware
from vorox.planning.memory_advice import Alternative, alternatives, largest_micro_batch
from vorox.planning.memory_estimate import MemoryEstimate, on_devices
from vorox.runtime.device_peaks import arithmetic_of

DEFAULT_MFU_FRACTION = 0.4
FAILURE_INTERVAL_DEVICE_HOURS = 16_384 * 54 * 24 / 419
"""Device hours between two interruptions in the training of Llama 3 405B (arXiv:2407.21783, section 3.3.4)."""

RESTART_SECONDS = 300.0
CompiledMemory = Callable[[RunConfig, ModelSpec, MemoryEstimate], MemoryEstimate]
"""Replaces the estimate of a device by what a compiler plans (``backends.compiled_memory``)."""

_STAGING_BYTES_PER_SECOND = 10e9  # from a device into host memory
_WRITING_BYTES_PER_SECOND = 1e9  # a local disk


@dataclass(frozen=True, slots=True)
class ResourcePlan:
    """The plan of a run on some hardware.

    Attributes:
        config: The configuration, with ``parallel.data_parallel_size`` resolved for the hardware.
        hardware: The hardware.
        memory: Estimated peak memory of one device.
        memory_bytes: Its total; on a CPU with the copy for checkpoints.
        alternatives: Settings that fit, cheapest first; only where the configuration does not.
        largest_micro_batch_sequences: Largest micro-batch that fits and divides a device's rows; 0 if none does.
        flops_per_token: FLOPs of forward and backward pass.
        tokens_per_second: Speed of all devices at the assumed MFU; ``None`` if the peak is unknown.
        total_tokens: Length of the run; ``None`` if it depends on the size of the text.
        checkpoint_bytes: Size of one checkpoint.
    """

    config: RunConfig
    hardware: Hardware
    memory: MemoryEstimate
    memory_bytes: int
    alternatives: tuple[Alternative, ...]
    largest_micro_batch_sequences: int
    flops_per_token: float
    tokens_per_second: float | None
    total_tokens: int | None
    checkpoint_bytes: int

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.hardware.memory_bytes

    @property
    def training_seconds(self) -> float | None:
        """Duration of the steps alone."""
        if self.tokens_per_second is None or self.total_tokens is None:
            return None
        return self.total_tokens / self.tokens_per_second

    def save_seconds(self) -> float:
        """Return how long a checkpoint holds up training: a copy into host memory, or a write."""
        per_second = _STAGING_BYTES_PER_SECOND if self.config.checkpoint.asynchronous else _WRITING_BYTES_PER_SECOND
        return self.checkpoint_bytes / self.config.parallel.fsdp_size / per_second

    def effective_fraction(self, num_devices: int) -> tuple[float, float]:
        """Return the effective share of training time at some number of devices, and the best save interval in seconds.

        The interval follows Young (Communications of the ACM 17, 1974). A failure loses half an interval and a
        restart.
        """
        between_failures = FAILURE_INTERVAL_DEVICE_HOURS * 3600 / num_devices
        save = max(self.save_seconds(), 1e-3)
        interval = sqrt(2 * save * between_failures)
        lost = save / interval + (interval / 2 + RESTART_SECONDS) / between_failures
        return max(0.0, 1 - lost), interval


def plan_resources(
    config: RunConfig,
    spec: ModelSpec,
    hardware: Hardware,
    *,
    mfu_fraction: float = DEFAULT_MFU_FRACTION,
    compiled: CompiledMemory | None = None,
) -> ResourcePlan:
    """Return the plan of a run on some hardware.

    Args:
        config: The run; devices that it leaves open (``parallel.data_parallel_size=auto``) become replicas.
        spec: Its model.
        hardware: The devices.
        mfu_fraction: Assumed share of the data-sheet peak.
        compiled: Returns the memory of the compiled step; ``None``: the estimate counts. Alternatives are estimates.

    Raises:
        ConfigError: The rows of a step do not divide over the devices, or do not fill the pipeline.
    """
    resolved, devices = on_all_devices(config, hardware.num_devices), hardware.devices
    if is_auto(config) and config.train.auto_micro_batch_sequences is None:
        check_estimable(config)
        rows = largest_micro_batch(resolved, spec, devices.usable)
        resolved = with_micro_batch(config, MicroBatch(max(1, rows), ""))
        resolved = on_devices(resolved, hardware.num_devices)
    memory, used = devices.memory(resolved, spec)
    if compiled is not None:
        memory = compiled(resolved, spec, memory)
        used = memory.total_bytes_on(devices.kind)
    per_token = flops_per_token(spec, config.data.sequence_length_tokens)
    peak = hardware.peak_flops_per_second(arithmetic_of(config.precision))
    busy = min(1.0, resolved.parallel.num_devices / hardware.num_devices)
    fits = used <= hardware.memory_bytes
    return ResourcePlan(
        config=resolved,
        hardware=hardware,
        memory=memory,
        memory_bytes=used,
        alternatives=() if fits else tuple(alternatives(config, spec, devices)),
        largest_micro_batch_sequences=largest_micro_batch(resolved, spec, devices),
        flops_per_token=per_token,
        tokens_per_second=planned_speed(None if peak is None else peak * busy, per_token, mfu_fraction),
        total_tokens=_total_tokens(config),
        checkpoint_bytes=checkpoint_bytes(config, spec),
    )


def planned_speed(
    peak_flops_per_second: float | None, flops_per_token: float, mfu_fraction: float = DEFAULT_MFU_FRACTION
) -> float | None:
    """Return the tokens per second of all devices at an assumed MFU; ``None`` if their peak is unknown."""
    return None if peak_flops_per_second is None else peak_flops_per_second * mfu_fraction / flops_per_token


def _total_tokens(config: RunConfig) -> int | None:
    if config.train.num_tokens is not None:
        return config.train.num_tokens
    if config.train.num_steps is None:
        return None
    return batch_sizes_of(config).position_of(config.train.num_steps) * config.data.sequence_length_tokens
