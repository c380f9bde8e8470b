"""Python runs this at its start where the folder is on its path: rank 1 is slow, and windows are short.

The time is spent outside of collectives, as on a machine whose clocks are throttled.
"""

from __future__ import annotations

import os
import time
from typing import Any

SLEEP_SECONDS = 0.6

if "RANK" in os.environ:
    from vorox.backends.torch_engine.engine import TorchEngine
    from vorox.training.loop import rank_statistics

    rank_statistics.WINDOW_SECONDS, rank_statistics.NUM_WINDOWS = 0.5, 2
    _train_step = TorchEngine.train_step

    def _slowed(self: Any, batch: Any, **arguments: float) -> Any:
        if os.environ["RANK"] == "1":
            time.sleep(SLEEP_SECONDS)
        return _train_step(self, batch, **arguments)

    TorchEngine.train_step = _slowed
