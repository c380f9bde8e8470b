"""Choose the engine whose collectives vorox doctor --nodes uses, and connect its ranks."""

from __future__ import annotations

import importlib
from typing import Any

from vorox.backends import BACKENDS, check_installed, is_installed, preferred
from vorox.backends.engine_table import engine_row
from vorox.core.errors import ConfigError
from vorox.core.platform.installation import install_command
from vorox.core.ranks.distributed_context import DistributedContext, Membership


def collective_engine(name: str | None) -> str:
    """Return the engine to use: the named one, else the preferred one of those installed.

    Raises:
        ConfigError: The named engine is unknown, or no engine is installed.
    """
    if name is not None:
        check_installed(name)
        return name
    found = preferred()
    if not is_installed(found):
        raise ConfigError(
            f"An all-reduce needs an engine ({' or '.join(BACKENDS)}), and none is installed",
            where="vorox doctor --nodes", hint=install_command(found),
        )  # fmt: skip
    return found


def join(name: str, member: Membership, timeout_seconds: float) -> tuple[DistributedContext, Any]:
    """Connect the ranks of a job by an engine; return its collectives (``runtime.collective_timing.Collectives``).

    Raises:
        VoroxError: The ranks cannot connect.
    """
    module = importlib.import_module(engine_row(name).collectives)
    return module.join(member, timeout_seconds)
