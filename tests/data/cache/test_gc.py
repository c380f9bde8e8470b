"""Garbage collection removes unreferenced files and unused caches, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from cache_corpus import build_corpus, recipe_for, small_corpus, work_of
from vorox.core.errors import ConfigError, DataError
from vorox.core.files.atomic import temporary_name
from vorox.core.files.file_holder import this_process
from vorox.data.cache.build import BuildOptions, build
from vorox.data.cache.files.leases import Leases
from vorox.data.cache.files.manifest import Manifest, chunk_path
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.upkeep.gc import find_caches, find_garbage, remove_cache, remove_garbage, remove_unused
from vorox.data.cache.upkeep.replacement import replacing
from vorox.data.cache.upkeep.retention import PINS_NAME, pin, read_pins, unpin
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_events import PlanSource, PlanStart

CORPUS = small_corpus()
TRAIN, VALIDATION, OTHER = "text-train-0123456789ab-00112233", "text-validation-a-00112233", "text-train-b-44556677"


def dead_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def test_only_unreferenced_files_without_a_holder_are_garbage(tmp_path: Path) -> None:
    directory = tmp_path / TRAIN
    build_corpus(directory, CORPUS)
    digest = CacheReader.open(directory).digest
    assert find_garbage(tmp_path) == []
    dead, place = dead_process(), directory / "chunks" / "01"
    writer = replace(this_process(), process_id=dead, start="")
    left = temporary_name(place / "u000000001-0.psc", writer)
    kept = temporary_name(place / "u000000001-0.psc")
    for path in (left, kept):
        path.write_bytes(b"x" * 1000)
    extra = [chunk_path(directory, unit, part) for unit, part in ((1, 77), (3000, 0))]
    for path in extra:
        path.parent.mkdir(exist_ok=True)
        shutil.copyfile(chunk_path(directory, 1, 0), path)
    with Leases(directory) as leases:
        assert leases.acquire(3000)
        void = directory / "leases" / "u000000002"
        void.write_text(json.dumps({**writer.to_json(), "token": "t"}))
        assert {item.path for item in find_garbage(tmp_path)} == {left, extra[0], void}
    found = find_garbage(tmp_path)
    assert {item.path for item in found} == {left, *extra, void}
    assert remove_garbage(found) == sum(item.size_bytes for item in found) > 1000
    assert [path.exists() for path in (left, *extra, void, kept)] == [False] * 4 + [True]
    reader = CacheReader.open(directory)
    reader.verify()
    assert reader.digest == digest


def test_a_chunk_committed_after_it_was_listed_stays(tmp_path: Path) -> None:
    directory = tmp_path / TRAIN
    build_corpus(directory, CORPUS)
    log = directory / "manifest" / "log.jsonl"
    whole = log.read_bytes()
    log.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    found = find_garbage(tmp_path)
    assert {item.path.parent.name for item in found} == {"03"}
    log.write_bytes(whole)
    assert remove_garbage(found) == 0
    CacheReader.open(directory).verify()


def make_run(runs: Path, name: str, reader: CacheReader) -> None:
    (runs / name).mkdir(parents=True)
    source = PlanSource("text", Fraction(1), reader.recipe.digest, reader.row_tokens)
    DataPlan.create(runs / name / "plan.jsonl", PlanStart(1, True, 4, (source,)), [reader])


def test_caches_are_listed_with_their_runs(tmp_path: Path) -> None:
    work, root, runs = work_of(CORPUS), tmp_path / "caches", tmp_path / "runs"
    for number, name in enumerate((TRAIN, VALIDATION, OTHER)):
        recipe = recipe_for(work.tokenizer, source={"name": name})
        build_corpus(root / name, CORPUS, recipe=recipe)
        for path in (root / name / "RECIPE.json", root / name / "manifest" / "log.jsonl"):
            os.utime(path, (time.time() - 1000 * number - 500,) * 2)
    make_run(runs, "first", CacheReader.open(root / TRAIN))
    make_run(runs, "second", CacheReader.open(root / TRAIN))
    (root / "versions").mkdir()
    with Leases(root / OTHER) as leases:
        assert leases.acquire(1)
        found = {cache.directory.name: cache for cache in find_caches(root, runs)}
    assert set(found) == {TRAIN, VALIDATION, OTHER}
    assert found[TRAIN].runs == found[VALIDATION].runs == ("first", "second")  # one source, one content
    assert found[OTHER].runs == ()
    assert [found[name].is_busy for name in (TRAIN, VALIDATION, OTHER)] == [False, False, True]
    assert 400 < found[TRAIN].idle_seconds < 600 < 2400 < found[OTHER].idle_seconds < 2600
    sizes = sum(path.stat().st_size for path in (root / OTHER).rglob("*") if path.is_file())
    assert abs(found[OTHER].size_bytes - sizes) < 2000  # its lease is gone by now
    remove_cache(root / OTHER)
    assert sorted(path.name for path in root.iterdir()) == [TRAIN, VALIDATION, "versions"]
    (runs / "first" / "plan.jsonl").write_bytes(b"{}\n{}\n{}\n")
    with pytest.raises(DataError, match="Cannot read the data plan of run first"):
        find_caches(root, runs)


def test_a_growing_validation_cache_belongs_to_the_runs_of_its_training_cache(tmp_path: Path) -> None:
    work, root, runs = work_of(CORPUS), tmp_path / "caches", tmp_path / "runs"
    names = [f"a-b-{split}-{recipe * 12}-grow-{'12' * 6}-{number}" for split, recipe, number in
             (("train", "a", 2), ("validation", "b", 1))]  # fmt: skip
    names.append(f"a-train-{'c' * 12}-grow-{'12' * 6}-1")
    for name in names:
        build_corpus(root / name, CORPUS, recipe=recipe_for(work.tokenizer, source={"name": name}))
    make_run(runs, "first", CacheReader.open(root / names[0]))
    assert [cache.runs for cache in find_caches(root, runs)] == [("first",), ("first",), ()]


@pytest.mark.parametrize(
    ("number", "is_pinned", "is_garbage"), [(3, False, True), (3, True, False), (99, False, False)]
)
def test_only_unpinned_caches_of_earlier_formats_are_garbage(
    tmp_path: Path, number: int, is_pinned: bool, is_garbage: bool
) -> None:
    directory = tmp_path / TRAIN
    build_corpus(directory, CORPUS)
    path = directory / "RECIPE.json"
    value = json.loads(path.read_text())
    value["recipe"]["format"] = f"vorox-cache/{number}"
    path.write_text(json.dumps(value))
    if is_pinned:
        pin(directory, "paper")
    found = find_garbage(tmp_path)
    assert [item.path for item in found] == [directory] * is_garbage
    pin(directory, "late")
    assert remove_garbage(found) == 0
    assert path.exists()


# Rebuilding


def rebuild(directory: Path, fail_after: int | None = None) -> str:
    work = work_of(CORPUS)
    with replacing(directory, wanted=True) as place:
        assert place != directory
        digest = build(place, work, CORPUS.units, BuildOptions(last_unit=fail_after)).digest
        if fail_after is not None:
            raise RuntimeError
    return digest


def test_a_rebuilt_cache_replaces_the_old_one_under_a_reader(tmp_path: Path) -> None:
    directory = tmp_path / TRAIN
    digest = build_corpus(directory, CORPUS, codec="raw").digest
    reader = CacheReader.open(directory)
    before = reader.documents_of(0)
    assert rebuild(directory) == digest
    assert Manifest.open(directory).chunks["size_bytes"].sum() < reader.manifest.chunks["size_bytes"].sum()
    assert reader.documents_of(0) == before
    assert reader.refreshed().digest == digest
    for row in range(reader.num_rows):  # chunks that were not mapped before
        reader.documents_of(row)
    assert [path.name for path in tmp_path.iterdir()] == [TRAIN]
    CacheReader.open(directory).verify()


def test_a_rebuild_that_fails_leaves_the_old_cache(tmp_path: Path) -> None:
    directory = tmp_path / TRAIN
    digest = build_corpus(directory, CORPUS).digest
    with pytest.raises(RuntimeError):
        rebuild(directory, fail_after=2)
    assert CacheReader.open(directory).digest == digest
    assert find_garbage(tmp_path) == []  # it may have begun this minute
    (place,) = tmp_path.glob(".rebuild-*")
    for name in ("RECIPE.json", "manifest/log.jsonl"):
        os.utime(place / name, (time.time() - 100,) * 2)
    assert [item.reason for item in find_garbage(tmp_path)] == ["abandoned rebuild"]
    assert rebuild(directory) == digest  # continues the abandoned rebuild
    assert find_garbage(tmp_path) == []


def test_a_crash_between_the_renames_is_repaired(tmp_path: Path) -> None:
    directory = tmp_path / TRAIN
    digest = build_corpus(directory, CORPUS).digest
    directory.rename(tmp_path / f".replaced-{TRAIN}")
    with replacing(directory, wanted=False) as place:
        assert place == directory
    assert CacheReader.open(directory).digest == digest
    assert rebuild(directory) == digest


def test_a_cache_that_is_being_built_is_not_replaced(tmp_path: Path) -> None:
    directory = tmp_path / TRAIN
    build_corpus(directory, CORPUS)
    with Leases(directory) as leases:
        assert leases.acquire(2)
        with pytest.raises(ConfigError, match=f"is being built by process {os.getpid()}"):
            rebuild(directory)
    rebuild(directory)


def test_a_pin_protects_a_cache_even_if_it_is_set_late(tmp_path: Path) -> None:
    directory = tmp_path / TRAIN
    build_corpus(directory, CORPUS)
    (before,) = find_caches(tmp_path, tmp_path / "runs")
    assert before.is_removable
    pin(directory, "a", "one")
    assert remove_unused([before]) == 0, "it was pinned after it was listed"
    pin(directory, "a", "two")
    (directory / PINS_NAME / "b.json").write_bytes(b"\0torn")
    (cache,) = find_caches(tmp_path, tmp_path / "runs")
    assert [str(one) for one in cache.pins] == ["a: two", "b: unreadable pin"]
    assert not cache.is_removable
    assert remove_unused([cache]) == 0
    assert CacheReader.open(directory).verify() is None
    assert unpin(directory, "a")
    assert not unpin(directory, "a")
    assert unpin(directory, "b")
    assert read_pins(directory) == ()
    (after,) = find_caches(tmp_path, tmp_path / "runs")
    assert remove_unused([after]) > 0
    assert not directory.exists()
    for name in ("", ".x", "a/b", "x" * 101):
        with pytest.raises(ConfigError, match="Invalid pin name"):
            pin(directory, name)
