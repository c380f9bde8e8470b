"""Metrics of runs in the text format of Prometheus.

Rows of ``RunIndex`` go in; the body of ``GET /metrics`` comes out: gauges with the label ``run``. A run without a value
has no sample of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from vorox.experiments.artifacts import RunState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GAUGES = (
    ("step", "vorox_step", "Steps finished."),
    ("total_steps", "vorox_planned_steps", "Length of the run in steps."),
    ("tokens", "vorox_tokens", "Positions processed since the start of the run."),
    ("loss", "vorox_loss_nats", "Newest training loss, per target token or preference pair."),
    ("eval_loss", "vorox_eval_loss_nats", "Newest validation loss, per target token or preference pair."),
    ("tokens_per_second", "vorox_tokens_per_second", "Throughput at the newest logged step, over all ranks."),
    ("mfu_fraction", "vorox_mfu_ratio", "Model FLOP utilization at the newest logged step, from 0 to 1."),
    ("num_checkpoints", "vorox_checkpoints", "Checkpoints on disk, without quarantined ones."),
    ("checkpoint_step", "vorox_checkpoint_step", "Step of the newest checkpoint."),
    ("attempts", "vorox_attempts", "Starts and resumes."),
)
"""(key of a row, name, help)."""
_AGE = ("vorox_last_step_age_seconds", "Time since the newest logged step (every log.every_steps steps).")
_STATE = ("vorox_run_state", "1 for the state of the run, 0 for all others.")


def exposition(rows: Sequence[Mapping[str, Any]], now: float) -> str:
    """Return all metrics.

    Args:
        rows: Rows of ``RunIndex``.
        now: Seconds since the epoch.
    """
    lines: list[str] = []
    for key, name, description in _GAUGES:
        lines += _gauge(name, description, (({"run": row["id"]}, row.get(key)) for row in rows))
    ages = (
        ({"run": row["id"]}, None if at is None else max(0.0, now - at)) for row in rows for at in [row["logged_at"]]
    )
    lines += _gauge(*_AGE, ages)
    states = (({"run": row["id"], "state": state}, int(row["state"] == state))
              for row in rows for state in get_args(RunState))  # fmt: skip
    lines += _gauge(*_STATE, states)
    return "".join(f"{line}\n" for line in lines)


def _gauge(name: str, description: str, samples: Iterable[tuple[Mapping[str, str], float | None]]) -> list[str]:
    """Return the lines of a metric."""
    lines = [f"# HELP {name} {description}", f"# TYPE {name} gauge"]
    for labels, value in samples:
        if value is not None:
            pairs = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
            lines.append(f"{name}{{{pairs}}} {_number(value)}")
    return lines


def _escape(text: str) -> str:
    text = text.encode(errors="replace").decode()  # a name need not be UTF-8
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)
