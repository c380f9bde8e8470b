"""Rules about sources, each once: for the check of a configuration, and for builds from sources that nobody checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

from vorox.core.config.layers.setting_dependencies import SOURCE_LISTS
from vorox.core.config.layers.tree import Problem
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig, SourceConfig


def exact_weight(weight: float | str) -> Fraction:
    """Return the exact value of a source's weight: a decimal number, or a string with a number or ``a/b``.

    Raises:
        ValueError: The weight is not a positive number.
    """
    try:
        value = Fraction(str(weight).replace(" ", ""))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{weight!r} is not a number or a fraction such as '1/3'") from None
    if value <= 0:
        raise ValueError(f"{weight} is not positive; remove the source instead")
    return value


def bucket_names(source: SourceConfig) -> list[str]:
    """Return the names under which the plan has the buckets of a source; empty if it is not split."""
    return [] if source.split_by is None else [f"{source.name}.{part}" for part in source.split_names]


def source_lists(config: RunConfig) -> Iterator[tuple[str, Sequence[SourceConfig]]]:
    """Yield the lists of sources by key."""
    return zip(SOURCE_LISTS, (config.data.sources, config.data.validation.sources), strict=True)


def keyed_sources(config: RunConfig) -> Iterator[tuple[str, SourceConfig]]:
    """Yield every source by key."""
    return ((f"{key}.{index}", source) for key, found in source_lists(config) for index, source in enumerate(found))


def list_problems(key: str, sources: Sequence[SourceConfig]) -> Iterator[Problem]:
    """Yield the problems of the names and weights of a list of sources."""
    keyed = [(f"{key}.{index}", source) for index, source in enumerate(sources)]
    yield from name_problems((at, name) for at, source in keyed for name in (source.name, *bucket_names(source)))
    for at, source in keyed:
        yield from weight_problems(f"{at}.weight", source.weight, f"{at}.weight")


def name_problems(named: Iterable[tuple[str, str]]) -> Iterator[Problem]:
    """Yield the names that several sources have, given the key and a name of each source or bucket."""
    seen: dict[str, str] = {}
    for key, name in named:
        other = seen.setdefault(name, key)
        if other != key:
            what = f"{key}.name={name} is also the name of {other}; give each its own name"
            yield Problem(what, keys=(f"{key}.name",))


def weight_problems(place: str, weight: float | str, key: str) -> Iterator[Problem]:
    """Yield what is wrong with a weight at a place of a setting."""
    try:
        exact_weight(weight)
    except ValueError as error:
        yield Problem(f"{place}: {error}", keys=(key,))


def path_problems(key: str, source: SourceConfig) -> Iterator[Problem]:
    """Yield the problem of a source without paths that needs some."""
    if source.format != "python_stdlib" and not source.paths:
        yield Problem(
            f"{key} ({source.name}) has format {source.format} but no paths; set {key}.paths=[FOLDER or FILE]",
            keys=(f"{key}.paths", f"{key}.format"),
        )


def refuse(problems: Iterable[Problem]) -> None:
    """Raise the first problem.

    Raises:
        ConfigError: There is one.
    """
    for problem in problems:
        what, _, remedy = problem.what.partition("; ")
        raise ConfigError(what, where=problem.keys[0], hint=remedy)
