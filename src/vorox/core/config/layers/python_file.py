"""A configuration written as a Python file: ``config``, a mapping or a function that returns one.

The file is executed once, and its mapping is treated as if it had been read from YAML. Keys of a literal mapping keep
their lines. An exception in the file becomes a ``ConfigError`` at its line. A file may instead set attributes of two
objects, as a packed-cache trainer does; they exist already, or the file creates its own:

    model_config.hidden_size = 1536
    training_config.batch_size = 12        # rows per device
"""

from __future__ import annotations

import ast
import runpy
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, Final, cast

from vorox.core.config.yaml.reader import MAX_DEPTH, Json, KeyPath, YamlDocument
from vorox.core.errors import ConfigError, VoroxError

SECTIONS: Final = ("model_config", "training_config")
"""The objects whose attributes are settings; ``synonyms.key_of`` translates them."""


def read_python(path: Path, name: str) -> YamlDocument:
    """Run a file and read its ``config``.

    Raises:
        ConfigError: The file cannot be executed, has no ``config``, or ``config`` has values that are not plain.
    """
    lines = _lines(path, name)
    given = {section: SimpleNamespace() for section in SECTIONS}
    try:
        found = runpy.run_path(str(path), init_globals=dict(given), run_name="vorox_config")
        config: object = found.get("config")
        values: object = config() if callable(config) else config
    except (Exception, SystemExit) as error:
        if isinstance(error, VoroxError):
            raise
        raise ConfigError(f"{type(error).__name__}: {error}", where=_place(error, path, name)) from error
    sections = _attributes(found, given, is_alone=config is None)
    if config is None and sections:
        return mapping_document(_with_text(sections), lines)
    if sections:
        raise ConfigError(
            f"The file defines `config` and sets {' and '.join(sections)}; which one is meant?", where=name,
            hint="keep one of them",
        )  # fmt: skip
    if not isinstance(values, Mapping):
        kind = type(cast("object", values)).__name__
        found = "it is not defined" if config is None else f"it is of type {kind}"
        raise ConfigError(
            f"`config` must be a mapping, or a function that returns one; {found}", where=name,
            hint='write config = {"train": {"num_steps": 100}, ...}, or training_config.NAME = VALUE',
        )  # fmt: skip
    return mapping_document(cast("Mapping[Any, Any]", values), lines)


def _attributes(found: Mapping[str, Any], given: Mapping[str, SimpleNamespace], *, is_alone: bool) -> dict[str, Any]:
    """Return the settings in the two objects by section; with ``config``, only those of objects of ours.

    An object that the file creates beside ``config`` is its own business.
    """
    sections: dict[str, Any] = {}
    for section, empty in given.items():
        holder = found.get(section)
        if holder is None or not (is_alone or holder is empty):
            continue
        is_mapping = isinstance(holder, Mapping)
        values = dict(cast("Mapping[str, Any]", holder)) if is_mapping else _settings_of(holder)
        if values:
            sections[section] = values
    return sections


def _settings_of(holder: object) -> dict[str, Any]:
    """Return the attributes of an object, those of its classes first; neither methods nor private ones."""
    classes = holder.__mro__ if isinstance(holder, type) else type(holder).__mro__
    values: dict[str, Any] = {}
    for owner in (*reversed(classes[:-1]), *([] if isinstance(holder, type) else [holder])):
        values |= getattr(owner, "__dict__", {})
    return {
        name: value
        for name, value in values.items()
        if not name.startswith("_")
        and not callable(value)
        and not isinstance(value, property | classmethod | staticmethod)
    }


def _with_text(sections: dict[str, Any]) -> dict[str, Any]:
    """Add what that trainer does without being asked: it reads FineWeb-Edu, and warms up for 2.5% of it."""
    source = {"name": "fineweb-edu", "preset": "fineweb-edu"}
    return {**sections, "data": {"sources": [source]}, "schedule": {"warmup_fraction": 0.025}}


def mapping_document(values: Mapping[Any, Any], lines: Mapping[KeyPath, int] | None = None) -> YamlDocument:
    """Return a mapping of Python values as if it had been read from YAML; tuples are lists, paths are texts.

    Args:
        values: Sections by name, as in a YAML file.
        lines: Line of each key, if the mapping is from a file.
    """
    known = dict(lines or {})
    problems: list[tuple[str, int]] = []
    plain = _plain(values, (), known, problems)
    return YamlDocument(cast("dict[str, Json]", plain), known, problems)


def _place(error: BaseException, path: Path, name: str) -> str:
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"{name}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{name}:{frames[-1].lineno}" if frames else name


def _plain(value: Any, path: KeyPath, lines: Mapping[KeyPath, int], problems: list[tuple[str, int]]) -> Json:
    """Return a copy with plain values only; tuples become lists, paths become texts."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping) and len(path) < MAX_DEPTH:
        items = cast("Mapping[Any, Any]", value).items()
        return {str(key): _plain(item, (*path, str(key)), lines, problems) for key, item in items}
    if isinstance(value, list | tuple) and len(path) < MAX_DEPTH:
        entries = cast("Sequence[Any]", value)
        return [_plain(item, (*path, index), lines, problems) for index, item in enumerate(entries)]
    key, kind = ".".join(map(str, path)), type(cast("object", value)).__name__
    problems.append((f"{key} is of type {kind}; write plain values", lines.get(path, 1)))
    return None


def _lines(path: Path, name: str) -> dict[KeyPath, int]:
    """Return the line of each key in literal mappings that ``config`` is or returns."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise ConfigError(f"SyntaxError: {error.msg}", where=f"{name}:{error.lineno or 1}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"Configuration cannot be read: {error}", where=name) from error
    lines: dict[KeyPath, int] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    lines[(target.value.id, target.attr)] = node.lineno
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "config" for target in targets):
            _collect(cast("ast.Assign | ast.AnnAssign", node).value, (), lines)
        elif isinstance(node, ast.FunctionDef) and node.name == "config":
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return):
                    _collect(inner.value, (), lines)
    return lines


def _collect(node: ast.expr | None, path: KeyPath, lines: dict[KeyPath, int]) -> None:
    if isinstance(node, ast.Dict):
        for key, item in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant):
                lines[(*path, str(key.value))] = key.lineno
                _collect(item, (*path, str(key.value)), lines)
    elif isinstance(node, ast.List | ast.Tuple):
        for index, item in enumerate(node.elts):
            lines[(*path, index)] = item.lineno
            _collect(item, (*path, index), lines)
