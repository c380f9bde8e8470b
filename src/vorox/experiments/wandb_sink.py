"""Weights & Biases sink, which never blocks a step.

A background thread starts the client (which takes a second or more), sends values and closes it. Without credentials
(``WANDB_API_KEY`` or a login in ``~/.netrc``) the client records offline into ``<run>/wandb``, for a later
``wandb sync``. The W&B run has our run id, so a resumed run continues it. Credentials are read by the client only.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vorox.core.errors import ConfigError
from vorox.core.platform.installation import install_command
from vorox.experiments.background_sink import BackgroundSink, Entries

HOST = "api.wandb.ai"


class WandbSink(BackgroundSink):
    """Sends metrics to a W&B run.

    Args:
        run_directory: Directory of the client's files; its name is the W&B run id.
        project: W&B project.
        settings: The run's configuration, shown in W&B.

    Raises:
        ConfigError: The package is not installed.
    """

    def __init__(self, run_directory: Path, *, project: str, settings: Mapping[str, Any]) -> None:
        require_wandb()
        self.mode = _mode()
        super().__init__("wandb", functools.partial(_send, run_directory, project, dict(settings), self.mode))


def require_wandb() -> None:
    """Check that the package of ``log.wandb`` is installed.

    Raises:
        ConfigError: It is not.
    """
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError("log.wandb=true needs the wandb package", where="log.wandb", hint=install_command("wandb"))


def _send(run_directory: Path, project: str, settings: dict[str, Any], mode: Any, entries: Entries) -> None:
    import wandb

    run = wandb.init(
        project=project, id=run_directory.name, name=run_directory.name, dir=str(run_directory), mode=mode,
        resume="allow" if mode == "online" else None, config=settings, save_code=False,
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True),
    )  # fmt: skip
    for step, values in entries:
        run.log(values, step=step)
    run.finish()


def _mode() -> Any:
    """Return ``WANDB_MODE`` if set, else ``online`` if credentials exist, else ``offline``."""
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        if netrc.netrc().authenticators(HOST) is not None:
            return "online"
    return "offline"
