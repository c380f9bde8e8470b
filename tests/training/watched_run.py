"""Trains the tiny run of a configuration file under the numpy engine with a fault at step 6: a process of its own."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

import vorox.data.order.loader
import vorox.training.checkpoints.writer
import vorox.training.steps.evaluate
from tiny_runs import at_step, run, use_numpy_engine
from vorox.cli.failure import report_failure
from vorox.core.config import load_config
from vorox.data.storage.stalls import track_stall

STEP, FOREVER_SECONDS, SLOW_SECONDS = 6, 600.0, 12.0


def stuck() -> None:
    time.sleep(FOREVER_SECONDS)


def slow() -> None:
    """A store that does not answer, as storage reports it."""
    with track_stall("s3://bucket/text") as stall:
        stall.report("no byte for 3 s", failed=False)
        time.sleep(SLOW_SECONDS)


def main() -> int:
    fault, patch = sys.argv[2], pytest.MonkeyPatch()
    use_numpy_engine(patch)
    if fault == "step":
        at_step(patch, STEP, stuck)
    reader: Any = vorox.data.order.loader._BatchReader
    original = reader.read

    def read(self: Any, step: int) -> Any:
        if step + 1 == STEP and fault in {"data", "slow"}:
            (stuck if fault == "data" else slow)()
        return original(self, step)

    patch.setattr(reader, "read", read)
    original_run = vorox.training.steps.evaluate.Evaluations.run

    def validate(self: Any, *arguments: Any) -> Any:
        if fault == "validation":
            stuck()
        if fault == "slow":
            patch.setattr(vorox.training.steps.evaluate.Evaluations, "run", original_run)  # once
            time.sleep(SLOW_SECONDS)
        return original_run(self, *arguments)

    patch.setattr(vorox.training.steps.evaluate.Evaluations, "run", validate)
    commit: Any = vorox.training.checkpoints.writer.commit_checkpoint

    def save(*arguments: Any, **options: Any) -> Any:
        if fault == "save" and arguments[0].name != "step-00000004":
            stuck()
        return commit(*arguments, **options)

    patch.setattr(vorox.training.checkpoints.writer, "commit_checkpoint", save)
    try:
        run(load_config(Path(sys.argv[1])))
    except BaseException as error:
        return report_failure(error, sys.argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
