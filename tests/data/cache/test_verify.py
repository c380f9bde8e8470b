"""Verification finds every lost or damaged file: any flipped bit, links out of the cache, foreign lists."""

from __future__ import annotations

import json
import random
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from cache_corpus import Corpus, build_corpus, corpus_of, recipe_for, small_corpus, work_of
from vorox.core.errors import DataError
from vorox.core.files.chained_log import HashChainedLog
from vorox.data.cache.files import verify as verify_module
from vorox.data.cache.files.chunk import Chunk
from vorox.data.cache.files.manifest import LOG_NAME, Manifest, chunk_path
from vorox.data.cache.files.verify import Depth, damaged_units, find_damage
from vorox.data.cache.reader import CacheReader
from vorox.data.recipe import Recipe

CORPUS = small_corpus()


def with_bad_line() -> Corpus:
    lines = CORPUS.contents[0].decode().splitlines()
    return corpus_of([[*lines[:8], "! bad", *lines[9:]]], 7)


@pytest.mark.parametrize("codec", ["lz4", "zstd", "raw"])
def test_a_thousand_flipped_bits_of_chunks_are_all_found(tmp_path: Path, codec: str) -> None:
    build_corpus(tmp_path, CORPUS, codec=codec, block_rows=2)
    manifest = Manifest.open(tmp_path)
    paths = [chunk_path(tmp_path, record.unit, record.part) for record in map(manifest.chunk, range(3))]
    contents = [path.read_bytes() for path in paths]
    generator = random.Random(7)
    found = 0
    for _ in range(1000):
        which = generator.randrange(len(paths))
        raw = bytearray(contents[which])
        raw[generator.randrange(len(raw))] ^= 1 << generator.randrange(8)
        try:
            Chunk(paths[which], memoryview(bytes(raw))).verify()
        except DataError:
            found += 1
    assert found == 1000


def is_found(directory: Path) -> bool:
    try:
        CacheReader.open(directory).verify()
    except DataError:
        return True
    return False


def test_a_flipped_bit_in_any_file_of_a_cache_is_found(tmp_path: Path) -> None:
    """Each file in turn, so small lists are covered as well as large chunks."""
    build_corpus(tmp_path, with_bad_line())
    names = sorted(
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file() and path.name != "LOCK"
    )
    assert any(name.startswith("quarantine/") for name in names)
    assert {"RECIPE.json", "FILES.jsonl", "UNITS.jsonl", LOG_NAME} <= set(names)
    generator = random.Random(11)
    for name in names:
        path = tmp_path / name
        sound = path.read_bytes()
        for _ in range(1000 // len(names) + 1):
            raw = bytearray(sound)
            place = generator.randrange(len(raw))
            raw[place] ^= 1 << generator.randrange(8)
            path.write_bytes(raw)
            assert is_found(tmp_path), f"{name}, byte {place}: undetected"
        path.write_bytes(sound)
    CacheReader.open(tmp_path).verify()


@pytest.mark.parametrize("depth", ["quick", "full"])
def test_quick_finds_lost_and_truncated_chunks_and_full_finds_flipped_bits(tmp_path: Path, depth: Depth) -> None:
    clean = build_corpus(tmp_path, CORPUS)
    manifest = Manifest.open(tmp_path)
    assert damaged_units(tmp_path, manifest, depth) == {}
    chunk_path(tmp_path, 0, 0).unlink()
    cut = chunk_path(tmp_path, 1, 0)
    cut.write_bytes(cut.read_bytes()[:-1])
    shutil.copyfile(chunk_path(tmp_path, 3, 0), chunk_path(tmp_path, 2, 0))
    flipped = chunk_path(tmp_path, 3, 0)
    raw = bytearray(flipped.read_bytes())
    raw[Chunk.open(flipped).header.payload_offset] ^= 4
    flipped.write_bytes(raw)
    expected = [0, 1, 2] if depth == "quick" else [0, 1, 2, 3]
    seen: list[tuple[int, int]] = []
    found = damaged_units(tmp_path, manifest, depth, lambda done, total: seen.append((done, total)))
    assert sorted(found) == expected
    total = sum(manifest.chunk(index).size_bytes for index in range(len(manifest.chunks)))
    assert seen[-1] == (total, total)
    report = build_corpus(tmp_path, CORPUS, verify=depth)
    assert (report.units_built, report.digest) == (len(expected), clean.digest)
    assert damaged_units(tmp_path, manifest, depth) == {}
    assert build_corpus(tmp_path, CORPUS, verify="full").units_built == 4 - len(expected)
    CacheReader.open(tmp_path).verify()


def test_missing_and_damaged_units_are_filled_by_processes_too(tmp_path: Path) -> None:
    clean = build_corpus(tmp_path, CORPUS)
    log = tmp_path / LOG_NAME
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    for part in tmp_path.glob("chunks/03/*"):
        part.unlink()
    chunk_path(tmp_path, 1, 0).write_bytes(b"nothing")
    report = build_corpus(tmp_path, CORPUS, verify="quick", workers=2)
    assert (report.units_built, report.digest) == (2, clean.digest)
    CacheReader.open(tmp_path).verify()


# Symbolic links and foreign files


@pytest.mark.parametrize("what", ["chunk", "directory", "chunks"])
def test_a_link_that_leads_out_of_the_cache_is_refused(tmp_path: Path, what: str) -> None:
    inside, outside = tmp_path / "cache", tmp_path / "outside"
    clean = build_corpus(inside, CORPUS)
    path = {
        "chunk": chunk_path(inside, 2, 0),
        "directory": chunk_path(inside, 2, 0).parent,
        "chunks": inside / "chunks",
    }[what]
    path.rename(outside)
    path.symlink_to(outside)
    reader = CacheReader.open(inside)
    for action in (reader.verify, lambda: reader.documents_of(int(reader.unit_row_starts[2]))):
        with pytest.raises(DataError, match=r"symbolic link leads out|chunks are damaged"):
            action()
    record = Manifest.open(inside).unit_chunks(2)[0]
    assert "symbolic link leads out of the cache" in str(find_damage(inside, record, "quick"))
    before = sorted(outside.rglob("*"))
    if what == "chunk":
        assert build_corpus(inside, CORPUS, verify="quick").digest == clean.digest
        assert not path.is_symlink()  # the place is taken by a file, what it led to is left alone
        CacheReader.open(inside).verify()
    else:
        with pytest.raises(DataError, match="symbolic link leads out"):
            build_corpus(inside, CORPUS, verify="quick")
    assert sorted(outside.rglob("*")) == before


def test_a_cache_may_be_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "other disk").mkdir()
    (tmp_path / "caches").symlink_to(tmp_path / "other disk")
    build_corpus(tmp_path / "caches" / "c", CORPUS)
    CacheReader.open(tmp_path / "caches" / "c").verify()


def forge(directory: Path, change) -> None:
    """Rewrite the log with changed entries and a valid hash chain, as an attacker would."""
    bodies = HashChainedLog(directory / LOG_NAME).read()[0]
    (directory / LOG_NAME).unlink()
    (directory / "manifest" / "snapshot.bin").unlink(missing_ok=True)
    HashChainedLog(directory / LOG_NAME).append([change(body) for body in bodies])


@pytest.mark.parametrize(
    "value", ["../../../../etc/passwd", "../0", -1, 1 << 60, 2.5, None, True, [1], {"unit": 1}, "0"]
)
@pytest.mark.parametrize("name", ["unit", "part", "rows"])
def test_a_manifest_names_chunks_by_number_only(tmp_path: Path, name: str, value: object) -> None:
    build_corpus(tmp_path, CORPUS)

    def change(body):
        for chunk in body.get("add", [])[:1]:
            chunk[name] = value
        return body

    forge(tmp_path, change)
    for action in (lambda: CacheReader.open(tmp_path), lambda: build_corpus(tmp_path, CORPUS)):
        with pytest.raises(DataError, match="The manifest is inconsistent") as caught:
            action()
        assert caught.value.exit_code == 4
        assert caught.value.where.endswith(LOG_NAME)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: {**body, "done": [{**unit, "unit": 99} for unit in body.get("done", [])]}, "unit 99, but only 4"),
        (lambda body: {**body, "add": [{**chunk, "content": "../x"} for chunk in body.get("add", [])]}, "SHA-256"),
        (lambda body: {**body, "add": [{"unit": 1}]}, "an entry is malformed"),
        (lambda body: {**body, "add": 7}, "an entry is malformed"),
        (lambda body: {**body, "file": "../../x"}, "entries of unknown kinds: file"),
    ],
)  # fmt: skip
def test_an_inconsistent_manifest_is_refused(tmp_path: Path, change, message: str) -> None:
    build_corpus(tmp_path, CORPUS)
    forge(tmp_path, change)
    with pytest.raises(DataError, match=message):
        CacheReader.open(tmp_path)


def test_a_manifest_of_another_cache_is_refused(tmp_path: Path) -> None:
    build_corpus(tmp_path / "a", CORPUS)
    build_corpus(tmp_path / "b", CORPUS, recipe=recipe_for(work_of(CORPUS).tokenizer, packing="concat"))
    shutil.copytree(tmp_path / "b" / "manifest", tmp_path / "a" / "manifest", dirs_exist_ok=True)
    for action in (lambda: CacheReader.open(tmp_path / "a"), lambda: build_corpus(tmp_path / "a", CORPUS)):
        with pytest.raises(DataError, match="The manifest belongs to another cache"):
            action()


def test_a_chunk_of_another_cache_is_refused(tmp_path: Path) -> None:
    """Same rows, different recipe: the header has its digest."""
    build_corpus(tmp_path / "a", CORPUS)
    build_corpus(tmp_path / "b", CORPUS, recipe=recipe_for(work_of(CORPUS).tokenizer, source={"name": "other"}))
    shutil.copyfile(chunk_path(tmp_path / "b", 1, 0), chunk_path(tmp_path / "a", 1, 0))
    reader = CacheReader.open(tmp_path / "a")
    with pytest.raises(DataError, match="not the chunk that the manifest names"):
        reader.documents_of(int(reader.unit_row_starts[1]))


def test_lists_of_another_source_are_found(tmp_path: Path) -> None:
    build_corpus(tmp_path, CORPUS)
    log = HashChainedLog(tmp_path / "FILES.jsonl")
    bodies = log.read()[0]
    log.path.unlink()
    text = json.dumps(bodies).replace(CORPUS.files[1].version[:8], "version?")
    log.append(json.loads(text))
    with pytest.raises(DataError, match="does not match the listed files"):
        CacheReader.open(tmp_path).verify()
    (tmp_path / "UNITS.jsonl").unlink()
    with pytest.raises(DataError, match="the list of units has 0"):
        CacheReader.open(tmp_path).verify()


def test_a_list_that_lacks_one_unit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_corpus(tmp_path, CORPUS)
    units = verify_module.read_units(tmp_path)
    monkeypatch.setattr(verify_module, "read_units", lambda directory: units[:-1])
    with pytest.raises(DataError, match=f"has {len(units)} units, but the list of units has {len(units) - 1}"):
        CacheReader.open(tmp_path).verify()


def test_an_id_outside_the_vocabulary_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_corpus(tmp_path, CORPUS)
    reader = CacheReader.open(tmp_path)
    largest = int(reader.read_rows(np.arange(reader.num_rows)).tokens_NC.max())
    monkeypatch.setattr(Recipe, "num_ids", largest + 1)
    CacheReader.open(tmp_path).verify()
    monkeypatch.setattr(Recipe, "num_ids", largest)
    with pytest.raises(DataError, match=f"Token id {largest} exceeds the vocabulary of {largest} tokens"):
        CacheReader.open(tmp_path).verify()


# several threads


def test_chunks_are_checked_concurrently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check waits for a concurrent one: with a single thread it would time out."""
    build_corpus(tmp_path, CORPUS)
    manifest = Manifest.open(tmp_path)
    num_chunks = len(manifest.chunks)
    assert num_chunks >= 2
    monkeypatch.setattr(verify_module, "usable_cores", lambda: 2)
    together, original = threading.Barrier(2), Chunk.verify

    def verify(self: Chunk) -> object:
        if self.header.content.hex() != manifest.chunk(num_chunks - 1).content or num_chunks % 2 == 0:
            together.wait(60)
        return original(self)

    monkeypatch.setattr(Chunk, "verify", verify)
    told: list[tuple[int, int]] = []
    CacheReader.open(tmp_path).verify(lambda done, total: told.append((done, total)))
    sizes = [manifest.chunk(index).size_bytes for index in range(num_chunks)]
    assert told == [(sum(sizes[: index + 1]), sum(sizes)) for index in range(num_chunks)]


def test_the_result_does_not_depend_on_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_corpus(tmp_path, CORPUS)
    manifest = Manifest.open(tmp_path)
    generator = random.Random(3)
    for index in generator.sample(range(len(manifest.chunks)), len(manifest.chunks) // 2):
        record = manifest.chunk(index)
        path = chunk_path(tmp_path, record.unit, record.part)
        raw = bytearray(path.read_bytes())
        raw[generator.randrange(len(raw))] ^= 1
        path.write_bytes(raw)
    verdicts: list[tuple[str, str, dict[int, str]]] = []
    for threads in (1, 2, 7):
        monkeypatch.setattr(verify_module, "usable_cores", lambda threads=threads: threads)
        with pytest.raises(DataError) as caught:
            CacheReader.open(tmp_path).verify()
        found = damaged_units(tmp_path, manifest, "full")
        verdicts.append((caught.value.what, caught.value.where, {unit: str(error) for unit, error in found.items()}))
    assert verdicts[0][2]
    assert verdicts[0] == verdicts[1] == verdicts[2]


def test_memory_of_concurrent_checks_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_corpus(tmp_path, CORPUS)
    manifest = Manifest.open(tmp_path)
    monkeypatch.setattr(verify_module, "usable_cores", lambda: 8)
    largest = max(manifest.chunk(index).size_bytes for index in range(len(manifest.chunks)))
    assert verify_module.check_threads(manifest) == 8
    monkeypatch.setattr(verify_module, "MAX_BYTES_HELD", 10 * largest)
    assert verify_module.check_threads(manifest) < 8
    monkeypatch.setattr(verify_module, "MAX_BYTES_HELD", 0)
    assert verify_module.check_threads(manifest) == 1
    busy, most, lock, original = [0], [0], threading.Lock(), Chunk.verify

    def verify(self: Chunk) -> object:
        with lock:
            busy[0] += 1
            most[0] = max(most[0], busy[0])
        try:
            return original(self)
        finally:
            with lock:
                busy[0] -= 1

    monkeypatch.setattr(Chunk, "verify", verify)
    assert damaged_units(tmp_path, manifest, "full") == {}
    assert most == [1]
