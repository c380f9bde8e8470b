"""What the page "Re-execution" of a run shows: steps to explain, its parent, statements, and where its time went.

A run directory goes in; plain JSON values come out, by the functions of ``vorox fork``, ``unlearn``, ``audit`` and
``runs time``. Nothing is computed again here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vorox.core.errors import VoroxError
from vorox.core.files.json_lines import last_record
from vorox.core.run_layout import RunLayout
from vorox.records.run_lookup import fork_changes, fork_origin, run_argument, run_id_of
from vorox.training.reports.run_time import account
from vorox.training.reports.statements import statements_of

_EXPLAINED_EVENTS = {"nonfinite_step": "not finite", "loss_spike": "loss spike"}
_MOST_STEPS = 20


def re_execution(directory: Path, events: Sequence[Mapping[str, Any]], runs: Mapping[str, Path]) -> dict[str, Any]:
    """Return the values of the page.

    Args:
        directory: The run directory.
        events: Its events, with ``kind`` and ``step``.
        runs: The directories of all runs of the dashboard, by id.
    """
    statements = [asdict(one) for one in statements_of(directory)]
    return {
        "steps": _steps(directory, events), "fork": _fork(directory, runs), "statements": statements,
        "time": _time(directory), "time_command": f"vorox runs time {run_argument(directory)}",
    }  # fmt: skip


def _steps(directory: Path, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps that were unusual and are still on record, newest first, each with the command."""
    found = {
        event["step"]: _EXPLAINED_EVENTS[event["kind"]]
        for event in events
        if event["kind"] in _EXPLAINED_EVENTS and event["step"] is not None
    }
    newest = last_record(RunLayout(directory).chain) if found else None
    last, run = 0 if newest is None else newest["step"], run_argument(directory)
    return [
        {"step": step, "what": found[step], "command": f"vorox explain {run} --step {step}"}
        for step in sorted((step for step in found if step <= last), reverse=True)[:_MOST_STEPS]
    ]


def _fork(directory: Path, runs: Mapping[str, Path]) -> dict[str, Any] | None:
    origin = fork_origin(directory)
    if not origin:
        return None
    parent_id = str(origin.get("run_id", ""))
    known = next(((run, path) for run, path in runs.items() if run_id_of(path) == parent_id), None)
    return {
        "parent": parent_id, "id": None if known is None else known[0], "step": origin.get("step"),
        "changes": [str(one) for one in fork_changes(origin)],
        "command": ""
        if known is None
        else f"vorox runs compare --paired {run_argument(known[1])} {run_argument(directory)}",
    }  # fmt: skip


def _time(directory: Path) -> dict[str, Any]:
    try:
        found = account(directory)
    except VoroxError as error:
        return {"problem": error.what}
    shares = [{"name": name, "seconds": seconds} for name, seconds in found.stated_seconds.items() if seconds]
    return {
        "wall_seconds": found.wall_seconds, "goodput_fraction": found.goodput_fraction, "classes": shares,
        "notes": list(found.notes), "problem": "",
    }  # fmt: skip
