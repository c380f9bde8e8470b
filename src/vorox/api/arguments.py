"""Check arguments of the Python API, so that a wrong one is an error that names it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, cast

from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig

_NAMES: Final[Mapping[type, str]] = {
    str: "text", Path: "a path", bool: "true or false", int: "an integer", float: "a number", type(None): "None",
    dict: "a mapping", list: "a list", tuple: "a tuple", Mapping: "a mapping", Sequence: "a list",
    RunConfig: "a configuration of load_config",
}  # fmt: skip
_ABSTRACT: Final[Mapping[type, type]] = {int: Integral, float: Real}
"""Numbers of numpy are accepted as well."""


def check_argument(
    function: str, name: str, value: object, kinds: Sequence[type], *, least: float | None = None
) -> None:
    """Check the type of an argument, and that a number is not below a bound.

    Args:
        function: The function, for the message.
        name: The argument.
        value: Its value.
        kinds: Accepted types; ``float`` accepts integers, and ``int`` no booleans.
        least: Smallest accepted number.

    Raises:
        ConfigError: It is of none of these types, or too small.
    """
    accepted = [*(_ABSTRACT.get(kind, kind) for kind in kinds)]
    if not isinstance(value, tuple(accepted)) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(_NAMES.get(kind, kind.__name__) for kind in kinds)
        raise ConfigError(f"{name}={_short(value)} must be {wanted}", where=function)
    if least is not None and isinstance(value, Real) and not float(value) >= least:
        raise ConfigError(f"{name}={value} must be at least {least:g}", where=function)


def check_source(function: str, source: object) -> None:
    """Check the argument that names a configuration.

    Raises:
        ConfigError: It is neither a name, a path, a mapping nor a configuration.
    """
    if isinstance(source, Mapping):
        return
    check_argument(function, "config", source, (str, Path, dict, RunConfig, type(None)))


def check_overrides(function: str, overrides: object) -> None:
    """Check the overrides: a mapping of keys, or ``key=value`` texts.

    Raises:
        ConfigError: They are neither.
    """
    if isinstance(overrides, Mapping):
        names: Iterable[Any] = cast("Mapping[Any, Any]", overrides)
    elif isinstance(overrides, str) or not isinstance(overrides, Iterable):
        raise ConfigError(
            f"overrides={_short(overrides)} must be a mapping or a list of texts", where=function,
            hint='write {"train.num_steps": 100} or ["train.num_steps=100"]',
        )  # fmt: skip
    else:
        names = cast("Iterable[Any]", overrides)
    for name in names:
        check_argument(function, "an override", name, (str,))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
