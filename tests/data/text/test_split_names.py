"""Splits by the names of files and folders: train and validation are read, test is left out with a note."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import yaml

from vorox.core.errors import DataError
from vorox.core.schema.data import DataConfig
from vorox.data.documents import Document
from vorox.data.storage import escape_glob
from vorox.data.text.format_detection import detect_source
from vorox.data.text.holdout import SPLITS
from vorox.data.text.holdout_selection import select_holdout
from vorox.data.text.sources import list_source
from vorox.data.text.split_names import named_split
from vorox.data.text.unit_reader import UnitReader
from vorox.data.text.unit_splitter import split_into_units


def write(path: Path, *texts: str) -> None:
    """Write a file of some texts in the format that its suffix names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"text": text} for text in texts]
    if path.suffix == ".parquet":
        parquet.write_table(arrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["text"], *([text] for text in texts)])
    else:
        lines = {".jsonl": "\n".join(map(json.dumps, rows)), ".json": json.dumps(rows)}
        path.write_text(lines.get(path.suffix, "\n".join(texts)))


def splits_of(*paths: Path, form: str, detected: bool = False) -> tuple[dict[str, set[str]], str]:
    """The first word of each text by the split that it belongs to, and the notes."""
    source = {"name": "s", "format": form, "paths": list(map(str, paths))}
    if detected:
        source = detect_source(source["paths"]).source
    data = DataConfig.model_validate({"sources": [source]})
    listed = select_holdout(list_source(data.sources[0]), data)
    words: dict[str, set[str]] = {}
    for split in SPLITS:
        for unit in split_into_units(listed, split, listed.holdout, 1 << 20):
            for record in UnitReader(listed, split, listed.holdout)(unit):
                assert isinstance(record, Document)
                words.setdefault(split, set()).add(record.text.split()[0])
    return words, " ".join(note.text for note in listed.notes)


def folder_of(folder: Path, names: Mapping[str, str]) -> Path:
    for name, word in names.items():
        write(folder / name, *(f"{word} text {n} of the file {name}" for n in range(40)))
    return folder


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "parquet", "txt"])
@pytest.mark.parametrize("is_detected", [False, True])
@pytest.mark.parametrize(
    ("train", "validation", "test"),
    [
        ("train", "valid", "test"), ("data/train-00000-of-00001", "data/validation-00000-of-00001", "data/test-00000"),
        ("train/a", "dev/a", "test/a"), ("x_train_1", "x_val_1", "x_test_1"), ("wiki.train", "wiki.dev", "wiki.eval"),
    ],
)  # fmt: skip
def test_of_a_folder_train_is_trained_on_validation_validates_and_test_is_left_out(
    tmp_path: Path, form: str, is_detected: bool, train: str, validation: str, test: str
) -> None:
    names = {f"{name}.{form}": word for name, word in ((train, "Train"), (validation, "Held"), (test, "Test"))}
    folder = folder_of(tmp_path / "d", names)
    expected = {"train": {"Train"}, "validation": {"Held"}}
    for location in (folder, folder / "**" / f"*.{form}"):
        words, notes = splits_of(location, form=form, detected=is_detected)
        assert words == expected
        assert "these splits are left out: test " in notes


@pytest.mark.parametrize("names", [("test",), ("test", "other"), ("test", "latest", "contest", "validate")])
def test_without_train_beside_it_a_name_means_nothing(tmp_path: Path, names: tuple[str, ...]) -> None:
    folder = folder_of(tmp_path / "d", {f"{name}.txt": name for name in names})
    words, notes = splits_of(folder, form="txt")
    assert words["train"] | words["validation"] == set(names)
    assert not notes


def test_all_of_a_folder_of_source_code_is_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "d", {"train.py": "Train", "eval.py": "Eval", "tests/test_a.py": "Test"})
    data = DataConfig.model_validate({"sources": [detect_source([str(folder)]).source]})
    listed = select_holdout(list_source(data.sources[0]), data)
    assert sorted(Path(path).name for path in listed.relative_paths) == ["eval.py", "test_a.py", "train.py"]
    assert (listed.holdout.split, listed.notes) == ("span", ())


def test_what_paths_name_themselves_is_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "d", {"train.jsonl": "Train", "test.jsonl": "Test", "more.jsonl": "More"})
    folder_of(tmp_path / "e", {"train/a.jsonl": "Train2", "test/a.jsonl": "Test2"})
    for paths in (
        (folder / "train.jsonl", folder / "test.jsonl"), (folder / "train*.jsonl", folder / "test*.jsonl"),
    ):  # fmt: skip
        assert splits_of(*paths, form="jsonl")[0]["train"] == {"Train", "Test"}
    assert splits_of(folder, folder / "test.jsonl", form="jsonl")[0]["train"] == {"Train", "Test", "More"}
    assert splits_of(folder, form="jsonl")[0]["train"] == {"Train", "More"}, "a file without a split's name"
    assert splits_of(tmp_path / "e" / "test", form="jsonl")[0]["train"] == {"Test2"}


def test_detection_reads_the_columns_and_the_opening_of_train(tmp_path: Path) -> None:
    folder_of(tmp_path, {"train.jsonl": "Train"})
    (tmp_path / "test.jsonl").write_text('{"question": "Q of the test", "answer": "A"}\n')
    found = detect_source([str(tmp_path)])
    assert found.source["text_field"] == "text"
    assert found.opening.startswith("Train")
    assert "1 file," in found.summary


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("train.jsonl", "train"), ("test/train.jsonl", "train"), ("train/test_1.jsonl", "test"),
        ("dev-tools-train.jsonl", "train"), ("TRAIN-00000-of-00002.parquet", "train"), ("val2.csv", "validation"),
        ("train_sft-0.parquet", "train"), ("latest.txt", None), ("trained.txt", None), ("a/b.txt", None),
        ("train.py", None), ("tests/test_model.py", None), ("val/dev.cpp", None),
    ],
)  # fmt: skip
def test_the_innermost_name_and_its_last_word_decide(path: str, split: str | None) -> None:
    assert named_split(path) == split


def card(folder: Path, *configs: dict[str, object]) -> Path:
    """Write the card of a dataset repository, as huggingface_hub does."""
    head = yaml.safe_dump({"license": "mit", "configs": list(configs)}, sort_keys=False)
    (folder / "README.md").write_text(f"---\n{head}---\n# A dataset\n")
    return folder


def config(name: str = "default", /, **splits: str) -> dict[str, object]:
    return {"config_name": name, "data_files": [{"split": split, "path": path} for split, path in splits.items()]}


@pytest.mark.parametrize("detected", [True, False], ids=["--data", "paths"])
def test_of_a_cloned_dataset_the_card_says_which_files_are_read(tmp_path: Path, detected: bool) -> None:
    """A configuration of everything beside those of its parts, as in many repositories; test is left out."""
    names = {"data/train-0.jsonl": "one", "data/test-0.jsonl": "four", "data/validation-0.jsonl": "two",
             "extra/train-0.jsonl": "again"}  # fmt: skip
    splits = {split: f"data/{split}-*" for split in ("train", "validation", "test")}
    folder = card(folder_of(tmp_path / "clone", names), config(**splits), config("extra", train="extra/*"))
    words, notes = splits_of(folder, form="jsonl", detected=detected)
    assert words == {"train": {"one"}, "validation": {"two"}}
    assert "left out: test" in notes
    plain = folder_of(tmp_path / "plain", names)
    (plain / "README.md").write_text("---\n: no card\n---\n")
    assert splits_of(plain, form="jsonl", detected=detected)[0]["train"] == {"one", "again"}


@pytest.mark.parametrize(
    ("configs", "what", "path"),
    [
        ([config(train_prefs="data/train_prefs-*", train_sft="data/train_sft-*", test_sft="data/test_sft-*")],
         "several splits for training: 'train_prefs', 'train_sft'", "data/train_prefs-*"),
        ([config("a", train="data/train_sft-*"), config("b", train="data/train_prefs-*")],
         "one of its configurations 'a', 'b'", "in paths"),
    ],
    ids=["splits", "configurations"],
)  # fmt: skip
def test_a_card_that_leaves_the_choice_open_is_refused(
    tmp_path: Path, configs: list[dict[str, object]], what: str, path: str
) -> None:
    """UltraFeedback has the same conversations in three splits; a benchmark's parts repeat its whole."""
    names = {f"data/{split}-0.jsonl": split for split in ("train_prefs", "train_sft", "test_sft")}
    folder = card(folder_of(tmp_path, names), *configs)
    for detected in (True, False):
        with pytest.raises(DataError, match=what) as caught:
            splits_of(folder, form="jsonl", detected=detected)
        assert path in caught.value.hint
    assert splits_of(folder / "data" / "train_prefs-*", form="jsonl")[0]["train"] == {"train_prefs"}


@pytest.mark.parametrize("detected", [True, False], ids=["--data", "paths"])
@pytest.mark.parametrize("inside", ["", "data/"])
def test_shards_of_several_splits_for_training_are_refused_without_a_card(
    tmp_path: Path, inside: str, detected: bool
) -> None:
    """A download of ``data/*`` alone; ``datasets`` says which splits the folder has."""
    datasets = pytest.importorskip("datasets")
    names = {f"data/{split}-{shard}.jsonl": split for split, shards in
             (("train_sft", 3), ("train_gen", 1), ("test_sft", 1))
             for shard in (f"{number:05}-of-{shards:05}" for number in range(shards))}  # fmt: skip
    root = folder_of(tmp_path / "clone [1]", names)  # a name that datasets takes for a pattern
    plain = folder_of(tmp_path / "plain", names)
    theirs = datasets.load_dataset_builder(str(plain), cache_dir=str(tmp_path / "cache")).config.data_files
    assert {"train_sft", "train_gen"} <= set(theirs)
    folder = root / inside.rstrip("/")
    for place in (folder, Path(escape_glob(str(folder)), "*" if inside else "**")):
        with pytest.raises(DataError, match="several splits for training: 'train_gen', 'train_sft'") as caught:
            splits_of(place, form="jsonl", detected=detected)
        typed = caught.value.hint.rpartition("in paths: ")[2].split(" or ")
        assert len(typed) == 2
        for split, location in zip(("train_gen", "train_sft"), typed, strict=True):
            assert splits_of(Path(location), form="jsonl", detected=detected)[0]["train"] == {split}
    both, _ = splits_of(*map(Path, typed), form="jsonl", detected=detected)
    assert both["train"] == {"train_gen", "train_sft"}, "named by the user"


@pytest.mark.parametrize(
    "names",
    [
        ("train-00000-of-00002", "train-00001-of-00002"), ("wiki-train-00000-of-00001", "books-train-00000-of-00001"),
        ("en/train_a-00000-of-00001", "de/train_b-00000-of-00001"), ("train_sft", "train_gen"), ("train_1", "train_2"),
        ("a-train.00000-of-00002", "b-train.00001-of-00002"), ("part-00000-of-00002", "part-00001-of-00002"),
    ],
    ids=lambda names: names[0],
)  # fmt: skip
def test_names_that_are_of_one_split_are_read(tmp_path: Path, names: tuple[str, str]) -> None:
    folder = folder_of(tmp_path, {f"{name}.jsonl": f"w{number}" for number, name in enumerate(names)})
    for detected in (True, False):
        words, _ = splits_of(folder, form="jsonl", detected=detected)
        assert words["train"] | words.get("validation", set()) == {"w0", "w1"}


def test_a_card_that_merges_shards_into_one_split_decides(tmp_path: Path) -> None:
    names = {f"data/{split}-00000-of-00001.jsonl": split for split in ("train_sft", "train_gen")}
    folder = card(folder_of(tmp_path, names), config(train="data/train*"))
    for detected in (True, False):
        assert splits_of(folder, form="jsonl", detected=detected)[0]["train"] == {"train_sft", "train_gen"}
