"""Weights & Biases sink, which never blocks a step.

Values are queued; a background thread starts the client (which takes a second or more), sends values and closes it.
Without credentials (``WANDB_API_KEY`` or a login in ``~/.netrc``) the client records offline into ``<run>/wandb``, for
a later ``wandb sync``. The W&B run has our run id, so a resumed run continues it. Credentials are read by the client
only.
"""

from __future__ import annotations

import contextlib
import netrc
import os
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vorox.core.errors import ConfigError
from vorox.core.installation import install_command

HOST = "api.wandb.ai"
QUEUE_STEPS = 100_000
"""Capacity of the queue; further steps are dropped and counted."""
CLOSE_SECONDS = 30.0


class WandbSink:
    """Sends metrics to a W&B run.

    Args:
        run_directory: Directory of the client's files; its name is the W&B run id.
        project: W&B project.
        settings: The run's configuration, shown in W&B.

    Raises:
        ConfigError: The package is not installed.
    """

    name = "wandb"

    def __init__(self, run_directory: Path, *, project: str, settings: Mapping[str, Any]) -> None:
        import importlib.util

        if importlib.util.find_spec("wandb") is None:
            raise ConfigError(
                "log.wandb=true needs the wandb package", where="log.wandb", hint=install_command("wandb")
            )
        self.mode = _mode()
        self._dropped = 0
        self._error: BaseException | None = None
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(QUEUE_STEPS)
        arguments = (run_directory, project, dict(settings))
        self._thread = threading.Thread(target=self._work, args=arguments, name="vorox-wandb", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Enqueue the values of a step; never blocks."""
        self._raise()
        try:
            self._queue.put_nowait((step, dict(values)))
        except queue.Full:
            self._dropped += 1
            raise RuntimeError(f"the client is blocked; {self._dropped} steps were dropped") from None

    def flush(self) -> None:
        """Report an error of the background thread, which sends without being flushed."""
        self._raise()

    def close(self) -> None:
        """Wait for queued values, up to ``CLOSE_SECONDS``."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(CLOSE_SECONDS)
        self._raise()
        if self._thread.is_alive():
            raise TimeoutError(f"the client has not finished within {CLOSE_SECONDS:g} s")

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self, run_directory: Path, project: str, settings: dict[str, Any]) -> None:
        try:
            import wandb

            run = wandb.init(
                project=project, id=run_directory.name, name=run_directory.name, dir=str(run_directory),
                mode=self.mode, resume="allow" if self.mode == "online" else None, config=settings, save_code=False,
                settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True),
            )  # fmt: skip
            while (entry := self._queue.get()) is not None:
                run.log(entry[1], step=entry[0])
            run.finish()
        except BaseException as error:
            self._error = error


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
