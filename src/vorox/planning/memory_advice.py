"""Advice where memory is too small: the part that grew, and settings that fit with their cost.

Estimates (``memory_estimate.py``) and the memory of a device go in; alternatives and errors come out. ``vorox plan``,
the checks before step 1, the rehearsal and a failing step give the same advice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vorox.core.batch_sizes import batch_sizes_of
from vorox.core.config.checks.cross_checks import find_problems
from vorox.core.errors import DoesNotFitError
from vorox.core.files.file_holder import boot_identity
from vorox.core.platform.environment import host_memory_bytes
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.models.spec import ModelSpec
from vorox.planning.memory_estimate import MemoryEstimate, memory_per_device, on_devices

COPYING = "copying the state for a checkpoint"
READING = "reading the state for a checkpoint"
SAMPLING = "sampling"
"""What an engine does when it runs out of memory, where the remedy is not that of a training step."""

_MAX_NAMED = 3
_SAVED_FRACTION = 0.5
"""Fraction of the part that grew which settings must save: the device ran out, so the estimate may be too low."""
_SHORTEST_ROW_TOKENS = 32
_GPU_FRACTION, _CPU_FRACTION = 0.9, 0.8
"""Fraction of the memory that an estimate may fill. Estimates have errors, and a host has other processes."""
_SMALLER_MODEL = "lower model.num_layers or model.hidden_size"
_SMALL_CHUNK_TOKENS = 128

Change = tuple[str, str, object]
"""Section, setting and value."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a run, as far as memory is concerned.

    Attributes:
        count: Number of devices.
        memory_bytes: Memory of one that training can use.
        is_cpu: Whether they share the memory of the host.
        has_bf16: Whether they multiply bf16 faster than fp32.
    """

    count: int
    memory_bytes: int
    is_cpu: bool
    has_bf16: bool

    @property
    def kind(self) -> str:
        return "cpu" if self.is_cpu else "cuda"

    @property
    def usable_fraction(self) -> float:
        """Fraction of the memory that an estimate may fill."""
        return _CPU_FRACTION if self.is_cpu else _GPU_FRACTION

    @property
    def usable(self) -> Devices:
        """The devices with the memory that an estimate may fill."""
        return replace(self, memory_bytes=int(self.usable_fraction * self.memory_bytes))

    def memory(self, config: RunConfig, spec: ModelSpec) -> tuple[MemoryEstimate, int]:
        """Return the estimate for one device, and its total."""
        memory = memory_per_device(spec, config, self.kind, self.count)
        return memory, memory.total_bytes_on(self.kind)

    def fit(self, config: RunConfig, spec: ModelSpec) -> bool:
        """Whether a run fits into them."""
        return self.memory(config, spec)[1] <= self.memory_bytes


@dataclass(frozen=True, slots=True)
class Alternative:
    """Settings that fit, with the memory of a device and their cost."""

    settings: tuple[str, ...]
    memory_bytes: int
    cost: str

    def __str__(self) -> str:
        return f"{' '.join(self.settings)} ({self.cost})"


def largest_micro_batch(config: RunConfig, spec: ModelSpec, devices: Devices) -> int:
    """Return the largest micro-batch that fits and divides a device's rows; 0 if none does."""
    stages = {-(-stage.rows // config.parallel.num_row_parts) for stage in batch_sizes_of(config).stages}
    rows = math.gcd(*stages)
    fills = config.parallel.fills_pipeline
    sizes = [size for size in range(rows, 0, -1) if rows % size == 0 and all(fills(each // size) for each in stages)]
    return next((size for size in sizes if devices.fit(_changed(config, _micro_batch(size)), spec)), 0)


def _micro_batch(size: int) -> Change:
    return ("train", "micro_batch_sequences", size)


def _changed(config: RunConfig, *changes: Change) -> RunConfig:
    for section, name, value in changes:
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
    return config


def alternatives(config: RunConfig, spec: ModelSpec, devices: Devices) -> Iterator[Alternative]:
    """Yield changes that fit, alone or together, each with the largest micro-batch that fits beside it.

    Changes that the configuration does not allow, or that save nothing, are skipped.
    """
    given = on_devices(config, devices.count)
    num_problems, given_bytes = len(find_problems(config)), devices.memory(given, spec)[1]
    for changes, cost in _changes(config, devices):
        changed = on_devices(_changed(config, *changes), devices.count)
        if changes and devices.memory(changed, spec)[1] >= given_bytes:
            continue
        size = largest_micro_batch(changed, spec, devices)
        if not size:
            continue
        needed = changes if size >= changed.train.micro_batch_rows else (*changes, _micro_batch(size))
        if len(find_problems(_changed(config, *needed))) > num_problems:
            continue
        final = _changed(changed, _micro_batch(min(size, changed.train.micro_batch_rows)))
        yield Alternative(tuple(map(_setting, needed)), devices.memory(final, spec)[1], cost)


def _setting(change: Change) -> str:
    section, name, value = change
    return f"{section}.{name}={'null' if value is None else str(value).lower()}"


def _changes(config: RunConfig, devices: Devices) -> Iterator[tuple[tuple[Change, ...], str]]:
    """Yield the changes to try, with their cost."""
    recompute: Change = ("train", "activation_checkpointing", "block")
    lower: Change = ("precision", "dtype", "bf16")
    shard: Change = ("parallel", "fsdp_size", devices.count)
    can_recompute = config.train.activation_checkpointing != "block"
    can_lower = config.precision.dtype == "fp32" and devices.has_bf16
    quantise: Change = ("optimizer", "name", "adamw_8bit")
    can_quantise = config.optimizer.name == "adamw"
    wait: Change = ("checkpoint", "asynchronous", False)
    can_wait = devices.is_cpu and config.checkpoint.asynchronous
    is_divided = config.parallel.num_devices > config.parallel.num_row_parts
    can_shard = devices.count > config.parallel.fsdp_size == 1 and not is_divided
    yield (), "more accumulation"
    if can_lower:
        yield (lower,), "faster, less precise"
    if can_recompute:
        yield (recompute,), "about a third more compute"
    if can_shard:
        yield (shard,), "communication of all parameters in every pass"
    if can_wait:
        yield (wait,), "training waits for saves"
    if can_quantise:
        yield (quantise,), "moments of 8 bits: another optimizer"
    if not devices.is_cpu and config.model.kind == "decoder" and config.loss.chunk_tokens > _SMALL_CHUNK_TOKENS:
        yield (("loss", "chunk_tokens", _SMALL_CHUNK_TOKENS),), "smaller products for the loss"
    if config.train.ema_decay is not None:
        yield (("train", "ema_decay", None),), "no moving average of the weights"
    if can_shard and can_recompute:
        yield (shard, recompute), "communication, and about a third more compute"
    if can_lower and can_recompute:
        yield (lower, recompute), "less precise, and about a third more compute"
    if can_wait and can_recompute:
        yield (wait, recompute), "training waits for saves, and about a third more compute"
    if can_quantise and can_recompute:
        yield (quantise, recompute), "moments of 8 bits, and about a third more compute"
    if can_lower and can_shard and can_recompute:
        yield (lower, shard, recompute), "less precise, communication, and about a third more compute"


def settings_that_fit(config: RunConfig, spec: ModelSpec, devices: Devices) -> list[Alternative]:
    """Return up to three alternatives, single settings first; a shorter row is the last resort of these."""
    found = [one for one in alternatives(config, spec, devices) if one.settings]
    length = config.data.sequence_length_tokens
    for shorter in (
        1 << power for power in range((length - 1).bit_length() - 1, _SHORTEST_ROW_TOKENS.bit_length() - 2, -1)
    ):
        changed = _changed(config, ("data", "sequence_length_tokens", shorter))
        if devices.fit(on_devices(changed, devices.count), spec):
            used = devices.memory(on_devices(changed, devices.count), spec)[1]
            found.append(Alternative((f"data.sequence_length_tokens={shorter}",), used, "shorter context"))
            break
    return sorted(found, key=lambda one: len(one.settings))[:_MAX_NAMED]


def hint_of(found: Sequence[Alternative]) -> str:
    """Return the hint that names alternatives, and whether there are fewer than three; without any, a smaller model."""
    if not found:
        return _SMALLER_MODEL
    *first, last = map(str, found)
    named = f"set {', '.join(first)} or {last}" if first else f"set {last}"
    return named if len(found) >= _MAX_NAMED else f"{named}; no other change that saves memory fits"


def check_host_memory(
    spec: ModelSpec, config: RunConfig, available_bytes: int, *, num_devices: int = 1, num_local_devices: int = 1
) -> None:
    """Check before step 1 that the devices of a run on one host fit into its memory, if they are its CPU.

    Every device has the memory of a step of its own; the copy for a checkpoint is made by one replica.

    Args:
        spec: The model.
        config: The run.
        available_bytes: Memory of the host.
        num_devices: Devices of the run.
        num_local_devices: Those on this host, which share its memory: its ranks, or all devices of its processes.

    Raises:
        DoesNotFitError: They do not; the hint names settings that fit.
    """
    devices = Devices(num_devices, available_bytes // num_local_devices, is_cpu=True, has_bf16=False)
    resolved = on_devices(config, num_devices)
    memory = devices.memory(resolved, spec)[0]
    num_copies = min(num_local_devices, max(1, num_devices // resolved.parallel.data_parallel_size_on(num_devices)))
    needed_bytes = num_local_devices * memory.total_bytes + num_copies * memory.snapshot_bytes
    if needed_bytes > available_bytes:
        tokens = resolved.train.micro_batch_rows * config.data.sequence_length_tokens
        each = f" on each of {num_local_devices:,} devices" if num_local_devices > 1 else ""
        raise DoesNotFitError(
            f"A micro-batch of {tokens:,} tokens{each} takes about {needed_bytes / 2**30:,.1f} GiB; this machine has "
            f"{available_bytes / 2**30:,.1f} GiB",
            where="memory", hint=hint_of(settings_that_fit(config, spec, devices)),
        )  # fmt: skip


def check_memory_of_hosts(
    config: RunConfig, spec: ModelSpec, environment: Mapping[str, Any], dist: DistributedContext
) -> None:
    """Check that the ranks of each host fit into its memory, if they train on the CPU. A collective.

    Args:
        config: The run.
        spec: Its model.
        environment: Facts of the engine of this rank.
        dist: This process's rank.

    Raises:
        DoesNotFitError: They do not; the hint names settings that fit.
    """
    if environment.get("device_kind") == "cpu":
        host = boot_identity()
        ranks_by_host = dist.agree("hosts", host, Counter)
        num_devices = int(environment.get("num_devices", 1))
        num_local_devices = num_devices * ranks_by_host[host] // dist.world_size
        check_host_memory(
            spec, config, host_memory_bytes(), num_devices=num_devices, num_local_devices=num_local_devices
        )


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The estimated peak memory of a run and the memory of its device.

    Attributes:
        estimate: The estimated peak memory of the device.
        available_bytes: Memory of the device; ``None`` if unknown.
        advise: Returns alternatives, given the bytes of the part that grew.
    """

    estimate: MemoryEstimate
    available_bytes: int | None
    advise: Callable[[int], Sequence[Alternative]] = lambda _: ()

    @classmethod
    def of(
        cls, config: RunConfig, spec: ModelSpec, available_bytes: int | None, *, num_devices: int, device_kind: str
    ) -> MemoryBudget:
        """Return the budget of a run on some devices, for example of kind ``cpu`` or ``cuda``."""
        is_cpu = device_kind == "cpu"
        known = Devices(num_devices, available_bytes or 0, is_cpu, not is_cpu)
        estimate, estimated_bytes = known.memory(config, spec)

        def advise(grown_bytes: int) -> Sequence[Alternative]:
            limit_bytes = estimated_bytes - int(_SAVED_FRACTION * grown_bytes)
            if available_bytes is not None:
                limit_bytes = min(limit_bytes, available_bytes)
            return settings_that_fit(config, spec, replace(known, memory_bytes=limit_bytes))

        return cls(estimate, available_bytes, advise)

    @property
    def _state_bytes(self) -> int:
        return self.estimate.parameter_bytes + self.estimate.gradient_bytes + self.estimate.optimizer_bytes

    def check_state(self) -> None:
        """Check, before allocating, that parameters, gradients and optimizer state fit into the device.

        Raises:
            DoesNotFitError: They do not.
        """
        if self.available_bytes is not None and self._state_bytes > self.available_bytes:
            raise self.out_of_memory_error("creating the model")

    def out_of_memory_error(self, doing: str) -> DoesNotFitError:
        """Return the error for a device or host that ran out of memory.

        Args:
            doing: One of the constants above, or another text such as ``training``.
        """
        if doing == COPYING:
            return DoesNotFitError(
                f"Out of memory while {doing}: it takes {self.estimate.snapshot_bytes / 2**30:,.2f} GiB of host memory",
                where="checkpoint.asynchronous", hint="set checkpoint.asynchronous=false (training waits for saves)",
            )  # fmt: skip
        if doing == READING:
            return DoesNotFitError(
                f"Out of memory while {doing}", where="memory",
                hint=f"free host memory, or {_SMALLER_MODEL}",
            )  # fmt: skip
        if doing == SAMPLING:
            return DoesNotFitError(
                f"Out of memory while {doing}: the KV cache has no room", where="sampling",
                hint="sample fewer tokens or prompts at a time (in training: eval.sample_tokens, eval.prompts)",
            )  # fmt: skip
        estimate = self.estimate
        parts = {
            estimate.activation_bytes: "activations",
            estimate.logits_bytes: "logits",
            estimate.mask_bytes: "masks",
        }
        grown_bytes = max(parts)
        has = "" if self.available_bytes is None else f"; the device has {self.available_bytes / 2**30:,.2f} GiB"
        if self.available_bytes is not None and self._state_bytes + grown_bytes < self.available_bytes:
            has += ", less what other programs take; this process may have a lower limit"
        what = (
            f"Out of memory while {doing}: parameters, gradients and optimizer state take about "
            f"{self._state_bytes / 2**30:,.2f} GiB, and {parts[grown_bytes]} grow to {grown_bytes / 2**30:,.2f} GiB"
            + has
        )
        found = self.advise(grown_bytes)
        if found:
            return DoesNotFitError(what, where=found[0].settings[0].partition("=")[0], hint=hint_of(found))
        if self.available_bytes is not None and self._state_bytes > 0.9 * self.available_bytes:
            return DoesNotFitError(what, where="model", hint=_SMALLER_MODEL)
        return DoesNotFitError(
            what, where="train.micro_batch_sequences",
            hint="lower train.micro_batch_sequences or data.sequence_length_tokens, or set "
            "train.activation_checkpointing=block",
        )  # fmt: skip
