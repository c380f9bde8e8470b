"""A clock of training steps, the same for all contenders of transformers_loop.py."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path


class StepClock:
    """When steps ended. On a GPU, the device has finished the first step, the last of the warm-up and the last of all.

    Args:
        started_at: Start of the process, by ``time.time()``.
        warmup_steps: Steps before the measurement.
        last_step: The last step of the run.
        device: ``cpu`` or ``cuda``.
    """

    def __init__(self, started_at: float, warmup_steps: int, last_step: int, device: str) -> None:
        self._started_at, self._device = started_at, device
        self._kept = (1, warmup_steps, last_step)
        self._marks: dict[int, tuple[float, float]] = {}
        self._step = 0

    def mark(self) -> None:
        """A step has ended."""
        self._step += 1
        if self._step in self._kept:
            if self._device == "cuda":
                import torch

                torch.cuda.synchronize()
            self._marks[self._step] = time.time(), time.process_time()

    def write(self, path: Path) -> None:
        """Write the figures as JSON."""
        first, warmup, last = (self._marks[step] for step in self._kept)
        steps = self._kept[2] - self._kept[1]
        per_kib = 1 if sys.platform == "darwin" else 1024
        found = {
            "first_step_seconds": first[0] - self._started_at,
            "step_seconds": (last[0] - warmup[0]) / steps,
            "step_cpu_seconds": (last[1] - warmup[1]) / steps,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * per_kib,
        }
        if self._device == "cuda":
            import torch

            found["peak_bytes"] = torch.cuda.max_memory_allocated()
        path.write_text(json.dumps(found), encoding="utf-8")

    @classmethod
    def from_environment(cls) -> StepClock:
        """Return the clock that transformers_loop.py describes in STEP_CLOCK."""
        return cls(**json.loads(os.environ["STEP_CLOCK"]))
