"""Read JSON that somebody else may have written: bounded in size, depth and numbers, with one kind of error.

A run directory, a checkpoint, a model's folder and a store's answer may come from anyone. Python's reader accepts
nesting that exhausts the stack of later code, integers that no float holds, and blocks at a FIFO.
"""

from __future__ import annotations

import errno
import json
import re
import stat
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeGuard, cast

from vorox.core.errors import DataError

MAX_BYTES = 1 << 26
MAX_DEPTH = 100
MAX_INTEGER = (1 << 64) - 1
MAX_STEP = 1 << 53
"""Steps above this are not steps: a float would round them."""
_INTEGER_DIGITS = 20
_NO_LIMIT = str(int(1e30))
"""What transformers writes for no limit, into most files ``tokenizer_config.json``."""

Types = Any
"""What ``check_types`` checks: a type, a tuple of types, ``[TYPES]`` for a list, ``{KEY: TYPES}`` for a mapping."""


class MalformedJson(DataError, ValueError):
    """JSON that cannot be read, or is not of the form that its file has."""


def parse_json(data: bytes | str, where: Path | str, types: Types = object, *, max_bytes: int = MAX_BYTES) -> Any:
    """Return the value of a JSON text.

    Args:
        data: The text.
        where: Its file, for the error.
        types: What the value has to be; see ``check_types``.
        max_bytes: Bound of the size.

    Raises:
        MalformedJson: It is not JSON, too large, nested more than ``MAX_DEPTH`` deep, has an integer beyond 64 bits, or
            is of another type.
    """
    if len(data) > max_bytes:
        raise _malformed(where, f"it is larger than {max_bytes:,} bytes")
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig", "surrogatepass")
        value = (_BOUNDED if _LONG_INTEGER.search(text) else _DECODER).decode(text)
    except RecursionError:
        raise _too_deep(where) from None
    except ValueError as error:
        raise _malformed(where, str(error)) from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value):
        raise _too_deep(where)
    if types is not object:
        check_types(value, types, where)
    return value


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the mapping in a line of JSON, ``None`` if it is malformed. Integers are as large as a float holds.

    The fast path of ``parse_json``: logs have millions of lines.
    """
    try:
        text = line.decode("utf-8").strip()
        if _HUGE_INTEGER.search(text):
            return None
        value, end = _scan(text, 0)
    except (ValueError, RecursionError, StopIteration):
        return None
    if type(value) is not dict or end != len(text):  # pyright: ignore[reportUnknownArgumentType]
        return None
    found = cast("dict[str, Any]", value)
    return None if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(found) else found


def read_json(path: Path, types: Types = object, *, max_bytes: int = MAX_BYTES) -> Any:
    """Return the value of a JSON file; see ``parse_json``.

    Raises:
        MalformedJson: As ``parse_json``, or it is not a regular file.
        OSError: It cannot be read.
    """
    return parse_json(read_regular(path, max_bytes), path, types, max_bytes=max_bytes)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, or a link to one, for reading; do not wait at a FIFO.

    Raises:
        MalformedJson: It is a directory, a device, a FIFO, a socket, or a link to itself.
        OSError: It cannot be opened.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _malformed(path, "it is a symbolic link to itself") from error
        raise
    if not stat.S_ISREG(mode):
        raise _malformed(path, "it is not a regular file")
    return path.open("rb")


def read_regular(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        MalformedJson: It is not a regular file, or is larger than ``max_bytes``.
        OSError: It cannot be read.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise _malformed(path, f"it is larger than {max_bytes:,} bytes")
    return content


def check_types(value: Any, types: Types, where: Path | str, name: str = "") -> None:
    """Check the types of a value and of what is in it. Keys of a mapping that are not named may hold anything.

    Args:
        value: The value.
        types: A type, a tuple of types (``None`` stands for itself), a list of one item for the items of a list, or a
            mapping for the keys of a mapping, which may be absent; the key ``...`` stands for all others.
        where: The file, for the error.
        name: The place in the file, for the error.

    Raises:
        MalformedJson: A value is of another type.
    """
    if isinstance(types, tuple):
        allowed = cast("tuple[Types, ...]", types)
        if value is None and None in allowed:
            return
        inner = next((one for one in allowed if not isinstance(one, type) and one is not None), None)
        if inner is not None and isinstance(value, dict if isinstance(inner, dict) else list):
            check_types(value, inner, where, name)
        elif not any(_is_of(value, one) for one in allowed if isinstance(one, type)):
            raise _wrong_type(value, where, name)
    elif isinstance(types, list):
        if not isinstance(value, list):
            raise _wrong_type(value, where, name)
        for number, item in enumerate(cast("list[Any]", value)):
            check_types(item, types[0], where, f"{name}[{number}]")
    elif isinstance(types, dict):
        if not isinstance(value, dict):
            raise _wrong_type(value, where, name)
        known = cast("dict[Any, Types]", types)
        for key, item in cast("dict[str, Any]", value).items():
            if (wanted := known.get(key, known.get(...))) is not None:
                check_types(item, wanted, where, f"{name}.{key}" if name else key)
    elif not _is_of(value, types):
        raise _wrong_type(value, where, name)


def is_step(value: object) -> TypeGuard[int]:
    """Whether a value of a file is a number of steps."""
    return type(value) is int and 0 <= value <= MAX_STEP


def mapping(value: object) -> Mapping[str, Any]:
    """Return a value of a file if it is a mapping, else an empty one."""
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _is_of(value: Any, wanted: type) -> bool:
    if isinstance(value, bool):
        return wanted in (bool, object)
    return isinstance(value, int | float) if wanted is float else isinstance(value, wanted)


def _is_deep(value: Any) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += [item for item in cast("dict[str, Any]", one).values() if isinstance(item, dict | list)]
            elif isinstance(one, list):
                inner += [item for item in cast("list[Any]", one) if isinstance(item, dict | list)]
        if not inner:
            return False
        level = inner
    return True


def _integer(text: str) -> int:
    if text == _NO_LIMIT:
        return int(text)
    value = int(text) if len(text) <= _INTEGER_DIGITS + 1 else MAX_INTEGER + 1
    if abs(value) > MAX_INTEGER:
        raise ValueError(f"an integer of {len(text)} digits does not fit into 64 bits")
    return value


_DECODER, _BOUNDED = json.JSONDecoder(), json.JSONDecoder(parse_int=_integer)
_LONG_INTEGER = re.compile(r"[0-9]{19}")
_HUGE_INTEGER = re.compile(r"[0-9]{300}")
_scan = cast("Any", _DECODER).scan_once
_NAMES: dict[type, str] = {
    dict: "a mapping",
    list: "a list",
    str: "text",
    bool: "a truth value",
    int: "an integer",
    float: "a number",
}


def _malformed(where: Path | str, why: str) -> MalformedJson:
    return MalformedJson(f"The file cannot be read: {why}", where=str(where), hint="restore it from a copy")


def _too_deep(where: Path | str) -> MalformedJson:
    return _malformed(where, f"it is nested more than {MAX_DEPTH} levels deep")


def _wrong_type(value: object, where: Path | str, name: str) -> MalformedJson:
    kind = "null" if value is None else _NAMES.get(type(value), type(value).__name__)
    return _malformed(where, f"{name or 'its value'} is {kind}")
