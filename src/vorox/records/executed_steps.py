"""The attempts of a run, checked against its other records: a lost record never reads as steps that were not executed.

In: ``attempts.bin``, the notes of the attempts in ``run.json``, the replay chain, the checkpoints. Out: the attempts.
One that ``attempts.bin`` lacks comes from ``run.json``, if it ended by itself; a killed one cannot be recovered.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from vorox.core.errors import DataError
from vorox.core.files.json_lines import read_tails, valid_records
from vorox.core.files.json_reader import MAX_STEP, mapping
from vorox.core.run_layout import RunLayout, step_directories
from vorox.records.attempts import Attempt, scan_attempts
from vorox.records.replay_chain import last_following
from vorox.records.run_lookup import notes_of_attempts

STEPS_NOTE = "steps"
"""Note of an attempt once ``attempts.bin`` has its record: ``start_note``; and when it ends: ``end_note``."""

PLAN_NOTE = "plan"
"""Note of the number of events in the plan and its digest, when the attempt starts and when it ends."""


def start_note(attempt: Attempt) -> dict[str, int]:
    """Return the note of an attempt that has a record now."""
    return {
        "number": attempt.number, "start_step": attempt.start_step, "first_position": attempt.first_position,
    }  # fmt: skip


def end_note(attempt: Attempt) -> dict[str, int]:
    """Return the note of an attempt that executes no more steps: all that its record has."""
    return {**start_note(attempt), "last_step": attempt.last_step, "saved_step": attempt.saved_step}


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What the other records of a run prove about its attempts.

    Attributes:
        ended: Attempts that recorded their end, by number.
        started: Numbers of all attempts that recorded that ``attempts.bin`` has them.
        chain_step: The last step in the replay chain; 0 without any.
        saved_steps: The steps of the checkpoints.
    """

    ended: Mapping[int, Attempt]
    started: frozenset[int]
    chain_step: int
    saved_steps: tuple[int, ...]

    @property
    def last_step(self) -> int:
        return max([self.chain_step, *self.saved_steps])


def executed_attempts(run_directory: Path) -> tuple[Attempt, ...]:
    """Return the attempts that started at least one step, in order; a live run may update them meanwhile.

    Raises:
        DataError: Other records prove steps or attempts that the record of attempts lacks.
    """
    evidence = _evidence_of(run_directory)  # first: a live run writes attempts.bin before all of it
    recorded, num_damaged = scan_attempts(run_directory)
    known = {**evidence.ended, **{attempt.number: attempt for attempt in recorded}}
    wrong = [
        number for number, attempt in known.items()
        if not attempt.start_step <= attempt.saved_step <= attempt.last_step <= MAX_STEP
        or evidence.ended.get(number, attempt) != attempt
    ]  # fmt: skip
    found = tuple(known[number] for number in sorted(known))
    lost = sorted(evidence.started - known.keys())
    path = RunLayout(run_directory).attempts
    state = "damaged" if num_damaged or path.exists() else "missing"
    if wrong:
        reason = f"attempt {min(wrong)} is not what {RunLayout.record.name} or its own counters say"
    elif lost:
        reason = f"attempt {lost[0]} is in {RunLayout.record.name} alone, which does not have its last step"
    elif max((attempt.last_step for attempt in found), default=0) < evidence.last_step:
        reason = f"other records of the run have step {evidence.last_step:,}"
    elif num_damaged and not evidence.started:
        reason = f"{num_damaged} of its records cannot be read"
    else:
        return _with_saved(found, evidence.saved_steps)
    raise DataError(
        f"The steps that this run has executed are not known: {path.name} is {state}, and {reason}", where=str(path),
        saved="checkpoints, data plan and caches are not affected",
        hint=f"restore {path.name} from a copy of the run, such as its mirror",
    )  # fmt: skip


def lost_attempts(run_directory: Path) -> str:
    """Describe what ``attempts.bin`` has lost; empty if nothing is."""
    try:
        known = executed_attempts(run_directory)
    except DataError as error:
        return (
            f"{error.what}; training continues, but queries about executed steps fail until it is restored from a copy"
        )
    lost = [attempt.number for attempt in known if attempt.number not in _numbers(run_directory)]
    if not lost:
        return ""
    names = ", ".join(map(str, lost))
    return (
        f"{RunLayout.attempts.name} has lost the attempts {names}; their steps are taken from {RunLayout.record.name}"
    )


def _numbers(run_directory: Path) -> frozenset[int]:
    return frozenset(attempt.number for attempt in scan_attempts(run_directory)[0])


def _with_saved(attempts: tuple[Attempt, ...], saved_steps: tuple[int, ...]) -> tuple[Attempt, ...]:
    """Count a checkpoint that the newest attempt wrote as saved, also if its counter was copied just before."""
    if not attempts:
        return attempts
    newest = attempts[-1]
    own = [step for step in saved_steps if newest.start_step < step <= newest.last_step]
    return (*attempts[:-1], replace(newest, saved_step=max([newest.saved_step, *own])))


def _evidence_of(run_directory: Path) -> _Evidence:
    layout = RunLayout(run_directory)
    parts = (layout.record, layout.chain, layout.checkpoints)
    return _evidence(run_directory, tuple(_signature(path) for path in parts))


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:  # the error is raised where the file is read
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


@functools.lru_cache(maxsize=64)
def _evidence(run_directory: Path, _: tuple[tuple[int, int, int] | None, ...]) -> _Evidence:
    notes = [mapping(notes.get(STEPS_NOTE)) for notes in notes_of_attempts(run_directory)]
    notes = [note for note in notes if type(note.get("number")) is int]
    ended = [attempt for note in notes if (attempt := _ended(note)) is not None]
    return _Evidence(
        {attempt.number: attempt for attempt in ended}, frozenset(note["number"] for note in notes),
        last_chain_step(run_directory), tuple(step_directories(run_directory)),
    )  # fmt: skip


def _ended(note: Mapping[str, Any]) -> Attempt | None:
    values: list[Any] = [note.get(field.name) for field in fields(Attempt)]
    return Attempt(*values) if all(type(value) is int for value in values) else None


def last_chain_step(run_directory: Path) -> int:
    """Return the last step of the replay chain whose previous step is there too; 0 without any.

    A damaged line may hold any number.
    """
    for records in read_tails(RunLayout(run_directory).chain):
        steps = {record["step"] for record in valid_records(records)}
        if last_step := last_following(steps):
            return last_step
    return 0
