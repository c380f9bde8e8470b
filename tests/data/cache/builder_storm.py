"""Kill builders at random times, two at a time, while a reader runs. Run as a program, because it forks.

python -m data.cache.builder_storm DIRECTORY KILLS SEED BREAKING
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cache_corpus import build_corpus, small_corpus, work_of
from vorox.core.errors import DataError
from vorox.data.cache.build import BuildOptions, build, rebuild_unit
from vorox.data.cache.files.manifest import Manifest
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.units.unit_builder import UnitBuilder

CORPUS = small_corpus(num_files=3, lines_per_file=40, lines_per_unit=5)
NUM_UNITS = len(CORPUS.units)


def rows_of_units(reader: CacheReader) -> dict[int, str]:
    """Hash the rows of every committed unit."""
    starts = reader.unit_row_starts
    found: dict[int, str] = {}
    for unit in reader.manifest.units["unit"].tolist():
        block = reader.read_rows(np.arange(starts[unit], starts[unit + 1]))
        content = [block.tokens_NC, block.row_ptr, block.segment_lengths, block.segment_document_offsets]
        found[unit] = hashlib.sha256(b"".join(array.tobytes() for array in content)).hexdigest()
    return found


def forked(action: Callable[[], object]) -> int:
    """Run a function in a forked process, which exits with 0 unless it fails; forking makes hundreds cheap."""
    child = os.fork()
    if child:
        return child
    try:
        action()
        os._exit(0)
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        os._exit(1)


def read_all_the_while(directory: Path, expected: dict[int, str], work: UnitBuilder, ended: Path) -> None:
    """Act as a trainer: one reader that refreshes, and a second one that reopens the cache repeatedly."""
    while not (directory / "RECIPE.json").exists():
        time.sleep(0.001)
    repair = functools.partial(rebuild, directory, work)
    reader = CacheReader.open(directory, complete=False)
    reader.repair = repair
    while not ended.exists():
        reader = reader.refreshed()
        other = CacheReader.open(directory, complete=False)
        other.repair = repair
        for seen in (reader, other):
            found = rows_of_units(seen)
            assert found == {unit: expected[unit] for unit in found}


def rebuild(directory: Path, work: UnitBuilder, unit: int, error: DataError) -> None:
    rebuild_unit(directory, work, CORPUS.units, unit)


def break_something(directory: Path, generator: random.Random) -> None:
    """Delete or truncate a chunk file, or flip one of its bits, as a failing disk does."""
    paths = sorted(directory.glob("chunks/*/u*.psc"))
    if not paths:
        return
    path = generator.choice(paths)
    kind = generator.randrange(3)
    try:
        if kind == 0:
            path.unlink()
            return
        raw = bytearray(path.read_bytes())
        if kind == 1 or not raw:
            raw = raw[: generator.randrange(max(len(raw), 1))]
        else:
            raw[generator.randrange(len(raw))] ^= 1 << generator.randrange(8)
        other = path.with_name(f".broken-{path.name}")
        other.write_bytes(raw)
        other.replace(path)
    except FileNotFoundError:
        pass


def storm(tmp_path: Path, clean: CacheReader, num_kills: int, seed: int, *, breaking: bool) -> int:
    """Kill builders of both directions at random times, two at a time, on cache after cache."""
    generator = random.Random(seed)
    expected = rows_of_units(clean)
    kills = number = 0
    while kills < num_kills:
        number += 1
        kills += storm_on(tmp_path / str(number), clean.digest, expected, num_kills - kills, generator, breaking)
    return kills


def storm_on(
    directory: Path, digest: str, expected: dict[int, str], num_kills: int, generator: random.Random, breaking: bool
) -> int:
    """Do the same on one cache until it is complete; return the number of kills."""
    work, ended = work_of(CORPUS), directory.with_suffix(".ended")
    reading = forked(lambda: read_all_the_while(directory, expected, work, ended))
    kills = 0
    while kills < num_kills and not is_complete(directory):
        children = [
            forked(lambda mode=mode: build(directory, work, CORPUS.units, BuildOptions(mode=mode)))
            for mode in ("forward", "inverse")
        ]
        time.sleep(generator.uniform(0.0, 0.04))
        if breaking and generator.random() < 0.5:
            break_something(directory, generator)
        for child in children:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            kills += os.WIFSIGNALED(status)
    assert build(directory, work, CORPUS.units, BuildOptions(verify="full")).digest == digest
    ended.touch()
    _, status = os.waitpid(reading, 0)
    assert status == 0, "the reader failed"
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


if __name__ == "__main__":
    place, kills, seed, breaking = sys.argv[1:]
    build_corpus(Path(place) / "clean", CORPUS)
    clean = CacheReader.open(Path(place) / "clean")
    print(storm(Path(place), clean, int(kills), int(seed), breaking=breaking == "True"))
