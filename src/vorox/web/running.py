"""The uvicorn server of an application."""

from __future__ import annotations

from typing import Any

import uvicorn


def server_of(app: Any, *, stop_seconds: int) -> Any:
    """Return a uvicorn server of an application.

    Without uvicorn's configuration of logging, which closes the handlers of every library in the process, and absl's
    with them the stream that it writes to. Its warnings go to standard error by Python's handler of last resort.

    Args:
        app: The application.
        stop_seconds: Time that open connections have when the server stops.
    """
    config = uvicorn.Config(app, log_config=None, log_level="warning", timeout_graceful_shutdown=stop_seconds)
    return uvicorn.Server(config)
