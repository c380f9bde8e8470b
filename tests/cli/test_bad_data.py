"""Data that cannot be trained on, through the command line: message, exit code, nothing left, and right after a repair.

Models that cannot be trained are in ``tests/huggingface/test_bad_models.py``, another base of an adapter in
``tests/training/test_adapter_runs.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny_runs
from dataset_folders import write_mds
from pictures import picture_configuration
from vorox.cli import main
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.data.tokenizers.loading import train


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)


def refused(words: list[str], directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must end with exit code 4; return what it said. No run and no finished cache is left."""
    capsys.readouterr()
    assert main(words) == 4
    said = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in said
    assert not list((directory / "runs").glob("*/metrics.jsonl"))
    assert not list((directory / "runs").glob("*/checkpoints/*"))
    return said


def test_a_folder_without_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nothing").mkdir()
    assert "The folder contains no files" in refused(["train", "--data", str(tmp_path / "nothing")], tmp_path, capsys)


def test_a_vocabulary_that_does_not_fit_is_refused_before_the_text_is_packed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_runs.configuration(tmp_path)
    train(TokenizerConfig(kind="byte"), ()).save(tmp_path / "tokenizer")
    file = f"tokenizer.path={tmp_path}/tokenizer/tokenizer.json"
    assert main(["train", str(tmp_path / "tiny.yaml"), "model.vocab_size=100", "tokenizer.kind=file", file]) == 2
    assert "vocab_size = 100, but the tokenizer has 257 tokens" in " ".join(capsys.readouterr().err.split())
    assert not list((tmp_path / "cache").glob("text-*"))


@pytest.mark.parametrize("name", ["../other/shard.00000.mds", "/etc/passwd"])
def test_a_shard_index_that_leaves_its_folder(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("shards", "other"):
        write_mds(tmp_path / folder, [{"text": tiny_runs.TEXT}] * 60, {"text": "str"})
    index_file = tmp_path / "shards" / "index.json"
    whole = index_file.read_text(encoding="utf-8")
    index = json.loads(whole)
    index["shards"][0]["raw_data"]["basename"] = name
    index_file.write_text(json.dumps(index), encoding="utf-8")
    tiny_runs.configuration(tmp_path)
    source = f"data.sources=[{{name: shards, format: mds, paths: ['{tmp_path}/shards']}}]"
    words = ["train", str(tmp_path / "tiny.yaml"), source]
    said = refused(words, tmp_path, capsys)
    assert str(index_file) in said
    assert name in said
    index_file.write_text(whole, encoding="utf-8")
    assert main(words) == 0


def test_an_image_that_cannot_be_decoded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = picture_configuration(tmp_path)
    folder = Path(config.data.sources[0].paths[0]).parent / "pictures"
    whole = {path: path.read_bytes() for path in folder.glob("1?-0.png")}
    for path, content in whole.items():  # more than one of them is beyond bad_record_fraction
        path.write_bytes(content[:60])
    words = ["train", str(tmp_path / "pictures.yaml")]
    said = refused(words, tmp_path, capsys)
    for part in ("pictures/1", "cannot be decoded", "captions.jsonl", "bad_record_fraction"):
        assert part in said
    for path, content in whole.items():
        path.write_bytes(content)
    assert main(words) == 0
