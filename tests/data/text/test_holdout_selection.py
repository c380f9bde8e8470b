"""Holdout selection: a default that fits every source, and explicit rules that are rejected if a split is empty."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from vorox.core.errors import ConfigError
from vorox.core.schema.data import DataConfig, ValidationConfig
from vorox.data.documents import BadRecord
from vorox.data.text import holdout_selection
from vorox.data.text.holdout import file_split, is_validation_name
from vorox.data.text.holdout_selection import describe_holdout, held_out_bytes, select_holdout
from vorox.data.text.shard_format import write_shard
from vorox.data.text.sources import Source, list_source
from vorox.data.text.unit_reader import UnitReader
from vorox.data.text.unit_splitter import split_into_units


def held(*paths_and_form: Path | str, grow: bool = False, **validation: Any) -> Source:
    *paths, form = map(str, paths_and_form)
    source = {"name": "s", "format": form, "paths": paths, "end_of_text_id": 9 if form == "bin" else None}
    data = DataConfig.model_validate({"sources": [source], "validation": validation, "cache": {"grow": grow}})
    return select_holdout(list_source(data.sources[0]), data)


def records(source: Source, split: Any) -> list[tuple[str, int]]:
    found = [
        record
        for unit in split_into_units(source, split, source.holdout, 64 << 20)
        for record in UnitReader(source, split, source.holdout)(unit)
    ]
    assert not any(isinstance(record, BadRecord) for record in found)
    return [(source.relative_paths[record.file_index], record.byte_offset) for record in found]


def bytes_of(source: Source, split: Any) -> int:
    units = split_into_units(source, split, source.holdout, 64 << 20)
    return sum(record.byte_length for unit in units for record in UnitReader(source, split, source.holdout)(unit))


def write_lines(path: Path, count: int) -> None:
    path.write_text("".join(json.dumps({"text": f"record {n} " * 5}) + "\n" for n in range(count)))


def names_with(num_files: int, counts: dict[float, int], min_counts: dict[float, int] | None = None) -> dict[str, bool]:
    """Names of which the hash holds out so many under each share; and whether it holds each out under the first."""
    for salt in itertools.count():
        names = [f"{salt}-{number}.txt" for number in range(num_files)]
        found = {
            share: [file_split(ValidationConfig(split="file", held_out_fraction=share), name) for name in names]
            for share in (*counts, *(min_counts or {}))
        }
        held_out = {share: splits.count("validation") for share, splits in found.items()}
        if all(held_out[share] == count for share, count in counts.items()) and all(
            count <= held_out[share] <= num_files // 2 for share, count in (min_counts or {}).items()
        ):
            return {name: split == "validation" for name, split in zip(names, found[min(counts)], strict=True)}
    raise AssertionError


class TestTheDefault:
    @pytest.mark.parametrize("num_files", [1, 2, 7])
    def test_of_few_texts_spans_are_held_out(self, tmp_path: Path, num_files: int) -> None:
        for n in range(num_files):
            (tmp_path / f"{n}.txt").write_text(f"line of {n}\n" * 40_000)
        source = held(tmp_path, "txt")
        assert source.holdout.split == "span"
        assert {path for path, _ in records(source, "validation")} == set(source.relative_paths)
        assert held_out_bytes(source) == pytest.approx(source.size_bytes / 100, rel=0.05)

    @pytest.mark.parametrize("num_rows", [3, 80])
    def test_of_few_rows_of_a_parquet_file_more_are(self, tmp_path: Path, num_rows: int) -> None:
        column = [f"record {n} " * 5 for n in range(num_rows)]
        parquet.write_table(arrow.table({"text": column}), str(tmp_path / "a.parquet"))
        source = held(tmp_path, "parquet", held_out_fraction=0.01)
        held_out, trained = (len(records(source, split)) for split in ("validation", "train"))
        assert held_out
        assert trained
        assert held_out + trained == num_rows

    @pytest.mark.parametrize("count", [2, 3, 10, 500])
    def test_the_share_that_is_named_is_the_one_held_out(self, tmp_path: Path, count: int) -> None:
        write_lines(tmp_path / "a.jsonl", count)
        source = held(tmp_path, "jsonl")
        validation, train = records(source, "validation"), records(source, "train")
        if source.holdout.split == "document":
            share, what = len(validation) / (len(validation) + len(train)), "of the documents of s"
        else:
            share, what = bytes_of(source, "validation") / (tmp_path / "a.jsonl").stat().st_size, "of it"
        named = re.fullmatch(rf"(?:spans of a.jsonl, )?([\d.]+)% {what}", describe_holdout(source))
        assert named is not None, describe_holdout(source)
        assert float(named[1]) == pytest.approx(100 * share, abs=0.05)
        assert held_out_bytes(source) == pytest.approx(share * source.size_bytes, abs=1)

    @pytest.mark.parametrize("compressed", [False, True])
    def test_of_several_files_it_is_that_of_all(self, tmp_path: Path, compressed: bool) -> None:
        for n, lines in enumerate((2, 3, 4)):
            write_lines(tmp_path / f"{n}.jsonl", lines)
            if compressed:
                text = (tmp_path / f"{n}.jsonl").read_bytes()
                (tmp_path / f"{n}.jsonl").unlink()
                (tmp_path / f"{n}.jsonl.gz").write_bytes(gzip.compress(text))
        source = held(tmp_path, "jsonl", split="span", held_out_fraction=0.3)
        total = bytes_of(source, "validation") + bytes_of(source, "train")
        percent = 100 * bytes_of(source, "validation") / total
        assert describe_holdout(source) == f"spans of the 3 files of s, {percent:.1f}% of the text"

    def test_one_that_takes_long_to_measure_is_said_to_be_about_the_configured_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_lines(tmp_path / "a.jsonl", 3)
        monkeypatch.setattr(holdout_selection, "_MAX_MEASURED_FILES", 0)
        monkeypatch.setattr(holdout_selection, "_PROBE_BYTES", 0)
        assert describe_holdout(held(tmp_path, "jsonl", split="span")) == "spans of a.jsonl, about 1% of it"
        documents = held(tmp_path, "jsonl", split="document", held_out_fraction=0.5)
        assert describe_holdout(documents) == "about 50% of the documents of s"

    def test_of_a_folder_of_some_texts_a_larger_share_of_whole_files_is(self, tmp_path: Path) -> None:
        for n in range(120):
            (tmp_path / f"{n}.md").write_text(f"line of {n}\n" * 400)
        source = held(tmp_path / "*.md", "txt")
        held_out = {path for path, _ in records(source, "validation")}
        assert source.holdout.split == "file"
        assert 2 <= len(held_out) <= 120 * 0.16
        assert not held_out & {path for path, _ in records(source, "train")}

    @pytest.mark.parametrize(
        ("held_bytes", "train_bytes", "share"),
        [(600, 100, 0.1), (601, 100, 0.2), (300, 1300, 0.1), (299, 1300, 0.2)],
    )
    def test_the_share_of_whole_files_is_within_a_factor_of_four(
        self, tmp_path: Path, held_bytes: int, train_bytes: int, share: float
    ) -> None:
        """2 of 20 files: 1,200 of 3,000 bytes are 4 x 10%, 600 of 24,000 are 10% / 4; a byte more or less is not."""
        for n, (name, is_held_out) in enumerate(names_with(20, {0.1: 2}, min_counts={0.2: 3}).items()):
            (tmp_path / name).write_text(f"{n:04}" * (held_bytes // 4 + 1) if is_held_out else f"{n:04}" * 400)
            os.truncate(tmp_path / name, held_bytes if is_held_out else train_bytes)
        source = held(tmp_path, "txt", held_out_fraction=0.1)
        assert (source.holdout.split, source.holdout.held_out_fraction) == ("file", share)

    @pytest.mark.parametrize(
        ("counts", "chosen"),
        [
            ({0.05: 2}, ("file", 0.05)), ({0.05: 1, 0.1: 2}, ("file", 0.1)), ({0.05: 1, 0.1: 1, 0.2: 2}, ("file", 0.2)),
            ({0.05: 0, 0.1: 1, 0.2: 1}, ("span", 0.05)),
        ],
    )  # fmt: skip
    def test_whole_files_are_two_at_least_of_up_to_four_times_the_share(
        self, tmp_path: Path, counts: dict[float, int], chosen: tuple[str, float]
    ) -> None:
        for name in names_with(10, counts):
            (tmp_path / name).write_text(f"a line of {name}\n" * 500)
        source = held(tmp_path, "txt", held_out_fraction=0.05)
        assert (source.holdout.split, source.holdout.held_out_fraction) == chosen

    def test_of_many_texts_whole_files_are(self, tmp_path: Path) -> None:
        for n in range(300):
            (tmp_path / f"{n}.txt").write_text(f"line of {n}\n" * 3)
        source = held(tmp_path, "txt", held_out_fraction=0.05)
        assert source.holdout.split == "file"
        train, validation = ({place for place, _ in records(source, split)} for split in ("train", "validation"))
        assert len(train) + len(validation) == 300
        assert not train & validation
        assert describe_holdout(source).startswith(f"{len(validation)} of 300 files of s")

    @pytest.mark.parametrize("count", [2, 3, 10, 500])
    def test_of_records_documents_are_or_spans(self, tmp_path: Path, count: int) -> None:
        write_lines(tmp_path / "a.jsonl", count)
        source = held(tmp_path, "jsonl")
        assert source.holdout.split in ({"document"} if count == 500 else {"document", "span"})
        train, validation = records(source, "train"), records(source, "validation")
        assert train
        assert validation
        assert len(train) + len(validation) == count

    def test_of_a_single_record_nothing_is_and_that_is_said(self, tmp_path: Path) -> None:
        write_lines(tmp_path / "a.jsonl", 1)
        source = held(tmp_path, "jsonl")
        assert source.holdout.held_out_fraction == 0
        assert [note.kind for note in source.notes] == ["validation"]
        assert len(records(source, "train")) == 1

    def test_shards_with_validation_in_their_names_never_train(self, tmp_path: Path) -> None:
        for name in ("web_train_000001.bin", "web_train_000002.bin", "web_val_000000.bin"):
            write_shard(tmp_path / name, np.array([*map(ord, name), 9], np.uint16))
        source = held(tmp_path, "bin")
        assert {place for place, _ in records(source, "validation")} == {"web_val_000000.bin"}
        assert {place for place, _ in records(source, "train")} == {"web_train_000001.bin", "web_train_000002.bin"}
        assert "1 of 3 files" in describe_holdout(source)
        assert "2 to train on" in describe_holdout(source)

    @pytest.mark.parametrize("given", [("",), ("train", "val"), ("train/s_0.bin", "val/s_0.bin"), ("*/s_0.bin",)])
    def test_so_are_those_of_folders_that_say_it_however_they_are_given(
        self, tmp_path: Path, given: tuple[str, ...]
    ) -> None:
        for number, folder in enumerate(("train", "val")):
            (tmp_path / folder).mkdir()
            write_shard(tmp_path / folder / "s_0.bin", np.array([1, number, 9] * 50, np.uint16))
        source = held(*(tmp_path / path for path in given), "bin")
        assert source.holdout.split == "named"
        assert {place for place, _ in records(source, "validation")} == {"val/s_0.bin"}
        assert {place for place, _ in records(source, "train")} == {"train/s_0.bin"}

    def test_names_are_those_inside_the_folder_where_they_tell_the_split_or_nothing_does(self, tmp_path: Path) -> None:
        for number, folder in enumerate(("one", "two")):
            (tmp_path / folder).mkdir()
            write_shard(tmp_path / folder / f"s_{number}.bin", np.array([1, number, 9] * 50, np.uint16))
        assert held(tmp_path / "one", tmp_path / "two", "bin").relative_paths == ("s_0.bin", "s_1.bin")

    def test_a_cache_that_grows_keeps_its_rule_whatever_files_come(self, tmp_path: Path) -> None:
        rules: set[str] = set()
        for count in (1, 30, 300):
            for n in range(count):
                (tmp_path / f"{n}.txt").write_text(f"line of {n}\n" * 40)
            rules.add(held(tmp_path, "txt", grow=True, held_out_fraction=0.05).holdout.split)
        assert rules == {"span"}


@pytest.mark.parametrize("name", ["fineweb_val_000000.bin", "val.bin", "a/TinyStories_val.bin", "x-validation-1.bin"])
def test_names_of_validation_shards(name: str) -> None:
    assert is_validation_name(name)


@pytest.mark.parametrize("name", ["fineweb_train_000001.bin", "carnival.bin", "valley_1.bin"])
def test_other_names(name: str) -> None:
    assert not is_validation_name(name)


@pytest.mark.parametrize("split", ["file", "document"])
def test_a_rule_that_holds_out_nothing_is_refused_at_the_listing_with_one_that_works(
    tmp_path: Path, split: str
) -> None:
    (tmp_path / "one.txt").write_text("a line of text\n" * 200)
    with pytest.raises(ConfigError) as caught:
        held(tmp_path, "txt", split=split, held_out_fraction=0.1)
    assert "data.validation.split=auto" in caught.value.hint
    assert records(held(tmp_path, "txt", split="auto", held_out_fraction=0.1), "validation")
    assert not held(tmp_path, "txt", split=split, held_out_fraction=0).holdout.held_out_fraction
