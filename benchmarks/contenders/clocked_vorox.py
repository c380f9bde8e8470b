"""``vorox`` with a clock of its steps: clocked_vorox.py REPORT WORDS..."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from step_clock import StepClock

from vorox.cli import main
from vorox.training.loop.observer import SpeedMeter


def run() -> int:
    report, *words = sys.argv[1:]
    clock, original = StepClock.from_environment(), SpeedMeter.count

    def count(speed: SpeedMeter, *arguments: Any) -> None:
        clock.mark()
        original(speed, *arguments)

    SpeedMeter.count = count
    code = main(words)
    if code == 0:
        clock.write(Path(report))
    return code


if __name__ == "__main__":
    sys.exit(run())
