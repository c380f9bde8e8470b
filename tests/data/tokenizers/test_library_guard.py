"""Regular expressions of others: a panic of the library and an expression that explodes are errors with a place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models

from vorox.cli import main
from vorox.core.errors import DataError
from vorox.data.tokenizers import library_guard
from vorox.data.tokenizers.tokenizer import Tokenizer


def with_pattern(pattern: str) -> str:
    vocabulary = {chr(code): code - 32 for code in range(32, 127)} | {"<e>": 95}
    value = json.loads(LibraryTokenizer(models.BPE(vocab=vocabulary, merges=[])).to_str())
    value["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False
    }  # fmt: skip
    return json.dumps(value)


def test_a_panic_is_an_error() -> None:
    tokenizer = Tokenizer(with_pattern("(x+x+)+y"), "<e>", where="here")
    assert len(tokenizer.encode("the step xxy")) == 12
    for encode in (tokenizer.encode_batch, tokenizer.encode_with_specials):
        with pytest.raises(DataError, match=r"cannot encode this text: .*retry-limit.*tokenizer\.json"):
            encode(["good", "x" * 40])


def test_an_expression_that_takes_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_guard, "SECONDS", 0.2)
    monkeypatch.setattr(library_guard, "CHARACTERS_PER_SECOND", 1e9)
    tokenizer = Tokenizer(with_pattern("(?:a|aa){1,18}$"), "<e>", where="here")
    with pytest.raises(DataError, match="needs more than 0 s for"):
        tokenizer.encode("a" * 50_000 + "!")


def test_a_build_names_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.json").write_text(with_pattern("(x+x+)+y"))
    lines = [json.dumps({"text": text}) for text in ("good", "x" * 40, "fine")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    settings = ["tokenizer.kind=file", f"tokenizer.path={tmp_path / 't.json'}", "tokenizer.end_of_text=<e>"]
    place = [f"data.cache.directory={tmp_path / 'cache'}", "data.validation.held_out_fraction=0"]
    assert main(["data", "build", "--data", str(tmp_path / "a.jsonl"), *settings, *place]) == 4
    error = capsys.readouterr().err
    assert "a.jsonl, record 2" in error
    assert "regular expression" in error
