"""Search spaces: settings with a distribution each, from the command line or a YAML file.

In: ``optimizer.lr`` and ``loguniform(1e-4, 1e-2)``. Out: a ``Parameter``. ``uniform`` and ``loguniform`` include both
ends, and draw integers where the setting is an integer.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from vorox.core.config import decides_bits, flatten
from vorox.core.config.layers.synonyms import key_of
from vorox.core.config.schema_fields import SchemaField, admits, did_you_mean, find_field, nearest
from vorox.core.config.yaml.reader import Json, read_mapping, read_value
from vorox.core.config.yaml.writer import write_inline
from vorox.core.errors import ConfigError

DISTRIBUTIONS = ("choice", "uniform", "loguniform")
_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*\((.*)\)\s*", re.DOTALL)
_FORMS = "choice(A, B, ...), uniform(LOW, HIGH) or loguniform(LOW, HIGH)"
_CHOOSES_DEFAULTS = ("model.preset", "model.family")
_COMPARABLE = ("tokenizer", "eval", "data.validation")
"""Sections that decide what the validation loss measures."""
_SIGNIFICANT_DIGITS = 4
_MAX_COMBINATIONS = 64


@dataclass(frozen=True, slots=True)
class Parameter:
    """A setting that a sweep searches.

    Attributes:
        key: The setting.
        choices: The values of ``choice``; empty for a range.
        low: Lower end of a range, included.
        high: Upper end of a range, included.
        is_log: Whether the logarithm is uniform.
        is_integer: Whether the values are integers.
    """

    key: str
    choices: tuple[Json, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_integer: bool = False

    @property
    def extremes(self) -> tuple[Json, ...]:
        """All choices, or both ends of the range."""
        return self.choices or (self.low, self.high)

    @property
    def values(self) -> Sequence[Json] | None:
        """All values, or ``None`` of a continuous range."""
        if self.choices:
            return self.choices
        return range(int(self.low), int(self.high) + 1) if self.is_integer else None

    def rounded(self, value: float) -> float:
        """Round a number of a continuous range to four digits, inside the range, so that commands stay readable."""
        if self.is_integer:
            return value
        return min(max(float(f"{value:.{_SIGNIFICANT_DIGITS}g}"), self.low), self.high)

    def __str__(self) -> str:
        if self.choices:
            return f"choice({', '.join(map(write_inline, self.choices))})"
        return f"{'log' if self.is_log else ''}uniform({write_inline(self.low)}, {write_inline(self.high)})"


def is_distribution(text: str) -> bool:
    """Whether the value of an override has the form of a distribution."""
    return _CALL.fullmatch(text) is not None


def read_space(path: Path) -> list[Parameter]:
    """Read a YAML file of settings, dotted or nested, with a distribution each.

    Raises:
        ConfigError: The file cannot be read, or an entry is not a valid parameter.
    """
    try:
        document = read_mapping(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"Search space cannot be read: {error}", where="--space",
            hint="name a YAML file with lines such as `optimizer.lr: loguniform(1e-4, 1e-2)`",
        ) from error  # fmt: skip
    for what, line in document.problems:
        raise ConfigError(what, where=f"{path}:{line}")
    return [parse_parameter(key, value, where=f"{path}: {key}") for key, value in flatten(document.value).items()]


def parse_parameter(name: str, text: Json, *, where: str) -> Parameter:
    """Parse a setting and its distribution.

    Args:
        name: The setting, or a synonym.
        text: The distribution.
        where: Its place, for messages.

    Raises:
        ConfigError: The setting or the distribution is unknown, or they do not fit each other.
    """
    key = key_of(name)
    field = find_field(key)
    if field is None:
        hint = did_you_mean(key) or "list the settings with `vorox config show`"
        raise ConfigError(f"Unknown setting {key}", where=where, hint=hint)
    if field.is_section:
        hint = f"list its settings with `vorox config explain {key}`"
        raise ConfigError(f"{key} is a section", where=where, hint=hint)
    _refuse_incomparable(key, where)
    match = _CALL.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"{key} has no distribution: {write_inline(text)}", where=where, hint=f"write {_FORMS}")
    if match[1] not in DISTRIBUTIONS:
        near = nearest(match[1], DISTRIBUTIONS, limit=1)
        raise ConfigError(
            f"Unknown distribution {match[1]}", where=where,
            hint=f"{f'did you mean {near[0]}? ' if near else ''}Write {_FORMS}",
        )  # fmt: skip
    values = cast("list[Json]", read_value(f"[{match[2]}]", where))
    return _choice(key, values, where) if match[1] == "choice" else _range(field, key, match[1], values, where)


def _refuse_incomparable(key: str, where: str) -> None:
    if any(key.startswith(f"{section}.") for section in _COMPARABLE):
        raise ConfigError(
            f"{key} changes what the validation loss measures, so trials could not be compared", where=where,
            hint="run one sweep for each value, as in `vorox tune CONFIG KEY=VALUE ...`",
        )  # fmt: skip
    if not decides_bits(key) and key not in _CHOOSES_DEFAULTS:
        raise ConfigError(
            f"{key} does not change the trained weights", where=where, hint="remove it from the search space"
        )


def _choice(key: str, values: list[Json], where: str) -> Parameter:
    distinct = {write_inline(value): value for value in values}
    if len(values) < 2 or len(distinct) < len(values):
        raise ConfigError(f"choice of {key} needs at least two different values", where=where, hint=f"write {_FORMS}")
    return Parameter(key, choices=tuple(values))


def _range(field: SchemaField, key: str, name: str, values: list[Json], where: str) -> Parameter:
    is_float = admits(field.annotation, float)
    if not is_float and not admits(field.annotation, int):
        raise ConfigError(f"{key} is not a number", where=where, hint="write choice(A, B, ...)")
    numbers = [
        float(value)
        for value in values
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ]
    if len(numbers) != len(values) or len(numbers) != 2:
        raise ConfigError(f"{name} of {key} needs two finite numbers", where=where, hint=f"write {name}(LOW, HIGH)")
    low, high = numbers
    if low >= high or (name == "loguniform" and low <= 0):
        bound = "0 < LOW < HIGH" if name == "loguniform" else "LOW < HIGH"
        raise ConfigError(f"{name}({low:g}, {high:g}) of {key} needs {bound}", where=where)
    if not is_float and not (low.is_integer() and high.is_integer()):
        raise ConfigError(f"{key} is an integer, but an end of its range is not", where=where)
    ends: tuple[float, float] = (low, high) if is_float else (int(low), int(high))
    return Parameter(key, low=ends[0], high=ends[1], is_log=name == "loguniform", is_integer=not is_float)


def extreme_combinations(space: Sequence[Parameter]) -> list[dict[str, Json]]:
    """Return combinations of choices and ends of ranges: all, or 64 that are evenly spread over them."""
    total = math.prod(len(parameter.extremes) for parameter in space)
    wanted = range(0, total, max(1, -(-total // _MAX_COMBINATIONS)))
    found: list[dict[str, Json]] = []
    for index in wanted:
        settings: dict[str, Json] = {}
        for parameter in space:
            index, place = divmod(index, len(parameter.extremes))
            settings[parameter.key] = parameter.extremes[place]
        found.append(settings)
    return found


def all_combinations(space: Sequence[Parameter], limit: int) -> list[dict[str, Json]] | None:
    """Return every point of the space; ``None`` if there are more than ``limit``."""
    values: list[Sequence[Json]] = []
    for parameter in space:
        if parameter.values is None:
            return None
        values.append(parameter.values)
    if math.prod(map(len, values)) > limit:
        return None
    keys = [parameter.key for parameter in space]
    return [dict(zip(keys, point, strict=True)) for point in itertools.product(*values)]


def overrides_of(settings: dict[str, Json]) -> list[str]:
    """Return settings as overrides of a command line."""
    return [f"{key}={write_inline(value)}" for key, value in settings.items()]
