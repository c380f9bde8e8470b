"""``run.json``: start, code, machine, notes and outcome of every attempt of a run; written by rank 0."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from vorox.core.config import config_digest
from vorox.core.errors import ConfigError
from vorox.core.files import atomic
from vorox.core.files.json_reader import read_json
from vorox.core.platform.environment import code_record, environment_record, git_record
from vorox.core.redaction import redact_arguments, redact_value
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.records.log import time_stamp
from vorox.records.run_lookup import RUN_FORMAT, refuse_other_format, saved_state, short_path

LAUNCH_NOTE = "launched_at"
"""Note of when the work for an attempt began: its process, before the imports. In seconds since the epoch."""

ENTERED_NOTE = "entered_at"
"""Note of when training was called, after the imports of the program; those of the engine follow. In seconds since the
epoch."""


class RunRecord:
    """The record of a run with this attempt at its end, in memory until ``write``.

    ``failure.json`` of the attempt before moves into its entry.

    Args:
        layout: The paths of the run's files; this process holds its lock.
        config: The configuration of this attempt.
        argv: The command line of this process.

    Attributes:
        attempt: Number of this attempt, from 1.

    Raises:
        ConfigError: The record is damaged.
        MalformedJson: The run has another format.
    """

    def __init__(self, layout: RunLayout, config: RunConfig, argv: Sequence[str]) -> None:
        self._layout = layout
        self._record = _read(layout, config)
        attempts = cast("list[dict[str, Any]]", self._record["attempts"])
        if attempts and attempts[-1]["outcome"] == "running":
            attempts[-1]["outcome"] = "killed"  # this process holds its lock, so it is dead
        failure = _read_json(layout.failure)
        self._has_failure = failure is not None
        if attempts and failure is not None:
            attempts[-1]["failure"] = failure
        self.attempt = len(attempts) + 1
        self._current: dict[str, Any] = {
            "attempt": self.attempt, "started_at": time_stamp(), "ended_at": None, "outcome": "running",
            "argv": redact_arguments(argv), "pid": os.getpid(), "working_directory": str(Path.cwd()),
            "config_digest": config_digest(config), "code": code_record(), "git": git_record(Path.cwd()),
            "environment": redact_value(environment_record()), "notes": {},
        }  # fmt: skip
        attempts.append(self._current)

    def begin(self) -> None:
        """Write the record with this attempt, then remove ``failure.json``, which it holds now."""
        self.write()
        if self._has_failure:
            atomic.remove_file(self._layout.failure)

    def write(self) -> None:
        atomic.write_file(self._layout.record, atomic.pretty_json(self._record))

    def add_notes(self, notes: Mapping[str, Any]) -> None:
        """Add plain values to this attempt, redacted."""
        self._current["notes"].update(redact_value(notes))

    def end(self, outcome: str) -> None:
        """Set how this attempt ended, and when, and write the record."""
        self._current.update(ended_at=time_stamp(), outcome=outcome)
        self.write()


def _read(layout: RunLayout, config: RunConfig) -> dict[str, Any]:
    """Return the record of a run, or a new one if there is none."""
    refuse_other_format(layout.directory)
    record = _read_json(layout.record)
    if record is not None and record.get("format") == RUN_FORMAT and isinstance(record.get("attempts"), list):
        return record
    if layout.record.exists():
        record = shlex.quote(short_path(layout.record))
        raise ConfigError(
            "Record of the run is damaged", where=str(layout.record), saved=saved_state(layout),
            hint="restore the file from a copy of the run; or start a new record, without its earlier attempts: "
            f"mv {record} {record}.damaged, and run the same command again",
        )  # fmt: skip
    return {
        "format": RUN_FORMAT, "run_id": layout.record.parent.name, "config_digest": config_digest(config),
        "created_at": time_stamp(), "attempts": [],
    }  # fmt: skip


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = read_json(path)
    except (FileNotFoundError, ValueError):  # other I/O errors do not mean that the file is damaged
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None
