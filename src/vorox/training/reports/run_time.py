"""Where the time of a run went: every second of its attempts and between them, in classes that sum to the wall time.

In: ``run.json`` (start and end of every attempt), ``times.bin`` (phases of the loop by step), ``attempts.bin`` (which
steps were lost), ``events.jsonl`` (building of data, saves). Out: a ``RunTime``. Nothing is written.

Inside an attempt, a monotonic clock has measured; the wall clock counts between attempts only. What no record explains
is ``unknown``, never zero and never guessed.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.core.files.file_holder import lock_holder
from vorox.core.files.json_lines import as_number, read_lines
from vorox.core.files.json_reader import mapping
from vorox.core.run_layout import RunLayout
from vorox.records.attempts import Lineage, lineage
from vorox.records.executed_steps import STEPS_NOTE, executed_attempts
from vorox.records.log import DATA_READY, SAVED
from vorox.records.run_lookup import INHERITED, read_run_record, run_argument
from vorox.records.run_record import LAUNCH_NOTE
from vorox.records.step_times import PHASES, Phase, read_step_times

TimeClass = Literal[
    "compute", "compile", "data", "save", "evaluation", "redone", "waiting", "restart", "absent", "unknown"
]
CLASSES: tuple[TimeClass, ...] = get_args(TimeClass)

_CLASS_OF: Mapping[Phase, TimeClass] = {
    "start": "restart", "compile": "compile", "data": "data", "step": "compute", "sync": "waiting",
    "settle": "compute", "save": "save", "validation": "evaluation", "end": "save",
}  # fmt: skip
_REPEATED: tuple[Phase, ...] = ("step", "settle", "data", "sync", "validation")
"""Phases of a lost step that the attempt which does it again repeats."""
_STEP = PHASES.index("step")
_CLOCK_SECONDS = 1.0
"""A smaller difference between wall clock and monotonic clock is not reported."""
_GAP_SECONDS = 0.5
_ALIVE_SECONDS = 2.0
"""A process notes twice a second that it is alive."""
_MOST_SECONDS = 1e9
_UNKNOWN_FRACTION = 0.01
"""With a larger share of unknown time, no goodput is stated."""


@dataclass(frozen=True, slots=True)
class AttemptTime:
    """The time of one attempt.

    Attributes:
        number: Number of the attempt, from 1.
        outcome: How it ended; ``running`` if it is alive.
        started_at: When its process started, in seconds since the epoch.
        seconds: Wall seconds by class, all but ``absent``.
        start_seconds: Of these, the seconds until its first step, and what compiling took.
        first_step: The first step that it began; ``None`` if it began none.
        last_step: The last one.
        num_lost_steps: Steps of these that a later attempt had to do again.
        is_saved: Whether a checkpoint holds all its steps, and it ended in no further one.
    """

    number: int
    outcome: str
    started_at: float
    seconds: dict[TimeClass, float]
    start_seconds: float = 0.0
    first_step: int | None = None
    last_step: int | None = None
    num_lost_steps: int = 0
    is_saved: bool = False

    @property
    def wall_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def ended_at(self) -> float:
        return self.started_at + self.wall_seconds


@dataclass(frozen=True, slots=True)
class StepDurations:
    """What each step took, of every attempt that has done it; one element per step and attempt.

    Attributes:
        attempt: Numbers of the attempts.
        step: The steps.
        train: Seconds of the step, its batch, its waits and the validation after it, without what compiling took.
        compute: Seconds of these in computing.
        save: Seconds in which a save held up training.
    """

    attempt: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    train: npt.NDArray[np.float64]
    compute: npt.NDArray[np.float64]
    save: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RunTime:
    """The time of a run, from the start of its first attempt to the end of its last, or to now.

    Attributes:
        attempts: Its attempts, in order.
        absent_seconds: The time between every attempt and the next.
        is_running: Whether a process trains it now.
        steps: What each step took.
        save_steps: The steps of committed checkpoints, by attempt.
        write_seconds: Mean time from the state of a checkpoint to its commit; ``None`` if there is none.
        notes: What is uncertain, in sentences.
    """

    attempts: tuple[AttemptTime, ...]
    absent_seconds: tuple[float, ...]
    is_running: bool
    steps: StepDurations
    save_steps: Mapping[int, tuple[int, ...]]
    write_seconds: float | None
    notes: tuple[str, ...]

    @property
    def seconds(self) -> dict[TimeClass, float]:
        """Wall seconds of the run by class; they sum to ``wall_seconds``."""
        found = dict.fromkeys(CLASSES, 0.0)
        for attempt in self.attempts:
            for name, spent in attempt.seconds.items():
                found[name] += spent
        found["absent"] = sum(self.absent_seconds)
        return found

    @property
    def stated_seconds(self) -> dict[TimeClass, float | None]:
        """Return ``seconds`` with ``None`` for a class without any, if unknown time may belong to it."""
        seconds, is_known = self.seconds, self.goodput_fraction is not None
        always = {"absent", "unknown"}
        return {name: spent if is_known or spent or name in always else None for name, spent in seconds.items()}

    @property
    def wall_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput_fraction(self) -> float | None:
        """The share of the wall time that computed steps which count; ``None`` if too much of it is unknown."""
        seconds, wall = self.seconds, self.wall_seconds
        return seconds["compute"] / wall if wall > 0 and seconds["unknown"] <= _UNKNOWN_FRACTION * wall else None

    @property
    def num_unsaved_steps(self) -> int:
        """Steps that a resume of this run would do again, as far as it is known; 0 while it trains."""
        last = next((attempt for attempt in reversed(self.attempts) if attempt.last_step is not None), None)
        if self.is_running or last is None or last.is_saved or last.last_step is None or last.first_step is None:
            return 0
        saved = self.save_steps.get(last.number, ())
        return last.last_step - max([last.first_step - 1, *saved])


def account(run_directory: Path, now: float | None = None) -> RunTime:
    """Return the time of a run; of a live one, up to ``now`` (seconds since the epoch).

    Raises:
        DataError: ``run.json`` is missing or has no attempt, or the record of executed steps is damaged.
        MalformedJson: ``run.json`` or ``times.bin`` is damaged.
    """
    layout = RunLayout(run_directory)
    try:
        recorded: list[dict[str, Any]] = read_run_record(run_directory)["attempts"]
    except FileNotFoundError:
        recorded = []
    own = [(index, record) for index, record in enumerate(recorded) if not record.get(INHERITED)]
    if not own:
        is_fork = bool(recorded)
        raise DataError(
            "No attempt of this run is on record, so its time is not known", where=str(layout.record),
            hint=f"train it: vorox train --resume {run_argument(run_directory)}" if is_fork else
            "restore run.json from a copy of the run", saved="nothing was written",
        )  # fmt: skip
    is_running = lock_holder(layout.lock) is not None
    reader = _Reader(run_directory, time.time() if now is None else now, is_running)
    if len(own) < len(recorded):
        reader.notes.append("The run is a fork: the time of its parent's steps is not counted")
    attempts = [reader.attempt(index, record, is_last=record is recorded[-1]) for index, record in own]
    absent = [reader.absence(one, following) for one, following in itertools.pairwise(attempts)]
    return RunTime(
        tuple(attempts), tuple(absent), is_running, reader.durations(), reader.events.save_steps,
        reader.events.write_seconds, tuple(reader.notes),
    )  # fmt: skip


@dataclass(slots=True)
class _Events:
    """What the log says about the attempts, by number."""

    last_at: dict[int, float] = field(default_factory=dict[int, float])
    data_seconds: dict[int, float] = field(default_factory=dict[int, float])
    save_steps: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    write_seconds: float | None = None

    @classmethod
    def read(cls, run_directory: Path) -> _Events:
        found, written = cls(), list[float]()
        for event in read_lines(RunLayout(run_directory).events):
            number, at = event.get("attempt"), _timestamp(event.get("time"))
            if not isinstance(number, int) or at is None:
                continue
            found.last_at[number] = max(at, found.last_at.get(number, at))
            fields = mapping(event.get("fields"))
            seconds, step = as_number(fields.get("seconds")), fields.get("step")
            if seconds is None or not 0 <= seconds <= _MOST_SECONDS:
                continue
            if event.get("kind") == DATA_READY:
                found.data_seconds[number] = seconds
            elif event.get("kind") == SAVED and isinstance(step, int):
                found.save_steps[number] = (*found.save_steps.get(number, ()), step)
                written.append(seconds)
        found.write_seconds = sum(written) / len(written) if written else None
        return found


@dataclass(frozen=True, slots=True)
class _Fate:
    """What became of the steps of an attempt.

    Attributes:
        start_step: Finished steps at its start.
        last_step: The last step that it finished.
        kept_step: The last one that no later attempt did again.
        saved_step: The last one that it saved.
        is_followed: Whether a later attempt has done steps, so that a step which this one left half done was lost.
    """

    start_step: int
    last_step: int = 0
    kept_step: int = 0
    saved_step: int = 0
    is_followed: bool = False

    @classmethod
    def of_line(cls, line: Lineage) -> _Fate:
        attempt = line.attempt
        kept = attempt.last_step if line.is_newest else line.kept_until
        return cls(attempt.start_step, attempt.last_step, kept, attempt.saved_step, not line.is_newest)


class _Reader:
    """Reads the records of a run once, and then attempt after attempt."""

    def __init__(self, run_directory: Path, now: float, is_running: bool) -> None:
        self._directory, self._now, self._is_running = run_directory, now, is_running
        self._rows = _valid_rows(read_step_times(run_directory))
        self._lines = {line.attempt.number: line for line in lineage(executed_attempts(run_directory))}
        self.events, self.notes = _Events.read(run_directory), list[str]()
        self._durations = list[StepDurations]()

    def attempt(self, index: int, record: Mapping[str, Any], *, is_last: bool) -> AttemptTime:
        """Return the time of an attempt of ``run.json``."""
        number, notes = index + 1, mapping(record.get("notes"))
        launched, outcome = as_number(notes.get(LAUNCH_NOTE)), str(record.get("outcome"))
        is_alive = is_last and self._is_running
        if outcome == "running" and not is_alive:
            outcome = "killed"
        recorded = _timestamp(record.get("started_at"))
        started = launched if launched is not None and 0 < launched < math.inf else recorded
        rows = self._rows[self._rows["attempt"] == number]
        ended = self._now if is_alive else _timestamp(record.get("ended_at"))
        if started is None:
            self.notes.append(f"The start of attempt {number} is not on record; its time is missing")
            return AttemptTime(number, outcome, ended or 0.0, {})
        line = self._lines.get(_steps_number(notes, number))
        if len(rows):
            fate = _Fate(int(rows["step"][0])) if line is None else _Fate.of_line(line)
            return self._with_rows(AttemptTime(number, outcome, started, {}), fate, rows, ended)
        end = ended if ended is not None else self.events.last_at.get(number, started)
        if end < started:
            self._note_clock(f"during attempt {number}", started - end)
        spent = max(0.0, end - started)
        if launched is None or (line is not None and line.attempt.last_step > line.attempt.start_step):
            self.notes.append(
                f"No times of steps are on record for attempt {number}: an earlier version wrote it, or "
                f"{RunLayout.times.name} is lost"
            )
            return AttemptTime(number, outcome, started, {"unknown": spent})
        data = min(self.events.data_seconds.get(number, 0.0), spent)
        return AttemptTime(number, outcome, started, {"data": data, "restart": spent - data}, start_seconds=spent)

    def _with_rows(self, attempt: AttemptTime, fate: _Fate, rows: npt.NDArray[Any], ended: float | None) -> AttemptTime:
        """Add what the rows of an attempt say to its head."""
        number, spent = attempt.number, rows["seconds"].astype(np.float64)
        before = float(rows["entered_at"][0]) - float(spent[0].sum()) - attempt.started_at
        if before < -_CLOCK_SECONDS:
            self._note_clock(f"at the start of attempt {number}", -before)
        before = max(0.0, before)
        unknown = self._gaps(number, rows, spent) + self._add_tail(attempt, rows, spent, ended)
        steps = rows["step"].astype(np.int64)
        is_step = steps > fate.start_step
        compiling = _split_compilation(spent, is_step)
        is_saved = fate.saved_step >= fate.last_step and not spent[steps > fate.last_step, _STEP].any()
        done = is_step & (steps <= fate.last_step)
        durations = _durations(number, steps, spent, done)
        durations.save[durations.step > fate.saved_step] = 0.0  # it died in the last one, which took longer
        self._durations.append(durations)
        redone = _take_lost(spent, steps, is_step, fate)
        data = min(self.events.data_seconds.get(number, 0.0), before)
        seconds = dict.fromkeys((name for name in CLASSES if name != "absent"), 0.0)
        seconds.update(data=data, restart=before - data, compile=compiling, redone=redone, unknown=unknown)
        for phase, starting, stepping in zip(
            PHASES, spent[~is_step].sum(axis=0), spent[is_step].sum(axis=0), strict=True
        ):
            name = _CLASS_OF[phase]
            seconds[name] += float(stepping)
            seconds[name if name in {"evaluation", "save"} else "restart"] += float(starting)
        attempt = replace(attempt, seconds=seconds, is_saved=is_saved)
        attempt = replace(attempt, start_seconds=before + float(spent[~is_step].sum()) + compiling)
        if not is_step.any():
            return attempt
        return replace(
            attempt, first_step=fate.start_step + 1, last_step=max(fate.start_step + 1, fate.last_step),
            num_lost_steps=max(0, fate.last_step - fate.kept_step),
        )  # fmt: skip

    def _gaps(self, number: int, rows: npt.NDArray[Any], spent: npt.NDArray[np.float64]) -> float:
        """Return the wall time between rows that none of them has; report a wall clock that was changed."""
        gaps = np.diff(rows["entered_at"]) - spent[1:].sum(axis=1)
        is_missing = np.diff(rows["step"].astype(np.int64)) != 1
        if gaps.sum() < -_CLOCK_SECONDS and gaps.min() < -_CLOCK_SECONDS:
            self._note_clock(f"during attempt {number}", -float(gaps[gaps < -_CLOCK_SECONDS].sum()))
        counted = float(gaps[(gaps > _GAP_SECONDS) | (is_missing & (gaps > 0))].sum())
        if counted > _CLOCK_SECONDS:
            self.notes.append(
                f"{counted:,.0f} s of attempt {number} are in no row of {RunLayout.times.name}: the machine slept, its "
                "clock was set forward, or the file is damaged"
            )
        return counted

    def _add_tail(
        self, attempt: AttemptTime, rows: npt.NDArray[Any], spent: npt.NDArray[np.float64], ended: float | None
    ) -> float:
        """Add the time since the last phase began to it; return what nothing shows the process to have lived."""
        phase, alive = int(rows["phase"][-1]), float(rows["alive_seconds"][-1])
        total = alive if ended is None else max(0.0, ended - float(rows["entered_at"][-1]))
        is_alive = attempt.outcome == "running" and total <= alive + _ALIVE_SECONDS
        known = total if PHASES[phase] == "end" or is_alive else min(alive, total)
        spent[-1, phase] += known
        return total - known

    def absence(self, one: AttemptTime, following: AttemptTime) -> float:
        """Return the time between two attempts."""
        seconds = following.started_at - one.ended_at
        if seconds < -_CLOCK_SECONDS:
            self._note_clock(f"between the attempts {one.number} and {following.number}", -seconds)
        return max(0.0, seconds)

    def durations(self) -> StepDurations:
        """Return what each step took, of all attempts so far."""
        nothing = np.zeros(0)
        parts = self._durations or [StepDurations(nothing.astype(int), nothing.astype(int), nothing, nothing, nothing)]
        return StepDurations(
            *(np.concatenate([part.attempt for part in parts]), np.concatenate([part.step for part in parts])),
            *(np.concatenate([getattr(part, name) for part in parts]) for name in ("train", "compute", "save")),
        )

    def _note_clock(self, when: str, seconds: float) -> None:
        self.notes.append(
            f"The wall clock was set back by {seconds:,.0f} s {when}; times between attempts are not exact there"
        )


def _steps_number(notes: Mapping[str, Any], number: int) -> int:
    """Return the number of an attempt in ``attempts.bin``."""
    found = mapping(notes.get(STEPS_NOTE)).get("number")
    return found if isinstance(found, int) else number


def _valid_rows(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the rows that can be true; the time of the others is unknown."""
    numbers = np.column_stack([rows["seconds"].astype(np.float64), rows["alive_seconds"], rows["entered_at"]])
    is_possible = np.isfinite(numbers).all(axis=1) & (numbers >= 0).all(axis=1) & (numbers[:, -1] > 0)
    return rows[is_possible & (numbers[:, :-1] <= _MOST_SECONDS).all(axis=1) & (rows["phase"] < len(PHASES))]


def _split_compilation(spent: npt.NDArray[np.float64], is_step: npt.NDArray[np.bool_]) -> float:
    """Leave of steps that compiled what a usual step takes, as such; return what they took longer."""
    compiled = PHASES.index("compile")
    usual = spent[is_step & (spent[:, compiled] == 0) & (spent[:, _STEP] > 0), _STEP]
    most = float(np.median(usual)) if len(usual) else 0.0
    computed = np.where(is_step, np.minimum(spent[:, compiled], most), 0.0)
    extra = float((spent[:, compiled] - computed)[is_step].sum())
    spent[:, _STEP] += computed
    spent[is_step, compiled] = 0.0
    return extra


def _take_lost(
    spent: npt.NDArray[np.float64], steps: npt.NDArray[np.int64], is_step: npt.NDArray[np.bool_], fate: _Fate
) -> float:
    """Take the time of lost steps out of their rows and return it; of a step left half done, only its computing."""
    if not fate.is_followed:
        return 0.0
    is_lost = is_step & (steps > fate.kept_step)
    repeated = np.isin(PHASES, _REPEATED)
    computing = np.array([_CLASS_OF[phase] == "compute" for phase in PHASES])
    cells = np.outer(is_lost & (steps <= fate.last_step), repeated) | np.outer(
        is_lost & (steps > fate.last_step), computing
    )
    lost = float(spent[cells].sum())
    spent[cells] = 0.0
    return lost


def _durations(
    number: int, steps: npt.NDArray[np.int64], spent: npt.NDArray[np.float64], is_step: npt.NDArray[np.bool_]
) -> StepDurations:
    def columns(phases: Sequence[Phase]) -> npt.NDArray[np.float64]:
        return spent[is_step][:, [PHASES.index(phase) for phase in phases]].sum(axis=1)

    return StepDurations(
        np.full(int(is_step.sum()), number, np.int64), steps[is_step], columns(_REPEATED), columns(("step", "settle")),
        columns(("save",)),
    )  # fmt: skip


def _timestamp(value: object) -> float | None:
    """Return a time of the record in seconds since the epoch; ``None`` if it is damaged."""
    try:
        return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else None
    except (ValueError, OverflowError):
        return None
