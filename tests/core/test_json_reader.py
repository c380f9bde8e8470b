"""The reader of other people's JSON: bounded, and one kind of error that names the file."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from vorox.core.errors import DataError
from vorox.core.files.json_reader import (
    MAX_DEPTH,
    MalformedJson,
    check_types,
    is_step,
    parse_json,
    parse_line,
    read_json,
)


@pytest.mark.parametrize(
    "value",
    [{}, [], "text", 0, -1, 1.5, True, None, {"a": [1, {"b": "\u2028\U0001f600"}]}, 2**64 - 1, 1 - 2**64, [[]] * 500],
)  # fmt: skip
def test_sound_values_are_those_of_the_standard_reader(value: Any, tmp_path: Path) -> None:
    text = json.dumps(value)
    assert parse_json(text, "x") == parse_json(text.encode(), "x") == value
    (tmp_path / "x.json").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_json(tmp_path / "x.json") == value
    assert parse_line(text.encode() + b"\n") == (value if isinstance(value, dict) else None)


@pytest.mark.parametrize("text", ["Infinity", "-Infinity", "1e999"])
def test_infinite_numbers_of_model_configurations_are_read(text: str) -> None:
    """The configurations of state space models have them."""
    assert math.isinf(parse_json(text, "x"))


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 900, 100_000])
@pytest.mark.parametrize(("left", "right"), [("[", "]"), ('{"a":', "}")])
def test_depth_is_bounded(depth: int, left: str, right: str) -> None:
    text = left * depth + "1" + right * depth
    if depth <= MAX_DEPTH:
        parse_json(text, "x")
        return
    with pytest.raises(MalformedJson, match=f"nested more than {MAX_DEPTH} levels"):
        parse_json(text, "x")
    assert parse_line(text.encode()) is None


@pytest.mark.parametrize("text", ["9" * 21, "-" + "9" * 400, str(2**64), "9" * 5000, '{"a":[' + "9" * 30 + "]}"])
def test_integers_are_bounded(text: str) -> None:
    with pytest.raises(MalformedJson, match="does not fit into 64 bits"):
        parse_json(text, "x")


def test_what_transformers_writes_for_no_limit_is_read() -> None:
    """In most files ``tokenizer_config.json``."""
    assert parse_json(json.dumps({"model_max_length": int(1e30)}), "x") == {"model_max_length": int(1e30)}


def test_digits_in_text_are_text() -> None:
    assert parse_json('{"a": "' + "9" * 400 + '", "b": 1}', "x") == {"a": "9" * 400, "b": 1}


@pytest.mark.parametrize("text", ["", "{", "[1,]", '{"a":1} x', "nul", "\xff", "'a'"])
def test_an_error_names_the_file_and_is_one_kind(text: str, tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(MalformedJson) as caught:
        read_json(path)
    assert isinstance(caught.value, DataError)
    assert isinstance(caught.value, ValueError)
    assert caught.value.where == str(path)
    assert parse_line(text.encode("latin-1")) is None


def test_size_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('"' + "a" * 98 + '"')
    assert len(read_json(tmp_path / "x.json", max_bytes=100)) == 98
    with pytest.raises(MalformedJson, match="larger than 99 bytes"):
        read_json(tmp_path / "x.json", max_bytes=99)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name in ("fifo", "zero", "folder"):
        with pytest.raises(MalformedJson, match="not a regular file"):
            read_json(tmp_path / name)
    (tmp_path / "x.json").write_text("[1]")
    (tmp_path / "link").symlink_to("x.json")
    assert read_json(tmp_path / "link") == [1]
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none")


TYPES = {"a": int, "b": (str, None), "c": [{"d": float}], "e": {...: str}, "f": ({"g": bool}, None), "h": object}


@pytest.mark.parametrize(
    "value",
    [{}, {"a": 1, "z": [[]]}, {"b": None}, {"b": "x"}, {"c": [{"d": 1}, {"d": 1.5}, {}]}, {"e": {"x": "y"}},
     {"f": None}, {"f": {"g": True}}, {"h": [1]}],
)  # fmt: skip
def test_right_types_are_accepted(value: Any) -> None:
    check_types(value, TYPES, "x")


@pytest.mark.parametrize(
    ("value", "name"),
    [([], "its value is a list"), ({"a": True}, "a is a truth value"), ({"a": 1.0}, "a is a number"),
     ({"a": None}, "a is null"), ({"b": 1}, "b is an integer"), ({"c": {}}, "c is a mapping"),
     ({"c": [{}, 5]}, r"c\[1\] is an integer"), ({"c": [{"d": "1"}]}, r"c\[0\].d is text"),
     ({"e": {"x": 1}}, "e.x is an integer"), ({"f": {"g": 1}}, "f.g is an integer"), ({"f": 3}, "f is an integer")],
)  # fmt: skip
def test_a_wrong_type_is_named_by_its_place(value: Any, name: str) -> None:
    with pytest.raises(MalformedJson, match=rf"cannot be read: {name} \[x\]"):
        check_types(value, TYPES, "x")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, True), (2**53, True), (2**53 + 1, False), (-1, False), (True, False), (1.0, False), ("1", False)],
)
def test_steps(value: object, expected: bool) -> None:
    assert is_step(value) == expected
