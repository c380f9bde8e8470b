"""Python runs this at its start where the folder is on its path: a process of a run then waits in step 9 for the test.

It waits as long as the file that ``TESTS_HOLD`` names is there, and names no other rank.

The save of step 4 is committed by then and the run is not at its end, however fast or busy the machine is.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

HELD_STEP = 8  # from 0

if "RANK" in os.environ:
    engine: Any
    if "backend=torch" in os.environ["TESTS_SETTINGS"]:
        from vorox.backends.torch_engine.engine import TorchEngine as engine
    else:
        from vorox.backends.jax_engine.engine import JaxEngine as engine

    _train_step = engine.train_step

    def _is_held() -> bool:
        try:
            return Path(os.environ["TESTS_HOLD"]).read_text() in {"", os.environ["RANK"]}
        except FileNotFoundError:
            return False

    def _held(self: Any, batch: Any, **arguments: float) -> Any:
        while batch.step == HELD_STEP and _is_held():
            time.sleep(0.01)
        return _train_step(self, batch, **arguments)

    engine.train_step = _held
