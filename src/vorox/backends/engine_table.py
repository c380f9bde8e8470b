"""Table of engines: a row for each, with the modules that only it has.

The order of the rows is the order of preference, where a command chooses. ``tests/contract/test_engine_table.py`` holds
the table against the names in ``core/schema/setting.py`` and finds other tables by name of an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vorox.core.errors import ConfigError
from vorox.core.schema.setting import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """What belongs to an engine. Modules are names, because importing one imports its framework.

    Attributes:
        packages: What the engine imports; ``vorox[NAME]`` installs them.
        engine: Connects ranks and creates the engine (``backends.Backend``).
        installation_report: Program that prints what ``vorox doctor`` judges.
        collectives: Connects ranks for ``vorox doctor --nodes``; a ``join`` (``backends.node_collectives``).
        transformers: Resolves models of transformers; empty: the engine does not compute them.
        activation_memory: Measures the activations of such a model.
        user_models: Resolves models by import path; empty: as above.
        devices: The devices that an estimate of memory from the settings is for; empty: there is none, because the
            compiler plans a step itself.
        compiled_memory: Reads the memory of a compiled step; empty: the engine does not compile whole steps.
        divides_over_process: Whether it divides a model over all devices of a process; else a process has one device.
    """

    packages: tuple[str, ...]
    engine: str
    installation_report: str
    collectives: str
    transformers: str = ""
    activation_memory: str = ""
    user_models: str = ""
    devices: str = ""
    compiled_memory: str = ""
    divides_over_process: bool = False


_TORCH, _JAX = "vorox.backends.torch_engine", "vorox.backends.jax_engine"

ENGINE_TABLE: Mapping[Engine, EngineRow] = {
    "torch": EngineRow(
        packages=("torch",),
        engine=f"{_TORCH}.engine",
        installation_report=f"{_TORCH}.device.installation_report",
        collectives=f"{_TORCH}.ranks.collectives",
        transformers=f"{_TORCH}.networks.huggingface_settings",
        activation_memory=f"{_TORCH}.networks.activation_memory",
        user_models=f"{_TORCH}.networks.user_model",
        devices=f"{_TORCH}.device.devices",
    ),
    "jax": EngineRow(
        packages=("jax", "flax", "optax"),
        engine=f"{_JAX}.engine",
        installation_report=f"{_JAX}.device.installation_report",
        collectives=f"{_JAX}.ranks.collectives",
        compiled_memory=f"{_JAX}.compiled_memory",
        divides_over_process=True,
    ),
}


def engine_row(name: str) -> EngineRow:
    """Return what belongs to an engine.

    Raises:
        ConfigError: There is no such engine.
    """
    for engine, row in ENGINE_TABLE.items():
        if engine == name:
            return row
    raise ConfigError(f"Unknown backend {name!r}; available: {', '.join(ENGINE_TABLE)}", where="backend")
