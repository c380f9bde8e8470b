"""Estimate against actual: what was estimated before a run, next to what it measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vorox.core.batch_sizes import batch_sizes_of
from vorox.core.errors import VoroxError
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.dashboard.metrics.series import MetricSeries
from vorox.dashboard.runs.run_index import environment_of
from vorox.data.tokenizers.loading import load
from vorox.experiments.artifacts import inspect_run, list_checkpoints
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.planning.disk_space import checkpoint_space
from vorox.planning.memory_estimate import PART_NAMES, MemoryEstimate, memory_per_device
from vorox.planning.resource_plan import DEFAULT_MFU_FRACTION, planned_speed
from vorox.records.run_context import recorded_config
from vorox.runtime.device_peaks import peak_of_environment


def plan_and_actual(directory: Path, series: MetricSeries) -> dict[str, Any]:
    """Return rows of (quantity, unit, estimate, actual, note), and the parts of the estimated memory.

    Without an estimate, the value is ``None`` and the note has the reason.
    """
    config, environment = recorded_config(directory), environment_of(directory)
    spec, why = _spec(directory, config)
    summary = inspect_run(directory)
    total_steps = summary.total_steps or 0
    on_device = environment.get("device_kind") == "cuda"
    measured = _largest(series, "memory/device_peak_bytes" if on_device else "memory/host_peak_bytes")
    speed = _median(series, "tokens_per_second")
    tokens = batch_sizes_of(config).position_of(total_steps) * config.data.sequence_length_tokens
    planned_speed, speed_note = _planned_speed(config, environment, series)
    seconds = series.seconds_at(series.points("loss")[0])
    kind = str(environment.get("device_kind", "cpu"))
    num_devices = int(environment.get("num_devices", 1))
    memory = None if spec is None else memory_per_device(spec, config, kind, num_devices)
    space = None if spec is None or not total_steps else checkpoint_space(config, spec, total_steps)
    saved = [entry.size_bytes for entry in list_checkpoints(directory)]
    peak = _row(
        "Memory, peak",
        "bytes",
        None if memory is None else memory.total_bytes_on(kind),
        measured,
        why or ("" if on_device else "The process, with framework and caches; the estimate has tensors only."),
    )
    rows = [
        peak if on_device else {**peak, "ratio": None},
        _row("Speed", "tokens/s", planned_speed, speed, speed_note),
        _row("Duration of the steps", "s", tokens / planned_speed if planned_speed and tokens else None,
             tokens / speed if speed and tokens else None, "Measured: tokens of the run at the median speed."),
        _row("Trained so far", "s", None, float(seconds[-1]) if seconds.size else None, ""),
        _row("Tokens", "tokens", tokens or None, _last(series, "tokens_total"), ""),
        _row("One checkpoint", "bytes", None if space is None else space.checkpoint_bytes,
             max(saved, default=None), why),
        _row("Disk, all checkpoints", "bytes", None if space is None else space.total_bytes, sum(saved) or None,
             why or "Estimated: the most that is on disk at any time."),
    ]  # fmt: skip
    parts: dict[str, int] = {}
    if memory is not None:
        rows[1:1] = _part_rows(memory, config, series)
        parts = memory.parts_on(kind)
    return {"rows": rows, "memory_parts": [{"name": name, "bytes": value} for name, value in parts.items()]}


def _part_rows(planned: MemoryEstimate, config: RunConfig, series: MetricSeries) -> list[dict[str, Any]]:
    """Return the rows of the parts of a device's memory: estimated, and held by the fullest rank."""
    fields = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    held = {field: _largest(series, f"memory/{field}") for field in fields}
    step_peak = _largest(series, "memory/step_peak_bytes")
    is_transient = config.optimizer.in_backward or held["gradient_bytes"] is None
    notes = {
        "parameter_bytes": "",
        "gradient_bytes": "Not measured: they exist within a step only." if is_transient else "",
        "optimizer_bytes": "",
    }
    if not any(value for value in held.values()):
        notes = dict.fromkeys(fields, "Not measured by this run.")
    rows = [
        _row(f"Memory, {PART_NAMES[field]}", "bytes", getattr(planned, field),
             None if notes[field] else held[field], notes[field])
        for field in fields
    ]  # fmt: skip
    beyond = planned.total_bytes - sum(getattr(planned, field) for field in fields)
    note = "Measured: the peak of the device's allocator less the parts above."
    if step_peak is None:
        note = (
            "Not measured: only CUDA counts what a step allocates. Estimated: activations, logits, copies, workspace."
        )
    return [*rows, _row("Memory, peak beyond these", "bytes", beyond, step_peak, note)]


def _row(name: str, unit: str, planned: float | None, actual: float | None, note: str) -> dict[str, Any]:
    ratio = actual / planned if planned and actual is not None else None
    return {"name": name, "unit": unit, "planned": planned, "actual": actual, "ratio": ratio, "note": note}


def _spec(directory: Path, config: RunConfig) -> tuple[DecoderSpec | None, str]:
    """Return the model of a run, or why it is not known without loading the model."""
    if config.model.kind != "decoder":
        return None, f"No estimate for model.kind={config.model.kind}."
    try:
        vocabulary = load(RunLayout(directory).tokenizer).vocab_size
    except VoroxError:
        vocabulary = config.model.vocab_size or config.tokenizer.vocab_size
    try:
        length = config.data.sequence_length_tokens
        return decoder_spec(config.model, tokenizer_vocab_size=vocabulary, sequence_length_tokens=length), ""
    except VoroxError as error:
        return None, error.what


def _planned_speed(config: RunConfig, environment: dict[str, Any], series: MetricSeries) -> tuple[float | None, str]:
    per_token = series.flops_per_token()
    speed = planned_speed(peak_of_environment(environment, config.precision), per_token)
    if speed is None or per_token != per_token:
        return None, "No data-sheet peak of this device."
    return speed, f"Estimated at an MFU of {DEFAULT_MFU_FRACTION:.0%}."


def _largest(series: MetricSeries, name: str) -> float | None:
    values = series.points(name)[1]
    return float(values.max()) if values.size else None


def _last(series: MetricSeries, name: str) -> float | None:
    values = series.points(name)[1]
    return float(values[-1]) if values.size else None


def _median(series: MetricSeries, name: str) -> float | None:
    values = sorted(value for value in series.points(name)[1].tolist() if value == value)
    return values[len(values) // 2] if values else None
