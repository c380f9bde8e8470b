"""Texts that spell special tokens of the tokenizer are named before training; transformers is the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import base_models
from vorox.cli import main
from vorox.core.config import load_config
from vorox.core.schema import RunConfig
from vorox.data.corpus.corpus import Corpus, prepare

BASE = "qwen"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The tokenizer of a base, and transformers' view of it."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("base")
    theirs = base_models.tokenizer(BASE)
    theirs.save_pretrained(folder)
    return folder, theirs


def configuration(tmp_path: Path, base: Path, file: str, **source: Any) -> RunConfig:
    entry = {"name": "text", "format": file.rpartition(".")[2], "paths": [str(tmp_path / file)], **source}
    words = [
        f"data.sources=[{json.dumps(entry)}]", "tokenizer.kind=huggingface", f"tokenizer.path={base}",
        f"data.cache.directory={tmp_path / 'cache'}", "data.sequence_length_tokens=64", "train.num_steps=1",
        "data.validation.held_out_fraction=0",
    ]  # fmt: skip
    return load_config("quickstart", words)


def said(corpus: Corpus) -> list[str]:
    return [note.text for note in corpus.notes if note.kind == "spelled_tokens"]


CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.hf
def test_rendered_chats_in_a_text_column_are_said(tmp_path: Path, base: tuple[Path, Any]) -> None:
    directory, theirs = base
    rendered = theirs.apply_chat_template(CHAT, tokenize=False)
    texts = [rendered] * 40 + ["plain"] * 60
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (note,) = said(prepare(configuration(tmp_path, directory, "a.jsonl")))
    special = {token for token, one in theirs.get_added_vocab().items() if token in rendered and one}
    assert special == {"<|im_start|>", "<|im_end|>"}
    assert note.startswith("40 of the first 100 documents of text spell special tokens of the tokenizer: ")
    assert all(token in note for token in special)
    assert "data.sources.0.chat_fields=[messages]" in note
    ours = prepare(configuration(tmp_path, directory, "a.jsonl")).tokenizer.encode(rendered)
    assert len(theirs(rendered)["input_ids"]) < len(ours), "transformers has tokens where this is text"

    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    assert not said(prepare(configuration(tmp_path, directory, "b.jsonl", chat_fields=["messages"])))
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "<|im_star|> <| im_end |> plain"}) + "\n")
    assert not said(prepare(configuration(tmp_path, directory, "c.jsonl")))


@pytest.mark.hf
def test_stories_between_end_of_text_are_said(tmp_path: Path, base: tuple[Path, Any]) -> None:
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(["once there was a row"] * 9))
    (note,) = said(prepare(configuration(tmp_path, base[0], "a.txt")))
    assert note.startswith("the first document of text spells special tokens of the tokenizer: <|endoftext|>; ")
    assert "one document per record" in note
    assert "chat_fields" not in note


@pytest.mark.hf
def test_a_second_start_says_it_without_reading(
    tmp_path: Path, base: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "<|im_start|>"}) + "\n")
    first = said(prepare(configuration(tmp_path, base[0], "a.jsonl")))
    monkeypatch.setattr("vorox.data.corpus.source_listing.spelled_tokens", lambda *_: pytest.fail("read again"))
    assert said(prepare(configuration(tmp_path, base[0], "a.jsonl"))) == first != []


@pytest.mark.hf
@pytest.mark.parametrize("command", [["train", "--dry-run"], ["data", "build"], ["data", "stats"]])
def test_commands_show_it(
    command: list[str], tmp_path: Path, base: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": "<|im_start|>user"}) + "\n") * 40)
    words = ["tokenizer.kind=huggingface", f"tokenizer.path={base[0]}", "train.num_steps=1"]
    assert main([*command, "--data", "a.jsonl", *words]) == 0
    shown = capsys.readouterr()
    text = " ".join((shown.out + shown.err).split())
    assert "40 of the first 40 documents of a spell special tokens of the tokenizer: <|im_start|>" in text
