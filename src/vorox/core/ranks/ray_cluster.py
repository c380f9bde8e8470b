"""Connect to Ray: a cluster that is running, or one on this machine, on loopback and without reports of its usage."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Generator
from typing import Any
from unittest import mock

from vorox.core.errors import StalledError
from vorox.core.platform.telemetry import disable_telemetry

_LOOPBACK = "127.0.0.1"
_NUM_STARTS = 4


@contextlib.contextmanager
def ray_cluster(ray: Any) -> Generator[None]:
    """Connect to the cluster of an earlier ``ray.init`` or of ``$RAY_ADDRESS``; else start one for the block.

    Args:
        ray: The package.

    Raises:
        StalledError: No cluster has started.
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
            start_ray(ray, **options, include_dashboard=False, _node_ip_address=_LOOPBACK)
    try:
        yield
    finally:
        ray.shutdown()


def start_ray(ray: Any, **options: Any) -> None:
    """Start a cluster on this machine, more than once if need be.

    Ray's node ends itself unless the Python processes that it starts report within 15 seconds, which no setting of Ray
    changes. A busy machine, or one that reads them from a disk for the first time, takes longer.

    Args:
        ray: The package.
        options: Of ``ray.init``.

    Raises:
        StalledError: It did not start.
    """
    cause: Exception | None = None
    for _ in range(_NUM_STARTS):
        try:
            ray.init(**options)
        except Exception as error:  # Ray has no class for this
            if "timed out during startup" not in str(error):
                raise
            cause = error
        else:
            return
    raise StalledError(
        f"Ray did not start in {_NUM_STARTS} tries",
        hint="Its logs are in /tmp/ray/session_latest/logs. Run the command again when the machine is less busy, or "
        "start a cluster with `ray start --head` and set RAY_ADDRESS=auto.",
    ) from cause


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
