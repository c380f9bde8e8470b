"""Text in other encodings than UTF-8. The oracle is Python's own decoding of the whole file."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest

from vorox.core.config import load_config
from vorox.core.errors import ConfigError, DataError
from vorox.core.schema.data import SourceConfig
from vorox.data.corpus.corpus import prepare
from vorox.data.documents import BadRecord, Document, Record
from vorox.data.text.format_detection import detect_source
from vorox.data.text.formats import read_record
from vorox.data.text.sources import Source, list_source
from vorox.data.text.unit_reader import read_units
from vorox.data.text.unit_splitter import split_into_units

LATIN = ["déjà vu", "naïve café", "plain", "Ünïcödé", "\u00a0nbsp", "¿qué?"]
WIDE = ["日本語", "テキスト", "漢字かな"]
SCRIPTS = {
    "latin-1": LATIN,
    "cp1252": [*LATIN, "€5", "\u201cquoted\u201d"],
    "utf-16": [*LATIN, *WIDE, "🙂", "\u0a0a\u010a"],
    "utf-16-be": [*LATIN, *WIDE, "🙂"],
    "shift_jis": WIDE,
    "gb18030": [*WIDE, *LATIN],
}


def words(encoding: str, seed: int) -> list[str]:
    chooser = random.Random(seed)
    return [" ".join(chooser.choices(SCRIPTS[encoding], k=chooser.randint(1, 60))).strip() for _ in range(150)]


def read(source: Source, unit_bytes: int) -> list[Record]:
    units = split_into_units(source, "train", source.holdout, unit_bytes)
    return list(read_units(source, units, "train", source.holdout))


def listed(path: Path, **settings: Any) -> Source:
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    return list_source(SourceConfig.model_validate({"name": "a", "format": kind, "paths": (str(path),), **settings}))


def content_of(texts: list[str], kind: str) -> str:
    if kind == "jsonl":
        return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    if kind == "json":
        return json.dumps([{"text": text} for text in texts], ensure_ascii=False, indent=1)
    if kind == "txt":
        return "\n".join(texts)
    buffer = io.StringIO(newline="")
    csv.writer(buffer).writerows([["text", "n"], *([text, n] for n, text in enumerate(texts))])
    return buffer.getvalue()


@pytest.mark.parametrize("encoding", SCRIPTS)
@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "csv"])
@pytest.mark.parametrize("is_compressed", [False, True])
def test_every_format_reads_every_encoding(encoding: str, kind: str, is_compressed: bool, tmp_path: Path) -> None:
    texts = words(encoding, random.randrange(1 << 30))
    content = content_of(texts, kind)
    path = tmp_path / f"a.{kind}{'.gz' if is_compressed else ''}"
    data = content.encode(encoding)
    path.write_bytes(gzip.compress(data) if is_compressed else data)
    source = listed(path, encoding=encoding)
    for unit_bytes in (200, 3000, 1 << 20):
        found = read(source, unit_bytes)
        assert all(isinstance(record, Document) for record in found), found[0]
        if kind == "txt":
            assert "".join(str(record.text) for record in found) == content  # type: ignore[union-attr]
        else:
            assert [record.text for record in found] == texts  # type: ignore[union-attr]
    utf_8 = content.encode()
    for record in found[:20]:
        span = utf_8[record.byte_offset : record.byte_offset + record.byte_length]
        assert str(record.text) in span.decode() or kind != "txt"  # type: ignore[union-attr]
        again = read_record(source.config, source.stored[0], 0, record.ordinal, record.byte_offset, record.byte_length)
        assert again == record


def test_the_encoding_is_part_of_the_recipe_and_utf_8_is_not(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("é".encode("latin-1"))
    assert listed(tmp_path / "a.txt", encoding="latin1").definition["encoding"] == "iso8859-1"
    assert "encoding" not in listed(tmp_path / "a.txt", encoding="UTF8").definition


def test_invalid_bytes_are_bad_records_that_name_the_encoding(tmp_path: Path) -> None:
    lines = [b'{"text": "fine"}', b'{"text": "\x81\x8d"}', '{"text": "é€"}'.encode("cp1252")]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    found = read(listed(tmp_path / "a.jsonl", encoding="cp1252"), 1 << 20)
    assert [record.text if isinstance(record, Document) else None for record in found] == ["fine", None, "é€"]
    assert isinstance(found[1], BadRecord)
    assert "invalid cp1252 at byte 10" in found[1].reason
    (tmp_path / "b.txt").write_bytes("\ud800".encode("utf-16-le", "surrogatepass") + "x".encode("utf-16-le"))
    (bad,) = read(listed(tmp_path / "b.txt", encoding="utf-16-le"), 1 << 20)
    assert isinstance(bad, BadRecord)
    assert "invalid utf-16-le" in bad.reason


def test_detection_reads_with_the_encoding(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content_of(words("utf-16", 1), "csv").encode("utf-16"))
    with pytest.raises(DataError, match="UTF-16 text") as caught:
        detect_source([str(path)])
    assert "data.sources.0.encoding=utf-16" in caught.value.hint
    assert detect_source([str(path)], {"encoding": "utf-16"}).source["text_field"] == "text"


MIXED = "na\u00efve \u201cquoted\u201d caf\u00e9 \u20ac\n"


@pytest.mark.parametrize("declared", ["cp1252", "latin-1", "koi8-r", "utf-16", "utf-16-le"])
@pytest.mark.parametrize("actual", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("is_compressed", [False, True])
def test_utf_8_under_another_encoding_is_refused(
    declared: str, actual: str, is_compressed: bool, tmp_path: Path
) -> None:
    content = (MIXED * 3).encode(actual)
    path = tmp_path / f"a.txt{'.gz' if is_compressed else ''}"
    path.write_bytes(gzip.compress(content) if is_compressed else content)
    with pytest.raises(DataError) as caught:
        read(listed(path, encoding=declared), 1 << 20)
    assert caught.value.where == str(path)
    assert "The source's encoding is" in caught.value.what
    assert "iconv -f utf-8 -t" in caught.value.hint


def test_a_late_character_of_utf_8_is_found_before_a_unit_is_built(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "plain"}\n' * 20_000 + '{"text": "\u00e9"}\n'.encode())
    source = listed(path, encoding="cp1252")
    with pytest.raises(DataError, match="the file is UTF-8 text"):
        split_into_units(source, "train", source.holdout, 1 << 12)


def test_utf_16_under_an_8_bit_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(MIXED.encode("utf-16"))
    with pytest.raises(DataError, match="byte order mark of UTF-16") as caught:
        read(listed(path, encoding="cp1252"), 1 << 20)
    assert "iconv -f utf-16 -t cp1252" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "encoding"),
    [("plain ascii\n" * 9, "cp1252"), ("\u8054\u901a", "gb18030"), ("\u6f22\u5b57", "utf-16-le"), (MIXED, "utf-8-sig")],
)
def test_text_that_may_be_in_the_declared_encoding_is_read(content: str, encoding: str, tmp_path: Path) -> None:
    """Python decodes the bytes of the second as UTF-8 too, by chance."""
    path = tmp_path / "a.txt"
    path.write_bytes(content.encode(encoding))
    (record,) = read(listed(path, encoding=encoding), 1 << 20)
    assert isinstance(record, Document)
    assert record.text == content


@pytest.mark.parametrize("first", ["utf-16", "cp1252"])
def test_where_other_files_are_utf_8_the_remedy_converts_the_file(first: str, tmp_path: Path) -> None:
    (tmp_path / "mails").mkdir()
    for number in range(30):
        (tmp_path / f"mails/{number:02d}.txt").write_bytes((MIXED * 9).encode("utf-8" if number else first))
    with pytest.raises(DataError) as caught:
        prepare(configuration(tmp_path, "data.sources.0.bad_record_fraction=0"))
    path = tmp_path / "mails/00.txt"
    assert f"iconv -f {first} -t utf-8 {path} > {path}.new && mv {path}.new {path}" in caught.value.hint
    with pytest.raises(DataError, match="The source's encoding is") as caught:
        prepare(configuration(tmp_path, f"data.sources.0.encoding={first}"))
    assert caught.value.where == str(tmp_path / "mails/01.txt")


def configuration(directory: Path, *overrides: str) -> Any:
    file = directory / "c.yaml"
    file.write_text(json.dumps({
        "data": {"sources": [{"name": "mails", "format": "txt", "paths": [str(directory / "mails")]}],
                 "cache": {"directory": str(directory / "cache")}},
        "tokenizer": {"kind": "byte"}, "train": {"num_steps": 1},
    }))  # fmt: skip
    return load_config(file, overrides)


def test_the_hints_for_mails_of_many_encodings_lead_to_a_build(tmp_path: Path) -> None:
    """500 files, 82 of which are not UTF-8, some of them among the few that are held out."""
    chooser = random.Random(random.randrange(1 << 30))
    (tmp_path / "mails").mkdir()
    broken = set(chooser.sample(range(500), 82))
    for number in range(500):
        text = f"mail {number} " + ("déjà" if number in broken else "plain") + " end\n"
        (tmp_path / f"mails/{number:03d}.txt").write_bytes(text.encode("latin-1" if number in broken else "utf-8"))
    with pytest.raises(DataError, match=r"of \d+ records are unreadable") as caught:
        prepare(configuration(tmp_path))
    assert "data.sources.0.encoding=cp1252" in caught.value.hint
    remedy = caught.value.hint.partition("or add ")[2].split()[0]
    assert remedy.startswith("data.sources.0.bad_record_fraction=0.")
    corpus = prepare(configuration(tmp_path, remedy))
    assert sum(report.quarantined for report in corpus.reports.values()) == 82
    corpus = prepare(configuration(tmp_path, "data.sources.0.encoding=latin-1"))
    assert sum(report.quarantined for report in corpus.reports.values()) == 0


def test_no_fraction_is_offered_where_every_record_is_bad(tmp_path: Path) -> None:
    (tmp_path / "mails").mkdir()
    for number in range(60):
        (tmp_path / f"mails/{number}.txt").write_bytes(f"mail {number} déjà vu".encode("latin-1"))
    with pytest.raises(DataError) as caught:
        prepare(configuration(tmp_path))
    assert "bad_record_fraction" not in caught.value.hint
    assert "data.sources.0.encoding=cp1252" in caught.value.hint


@pytest.mark.parametrize("name", ["utf8x", "hex", "rot13", ""])
def test_an_unknown_encoding_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no encoding of text that Python knows"):
        configuration(tmp_path, f"data.sources.0.encoding='{name}'")
