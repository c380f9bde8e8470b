"""Verdicts on a run: what replays, parity and audits found, one line each in ``verdicts.jsonl``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from vorox.core.files.json_lines import LineFile, encode, read_lines
from vorox.core.run_layout import RunLayout
from vorox.records.log import time_stamp

Kind = Literal["replay", "parity", "audit"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one check of a run.

    Attributes:
        kind: The command that checked it.
        passed: Whether it found no difference.
        text: What it found.
        time: When, in UTC.
    """

    kind: str
    passed: bool
    text: str
    time: str


def record_verdict(run_directory: Path, kind: Kind, *, passed: bool, text: str) -> OSError | None:
    """Append a verdict to those of a run. Returns the error where the run cannot be written, for example a copy."""
    verdict = Verdict(kind, passed, text, time_stamp())
    return LineFile(RunLayout(run_directory).verdicts).append(encode(asdict(verdict)))


def read_verdicts(run_directory: Path) -> list[Verdict]:
    """Return the verdicts on a run, oldest first."""
    found: list[Verdict] = []
    for record in read_lines(RunLayout(run_directory).verdicts):
        match record:
            case {"kind": str(kind), "passed": bool(passed), "text": str(text), "time": str(time)}:
                found.append(Verdict(kind, passed, text, time))
    return found
