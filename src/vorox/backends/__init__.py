"""Backend registry: import an engine by name, lazily.

Every engine module has ``connect(config)`` and ``create(config, spec, dist) -> Engine``. Nothing else in Vorox knows
which engines exist, and no framework is imported before its engine is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Protocol, cast

from vorox.core.distributed_context import DistributedContext
from vorox.core.engine import Engine
from vorox.core.errors import ConfigError
from vorox.core.installation import install_command
from vorox.core.schema import RunConfig
from vorox.models.spec import ModelSpec

_MODULES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "jax": ("vorox.backends.jax_engine.engine", ("jax", "flax", "optax")),
    "torch": ("vorox.backends.torch_engine.engine", ("torch",)),
}
"""Backend name (also the name of its extra) to its engine module and the packages that the module imports."""


class Backend(Protocol):
    """The interface of an engine module."""

    def connect(self, config: RunConfig) -> DistributedContext:
        """Join the process group that the environment describes (``core.distributed_context.membership``), once.

        Raises:
            ConfigError: The environment describes several processes and this backend supports one, or they cannot
                connect to each other.
        """
        ...

    def create(self, config: RunConfig, spec: ModelSpec, dist: DistributedContext) -> Engine:
        """Create an engine with initial weights on this process's devices."""
        ...


def check_installed(name: str) -> None:
    """Check that a backend exists and its packages are installed, without importing its framework.

    Raises:
        ConfigError: The backend is unknown, or one of its packages is not installed.
    """
    if name not in _MODULES:
        raise ConfigError(f"Unknown backend {name!r}; available: {', '.join(sorted(_MODULES))}", where="backend")
    missing = [package for package in _MODULES[name][1] if not _is_installed(package)]
    if missing:
        raise ConfigError(
            f"Backend {name!r} needs {' and '.join(missing)}, which is not installed",
            where="backend", hint=install_command(name),
        )  # fmt: skip


def load(name: str) -> Backend:
    """Import a backend's engine module.

    Raises:
        ConfigError: As ``check_installed``.
    """
    check_installed(name)
    return cast(Backend, importlib.import_module(_MODULES[name][0]))


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # raised by import hooks
        return False
