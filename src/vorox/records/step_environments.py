"""The environments that a run's steps were computed in: engine, machine and number of processes, by step.

In: the notes of the attempts in ``run.json``. Out: a ``StepEnvironments``. A state where one changes is the last that
both sides of the change can start from, so retention keeps its checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vorox.core.files.json_reader import mapping
from vorox.records.executed_steps import STEPS_NOTE
from vorox.records.run_lookup import notes_of_attempts


@dataclass(frozen=True, slots=True)
class StepEnvironments:
    """The environment of every step.

    Attributes:
        by_start: The environment of the steps after a state, by that state, ascending; neighbours differ.
    """

    by_start: Mapping[int, Mapping[str, Any]]

    @classmethod
    def of_run(cls, run_directory: Path) -> StepEnvironments:
        """Read what the attempts of a run recorded; a later attempt replaces the steps that it executed again."""
        found = dict[int, Mapping[str, Any]]()
        for notes in notes_of_attempts(run_directory):
            start, environment = mapping(notes.get(STEPS_NOTE)).get("start_step"), mapping(notes.get("environment"))
            if type(start) is not int or not environment:
                continue  # it executed no step
            found = {state: before for state, before in found.items() if state < start}
            if not found or found[max(found)] != environment:
                found[start] = environment
        return cls(found)

    @property
    def changes(self) -> frozenset[int]:
        """The states after which another environment computed."""
        return frozenset(self.by_start) - {min(self.by_start, default=0)}

    def at(self, step: int) -> Mapping[str, Any]:
        """Return the environment of a step (from 1); empty if none is recorded."""
        start = max((state for state in self.by_start if state < step), default=None)
        return {} if start is None else self.by_start[start]

    def num_processes(self, step: int) -> int | None:
        """Return the number of processes that computed a step; ``None`` if it is not recorded."""
        environment = self.at(step)
        count = environment.get("num_processes", 1 if environment else None)  # a process alone does not count itself
        return count if type(count) is int else None

    def spans(self, first_state: int, last_state: int) -> list[tuple[int, int, int | None]]:
        """Divide the steps between two states by number of processes: first state, last state, processes."""
        inside = [state for state in self.by_start if first_state < state < last_state]
        found: list[tuple[int, int, int | None]] = []
        for start, end in zip([first_state, *inside], [*inside, last_state], strict=True):
            count = self.num_processes(start + 1)
            if found and found[-1][2] == count:
                found[-1] = (found[-1][0], end, count)
            else:
                found.append((start, end, count))
        return found
