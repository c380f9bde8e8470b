"""Choose the engine whose collectives vorox doctor --nodes uses, and connect its ranks."""

from __future__ import annotations

import importlib
from typing import Any

from vorox.backends import BACKENDS, check_installed
from vorox.core.errors import ConfigError
from vorox.core.platform.installation import install_command
from vorox.core.ranks.distributed_context import DistributedContext, Membership

_PREFERRED = sorted(BACKENDS, reverse=True)


def collective_engine(name: str | None) -> str:
    """Return the engine to use: the named one, else PyTorch if it is installed, else JAX.

    Raises:
        ConfigError: The named engine is unknown, or no engine is installed.
    """
    if name is not None:
        check_installed(name)
        return name
    for candidate in _PREFERRED:
        try:
            check_installed(candidate)
        except ConfigError:
            continue
        return candidate
    raise ConfigError(
        "An all-reduce needs PyTorch or JAX, and neither is installed", where="vorox doctor --nodes",
        hint=install_command(_PREFERRED[0]),
    )  # fmt: skip


_COLLECTIVES = {
    "torch": "vorox.backends.torch_engine.ranks.collectives",
    "jax": "vorox.backends.jax_engine.ranks.collectives",
}


def join(name: str, member: Membership, timeout_seconds: float) -> tuple[DistributedContext, Any]:
    """Connect the ranks of a job by an engine; return its collectives (``runtime.collective_timing.Collectives``).

    Raises:
        VoroxError: The ranks cannot connect.
    """
    module = importlib.import_module(_COLLECTIVES[name])
    return module.join(member, timeout_seconds)
