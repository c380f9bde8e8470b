"""Folders of mosaicml-streaming and ``datasets.save_to_disk`` as sources: read completely, rejected if corrupt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset_folders import arrow_stream, mds_shard, write_mds, write_saved_dataset
from vorox.core.config import load_config
from vorox.core.errors import ConfigError, DataError
from vorox.core.schema.data import SourceConfig, ValidationConfig
from vorox.data.corpus.corpus import prepare
from vorox.data.documents import BadRecord, Document, Record, TokenDocument
from vorox.data.storage import open_range
from vorox.data.text.format_detection import detect_source
from vorox.data.text.holdout import NO_HOLDOUT
from vorox.data.text.holdout_selection import select_holdout
from vorox.data.text.sources import Source, list_source
from vorox.data.text.unit_reader import UnitReader
from vorox.data.text.unit_splitter import split_into_units
from vorox.data.transfer.token_export import export_tokens

TEXTS = [f"sample {n} é {'word ' * (n % 11)}" for n in range(130)]
SAMPLES = [{"id": n, "text": text, "note": f"n{n}"} for n, text in enumerate(TEXTS)]
COLUMNS = {"id": "int", "text": "str", "note": "str"}
END = 999


def source(folder: Path, form: str, **options: Any) -> SourceConfig:
    return SourceConfig.model_validate({"name": "s", "format": form, "paths": [str(folder)], **options})


def records(listed: Source, unit_bytes: int = 1 << 20) -> list[Record]:
    units = split_into_units(listed, "train", NO_HOLDOUT, unit_bytes)
    return [record for unit in units for record in UnitReader(listed, "train", NO_HOLDOUT)(unit)]


def texts(listed: Source) -> list[str]:
    found = records(listed)
    assert all(isinstance(record, Document) for record in found), found
    return [record.text for record in found if isinstance(record, Document)]


def write(folder: Path, form: str) -> SourceConfig:
    if form == "arrow":
        write_saved_dataset(folder, {"text": TEXTS, "note": [sample["note"] for sample in SAMPLES]})
        return source(folder, "arrow")
    write_mds(folder, SAMPLES, COLUMNS, compression=None if form == "mds" else "zstd:3")
    return source(folder, "mds")


@pytest.mark.parametrize("form", ["mds", "mds.zstd", "arrow"])
def test_every_record_is_read_once_with_its_place_however_units_are_cut(tmp_path: Path, form: str) -> None:
    listed = list_source(write(tmp_path / "d", form))
    assert texts(listed) == TEXTS
    for unit_bytes in (1, 700):
        found = records(listed, unit_bytes)
        assert [record.text for record in found if isinstance(record, Document)] == TEXTS
        assert len({(record.file_index, record.ordinal) for record in found}) == len(TEXTS)
    if form == "mds":  # the text lies where the record says
        for record in records(listed):
            assert isinstance(record, Document)
            with open_range(listed.stored[record.file_index], record.byte_offset) as file:
                assert record.text.encode() in file.read(record.byte_length)


@pytest.mark.parametrize("form", ["mds", "arrow"])
def test_metadata_travels_with_the_text(tmp_path: Path, form: str) -> None:
    config = write(tmp_path / "d", form).model_copy(update={"metadata_fields": ("note",)})
    found = records(list_source(config))
    assert [dict(record.metadata or {}) for record in found if isinstance(record, Document)] == [
        {"note": sample["note"]} for sample in SAMPLES
    ]


@pytest.mark.parametrize(
    ("encoding", "make"),
    [
        ("ndarray:uint16", lambda ids: np.array(ids, np.uint16)),
        ("ndarray:int32", lambda ids: np.array(ids, np.int32)),
        ("ndarray:uint32:4", lambda ids: np.array(ids[:4], np.uint32)),
        ("ndarray", lambda ids: np.array(ids, np.int64)),
        ("bytes", lambda ids: np.array(ids, "<i8").tobytes()),
    ],
)
def test_a_column_of_token_ids_gives_a_document_for_each_sample(
    tmp_path: Path, encoding: str, make: Callable[[list[int]], Any]
) -> None:
    ids = [[n, n + 1, 500 + n, 300 + n, *range(n % 300)] for n in range(70)]
    expected = [part[:4] if encoding.endswith(":4") else part for part in ids]
    ended = [[*part, END] if n % 2 and not encoding.endswith(":4") else part for n, part in enumerate(ids)]
    write_mds(tmp_path / "d", [{"tokens": make(part)} for part in ended], {"tokens": encoding})
    options = {"ids_dtype": "int64"} if encoding == "bytes" else {}
    config = source(tmp_path / "d", "mds", tokens_field="tokens", end_of_text_id=END, tokenizer="any", **options)
    found = records(list_source(config), 900)
    assert all(isinstance(record, TokenDocument) for record in found)
    assert [record.tokens.tolist() for record in found if isinstance(record, TokenDocument)] == expected


def test_ids_of_bytes_are_asked_for_their_type(tmp_path: Path) -> None:
    write_mds(tmp_path / "d", [{"tokens": b"\1\0"}], {"tokens": "bytes"})
    config = source(tmp_path / "d", "mds", tokens_field="tokens", end_of_text_id=END, tokenizer="any")
    with pytest.raises(DataError, match="bytes") as caught:
        records(list_source(config))
    assert "ids_dtype" in (caught.value.hint or "")


def test_broken_samples_are_put_aside_with_their_place(tmp_path: Path) -> None:
    samples = [{"text": "good"}, {"text": "half \udcff"}, {"text": "x" * 400}, {"text": "last"}]
    write_mds(tmp_path / "d", samples, {"text": "str"})
    good, invalid, large, last = records(list_source(source(tmp_path / "d", "mds", max_record_bytes=300)))
    assert [good.text, last.text, last.ordinal] == ["good", "last", 3]  # type: ignore[union-attr]
    assert isinstance(invalid, BadRecord)
    assert "UTF-8" in invalid.reason
    assert isinstance(large, BadRecord)
    assert "max_record_bytes" in large.reason
    write_saved_dataset(tmp_path / "a", {"text": ["good", None, "x" * 400, "last"]}, num_shards=1)
    good, null, large, last = records(list_source(source(tmp_path / "a", "arrow", max_record_bytes=300)))
    assert [good.text, last.text, last.ordinal] == ["good", "last", 3]  # type: ignore[union-attr]
    assert isinstance(null, BadRecord)
    assert isinstance(large, BadRecord)


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def damage(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


MDS_DAMAGES: dict[str, Callable[[Path], Any]] = {
    "no json": lambda folder: (folder / "index.json").write_text('{"version": 2, "sha'),
    "no shards": lambda folder: (folder / "index.json").write_text('{"version": 2}'),
    "a list": lambda folder: (folder / "index.json").write_text("[]"),
    "missing index": lambda folder: (folder / "index.json").unlink(),
    "missing shard": lambda folder: (folder / "shard.00001.mds").unlink(),
    "cut short": lambda folder: (folder / "shard.00001.mds").write_bytes(b"x" * 40),
    "changed byte": lambda folder: damage(folder / "shard.00001.mds", -3),
    "another hash": lambda folder: change(
        folder / "index.json", lambda index: index["shards"][0]["raw_data"]["hashes"].update(xxh64="0" * 16)
    ),
    "unknown hash": lambda folder: change(
        folder / "index.json", lambda index: index["shards"][0]["raw_data"]["hashes"].update(crc="0")
    ),
    "traversal": lambda folder: change(
        folder / "index.json", lambda index: index["shards"][0]["raw_data"].update(basename="../other/shard.00000.mds")
    ),
    "absolute": lambda folder: change(
        folder / "index.json", lambda index: index["shards"][0]["raw_data"].update(basename="/etc/passwd")
    ),
    "other format": lambda folder: change(folder / "index.json", lambda index: index["shards"][0].update(format="xsv")),
}


@pytest.mark.parametrize("kind", list(MDS_DAMAGES))
def test_a_damaged_mds_folder_is_refused(tmp_path: Path, kind: str) -> None:
    config = write(tmp_path / "d", "mds")
    write_mds(tmp_path / "other", SAMPLES, COLUMNS)
    MDS_DAMAGES[kind](tmp_path / "d")
    with pytest.raises(DataError) as caught:
        records(list_source(config))
    assert caught.value.exit_code == 4
    assert str(tmp_path / "d") in (caught.value.where or "")


def test_a_shard_whose_places_lie_is_refused(tmp_path: Path) -> None:
    """Without hashes, as mosaicml-streaming writes by default, the shard itself must be consistent."""
    whole, _ = mds_shard([{"text": text} for text in TEXTS[:5]], {"text": "str"})
    for place, value in ((0, 255), (4, 1), (9, 255), (24, 1), (28, 255)):
        data = bytearray(whole)
        data[place] ^= value
        (tmp_path / "s.mds").write_bytes(bytes(data))
        with pytest.raises(DataError) as caught:
            records(list_source(source(tmp_path / "s.mds", "mds")))
        assert "s.mds" in (caught.value.where or "")
    data = bytearray(whole)
    data[12] ^= 1  # where the third sample begins
    (tmp_path / "s.mds").write_bytes(bytes(data))
    kinds = [type(record) for record in records(list_source(source(tmp_path / "s.mds", "mds")))]
    assert kinds == [Document, BadRecord, BadRecord, Document, Document]


ARROW_DAMAGES: dict[str, Callable[[Path], Any]] = {
    "no json": lambda folder: (folder / "state.json").write_text("{"),
    "missing stream": lambda folder: (folder / "data-00001-of-00002.arrow").unlink(),
    "traversal": lambda folder: change(
        folder / "state.json", lambda state: state["_data_files"][0].update(filename="../d2/data.arrow")
    ),
    "no end": lambda folder: cut_short(folder / "data-00001-of-00002.arrow", 8),
    "within a batch": lambda folder: cut_short(folder / "data-00001-of-00002.arrow", 100),
    "goes on": lambda folder: cut_short(folder / "data-00001-of-00002.arrow", 0, b"more"),
    "a file": lambda folder: (folder / "data-00001-of-00002.arrow").write_bytes(b"ARROW1\0\0" + bytes(50)),
    "empty of messages": lambda folder: (folder / "data-00001-of-00002.arrow").write_bytes(b"\xff" * 4 + bytes(4)),
    "no column": lambda folder: (folder / "data-00001-of-00002.arrow").write_bytes(arrow_stream({"n": ["a"]})),
    "numbers": lambda folder: (folder / "data-00001-of-00002.arrow").write_bytes(arrow_stream({"text": [1]})),
}


def cut_short(path: Path, by: int, and_then: bytes = b"") -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - by] + and_then)


def test_cache_files_of_map_and_filter_are_no_part_of_a_dataset(tmp_path: Path) -> None:
    """``datasets`` leaves them beside the shards; they have other rows, and often other columns."""
    write_saved_dataset(tmp_path / "d", {"text": [f"text {number}" for number in range(6)]})
    (tmp_path / "d" / "cache-0123456789abcdef.arrow").write_bytes(arrow_stream({"body": ["other"] * 9}))
    found = detect_source([str(tmp_path / "d")])
    assert found.source["text_field"] == "text"
    assert "2 files" in found.summary
    assert texts(list_source(SourceConfig.model_validate(found.source))) == [f"text {number}" for number in range(6)]


@pytest.mark.parametrize("kind", list(ARROW_DAMAGES))
def test_a_damaged_folder_of_save_to_disk_is_refused(tmp_path: Path, kind: str) -> None:
    config = write(tmp_path / "d", "arrow")
    ARROW_DAMAGES[kind](tmp_path / "d")
    with pytest.raises(DataError) as caught:
        records(list_source(config))
    assert caught.value.exit_code == 4
    assert str(tmp_path / "d") in (caught.value.where or "")


def test_files_that_no_index_names_are_left_out(tmp_path: Path) -> None:
    """A loaded dataset keeps the results of ``map`` beside its data."""
    config = write(tmp_path / "d", "arrow")
    (tmp_path / "d" / "cache-0123456789abcdef.arrow").write_bytes(arrow_stream({"text": ["not this"]}))
    assert texts(list_source(config)) == TEXTS
    config = write(tmp_path / "m", "mds")
    (tmp_path / "m" / "shard.00099.mds").write_bytes(b"stale")
    assert texts(list_source(config)) == TEXTS


def test_shards_that_are_there_in_both_forms_are_read_once(tmp_path: Path) -> None:
    config = write(tmp_path / "d", "mds.zstd")
    raw, _ = mds_shard(SAMPLES[:50], COLUMNS, compression="zstd:3", hashes=["sha1", "xxh64"])
    (tmp_path / "d" / "shard.00000.mds").write_bytes(raw)
    listed = list_source(config)
    assert Path(listed.files[0].uri).name == "shard.00000.mds"
    assert texts(listed) == TEXTS


@pytest.mark.parametrize("form", ["mds", "arrow"])
def test_splits_validate_where_they_are_for_it_and_never_train(tmp_path: Path, form: str) -> None:
    for number, split in enumerate(("train", "validation", "test")):
        part = [{"text": f"{split} {n}"} for n in range(20 + number)]
        if form == "mds":
            write_mds(tmp_path / "d" / split, part, {"text": "str"})
        else:
            write_saved_dataset(tmp_path / "d" / split, {"text": [one["text"] for one in part]})
    listed = list_source(source(tmp_path / "d", form))
    assert [note.kind for note in listed.notes] == ["splits"]
    assert "test" in listed.notes[0].text
    data = load_config("quickstart").data
    held = select_holdout(listed, data.model_copy(update={"validation": ValidationConfig()}))
    for side, word in (("train", "train"), ("validation", "validation")):
        units = split_into_units(held, side, held.holdout, 1 << 20)
        found = [record for unit in units for record in UnitReader(held, side, held.holdout)(unit)]
        assert {record.text.split()[0] for record in found if isinstance(record, Document)} == {word}


def test_an_exported_corpus_comes_back_as_the_same_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    common = [f"data.cache.directory={tmp_path}/cache", "tokenizer.kind=byte", "data.sequence_length_tokens=64"]
    first = f"data.sources=[{{name: a, format: jsonl, paths: [{tmp_path}/a.jsonl]}}]"
    corpus = prepare(load_config("quickstart", [*common, first, "data.validation.held_out_fraction=0"]))
    export_tokens(corpus, "mds", tmp_path / "out", splits=["train"])
    again = f"data.sources=[{{name: a, format: mds, paths: [{tmp_path}/out], tokens_field: tokens, tokenizer: byte}}]"
    copy = prepare(load_config("quickstart", [*common, again, "data.validation.held_out_fraction=0"]))
    numbers = [{(report.documents, report.tokens) for report in one.reports.values()} for one in (corpus, copy)]
    assert numbers[0] == numbers[1]
    rows = [one.sources[0].train for one in (corpus, copy)]
    everything = np.arange(rows[0].num_rows)
    first_tokens, copied_tokens = (reader.read_rows(everything).tokens_NC for reader in rows)  # type: ignore[union-attr]
    np.testing.assert_array_equal(*(np.unique(tokens_NC, axis=0) for tokens_NC in (first_tokens, copied_tokens)))


@pytest.mark.parametrize(
    "words",
    [
        ["format: mds", "ids_dtype: int32"],
        ["format: arrow", "tokens_field: ids"],
        ["format: bin", "ids_dtype: int32", "tokenizer: byte"],
        ["format: mds", "tokens_field: ids"],
        ["format: mds", "tokens_field: ids", "text_field: body", "tokenizer: byte"],
    ],
)
def test_settings_that_would_be_ignored_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        load_config(
            "quickstart", ["tokenizer.kind=byte", f"data.sources=[{{name: a, paths: [x], {', '.join(words)}}}]"]
        )
