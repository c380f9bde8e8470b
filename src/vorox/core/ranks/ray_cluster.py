"""Connect to Ray: a cluster that is running, or one on this machine, on loopback and without reports of its usage."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Generator
from typing import Any
from unittest import mock

from vorox.core.platform.telemetry import disable_telemetry

_LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def ray_cluster(ray: Any) -> Generator[None]:
    """Connect to the cluster of an earlier ``ray.init`` or of ``$RAY_ADDRESS``; else start one for the block.

    Args:
        ray: The package.
    """
    disable_telemetry()
    if ray.is_initialized():
        yield
        return
    # Without these, Ray prints its dashboard address and installation hints on standard error.
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**options)
    else:
        with _addresses_on_loopback():
            ray.init(**options, include_dashboard=False, _node_ip_address=_LOOPBACK)
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _addresses_on_loopback() -> Generator[None]:
    """Let Ray start on loopback; on Linux it replaces that address by the machine's, which the network reaches."""

    def unchanged(host: str) -> str:
        return host

    def loopback(*_: Any, **__: Any) -> str:
        return _LOOPBACK

    services: Any = importlib.import_module("ray._private.services")
    replaced: dict[str, Any] = {"resolve_ip_for_localhost": unchanged, "get_node_ip_address": loopback}
    with contextlib.ExitStack() as stack:
        for name, function in replaced.items():
            if hasattr(services, name):
                stack.enter_context(mock.patch.object(services, name, function))
        yield
