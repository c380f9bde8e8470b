"""Backend registry: import an engine by name, lazily.

Every engine module has ``connect(config)`` and ``create(config, spec, dist) -> Engine``. ``engine_table.py`` says what
each engine has; no framework is imported before its engine is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from vorox.backends.engine_table import ENGINE_TABLE, EngineRow, engine_row
from vorox.core.config import decides_bits, flat_values
from vorox.core.engine import Engine
from vorox.core.errors import ConfigError
from vorox.core.platform.environment import package_versions
from vorox.core.platform.installation import install_command
from vorox.core.ranks.distributed_context import DistributedContext, membership
from vorox.core.ranks.rank_comparison import compare_ranks, first_difference, raise_difference
from vorox.core.ranks.rendezvous import Rendezvous
from vorox.core.redaction import redact_value
from vorox.core.schema import ParallelConfig, RunConfig
from vorox.core.user_code.extensions import is_extension
from vorox.core.version import __version__
from vorox.models import divisibility
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.models.huggingface.families import ARCHITECTURES
from vorox.models.spec import ModelSpec
from vorox.planning.memory_advice import Devices
from vorox.planning.memory_estimate import MemoryEstimate

BACKENDS: tuple[str, ...] = tuple(ENGINE_TABLE)
"""Names of the engines, in order of preference; each is also the name of an extra."""

_LEAST_PATIENCE_SECONDS = 10.0
_PATIENCE_PER_STALL = 1.5
"""A rank on a busy machine may give no sign of life for some seconds."""

_SECTIONS_WITH_COLLECTIVES = ("checkpoint.", "eval.")
"""Sections that are not part of a run's identity, but decide when the ranks exchange arrays."""


class Backend(Protocol):
    """The interface of an engine module."""

    def connect(self, config: RunConfig) -> DistributedContext:
        """Join the process group that the environment describes (``core.ranks.distributed_context.membership``), once.

        Raises:
            ConfigError: The environment describes several processes and this backend supports one, or they cannot
                connect to each other.
        """
        ...

    def create(self, config: RunConfig, spec: ModelSpec, dist: DistributedContext) -> Engine:
        """Create an engine with initial weights on this process's devices."""
        ...


def always_compiles(name: str) -> bool:
    """Return whether a backend compiles its steps without ``runtime.compile``."""
    return bool(engine_row(name).compiled_memory)


def check_installed(name: str) -> None:
    """Check that a backend exists and its packages are installed, without importing its framework.

    Raises:
        ConfigError: The backend is unknown, or one of its packages is not installed.
    """
    missing = [package for package in engine_row(name).packages if not _is_installed(package)]
    if missing:
        raise ConfigError(
            f"Backend {name!r} needs {' and '.join(missing)}, which is not installed",
            where="backend", hint=install_command(name),
        )  # fmt: skip


def is_installed(name: str) -> bool:
    """Return whether the packages of a backend are installed."""
    return all(_is_installed(package) for package in engine_row(name).packages)


def preferred() -> str:
    """Return the first backend that is installed; the first of all if none is."""
    return next((name for name in BACKENDS if is_installed(name)), BACKENDS[0])


def load(name: str) -> Backend:
    """Import a backend's engine module.

    Raises:
        ConfigError: As ``check_installed``.
    """
    check_installed(name)
    return cast(Backend, importlib.import_module(engine_row(name).engine))


def config_for_one_process(config: RunConfig) -> RunConfig:
    """Return the configuration of an engine that one process creates from a run of several, to infer with its model."""
    if engine_row(config.backend).divides_over_process:
        return config
    return config.model_copy(update={"parallel": ParallelConfig()})


def model_spec(
    config: RunConfig, values: Mapping[str, Any] | None, *, revision: str | None, tokenizer_vocab_size: int
) -> ModelSpec:
    """Resolve the model of a configuration.

    Args:
        config: The run.
        values: Content of ``config.json`` (``model.kind: huggingface``), else ``None``.
        revision: Commit of its repository.
        tokenizer_vocab_size: Vocabulary size of the tokenizer.

    Raises:
        ConfigError: The model contradicts the tokenizer or the data, or the engine does not support a setting with it.
    """
    if is_extension(config.model.kind):
        check_installed(config.backend)
        name = engine_row(config.backend).user_models
        if not name:
            raise ConfigError(
                f"model.kind={config.model.kind} needs backend={_having(lambda row: row.user_models)}", where="backend",
                hint="or train the native decoder (model.kind=decoder)",
            )  # fmt: skip
        return importlib.import_module(name).resolve(config, tokenizer_vocab_size=tokenizer_vocab_size)
    if values is None:
        return decoder_spec(
            config.model,
            tokenizer_vocab_size=tokenizer_vocab_size,
            sequence_length_tokens=config.data.sequence_length_tokens,
        )
    check_installed(config.backend)
    name = engine_row(config.backend).transformers
    if not name:
        families = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"model.kind=huggingface needs backend={_having(lambda row: row.transformers)}", where="backend",
            hint=f"or start from the weights of a native family (train.from_weights): {families}",
        )  # fmt: skip
    module = importlib.import_module(name)
    return module.resolve(config, values, revision=revision, tokenizer_vocab_size=tokenizer_vocab_size)


def measured_spec(config: RunConfig, spec: ModelSpec) -> ModelSpec:
    """Return the model with measured activations, if it is one of transformers: no formula knows its modules.

    Raises:
        ConfigError: It is a model of the user.
    """
    if isinstance(spec, DecoderSpec):
        return spec
    if config.model.kind != "huggingface":
        raise ConfigError(
            f"The activations of model.kind={config.model.kind} are not known without running it", where="model.kind",
            hint="measure them with a run of a few steps",
        )  # fmt: skip
    module = importlib.import_module(engine_row(config.backend).activation_memory)
    return module.measured(spec)


def check_divisible(config: RunConfig, spec: ModelSpec) -> None:
    """Check that devices can divide a model as a configuration wants; JAX checks its layout when it has the devices.

    Raises:
        ConfigError: The sizes of the model are not divisible as the configuration says.
    """
    if not engine_row(config.backend).divides_over_process:
        divisibility.check_divisible(config, spec)


def check_memory_estimate(config: RunConfig) -> None:
    """Check that the memory estimate follows the engine of a configuration.

    Raises:
        ConfigError: The engine plans the memory of a step itself.
    """
    if not engine_row(config.backend).devices:
        known = _having(lambda row: row.devices)
        raise ConfigError(
            f"The compiler of backend={config.backend} plans the memory of a step itself",
            where="backend",
            hint=f"set backend={known}, or find out with `vorox plan CONFIG --compile` what fits",
        )  # fmt: skip


def training_devices(config: RunConfig, dist: DistributedContext) -> Devices | None:
    """Return the devices that a run would use, with the memory of one of this process; ``None`` if it is unknown.

    Raises:
        ConfigError: This machine does not have the device of the configuration.
    """
    name = engine_row(config.backend).devices
    return None if not name else importlib.import_module(name).training_devices(config, dist)


def compiled_memory(config: RunConfig, spec: ModelSpec, estimate: MemoryEstimate) -> MemoryEstimate:
    """Return the memory of a device of this machine, with the temporary arrays of a step as its compiler plans them.

    Raises:
        ConfigError: The backend does not compile a whole step, or does not support a setting.
    """
    check_installed(config.backend)
    name = engine_row(config.backend).compiled_memory
    if not name:
        raise ConfigError(
            f"backend={config.backend} does not compile a whole step in advance", where="--compile",
            hint=f"plan without --compile, or with backend={_having(lambda row: row.compiled_memory)}",
        )  # fmt: skip
    return importlib.import_module(name).compiled_memory(config, spec, estimate)


def connect(config: RunConfig) -> DistributedContext:
    """Wait for all ranks that the environment describes, compare versions and settings, and connect them.

    Raises:
        StalledError: A rank did not start within ``parallel.start_timeout_seconds``.
        ConfigError: The ranks have different versions or settings; or as ``load`` and ``Backend.connect``.
    """
    global _connection
    backend, member = load(config.backend), membership()
    if member is None:
        return backend.connect(config)
    facts, hint = _start_facts(config), "start all ranks with the same command, in the same environment"
    if _connection is not None:
        _connection = _connection.renewed(config.backend)
        compare_ranks(_connection.dist, "start", facts, hint)
        return _connection.dist
    if member.rank is not None:  # else the backend finds the ranks
        meeting = Rendezvous.of(member, config.parallel.start_timeout_seconds)
        raise_difference(meeting.agree(facts, first_difference), hint)
    _connection = _Connection(config.backend, backend.connect(config).watched(_patience_seconds(config)))
    if member.rank is None:
        compare_ranks(_connection.dist, "start", facts, hint)
    return _connection.dist


@dataclass(frozen=True, slots=True)
class _Connection:
    """How this process is connected to the other ranks, which it stays for all its runs."""

    backend: str
    dist: DistributedContext

    def renewed(self, backend: str) -> _Connection:
        """Return the connection for the next run of this process.

        Raises:
            ConfigError: The next run has another backend.
        """
        if backend != self.backend:
            raise ConfigError(
                f"The ranks of this process are connected by {self.backend}, the run needs {backend}", where="backend",
                hint="train it in a process of its own",
            )  # fmt: skip
        return replace(self, dist=self.dist.renewed())


_connection: _Connection | None = None


def _patience_seconds(config: RunConfig) -> float:
    """Return the time after which a rank that is stopped, or gives no sign of life, is given up."""
    start, stall = config.parallel.start_timeout_seconds, config.runtime.stall_timeout_seconds
    # With a watchdog, its report comes first: it knows the step and phase of the rank.
    return max(_LEAST_PATIENCE_SECONDS, start if stall is None else min(start, _PATIENCE_PER_STALL * stall))


def _start_facts(config: RunConfig) -> dict[str, Any]:
    """Return what must be equal on all ranks before they connect: versions, and settings of bits and collectives."""
    versions = package_versions()
    engine = {name: versions.get(name) for name in (*engine_row(config.backend).packages, "jaxlib", "numpy")}
    python = ".".join(platform.python_version_tuple()[:2])
    settings = {
        key: value
        for key, value in flat_values(config).items()
        if decides_bits(key) or key.startswith(_SECTIONS_WITH_COLLECTIVES)
    }
    return {"vorox": __version__, "Python": python, **engine, **redact_value(settings)}


def _having(module: Callable[[EngineRow], str]) -> str:
    """Return the backends that have a module, as text."""
    return " or ".join(name for name, row in ENGINE_TABLE.items() if module(row))


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # raised by import hooks
        return False
