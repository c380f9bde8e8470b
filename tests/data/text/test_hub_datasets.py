"""Hub datasets by name, against a fake hub: the dataset card selects files, otherwise their names do."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from servers import HubServer, hub_server
from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig, ValidationConfig
from vorox.data.documents import Document
from vorox.data.text.hub_datasets import dataset_files, is_dataset_name
from vorox.data.text.sources import list_source
from vorox.data.text.unit_reader import UnitReader
from vorox.data.text.unit_splitter import split_into_units

NAME = "acme/corpus"
NOTHING_HELD_OUT = ValidationConfig(held_out_fraction=0)


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with hub_server() as running:
        yield running


@pytest.fixture
def hub(server: HubServer) -> HubServer:
    server.commits.clear()
    server.references.clear()
    return server


def rows(*texts: str) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": list(texts)}), buffer)
    return buffer.getvalue()


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def source(form: str = "parquet", **options: Any) -> SourceConfig:
    return SourceConfig.model_validate({"name": "s", "format": form, "paths": [f"hf://{NAME}"], **options})


def texts(config: SourceConfig) -> list[str]:
    listed = list_source(config)
    units = split_into_units(listed, "train", NOTHING_HELD_OUT, 1 << 20)
    records = [record for unit in units for record in UnitReader(listed, "train", NOTHING_HELD_OUT)(unit)]
    assert all(isinstance(record, Document) for record in records)
    return [record.text for record in records if isinstance(record, Document)]


CARD = b"""---
license: odc-by
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: small
  data_files:
  - split: train
    path: [sample/a.parquet, sample/b.parquet]
  - split: test
    path: sample/c.parquet
- config_name: plain
  data_files: sample/*.parquet
- config_name: folder
  data_dir: sample
---
# A corpus
"""
FILES = {
    "README.md": CARD, "data/2024/x.parquet": rows("one"), "data/2025/x.parquet": rows("two"),
    "sample/a.parquet": rows("a"), "sample/b.parquet": rows("b"), "sample/c.parquet": rows("c"),
}  # fmt: skip


def test_of_a_folder_that_the_card_names_the_split_is_read(hub: HubServer) -> None:
    card = b"---\nconfigs:\n- {config_name: default, data_dir: data}\n---\n"
    names = {"data/train-0.parquet": rows("a"), "data/test-0.parquet": rows("b"), "more/train-0.parquet": rows("c")}
    hub.commit(NAME, {"README.md": card, **names})
    assert texts(source()) == ["a"]
    assert texts(source(hf_split="test")) == ["b"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["one", "two"]),
        ({"hf_config": "default"}, ["one", "two"]),
        ({"hf_config": "small"}, ["a", "b"]),
        ({"hf_config": "small", "hf_split": "test"}, ["c"]),
        ({"hf_config": "plain"}, ["a", "b", "c"]),
        ({"hf_config": "folder"}, ["a", "b", "c"]),
    ],
)
def test_the_card_decides(hub: HubServer, options: dict[str, str], expected: list[str]) -> None:
    hub.commit(NAME, FILES)
    assert texts(source(**options)) == expected


def test_places_are_relative_to_the_repository(hub: HubServer) -> None:
    hub.commit(NAME, FILES)
    listed = list_source(source())
    assert listed.relative_paths == ("data/2024/x.parquet", "data/2025/x.parquet")
    assert [file.uri for file in listed.files] == [f"hf://datasets/{NAME}/{place}" for place in listed.relative_paths]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hf_config": "other"}, "no configuration 'other'; it has 'default', 'folder', 'plain', 'small'"),
        ({"hf_config": "small", "hf_split": "validation"}, "no split 'validation'; it has 'test', 'train'"),
    ],
)
def test_a_wrong_choice_names_what_there_is(hub: HubServer, options: dict[str, str], message: str) -> None:
    hub.commit(NAME, FILES)
    with pytest.raises(DataError) as caught:
        list_source(source(**options))
    assert message in caught.value.what
    assert caught.value.hint


def test_a_choice_that_would_be_a_guess_is_refused(hub: HubServer) -> None:
    card = b"---\nconfigs:\n- {config_name: a, data_files: a.jsonl}\n- {config_name: b, data_files: b.jsonl}\n---\n"
    hub.commit(NAME, {"README.md": card, "a.jsonl": lines("a"), "b.jsonl": lines("b")})
    with pytest.raises(DataError, match="needs one of its configurations 'a', 'b'"):
        list_source(source("jsonl"))
    marked = card.replace(b"config_name: b,", b"config_name: b, default: true,")
    hub.commit(NAME, {"README.md": marked})
    assert texts(source("jsonl")) == ["b"]


@pytest.mark.parametrize(
    ("files", "options", "expected"),
    [
        (["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test-0.jsonl"], {}, [0, 1]),
        (["data/train-00000-of-00001.jsonl", "data/test-0.jsonl"], {"hf_split": "test"}, [1]),
        (["en/train-0.jsonl", "en/validation-0.jsonl", "fr/train-0.jsonl"], {"hf_config": "en"}, [0]),
        (["en/train-0.jsonl", "en/valid.jsonl"], {"hf_config": "en", "hf_split": "validation"}, [1]),
        (["train.jsonl", "dev.jsonl"], {"hf_split": "validation"}, [1]),
        (["constrained.jsonl", "train.jsonl", "test.jsonl"], {}, [1]),
        (["a.jsonl", "b.jsonl"], {}, [0, 1]),
        (["sub/my_split-0.jsonl", "sub/train-0.jsonl"], {"hf_split": "my_split"}, [0]),
    ],
)  # fmt: skip
def test_without_a_card_the_names_do(
    hub: HubServer, files: list[str], options: dict[str, str], expected: list[int]
) -> None:
    hub.commit(NAME, {name: lines(name) for name in files})
    assert sorted(texts(source("jsonl", **options))) == sorted(files[index] for index in expected)


def test_shards_of_several_splits_for_training_need_a_choice(hub: HubServer) -> None:
    names = [f"data/{split}-00000-of-00001.jsonl" for split in ("train_sft", "train_gen", "test_sft")]
    hub.commit(NAME, {name: lines(name) for name in names})
    with pytest.raises(DataError, match="several splits for training: 'train_gen', 'train_sft'") as caught:
        list_source(source("jsonl"))
    assert "hf_split" in caught.value.hint
    assert texts(source("jsonl", hf_split="train_gen")) == [names[1]]
    hub.commit(NAME, {"data/train-00000-of-00001.jsonl": lines("itself")})
    assert texts(source("jsonl")) == ["itself"]


def test_missing_splits_and_folders_are_named(hub: HubServer) -> None:
    hub.commit(NAME, {"en/train.jsonl": lines("x")})
    with pytest.raises(DataError, match="No file name of the dataset mentions split 'test'; there are files for train"):
        list_source(source("jsonl", hf_split="test"))
    with pytest.raises(DataError, match="no folder for configuration 'fr'; its folders are 'en'"):
        list_source(source("jsonl", hf_config="fr"))


def test_a_revision_is_what_is_read(hub: HubServer) -> None:
    old = hub.commit(NAME, {"train.jsonl": lines("old")})
    hub.commit(NAME, {"train.jsonl": lines("new")})
    hub.commit(NAME, {"train.jsonl": lines("branch")}, reference="refs/convert/parquet")
    assert texts(source("jsonl")) == ["new"]
    assert texts(source("jsonl", revision=old)) == ["old"]
    assert texts(source("jsonl", paths=[f"hf://{NAME}@{old}"])) == ["old"]
    assert texts(source("jsonl", paths=[f"hf://{NAME}/train.jsonl"], revision=old)) == ["old"]


def test_a_push_of_other_files_changes_no_digest(hub: HubServer) -> None:
    hub.commit(NAME, {"train.jsonl": lines("x")})
    before = list_source(source("jsonl"))
    hub.commit(NAME, {"README.md": b"# words"})
    after = list_source(source("jsonl"))
    assert (before.digest, before.files) == (after.digest, after.files)


def test_a_broken_card_is_refused_with_its_place(hub: HubServer) -> None:
    hub.commit(NAME, {"README.md": b"---\nconfigs: [\n---\n", "train.jsonl": lines("x")})
    with pytest.raises(DataError, match="card is not valid YAML") as caught:
        list_source(source("jsonl"))
    assert caught.value.where.endswith("/README.md")


def test_what_is_a_dataset_and_what_a_path() -> None:
    assert is_dataset_name("hf://a/b")
    assert is_dataset_name("hf://datasets/a/b@v1.0")
    assert not is_dataset_name("hf://a/b/c.parquet")
    assert not is_dataset_name("hf://models/a/b")
    assert not is_dataset_name("a/b")


def test_the_repository_must_be_there(hub: HubServer) -> None:
    with pytest.raises(DataError, match="no repository 'no/such'"):
        dataset_files(source(), "hf://no/such", (".parquet",))
