"""The one lazy import: an engine's name to the module that creates it.

Every engine module has ``create(config, spec, dist) -> Engine``. Nothing else in Vorox knows which engines exist, and
no framework is imported before one is asked for.
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
"""Name of a backend, which is also the name of its extra, to its module and the packages that this imports."""


class Backend(Protocol):
    """What a backend's module offers."""

    def connect(self, config: RunConfig) -> DistributedContext:
        """Join the processes that the environment names (``core.distributed_context.membership``), once per process.

        Raises:
            ConfigError: The environment names several and this backend runs in one, or they do not find each other.
        """
        ...

    def create(self, config: RunConfig, spec: ModelSpec, dist: DistributedContext) -> Engine:
        """Build an engine with freshly initialised weights on this process's devices."""
        ...


def check_installed(name: str) -> None:
    """Refuse a backend that cannot be loaded here, without importing its framework.

    Raises:
        ConfigError: It is unknown, or a package that it needs is not installed.
    """
    if name not in _MODULES:
        raise ConfigError(f"backend = {name!r} is unknown; known are {', '.join(sorted(_MODULES))}", where="backend")
    missing = [package for package in _MODULES[name][1] if not _is_installed(package)]
    if missing:
        raise ConfigError(
            f"backend = {name!r} needs {' and '.join(missing)}, not installed here",
            where="backend", hint=install_command(name),
        )  # fmt: skip


def load(name: str) -> Backend:
    """Import a backend.

    Raises:
        ConfigError: See ``check_installed``.
    """
    check_installed(name)
    return cast(Backend, importlib.import_module(_MODULES[name][0]))


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # as an import hook says it
        return False
