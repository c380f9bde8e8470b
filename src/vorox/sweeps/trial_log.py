"""The trials of a sweep in ``trials.jsonl``: a line when a trial is chosen, and one with its result.

Every line is on disk before anything depends on it, so a killed sweep repeats no finished trial and forgets none that
it has started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vorox.core.config.yaml.reader import Json
from vorox.core.files.disk_errors import disk_error
from vorox.core.files.json_lines import LineFile, encode, read_lines

Outcome = Literal["finished", "stopped", "diverged", "refused"]
"""``stopped``: by ASHA. ``diverged``: not finite. ``refused``: the combination is invalid or does not fit."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial: settings, and the run that trains with them.

    Attributes:
        number: From 0, in the order of the search.
        settings: The searched settings.
        run: Its run directory.
        outcome: How it ended; ``None`` until then.
        step: Step of its last validation that counts.
        loss: Validation loss of that step.
        reason: Why it was refused.
    """

    number: int
    settings: dict[str, Json]
    run: str
    outcome: Outcome | None = None
    step: int | None = None
    loss: float | None = None
    reason: str = ""


class TrialLog:
    """The trials of a sweep, by number.

    Args:
        path: The file; it may not exist.
    """

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)
        self.trials: list[Trial] = []
        for record in read_lines(path):
            self._apply(record)

    def start(self, settings: Mapping[str, Json], run: str) -> Trial:
        """Record a new trial."""
        self._append({"trial": len(self.trials), "settings": dict(settings), "run": run})
        return self.trials[-1]

    def end(self, number: int, outcome: Outcome, step: int | None, loss: float | None, reason: str = "") -> Trial:
        """Record the result of a trial."""
        self._append({"trial": number, "outcome": outcome, "step": step, "loss": loss, "reason": reason})
        return self.trials[number]

    def _append(self, record: dict[str, Any]) -> None:
        error = self._file.append(encode(record)) or self._file.flush(sync=True)
        if error is not None:
            raise disk_error(error, str(self._file.path)) or error
        self._apply(record)

    def _apply(self, record: dict[str, Any]) -> None:
        number = record["trial"]
        if "settings" in record:
            assert number == len(self.trials), "trials are numbered in the order of the file"
            self.trials.append(Trial(number, record["settings"], record["run"]))
        else:
            fields = {key: record[key] for key in ("outcome", "step", "loss", "reason")}
            self.trials[number] = replace(self.trials[number], **fields)
