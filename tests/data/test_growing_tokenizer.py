"""``data.cache.grow`` and trained tokenizers: which of the stored ones new files join, and what refuses to grow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vorox.core.schema import RunConfig
from vorox.data.corpus.corpus import Corpus, prepare


def write(folder: Path, *names: str, salt: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        first = 1000 * ord(name) + salt
        records = ({"text": f"Record {n} of {name * 3} says {n * n}."} for n in range(first, first + 40))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def configuration(root: Path, *, grow: bool = True) -> RunConfig:
    data = {
        "sources": [{"name": "text", "format": "jsonl", "paths": [str(root / "text")]}],
        "sequence_length_tokens": 32,
        "cache": {"directory": str(root / "cache"), "unit_bytes": 1500, "chunk_rows": 8, "grow": grow},
        "validation": {"split": "document", "held_out_fraction": 0.2},
    }
    tokenizer = {"kind": "bpe", "vocab_size": 300}
    return RunConfig.model_validate({"data": data, "tokenizer": tokenizer, "train": {"num_steps": 1}})


def tokenizers(root: Path) -> list[Path]:
    return sorted((root / "cache" / "tokenizers").glob("*/tokenizer.json"))


def growth_notes(corpus: Corpus) -> list[str]:
    return [note.text for note in corpus.notes if note.kind == "tokenizer"]


@pytest.mark.parametrize("change", ["has changed", "is missing"])
def test_changed_files_begin_another_view_with_a_tokenizer_of_its_own(tmp_path: Path, change: str) -> None:
    write(tmp_path / "text", "a", "b")
    first = prepare(configuration(tmp_path))
    if change == "has changed":
        write(tmp_path / "text", "a", salt=7)
    else:
        (tmp_path / "text" / "a.jsonl").unlink()
    digests = [reader.digest for reader in (*first.train, *first.validation)]
    second = prepare(configuration(tmp_path))
    assert second.tokenizer.fingerprint != first.tokenizer.fingerprint
    assert len(tokenizers(tmp_path)) == 2
    assert [reader.digest for reader in (*first.train, *first.validation)] == digests
    for reader in (*first.train, *first.validation):
        reader.verify()


def test_the_kept_tokenizer_is_named(tmp_path: Path) -> None:
    write(tmp_path / "text", "a")
    first = prepare(configuration(tmp_path))
    assert growth_notes(first) == growth_notes(prepare(configuration(tmp_path))) == []
    write(tmp_path / "text", "b")
    grown = prepare(configuration(tmp_path))
    assert grown.tokenizer.fingerprint == first.tokenizer.fingerprint
    (text,) = growth_notes(grown)
    assert first.tokenizer.fingerprint[:16] in text
    assert "1 of 2 files" in text


@pytest.mark.parametrize("salt", range(4))
def test_between_equal_caches_the_tokenizer_of_all_files_is_taken(tmp_path: Path, salt: int) -> None:
    """Its fingerprint is the larger one for some of the texts only."""
    write(tmp_path / "text", "a", salt=salt)
    prepare(configuration(tmp_path))
    write(tmp_path / "text", "b", salt=salt)
    kept = prepare(configuration(tmp_path))
    exact = prepare(configuration(tmp_path, grow=False))
    assert exact.tokenizer.fingerprint != kept.tokenizer.fingerprint
    found = prepare(configuration(tmp_path))
    assert found.tokenizer.fingerprint == exact.tokenizer.fingerprint
    assert growth_notes(found) == []


def test_a_damaged_tokenizer_of_other_files_does_not_stop_growth(tmp_path: Path) -> None:
    write(tmp_path / "text", "a")
    first = prepare(configuration(tmp_path, grow=False))
    (kept,) = tokenizers(tmp_path)
    write(tmp_path / "text", "b")
    prepare(configuration(tmp_path, grow=False))
    (other,) = set(tokenizers(tmp_path)) - {kept}
    value = json.loads(other.read_bytes())
    value["model"]["merges"].pop()
    other.write_text(json.dumps(value))
    write(tmp_path / "text", "c")
    assert prepare(configuration(tmp_path)).tokenizer.fingerprint == first.tokenizer.fingerprint
