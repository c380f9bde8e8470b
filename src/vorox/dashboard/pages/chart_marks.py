"""What charts mark: saves, resumes, spikes, and changes of mixture, data and settings.

The events of a run, its plan and its recorded configurations go in; labels by step come out. Changes of the data are
read from the plan, which has their exact positions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from vorox.core.errors import VoroxError
from vorox.core.run_layout import RunLayout
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_state import PlanState

_MARKED_EVENTS = {
    "checkpoint_saved": "save",
    "validation": "validation",
    "resumed": "resume",
    "nonfinite_step": "non-finite step",
    "loss_spike": "loss spike",
    "loss_spike_rollback": "rollback",
    "finished": "end",
}
"""Events that are marked at their step, with their label."""
_MAX_GROWTH_MARKS = 200

Mark = dict[str, Any]


def chart_marks(directory: Path, events: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Return the marks of a run: ``step`` and ``label`` of each.

    Args:
        directory: The run directory.
        events: Its events, with ``kind`` and ``step``.
    """
    found = [
        {"step": event["step"], "label": _MARKED_EVENTS[event["kind"]]}
        for event in events
        if event["kind"] in _MARKED_EVENTS and event["step"] is not None
    ]
    layout = RunLayout(directory)
    steps = sorted(layout.configs_by_step())
    found += [{"step": step, "label": "settings change"} for step in steps[1:]]  # the first is the start
    try:
        status = layout.plan.stat()
        found += _marks_of_file(layout.plan, status.st_size, status.st_mtime_ns)
    except (OSError, VoroxError):
        pass  # there is no plan yet, or the data page names its damage
    return found


@functools.lru_cache(maxsize=16)
def _marks_of_file(path: Path, size: int, changed_ns: int) -> tuple[Mark, ...]:  # noqa: ARG001 - the key of the cache
    return tuple(plan_marks(DataPlan.open(path).state))


def plan_marks(state: PlanState) -> Iterator[Mark]:
    """Yield the first step of every later stage of the mixture, and of rows that joined the plan after its start."""
    sizes = state.start.batch_sizes
    for stage in sizes.stages[1:]:
        yield {"step": stage.start_step + 1, "label": "batch size change"}
    for before, stage in pairwise(state.stages):
        if not stage.is_like(before):
            is_length = stage.row_pieces != before.row_pieces
            label = "row length change" if is_length else "mixture change"
            yield {"step": sizes.step_at(stage.start_position) + 1, "label": label}
    for source, segments in enumerate(state.segments):
        known = max((part.end for part in segments[0].ranges), default=0) if segments else 0
        for segment in segments[1 : _MAX_GROWTH_MARKS + 1]:
            newest = max((part.end for part in segment.ranges), default=0)
            if newest > known:
                draw = np.array([segment.start_draw], np.int64)
                position = int(state.mixture.invert(np.array([source], np.int32), draw)[0])
                yield {"step": sizes.step_at(position) + 1, "label": "growth"}
            known = max(known, newest)
