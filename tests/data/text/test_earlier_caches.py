"""Caches that earlier versions built of compressed and plain files open as they are, and a new build gives the same.

``earlier_caches.tar.xz`` holds the files of ``text/``, the caches and the trained tokenizer that an earlier version
(November 2026) made of them, and the digests that it reported.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from vorox.core.config import load_config
from vorox.data.corpus import prepare

ARCHIVE = Path(__file__).with_name("earlier_caches.tar.xz")


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def digests(root: Path, cache: Path) -> dict[str, str]:
    """Prepare all sources; the digest of every cache by its name."""
    sources = [
        {
            "name": path.name.replace(".", "-"), "format": path.name.split(".")[1], "paths": [str(path)], "weight": 1,
            **({"damaged_files": "keep_readable"} if path.name == "f.jsonl.gz" else {}),
        }
        for path in sorted((root / "text").iterdir())
    ]  # fmt: skip
    settings = {
        "data": {
            "sources": sources, "sequence_length_tokens": 64, "validation": {"held_out_fraction": 0.1},
            "cache": {"directory": str(cache), "unit_bytes": 3000, "chunk_rows": 64},
        },
        "tokenizer": {"kind": "bpe", "vocab_size": 300}, "train": {"num_steps": 1},
    }  # fmt: skip
    file = root / "config.yaml"
    file.write_text(json.dumps(settings), encoding="utf-8")
    with contextlib.closing(prepare(load_config(file))) as corpus:
        return {reader.directory.name: reader.digest for reader in [*corpus.train, *corpus.validation]}


def state_of(cache: Path) -> dict[str, int]:
    return {str(path.relative_to(cache)): path.stat().st_mtime_ns for path in sorted(cache.glob("*-*/chunks/**/*.psc"))}


def test_they_open_without_being_built_and_are_mended_to_the_same_rows(earlier: Path) -> None:
    expected = json.loads((earlier / "digests.json").read_text())
    before = state_of(earlier / "cache")
    assert len(before) >= len(expected) == 12
    assert digests(earlier, earlier / "cache") == expected
    assert state_of(earlier / "cache") == before, "nothing was built"
    unfinished = next(path for path in sorted(earlier.glob("cache/b-*-train-*")))
    for name in ("chunks", "manifest"):  # what is left when a build is interrupted before its first unit
        shutil.rmtree(unfinished / name)
    assert digests(earlier, earlier / "cache") == expected


def test_a_new_build_cuts_the_same_units_and_gives_the_same_rows(earlier: Path, tmp_path: Path) -> None:
    assert digests(earlier, tmp_path / "new") == json.loads((earlier / "digests.json").read_text())
    lists = sorted(path.relative_to(tmp_path / "new") for path in tmp_path.glob("new/*/UNITS.jsonl"))
    assert len(lists) == 12
    for path in lists:
        assert (tmp_path / "new" / path).read_bytes() == (earlier / "cache" / path).read_bytes()
