"""A small streamed corpus: a few hundred rows of words, in a ring that holds a fraction of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from vorox.data.dataset.iterable_dataset import RemoteIterableDataset


def write_source(directory: Path, documents: int = 160, seed: int = 0) -> Path:
    chooser = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(2):
        lines = [
            json.dumps({"text": " ".join(chooser.choices(["aa", "bcd", "efgh", "ij", "k"], k=chooser.randint(1, 40)))})
            for _ in range(documents // 2)
        ]
        (directory / f"{number}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return directory


def dataset(tmp_path: Path, **changes: Any) -> RemoteIterableDataset:
    text = tmp_path / "text"
    if not text.exists():
        write_source(text)
    arguments: dict[str, Any] = {
        "data": {"words": {"format": "jsonl", "paths": [str(text)]}},
        "tokenizer": "byte",
        "sequence_length_tokens": 16,
        "cache_directory": tmp_path / "cache",
        "retention_bytes": 20_000,
        "unit_bytes": 1500,
        "shuffle_buffer_rows": 100,
        "epochs": 1,
    }
    return RemoteIterableDataset(**{**arguments, **changes})
