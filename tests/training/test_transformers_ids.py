"""Warnings about tokenizers whose tokenizer.json transformers does not use; transformers is the oracle."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import base_models
from vorox.cli import main
from vorox.core.schema import RunConfig
from vorox.training.origin.configuration import load_config
from vorox.training.origin.transformers_ids import TEXTS, warn_of_other_ids

pytestmark = [pytest.mark.hf, pytest.mark.torch]


def write_base(directory: Path, shape: str, tokenizer_class: str, model_type: str) -> Path:
    base_models.write(directory, shape)
    for name, key, value in (
        ("tokenizer_config.json", "tokenizer_class", tokenizer_class), ("config.json", "model_type", model_type),
    ):  # fmt: skip
        values = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**values, key: value}))
    return directory


def config_of(place: Path, *overrides: str) -> RunConfig:
    return load_config("quickstart", [f"train.from_weights={place}", *overrides])


def loaded(place: Path) -> tuple[Any, Any]:
    """A tokenizer as transformers chooses its class, and as its file says."""
    import transformers

    return (
        transformers.AutoTokenizer.from_pretrained(place, local_files_only=True),
        transformers.PreTrainedTokenizerFast.from_pretrained(place, local_files_only=True),
    )


@pytest.mark.parametrize(
    ("shape", "tokenizer_class", "model_type"),
    [
        ("gemma", "LlamaTokenizer", "llama"), ("mistral", "GPT2Tokenizer", "llama"),
        ("mistral", "PreTrainedTokenizerFast", "qwen2"), ("llama3", "PreTrainedTokenizerFast", "llama"),
        ("mistral", "LlamaTokenizerFast", "llama"), ("qwen", "Qwen2Tokenizer", "qwen2"),
    ],
)  # fmt: skip
def test_the_ids_that_transformers_changes_are_said_at_the_start(
    shape: str, tokenizer_class: str, model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = write_base(Path("base"), shape, tokenizer_class, model_type)
    chosen, of_file = loaded(place)
    expected = sum(
        chosen(text, add_special_tokens=False)["input_ids"] != of_file(text, add_special_tokens=False)["input_ids"]
        for text in TEXTS
    )
    warning = warn_of_other_ids(config_of(place))
    if not expected:
        assert warning is None
        return
    assert warning is not None
    assert f"as {type(chosen).__name__}, which gives {expected} of {len(TEXTS)} sample texts other ids" in warning
    assert ("PreTrainedTokenizerFast.from_pretrained" in warning) == (model_type == "qwen2")
    typed = re.search(r'python -c "(.*)" and add (tokenizer\.path=\w+)', warning)
    assert typed is not None
    exec(typed[1])  # the command that the warning says to type
    assert warn_of_other_ids(config_of(place, typed[2])) is None
    ours = loaded(Path("tok"))[1]
    assert [ours(text)["input_ids"] for text in TEXTS] == [chosen(text)["input_ids"] for text in TEXTS]


@pytest.mark.slow
def test_the_check_of_an_export_says_how_to_load_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    place = tmp_path / "base"
    of_file = base_models.write(place, "mistral")
    config = transformers.Qwen2Config(
        vocab_size=len(of_file), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, bos_token_id=None, eos_token_id=of_file.eos_token_id,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(place)
    words = ["export", str(place), "-o", str(tmp_path / "out")]
    assert main([*words, "--check"]) == 5
    said = capsys.readouterr().err
    assert "returns other ids" in said
    assert "export without --check" in said
    assert "transformers.PreTrainedTokenizerFast.from_pretrained(DIRECTORY)" in said
    assert main(words) == 0
    exported = loaded(tmp_path / "out")[1]
    assert [exported(text)["input_ids"] for text in TEXTS] == [of_file(text)["input_ids"] for text in TEXTS]
