"""Several builders on one cache at once: one digest, no error for who reads meanwhile, whatever is killed or broken."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cache_corpus import Corpus, build_corpus, small_corpus, work_of
from vorox.core.errors import DataError
from vorox.data.cache.build import build, rebuild_unit
from vorox.data.cache.chunk import Chunk
from vorox.data.cache.leases import Leases
from vorox.data.cache.manifest import Manifest, chunk_path
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.unit_work import UnitWork

CORPUS = small_corpus(num_files=3, lines_per_file=40, lines_per_unit=5)
NUM_UNITS = len(CORPUS.units)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> CacheReader:
    directory = tmp_path_factory.mktemp("clean")
    build_corpus(directory, CORPUS)
    return CacheReader.open(directory)


def rows_of_units(reader: CacheReader) -> dict[int, str]:
    """A hash of the rows of every unit that is there."""
    starts = reader.unit_row_starts
    found: dict[int, str] = {}
    for unit in reader.manifest.units["unit"].tolist():
        block = reader.read_rows(np.arange(starts[unit], starts[unit + 1]))
        content = [block.tokens_NC, block.row_ptr, block.segment_lengths, block.segment_document_offsets]
        found[unit] = hashlib.sha256(b"".join(array.tobytes() for array in content)).hexdigest()
    return found


def order_of_commits(directory: Path) -> list[int]:
    """Units in the order of the log, by its text."""
    lines = (directory / "manifest" / "log.jsonl").read_text().splitlines()
    return [unit["unit"] for line in lines for unit in json.loads(line)["body"].get("done", [])]


def test_modes_differ_in_the_order_alone(tmp_path: Path, clean: CacheReader) -> None:
    for mode in ("forward", "inverse", "gaps"):
        report = build_corpus(tmp_path / mode, CORPUS, mode=mode)
        assert report.digest == clean.digest
        assert rows_of_units(CacheReader.open(tmp_path / mode)) == rows_of_units(clean)
    assert order_of_commits(tmp_path / "forward") == list(range(NUM_UNITS))
    assert order_of_commits(tmp_path / "inverse") == list(range(NUM_UNITS))[::-1]


def test_gaps_come_first_and_a_stopped_build_leaves_the_others(tmp_path: Path, clean: CacheReader) -> None:
    with Leases(tmp_path) as leases:
        assert all(leases.take(unit) for unit in (2, 5))
        stopped = threading.Event()
        progress: list[int] = []

        def watch(seen) -> None:
            progress.append(seen.units_done)
            if seen.units_done >= 8:
                stopped.set()

        report = build_corpus(tmp_path, CORPUS, on_progress=watch, stop=stopped.is_set)
    done = order_of_commits(tmp_path)
    assert not {2, 5} & set(done)
    assert report.units_missing == NUM_UNITS - len(done) > 4
    with pytest.raises(DataError, match="incomplete"):
        CacheReader.open(tmp_path)
    before = len(done)
    assert build_corpus(tmp_path, CORPUS, mode="gaps").digest == clean.digest
    assert order_of_commits(tmp_path)[before : before + 2] == [2, 5]


def test_a_forward_and_an_inverse_builder_meet(tmp_path: Path, clean: CacheReader) -> None:
    reports = []
    threads = [
        threading.Thread(target=lambda mode=mode: reports.append(build_corpus(tmp_path, CORPUS, mode=mode)))
        for mode in ("forward", "inverse", "gaps", "forward")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {report.digest for report in reports} == {clean.digest}
    assert sum(report.units_built for report in reports) == NUM_UNITS  # nothing twice
    CacheReader.open(tmp_path).verify()
    assert sorted(order_of_commits(tmp_path)) == list(range(NUM_UNITS))


def test_double_work_is_dropped(tmp_path: Path, clean: CacheReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that keep nobody out: every unit is built twice, committed once, and by then never touched."""
    monkeypatch.setattr(Leases, "take", lambda self, unit: True)
    codecs = ("lz4", "zstd", "raw")
    reports = []
    threads = [
        threading.Thread(target=lambda codec=codec: reports.append(build_corpus(tmp_path, CORPUS, codec=codec)))
        for codec in codecs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {report.digest for report in reports} == {clean.digest}
    assert sum(report.units_built for report in reports) == NUM_UNITS
    CacheReader.open(tmp_path).verify()  # sizes and hashes are those of the codec that was first
    assert not list(tmp_path.rglob(".tmp-*"))
    assert sorted(order_of_commits(tmp_path)) == list(range(NUM_UNITS))


def test_a_builder_of_fewer_files_and_one_of_more_meet(tmp_path: Path, clean: CacheReader) -> None:
    """One began before the source grew."""
    per_file = NUM_UNITS // 3
    early = Corpus(CORPUS.contents, CORPUS.files[:2], CORPUS.units[: 2 * per_file])
    release = threading.Event()

    def wait(progress) -> None:
        if progress.units_done == 3:
            release.wait(20)

    first = threading.Thread(target=build_corpus, args=(tmp_path, early), kwargs={"on_progress": wait})
    first.start()
    while not (tmp_path / "manifest").exists() or len(Manifest.open(tmp_path).units) < 3:
        time.sleep(0.005)
    second = threading.Thread(target=build_corpus, args=(tmp_path, CORPUS))
    second.start()
    while Manifest.open(tmp_path).planned_units < NUM_UNITS:
        time.sleep(0.005)
    release.set()
    first.join(30)
    second.join(30)
    reader = CacheReader.open(tmp_path)
    reader.verify()
    assert reader.digest == clean.digest


# Killed builders, broken chunks, and somebody who reads all the while


def forked(action: Callable[[], object]) -> int:
    """A process that does something and ends with 0 unless that fails. A fork, so that hundreds take no time."""
    child = os.fork()
    if child:
        return child
    try:
        action()
        os._exit(0)
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        os._exit(1)


def read_all_the_while(directory: Path, expected: dict[int, str], work: UnitWork, ended: Path) -> None:
    """A trainer: a reader that sees more and more, and a second one that opens the cache again and again."""
    while not (directory / "RECIPE.json").exists():
        time.sleep(0.001)
    mend = functools.partial(rebuild, directory, work)
    reader = CacheReader.open(directory, complete=False)
    reader.mend = mend
    while not ended.exists():
        reader = reader.refreshed()
        other = CacheReader.open(directory, complete=False)
        other.mend = mend
        for seen in (reader, other):
            found = rows_of_units(seen)
            assert found == {unit: expected[unit] for unit in found}


def rebuild(directory: Path, work: UnitWork, unit: int, error: DataError) -> None:
    rebuild_unit(directory, work, CORPUS.units, unit, bad_record_fraction=0.001)


def break_something(directory: Path, generator: random.Random) -> None:
    """Delete a chunk file, cut it, or flip one of its bits: as a disk may."""
    paths = sorted(directory.glob("chunks/*/*.psc"))
    if not paths:
        return
    path = generator.choice(paths)
    kind = generator.randrange(3)
    try:
        if kind == 0:
            path.unlink()
            return
        raw = bytearray(path.read_bytes())
        if kind == 1:
            raw = raw[: generator.randrange(len(raw))]
        else:
            raw[generator.randrange(len(raw))] ^= 1 << generator.randrange(8)
        other = path.with_name(f".broken-{path.name}")
        other.write_bytes(raw)
        other.replace(path)
    except FileNotFoundError:
        pass


def storm(tmp_path: Path, clean: CacheReader, num_kills: int, seed: int, *, breaking: bool) -> None:
    """Builders of both directions that are killed at random instants, two at a time, on cache after cache."""
    generator = random.Random(seed)
    expected = rows_of_units(clean)
    kills = number = 0
    while kills < num_kills:
        number += 1
        kills += storm_on(tmp_path / str(number), clean.digest, expected, num_kills - kills, generator, breaking)


def storm_on(
    directory: Path, digest: str, expected: dict[int, str], num_kills: int, generator: random.Random, breaking: bool
) -> int:
    """The same on one cache, until it is complete; returns how many were killed."""
    work, ended = work_of(CORPUS), directory.with_suffix(".ended")
    reading = forked(lambda: read_all_the_while(directory, expected, work, ended))
    kills = 0
    while kills < num_kills and not is_complete(directory):
        children = [
            forked(lambda mode=mode: build(directory, work, CORPUS.units, mode=mode)) for mode in ("forward", "inverse")
        ]
        time.sleep(generator.uniform(0.0, 0.04))
        if breaking and generator.random() < 0.5:
            break_something(directory, generator)
        for child in children:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            kills += os.WIFSIGNALED(status)
    assert build(directory, work, CORPUS.units, check="full").digest == digest
    ended.touch()
    _, status = os.waitpid(reading, 0)
    assert status == 0, "the reader met an error"
    reader = CacheReader.open(directory)
    reader.verify()
    assert rows_of_units(reader) == expected
    assert not list(directory.rglob(".tmp-*"))
    return kills


def is_complete(directory: Path) -> bool:
    if not (directory / "manifest" / "log.jsonl").exists():
        return False
    manifest = Manifest.open(directory)
    return manifest.planned_units > 0 and not len(manifest.missing_units())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("breaking", [False, True])
def test_a_dozen_kills(tmp_path: Path, clean: CacheReader, breaking: bool) -> None:
    storm(tmp_path, clean, 12, 1, breaking=breaking)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("breaking", [False, True])
def test_two_hundred_kills(tmp_path: Path, clean: CacheReader, breaking: bool) -> None:
    storm(tmp_path, clean, 200, 2, breaking=breaking)


def test_a_reader_mends_what_it_finds_broken_and_says_so(tmp_path: Path, clean: CacheReader) -> None:
    build_corpus(tmp_path, CORPUS)
    expected = rows_of_units(clean)
    reader = CacheReader.open(tmp_path)
    assert rows_of_units(reader) == expected  # everything is mapped now
    path = chunk_path(tmp_path, 4, 0)
    sound = path.read_bytes()
    header = Chunk.open(path).header
    with path.open("r+b") as file:  # in place: under the reader's eyes
        file.seek(header.payload_offset)
        file.write(bytes([sound[header.payload_offset] ^ 1]))
    with pytest.raises(DataError, match="does not match its checksum"):
        rows_of_units(reader)
    chunk_path(tmp_path, 9, 0).unlink()
    asked: list[int] = []

    def mend(unit: int, error: DataError) -> None:
        asked.append(unit)
        assert "damaged" in str(error) or "cannot open" in str(error)
        rebuild(tmp_path, work_of(CORPUS), unit, error)

    fresh = CacheReader.open(tmp_path)
    reader.mend = fresh.mend = mend
    assert rows_of_units(reader) == expected
    assert rows_of_units(fresh) == expected
    assert asked == [4, 9]
    assert path.read_bytes() == sound
