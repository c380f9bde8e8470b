"""Erased documents: their tokens are in no file of the cache, all else stays, and no repair brings them back."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import lz4.block
import numpy as np
import numpy.typing as npt
import pytest
import zstandard

from cache_corpus import ByteTokenizer, Corpus, build_corpus, corpus_of, recipe_for, work_of
from crash_enumeration import crash_states, record
from vorox.core.errors import ConfigError, DataError
from vorox.core.files.atomic import temporary_name
from vorox.core.files.file_holder import this_process
from vorox.core.schema.data import BuildPipelineConfig, TransformConfig
from vorox.data.cache.build import BuildOptions
from vorox.data.cache.build import build as cache_build
from vorox.data.cache.building.commit import commit_unit
from vorox.data.cache.files.chunk import Chunk
from vorox.data.cache.files.leases import Leases
from vorox.data.cache.files.manifest import LOG_NAME, SNAPSHOT_NAME, Manifest, chunk_path
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.upkeep.erasure import Erased, erase_documents
from vorox.data.cache.upkeep.replacement import replacing
from vorox.data.transforms.registry import recipe_of, resolve_transforms

pytestmark = pytest.mark.slow

RECIPE = recipe_for(ByteTokenizer(), chunk_rows=4)
SERIAL = BuildPipelineConfig(staged=False)
PATTERN_TOKENS = 6
"""So many tokens in a row of a document are in no other one: its letters are drawn from 26."""


def corpus(seed: int | None = None, files: int = 2) -> Corpus:
    """Lines of random letters, always other ones; some longer than several rows, some than a chunk."""
    chooser = random.Random(seed)
    made = corpus_of(
        [["".join(chooser.choices("abcdefghijklmnopqrstuvwxyz", k=chooser.choice([9, 20, 70, 200]))) for _ in range(30)]
         for _ in range(files)], 15,
    )  # fmt: skip
    versions = [hashlib.sha256(content).hexdigest() for content in made.contents]
    return replace(made, files=tuple(replace(one, version=v) for one, v in zip(made.files, versions, strict=True)))


def blocks(path: Path) -> Iterator[bytes]:
    """The rows of a chunk file, read without the code under test: by the offsets in its header, block by block."""
    raw = path.read_bytes()
    token_bytes, codec = raw[16], raw[17]
    row_tokens, num_rows, block_rows = struct.unpack_from("<III", raw, 20)
    payload, payload_bytes, index, index_bytes = struct.unpack_from("<4Q", raw, 48)
    flags = raw[12]
    row_bytes = row_tokens * token_bytes + (-(-row_tokens // 8) if flags & 1 else 0)
    at = payload
    for number in range(index_bytes // 8):
        (size,) = struct.unpack_from("<I", raw, index + 8 * number)
        rows = min(block_rows, num_rows - number * block_rows)
        stored, wanted = raw[at : at + size], rows * row_bytes
        at += size
        if size == wanted:
            yield stored
        elif codec == 3:
            yield zstandard.ZstdDecompressor().decompress(stored)
        else:
            yield lz4.block.decompress(stored, uncompressed_size=wanted)
    assert at == payload + payload_bytes


def holds(directory: Path, text: str, hash_of_text: int | None = None) -> list[Path]:
    """The files below a directory with any piece of a text, as tokens of two bytes or as it is, or with its hash."""
    pieces = [text[at : at + PATTERN_TOKENS] for at in range(len(text) - PATTERN_TOKENS + 1)]
    needles = [piece.encode("utf-16-le") for piece in pieces] + [piece.encode() for piece in pieces]
    needles += [] if hash_of_text is None else [struct.pack("<Q", hash_of_text)]
    found = []
    for path in (path for path in directory.rglob("*") if path.is_file()):
        parts = [path.read_bytes(), *(blocks(path) if path.suffix == ".psc" and ".tmp-" not in path.name else ())]
        if any(needle in part for needle in needles for part in parts):
            found.append(path)
    return found


def rows(directory: Path) -> tuple[npt.NDArray[np.integer], list[list]]:
    reader = CacheReader.open(directory)
    return reader.read_rows(np.arange(reader.num_rows)).tokens_NC, [
        reader.documents_of(row) for row in range(reader.num_rows)
    ]


def check_erased(directory: Path, before: tuple, ordinals: set[tuple[int, int]]) -> None:
    """Everything is as before, except the tokens of these documents (file, ordinal), which are the end of text."""
    (tokens_before, spans_before), (tokens, spans) = before, rows(directory)
    reader = CacheReader.open(directory)
    reader.verify()
    erased_NC = reader.read_rows(np.arange(reader.num_rows)).erased_NC
    seen = set()
    for row, parts in enumerate(spans):
        end = 0
        for part, part_before in zip(parts, spans_before[row], strict=True):
            start, end = end, end + part.length
            place = part.file_index, part.ordinal
            assert part.is_erased == (place in ordinals)
            assert erased_NC is not None
            assert (erased_NC[row, start:end] == part.is_erased).all()
            if part.is_erased:
                seen.add(place)
                assert (tokens[row, start:end] == 256).all()
                assert part == part_before._replace(text_xxh3=0, is_erased=True)
            else:
                assert (tokens[row, start:end] == tokens_before[row, start:end]).all()
                assert part == part_before
        assert (tokens[row, end:] == tokens_before[row, end:]).all()
    assert seen == ordinals


def erase(directory: Path, made: Corpus, *places: tuple[int, int]) -> Erased:
    return erase_documents(directory, [(made.files[file].version, ordinal) for file, ordinal in places])


def text_of(made: Corpus, place: tuple[int, int]) -> str:
    return made.contents[place[0]].decode().splitlines()[place[1]]


def build(directory: Path, made: Corpus, **options) -> None:
    build_corpus(directory, made, recipe=options.pop("recipe", RECIPE), pipeline=SERIAL, **options)


@pytest.mark.parametrize("codec", ["lz4", "zstd", "raw"])
def test_an_erased_document_is_in_no_file_and_all_else_stays(tmp_path: Path, codec: str) -> None:
    made, cache = corpus(), tmp_path / "cache"
    build(cache, made, codec=codec)
    before, digest = rows(cache), CacheReader.open(cache).digest
    texts = [text_of(made, (file, ordinal)) for file in range(2) for ordinal in range(30)]
    wanted = {(file, ordinal) for file in range(2) for ordinal in random.sample(range(30), 2)}
    wanted.add((0, max(range(30), key=lambda ordinal: len(texts[ordinal]))))  # over several rows
    hashes = {(part.file_index, part.ordinal): part.text_xxh3 for parts in before[1] for part in parts}
    for place in wanted:
        assert holds(cache, text_of(made, place), hashes[place]), "the oracle finds what is there"
    done = erase(cache, made, *wanted)
    assert done.awaited == done.remaining == ()
    assert {path.suffix for path in done.chunks} == {".psc"}
    for place in wanted:
        assert not holds(cache, text_of(made, place), hashes[place])
    for place in {(file, ordinal) for file in range(2) for ordinal in range(30)} - wanted:
        assert holds(cache, text_of(made, place), hashes[place])
    check_erased(cache, before, wanted)
    assert CacheReader.open(cache).digest == digest
    files = {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}
    assert erase(cache, made, *wanted).chunks == ()
    assert {path: path.read_bytes() for path in files} == files, "a second time nothing is left to do"
    (more,) = random.sample(sorted({(1, ordinal) for ordinal in range(30)} - wanted), 1)
    erase(cache, made, more)
    check_erased(cache, before, wanted | {more})
    assert not holds(cache, text_of(made, more))
    Manifest.open(cache).write_snapshot(cache)
    assert Manifest.open(cache).erased == Manifest.read_log(cache).erased
    check_erased(cache, before, wanted | {more})


def test_a_crash_at_any_point_leaves_a_readable_cache_and_the_next_call_finishes(
    tmp_path: Path,
) -> None:
    made = corpus(files=1)
    build(tmp_path / "cache", made)
    before, place = rows(tmp_path / "cache"), (0, 29)
    shutil.copytree(tmp_path / "cache", tmp_path / "before")
    operations = record(lambda: erase(tmp_path / "cache", made, place))
    assert [one.kind for one in operations].count("rename") >= 1
    finished = 0
    for name, crashed in crash_states(tmp_path / "before", tmp_path / "cache", operations, tmp_path / "scratch"):
        again = tmp_path / "repaired" / name
        shutil.copytree(crashed, again)
        reader = CacheReader.open(crashed)
        block = reader.read_rows(np.arange(reader.num_rows))
        is_same = (block.tokens_NC == before[0]).all(axis=1)
        assert is_same.all() or block.erased_NC is not None, "a hole is always known as one"
        named = bool(reader.manifest.erased)
        finished += named
        erase(crashed, made, place)
        check_erased(crashed, before, {place})
        assert not holds(crashed, text_of(made, place))
        build(again, made, verify="full")  # a repair finishes what the manifest names
        if named:
            check_erased(again, before, {place})
            assert not [path for path in holds(again, text_of(made, place)) if ".tmp-" not in path.name]
        else:
            CacheReader.open(again).verify()
    assert finished > 5


def test_no_repair_and_no_rebuild_brings_a_document_back(tmp_path: Path) -> None:
    made, cache = corpus(), tmp_path / "caches" / "cache"
    build(cache, made)
    before, place = rows(cache), (1, 17)
    erase(cache, made, place)
    unit = next(one for one in range(4) if Manifest.open(cache).erased_in(one))
    files = {path: path.read_bytes() for path in (cache / "chunks").rglob("*.psc")}
    for damage in ("lost", "damaged"):
        for one in Manifest.open(cache).unit_chunks(unit):
            path = chunk_path(cache, one.unit, one.part)
            if damage == "lost":
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[:-40] + bytes(40))
        build(cache, made, verify="full")
        check_erased(cache, before, {place})
        assert {path: path.read_bytes() for path in files} == files, "built again, the same bytes are erased"
    for is_damaged in (False, True):
        if is_damaged:  # --force-rebuild is what its error advises
            (cache / LOG_NAME).write_bytes(b"nothing\n")
            (cache / SNAPSHOT_NAME).unlink(missing_ok=True)
        with replacing(cache, wanted=True) as rebuilt:
            build(rebuilt, made)
        check_erased(cache, before, {place})
    assert not holds(cache.parent, text_of(made, place))


def test_a_document_is_erased_from_the_shared_units_and_named_where_it_is_left(tmp_path: Path) -> None:
    made, root = corpus(), tmp_path / "caches"
    (root / "units").mkdir(parents=True)
    build(root / "one", made)
    build(root / "two", made)
    build(root / "other", made, recipe=recipe_for(ByteTokenizer(), row_tokens=65))
    before, place = rows(root / "one"), (0, 3)
    text = text_of(made, place)
    assert {path.relative_to(root).parts[0] for path in holds(root, text)} == {"one", "two", "other", "units"}
    done = erase(root / "one", made, place)
    assert set(done.remaining) == set(holds(root, text))
    assert {path.relative_to(root).parts[0] for path in done.remaining} == {"two", "other", "units"}
    erase(root / "two", made, place)
    assert erase(root / "other", made, place).remaining == ()
    assert not holds(root, text)
    for path in (root / "one" / "chunks").rglob("*.psc"):
        path.unlink()
    build(root / "one", made, verify="quick")
    check_erased(root / "one", before, {place})
    assert not holds(root, text), "a unit that was built again is not shared with its document"
    build(root / "three", made)  # a new cache has what its source has
    assert holds(root / "three", text)


def test_a_document_of_a_unit_that_is_not_built_is_erased_as_it_is_built(tmp_path: Path) -> None:
    made, cache, whole = corpus(), tmp_path / "cache", tmp_path / "whole"
    build(whole, made)
    build(cache, made, last_unit=2)
    place = (1, 20)
    assert erase(cache, made, place).awaited == ((made.files[1].version, 20),)
    build(cache, made)
    check_erased(cache, rows(whole), {place})
    assert not holds(cache, text_of(made, place))


def test_a_shared_unit_is_not_linked_where_a_document_of_it_was_erased(tmp_path: Path) -> None:
    made, root, place = corpus(), tmp_path / "caches", (1, 20)
    (root / "units").mkdir(parents=True)
    build(root / "one", made, last_unit=2)
    build(root / "whole", made)
    done = erase(root / "one", made, place)
    assert done.awaited == ((made.files[1].version, 20),)
    assert {path.relative_to(root).parts[0] for path in done.remaining} == {"whole", "units"}
    build(root / "one", made)
    check_erased(root / "one", rows(root / "whole"), {place})
    assert not holds(root / "one", text_of(made, place))


def test_unknown_documents_and_damaged_chunks_change_nothing(tmp_path: Path) -> None:
    made, cache = corpus(), tmp_path / "cache"
    build(cache, made)
    files = {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}
    for unknown, words in (
        ((made.files[0].version, 30), "no record 30 of /corpus/0.txt"), (("v", 0), "no file of version v"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            erase_documents(cache, [(made.files[0].version, 3), unknown])
        assert {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()} == files
    path = chunk_path(cache, 0, 0)
    raw = bytearray(path.read_bytes())
    raw[300] ^= 1
    path.write_bytes(raw)
    documents = Chunk.open(path).documents()["ordinal"].tolist()
    with pytest.raises(DataError, match="Damaged chunk"):
        erase(cache, made, (0, documents[0]))
    assert {path for path in cache.rglob("*") if path.is_file()} == set(files)
    assert Manifest.open(cache).erased == frozenset()


def test_a_changed_bit_of_an_erased_chunk_is_found(tmp_path: Path) -> None:
    made, cache = corpus(files=1), tmp_path / "cache"
    build(cache, made)
    (path, *_) = erase(cache, made, (0, 5)).chunks
    raw = path.read_bytes()
    for at in random.sample(range(len(raw)), 40):
        changed = bytearray(raw)
        changed[at] ^= 1 << random.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(DataError):
            CacheReader.open(cache).verify()
    path.write_bytes(raw)
    CacheReader.open(cache).verify()


def test_a_reader_that_was_open_before_sees_the_hole_when_it_opens_the_file(tmp_path: Path) -> None:
    made, cache = corpus(files=1), tmp_path / "cache"
    build(cache, made)
    late, early = CacheReader.open(cache), CacheReader.open(cache)
    every = np.arange(early.num_rows)
    kept = early.read_rows(every).tokens_NC
    erase(cache, made, (0, 5))
    assert (early.read_rows(every).tokens_NC == kept).all(), "what is mapped stays readable"
    assert early.read_rows(every).erased_NC is None
    block = late.read_rows(every)
    assert block.erased_NC is not None
    assert not (block.tokens_NC == kept).all()


def doubled(text: str) -> list[str]:
    return [text, text[::-1]]


sys.modules["erasure_transforms"] = sys.modules[__name__]


def test_all_texts_of_a_record_are_erased_and_signatures_of_duplicates_are_named(tmp_path: Path) -> None:
    made, cache, place = corpus(files=1), tmp_path / "cache", (0, 11)
    transforms = resolve_transforms(
        [TransformConfig(name="exact_duplicates"), TransformConfig(name="erasure_transforms:doubled")],
        "train", "data.transforms",
    )  # fmt: skip
    recipe = recipe_for(ByteTokenizer(), transforms=recipe_of(transforms, 0))
    work = replace(work_of(made, recipe=recipe, pipeline=SERIAL), transforms=transforms)
    cache_build(cache, work, made.units)
    before, text = rows(cache), text_of(made, place)
    assert holds(cache, text)
    assert holds(cache, text[::-1])
    done = erase(cache, made, place)
    assert not holds(cache, text)
    assert not holds(cache, text[::-1])
    unit = next(iter(Manifest.open(cache).erased))[0]
    assert done.remaining == (cache / "duplicates" / "0" / f"u{unit:09d}.bin",)
    tokens, spans = rows(cache)
    for row, parts in enumerate(spans):
        ends = np.cumsum([part.length for part in parts])
        for part, end in zip(parts, ends.tolist(), strict=True):
            here = tokens[row, end - part.length : end]
            assert part.is_erased == (part.ordinal == 11)
            assert (here == (256 if part.is_erased else before[0][row, end - part.length : end])).all()
    chunk_path(cache, unit, 0).unlink()
    cache_build(cache, work, made.units, BuildOptions(verify="quick"))
    assert (rows(cache)[0] == tokens).all()


def test_left_files_of_dead_builders_are_erased_too(tmp_path: Path) -> None:
    made, cache, place = corpus(files=1), tmp_path / "cache", (0, 11)
    build(cache, made)
    unit = 0
    for one in Manifest.open(cache).unit_chunks(unit):
        path = chunk_path(cache, unit, one.part)
        shutil.copyfile(path, chunk_path(cache, unit, 70 + one.part))
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            process.wait()
        writer = replace(this_process(), process_id=process.pid, start="")
        shutil.copyfile(path, temporary_name(path, writer))
    erase(cache, made, place)
    assert not holds(cache, text_of(made, place))
    assert not list(cache.rglob(".tmp-*"))


def test_a_cache_that_is_being_built_is_refused(tmp_path: Path) -> None:
    made, cache = corpus(files=1), tmp_path / "cache"
    build(cache, made)
    with Leases(cache) as leases:
        assert leases.acquire(1)
        with pytest.raises(ConfigError, match="is being built by") as caught:
            erase(cache, made, (0, 3))
    assert "then erase the documents" in caught.value.hint
    assert Manifest.open(cache).erased == frozenset()


@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_a_unit_that_was_built_before_the_erasure_is_erased_as_it_is_committed(
    tmp_path: Path, is_rebuilt: bool
) -> None:
    """A builder's state may be older than the log."""
    made, cache, whole, place = corpus(files=1), tmp_path / "cache", tmp_path / "whole", (0, 20)
    build(whole, made)
    build(cache, made, last_unit=None if is_rebuilt else 1)
    work = work_of(made, recipe=RECIPE, pipeline=SERIAL)
    (built,) = work.run([made.units[1]])
    stale = Manifest.open(cache)
    erase(cache, made, place)
    commit_unit(stale, cache, built, work, replace=is_rebuilt)
    check_erased(cache, rows(whole), {place})
    assert not holds(cache, text_of(made, place))


def test_versions_that_do_not_know_erasure_refuse_the_cache(tmp_path: Path) -> None:
    """They refuse flags, kinds of entries and snapshots that they do not know; caches without erasure have none."""
    made, cache = corpus(files=1), tmp_path / "cache"
    build(cache, made)

    def facts() -> tuple[set[int], bool, bytes]:
        Manifest.open(cache).write_snapshot(cache)
        flags = {path.read_bytes()[12] for path in cache.rglob("*.psc")}
        return flags, b"erased" in (cache / LOG_NAME).read_bytes(), (cache / SNAPSHOT_NAME).read_bytes()[:8]

    assert facts() == ({0}, False, b"VXSNAP5\n")
    erase(cache, made, (0, 3))
    assert facts() == ({0, 2}, True, b"VXSNAP6\n")
    for entry in (
        '{"unit": 9, "file": 0, "ordinal": 0}',
        '{"unit": 0, "file": 0}',
        '{"unit": 0, "file": 0, "ordinal": -1}',
    ):
        with pytest.raises(DataError, match="manifest is inconsistent"):
            Manifest.open(cache).commit(cache, [{"erased": [json.loads(entry)]}])
        log = cache / LOG_NAME
        log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
