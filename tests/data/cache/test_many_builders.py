"""Concurrent builders of one cache: same digest and no reader errors, even with kills and damaged chunks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cache_corpus import Corpus, build_corpus, work_of
from data.cache.builder_storm import CORPUS, NUM_UNITS, rebuild, rows_of_units
from eventually import PATIENCE_SECONDS, wait_until
from vorox.core.errors import DataError
from vorox.data.cache.files.chunk import Chunk
from vorox.data.cache.files.leases import Leases
from vorox.data.cache.files.manifest import Manifest, chunk_path
from vorox.data.cache.reader import CacheReader


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> CacheReader:
    directory = tmp_path_factory.mktemp("clean")
    build_corpus(directory, CORPUS)
    return CacheReader.open(directory)


def order_of_commits(directory: Path) -> list[int]:
    """Return the units in log order."""
    lines = (directory / "manifest" / "log.jsonl").read_text().splitlines()
    return [unit["unit"] for line in lines for unit in json.loads(line)["body"].get("done", [])]


def test_modes_differ_only_in_order(tmp_path: Path, clean: CacheReader) -> None:
    for mode in ("forward", "inverse", "gaps"):
        report = build_corpus(tmp_path / mode, CORPUS, mode=mode)
        assert report.digest == clean.digest
        assert rows_of_units(CacheReader.open(tmp_path / mode)) == rows_of_units(clean)
    assert order_of_commits(tmp_path / "forward") == list(range(NUM_UNITS))
    assert order_of_commits(tmp_path / "inverse") == list(range(NUM_UNITS))[::-1]


def test_gaps_come_first_and_a_stopped_build_leaves_the_others(tmp_path: Path, clean: CacheReader) -> None:
    with Leases(tmp_path) as leases:
        assert all(leases.acquire(unit) for unit in (2, 5))
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


def test_duplicate_work_is_dropped(tmp_path: Path, clean: CacheReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """With leases disabled, every unit is built twice, committed once, and not modified afterwards."""
    monkeypatch.setattr(Leases, "acquire", lambda self, unit: True)
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
    """One builder started before the source grew."""
    per_file = NUM_UNITS // 3
    early = Corpus(CORPUS.contents, CORPUS.files[:2], CORPUS.units[: 2 * per_file])
    release = threading.Event()

    def wait(progress) -> None:
        if progress.units_done == 3:
            release.wait(PATIENCE_SECONDS)

    first = threading.Thread(target=build_corpus, args=(tmp_path, early), kwargs={"on_progress": wait})
    first.start()
    wait_until(lambda: (tmp_path / "manifest").exists() and len(Manifest.open(tmp_path).units) >= 3)
    second = threading.Thread(target=build_corpus, args=(tmp_path, CORPUS))
    second.start()
    wait_until(lambda: Manifest.open(tmp_path).planned_units >= NUM_UNITS)
    release.set()
    for thread in (first, second):
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    reader = CacheReader.open(tmp_path)
    reader.verify()
    assert reader.digest == clean.digest


# Killed builders and damaged chunks, with a concurrent reader


def storm_in_a_process_of_its_own(tmp_path: Path, num_kills: int, seed: int, breaking: bool) -> None:
    """In a subprocess, because it forks, which is unsafe with the threads of a framework."""
    tests = Path(__file__).parents[2]
    command = [
        sys.executable,
        "-m",
        "data.cache.builder_storm",
        str(tmp_path),
        str(num_kills),
        str(seed),
        str(breaking),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert int(result.stdout.split()[-1]) >= num_kills


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("breaking", [False, True])
def test_a_dozen_kills(tmp_path: Path, breaking: bool) -> None:
    storm_in_a_process_of_its_own(tmp_path, 12, 1, breaking)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("breaking", [False, True])
def test_two_hundred_kills(tmp_path: Path, breaking: bool) -> None:
    storm_in_a_process_of_its_own(tmp_path, 200, 2, breaking)


def test_a_reader_repairs_damaged_chunks_and_reports_it(tmp_path: Path, clean: CacheReader) -> None:
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

    def repair(unit: int, error: DataError) -> None:
        asked.append(unit)
        assert "damaged" in str(error) or "cannot open" in str(error)
        rebuild(tmp_path, work_of(CORPUS), unit, error)

    fresh = CacheReader.open(tmp_path)
    reader.repair = fresh.repair = repair
    assert rows_of_units(reader) == expected
    assert rows_of_units(fresh) == expected
    assert asked == [4, 9]
    assert path.read_bytes() == sound
