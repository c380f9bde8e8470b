"""Python runs this at its start where the folder is on its path: a rank then kills itself at named points, once each.

``TESTS_KILLS`` is a folder with a file ``RANK-POINT`` per kill; a rank that gets there removes its file first.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

STEP, CHECKPOINT = 6, "step-00000008"


def _die_at(point: str) -> None:
    order = Path(os.environ["TESTS_KILLS"]) / f"{os.environ['RANK']}-{point}"
    if order.exists():
        order.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


if "RANK" in os.environ:
    import vorox.run

    distributed: Any
    engine: Any
    if os.environ["TESTS_BACKEND"] == "torch":
        from vorox.backends.torch_engine.engine import TorchEngine as engine
        from vorox.backends.torch_engine.ranks import distributed
    else:
        from vorox.backends.jax_engine.engine import JaxEngine as engine
        from vorox.backends.jax_engine.ranks import distributed
    from vorox.core.files.staged_directory import StagedDirectory

    _joined, _prepare, _train_step = distributed._joined, vorox.run.prepare, engine.train_step
    _commit = StagedDirectory.commit

    def joined(*arguments: Any) -> Any:
        _die_at("connect")
        return _joined(*arguments)

    def prepare(*arguments: Any, **options: Any) -> Any:
        _die_at("corpus")
        return _prepare(*arguments, **options)

    def train_step(self: Any, batch: Any, **options: float) -> Any:
        if batch.step == STEP:
            _die_at("step")
        return _train_step(self, batch, **options)

    def commit(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.target.name == CHECKPOINT:
            _die_at("checkpoint")
        return _commit(self, *arguments, **options)

    distributed._joined, vorox.run.prepare, engine.train_step = joined, prepare, train_step
    StagedDirectory.commit = commit

    if os.environ["TESTS_BACKEND"] == "torch":
        import phases_of_a_save  # noqa: F401
else:
    from vorox.cli.launch import rank_launcher

    rank_launcher.GRACE_SECONDS = 2.0
