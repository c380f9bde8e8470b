"""Dependencies between settings: keys that only have an effect under certain values of another.

No setting is ignored silently: one without effect in the layer that sets it is a problem. One that a later layer
disables (``tokenizer.kind=byte`` over a preset's ``tokenizer.vocab_size``) is reset to its default, so the resolved
configuration is consistent. A feature that the user asked for and a later layer does not support (a teacher, under
``backend=jax``) is a problem too: the run would be another one without it. The same holds for mutually exclusive keys,
such as the three lengths of a run: the latest layer wins. What depends on what is declared with each setting
(``core/schema/setting.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from vorox.core.config.layers.tree import ConfigTree, Problem
from vorox.core.config.schema_fields import alternatives, find_field, schema_fields
from vorox.core.config.yaml.reader import Json
from vorox.core.schema.data import SourceConfig
from vorox.core.schema.setting import FUNCTION, Need
from vorox.core.user_code.extensions import is_extension

SOURCE_LISTS = ("data.sources", "data.validation.sources")
"""The keys of the lists of sources."""


@dataclass(frozen=True, slots=True)
class Dependency:
    """A key that has an effect only under certain values of another key, its switch."""

    key: str
    need: Need

    @property
    def switch(self) -> str:
        return self.need.key

    def holds(self, value: Json) -> bool:
        """Whether the key has an effect under a value of the switch."""
        need, plain = self.need, tuple(value) if isinstance(value, list) else value
        if need.contains:
            return any(need.contains in str(entry) for entry in (plain if isinstance(plain, tuple) else (plain,)))
        if not (need.values or need.never):
            return bool(plain)
        listed = need.never or need.values
        is_listed = plain in listed or (FUNCTION in listed and is_extension(value))
        return not is_listed if need.never else is_listed

    @property
    def remedy(self) -> str:
        """What has to be set, in words."""
        if self.need.remedy:
            return self.need.remedy
        if self.need.never:
            return f"{self.switch} other than {_listed(self.need.never)}"
        values = [value for value in self.need.values if value != FUNCTION]
        return f"{self.switch}={_listed(values)}" if values else self.switch


@functools.cache
def dependencies() -> tuple[Dependency, ...]:
    """Return all dependencies, those of a switch before those on it."""
    found = [Dependency(key, need) for key, field in schema_fields().items() for need in field.facts.needs]
    switches: dict[str, list[str]] = {}
    for entry in found:
        switches.setdefault(entry.key, []).append(entry.switch)

    def depth(key: str) -> int:
        return 1 + max((depth(switch) for switch in switches.get(key, ())), default=0)

    return tuple(sorted(found, key=lambda entry: depth(entry.key)))


def source_conflicts(source: SourceConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, remedy) for every setting of a source that has no effect under its other settings."""
    prefix = f"{SOURCE_LISTS[0]}.*."
    for entry in dependencies():
        key = entry.key.removeprefix(prefix)
        if entry.key == key or "." in key:
            continue
        is_default = getattr(source, key) == schema_fields()[entry.key].default
        if not is_default and not entry.holds(getattr(source, entry.switch.removeprefix(prefix))):
            yield key, entry.remedy.replace(prefix, "")


def resolve_dependencies(tree: ConfigTree) -> None:
    """Reset keys that a later layer disables, and report keys that have no effect in the layer that sets them."""
    _fit_micro_batch(tree)
    for key, field in schema_fields().items():
        implied = field.facts.implied
        if implied is not None and tree.get(implied.key) == implied.under and not tree.is_explicit(key):
            tree.set_default(key, implied.value, f"{implied.key}={_show(implied.under)}")
    for group in alternatives():
        given = [key for key in group if tree.get(key) is not None]
        latest = max((tree.origin(key).layer for key in given), default=-1)
        for key in given:
            if tree.origin(key).layer < latest:
                tree.reset(key)
    disabled: dict[str, float] = {}  # reset keys, by the layer that disabled them
    for dependency in dependencies():
        for key in tree.expand_key(dependency.key):
            index = key.removeprefix(dependency.key.partition("*")[0]).partition(".")[0]
            switch = dependency.switch.replace("*", index)
            field = find_field(key)
            value, setting = tree.get(key), tree.get(switch)
            default = field.default if field else None
            if value is None or dependency.holds(setting) or _same(value, default):  # null: off, whatever the default
                continue
            layer, origin = disabled.get(switch, tree.origin(switch).layer), tree.origin(key)
            if origin.layer < layer and not (dependency.need.is_feature and origin.by_user):
                tree.reset(key)
                disabled[key] = layer
                continue
            context = "" if isinstance(setting, list | tuple) and not setting else f" with {switch}={_show(setting)}"
            tree.problems.append(
                Problem(
                    f"{key}={_show(value)} has no effect{context}; it needs {dependency.remedy.replace('*', index)}",
                    origin.text,
                    (key, switch),
                )
            )


def _fit_micro_batch(tree: ConfigTree) -> None:
    """Reduce the micro-batch to the batch if a later layer makes the batch smaller."""
    rows, micro = tree.get("train.global_batch_sequences"), tree.get("train.micro_batch_sequences")
    is_auto = tree.get("parallel.data_parallel_size") == "auto"
    parts = (1, 1) if is_auto else (tree.get("parallel.data_parallel_size"), tree.get("parallel.fsdp_size"))
    batch_origin = tree.origin("train.global_batch_sequences")
    if batch_origin.layer <= tree.origin("train.micro_batch_sequences").layer or not all(
        isinstance(number, int) and number > 0 for number in (rows, micro, *parts)
    ):
        return
    each, rest = divmod(cast(int, rows), cast(int, parts[0]) * cast(int, parts[1]))
    if not rest and 0 < each < cast(int, micro):
        tree.set_default("train.micro_batch_sequences", each, f"train.global_batch_sequences={rows}")


def _same(value: Json, default: object) -> bool:
    if isinstance(value, list) and isinstance(default, tuple):
        return tuple(value) == default
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def _show(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _listed(values: Sequence[object]) -> str:
    words = [_show(value) for value in values]
    return " or ".join([*([", ".join(words[:-1])] if len(words) > 1 else []), words[-1]])
