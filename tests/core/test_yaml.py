"""YAML 1.2 in and out, and what the reader refuses to be fed."""

from __future__ import annotations

import copy
import json
import math
import time

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vorox.core.config.yaml.reader import MAX_DEPTH, read_mapping, read_value, resolve_plain
from vorox.core.config.yaml.writer import write_inline, write_yaml
from vorox.core.errors import ConfigError


def value_of(text: str) -> object:
    return read_mapping(f"key: {text}\n", "t.yaml").value["key"]


# The YAML 1.2 core schema, https://yaml.org/spec/1.2.2/#103-core-schema, written out by hand.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3e-4", 3e-4),
        ("1e9", 1e9),
        ("1E+3", 1000.0),
        (".5", 0.5),
        ("-2.", -2.0),
        ("6.02e23", 6.02e23),
        ("12", 12),
        ("-7", -7),
        ("+7", 7),
        ("012", 12),
        ("0o14", 12),
        ("0x1F", 31),
        ("0b11", "0b11"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2024-01-02", "2024-01-02"),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("No", "No"),
        ("y", "y"),
        ("true", True),
        ("True", True),
        ("FALSE", False),
        ("tRue", "tRue"),
        ("null", None),
        ("~", None),
        ("", None),
        ("NULL", None),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("inf", "inf"),
        ('"3e-4"', "3e-4"),
        ("'true'", "true"),
        ("=", "="),
        ("e5", "e5"),
        (".", "."),
        ("1e", "1e"),
        ("fp32", "fp32"),
    ],
)
def test_scalars_mean_what_yaml_1_2_says(text: str, expected: object) -> None:
    value = value_of(text)
    assert value == expected
    assert isinstance(value, type(expected))


def test_not_a_number_is_a_float() -> None:
    value = value_of(".nan")
    assert isinstance(value, float)
    assert math.isnan(value)


def test_lines_of_keys_and_entries() -> None:
    document = read_mapping("a: 1\n\nb:\n  # note\n  c: [1,\n      {d: 2}]\n", "t.yaml")
    assert document.value == {"a": 1, "b": {"c": [1, {"d": 2}]}}
    assert document.lines == {
        ("a",): 1,
        ("b",): 3,
        ("b", "c"): 5,
        ("b", "c", 0): 5,
        ("b", "c", 1): 6,
        ("b", "c", 1, "d"): 6,
    }


@pytest.mark.parametrize("text", ["", "# only a note\n", "---\n", "null"])
def test_an_empty_file_is_an_empty_mapping(text: str) -> None:
    assert read_mapping(text, "t.yaml").value == {}


def test_duplicate_keys_are_reported_with_both_lines_and_the_first_value_stands() -> None:
    document = read_mapping("a:\n  x: 1\n  y: {z: 1, z: {q: 2}}\n  x: 3\n  w: 4\na: 9\n", "t.yaml")
    assert document.problems == [
        ("duplicate key a.y.z; the first is in line 3", 3),
        ("duplicate key a.x; the first is in line 2", 4),
        ("duplicate key a; the first is in line 1", 6),
    ]
    assert document.value == {"a": {"x": 1, "y": {"z": 1}, "w": 4}}


@pytest.mark.parametrize(
    "text",
    ["!!python/object/apply:os.system ['touch /tmp/x']", "!!str 12", "!custom {a: 1}", "!!binary aGk=", "!!set {a, b}"],
)
def test_tags_are_refused(text: str) -> None:
    document = read_mapping(f"a: 1\nkey: {text}\n", "t.yaml")
    assert [line for _, line in document.problems] == [2]
    assert "tag" in document.problems[0][0]


def test_merge_keys_are_not_part_of_yaml_1_2() -> None:
    document = read_mapping("base: &b {x: 1}\nkey:\n  <<: *b\n", "t.yaml")
    assert document.value["key"] == {"<<": {"x": 1}}


def test_aliases_copy() -> None:
    document = read_mapping("a: &x [1, {b: 2}]\nc: *x\nd: &y 3\ne: [*y, *y]\n", "t.yaml")
    assert document.value == {"a": [1, {"b": 2}], "c": [1, {"b": 2}], "d": 3, "e": [3, 3]}
    assert document.value["a"] is not document.value["c"]


def bomb(width: int, levels: int) -> str:
    lines = ["a0: &a0 [x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines)


HOSTILE = {
    "alias bomb": bomb(10, 10),
    "long alias bomb": bomb(2, 3000),
    "self": "a: &a [*a]",
    "forward": "a: *b\nb: &b 1",
    "10,000 brackets": "a: " + "[" * 10_000,
    "10,000 mappings": "a: " + "{a: " * 10_000,
    "10,000 indents": "\n".join(f"{' ' * n}a:" for n in range(600)),
    "10,000 dashes": "a:\n  " + "- " * 10_000,
    "many nodes": "a: [" + "1," * 1_000_000 + "]",
    "wide alias": "a: &a [" + "1," * 600 + "]\nb: [" + "*a," * 20 + "]",
    "huge": "a: " + "x" * 5_000_000,
    "list": "- a\n- b\n",
    "scalar": "hello",
    "two documents": "a: 1\n---\nb: 2\n",
    "open quote": 'a: "x',
    "tab": "a:\n\tb: 1",
    "mapping as key": "{a: 1}: 2",
    "list as key": "? [a]\n: 2",
    "alias as key": "a: &x b\n*x : 2",
    "control characters": "a: \x00",
    "directive": "%YAML 9.9\n---\na: 1",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_texts_are_refused_in_no_time(text: str) -> None:
    begin = time.process_time()
    with pytest.raises(ConfigError) as caught:
        read_mapping(text, "t.yaml")
    assert time.process_time() - begin < 3
    assert caught.value.where.startswith("t.yaml")
    assert "\n" not in caught.value.what


def test_the_caps_leave_room_for_real_files() -> None:
    deep = "".join(f"{'  ' * n}k{n}:\n" for n in range(MAX_DEPTH - 1)) + "  " * (MAX_DEPTH - 1) + "leaf: 1\n"
    assert read_mapping(deep, "t.yaml").value
    assert read_mapping("a: [" + "1," * 90_000 + "]", "t.yaml").value


def test_a_number_of_absurd_length_stays_text() -> None:
    assert isinstance(value_of("1" * 5_000), str)


# Values on the command line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6e-4", 6e-4),
        ("8", 8),
        ("true", True),
        ("null", None),
        ("yes", "yes"),
        ("*.txt", "*.txt"),
        ("a: b", "a: b"),
        ("x #1", "x #1"),
        ("- a", "- a"),
        ("&x", "&x"),
        ("def ", "def "),
        ('"def "', "def "),
        ('"8"', "8"),
        (r'"\ud83d\ude00\n"', "\U0001f600\n"),
        ("'it''s'", "it's"),
        ("[a, 1, 2.5, null]", ["a", 1, 2.5, None]),
        ('["def ", "class "]', ["def ", "class "]),
        ('{"a": 1, "b": [true]}', {"a": 1, "b": [True]}),
        ("{name: x, weight: 1e-3}", {"name": "x", "weight": 1e-3}),
        ("[]", []),
    ],
)
def test_values_on_the_command_line(text: str, expected: object) -> None:
    assert read_value(text, "override") == expected


@pytest.mark.parametrize("text", ["[1", "{a: 1", '"x', "'x", "[1] 2", "{a: 1, a: 2}", "[!!str 1]", "[*x]"])
def test_broken_values_on_the_command_line(text: str) -> None:
    with pytest.raises(ConfigError):
        read_value(text, "override")


# Writing

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False)
    | st.text(max_size=12)
    | st.sampled_from(["3e-4", "on", "null", "~", "", " x", "x ", "#", "a: b", "- a", "0o7", "\n", "\u2028", "é"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=4))
def test_what_is_written_reads_back_equal(value: dict[str, object]) -> None:
    text = write_yaml(value)  # type: ignore[arg-type]
    read = read_mapping(text, "t.yaml")
    assert read.problems == []
    assert json.dumps(read.value) == json.dumps(value)


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=4))
def test_other_readers_take_it_the_same_way(value: dict[str, object]) -> None:
    """PyYAML speaks YAML 1.1; what we write means the same there."""
    assert json.dumps(yaml.safe_load(write_yaml(value)) or {}) == json.dumps(value)  # type: ignore[arg-type]


def test_the_text_is_for_people() -> None:
    value = {
        "name": "a-b.c",
        "lr": 3e-4,
        "eps": 1e-8,
        "whole": 1.0,
        "empty": [],
        "words": ["def ", "on"],
        "sources": [{"name": "x", "weight": "1/3"}, {"name": "z", "more": {"k": None}}],
        "section": {"on": True},
    }
    assert (
        write_yaml(value, lambda path: "said here" if path == ("lr",) else "")  # type: ignore[arg-type]
        == """name: a-b.c
lr: 0.0003  # said here
eps: 1.0e-08
whole: 1.0
empty: []
words: ["def ", "on"]
sources:
  - name: x
    weight: "1/3"
  - name: z
    more:
      k: null
section:
  "on": true
"""
    )


def test_inline_values() -> None:
    assert write_inline({"a": [1, None, "x y"], "b": {}}) == '{a: [1, null, "x y"], b: {}}'


def test_resolve_plain_never_fails() -> None:
    for text in ("-", "+", "0x", "0o", "--1", "1e999", "-.nan", "..5"):
        resolve_plain(text)
    assert resolve_plain("1e999") == math.inf


@pytest.mark.parametrize(
    ("text", "line", "remedy"),
    [
        ("a:\n\tb: 1\n", 2, "indent with blanks"),
        ("a: b: c\n", 1, "quote text"),
        ("a:\n  b: 1\n   c: 2\n", 3, "equally"),
        ("a:\n    b: 1\n  c: 2\n", 3, "equally"),
        ("a: [1, 2\n", 1, "close it with ]"),
        ("a: {b: 1\n", 1, "close it with }"),
        ("a: 'x\n", 1, "close the quote"),
        ("a: @x\n", 1, "quote the value"),
        ("a: - b\n", 1, "its own line"),
        ("a: 1\nb\nc: 2\n", 2, "key: value"),
        ("[train]\nnum_steps = 5\n", 1, "`train:`"),
        ("# my run\nnum_steps = 5\n", 1, "`train:`"),
        ("a: \x07\n", None, "remove it"),
    ],
)
def test_syntax_errors_come_in_plain_words(text: str, line: int | None, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_mapping(text, "my.yaml")
    assert remedy in caught.value.hint
    assert "expected" not in caught.value.what
    assert "scanning" not in caught.value.what
    if line is not None:
        assert caught.value.where in {f"my.yaml:{line}", f"my.yaml:{line + 1}"}


def test_every_reading_is_the_readers_own() -> None:
    """A text is parsed once; what one reader changes does not reach the next."""
    text = "a: {b: [1, {c: 2}]}\na: 3\n"
    first, expected = read_mapping(text, "t.yaml"), copy.deepcopy(read_mapping(text, "t.yaml"))
    first.value["a"]["b"][1]["c"] = 5  # type: ignore[index, call-overload]
    first.value["d"] = 6
    first.lines[("d",)] = 7
    first.problems.clear()
    assert read_mapping(text, "t.yaml") == expected
    read_value("[1, [2]]", "x")[1].append(3)  # type: ignore[index, union-attr]
    assert read_value("[1, [2]]", "x") == [1, [2]]
    assert [what for name in ("u.yaml", "t.yaml") for what, _ in read_mapping(text, name).problems] == [
        "duplicate key a; the first is in line 1"
    ] * 2
