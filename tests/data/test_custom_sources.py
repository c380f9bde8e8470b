"""User-defined sources, formats and tokenizers, named by import path, from listing to the rows of a run."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_runs
import vorox
from vorox.core.config import load_config
from vorox.core.errors import ConfigError, DataError, VoroxError
from vorox.core.schema import RunConfig
from vorox.data.corpus.corpus import prepare

FUNCTIONS = """
import re


def paragraphs(content):
    for text in content.decode().split("---"):
        yield text.strip()


paragraphs.suffixes = (".notes",)


def numbers(content):
    yield from range(3)


def fails(content):
    yield "one"
    raise ValueError("not such a file")


def shards():
    return ["FOLDER/a.notes", "FOLDER/more"]


def nothing():
    return []


def upper(path):
    from tokenizers import Tokenizer, models, decoders, normalizers

    tokenizer = Tokenizer(models.BPE(vocab={chr(code): code - 32 for code in range(32, 127)}, merges=[]))
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def a_number(path):
    return 5
"""
TEXTS = [f"paragraph {number}: the plan of a run is its order" for number in range(40)]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_runs.use_numpy_engine(monkeypatch)
    folder = tmp_path / "notes"
    (folder / "more").mkdir(parents=True)
    (folder / "a.notes").write_text("\n---\n".join(TEXTS[:20]))
    (folder / "more" / "b.notes.gz").write_bytes(gzip.compress("\n---\n".join(TEXTS[20:]).encode()))
    (folder / "more" / "readme.txt").write_text("not of this source")
    (tmp_path / "mine.py").write_text(FUNCTIONS.replace("FOLDER", str(folder)), encoding="utf-8")
    return tmp_path / "mine.py"


def configuration(mine: Path, source: dict[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    sources = [{"name": "mine", **source}]
    return tiny_runs.configuration(mine.parent, [f"data.sources={json.dumps(sources)}", *overrides])


def texts_of(config: RunConfig) -> list[str]:
    """The documents of both splits, as their tokens say."""
    corpus = prepare(config)
    found: list[str] = []
    for reader in (corpus.sources[0].train, corpus.sources[0].validation):
        assert reader is not None
        pieces: dict[tuple[str, int], list[tuple[int, list[int]]]] = {}
        for row in range(reader.num_rows):
            tokens = reader.read_rows(np.array([row])).tokens_NC[0].tolist()
            place = 0
            for span in reader.documents_of(row):
                key = (span.uri, span.ordinal)
                pieces.setdefault(key, []).append((span.document_token_offset, tokens[place : place + span.length]))
                place += span.length
        for parts in pieces.values():
            known = {offset + index: token for offset, part in parts for index, token in enumerate(part)}
            ids = [known[index] for index in range(len(known))]  # pieces of a document share a token
            found.append(corpus.tokenizer.decode(ids[:-1] if ids[-1] == corpus.tokenizer.end_of_text_id else ids))
    return found


def test_a_format_and_a_source(mine: Path) -> None:
    by_folder = configuration(mine, {"format": f"{mine}:paragraphs", "paths": [str(mine.parent / "notes")]})
    by_function = configuration(mine, {"format": f"{mine}:paragraphs", "paths": [f"{mine}:shards"]})
    assert sorted(texts_of(by_folder)) == sorted(TEXTS)
    assert sorted(texts_of(by_function)) == sorted(TEXTS)


def test_a_run_reads_it_and_finds_its_documents_again(mine: Path) -> None:
    outcome = vorox.train(configuration(mine, {"format": f"{mine}:paragraphs", "paths": [f"{mine}:shards"]}))
    run = vorox.open_run(outcome.run_directory)
    document = run.where(3)[0].documents[0]
    assert any(seen.step == 3 for seen in run.when(document.uri, ordinal=document.ordinal))
    assert any(seen.step == 3 for seen in run.when(document.uri, byte=0))


def test_a_transform_in_a_file(mine: Path) -> None:
    mine.write_text(mine.read_text() + "\n\ndef only_even(text):\n    return text if '0:' in text else None\n")
    source = {"format": f"{mine}:paragraphs", "paths": [str(mine.parent / "notes")]}
    splits = "[train, validation]"
    config = configuration(mine, source, [f"data.transforms=[{{name: '{mine}:only_even', splits: {splits}}}]"])
    assert sorted(texts_of(config)) == sorted(text for text in TEXTS if "0:" in text)


def test_a_format_that_changed_makes_another_cache(mine: Path) -> None:
    config = configuration(mine, {"format": f"{mine}:paragraphs", "paths": [str(mine.parent / "notes")]})
    before = prepare(config).sources[0].train
    again = prepare(config).sources[0].train
    assert again.directory == before.directory
    mine.write_text(mine.read_text().replace("text.strip()", "text.strip().lower()"))
    assert prepare(config).sources[0].train.directory != before.directory


def test_a_format_moves_with_its_file(mine: Path) -> None:
    before = prepare(configuration(mine, {"format": f"{mine}:paragraphs", "paths": [str(mine.parent / "notes")]}))
    (mine.parent / "elsewhere").mkdir()
    moved = mine.rename(mine.parent / "elsewhere" / "mine.py")
    after = prepare(configuration(mine, {"format": f"{moved}:paragraphs", "paths": [str(mine.parent / "notes")]}))
    assert after.sources[0].train.directory == before.sources[0].train.directory


def test_a_tokenizer(mine: Path) -> None:
    config = configuration(
        mine, {"format": f"{mine}:paragraphs", "paths": [str(mine.parent / "notes")]}, [f"tokenizer.kind={mine}:upper"]
    )
    assert sorted(texts_of(config)) == sorted(TEXTS)
    outcome = vorox.train(config)
    model = vorox.load_model(outcome.run_directory)
    assert model.tokenizer.encode_batch(["the"])[0].tolist() == [ord(letter) - 32 for letter in "the"]
    mine.write_text(mine.read_text().replace("code - 32", "158 - code - 32"))
    with pytest.raises(VoroxError):  # its rows are of other ids
        vorox.train(config, ["train.num_steps=14"], resume_from=outcome.run_directory)


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["data.sources.0.format={mine}:missing"], "Cannot import format .*mine.py:missing"),
        (["data.sources.0.format={mine}:fails"], "cannot read the file: ValueError: not such a file"),
        (["data.sources.0.paths=['{mine}:nothing']"], "returned no files"),
        (["data.sources.0.paths=['{mine}:paragraphs']"], "failed: TypeError"),
        (["tokenizer.kind={mine}:a_number"], "returned a int"),
        (["tokenizer.kind={mine}:shards"], "failed: TypeError"),
    ],
)
def test_what_cannot_work_is_refused_with_its_setting(mine: Path, overrides: list[str], what: str) -> None:
    source = {"format": f"{mine}:paragraphs", "paths": [str(mine.parent / "notes")]}
    with pytest.raises((ConfigError, DataError), match=what) as refused:
        prepare(configuration(mine, source, [text.replace("{mine}", str(mine)) for text in overrides]))
    assert refused.value.where
    assert refused.value.hint


def test_what_is_no_text_is_put_aside(mine: Path) -> None:
    source = {"format": f"{mine}:numbers", "paths": [str(mine.parent / "notes")]}
    with pytest.raises(DataError, match="not a text"):
        prepare(configuration(mine, source))


def test_other_words_are_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"mds, bin or package.module:function; did you mean jsonl"):
        load_config("quickstart", ["data.sources=[{name: a, format: jsonll, paths: [a]}]"])
    with pytest.raises(ConfigError, match=r"tiktoken, none or package.module:function"):
        load_config("quickstart", ["tokenizer.kind=sentencepiece"])
    with pytest.raises(ConfigError, match=r"text_field"):
        load_config("quickstart", ["data.sources=[{name: a, format: 'm:f', paths: [a], text_field: body}]"])
