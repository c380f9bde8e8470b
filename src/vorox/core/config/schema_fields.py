"""The schema as a flat table: every key with its type, default, bounds and description.

Suggestions for unknown keys, ``explain`` and comparisons read it. Keys are dotted; ``*`` is any entry of a list
of sections (``data.sources.*.weight``).
"""

from __future__ import annotations

import difflib
import functools
import itertools
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

import annotated_types
from pydantic.fields import FieldInfo

from vorox.core.schema import RunConfig
from vorox.core.schema.section import ImportPath, Section
from vorox.core.schema.setting import ENGINES, Need, SettingFacts, facts_of

REQUIRED: Final = object()
"""Default of a required key."""


_NAMES_ELSEWHERE: Final[Mapping[str, str]] = {
    "betas": "optimizer.beta1",
    "gradient_accumulation_steps": "train.micro_batch_sequences",
    "lr_warmup_fraction": "schedule.warmup_steps",
    "tokenizer_name": "tokenizer.path",
    "warmup_ratio": "schedule.warmup_steps",
}
"""Settings of other trainers without an equivalent, and the setting to suggest."""


@dataclass(frozen=True, slots=True)
class SchemaField:
    """One key of the configuration.

    Attributes:
        key: Dotted, ``*`` for any entry of a list.
        annotation: Its type, as annotated.
        default: The default, or ``REQUIRED``.
        description: From the schema.
        type_name: The type, for messages: ``integer``, ``number or null``, ``list of texts``, ``section``.
        accepted: Bounds, for messages; empty without any.
        choices: The accepted values of a key with a fixed set.
        is_section: Whether it contains further keys.
        facts: What else it declares; nothing of it is ``None`` but the location, and keys of needs are dotted.
    """

    key: str
    annotation: Any
    default: Any
    description: str
    type_name: str
    accepted: str
    choices: tuple[Any, ...]
    is_section: bool
    facts: SettingFacts


_OF_RUN = SettingFacts(digest="identity", resume="logged")
"""What holds for a section that states nothing."""


@functools.cache
def schema_fields() -> Mapping[str, SchemaField]:
    """Return all keys, including sections and lists, in schema order."""
    return {field.key: field for field in _walk(RunConfig, "", _OF_RUN)}


def leaf_keys() -> tuple[str, ...]:
    """Return all keys that hold a value."""
    return tuple(key for key, field in schema_fields().items() if not field.is_section)


@functools.cache
def synonyms() -> Mapping[str, str]:
    """Return every synonym with its key."""
    return {name: field.key for field in schema_fields().values() for name in field.facts.synonyms}


@functools.cache
def alternatives() -> tuple[tuple[str, ...], ...]:
    """Return the groups of keys of which at most one is given."""
    groups = dict.fromkeys(alternatives_of(key) for key, field in schema_fields().items() if field.facts.alternatives)
    return tuple(groups)


def alternatives_of(key: str) -> tuple[str, ...]:
    """Return a key and its alternatives, in schema order."""
    group = {key, *_absolute(key, schema_fields()[key].facts.alternatives)}
    return tuple(name for name in schema_fields() if name in group)


def given_keys(config: RunConfig, keys: tuple[str, ...]) -> list[str]:
    """Return those of the keys that have a value."""
    names = [key.partition(".") for key in keys]
    return [f"{section}.{name}" for section, _, name in names if getattr(getattr(config, section), name) is not None]


def keys_where(holds: Callable[[SettingFacts], bool]) -> tuple[str, ...]:
    """Return the keys, of sections too, whose facts meet a condition."""
    return tuple(key for key, field in schema_fields().items() if holds(field.facts))


def wildcard(key: str) -> str:
    """Replace every list index in a key by ``*``."""
    return ".".join("*" if part.isdecimal() else part for part in key.split("."))


def find_field(key: str) -> SchemaField | None:
    """Return the field of a key, with or without list indices."""
    table = schema_fields()
    direct = table.get(wildcard(key))
    if direct is not None:
        return direct
    return next((field for name, field in table.items() if name.replace(".*", "") == key), None)


@functools.lru_cache(maxsize=4096)
def facts_at(key: str) -> SettingFacts:
    """Return what a key declares; inside a mapping, what the mapping declares, and as a section if nothing does."""
    field = schema_fields().get(wildcard(key))
    if field is not None:
        return field.facts
    above = key.rpartition(".")[0]
    return facts_at(above) if above else _OF_RUN


def nearest(key: str, candidates: Iterable[str] | None = None, limit: int = 3) -> list[str]:
    """Return known keys similar to ``key``, best first: by the whole path, or by the last part in another section."""
    pool = list(candidates) if candidates is not None else [name for name in schema_fields() if not name.endswith("*")]
    wanted = wildcard(key)
    section, _, last = wanted.rpartition(".")

    def similarity(name: str) -> float:
        whole = difflib.SequenceMatcher(None, wanted, name).ratio()
        name_last = name.rpartition(".")[2]
        part = difflib.SequenceMatcher(None, last, name_last).ratio()
        if last in name_last.split("_") or name_last in last.split("_"):
            part = max(part, 0.8)
        is_near = part > 0.85
        bonus = 0.05 if is_near and name.rpartition(".")[0] == section else 0.0  # rather a slip than another section
        return max(whole, 0.5 * part + 0.5 * whole, 0.95 * part if is_near else 0.0) + bonus

    elsewhere = _NAMES_ELSEWHERE.get(last) or synonyms().get(last)
    if candidates is None and elsewhere is not None:
        return [elsewhere]
    ranked = sorted(((similarity(name), name) for name in pool), key=lambda pair: (-pair[0], pair[1]))
    best = ranked[0][0] if ranked else 0.0
    return [name for value, name in ranked[:limit] if value >= 0.6 and value >= best - 0.1]


def did_you_mean(key: str, candidates: Iterable[str] | None = None) -> str:
    """Return ``did you mean a or b?``, or an empty string without a similar key."""
    names = nearest(key, candidates)
    return f"did you mean {' or '.join(names)}?" if names else ""


def admits(annotation: Any, kind: type) -> bool:
    """Whether the annotation accepts values of exactly this Python type."""
    return kind in _members(annotation)


def in_yaml_words(description: str) -> str:
    """Return a description in terms of YAML (``null`` for ``None``)."""
    return description.replace("None:", "null:")


def _walk(section: type[Section], prefix: str, above: SettingFacts) -> Iterator[SchemaField]:
    for name, info in section.model_fields.items():
        key = f"{prefix}{name}"
        inner = _section_of(info.annotation)
        found = _describe(key, info, above, is_section=inner is not None)
        yield found
        if inner is not None:
            many = typing.get_origin(info.annotation) is tuple
            yield from _walk(inner, f"{key}.*." if many else f"{key}.", found.facts)


def _absolute(key: str, names: Iterable[str]) -> list[str]:
    """Return dotted keys: those without a dot are in the same section."""
    section = key.rpartition(".")[0]
    return [name if "." in name or name == "backend" else f"{section}.{name}" for name in names]


def _facts(key: str, info: FieldInfo, above: SettingFacts) -> SettingFacts:
    stated = facts_of(info)
    return replace(
        stated,
        digest=stated.digest or above.digest,
        resume=stated.resume or above.resume,
        needs=tuple(replace(need, key=_absolute(key, [need.key])[0]) for need in _needs(stated)),
    )


def _needs(stated: SettingFacts) -> tuple[Need, ...]:
    """What a setting needs, the engine too if only some support it whatever its value."""
    engines = stated.engines
    if isinstance(engines, Mapping) or len(engines) == len(ENGINES):
        return stated.needs
    return (Need("backend", engines, is_feature=True), *stated.needs)


def _section_of(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if typing.get_origin(annotation) is tuple:
        return _section_of(typing.get_args(annotation)[0])
    return None


def _members(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(member for part in typing.get_args(annotation) for member in _members(part))
    if typing.get_origin(annotation) is Annotated and annotation != ImportPath:
        return (typing.get_args(annotation)[0],)  # a constrained member of a union
    return (annotation,)


def _describe(key: str, info: FieldInfo, above: SettingFacts, *, is_section: bool) -> SchemaField:
    default = REQUIRED if info.is_required() else info.get_default(call_default_factory=True, validated_data={})
    choices = tuple(
        choice
        for member in _members(info.annotation)
        if typing.get_origin(member) is Literal
        for choice in typing.get_args(member)
    )
    return SchemaField(
        key=key,
        annotation=info.annotation,
        default=default,
        description=in_yaml_words(info.description or ""),
        type_name=" or ".join(_type_name(member) for member in _members(info.annotation)),
        accepted=_accepted(info),
        choices=choices,
        is_section=is_section,
        facts=_facts(key, info, above),
    )


_IMPORT_PATH_NAME = "package.module:function"
_TYPE_NAMES = {
    ImportPath: _IMPORT_PATH_NAME,
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    type(None): "null",
}


def _type_name(member: Any) -> str:
    if typing.get_origin(member) is Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(member))
    if typing.get_origin(member) is tuple:
        (entry,) = _members(typing.get_args(member)[0])
        if typing.get_origin(entry) is Literal:
            return f"list of {_type_name(entry)}"
        if entry == ImportPath:
            return f"list of {_IMPORT_PATH_NAME}"
        return "list of sections" if _section_of(entry) else f"list of {_TYPE_NAMES[entry]}s"
    if typing.get_origin(member) is Mapping:
        return "mapping"
    return "section" if _section_of(member) else _TYPE_NAMES[member]


def _accepted(info: FieldInfo) -> str:
    parts: list[str] = []
    members = typing.get_args(info.annotation)
    constraints = [getattr(member, "__metadata__", ()) for member in members if member != ImportPath]
    of_members = [rule for found in itertools.chain(*constraints) for rule in getattr(found, "metadata", ())]
    for rule in [*info.metadata, *of_members]:
        if isinstance(rule, annotated_types.Ge):
            parts.append(f"at least {rule.ge}")
        elif isinstance(rule, annotated_types.Gt):
            parts.append(f"greater than {rule.gt}")
        elif isinstance(rule, annotated_types.Le):
            parts.append(f"at most {rule.le}")
        elif isinstance(rule, annotated_types.Lt):
            parts.append(f"less than {rule.lt}")
        elif isinstance(rule, annotated_types.MinLen):
            parts.append(f"at least {rule.min_length} of them")
        elif getattr(rule, "pattern", None):
            parts.append(f"text matching {rule.pattern}")
    return ", ".join(parts)


LENGTHS, WARM_UPS = alternatives_of("train.num_steps"), alternatives_of("schedule.warmup_steps")
"""The keys of the length of a run, of which one is given, and of its warm-up, of which at most one is."""
