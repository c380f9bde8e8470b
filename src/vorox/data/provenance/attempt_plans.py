"""The plan that each attempt of a run trained by.

``plan.jsonl`` only grows. A resume with another mixture, or over larger sources, appends events that replace positions
which an abandoned attempt has read already. What that attempt read there is decided by the events before them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from vorox.core.errors import DataError
from vorox.core.files.chained_log import HashChainedLog
from vorox.core.files.json_reader import mapping
from vorox.core.run_layout import RunLayout
from vorox.data.order.plan import DataPlan
from vorox.records.attempts import StepInterval
from vorox.records.executed_steps import PLAN_NOTE, STEPS_NOTE
from vorox.records.run_lookup import notes_of_attempts


def abandoned_plans(
    run_directory: Path, plan: DataPlan, history: Sequence[StepInterval]
) -> list[tuple[DataPlan, tuple[StepInterval, ...]]]:
    """Return the earlier states of a plan by which steps were executed that it has other rows for now.

    Args:
        run_directory: The run.
        plan: Its plan as it is now.
        history: All steps that its attempts executed.

    Returns:
        Each earlier state, with the rolled back steps that it has the rows of. The plan as it is now has all others.

    Raises:
        DataError: ``run.json`` has lost which events an attempt trained by.
    """
    rolled_back = [part for part in history if part.outcome == "rolled_back"]
    replacing = _replacing_events(plan) if rolled_back else []
    if not replacing:
        return []
    known = _known_events(run_directory)
    found: dict[int, list[StepInterval]] = {}
    for part in rolled_back:
        if part.attempt not in known:
            raise DataError(
                f"The rows of attempt {part.attempt} are not known: {RunLayout.record.name} has lost which events of "
                "the data plan it trained by, and a later attempt has changed the plan",
                where=str(RunLayout(run_directory).record), saved="checkpoints, data plan and caches are not affected",
                hint=f"restore {RunLayout.record.name} from a copy of the run, such as its mirror",
            )  # fmt: skip
        num_events = next((number for number in replacing if number >= known[part.attempt]), None)
        if num_events is not None:
            found.setdefault(num_events, []).append(part)
    return [(plan.as_of(number), tuple(parts)) for number, parts in sorted(found.items())]


def _replacing_events(plan: DataPlan) -> list[int]:
    """Return the indexes of the events by which a resume replaces rows at positions that the plan covers already.

    A running attempt appends only what covers further positions, or moves no row.
    """
    events = HashChainedLog(plan.path).read()[0][: plan.num_events]  # a live run may be appending
    return [
        index for index, event in enumerate(events)
        if event["kind"] in {"cut", "mask"} or (event["kind"] == "stage" and event["reason"] == "changed")
    ]  # fmt: skip


def _known_events(run_directory: Path) -> Mapping[int, int]:
    """Return the number of events that each attempt had at its end, or at its start if it was killed."""
    found: dict[int, int] = {}
    for notes in notes_of_attempts(run_directory):
        number, events = mapping(notes.get(STEPS_NOTE)).get("number"), mapping(notes.get(PLAN_NOTE)).get("events")
        if type(number) is int and type(events) is int:
            found[number] = events
    return found
