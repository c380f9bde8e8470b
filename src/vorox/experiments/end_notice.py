"""Post the end of a run that cannot post it: the watchdog runs this program after a stall or a kill.

In: the run directory, the attempt and the URL, by environment variable. Out: one request like those of ``webhook.py``,
with ``failure.json`` if that attempt left one, and otherwise what is saved.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vorox.core.errors import KILLED_EXIT_CODE
from vorox.core.files.json_reader import read_json
from vorox.core.redaction import hold_secret
from vorox.core.run_layout import RunLayout
from vorox.experiments.webhook import NOTICE_VARIABLE, Webhook
from vorox.records.log import RunLog
from vorox.records.run_lookup import run_argument, saved_state


def failure_of(layout: RunLayout, attempt: int) -> Mapping[str, Any]:
    """Return the recorded failure of an attempt, or that its processes were killed."""
    with contextlib.suppress(OSError, ValueError):
        failure: Mapping[str, Any] = read_json(layout.failure, dict)
        if failure.get("attempt") == attempt:
            return failure
    return {
        "error": "Killed",
        "what": "Killed: the processes of the run ended without an error",
        "where": str(layout.directory),
        "saved": saved_state(layout),
        "hint": f"vorox train --resume {run_argument(layout.directory)}; if memory ran out, the kernel's log names it",
        "exit_code": KILLED_EXIT_CODE,
    }


def main(directory: Path, attempt: int, url: str) -> None:
    """Post the end of an attempt, and wait for it."""
    hold_secret(NOTICE_VARIABLE, url)
    webhook = Webhook(url, directory.name, attempt, ["lifecycle"], RunLog(None))
    webhook.notify_failure(failure_of(RunLayout(directory), attempt))
    webhook.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), os.environ[NOTICE_VARIABLE])
