"""What the pages of one run show: overview, curves, samples, health, estimates, checkpoints.

A run directory goes in; plain JSON values come out. Everything is read with the readers of the command line.
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np

from vorox.core.config.schema_fields import find_field, leaf_keys
from vorox.core.errors import VoroxError
from vorox.core.files.json_lines import read_lines
from vorox.core.files.json_reader import is_step
from vorox.core.run_layout import RunLayout
from vorox.dashboard.metrics.downsampling import Numbers, default_smoothing, min_max_indices, moving_average
from vorox.dashboard.metrics.series import MetricSeries
from vorox.experiments.artifacts import inspect_run, list_checkpoints
from vorox.experiments.metrics import metric
from vorox.records.run_context import recorded_config
from vorox.records.run_lookup import run_argument, run_attempts, short_path

SMOOTHED = {"loss", "grad_norm", "tokens_per_second", "mfu_fraction"}
_MAX_EVENTS = 2000


def overview(directory: Path) -> dict[str, Any]:
    """Return the resolved settings, attempts and failure of a run."""
    config: dict[str, Any] | None = None
    problem = ""
    try:
        config = recorded_config(directory).model_dump(mode="json")
    except VoroxError as error:
        problem = str(error)
    attempts = [
        {key: attempt.get(key) for key in ("attempt", "started_at", "ended_at", "outcome", "argv", "code")}
        for attempt in run_attempts(directory)
    ]
    changed = [] if config is None else _changed_settings(config)
    return {"config": config, "changed": changed, "config_problem": problem, "attempts": attempts,
            "argument": run_argument(directory)}  # fmt: skip


def _changed_settings(config: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the keys whose values are not the defaults of the schema."""
    found: list[str] = []
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in leaf_keys():
            found += _changed_settings(cast("dict[str, Any]", value), f"{key}.")
        elif (field := find_field(key)) is None or json.dumps(field.default, default=_plain_default) != json.dumps(
            value
        ):
            found.append(key)
    return found


def _plain_default(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else str(value)


def curves(
    series: MetricSeries,
    names: Sequence[str],
    *,
    num_points: int = 1000,
    smoothing: float | None = None,
    first_step: int = 0,
    last_step: int | None = None,
) -> dict[str, Any]:
    """Return down-sampled metrics, each point with its step, tokens, seconds and FLOPs.

    Args:
        series: The metrics of the run.
        names: The metrics; those that the run does not have are omitted.
        num_points: About how many points to return per metric.
        smoothing: Weight of the moving average of noisy metrics, computed before the down-sampling; ``None`` chooses it
            by the number of points.
        first_step: First step of the range.
        last_step: Last step of the range; ``None`` for all.
    """
    per_token, found = series.flops_per_token(), {}
    for name in names:
        steps, values = series.points(name)
        if not steps.size:
            continue
        weight = 0.0 if name not in SMOOTHED else default_smoothing(len(values)) if smoothing is None else smoothing
        smooth = moving_average(values, weight) if weight > 0 else None
        inside = slice(
            int(np.searchsorted(steps, first_step)),
            None if last_step is None else int(np.searchsorted(steps, last_step, "right")),
        )
        steps, values = steps[inside], values[inside]
        chosen = min_max_indices(steps, values, num_points)
        steps = steps[chosen]
        tokens = series.tokens_at(steps)
        found[name] = {
            **definition(name),
            "steps": steps.tolist(),
            "values": _plain(values[chosen]),
            "smoothing": weight,
            "smooth": None if smooth is None else _plain(smooth[inside][chosen]),
            "tokens": _plain(tokens),
            "seconds": _plain(series.seconds_at(steps)),
            "flops": _plain(tokens * per_token),
        }
    return {"metrics": found, "names": series.names, "last_step": series.last_step, "is_sample": series.is_sample}


def definition(name: str) -> dict[str, str | None]:
    """Return unit and description of a metric; another version may have written ones that are unknown here."""
    try:
        known = metric(name)
    except VoroxError:
        return {"unit": "", "description": "", "better": None}
    return {"unit": known.unit, "description": known.description, "better": known.better}


def _plain(values: Numbers) -> list[float | None]:
    """Return numbers with six digits, which a chart cannot tell from more; ``None`` where not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def events(directory: Path) -> list[dict[str, Any]]:
    """Return the events of all ranks by time, newest last."""
    found: list[dict[str, Any]] = []
    for path in sorted(directory.glob(RunLayout.events.pattern)):
        for record in read_lines(path):
            fields = record.get("fields") or {}
            step = fields.get("step") if isinstance(fields, dict) else None
            kind = str(record.get("kind", ""))
            if kind == "sample":  # these have a page of their own
                continue
            found.append(
                {
                    "time": str(record.get("time", "")),
                    "kind": kind,
                    "level": str(record.get("level", "info")),
                    "message": str(record.get("message", "")),
                    "step": step if is_step(step) else None,
                    "rank": rank if is_step(rank := record.get("process", 0)) else 0,
                    "attempt": record.get("attempt"),
                    "trace": fields.get("traceback") if isinstance(fields, dict) else None,
                }
            )
    return sorted(found, key=lambda event: event["time"])[-_MAX_EVENTS:]


def samples(directory: Path) -> dict[str, Any]:
    """Return the completions of the fixed prompts: ``{prompt: {step: text}}``; a repeated step has its last text."""
    found: dict[str, dict[int, str]] = {}
    for record in read_lines(RunLayout(directory).events):
        match record:
            case {"kind": "sample", "fields": {"step": step, "prompt": str(prompt), "completion": str(text)}}:
                if is_step(step):
                    found.setdefault(prompt, {})[step] = text
    steps = sorted({step for texts in found.values() for step in texts})
    rows = [{"prompt": prompt, "texts": [texts.get(step) for step in steps]} for prompt, texts in found.items()]
    return {"steps": steps, "prompts": rows}


def health(directory: Path, series: MetricSeries) -> dict[str, Any]:
    """Return what each rank reported last, the parts of the time, memory, warnings, and skipped steps."""
    found = events(directory)
    ranks: dict[int, dict[str, Any]] = {}
    for event in found:
        rank = ranks.setdefault(event["rank"], {"rank": event["rank"], "warnings": 0, "errors": 0})
        rank.update(last_time=event["time"], last_message=event["message"])
        rank["warnings"] += event["level"] == "warning"
        rank["errors"] += event["level"] == "error"
    names = [name for name in series.names if name.startswith(("time/", "memory/", "mirror/"))]
    names += ["queue_depth", "data_wait_seconds", "nonfinite_steps", "step_seconds", "seconds_since_save"]
    nonfinite = [path.name for path in sorted(RunLayout(directory).nonfinite.glob("step-*"))]
    return {
        "ranks": [ranks[rank] for rank in sorted(ranks)],
        "curves": curves(series, names, num_points=400)["metrics"],
        "problems": [event for event in found if event["level"] != "info"][-200:],
        "nonfinite": nonfinite,
    }


def checkpoints(directory: Path, series: MetricSeries | None = None) -> dict[str, Any]:
    """Return the checkpoints of a run, and the commands to resume, generate, export and verify.

    Args:
        directory: The run directory.
        series: Its metrics, for the training loss of each checkpoint.
    """
    run, found = run_argument(directory), list_checkpoints(directory)
    newest = max((entry.step for entry in found if entry.state != "quarantined"), default=None)
    is_finished = newest is not None and newest == inspect_run(directory).total_steps
    resumed = f"{run} train.num_steps={2 * newest}" if is_finished and newest else run
    steps, losses = (np.array([], np.int64), np.array([])) if series is None else series.points("loss")
    rows: list[dict[str, Any]] = []
    for entry in found:
        values = asdict(entry) | {"path": str(entry.path)}
        values.pop("metadata")
        logged = int(np.searchsorted(steps, entry.step, "right")) - 1
        rows.append(
            {
                **values,
                "fingerprint": str(entry.metadata.get("fingerprint", "")),
                "name": entry.name,
                "loss": None if logged < 0 else float(losses[logged]),
                "resume": resumed if entry.step == newest else shlex.quote(short_path(entry.path.absolute())),
            }
        )
    commands = {
        "generate": f"vorox generate {run} --step STEP",
        "export": f"vorox export {run} --step STEP --to hf --check",
        "verify": f"vorox checkpoints verify {run} --step STEP",
    }
    rules: dict[str, Any] = {}
    with contextlib.suppress(VoroxError):
        rules = recorded_config(directory).checkpoint.model_dump(mode="json")
    return {"checkpoints": rows, "argument": run, "commands": commands, "rules": rules}
