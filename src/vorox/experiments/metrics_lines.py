"""The lines of ``metrics.jsonl``, written and read: the metrics of one step and attempt.

Other lines of the file open an attempt (``core/files/json_lines.py``). ``dashboard/metrics/blocks.py`` decodes many
lines at once, with the same result.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from vorox.core.files.json_lines import as_number, encode
from vorox.core.files.json_reader import is_step


class MetricsLine(NamedTuple):
    """The metrics of a step.

    Attributes:
        step: Finished steps.
        attempt: Attempt that measured them, from 1.
        time: When they were logged, seconds since the epoch; ``None`` if it is not known.
        values: By name; as read, anything.
    """

    step: int
    attempt: int
    time: float | None
    values: Mapping[str, Any]


def encode_metrics(step: int, attempt: int, values: Mapping[str, float]) -> bytes:
    """Return the line of metrics that are logged now, without its newline."""
    return encode(MetricsLine(step, attempt, round(time.time(), 3), values)._asdict())


def metrics_line(record: Mapping[str, Any]) -> MetricsLine | None:
    """Return the metrics in a decoded line; ``None`` if it is of another kind, or damaged."""
    step, attempt, values = record.get("step"), record.get("attempt"), record.get("values")
    if not is_step(step) or not is_step(attempt) or not isinstance(values, dict):
        return None
    return MetricsLine(step, attempt, as_number(record.get("time")), cast("dict[str, Any]", values))
