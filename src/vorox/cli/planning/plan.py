"""``vorox plan``: memory, speed, duration and disk of a run on given hardware, and settings that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vorox import backends
from vorox.cli.settings.arguments import parse_arguments
from vorox.cli.settings.config import load, source_and_overrides
from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import print_json, print_wrapped
from vorox.core.batch_sizes import batch_sizes_of
from vorox.core.config import model_label
from vorox.core.errors import ConfigError, DoesNotFitError, VoroxError
from vorox.core.platform.environment import host_memory_bytes
from vorox.core.pluralize import pluralize
from vorox.core.schema import RunConfig
from vorox.models.spec import ModelSpec
from vorox.planned_run import planned_model
from vorox.planning.hardware import Hardware, named_hardware, this_machine
from vorox.planning.memory_advice import check_host_memory
from vorox.planning.memory_estimate import memory_per_device
from vorox.planning.resource_plan import DEFAULT_MFU_FRACTION, ResourcePlan, plan_resources
from vorox.planning.retention import RetentionCost, assumed_start_seconds, planned_steps, retention_cost
from vorox.records.run_lookup import attempt_notes
from vorox.training.checkpoints.re_execution_times import ReExecutionTimes, expected_times

_MANY_DEVICES = 1000
_SIZES = (
    "data_parallel_size", "fsdp_size", "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size",
)  # fmt: skip


def plan(arguments: list[str], hardware: str | None, mfu: float, compiled: bool, as_json: bool) -> None:
    parsed = parse_arguments(arguments, options=("--hardware", "--mfu", "--compile", "--json"), max_positional=1)
    if not parsed.positional and not parsed.data:
        raise ConfigError("No configuration is named", where="plan", hint="for example `vorox plan gpt2-124m`")
    if compiled and hardware is not None:
        raise ConfigError(
            "--compile compiles for the devices of this machine", where="--hardware", hint="leave out one of the two"
        )
    source, overrides = source_and_overrides(parsed)
    config = load(source, overrides)
    spec = planned_model(config)
    backends.check_divisible(config, spec)
    devices = (
        this_machine(use_gpus=config.runtime.device in {"auto", "cuda"})
        if hardware is None
        else named_hardware(hardware)
    )
    found = plan_resources(
        config, spec, devices, mfu_fraction=mfu, compiled=backends.compiled_memory if compiled else None
    )
    parallel = found.config.parallel
    if parallel.num_devices > devices.num_devices:
        sizes = [f"parallel.{name}" for name in _SIZES if getattr(parallel, name) not in {1, "auto"}]
        raise DoesNotFitError(
            f"The configuration needs {parallel.num_devices:,} devices; {devices.name} has {devices.num_devices:,}",
            where="parallel", hint=f"lower {' or '.join(sizes)}, or name other hardware with --hardware",
        )  # fmt: skip
    run = source.parent if isinstance(source, Path) and hardware is None else None
    retention = _retention(found, run)
    if as_json:
        print_json({**_as_json(found, mfu), "retention": None if retention is None else _retention_json(retention)})
    else:
        print_wrapped([*_lines(found, spec, mfu), *_retention_lines(retention)], indent_columns=15)
    if not found.fits:
        raise DoesNotFitError(
            f"A device needs about {humanize.size(found.memory_bytes)} and has "
            f"{humanize.size(devices.memory_bytes)}",
            where="memory", hint=_hint(found),
        )  # fmt: skip


def _hint(found: ResourcePlan) -> str:
    if not found.alternatives:
        if found.config.model.kind == "huggingface" and found.config.adapter.kind != "qlora":
            return "set adapter.kind=qlora, lower data.sequence_length_tokens, or use more or larger devices"
        return "lower model.num_layers, model.hidden_size or data.sequence_length_tokens, or use more or larger devices"
    return f"set {' '.join(found.alternatives[0].settings)}"


def _lines(found: ResourcePlan, spec: ModelSpec, mfu: float) -> Iterator[str]:
    config, hardware = found.config, found.hardware
    kind = hardware.product or "CPU"
    yield (
        f"hardware       {hardware.name}: {pluralize(hardware.num_devices, 'device')} ({kind}), "
        f"{humanize.size(hardware.memory_bytes)} usable each"
    )
    yield f"model          {model_label(config)}: {spec.summary()}, {humanize.count(spec.num_parameters)} parameters"
    yield from _batch_lines(found)
    parts = found.memory.parts_on(hardware.devices.kind)
    verdict = "fits" if found.fits else "DOES NOT FIT"
    yield (
        f"memory         about {humanize.size(found.memory_bytes)} of {humanize.size(hardware.memory_bytes)} on each "
        f"device: {verdict}"
    )
    width = max(map(len, parts))
    for name, value in parts.items():
        yield f"                 {name:<{width}}  {humanize.size(value):>9}"
    for alternative in found.alternatives:
        yield (
            f"               fits with {' '.join(alternative.settings)}: {humanize.size(alternative.memory_bytes)} "
            f"({alternative.cost})"
        )
    yield from _speed_lines(found, mfu)
    yield f"disk           {humanize.size(found.checkpoint_bytes)} for each checkpoint"
    if found.hardware.num_devices > 1:
        yield from _failure_lines(found)


def _batch_lines(found: ResourcePlan) -> Iterator[str]:
    train, parallel = found.config.train, found.config.parallel
    rows = -(-train.global_batch_sequences // parallel.num_row_parts)
    tokens = train.global_batch_sequences * found.config.data.sequence_length_tokens
    yield (
        f"batch          {pluralize(train.global_batch_sequences, 'row')}, {pluralize(tokens, 'token')}: "
        f"{pluralize(rows, 'row')} on each device, in micro-batches of {train.micro_batch_rows:,}"
    )
    for stage in batch_sizes_of(found.config).stages[1:]:
        yield f"               from step {stage.start_step + 1:,}: {pluralize(stage.rows, 'row')}"
    largest = found.largest_micro_batch_sequences
    if found.fits and largest > train.micro_batch_rows:
        yield f"               train.micro_batch_sequences={largest} fits as well"
    if parallel.num_devices < found.hardware.num_devices:
        unused = found.hardware.num_devices - parallel.num_devices
        yield f"               note: {pluralize(unused, 'device')} unused"


def _speed_lines(found: ResourcePlan, mfu: float) -> Iterator[str]:
    per_token = humanize.count(found.flops_per_token)
    if found.tokens_per_second is None:
        yield f"speed          {per_token} FLOPs per token; no data-sheet peak: measure it with a run of a few steps"
        return
    yield (
        f"speed          about {humanize.count(found.tokens_per_second)} tok/s at an assumed MFU of {mfu:.0%} "
        f"({per_token} FLOPs per token)"
    )
    if found.training_seconds is not None:
        yield (
            f"duration       about {humanize.duration(found.training_seconds)} for "
            f"{humanize.count(found.total_tokens)} tokens"
        )


def speed_lines(config: RunConfig, hardware: Hardware) -> list[str]:
    """Return the lines of a plan about speed and duration on some hardware; empty where no data sheet has its peak."""
    try:
        found = plan_resources(config, planned_model(config), hardware)
    except VoroxError:
        return []
    return [] if found.tokens_per_second is None else [*_speed_lines(found, DEFAULT_MFU_FRACTION)]


def memory_lines(config: RunConfig, spec: ModelSpec, device: str) -> Iterator[str]:
    """Yield the estimate of device memory; on the CPU compared with the memory of this machine."""
    estimate, available = memory_per_device(spec, config, device), host_memory_bytes()
    against = f" of {humanize.size(available)}" if device == "cpu" else ""
    detail = ", ".join(f"{name} {humanize.size(value)}" for name, value in estimate.parts_on(device).items())
    yield f"memory         about {humanize.size(estimate.total_bytes_on(device))}{against}: {detail}"
    if device == "cpu":
        check_host_memory(spec, config, available)


def _failure_lines(found: ResourcePlan) -> Iterator[str]:
    fraction, interval = found.effective_fraction(_MANY_DEVICES)
    yield (
        f"failures       at {_MANY_DEVICES:,} devices, with the failure rate of Llama 3: {fraction:.1%} of the time "
        f"trains if a checkpoint is saved every {humanize.duration(interval)}"
    )


def _retention(found: ResourcePlan, run: Path | None) -> RetentionCost | None:
    """Return what the retention policy costs, at the speed that a run recorded here, else at the planned one."""
    config = found.config
    length = planned_steps(config) or next(
        (steps for steps in ([] if run is None else attempt_notes(run, "total_steps")) if isinstance(steps, int)), None
    )
    if not length:
        return None
    times = ReExecutionTimes(None, None) if run is None else expected_times(run)
    step_seconds, start_seconds = times.step_seconds, times.start_seconds
    if step_seconds is None and found.training_seconds is not None:
        step_seconds = found.training_seconds / length
    if start_seconds is None:
        start_seconds = assumed_start_seconds(found.checkpoint_bytes)
    return retention_cost(config.checkpoint, length, start_seconds=start_seconds, step_seconds=step_seconds)


def _retention_lines(cost: RetentionCost | None) -> Iterator[str]:
    if cost is None:
        return
    kept = f"keeps {cost.num_kept:,} of {pluralize(cost.num_saved, 'saved state')}"
    worst, median = (
        f"{steps:,} steps" if (seconds := cost.seconds(steps)) is None else humanize.duration(seconds)
        for steps in (cost.worst_steps, cost.median_steps)
    )
    yield (
        f"retention      {kept}, {cost.disk_fraction:.0%} of their disk: any step again within {worst}, half of "
        f"them within {median}"
    )


def _retention_json(cost: RetentionCost) -> dict[str, Any]:
    return {
        **asdict(cost),
        "disk_fraction": cost.disk_fraction,
        "worst_seconds": cost.seconds(cost.worst_steps),
        "median_seconds": cost.seconds(cost.median_steps),
    }


def _as_json(found: ResourcePlan, mfu: float) -> dict[str, Any]:
    fraction, interval = found.effective_fraction(_MANY_DEVICES)
    return {
        "hardware": asdict(found.hardware),
        "fits": found.fits,
        "memory_bytes": found.memory_bytes,
        "memory": asdict(found.memory),
        "alternatives": [asdict(one) for one in found.alternatives],
        "micro_batch_sequences": found.config.train.micro_batch_rows,
        "largest_micro_batch_sequences": found.largest_micro_batch_sequences,
        "flops_per_token": found.flops_per_token,
        "assumed_mfu_fraction": mfu,
        "tokens_per_second": found.tokens_per_second,
        "total_tokens": found.total_tokens,
        "training_seconds": found.training_seconds,
        "checkpoint_bytes": found.checkpoint_bytes,
        "effective_fraction_at_1000_devices": fraction,
        "best_save_interval_seconds_at_1000_devices": interval,
    }
