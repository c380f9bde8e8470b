"""A YAML writer whose output means the same to YAML 1.1 and 1.2 readers.

One key per line, lists of scalars on one line, ambiguous texts quoted. A line may end with a comment, such as the
origin of its value.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from vorox.core.config.yaml.reader import Json, KeyPath

Comment = Callable[[KeyPath], str]
_PLAIN_TEXT = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_AMBIGUOUS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def write_yaml(value: dict[str, Json], comment: Comment | None = None) -> str:
    """Return the text of a mapping, ending in a newline.

    Args:
        value: The mapping; keys are written in order.
        comment: Called with the path of every line with a value; an empty result writes no comment.
    """
    return "".join(f"{line}\n" for line in _mapping(value, (), "", comment))


def _mapping(value: dict[str, Json], path: KeyPath, indent: str, comment: Comment | None) -> Iterator[str]:
    for key, item in value.items():
        child = (*path, key)
        name = write_scalar(key)
        if isinstance(item, dict) and item:
            yield f"{indent}{name}:"
            yield from _mapping(item, child, indent + "  ", comment)
        elif isinstance(item, list) and any(isinstance(entry, dict | list) for entry in item):
            yield f"{indent}{name}:"
            yield from _entries(item, child, indent + "  ", comment)
        else:
            yield _with_comment(f"{indent}{name}: {write_inline(item)}", child, comment)


def _entries(items: list[Json], path: KeyPath, indent: str, comment: Comment | None) -> Iterator[str]:
    for index, item in enumerate(items):
        child = (*path, index)
        if isinstance(item, dict) and item:
            lines = list(_mapping(item, child, indent + "  ", comment))
            yield f"{indent}- {lines[0].lstrip()}"
            yield from lines[1:]
        else:
            yield _with_comment(f"{indent}- {write_inline(item)}", child, comment)


def _with_comment(line: str, path: KeyPath, comment: Comment | None) -> str:
    text = comment(path) if comment is not None else ""
    return f"{line}  # {text}" if text else line


def write_overrides(values: Mapping[str, Any]) -> str:
    """Return overrides by dotted key as they are typed in a shell."""
    return " ".join(shlex.quote(f"{key}={write_inline(value)}") for key, value in values.items())


def write_inline(value: Json) -> str:
    """Return any value on one line."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(write_inline(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{write_scalar(key)}: {write_inline(item)}" for key, item in value.items()) + "}"
    return write_scalar(value)


def write_scalar(value: bool | int | float | str | None) -> str:
    """Return a scalar on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        if _PLAIN_TEXT.fullmatch(value) and value.lower() not in _AMBIGUOUS:
            return value
        return yaml.dump(value, default_style='"', allow_unicode=True, width=2**30).rstrip("\n")
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"{value:.1f}"
    text = repr(value)
    mantissa, exponent, power = text.partition("e")
    if exponent and "." not in mantissa:  # YAML 1.1 readers read 1e-05 as a string
        return f"{mantissa}.0e{power}"
    return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(text, text)
