"""A build interrupted at any point leaves a readable cache, and the next build completes it identically."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import cache_corpus
from cache_corpus import ByteTokenizer, corpus_of, recipe_for, small_corpus, work_of
from crash_enumeration import crash_states, record
from vorox.core.errors import DataError
from vorox.core.files import atomic
from vorox.core.files.atomic import FileOperation, make_directory
from vorox.core.files.file_holder import this_process
from vorox.core.schema.data import BuildPipelineConfig
from vorox.data.cache.building.commit import commit_unit
from vorox.data.cache.files.chunk import Chunk
from vorox.data.cache.files.manifest import Manifest, chunk_path, planned_entry
from vorox.data.cache.reader import CacheReader
from vorox.data.recipe import RECIPE_NAME

CORPUS = small_corpus(num_files=1, lines_per_file=21, lines_per_unit=7)
RECIPE = recipe_for(ByteTokenizer(), chunk_rows=4)
IN_ONE_THREAD = BuildPipelineConfig(staged=False)
"""Serial, because starting pipeline threads would dominate hundreds of builds of three units."""


def build_corpus(directory: Path, corpus, **options):
    return cache_corpus.build_corpus(directory, corpus, pipeline=IN_ONE_THREAD, **options)


class Cut(BaseException):
    """Simulates the death of the process by an exception."""


def with_bad_line() -> object:
    lines = CORPUS.contents[0].decode().splitlines()
    return corpus_of([[*lines[:8], "! bad", *lines[9:]]], 7)


def check_readable(directory: Path) -> int:
    """Check that all committed units are readable; return them."""
    if not (directory / RECIPE_NAME).exists():
        with pytest.raises(DataError, match="No cache here"):
            CacheReader.open(directory, RECIPE)
        return 0
    reader = CacheReader.open(directory, RECIPE, complete=False)
    reader.verify()
    reader.read_rows(np.arange(reader.num_rows))
    for row in range(reader.num_rows):
        reader.documents_of(row)
    done = len(reader.manifest.units)
    if done < 3:
        with pytest.raises(DataError, match="incomplete"):
            CacheReader.open(directory, RECIPE)
    return done


def check_completes(directory: Path, corpus, digest: str, done: int) -> int:
    """Complete the cache, check that committed units are not rebuilt, and return the number of adopted units."""
    report = build_corpus(directory, corpus, recipe=RECIPE)
    assert report.digest == digest
    assert report.units_built + report.units_adopted == 3 - done
    assert report.quarantined == 1
    reader = CacheReader.open(directory, RECIPE)
    reader.verify()
    assert (reader.manifest.units["tokens"].sum(), reader.manifest.units["documents"].sum()) == (
        report.tokens,
        report.documents,
    )
    return report.units_adopted


def test_every_prefix_of_a_build_is_readable_and_resumable(tmp_path):
    """Crash between any two operations, inside every write, and by a power cut that loses unsynced data."""
    corpus = with_bad_line()
    before, place = tmp_path / "before", tmp_path / "place"
    before.mkdir()
    place.mkdir()
    operations = record(lambda: build_corpus(place, corpus, recipe=RECIPE))
    clean = CacheReader.open(place, RECIPE)
    digest, tokens = clean.digest, clean.manifest.units["tokens"].tolist()
    done_in_order, adopted = [], 0
    for name, cut in crash_states(before, place, operations, tmp_path):
        done = check_readable(cut)
        if name.startswith("between"):
            done_in_order.append(done)
        adopted += check_completes(cut, corpus, digest, done)
        assert CacheReader.open(cut).manifest.units["tokens"].tolist() == tokens, name
    assert done_in_order == sorted(done_in_order)
    assert set(done_in_order) == {0, 1, 2, 3}
    assert adopted > 10  # chunks that were durable before the log named them are not built again


def test_a_build_interrupted_before_any_operation_continues(tmp_path):
    """The same with the files, locks and mappings of this process in the state that the exception leaves."""
    corpus = with_bad_line()
    count = len(record(lambda: build_corpus(tmp_path / "clean", corpus, recipe=RECIPE)))
    digest = CacheReader.open(tmp_path / "clean").digest
    for number in range(count):
        directory = tmp_path / "cut"
        left = number

        def cut(operation: FileOperation) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Cut

        with atomic.observe(cut), pytest.raises(Cut):
            build_corpus(directory, corpus, recipe=RECIPE)
        done = check_readable(directory)
        check_completes(directory, corpus, digest, done)
        shutil.rmtree(directory)


def test_a_repeatedly_interrupted_build_makes_progress(tmp_path):
    corpus = with_bad_line()
    digest = build_corpus(tmp_path / "clean", corpus, recipe=RECIPE).digest
    directory = tmp_path / "cut"
    for _ in range(100):
        left = 25

        def cut(operation: FileOperation) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Cut

        try:
            with atomic.observe(cut):
                report = build_corpus(directory, corpus, recipe=RECIPE)
            break
        except Cut:
            check_readable(directory)
    assert report.digest == digest


def test_files_of_dead_builders_are_removed_and_those_of_live_ones_stay(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass
    corpus = with_bad_line()
    build_corpus(tmp_path, corpus, recipe=RECIPE)
    log = tmp_path / "manifest" / "log.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    kept, left = [], []
    for place in (tmp_path, tmp_path / "manifest", tmp_path / "quarantine", tmp_path / "chunks" / "01"):
        for process_id, names in ((dead.pid, left), (os.getpid(), kept)):
            names.append(
                atomic.temporary_name(place / "name", replace(this_process(), process_id=process_id, start=""))
            )
            names[-1].write_bytes(b"half")
    build_corpus(tmp_path, corpus, recipe=RECIPE)
    assert [path for path in (*left, *kept) if path.exists()] == kept


def test_a_damaged_orphan_is_rebuilt(tmp_path):
    corpus = with_bad_line()
    digest = build_corpus(tmp_path, corpus, recipe=RECIPE).digest
    log = tmp_path / "manifest" / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    path = chunk_path(tmp_path, 2, 0)
    sound = path.read_bytes()
    other_unit = chunk_path(tmp_path, 0, 0).read_bytes()
    assert Chunk.open(path).header.num_parts >= 2
    for orphan in (sound[:-1], sound[:300] + bytes([sound[300] ^ 1]) + sound[301:], b"", other_unit, None):
        log.write_bytes(b"".join(lines[:-1]))
        path.unlink() if orphan is None else path.write_bytes(orphan)
        report = build_corpus(tmp_path, corpus, recipe=RECIPE)
        assert (report.units_built, report.units_adopted, report.digest) == (1, 0, digest)
        CacheReader.open(tmp_path).verify()
    log.write_bytes(b"".join(lines[:-1]))
    report = build_corpus(tmp_path, corpus, recipe=RECIPE)
    assert (report.units_built, report.units_adopted, report.digest) == (0, 1, digest)


def test_an_orphan_of_another_source_is_not_adopted(tmp_path):
    """Same recipe, same unit number, different text: the chunk header has the digest of its source."""
    corpus = with_bad_line()
    digest = build_corpus(tmp_path / "a", corpus, recipe=RECIPE).digest
    lines = [line[::-1] for line in corpus.contents[0].decode().splitlines()]
    lines[8] = "! bad"
    build_corpus(tmp_path / "b", corpus_of([lines], 7), recipe=RECIPE)
    log = tmp_path / "a" / "manifest" / "log.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    for source in tmp_path.glob("b/chunks/02/*.psc"):
        shutil.copyfile(source, tmp_path / "a" / "chunks" / "02" / source.name)
    report = build_corpus(tmp_path / "a", corpus, recipe=RECIPE)
    assert (report.units_built, report.digest) == (1, digest)


CHILD = """
import sys
from pathlib import Path
from cache_corpus import build_corpus, small_corpus
build_corpus(Path(sys.argv[1]), small_corpus(num_files=3, lines_per_file=240, lines_per_unit=12), on_progress=lambda _: print(flush=True))
"""  # noqa: E501


def kill_until_done(directory: Path, delays: list[float]) -> int:
    """Start builds and kill each after a while; the last one may finish. Return the number of kills."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    kills = 0
    for delay in delays:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(directory)], env=environment, stdout=subprocess.PIPE
        )  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()  # the imports are done, the build has begun
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        kills += child.returncode == -signal.SIGKILL
        if child.returncode == 0:
            break
    return kills


def check_kills(tmp_path: Path, delays: list[float]) -> None:
    corpus = small_corpus(num_files=3, lines_per_file=240, lines_per_unit=12)
    clean = build_corpus(tmp_path / "clean", corpus)
    directory = tmp_path / "killed"
    kills = kill_until_done(directory, delays)
    assert kills >= 1
    reader = CacheReader.open(directory, complete=False)
    reader.verify()
    done = len(reader.manifest.units)
    report = build_corpus(directory, corpus)
    assert report.digest == clean.digest
    assert report.units_built + report.units_adopted == clean.units - done
    CacheReader.open(directory).verify()
    left = list(directory.rglob(".tmp-*"))
    if done == clean.units:  # a complete cache is only looked at: what its dead builder called its own is for gc
        left = [path for path in left if path.parent.name not in ("leases", "manifest")]
    assert not left


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_kill_9(tmp_path):
    check_kills(tmp_path, [0.01, 0.05, 0.02])


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
@pytest.mark.parametrize("seed", range(8))
def test_kill_9_repeatedly(tmp_path, seed):
    generator = random.Random(seed)
    check_kills(tmp_path, [generator.uniform(0, 0.15) for _ in range(8)])


def test_the_name_of_an_adopted_chunk_is_durable_before_its_log_entry(tmp_path):
    """Its writer may have died, or lost power, before the directory was synced."""
    corpus = with_bad_line()
    build_corpus(tmp_path, corpus, recipe=RECIPE)
    log = tmp_path / "manifest" / "log.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    kinds = [
        (operation.kind, operation.path) for operation in record(lambda: build_corpus(tmp_path, corpus, recipe=RECIPE))
    ]
    synced = kinds.index(("fsync_directory", chunk_path(tmp_path, 2, 0).parent))
    assert synced < kinds.index(("write", log))


@pytest.mark.parametrize("replace", [False, True])
def test_rows_committed_by_another_builder_are_not_replaced_by_different_ones(tmp_path, replace):
    """A builder's state may be older than the log: the committed units are known only under the lock."""
    first, second = small_corpus(num_files=1, seed=1), small_corpus(num_files=1, seed=2)
    stale = Manifest.empty()
    make_directory(tmp_path / "manifest")
    stale = stale.commit(tmp_path, [planned_entry(2, num_files=1)])
    (unit,) = work_of(first).run(first.units[:1])
    (other,) = work_of(second).run(second.units[:1])

    def commit(built, work):
        return commit_unit(stale, tmp_path, built, work, replace=replace)

    now, counts = commit(unit, work_of(first))
    assert (now.has_unit(0), counts) == (True, True)
    path = chunk_path(tmp_path, 0, 0)
    content = path.read_bytes()
    with pytest.raises(DataError, match="different rows"):
        commit(other, work_of(second))
    assert path.read_bytes() == content
    assert Manifest.open(tmp_path).unit_chunks(0) == [record for _, record in unit.chunks]
    assert not list(tmp_path.rglob(".tmp-*"))
