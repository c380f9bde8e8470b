"""trackio sink, which never blocks a step.

A background thread writes values into trackio's local database: in ``TRACKIO_DIR``, else where trackio keeps it. There
is no network, even if the environment names a Space or server. The trackio run has our run id as its name, so a resumed
run continues it; a step that is trained again is not recorded twice.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from vorox.core.errors import ConfigError
from vorox.core.platform.installation import install_command
from vorox.experiments.background_sink import BackgroundSink, Entries


class TrackioSink(BackgroundSink):
    """Writes metrics to a trackio run.

    Args:
        run_directory: The run; its name is the name of the trackio run.
        project: trackio project, created if it does not exist.
        settings: The run's configuration, recorded with the trackio run.

    Raises:
        ConfigError: The package is not installed.
    """

    def __init__(self, run_directory: Path, *, project: str, settings: Mapping[str, Any]) -> None:
        require_trackio()
        super().__init__("trackio", functools.partial(_send, run_directory.name, project, dict(settings)))


def require_trackio() -> None:
    """Check that the package of ``log.trackio`` is installed.

    Raises:
        ConfigError: It is not.
    """
    if importlib.util.find_spec("trackio") is None:
        raise ConfigError(
            "log.trackio=true needs the package trackio", where="log.trackio", hint=install_command("trackio")
        )


def _send(run: str, project: str, settings: dict[str, Any], entries: Entries) -> None:
    storage: Any = import_module("trackio.sqlite_storage").SQLiteStorage
    recorded: dict[str, Any] | None = settings
    for step, values in entries:
        entry = f"{run}:{step}:{','.join(sorted(values))}"
        storage.bulk_log(project, run, [values], steps=[step], config=recorded, log_ids=[entry])
        recorded = None
