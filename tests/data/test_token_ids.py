"""Token shards without a tokenizer, and shards without a header: nanoGPT's train.bin and val.bin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_runs
from vorox.cli import main
from vorox.core.config import load_config
from vorox.core.config.config_for_text import expected_ids
from vorox.core.errors import ConfigError, DataError
from vorox.core.schema import RunConfig
from vorox.data.corpus.corpus import Corpus, prepare
from vorox.data.provenance.inspection import peek, stats, verify, xz_bits_per_byte
from vorox.data.provenance.original_text import TextFinder
from vorox.data.provenance.queries import RunDataIndex, where
from vorox.data.text.shard_format import write_shard
from vorox.data.tokenizers.loading import load

VOCAB_SIZE, END = 300, 299


def ids(seed: int, count: int = 1200) -> np.ndarray[Any, np.dtype[np.int64]]:
    found = np.random.default_rng(seed).integers(0, VOCAB_SIZE - 1, count)
    found[49::50] = END
    return found


def nanogpt_folder(root: Path, dtype: str = "<u2") -> Path:
    """As nanoGPT's prepare.py writes it: ``np.array(ids, dtype=...).tofile(...)``."""
    root.mkdir()
    for seed, name in enumerate(("train.bin", "val.bin")):
        ids(seed).astype(dtype).tofile(root / name)
    return root


def configuration(root: Path, folder: Path, *overrides: str, **source: Any) -> RunConfig:
    tiny_runs.configuration(root)
    sources = json.dumps([{"name": "web", "format": "bin", "paths": [str(folder)], **source}])
    none = ["tokenizer.kind=none", f"tokenizer.vocab_size={VOCAB_SIZE}", f"tokenizer.end_of_text_id={END}"]
    return load_config(root / "tiny.yaml", [f"data.sources={sources}", *none, *overrides])


def documents_of(corpus: Corpus, split: str) -> list[list[int]]:
    (cache,) = (cache for cache in corpus.caches if cache.split == split)
    found: dict[int, dict[int, int]] = {}
    for row in range(cache.reader.num_rows):
        tokens, at = cache.reader.read_rows(np.array([row])).tokens_NC[0], 0
        for span in cache.reader.documents_of(row):
            part = tokens[at : at + span.length].tolist()
            found.setdefault(span.byte_offset, {}).update(enumerate(part, span.document_token_offset))
            at += span.length
    return [[tokens[n] for n in sorted(tokens)] for _, tokens in sorted(found.items())]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_every_id_of_a_headerless_file_arrives(tmp_path: Path, dtype: str) -> None:
    folder = nanogpt_folder(tmp_path / "web", f"<u{int(dtype[4:]) // 8}")
    corpus = prepare(configuration(tmp_path, folder, ids_dtype=dtype))
    for seed, split in enumerate(("train", "validation")):
        assert documents_of(corpus, split) == ids(seed).reshape(-1, 50).tolist()
    verify(corpus)
    assert xz_bits_per_byte(corpus) is None
    assert {entry.tokens.bytes_per_token for entry in stats(corpus)} == {0.0}
    (segment, *_) = peek(corpus, 1)[0].segments
    number = segment.ordinal
    expected = [*ids(0).reshape(-1, 50)[number]][segment.document_token_offset :][: segment.num_tokens]
    assert segment.text == " ".join(map(str, expected))


def test_a_file_without_a_header_is_answered_with_the_setting(tmp_path: Path) -> None:
    folder = nanogpt_folder(tmp_path / "web")
    with pytest.raises(DataError) as caught:
        prepare(configuration(tmp_path, folder))
    assert "ids_dtype=uint16" in caught.value.hint


def test_a_header_is_never_read_as_tokens(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    write_shard(tmp_path / "web" / "a.bin", ids(0).astype(np.uint16))
    with pytest.raises(DataError, match="has a header"):
        prepare(configuration(tmp_path, tmp_path / "web", ids_dtype="uint16"))
    assert documents_of(prepare(configuration(tmp_path, tmp_path / "web")), "train")


def test_a_file_that_is_no_whole_number_of_ids_is_refused(tmp_path: Path) -> None:
    folder = nanogpt_folder(tmp_path / "web")
    with (folder / "train.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match="whole number"):
        prepare(configuration(tmp_path, folder, ids_dtype="uint16"))


def test_a_run_goes_back_to_its_ids_and_reports_no_bits_per_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    folder = nanogpt_folder(tmp_path / "web")
    outcome = tiny_runs.run(configuration(tmp_path, folder, "eval.every_steps=6", ids_dtype="uint16"))
    evaluations = (outcome.run_directory / "evaluations.jsonl").read_text().splitlines()
    assert all('"bits_per_byte":null' in line.replace(" ", "") for line in evaluations)
    with RunDataIndex.open(outcome.run_directory) as run_data:
        row = where(run_data, 1, 0)[0]
        for document in row.documents:
            expected = ids(0).reshape(-1, 50)[document.ordinal][document.first_token :][: document.num_tokens].tolist()
            found = TextFinder(run_data).find(row, document)
            assert found.origin == "source"
            assert found.text.split() == [str(token) for token in expected if token != END]
    kept = load(outcome.run_directory / "tokenizer")
    assert kept.encode("5 7").tolist() == [5, 7]
    with pytest.raises(ConfigError):
        kept.encode("hello")


def test_the_first_screen_says_whose_ids_are_expected(tmp_path: Path) -> None:
    folder = nanogpt_folder(tmp_path / "web")
    gpt2 = configuration(
        tmp_path, folder, "tokenizer.vocab_size=50257", "tokenizer.end_of_text_id=50256", ids_dtype="uint16"
    )
    assert "50,257 as in GPT-2, end of text 50,256" in expected_ids(gpt2.tokenizer)
    other = expected_ids(configuration(tmp_path, folder, ids_dtype="uint16").tokenizer)
    assert other.startswith(f"Token ids: {VOCAB_SIZE:,}, end of text {END:,}.")
    assert "tokenizer.end_of_text_id" in other
    assert len(expected_ids(gpt2.tokenizer)) < 120
    assert expected_ids(tiny_runs.configuration(tmp_path).tokenizer) == ""


def test_ids_go_with_token_shards_only(tmp_path: Path) -> None:
    tiny_runs.configuration(tmp_path)
    with pytest.raises(ConfigError, match=r"tokenizer\.kind=none reads token shards only"):
        load_config(tmp_path / "tiny.yaml", ["tokenizer.kind=none"])
    with pytest.raises(ConfigError, match="257"):
        load_config(tmp_path / "tiny.yaml", ["tokenizer.kind=bpe", "tokenizer.vocab_size=200"])


def test_generated_ids_stand_apart_from_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    folder = nanogpt_folder(tmp_path / "web")
    directory = tiny_runs.run(configuration(tmp_path, folder, ids_dtype="uint16")).run_directory
    capsys.readouterr()
    assert main(["generate", str(directory), "-p", "3", "--tokens", "2"]) == 0
    words = capsys.readouterr().out.split()
    assert words[0] == "3"
    assert all(word.isdigit() for word in words)


@pytest.mark.torch
def test_a_run_without_a_tokenizer_continues_ids_and_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    configuration(tmp_path, nanogpt_folder(tmp_path / "ids"))
    source = "{name: web, format: bin, paths: [ids], ids_dtype: uint16}"
    none = ["tokenizer.kind=none", f"tokenizer.vocab_size={VOCAB_SIZE}", f"tokenizer.end_of_text_id={END}"]
    words = [f"data.sources=[{source}]", *none, "train.num_steps=2", "eval.every_steps=2"]
    assert main(["train", "tiny.yaml", *words]) == 0
    assert f"Token ids: {VOCAB_SIZE:,}, end of text {END:,}" in capsys.readouterr().out
    assert main(["generate", "latest", "-p", "1 2 3", "--tokens", "4"]) == 0
    shown = capsys.readouterr().out.split()
    assert all(0 <= int(word) < VOCAB_SIZE for word in shown[-4:])
    assert main(["generate", "latest", "-p", "some words", "--tokens", "4"]) == 2
    assert "tokenizer.kind=none" in capsys.readouterr().err
    assert main(["export", "latest", "--output", "out"]) == 0
    assert "AutoTokenizer finds none" in capsys.readouterr().out
    exported = {path.name for path in Path("out").iterdir()}
    assert {"config.json", "model.safetensors"} <= exported
    assert not any(name.startswith("tokenizer") for name in exported), "the run has no tokenizer"
    described = json.loads(Path("out/config.json").read_text())
    assert (described["vocab_size"], described["eos_token_id"]) == (VOCAB_SIZE, END)
