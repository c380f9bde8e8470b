"""Decide ``train.micro_batch_sequences: auto``: the most rows that the memory estimate fits into a device.

A configuration, its model and the devices of all ranks go in; the number comes out. It is decided once, when the run is
created. ``train.auto_micro_batch_sequences`` records it, so a resume and a replay on other devices use the same number.
The rows of a step, their order and the global batch do not depend on it; sums of gradients do, in their last bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from vorox.core.config.checks.batch import check_devices
from vorox.core.config.checks.parallel import PIPELINE_SIZE, micro_batches_fault
from vorox.core.errors import ConfigError, DoesNotFitError
from vorox.core.files.file_holder import boot_identity
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import ResumeFrom, RunLayout
from vorox.core.schema import RunConfig
from vorox.core.user_code.extensions import is_extension
from vorox.models.spec import ModelSpec
from vorox.planning.hardware import RESERVED_BYTES
from vorox.planning.memory_advice import Devices, hint_of, largest_micro_batch, settings_that_fit
from vorox.planning.memory_estimate import on_devices
from vorox.records.run_context import expected_directory, recorded_config

KEY = "train.micro_batch_sequences"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows of a micro-batch, with the text that reports them."""

    rows: int
    text: str


def is_auto(config: RunConfig) -> bool:
    """Whether the run decides on the micro-batch."""
    return config.train.micro_batch_sequences == "auto"


def with_micro_batch(config: RunConfig, decision: MicroBatch | None) -> RunConfig:
    """Return the configuration with the decision recorded; unchanged without one."""
    if decision is None:
        return config
    train = config.train.model_copy(update={"auto_micro_batch_sequences": decision.rows})
    return config.model_copy(update={"train": train})


def recorded(config: RunConfig, resume_from: ResumeFrom) -> MicroBatch | None:
    """Return the micro-batch of the run that is resumed; ``None`` for a new run.

    Raises:
        ConfigError: The configuration names another number than the run recorded.
    """
    directory, exists = expected_directory(config, resume_from)
    if not exists or not RunLayout(directory).config.exists():
        return None
    train = recorded_config(directory).train
    if train.micro_batch_sequences == "auto" and train.auto_micro_batch_sequences is None:
        return None
    rows, given = train.micro_batch_rows, config.train.auto_micro_batch_sequences
    if given not in (None, rows):
        raise ConfigError(
            f"train.auto_micro_batch_sequences={given}, but the run recorded {rows} when it was created",
            where="train.auto_micro_batch_sequences", hint=f"remove it, or set {KEY}={given} to change it",
        )  # fmt: skip
    return MicroBatch(rows, f"Micro-batch: {pluralize(rows, 'row')}, as the run recorded ({KEY}=auto)")


def check_estimable(config: RunConfig) -> None:
    """Check that the memory estimate counts everything that a step of this run allocates.

    Raises:
        ConfigError: It does not.
    """
    unknown = {
        "parallel.kind=deepspeed": config.parallel.kind == "deepspeed",
        "train.forward_backward": config.train.forward_backward is not None,
        "train.distillation.teacher": config.train.distillation.teacher is not None,
        "model.block": config.model.block is not None,
        "model.mlp": config.model.mlp is not None,
        "model.attention_kernel": is_extension(config.model.attention_kernel),
        "loss.name": is_extension(config.loss.name),
        "optimizer.name": is_extension(config.optimizer.name),
    }
    found = [key for key, is_unknown in unknown.items() if is_unknown]
    if found:
        raise _undecidable(f"the memory estimate does not count {' and '.join(found)}")


def facts_of(devices: Devices | None) -> dict[str, Any]:
    """Return what a rank contributes to the decision, as plain JSON."""
    return {"host": boot_identity(), "devices": None if devices is None else asdict(devices)}


def combined(facts: Sequence[Mapping[str, Any]]) -> Devices:
    """Return the devices of all ranks, with the memory of the smallest.

    Ranks on one host share its memory, if they train on the CPU.

    Raises:
        ConfigError: The memory of a device is unknown.
    """
    ranks_on = Counter(str(fact["host"]) for fact in facts)
    smallest: Devices | None = None
    for rank, fact in enumerate(facts):
        if fact["devices"] is None:
            raise _undecidable(f"the memory of the device of rank {rank} is unknown")
        one = Devices(**fact["devices"])
        own = one.memory_bytes // ranks_on[str(fact["host"])] if one.is_cpu else one.memory_bytes - RESERVED_BYTES
        if smallest is None or own < smallest.memory_bytes:
            smallest = replace(one, memory_bytes=own)
    assert smallest is not None
    return smallest


def on_all_devices(config: RunConfig, num_devices: int) -> RunConfig:
    """Return the configuration on the devices of a run (``on_devices``), checked.

    Raises:
        ConfigError: The rows of a step do not divide over the devices, or do not fill the pipeline.
    """
    resolved = on_devices(config, num_devices)
    check_devices(resolved)
    if fault := micro_batches_fault(resolved, resolved.parallel.num_row_parts):
        raise ConfigError(fault, where=PIPELINE_SIZE)
    return resolved


def decide(config: RunConfig, spec: ModelSpec, devices: Devices) -> MicroBatch:
    """Return the largest micro-batch that fits into every device and divides its rows.

    Raises:
        ConfigError: The rows of a step do not divide over the devices, or cannot fill the pipeline.
        DoesNotFitError: Not even the smallest fits; the hint names settings that do.
    """
    resolved, devices = on_all_devices(config, devices.count), devices.usable
    rows = largest_micro_batch(resolved, spec, devices)
    if not rows:
        needed = devices.memory(resolved, spec)[1]
        raise DoesNotFitError(
            f"A micro-batch of 1 row takes about {needed / 2**30:,.1f} GiB; {devices.memory_bytes / 2**30:,.1f} GiB of "
            "a device can be used",
            where=KEY, hint=hint_of(settings_that_fit(config, spec, devices)),
        )  # fmt: skip
    used = devices.memory(with_micro_batch(config, MicroBatch(rows, "")), spec)[1]
    text = (
        f"Micro-batch: {pluralize(rows, 'row')}, the most that fit: {used / 2**30:,.1f} GiB estimated of "
        f"{devices.memory_bytes / 2**30:,.1f} GiB usable on each device ({KEY}=auto)"
    )
    return MicroBatch(rows, text)


def explained(error: ConfigError) -> ConfigError:
    """Return the error for a model whose memory cannot be estimated."""
    return _undecidable(f"{error.what[:1].lower()}{error.what[1:]}", error.hint)


def _undecidable(why: str, hint: str = "") -> ConfigError:
    hint = f"{hint}; or " if hint else ""
    return ConfigError(f"{KEY}=auto cannot be decided: {why}", where=KEY, hint=f"{hint}set {KEY}=N")
