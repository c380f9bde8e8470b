"""Opening caches: growth, reading before completion, rebuilds and repair of damaged units."""

from __future__ import annotations

import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vorox.core.errors import ConfigError, DataError, Preempted
from vorox.core.schema import RunConfig
from vorox.data.cache.build import BuildOptions, build
from vorox.data.cache.files.manifest import Manifest
from vorox.data.cache.reader import CacheReader
from vorox.data.corpus.cache_location import all_units, find_location
from vorox.data.corpus.cache_opener import CacheOpener, recipe_for
from vorox.data.corpus.corpus import Corpus, prepare
from vorox.data.text.sources import list_source
from vorox.data.tokenizers.loading import train


def lines(first: int, count: int) -> str:
    return "".join(json.dumps({"text": f"Record {n} of this file says {n * n} and then {n**3}."}) + "\n"
                   for n in range(first, first + count))  # fmt: skip


def write(folder: Path, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / f"{name}.jsonl").write_text(lines(1000 * sum(map(ord, name)), 40))


def configuration(root: Path, *, cache: dict[str, Any] | None = None, **data: Any) -> RunConfig:
    source = {"name": "text", "format": "jsonl", "paths": [str(root / "text")], **data.pop("source", {})}
    section = {
        "sources": [source],
        "sequence_length_tokens": 32,
        "cache": {"directory": str(root / "cache"), "unit_bytes": 1500, "chunk_rows": 8, **(cache or {})},
        "validation": {"split": "document", "held_out_fraction": 0.2},
        **data,
    }
    return RunConfig.model_validate({"data": section, "tokenizer": {"kind": "byte"}, "train": {"num_steps": 1}})


def documents(reader: CacheReader) -> set[tuple[str, int]]:
    spans = (span for row in range(reader.num_rows) for span in reader.documents_of(row))
    return {(Path(span.uri).name, span.byte_offset) for span in spans}


def rows(reader: CacheReader, num_units: int) -> list[list[int]]:
    """The rows of the first units."""
    last = int(reader.unit_row_starts[num_units])
    return reader.read_rows(np.arange(last)).tokens_NC.tolist()


def held(corpus: Corpus) -> tuple[CacheReader, CacheReader]:
    (source,) = corpus.sources
    assert source.validation is not None
    return source.train, source.validation


def remove_store(root: Path) -> None:
    """Leave every cache with its own chunks alone."""
    shutil.rmtree(root / "units")


# Growing


def test_new_files_come_behind_what_was_there(tmp_path: Path) -> None:
    text = tmp_path / "text"
    write(text, "b", "d")
    growing = configuration(tmp_path, cache={"grow": True})
    before = held(prepare(growing))
    for names in (("a", "e"), ("c",)):
        write(text, *names)
        for old, new in zip(before, held(prepare(growing)), strict=True):
            assert new.directory == old.directory
            num_units = old.manifest.planned_units
            assert num_units < new.manifest.planned_units
            assert new.units[:num_units] == old.units
            assert rows(new, num_units) == rows(old, num_units)
            assert new.content_digest(0, num_units) == old.digest
            assert documents(old) < documents(new)
            new.verify()
        before = held(prepare(growing, build=False))
    names = [Path(file.uri).stem for file in before[0].files]
    assert names == ["b", "d", "a", "e", "c"]
    fresh = held(prepare(configuration(tmp_path)))
    for extended, built in zip(before, fresh, strict=True):
        assert extended.directory != built.directory
        assert documents(extended) == documents(built)  # no record of a new file in the wrong half or lost


def test_without_growing_new_files_make_another_cache(tmp_path: Path) -> None:
    write(tmp_path / "text", "b")
    first = held(prepare(configuration(tmp_path)))
    write(tmp_path / "text", "a")
    second = held(prepare(configuration(tmp_path)))
    assert first[0].directory != second[0].directory
    assert first[0].manifest.planned_units == Manifest.open(first[0].directory).planned_units


@pytest.mark.parametrize("change", [lambda file: file.unlink(), lambda file: file.write_text(lines(7, 40))])
def test_a_file_that_is_gone_or_rewritten_begins_another_view_and_leaves_the_old_one(
    tmp_path: Path, change: Any
) -> None:
    write(tmp_path / "text", "a", "b")
    growing = configuration(tmp_path, cache={"grow": True})
    before = held(prepare(growing))
    digests, texts = [reader.digest for reader in before], [documents(reader) for reader in before]
    write(tmp_path / "text", "c")
    change(tmp_path / "text" / "a.jsonl")
    elsewhere = configuration(tmp_path, cache={"directory": str(tmp_path / "else")})
    after, fresh = held(prepare(growing)), held(prepare(elsewhere))
    for old, digest, text, new, expected in zip(before, digests, texts, after, fresh, strict=True):
        assert new.directory != old.directory
        assert documents(new) == documents(expected)
        kept = CacheReader.open(old.directory)
        kept.verify()
        assert (kept.digest, documents(kept)) == (digest, text)


def test_a_folder_that_moved_grows_on(tmp_path: Path) -> None:
    write(tmp_path / "text", "a", "b")
    growing = configuration(tmp_path, cache={"grow": True})
    before = held(prepare(growing))[0]
    (tmp_path / "text").rename(tmp_path / "moved")
    write(tmp_path / "moved", "c")
    moved = configuration(tmp_path, cache={"grow": True}, source={"paths": [str(tmp_path / "moved")]})
    after = held(prepare(moved))[0]
    assert {Path(file.uri).parent.name for file in after.files} == {"moved"}
    assert len(after.files) == 3
    num_units = before.manifest.planned_units
    assert after.content_digest(0, num_units) == before.digest


def test_another_source_of_the_same_name_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "text", "a")
    write(tmp_path / "others", "b")
    first = prepare(configuration(tmp_path, cache={"grow": True}))
    others = configuration(tmp_path, cache={"grow": True}, source={"paths": [str(tmp_path / "others")]})
    assert held(prepare(others))[0].directory != held(first)[0].directory


def test_a_limit_in_bytes_and_growing_exclude_each_other(tmp_path: Path) -> None:
    write(tmp_path / "text", "a")
    config = configuration(tmp_path, cache={"grow": True}, source={"max_bytes": 5000})
    with pytest.raises(ConfigError, match="new files would displace older ones") as caught:
        prepare(config)
    assert caught.value.where == "data.sources.0.max_bytes"


def test_growing_that_died_before_it_planned_leaves_nothing_out(tmp_path: Path) -> None:
    """It listed one new file; by the next time there are two, and the other one comes first."""
    write(tmp_path / "text", "b")
    growing = configuration(tmp_path, cache={"grow": True})
    old = held(prepare(growing))
    write(tmp_path / "text", "d")
    logs = {reader.directory: (reader.directory / "manifest" / "log.jsonl").read_bytes() for reader in old}
    prepare(growing)
    for directory, log in logs.items():
        (directory / "manifest" / "log.jsonl").write_bytes(log)
    write(tmp_path / "text", "c")
    new = held(prepare(growing))
    assert [Path(file.uri).stem for file in new[0].files] == ["b", "c", "d"]
    assert documents(new[0]) | documents(new[1]) == {
        (name, offset) for name in ("b.jsonl", "c.jsonl", "d.jsonl") for offset in offsets(tmp_path / "text" / name)
    }
    for reader in new:
        reader.verify()


def offsets(path: Path) -> list[int]:
    ends = np.cumsum([len(line) for line in path.read_bytes().splitlines(keepends=True)])
    return [0, *ends[:-1].tolist()]


# Reading before it is complete


@pytest.fixture
def growing(tmp_path: Path) -> RunConfig:
    write(tmp_path / "text", "a", "b", "c")
    return configuration(tmp_path, growth={"mode": "strict", "first_segment_units": 2})


def test_the_first_segment_is_there_and_the_rest_follows(tmp_path: Path, growing: RunConfig) -> None:
    expected = held(prepare(growing, options=BuildOptions(wait_for="complete")))[0]
    elsewhere = growing.data.cache.model_copy(update={"directory": str(tmp_path / "other")})
    config = growing.model_copy(update={"data": growing.data.model_copy(update={"cache": elsewhere})})
    corpus = prepare(config)
    try:
        train, validation = held(corpus)
        assert not len(train.missing_units(0, 2))
        assert len(validation.missing_units(0, validation.manifest.planned_units)) == 0
        deadline = time.monotonic() + 60
        reader = train
        while len(reader.missing_units(0, reader.manifest.planned_units)):
            assert time.monotonic() < deadline
            reader = reader.refreshed()
            time.sleep(0.01)
        assert reader.digest == expected.digest
        assert reader.generation > train.generation
    finally:
        corpus.close()


def test_somebody_else_may_build(tmp_path: Path, growing: RunConfig) -> None:
    waits = growing.data.growth.model_copy(update={"build": False})
    config = growing.model_copy(update={"data": growing.data.model_copy(update={"growth": waits})})
    phases: list[str] = []
    found: list[Corpus] = []
    waiting = threading.Event()

    def watch(phase: str, *_: object) -> None:
        phases.append(phase)
        if phase == "wait text train":
            waiting.set()

    thread = threading.Thread(target=lambda: found.append(prepare(config, on_progress=watch)))
    thread.start()
    assert waiting.wait(30)
    assert "build text train" not in phases
    complete = prepare(growing, options=BuildOptions(wait_for="complete"))
    thread.join(30)
    reader = held(found[0])[0].refreshed()
    assert reader.digest == held(complete)[0].digest
    assert found[0].backgrounds == ()


def test_a_growing_cache_that_may_not_be_built_must_be_there(growing: RunConfig) -> None:
    with pytest.raises(DataError, match="is not built"):
        prepare(growing, build=False)


def test_who_may_not_build_reads_what_is_there_and_waits_for_nothing(tmp_path: Path) -> None:
    write(tmp_path / "text", "a", "b", "c")
    config = configuration(
        tmp_path, growth={"mode": "strict", "first_segment_units": 4}, pipeline={"staged": False},
        validation={"split": "document", "held_out_fraction": 0},
    )  # fmt: skip
    left = iter([False] * 4)
    with pytest.raises(Preempted):  # after its first units
        prepare(config, options=BuildOptions(wait_for="complete", stop=lambda: next(left, True)))
    reader = prepare(config, build=False).train[0]
    assert 0 < len(reader.manifest.units) < 4


# Stopping, rebuilding, repair


def test_a_build_that_is_asked_to_stop_says_what_is_saved(tmp_path: Path) -> None:
    write(tmp_path / "text", "a", "b", "c")
    config = configuration(tmp_path, pipeline={"staged": False})
    seen: list[float] = []

    def watch(phase: str, done: int, total: int, rates: Any) -> None:
        if phase.startswith("build"):
            seen.append(rates.get("chunks", 0))

    options = BuildOptions(stop=lambda: len(seen) > 6)
    with pytest.raises(Preempted) as caught:
        prepare(config, on_progress=watch, options=options)
    assert caught.value.exit_code == 75
    assert "units of this cache" in caught.value.saved
    prepare(config)


@pytest.mark.parametrize("damage", ["nothing", "log", "recipe", "chunk"])
def test_building_anew_needs_nothing_of_what_was_there(tmp_path: Path, damage: str) -> None:
    write(tmp_path / "text", "a", "b")
    config = configuration(tmp_path)
    before = held(prepare(config))
    directory = before[0].directory
    if damage == "log":
        log = directory / "manifest" / "log.jsonl"
        log.write_bytes(b"x" + log.read_bytes()[1:])
    elif damage == "recipe":
        (directory / "RECIPE.json").write_text("{}")
    elif damage == "chunk":
        next(directory.glob("chunks/*/*.psc")).unlink()
    corpus = prepare(config, options=BuildOptions(force_rebuild=True))
    for old, new, report in zip(before, held(corpus), corpus.reports.values(), strict=True):
        assert report.units_built == report.units
        assert new.digest == old.digest
        assert new.directory == old.directory
        new.verify()


def test_what_is_damaged_while_it_is_read_is_mended_aloud(tmp_path: Path) -> None:
    write(tmp_path / "text", "a", "b")
    config = configuration(tmp_path)
    expected = rows(held(prepare(config))[0], 5)
    told: list[str] = []
    reader = held(prepare(config, options=BuildOptions(on_repair=told.append)))[0]
    path = sorted(reader.directory.glob("chunks/02/*.psc"))[0]
    path.write_bytes(path.read_bytes()[:-3])
    assert rows(reader, 5) == expected
    assert len(told) == 1
    assert "rebuilding unit 2" in told[0]
    strict = held(prepare(config, build=False))[0]
    path.unlink()
    with pytest.raises(DataError, match="Cannot open a chunk"):
        rows(strict, 5)


def test_what_cannot_be_mended_is_said_with_the_damage(tmp_path: Path) -> None:
    write(tmp_path / "text", "a", "b")
    reader = held(prepare(configuration(tmp_path)))[0]
    path = sorted(reader.directory.glob("chunks/02/*.psc"))[0]
    path.unlink()
    remove_store(tmp_path / "cache")
    for file in (tmp_path / "text").iterdir():
        file.unlink()
    with pytest.raises(DataError, match="Cannot open a chunk") as caught:
        rows(reader, 5)
    assert caught.value.where == str(path)
    assert "rebuilding the unit failed" in caught.value.hint


@pytest.mark.parametrize("knows_files", [True, False])
def test_damage_in_units_that_another_process_planned_later(tmp_path: Path, knows_files: bool) -> None:
    write(tmp_path / "text", "a")
    growth = {"mode": "strict", "first_segment_units": 1, "build": False}
    builds = configuration(tmp_path, cache={"grow": True})
    follows = configuration(tmp_path, cache={"grow": True}, growth=growth)
    prepare(builds)
    if knows_files:
        write(tmp_path / "text", "b")
    reader = held(prepare(follows))[0]
    if not knows_files:
        write(tmp_path / "text", "b")
    expected = held(prepare(builds))[0]
    num_units = expected.manifest.planned_units
    assert num_units > reader.manifest.planned_units
    read = rows(expected, num_units)
    seen = reader.refreshed()
    path = sorted(reader.directory.glob("chunks/*/*.psc"))[-1]
    path.unlink()
    if knows_files:
        assert rows(seen, num_units) == read
        return
    with pytest.raises(DataError, match="Cannot open a chunk") as caught:
        rows(seen, num_units)
    assert caught.value.where == str(path)
    assert "vorox data build --repair" in caught.value.hint
    assert "added after this process had opened the cache" in caught.value.hint


def test_a_cache_on_a_disk_that_is_read_only_is_opened(tmp_path: Path) -> None:
    write(tmp_path / "text", "a")
    config = configuration(tmp_path)
    digest = held(prepare(config))[0].digest
    before = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "cache").rglob("*.psc"))}
    assert held(prepare(config, build=False))[0].digest == digest
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_units_of_new_files_are_those_of_the_files_alone(tmp_path: Path) -> None:
    """However the directory came to be, the same files behind the same beginning give the same units."""
    write(tmp_path / "text", "b")
    config = configuration(tmp_path, cache={"grow": True})
    prepare(config)
    write(tmp_path / "text", "c", "a")
    source = replace(list_source(config.data.sources[0]), holdout=config.data.validation)
    tokenizer = train(config.tokenizer, [])
    opener = CacheOpener(config.data, tokenizer, tmp_path / "cache", lambda *_: None, BuildOptions(), None)
    recipe = recipe_for(config.data, source, "train", tokenizer)
    place = find_location(tmp_path / "cache", source, "train", recipe, config.data, grow=True)
    assert (place.num_files, place.is_planned) == (1, False)
    units = all_units(place, "train", config.data)
    assert [unit.unit_id for unit in units] == list(range(len(units)))
    assert [span.file_index for unit in units for span in unit.spans] == sorted(
        span.file_index for unit in units for span in unit.spans
    )
    build(place.directory, opener.unit_builder(place.source, recipe), units)
    assert find_location(tmp_path / "cache", source, "train", recipe, config.data, grow=True).is_planned
    assert held(prepare(config))[0].directory == place.directory
