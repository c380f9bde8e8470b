"""Recipe, lists and manifest: independent of commit order, damage is detected, growth keeps addresses."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_corpus import ByteTokenizer, recipe_for, small_corpus
from processor_cost import cost
from vorox.core.errors import DataError
from vorox.core.files.atomic import make_directory
from vorox.core.files.chained_log import HashChainedLog
from vorox.data.cache.building.initialize import has_planned, planned_inputs, record_inputs
from vorox.data.cache.files.format import ChunkRecord, source_set_digest
from vorox.data.cache.files.manifest import (
    LOG_NAME,
    SNAPSHOT_NAME,
    Manifest,
    UnitStatistics,
    chunk_path,
    planned_entry,
    unit_entry,
)
from vorox.data.cache.reader import CacheReader
from vorox.data.documents import SourceFile, Unit, UnitSpan
from vorox.data.images.layout import ImageLayout
from vorox.data.recipe import (
    RECIPE_NAME,
    UNITS_NAME,
    Recipe,
    check_recipe,
    read_files,
    read_recipe,
    read_units,
    write_recipe,
)

RECIPE = recipe_for(ByteTokenizer())


def chunk(unit: int, part: int = 0, rows: int = 7) -> ChunkRecord:
    content = hashlib.sha256(f"{unit}/{part}/{rows}".encode()).hexdigest()
    return ChunkRecord(unit, part, rows, rows * 30, rows * 3, 5, 1000 + unit, content, content[::-1])


def unit_of(unit: int, parts: Sequence[int]) -> dict:
    statistics = UnitStatistics(unit, 5 + unit, 100, 90, unit % 3, 80)
    return unit_entry(statistics, [chunk(unit, part, rows) for part, rows in enumerate(parts)])


def manifest_in(directory: Path, entries: Sequence[dict]) -> Manifest:
    make_directory(directory / "manifest")
    return Manifest.open(directory).commit(directory, entries)


def assert_same(left: Manifest, right: Manifest) -> None:
    numbers = [field.name for field in dataclasses.fields(Manifest) if field.name not in ("chunks", "units")]
    assert [getattr(left, name) for name in numbers] == [getattr(right, name) for name in numbers]
    assert left.chunks.tobytes() == right.chunks.tobytes()
    assert left.units.tobytes() == right.units.tobytes()


# Recipe


def test_a_recipe_round_trips_and_its_digest_covers_every_value(tmp_path):
    write_recipe(tmp_path, RECIPE)
    assert read_recipe(tmp_path) == RECIPE
    changes = {
        "tokenizer": "other", "vocab_size": 300, "end_of_text_id": 7, "row_tokens": 65, "source": {"name": "x"},
        "split": {"name": "validation"}, "packing": "concat", "chunk_rows": 4096,
        "transforms": ({"function": "a:b", "version": 1, "args": {"least": 3}},), "images": ImageLayout(64),
        "start_ids": (1, 2), "end_ids": (),
    }  # fmt: skip
    assert set(changes) == {field.name for field in dataclasses.fields(Recipe)}
    digests = {RECIPE.digest, *(dataclasses.replace(RECIPE, **{name: v}).digest for name, v in changes.items())}
    assert len(digests) == 1 + len(changes)
    transformed = dataclasses.replace(RECIPE, transforms=changes["transforms"])
    write_recipe(tmp_path, transformed)
    assert read_recipe(tmp_path) == transformed
    pictured = dataclasses.replace(RECIPE, images=ImageLayout(64))
    write_recipe(tmp_path, pictured)
    assert read_recipe(tmp_path) == pictured
    with pytest.raises(DataError, match=r"transforms: .*a:b.* here, \[\] expected"):
        check_recipe(tmp_path, transformed, RECIPE)


def test_recipe_digest_is_frozen():
    """Caches on disk stay valid only while this value is unchanged."""
    recipe = Recipe("t", 65537, 3, 1025, {"a": [1, None]}, {"b": "c"})
    assert recipe.dtype == "uint32"
    assert dataclasses.replace(recipe, vocab_size=65536).dtype == "uint16"
    expected = (
        '{"chunk_rows":4096,"dtype":"uint32","end_ids":null,"end_of_text_id":3,"format":"vorox-cache/4","images":null,'
        '"packing":"best_fit","row_tokens":1025,"source":{"a":[1,null]},"split":{"b":"c"},"start_ids":[],'
        '"tokenizer":"t","transforms":[],"vocab_size":65537}'
    )
    assert recipe.digest == hashlib.sha256(expected.encode()).hexdigest()


def flipped_bytes(path, places):
    """Flip some bytes in turn, in place, because reopening the file would dominate the test."""
    raw = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for place in places:
            for byte in (raw[place] ^ 1, raw[place]):
                file.seek(place)
                file.write(bytes([byte]))
                if byte != raw[place]:
                    yield place


def test_every_flipped_byte_of_the_recipe_is_detected(tmp_path):
    write_recipe(tmp_path, RECIPE)
    path = tmp_path / RECIPE_NAME
    for _ in flipped_bytes(path, range(path.stat().st_size)):
        with pytest.raises(DataError):
            read_recipe(tmp_path)
    assert read_recipe(tmp_path) == RECIPE


def test_a_different_recipe_is_refused_with_both_digests_and_the_difference():
    other = dataclasses.replace(RECIPE, row_tokens=65)
    with pytest.raises(DataError) as caught:
        check_recipe(Path("cache"), RECIPE, other)
    for part in (RECIPE.digest, other.digest, "row_tokens: 33 here, 65 expected"):
        assert part in caught.value.what
    assert "vocab_size" not in caught.value.what


def test_a_cache_of_another_format_is_refused_with_the_command_that_builds_it_again(tmp_path):
    recipe = {"format": "vorox-cache/3", "tokenizer": "t"}  # with the fields of its format
    (tmp_path / RECIPE_NAME).write_text(json.dumps({"recipe": recipe, "sha256": "0" * 64}))
    with pytest.raises(DataError, match="format 'vorox-cache/3', but this version reads 'vorox-cache/4'") as caught:
        read_recipe(tmp_path)
    assert "vorox data build" in caught.value.hint


def test_a_directory_without_a_recipe_is_not_a_cache(tmp_path):
    with pytest.raises(DataError, match="No cache here"):
        read_recipe(tmp_path)


# Files and units


def planned(num_files: int, num_units: int) -> Manifest:
    return dataclasses.replace(Manifest.empty(), planned_units=num_units, planned_files=num_files)


def test_file_and_unit_lists_round_trip_and_grow_by_appending(tmp_path):
    files = tuple(SourceFile(f"/f{i}", i, f"v{i}") for i in range(2500))
    units = tuple(Unit(i, (UnitSpan(i, 0, i + 1, 0), UnitSpan(i, i + 1, 2 * i + 2, 3))) for i in range(2300))
    record_inputs(tmp_path, Manifest.empty(), files[:1700], units[:800])
    assert not has_planned(tmp_path, planned(1700, 800), files, units)
    before = (tmp_path / UNITS_NAME).read_bytes()
    record_inputs(tmp_path, planned(1700, 800), files, units)
    assert read_files(tmp_path) == list(files)
    assert read_units(tmp_path) == list(units)
    assert has_planned(tmp_path, planned(2500, 2300), files, units)
    assert (tmp_path / UNITS_NAME).read_bytes().startswith(before)


@pytest.mark.parametrize("num_left", [1, 700, 2300])
def test_entries_of_a_build_that_died_before_planning_do_not_count(tmp_path, num_left):
    files = tuple(SourceFile(f"/f{i}", i, f"v{i}") for i in range(2500))
    units = tuple(Unit(i, (UnitSpan(i, 0, i + 1, 0),)) for i in range(2300))
    others = tuple(SourceFile(f"/g{i}", i, f"w{i}") for i in range(num_left))
    other_units = tuple(Unit(100 + i, (UnitSpan(150 + i, 0, 7, 0),)) for i in range(num_left))
    record_inputs(tmp_path, Manifest.empty(), files[:150], units[:100])
    record_inputs(tmp_path, planned(150, 100), files[:150] + others, units[:100] + other_units)
    found = planned_inputs(tmp_path, planned(150, 100))
    assert found == (list(files[:150]), list(units[:100]))
    record_inputs(tmp_path, planned(150, 100), files, units)
    assert read_files(tmp_path) == list(files)
    assert read_units(tmp_path) == list(units)


def test_a_moved_file_is_followed_and_a_changed_one_refused(tmp_path):
    corpus = small_corpus()
    all_of_it = planned(2, len(corpus.units))
    record_inputs(tmp_path, Manifest.empty(), corpus.files, corpus.units)
    moved = (dataclasses.replace(corpus.files[0], uri="/elsewhere"), corpus.files[1])
    assert not has_planned(tmp_path, all_of_it, moved, corpus.units)
    record_inputs(tmp_path, all_of_it, moved, corpus.units)
    assert read_files(tmp_path) == list(moved)
    changed = (moved[0], dataclasses.replace(moved[1], version="other"))
    for files, units, name in (
        (changed, corpus.units, moved[1].uri),
        (moved[:1], corpus.units, moved[1].uri),
        (moved, corpus.units[:-1], "Unit"),
        (moved, (*corpus.units[:1], dataclasses.replace(corpus.units[1], spans=())), "Unit 1"),
    ):
        for action in (record_inputs, has_planned):
            with pytest.raises(DataError, match=name):
                action(tmp_path, all_of_it, files, units)
    assert read_files(tmp_path) == list(moved)


def test_source_set_depends_on_content_and_not_on_location():
    corpus = small_corpus()
    unit = corpus.units[-1]
    moved = [dataclasses.replace(file, uri="/elsewhere") for file in corpus.files]
    assert source_set_digest(unit, moved) == source_set_digest(unit, corpus.files)
    changed = [dataclasses.replace(file, version="other") for file in corpus.files]
    assert source_set_digest(unit, changed) != source_set_digest(unit, corpus.files)
    assert source_set_digest(corpus.units[0], corpus.files) != source_set_digest(unit, corpus.files)


# Manifest


@given(st.permutations(range(6)), st.lists(st.booleans(), min_size=6, max_size=6))
@settings(max_examples=20, deadline=None)
def test_commit_order_changes_nothing(tmp_path_factory, order, snapshots):
    parts = [[7], [], [8, 3], [8, 8, 1], [2], [8]]
    directory = tmp_path_factory.mktemp("cache")
    manifest = manifest_in(directory, [planned_entry(6)])
    for unit, snapshot in zip(order, snapshots, strict=True):
        manifest = manifest.commit(directory, [unit_of(unit, parts[unit])])
        if snapshot:
            manifest.write_snapshot(directory)
    assert_same(manifest, Manifest.open(directory))
    assert_same(manifest, Manifest.read_log(directory))
    assert manifest.unit_row_starts.tolist() == [0, 7, 7, 18, 35, 37, 45]
    assert manifest.chunk_row_starts.tolist() == [0, 7, 15, 18, 26, 34, 35, 37, 45]
    chunks = [chunk(unit, part, rows) for unit in range(6) for part, rows in enumerate(parts[unit])]
    assert [manifest.chunk(index) for index in range(len(chunks))] == chunks
    assert manifest.unit_chunks(2) == chunks[1:3]
    assert (
        manifest.content_digest(0, 6) == hashlib.sha256(b"".join(bytes.fromhex(c.content) for c in chunks)).hexdigest()
    )
    assert manifest.content_digest(2, 4) == hashlib.sha256(
        b"".join(bytes.fromhex(c.content) for c in chunks[1:6])
    ).hexdigest()  # fmt: skip
    assert manifest.units["documents"].tolist() == [5, 6, 7, 8, 9, 10]
    assert len(manifest.missing_units()) == 0


def test_missing_units_are_planned_and_not_committed(tmp_path):
    manifest = manifest_in(tmp_path, [planned_entry(5), unit_of(3, [8]), unit_of(1, [])])
    assert manifest.missing_units().tolist() == [0, 2, 4]
    assert manifest.missing_units(1, 4).tolist() == [2]
    extended = manifest.commit(tmp_path, [planned_entry(7)])
    assert extended.missing_units().tolist() == [0, 2, 4, 5, 6]
    assert manifest.missing_units().tolist() == [0, 2, 4]  # what was read stays as it was


def test_a_flipped_byte_of_the_snapshot_does_not_change_the_state(tmp_path):
    manifest = manifest_in(tmp_path, [planned_entry(3), unit_of(0, [7]), unit_of(2, [8, 2])])
    manifest.write_snapshot(tmp_path)
    manifest = manifest.commit(tmp_path, [unit_of(1, [4])])
    path = tmp_path / SNAPSHOT_NAME
    raw = path.read_bytes()
    for _ in flipped_bytes(path, range(0, len(raw), 3)):
        assert_same(Manifest.open(tmp_path), manifest)
    for size in range(0, len(raw), 7):
        path.write_bytes(raw[:size])
        assert_same(Manifest.open(tmp_path), manifest)


def test_a_flipped_byte_of_the_log_is_detected_or_drops_the_last_line(tmp_path):
    entries = [planned_entry(3), unit_of(0, [7]), unit_of(2, [8, 2]), unit_of(1, [4])]
    manifest_in(tmp_path, entries)
    path = tmp_path / LOG_NAME
    raw = path.read_bytes()
    last_line = raw.rindex(b"\n", 0, -1) + 1
    path.write_bytes(raw[:last_line])
    before_last = Manifest.open(tmp_path)
    assert before_last.missing_units().tolist() == [1]
    path.write_bytes(raw)
    for place in flipped_bytes(path, {*range(0, len(raw), 3), *range(last_line, len(raw))} - {last_line - 1}):
        if place < last_line:
            with pytest.raises(DataError, match=r"damaged|out of sequence"):
                Manifest.open(tmp_path)
        else:
            assert_same(Manifest.open(tmp_path), before_last)
    # Without the line end between them the last two are one torn line: both units count as missing, which a reader
    # refuses and a build repairs.
    path.write_bytes(raw[: last_line - 1] + b" " + raw[last_line:])
    assert Manifest.open(tmp_path).missing_units().tolist() == [1, 2]


def test_a_snapshot_of_another_history_is_ignored(tmp_path):
    manifest_in(tmp_path / "a", [planned_entry(3), unit_of(0, [7])]).write_snapshot(tmp_path / "a")
    other = manifest_in(tmp_path / "b", [planned_entry(3), unit_of(1, [6])])
    (tmp_path / "b" / SNAPSHOT_NAME).write_bytes((tmp_path / "a" / SNAPSHOT_NAME).read_bytes())
    assert_same(Manifest.open(tmp_path / "b"), other)


@pytest.mark.parametrize("recipe", ["", "ab" * 32])
def test_a_snapshot_holds_the_whole_state(tmp_path, recipe):
    planned = planned_entry(3, recipe, 5, estimated_bytes=70_000)
    manifest_in(tmp_path, [planned, unit_of(0, [7])]).write_snapshot(tmp_path)
    state = Manifest.open(tmp_path)
    assert_same(state, Manifest.read_log(tmp_path))
    assert (state.recipe, state.planned_files, state.units_final, state.estimated_bytes) == (recipe, 5, False, 70_000)


@pytest.mark.parametrize(("recipe", "rows", "is_followed"), [("ab", 8, True), ("ab", 9, False), ("cd", 8, False)])
def test_a_rebuilt_log_is_followed_if_it_holds_the_same_content(tmp_path, recipe, rows, is_followed):
    manifest = manifest_in(tmp_path, [planned_entry(2, "ab" * 32), unit_of(0, [8])])
    (tmp_path / LOG_NAME).unlink()
    HashChainedLog(tmp_path / LOG_NAME).append([planned_entry(2, recipe * 32), unit_of(1, [5]), unit_of(0, [rows])])
    if is_followed:
        assert_same(manifest.refreshed(tmp_path), Manifest.read_log(tmp_path))
    else:
        with pytest.raises(DataError, match="damaged or out of sequence"):
            manifest.refreshed(tmp_path)


def test_a_repair_may_change_the_file_and_never_the_content(tmp_path):
    manifest = manifest_in(tmp_path, [planned_entry(2), unit_of(0, [8, 7]), unit_of(1, [5])])
    repaired = dataclasses.replace(chunk(0, 1, 7), size_bytes=77, file_sha256="ab" * 32)
    entry = unit_entry(UnitStatistics(0, 5, 100, 90, 0, 80), [chunk(0, 0, 8), repaired])
    after = manifest.commit(tmp_path, [entry])
    assert after.unit_chunks(0) == [chunk(0, 0, 8), repaired]
    assert after.content_digest(0, 2) == manifest.content_digest(0, 2)
    assert len(after.units) == 2
    with pytest.raises(DataError, match="two different contents"):
        after.commit(tmp_path, [unit_of(1, [6])])


def test_an_entry_of_a_later_version_is_refused(tmp_path):
    manifest = manifest_in(tmp_path, [planned_entry(2)])
    HashChainedLog(tmp_path / LOG_NAME).append([{"evict": [0]}])
    for action in (lambda: Manifest.open(tmp_path), lambda: manifest.refreshed(tmp_path)):
        with pytest.raises(DataError, match="evict"):
            action()


def test_a_log_of_two_recipes_is_refused(tmp_path):
    first, second = "ab" * 32, "cd" * 32
    manifest = manifest_in(tmp_path, [planned_entry(2, first)])
    assert manifest.commit(tmp_path, [planned_entry(3, first)]).planned_units == 3
    HashChainedLog(tmp_path / LOG_NAME).append([planned_entry(3, second)])
    for action in (lambda: Manifest.read_log(tmp_path), lambda: manifest.refreshed(tmp_path)):
        with pytest.raises(DataError, match="several recipes"):
            action()


def test_a_log_that_changes_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    """A torn line is truncated and replaced: a read in between fails, and the next one succeeds."""
    manifest_in(tmp_path, [planned_entry(2), unit_of(0, [8])])
    read_after, is_torn = HashChainedLog.read_after, [True]

    def torn_once(log, position):
        if is_torn and is_torn.pop():
            HashChainedLog(tmp_path / LOG_NAME).append([unit_of(1, [5])])
            raise DataError("a line that is half the old one and half the new one")
        return read_after(log, position)

    monkeypatch.setattr(HashChainedLog, "read_after", torn_once)
    assert Manifest.read_log(tmp_path).has_unit(1)


def test_a_directory_holds_the_chunks_of_every_256th_unit():
    assert chunk_path(Path("c"), 0x1234, 2) == Path("c/chunks/34/u000004660-2.psc")


def test_a_hundred_million_rows_open_and_are_addressed_fast(tmp_path):
    """Opening reads the manifest only: no chunk file is opened before a row is read."""
    num_units, rows = 24_500, 4096
    corpus_file = SourceFile("/corpus", 64 << 30, "v")
    spans = [Unit(unit, (UnitSpan(0, unit << 20, (unit + 1) << 20, unit),)) for unit in range(num_units)]
    write_recipe(tmp_path, RECIPE)
    record_inputs(tmp_path, Manifest.empty(), [corpus_file], spans)
    entries = [planned_entry(num_units), *(unit_of(unit, [rows - unit % 3]) for unit in range(num_units))]
    manifest_in(tmp_path, entries).write_snapshot(tmp_path)
    generator = np.random.default_rng(1)
    reader = CacheReader.open(tmp_path, RECIPE)
    rows_asked = generator.integers(0, reader.num_rows, 10_000)
    chunk_N, row_N = reader.addresses(rows_asked)
    digest = reader.digest

    def open_and_look() -> None:
        reader = CacheReader.open(tmp_path, RECIPE)
        reader.addresses(rows_asked)
        assert reader.digest == digest

    assert reader.num_rows == sum(rows - unit % 3 for unit in range(num_units)) > 10**8
    assert cost(open_and_look) < 40
    ends = np.cumsum([rows - unit % 3 for unit in range(num_units)])
    assert np.array_equal(ends[chunk_N] - rows + chunk_N % 3 + row_N, rows_asked)
    assert (row_N >= 0).all()
    assert (row_N < rows - chunk_N % 3).all()
    assert len(reader.units) == num_units
    assert_same(Manifest.open(tmp_path), Manifest.read_log(tmp_path))
    assert digest == Manifest.read_log(tmp_path).content_digest(0, num_units)
