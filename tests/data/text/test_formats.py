"""Records keep their bytes, line numbers and order; broken records are reported, never lost."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vorox.core.schema.data import SourceConfig
from vorox.data.documents import BadRecord, Document, UnitSpan
from vorox.data.storage import StoredFile, list_files
from vorox.data.text.formats import (
    UnreadableRecord,
    line_end_after,
    line_end_before,
    parse_line,
    read_records,
    split_blocks,
    text_boundary_before,
)

TXT = SourceConfig(name="s", format="txt", paths=("x",))
JSONL = SourceConfig(name="s", format="jsonl", paths=("x",))


def stored(path: Path, content: bytes) -> StoredFile:
    path.write_bytes(content)
    return list_files(str(path), ())[0]


def read(config: SourceConfig, file: StoredFile, start: int = 0, end: int | None = None) -> list[Document | BadRecord]:
    span = UnitSpan(7, start, file.size_bytes if end is None else end, 0)
    return list(read_records(config, file, span, lambda _: True))


def places(config: SourceConfig, file: StoredFile, block_bytes: int) -> list[int]:
    """The boundaries of all blocks."""
    pieces = list(split_blocks(config, file, 0, None, block_bytes))
    assert [piece.end_byte for piece in pieces[:-1]] == [piece.start_byte for piece in pieces[1:]]
    return [0, *(piece.end_byte for piece in pieces)]


def test_text_file_is_one_document_with_its_bytes(tmp_path: Path) -> None:
    content = "Zwölf\r\nBoxkämpfer\x00\n".encode()
    assert read(TXT, stored(tmp_path / "a", content)) == [Document(7, 0, 0, len(content), "Zwölf\r\nBoxkämpfer\x00\n")]


def test_byte_order_mark_is_no_text_but_keeps_its_bytes(tmp_path: Path) -> None:
    file = stored(tmp_path / "a", b"\xef\xbb\xbfabc")
    assert read(TXT, file) == [Document(7, 0, 3, 3, "abc")]
    file = stored(tmp_path / "b", b'\xef\xbb\xbf{"text": "x"}\n')
    assert read(JSONL, file) == [Document(7, 0, 0, 17, "x")]


def test_invalid_text_names_byte_and_line(tmp_path: Path) -> None:
    (record,) = read(TXT, stored(tmp_path / "a", b"one\ntwo \xff\nthree"))
    assert isinstance(record, BadRecord)
    assert (record.line, record.byte_offset, record.byte_length) == (2, 0, 15)
    assert "invalid UTF-8 at byte 8" in record.reason


def test_lines_keep_ordinals_and_offsets_past_blank_and_broken_ones(tmp_path: Path) -> None:
    lines = [b'{"text": "a"}\n', b"\n", b"{broken\n", b'{"text": "\xff"}\n', b"  \r\n", b'{"text": "\xc3\xa4"}']
    records = read(JSONL, stored(tmp_path / "a", b"".join(lines)))
    assert [(type(r).__name__, r.ordinal, r.byte_offset, r.byte_length) for r in records] == [
        ("Document", 0, 0, 14), ("BadRecord", 2, 15, 8), ("BadRecord", 3, 23, 14), ("Document", 5, 41, 14),
    ]  # fmt: skip
    assert [r.line for r in records if isinstance(r, BadRecord)] == [3, 4]
    assert [r.text for r in records if isinstance(r, Document)] == ["a", "ä"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "invalid JSON at column 2"),
        (b"nonsense", "invalid JSON at column 1"),
        (b'{"text": "a"} x', "Extra data"),
        (b"[1]", "not an object but an array"),
        (b'"text"', "not an object but a string"),
        (b"null", "not an object but null"),
        (b"{}", "no field 'text'; the record has no fields: set the source's text_field"),
        (b'{"content": "a", "id": 3}', "no field 'text'; the record has 'content', 'id': set the source's text_field"),
        (b'{"text": null}', "field 'text' is not a string but null"),
        (b'{"text": 3}', "field 'text' is not a string but a number"),
        (b'{"text": true}', "field 'text' is not a string but a boolean"),
        (b'{"text": ["a"]}', "field 'text' is not a string but an array"),
        (b'{"text": "a\\ud800b"}', "half a surrogate pair at character 1"),
        (b'{"text": "\xe4"}', "invalid UTF-8 at byte 10"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"text": ' + b"1" * 5_000 + b"}", "invalid JSON"),
    ],
)
def test_unreadable_lines_say_why(line: bytes, reason: str) -> None:
    with pytest.raises(UnreadableRecord) as caught:
        parse_line(line, "text")
    assert reason in str(caught.value)


def test_escaped_pairs_and_other_fields_are_fine() -> None:
    assert parse_line(b'{"body": "\\ud83d\\ude00\\u0000", "text": 3}', "body") == "😀\0"
    assert parse_line(b'{"text": ""}', "text") == ""


_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(st.characters(exclude_categories=()), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "t", "\ud800"]), inner),
    max_leaves=6,
)
_LINES = st.builds(
    lambda value, ascii, cut: json.dumps(value, ensure_ascii=ascii).encode("utf-8", "surrogatepass")[cut:],
    st.dictionaries(st.sampled_from(["text", "a", ""]), _VALUES, max_size=3), st.booleans(),
    st.sampled_from([0] * 9 + [1]),
)  # fmt: skip
_SPOILT = st.tuples(_LINES, st.integers(0, 80), st.binary(max_size=3)).map(lambda x: x[0][: x[1]] + x[2] + x[0][x[1] :])


@settings(max_examples=1500, deadline=None)
@given(_LINES | _SPOILT | st.binary(max_size=20))
def test_a_line_is_read_as_the_standard_library_reads_it(line: bytes) -> None:
    """The ``json`` module decides what is a record and what its text is, whichever parser runs first."""
    try:
        record = json.loads(line.decode("utf-8"))
        expected = record["text"] if isinstance(record, dict) else None
        expected = expected.encode("utf-8").decode("utf-8") if isinstance(expected, str) else None
    except (ValueError, KeyError):
        expected = None
    if expected is None:
        with pytest.raises(UnreadableRecord):
            parse_line(line, "text")
    else:
        assert parse_line(line, "text") == expected


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(st.characters(codec="utf-8"), max_size=200) | st.text("aä\n€😀", max_size=200),
    block_bytes=st.integers(1, 60),
)
def test_pieces_of_a_text_are_valid_and_complete(
    tmp_path_factory: pytest.TempPathFactory, text: str, block_bytes: int
) -> None:
    file = stored(tmp_path_factory.mktemp("cut") / "a", text.encode())
    boundaries = places(TXT, file, block_bytes)
    assert boundaries[0] == 0
    assert boundaries[-1] == file.size_bytes
    assert boundaries == sorted(set(boundaries)) or file.size_bytes == 0
    spans = [UnitSpan(0, a, b, 0) for a, b in itertools.pairwise(boundaries)]
    records = [record for span in spans for record in read_records(TXT, file, span, lambda _: True)]
    assert all(isinstance(record, Document) for record in records)
    joined = "".join(record.text for record in records if isinstance(record, Document))
    assert joined == text.removeprefix("\ufeff")
    assert all(b - a <= block_bytes + 3 for a, b in itertools.pairwise(boundaries))


@settings(max_examples=100, deadline=None)
@given(
    texts=st.lists(st.text(max_size=40, alphabet=st.characters(codec="utf-8")) | st.none(), max_size=20),
    block_bytes=st.integers(1, 200),
)
def test_lines_are_read_the_same_however_the_file_is_cut(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str | None], block_bytes: int
) -> None:
    lines = [b"\n" if text is None else json.dumps({"text": text}).encode() + b"\n" for text in texts]
    file = stored(tmp_path_factory.mktemp("cut") / "a", b"".join(lines))
    boundaries = places(JSONL, file, block_bytes)
    ordinal, records = 0, list[Document | BadRecord]()
    for start, end in itertools.pairwise(boundaries):
        records += read_records(JSONL, file, UnitSpan(7, start, end, ordinal), lambda _: True)
        ordinal += b"".join(lines)[start:end].count(b"\n")
    assert records == read(JSONL, file)
    assert [record.text for record in records if isinstance(record, Document)] == [t for t in texts if t is not None]


def test_text_is_cut_at_a_line_when_one_is_near(tmp_path: Path) -> None:
    file = stored(tmp_path / "a", b"one\ntwo\nthree")
    assert text_boundary_before(file, 7, 0) == 4
    assert text_boundary_before(file, 8, 0) == 8
    assert text_boundary_before(file, 3, 0) == 3  # no line end before: between characters
    assert line_end_before(file, 3, 0) is None
    assert line_end_after(file, 4, 13) == 8
    assert line_end_after(file, 8, 13) == 13


def test_lines_longer_than_a_window_are_found(tmp_path: Path) -> None:
    long = b'{"text": "' + b"a" * (3 << 20) + b'"}\n'
    file = stored(tmp_path / "a", b'{"text": "x"}\n' + long + b'{"text": "y"}\n')
    assert line_end_before(file, 14 + len(long) - 1, 0) == 14
    assert line_end_after(file, 15, file.size_bytes) == 14 + len(long)
    assert places(JSONL, file, 1 << 20) == [0, 14, 14 + len(long), file.size_bytes]
