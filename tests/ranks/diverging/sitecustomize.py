"""Python runs this at its start where the folder is on its path: rank 1 then calls another collective in step 9."""

from __future__ import annotations

import os
from typing import Any

if os.environ.get("RANK") == "1":
    import torch

    from vorox.backends.torch_engine.engine import TorchEngine

    _train_step = TorchEngine.train_step

    def train_step(self: Any, batch: Any, **arguments: Any) -> Any:
        if batch.step == 8:
            torch.distributed.all_gather([torch.zeros(3), torch.zeros(3)], torch.zeros(3))
        return _train_step(self, batch, **arguments)

    TorchEngine.train_step = train_step
