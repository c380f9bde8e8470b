"""Trains the tiny run of a configuration file under the numpy engine: a process of its own, which may be killed.

Its steps are faster than checkpoints travel, so each step after a save waits until that save is in the mirror: then it
is known what is there when the process dies.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from eventually import wait_until
from numpy_engine import NumpyEngine
from tiny_runs import run, use_numpy_engine
from vorox.core.config import load_config
from vorox.training.mirror import list_mirror


def main() -> None:
    patch = pytest.MonkeyPatch()
    use_numpy_engine(patch)
    config = load_config(Path(sys.argv[1]))
    original = NumpyEngine.train_step

    def train_step(self: NumpyEngine, batch: Any, **kwargs: float) -> Any:
        if batch.step in {4, 8}:
            (name,) = [path.name for path in Path(config.run.directory).iterdir()]
            place = f"{config.checkpoint.mirror}/{name}"
            wait_until(lambda: batch.step in {entry.step for entry in list_mirror(place).lineage()}, 120)
        return original(self, batch, **kwargs)

    patch.setattr(NumpyEngine, "train_step", train_step)
    run(config)


if __name__ == "__main__":
    main()
