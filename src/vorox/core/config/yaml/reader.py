"""A defensive YAML 1.2 reader: text to plain values with line numbers.

PyYAML implements YAML 1.1, where ``3e-4`` is a string, ``off`` is false and ``010`` is 8. Only its event parser is used
here; scalars are resolved by the YAML 1.2 core schema. Values are built without recursion, with limits on bytes, depth
and values that aliases repeat, so alias bombs and deep nesting are harmless; values that are written out may be as many
as a resolved configuration of that size has. Tags are refused, so the result contains only mappings, lists, strings,
numbers, booleans and null.

Syntax errors and exceeded limits raise immediately; duplicate keys, tags and other local faults are collected and
reported together with all other problems.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias, cast

import yaml

from vorox.core.config.yaml.faults import TOML_FAULT, explain_fault, looks_like_toml
from vorox.core.errors import ConfigError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
KeyPath: TypeAlias = tuple["str | int", ...]

MAX_TEXT_BYTES = 4 << 20
"""Room for a resolved configuration of several thousand sources."""
MAX_DEPTH = 32
MAX_ALIASED_NODES = 10_000
_MAX_NODES = 400_000
"""More than a resolved configuration of ``MAX_TEXT_BYTES`` has; it bounds the time that a hostile text takes."""
_LARGE_TEXT_BYTES = 32 << 10
"""Longer texts are parsed by libyaml, ten times as fast; what it refuses is parsed again, for the message."""

_INTEGER = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"[-+]?(\.inf|\.Inf|\.INF)")
_NAN = frozenset({".nan", ".NaN", ".NAN"})
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEAN = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_MAX_DIGITS = 4_000  # Python refuses to convert longer integers
_MAX_EXACT = 1e30  # no count is larger, and a larger power of ten is a long integer


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """A mapping parsed from text.

    Attributes:
        value: The mapping.
        lines: Line, from 1, of every key and list entry, by path.
        problems: Local faults, each with its line.
    """

    value: dict[str, Json]
    lines: dict[KeyPath, int]
    problems: list[tuple[str, int]]


def resolve_plain(text: str) -> Json:
    """Resolve an unquoted scalar by the YAML 1.2 core schema."""
    if text in _NULL:
        return None
    if text in _BOOLEAN:
        return _BOOLEAN[text]
    if len(text) <= _MAX_DIGITS:
        if _INTEGER.fullmatch(text):
            return int(text)
        if _OCTAL.fullmatch(text):
            return int(text[2:], 8)
        if _HEXADECIMAL.fullmatch(text):
            return int(text[2:], 16)
        if _FLOAT.fullmatch(text):
            return _number(text)
    if _INFINITY.fullmatch(text):
        return float("-inf") if text.startswith("-") else float("inf")
    return float("nan") if text in _NAN else text


class WholeFloat(float):
    """A float whose text is an integer beyond float precision; ``exact`` is that integer."""

    exact: int


def _number(text: str) -> float:
    value = float(text)
    if not 2**53 <= abs(value) < _MAX_EXACT:
        return value
    exact = Fraction(text)
    if exact.denominator > 1:
        return value
    whole = WholeFloat(value)
    whole.exact = exact.numerator
    return whole


@dataclass(slots=True)
class _Frame:
    """A mapping or list under construction."""

    path: KeyPath
    container: list[Json] | dict[str, Json]
    anchor: str | None
    first_node: int
    key: str | None = None
    skip_value: bool = False  # the value belongs to a refused key
    key_lines: dict[str, int] = field(default_factory=dict[str, int])


class _Builder:
    """Builds values from parser events with an explicit stack."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.root: Json = None
        self.has_root = False
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[tuple[str, int]] = []
        self._stack: list[_Frame] = []
        self._anchors: dict[str, tuple[Json, int]] = {}
        self._num_nodes = self._num_aliased = 0

    def build(self, events: Iterable[yaml.Event]) -> None:
        num_documents = 0
        for event in events:
            line = event.start_mark.line + 1 if event.start_mark else 0
            if isinstance(event, yaml.DocumentStartEvent):
                num_documents += 1
                if num_documents > 1:
                    raise self._fatal("Second YAML document in one file; keep one configuration per file", line)
            elif isinstance(event, yaml.ScalarEvent):
                self._scalar(event, line)
            elif isinstance(event, yaml.AliasEvent):
                self._alias(event, line)
            elif isinstance(event, yaml.MappingStartEvent):
                self._open({}, event, line)
            elif isinstance(event, yaml.SequenceStartEvent):
                self._open([], event, line)
            elif isinstance(event, yaml.CollectionEndEvent):
                self._close()

    def _fatal(self, what: str, line: int) -> ConfigError:
        return ConfigError(what, where=f"{self.name}:{line}")

    def _count(self, num_nodes: int, line: int) -> None:
        self._num_nodes += num_nodes
        if self._num_nodes > _MAX_NODES:
            raise self._fatal(f"More than {_MAX_NODES:,} values", line)

    def _count_aliased(self, num_nodes: int, line: int) -> None:
        self._count(num_nodes, line)
        self._num_aliased += num_nodes
        if self._num_aliased > MAX_ALIASED_NODES:
            raise self._fatal(f"Aliases repeat more than {MAX_ALIASED_NODES:,} values", line)

    def _refuse_tag(self, tag: str | None, line: int) -> None:
        if tag is not None:
            self.problems.append(
                (f"the tag {tag} is not supported; write the value itself, quoted if it is text", line)
            )

    def _expects_key(self) -> bool:
        return bool(self._stack) and isinstance(self._stack[-1].container, dict) and self._stack[-1].key is None

    def _child_path(self) -> KeyPath:
        if not self._stack:
            return ()
        frame = self._stack[-1]
        last: str | int = len(frame.container) if isinstance(frame.container, list) else cast(str, frame.key)
        return (*frame.path, last)

    def _place(self, value: Json, line: int) -> None:
        """Add a value to the innermost open collection."""
        path = self._child_path()
        if not self._stack:
            self.root, self.has_root = value, True
            return
        frame = self._stack[-1]
        if isinstance(frame.container, list):
            frame.container.append(value)
            self.lines[path] = line
        else:
            if not frame.skip_value:
                frame.container[cast(str, frame.key)] = value
                self.lines[path] = frame.key_lines[cast(str, frame.key)]
            frame.key, frame.skip_value = None, False

    def _key(self, text: str, line: int) -> None:
        frame = self._stack[-1]
        frame.key = text
        if text in frame.key_lines:
            name = ".".join(str(part) for part in (*frame.path, text))
            self.problems.append((f"duplicate key {name}; the first is in line {frame.key_lines[text]}", line))
            frame.skip_value = True
        else:
            frame.key_lines[text] = line

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> None:
        self._count(1, line)
        self._refuse_tag(event.tag, line)
        text = event.value
        if self._expects_key():
            self._key(text, line)
            return
        value = _joined(text) if event.style else resolve_plain(text)  # libyaml: plain is ""
        if event.anchor is not None:
            self._anchors[event.anchor] = (value, 1)
        self._place(value, line)

    def _alias(self, event: yaml.AliasEvent, line: int) -> None:
        if event.anchor not in self._anchors:
            raise self._fatal(f"Alias *{event.anchor} has no complete anchor above it", line)
        if self._expects_key():
            raise self._fatal("Alias used as a key", line)
        value, num_nodes = self._anchors[event.anchor]
        self._count_aliased(num_nodes, line)
        self._place(_copy(value), line)

    def _open(self, container: list[Json] | dict[str, Json], event: yaml.CollectionStartEvent, line: int) -> None:
        self._count(1, line)
        self._refuse_tag(event.tag, line)
        if self._expects_key():
            raise self._fatal("Key must be a scalar, not a mapping or a list", line)
        if len(self._stack) >= MAX_DEPTH:
            raise self._fatal(f"Nested more than {MAX_DEPTH} levels deep", line)
        path = self._child_path()
        self._place(container, line)
        self._stack.append(_Frame(path, container, event.anchor, self._num_nodes))

    def _close(self) -> None:
        frame = self._stack.pop()
        if frame.anchor is not None:
            self._anchors[frame.anchor] = (frame.container, 1 + self._num_nodes - frame.first_node)


def _joined(text: str) -> str:
    """Join surrogate pairs as JSON defines them; single surrogates are kept."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _copy(value: Json) -> Json:
    """Return a deep copy; depth is bounded by ``MAX_DEPTH``."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


@functools.lru_cache(maxsize=32)
def _parse(text: str, name: str) -> _Builder:
    """Return what a text holds; one process reads the same presets and recorded configurations several times."""
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    if num_bytes > MAX_TEXT_BYTES:
        raise ConfigError(
            f"Configuration is longer than {MAX_TEXT_BYTES:,} bytes",
            where=name,
            hint="check that the file is a configuration",
        )
    if num_bytes > _LARGE_TEXT_BYTES and (fast := getattr(yaml, "CSafeLoader", None)) is not None:
        builder = _Builder(name)
        with contextlib.suppress(yaml.YAMLError, UnicodeError):
            builder.build(yaml.parse(text, Loader=fast))
            return builder
    builder = _Builder(name)
    try:
        builder.build(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        fault = explain_fault(error, text)
        raise ConfigError(fault.what, where=where, hint=fault.hint) from error
    except yaml.YAMLError as error:
        fault = explain_fault(error, text)
        raise ConfigError(fault.what, where=name, hint=fault.hint) from error
    return builder


def read_mapping(text: str, name: str) -> YamlDocument:
    """Read one YAML document whose top level is a mapping; an empty text is an empty mapping.

    Raises:
        ConfigError: The text is invalid YAML, exceeds a limit, or is not a mapping; ``where`` is ``name`` and the line.
    """
    builder = _parse(text, name)
    root = builder.root if builder.root is not None else {}
    if not isinstance(root, dict):
        if looks_like_toml(text):
            raise ConfigError(TOML_FAULT.what, where=f"{name}:1", hint=TOML_FAULT.hint)
        raise ConfigError("Configuration must be a mapping of `key: value` pairs", where=f"{name}:1")
    return YamlDocument({key: _copy(value) for key, value in root.items()}, {**builder.lines}, [*builder.problems])


def read_value(text: str, name: str) -> Json:
    """Parse a command-line value: JSON, a YAML list, mapping or quoted text, or a plain scalar.

    A plain scalar is not parsed further, so ``*.txt``, ``a: b`` and ``x #1`` are text.

    Raises:
        ConfigError: The value starts like a list, mapping or quoted text but is invalid.
    """
    stripped = text.strip()
    if not stripped.startswith(("[", "{", '"', "'")):
        plain = resolve_plain(stripped)
        return text if isinstance(plain, str) else plain
    builder = _parse(stripped, name)
    for what, _ in builder.problems:
        raise ConfigError(what, where=name)
    if stripped.startswith('"'):  # JSON escapes (surrogate pairs) differ from YAML's
        try:
            return cast(Json, json.loads(stripped))
        except ValueError:
            pass
    return _copy(builder.root)
