"""The one lazy import: an engine's name to the module that creates it.

Every engine module has ``create(config, spec, dist) -> Engine``. Nothing else in Vorox knows which engines exist, and
no framework is imported before one is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Protocol, cast

from vorox.core.distributed_context import DistributedContext
from vorox.core.engine import Engine
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.models.spec import ModelSpec

_MODULES: Mapping[str, tuple[str, str]] = {
    "jax": ("vorox.backends.jax_engine.engine", "jax"),
    "torch": ("vorox.backends.torch_engine.engine", "torch"),
}
"""Name of a backend to its module and the framework that it needs, which is also the name of the extra."""


class Backend(Protocol):
    """What a backend's module offers."""

    def create(self, config: RunConfig, spec: ModelSpec, dist: DistributedContext) -> Engine:
        """Build an engine with freshly initialised weights on this process's devices."""
        ...


def load(name: str) -> Backend:
    """Import a backend.

    Raises:
        ConfigError: It is unknown, or its framework is not installed.
    """
    if name not in _MODULES:
        raise ConfigError(f"backend = {name!r} is unknown; known are {', '.join(sorted(_MODULES))}", where="backend")
    module, framework = _MODULES[name]
    try:
        return cast(Backend, importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name != framework:
            raise
        raise ConfigError(
            f"backend = {name!r} needs {framework}, which is not installed",
            where="backend",
            hint=f"pip install 'vorox[{framework}]'",
        ) from error
