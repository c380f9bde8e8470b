"""The xz baseline compresses exactly the validation text."""

from __future__ import annotations

import lzma
from dataclasses import replace
from pathlib import Path

import pytest

from vorox.core.schema.data import SourceConfig, ValidationConfig
from vorox.data.provenance import xz_baseline as baseline
from vorox.data.provenance.xz_baseline import compress, xz_baseline
from vorox.data.storage import local_path
from vorox.data.text.holdout import file_split
from vorox.data.text.sources import Source, list_source

RULE = ValidationConfig(split="file", held_out_fraction=0.3)


def corpus(folder: Path, *, text: str = "", rule: ValidationConfig = RULE) -> Source:
    for n in range(20):
        (folder / f"{n}.txt").write_text(f"file {n}: {text or 'the quick brown fox'}\n" * (n + 1))
    return replace(list_source(SourceConfig(name="s", format="txt", paths=(str(folder),))), holdout=rule)


@pytest.mark.parametrize("size_bytes", [0, 1, 5_000, 70_000, 300_000])
def test_is_what_xz_9e_makes_of_it(size_bytes: int) -> None:
    text = (local_path("stdlib:pydoc_data/topics.py").read_bytes())[:size_bytes]
    expected = len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
    assert abs(compress(text) - expected) <= 8  # the header names another window


def test_covers_the_held_out_files_in_order(tmp_path: Path) -> None:
    source = corpus(tmp_path)
    found = xz_baseline([source], unit_bytes=1 << 20)
    held_out = [place for place in source.relative_paths if file_split(RULE, place) == "validation"]
    text = b"".join((tmp_path / place).read_bytes() for place in held_out)
    assert found is not None
    assert found.text_bytes == len(text) > 0
    assert found.complete
    assert found.bits_per_byte == 8 * compress(text) / len(text)


def test_is_remembered_and_damage_is_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, results = corpus(tmp_path), tmp_path / "results"
    first = xz_baseline([source], unit_bytes=1 << 20, results=results)
    with monkeypatch.context() as patch:
        patch.setattr(baseline, "compress", lambda text: pytest.fail("compressed again"))
        assert xz_baseline([source], unit_bytes=1 << 20, results=results) == first
    (kept,) = results.iterdir()
    kept.write_bytes(b"{")
    assert xz_baseline([source], unit_bytes=1 << 20, results=results) == first


def test_other_text_has_its_own_result(tmp_path: Path) -> None:
    results = tmp_path / "results"
    first = xz_baseline([corpus(tmp_path)], unit_bytes=1 << 20, results=results)
    second = xz_baseline([corpus(tmp_path, text="a slow red dog")], unit_bytes=1 << 20, results=results)
    assert first != second
    assert len(list(results.iterdir())) == 2


def test_says_when_it_saw_only_the_beginning(tmp_path: Path) -> None:
    found = xz_baseline([corpus(tmp_path)], unit_bytes=1 << 20, max_bytes=100)
    assert found is not None
    assert (found.text_bytes, found.complete) == (100, False)


def test_nothing_held_out_has_no_figure(tmp_path: Path) -> None:
    nothing = ValidationConfig(split="file", held_out_fraction=0)
    assert xz_baseline([corpus(tmp_path, rule=nothing)], unit_bytes=1 << 20) is None
