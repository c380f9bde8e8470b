"""``vorox data export``, ``download`` and ``stats`` as they are typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from servers.hub import hub_server
from vorox.cli import main
from vorox.data.text.shard_format import read_shard, write_shard

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def vorox(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"the text number {number} says {number * number}"}) for number in range(300)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")
    config: dict[str, Any] = {
        "data": {
            "sources": [{"name": "text", "format": "jsonl", "paths": ["text.jsonl"]}],
            "sequence_length_tokens": 32,
            "cache": {"directory": "cache"},
            "validation": {"held_out_fraction": 0.1},
        },
        "tokenizer": {"vocab_size": 280},
        "train": {"num_steps": 1, "num_tokens": None, "num_epochs": None},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_export_and_stats(vorox: Run, tmp_path: Path) -> None:
    code, _, err = vorox("data", "export", "tiny.yaml", "--to", "bin", "--output", "out")
    assert code == 4, err
    assert "data build" in err
    assert vorox("data", "build", "tiny.yaml")[0] == 0
    code, out, err = vorox("data", "export", "tiny.yaml", "--to", "bin", "--output", "out", "--shard-tokens", "900")
    assert code == 0, err
    assert "text_train_000000.bin" in out
    assert "text_val_000000.bin" in out
    assert "300 documents" in out
    tokens = np.concatenate([read_shard(file) for file in sorted((tmp_path / "out").glob("text_train_*.bin"))])
    code, out, err = vorox(
        "data", "export", "tiny.yaml", "--to", "npy", "--output", "numpy", "--split", "train", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["tokens"] == len(tokens)
    assert np.array_equal(np.load("numpy/text_train.npy"), tokens)
    assert vorox("data", "export", "tiny.yaml", "--to", "mds", "--output", "out")[0] == 2  # it is there
    assert vorox("data", "export", "tiny.yaml", "--to", "tfrecord", "--output", "x")[0] == 2

    code, out, err = vorox("data", "stats", "tiny.yaml")
    assert code == 0, err
    assert "BITS/TOKEN" in out
    assert "text train: '" in out
    (train, _) = json.loads(vorox("data", "stats", "tiny.yaml", "--json")[1])["caches"]
    assert 1 < train["tokens"]["entropy_bits"] < 9
    assert train["tokens"]["unknown_fraction"] == 0
    assert train["sample"]
    assert train["warnings"] == []


def test_download(vorox: Run, tmp_path: Path) -> None:
    write_shard(tmp_path / "shard.bin", np.arange(50, dtype=np.uint16))
    data = (tmp_path / "shard.bin").read_bytes()
    with hub_server() as hub:
        hub.commit("kjj0/fineweb10B-gpt2", {f"fineweb_{part}.bin": data for part in ("val_000000", "train_000001")})
        code, out, err = vorox("data", "download", "fineweb10B", "--output", "out", "--shards", "1")
        assert code == 0, err
        assert "2 files" in out
        assert np.array_equal(read_shard(tmp_path / "out" / "fineweb_train_000001.bin"), np.arange(50))
        code, out, _ = vorox("data", "download", "fineweb10B", "--output", "out", "--json")
        assert [file["fetched_bytes"] for file in json.loads(out)["files"]] == [0, 0]
        code, _, err = vorox("data", "download", "fineweb", "--output", "out")
        assert code == 2
        assert "fineweb10B" in err
        assert vorox("data", "download", "hf://datasets/no/such/*.bin", "--output", "out")[0] == 4
