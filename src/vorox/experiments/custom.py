"""Functions of the user that measure: called with what there is to measure, their numbers named after them.

They take part in no decision. One that raises, or returns something else than numbers, is reported once and never stops
the training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from vorox.core.errors import ConfigError
from vorox.core.extensions import load_function
from vorox.core.log import RunLog
from vorox.experiments.metrics import metric


class MeasuringFunctions:
    """Functions that a configuration names by import path.

    Args:
        paths: As configured.
        kind: What they are, for messages: ``metric`` or ``evaluation``.
        key: The setting.
        prefix: Beginning of the names of their numbers.
        log: Takes their failures.

    Raises:
        ConfigError: One cannot be imported, or two have the same name.
    """

    def __init__(self, paths: Sequence[str], *, kind: str, key: str, prefix: str, log: RunLog) -> None:
        self._kind, self._prefix, self._log = kind, prefix, log
        self._failed: set[str] = set()
        self._functions: dict[str, Callable[..., object]] = {}
        names = [path.rpartition(":")[2] for path in paths]
        for number, (name, path) in enumerate(zip(names, paths, strict=True)):
            if Counter(names)[name] > 1:
                raise ConfigError(
                    f"{key} names {Counter(names)[name]} functions called {name}", where=f"{key}.{number}",
                    hint="give each a name of its own: their numbers are named after them",
                )  # fmt: skip
            self._functions[name] = load_function(path, kind=kind, where=f"{key}.{number}")

    def __call__(self, *arguments: Any) -> dict[str, float]:
        """Return the numbers of all functions: ``<prefix><function>``, or ``<prefix><function>/<key>`` of a mapping."""
        found: dict[str, float] = {}
        for name, function in self._functions.items():
            try:
                found.update(self._numbers(self._prefix + name, function(*arguments)))
            except Exception as error:  # whatever a function of the user does, the training goes on
                if name not in self._failed:
                    self._failed.add(name)
                    text = f"The {self._kind} {name} failed ({type(error).__name__}: {error}); reported once"
                    self._log.event(f"{self._kind}_failed", text, level="warning", function=name)
        return found

    def _numbers(self, name: str, value: object) -> dict[str, float]:
        values = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {"": value}
        numbers = {f"{name}/{key}" if key else name: float(cast("float", number)) for key, number in values.items()}
        for full_name in numbers:
            metric(full_name)
        return numbers
