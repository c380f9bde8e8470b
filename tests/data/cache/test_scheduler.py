"""Building: every token is stored once, the digest does not depend on the way, and bad input is reported."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import re
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from cache_corpus import ByteTokenizer, Corpus, build_corpus, corpus_of, recipe_for, small_corpus, work_of
from vorox.core.errors import DataError
from vorox.core.files import atomic
from vorox.core.files.atomic import FileOperation
from vorox.data.cache.build import build
from vorox.data.cache.building import scheduler
from vorox.data.cache.files.chunk import Chunk
from vorox.data.cache.files.leases import Leases
from vorox.data.cache.files.manifest import SNAPSHOT_NAME, Manifest, chunk_path
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.units.packing import pack

TOKENIZER = ByteTokenizer()


def all_rows(reader: CacheReader) -> list[list[tuple[int, ...]]]:
    """Segments of every row as tuples of tokens."""
    block = reader.read_rows(np.arange(reader.num_rows))
    rows = []
    for row in range(block.num_rows):
        lengths = block.segment_lengths[block.row_ptr[row] : block.row_ptr[row + 1]].tolist()
        ends = np.cumsum(lengths).tolist()
        tokens = block.tokens_NC[row].tolist()
        assert all(token == TOKENIZER.end_of_text_id for token in tokens[ends[-1] :])  # padding
        rows.append([tuple(tokens[end - length : end]) for end, length in zip(ends, lengths, strict=True)])
    return rows


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
@pytest.mark.parametrize(("codec", "block_rows"), [("lz4", None), ("lz4hc", 1), ("raw", 3), ("zstd", 2)])
def test_every_pair_of_neighbouring_tokens_is_in_the_cache_exactly_once(tmp_path, packing, codec, block_rows):
    corpus = small_corpus()
    recipe = recipe_for(TOKENIZER, packing=packing)
    report = build_corpus(tmp_path, corpus, recipe=recipe, codec=codec, block_rows=block_rows)
    reader = CacheReader.open(tmp_path, recipe)
    reader.verify()
    assert reader.token_bytes == 2
    expected, found = Counter(), Counter()
    num_tokens = 0
    for document in corpus.documents():
        tokens = [*TOKENIZER.encode(document.text).tolist(), TOKENIZER.end_of_text_id]
        num_tokens += len(tokens)
        expected.update(itertools.pairwise(tokens))
    rows = all_rows(reader)
    for segment in (segment for row in rows for segment in row):
        found.update(itertools.pairwise(segment))
    assert found == expected
    assert report.tokens == num_tokens
    assert report.documents == len(corpus.documents())
    assert report.text_bytes == sum(len(document.text.encode()) for document in corpus.documents())
    assert report.rows == len(rows) == reader.num_rows
    assert report.padding_tokens == sum(33 - sum(map(len, row)) for row in rows)
    assert report.utilisation_fraction == 1 - report.padding_tokens / (33 * len(rows))
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("chunks/*/*.psc"))]
    assert report.compressed_bytes == sum(sizes)
    assert report.ratio_to_uint32 == sum(sizes) / (4 * 33 * len(rows))
    assert report.units == report.units_built == 4
    assert report.digest == reader.digest


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_documents_of_a_row_are_exactly_its_tokens(tmp_path, packing):
    corpus = small_corpus(seed=8)
    build_corpus(tmp_path, corpus, recipe=recipe_for(TOKENIZER, packing=packing))
    reader = CacheReader.open(tmp_path)
    contents = {file.uri: content for file, content in zip(corpus.files, corpus.contents, strict=True)}
    for number, row in enumerate(all_rows(reader)):
        spans = reader.documents_of(number)
        assert len(spans) == len(row)
        for span, segment in zip(spans, row, strict=True):
            record = contents[span.uri][span.byte_offset : span.byte_offset + span.byte_length]
            tokens = [*TOKENIZER.encode(record.decode().rstrip("\n")).tolist(), TOKENIZER.end_of_text_id]
            assert segment == tuple(tokens[span.document_token_offset :][: span.length])
            assert len(segment) == span.length
    # The chunks also record where each document is in its file and what its text hashes to.
    chunk = Chunk.open(chunk_path(tmp_path, 0, 0))
    ordinals = chunk.documents()["ordinal"].tolist()
    assert ordinals == sorted(set(ordinals))


def test_digest_is_frozen(tmp_path):
    """Existing caches can be extended and repaired only while this value is unchanged."""
    report = build_corpus(tmp_path, small_corpus())
    assert report.digest == "f539db3a77fc8c8c4661eaa6de90ff921cfa4a07b684cf729293079a5235016d"


def test_codec_and_blocks_do_not_change_the_digest_and_every_value_of_the_recipe_may(tmp_path):
    corpus = small_corpus()
    digests = {
        build_corpus(tmp_path / f"{codec}{rows}", corpus, codec=codec, block_rows=rows).digest
        for codec, rows in (("lz4", None), ("raw", 1), ("lz4hc", 5), ("zstd", None))
    }
    assert len(digests) == 1
    for number, changes in enumerate(({"row_tokens": 65}, {"packing": "concat"}, {"chunk_rows": 5}), 1):
        digests.add(build_corpus(tmp_path / str(number), corpus, recipe=recipe_for(TOKENIZER, **changes)).digest)
        assert len(digests) == 1 + number


def test_the_location_of_the_source_does_not_change_the_digest(tmp_path):
    corpus = small_corpus()
    moved = dataclasses.replace(
        corpus, files=tuple(dataclasses.replace(file, uri="/elsewhere" + file.uri) for file in corpus.files)
    )
    recipe = recipe_for(TOKENIZER, source={"paths": ["/elsewhere"]})
    first = build_corpus(tmp_path / "a", corpus).digest
    assert build_corpus(tmp_path / "b", moved, recipe=recipe).digest == first


def test_a_complete_cache_is_only_read(tmp_path):
    corpus = small_corpus()
    first = build_corpus(tmp_path, corpus)
    operations: list[FileOperation] = []
    with atomic.observe(operations.append):
        second = build_corpus(tmp_path, corpus)
    assert operations == []
    assert (second.digest, second.units_built, second.tokens) == (first.digest, 0, first.tokens)


def test_a_source_may_grow_and_addresses_stay(tmp_path):
    corpus = small_corpus(num_files=3)
    early = dataclasses.replace(corpus, files=corpus.files[:2], units=corpus.units[:3])
    build_corpus(tmp_path / "extended", early)
    before = all_rows(CacheReader.open(tmp_path / "extended"))
    report = build_corpus(tmp_path / "extended", corpus)
    assert report.units_built == len(corpus.units) - 3
    assert report.digest == build_corpus(tmp_path / "clean", corpus).digest
    assert all_rows(CacheReader.open(tmp_path / "extended"))[: len(before)] == before


def test_rows_of_a_unit_are_not_stored_by_length(tmp_path):
    """Packing sorts by length; in the cache, position and document length must be uncorrelated."""
    generator = np.random.default_rng(4)
    lines = ["x" * int(n) for n in generator.lognormal(4.5, 0.8, 3000).clip(2, 250)]
    build_corpus(tmp_path, corpus_of([lines], 5000), recipe=recipe_for(TOKENIZER, 257, 128))
    reader = CacheReader.open(tmp_path)
    longest = [max(map(len, row)) for row in all_rows(reader)]
    packing = pack([len(line) + 1 for line in lines], 257)
    packed = np.maximum.reduceat(packing.lengths, packing.row_ptr[:-1]).tolist()
    assert sorted(packed) == sorted(longest)

    def correlation(values: list[int]) -> float:
        ranks = np.argsort(np.argsort(values, kind="stable"))
        return abs(float(np.corrcoef(ranks, np.arange(len(values)))[0, 1]))

    assert correlation(packed) > 0.5
    assert correlation(longest) < 3 / np.sqrt(len(longest))


def test_large_vocabularies_take_four_bytes(tmp_path):
    tokenizer = ByteTokenizer(scale=300)
    build_corpus(tmp_path, small_corpus(), tokenizer=tokenizer)
    reader = CacheReader.open(tmp_path)
    tokens_NC = reader.read_rows(np.arange(reader.num_rows)).tokens_NC
    assert (reader.token_bytes, tokens_NC.dtype) == (4, np.uint32)
    assert int(tokens_NC.max()) == tokenizer.end_of_text_id == 76_800
    assert int(np.median(tokens_NC)) // 300 in range(97, 123)


def test_progress_counts_up_to_the_report(tmp_path):
    seen = []
    report = build_corpus(tmp_path, small_corpus(), on_progress=seen.append)
    assert [progress.units_done for progress in seen] == sorted(progress.units_done for progress in seen)
    last = seen[-1]
    assert (last.units_done, last.units) == (4, 4)
    assert (last.documents, last.text_bytes, last.tokens) == (report.documents, report.text_bytes, report.tokens)


def test_a_builder_waits_for_units_of_another_builder(tmp_path):
    corpus = small_corpus()
    seen = []
    waiting = threading.Event()

    def watch(progress):
        seen.append(progress)
        if progress.waiting_for:
            waiting.set()

    directory = tmp_path / "cache"
    with Leases(directory) as leases:
        assert leases.acquire(2)
        thread = threading.Thread(target=build_corpus, args=(directory, corpus), kwargs={"on_progress": watch})
        thread.start()
        assert waiting.wait(20)
        assert Manifest.open(directory).missing_units().tolist() == [2]
    thread.join(20)
    assert "process" in next(progress.waiting_for for progress in seen if progress.waiting_for)
    assert seen[-1].waiting_for == ""
    CacheReader.open(directory).verify()


def test_long_logs_get_a_snapshot(tmp_path, monkeypatch):
    build_corpus(tmp_path / "measured", corpus_of([["a", "b", "c"]], 1))
    three_units_bytes = Manifest.read_log(tmp_path / "measured").position.end_bytes
    monkeypatch.setattr(scheduler, "SNAPSHOT_FROM_BYTES", three_units_bytes + 1)
    build_corpus(tmp_path / "short", corpus_of([["a", "b", "c"]], 1))
    assert not (tmp_path / "short" / SNAPSHOT_NAME).exists()
    build_corpus(tmp_path, corpus_of([["a", "b", "c", "d"]], 1))
    assert (tmp_path / SNAPSHOT_NAME).exists()
    assert Manifest.open(tmp_path).chunks.tobytes() == Manifest.read_log(tmp_path).chunks.tobytes()


# Bad input


def with_bad_lines(bad: set[int], num_lines: int = 40) -> Corpus:
    return corpus_of([[("! " if n in bad else "") + f"line number {n}" for n in range(num_lines)]], num_lines)


def test_bad_records_are_quarantined_with_their_place(tmp_path):
    corpus = with_bad_lines({3, 20})
    report = build_corpus(tmp_path, corpus, bad_record_fraction=0.05)
    assert (report.quarantined, report.documents) == (2, 38)
    entries = [json.loads(line) for line in (tmp_path / "quarantine" / "u000000000.jsonl").read_text().splitlines()]
    assert [(entry["uri"], entry["line"], entry["ordinal"], entry["reason"]) for entry in entries] == [
        ("/corpus/0.txt", 4, 3, "begins with an exclamation mark"),
        ("/corpus/0.txt", 21, 20, "begins with an exclamation mark"),
    ]
    record = corpus.contents[0][entries[0]["byte_offset"] :][: entries[0]["byte_length"]]
    assert record == b"! line number 3\n"
    # They keep their ordinals, so what follows them is where it was.
    reader = CacheReader.open(tmp_path)
    assert 4 in {span.ordinal for row in range(reader.num_rows) for span in reader.documents_of(row)}


def test_quarantined_records_are_reported_once(tmp_path, caplog):
    for _ in range(2):  # the second build finds the cache complete
        build_corpus(tmp_path, with_bad_lines({3, 4, 5, 20}), bad_record_fraction=0.1)
    (warning,) = [record for record in caplog.records if getattr(record, "event_kind", "") == "quarantine"]
    assert warning.event_fields["count"] == 4
    for expected in ("4 unreadable records", "/corpus/0.txt:4: begins with", "1 more", str(tmp_path / "quarantine")):
        assert expected in warning.getMessage()


def test_a_source_of_bad_records_alone_is_refused_with_the_first(tmp_path):
    with pytest.raises(DataError) as caught:
        build_corpus(tmp_path, with_bad_lines({0, 1, 2}, num_lines=3), bad_record_fraction=1.0)
    assert caught.value.exit_code == 4
    assert caught.value.where == "/corpus/0.txt:1"
    assert "begins with an exclamation mark" in caught.value.what
    assert str(tmp_path / "quarantine") in caught.value.hint


@pytest.mark.parametrize(("num_bad", "fraction", "passes"), [(1, 0.001, True), (2, 0.001, False), (5, 0.05, True),
                                                             (6, 0.05, False), (1, 0.0, False)])  # fmt: skip
def test_budget_is_the_fraction_of_a_hundred_records_at_least_rounded_up(tmp_path, num_bad, fraction, passes):
    corpus = with_bad_lines(set(range(5, 5 + num_bad)))
    if passes:
        assert build_corpus(tmp_path, corpus, bad_record_fraction=fraction).quarantined == num_bad
        return
    with pytest.raises(DataError) as caught:
        build_corpus(tmp_path, corpus, bad_record_fraction=fraction)
    assert f"{num_bad} of 40 records" in caught.value.what
    assert caught.value.where == "/corpus/0.txt:6"
    assert str(tmp_path / "quarantine" / "u000000000.jsonl") in caught.value.hint
    assert (tmp_path / "quarantine" / "u000000000.jsonl").read_text().count("\n") == num_bad
    assert build_corpus(tmp_path, corpus, bad_record_fraction=0.5).quarantined == num_bad


def test_a_hundred_consecutive_bad_records_stop_the_build(tmp_path):
    corpus = with_bad_lines(set(range(500, 700)), num_lines=100_000)
    read = Counter()

    def read_unit(unit):
        for record in corpus.read_unit(unit):
            read[type(record).__name__] += 1
            yield record

    with pytest.raises(DataError, match="100 consecutive records") as caught:
        build_corpus(tmp_path, dataclasses.replace(corpus), bad_record_fraction=1.0)
    assert caught.value.where == "/corpus/0.txt:501"
    work = dataclasses.replace(work_of(corpus), read_unit=read_unit, bad_record_fraction=1.0)
    with pytest.raises(DataError):
        build(tmp_path, work, corpus.units)
    assert read == {"Document": 500, "BadRecord": 100}
    assert build_corpus(tmp_path / "99", with_bad_lines(set(range(99)), 200), bad_record_fraction=1.0).quarantined == 99


@dataclasses.dataclass(frozen=True)
class FaultyTokenizer(ByteTokenizer):
    """Returns an out-of-vocabulary id for one word."""

    wrong: int = 0

    def encode(self, text: str) -> np.ndarray:
        if "unspeakable" in text and self.wrong == 0:
            raise DataError("no token for 'unspeakable'", hint="another vocabulary")
        return np.array([self.wrong]) if "unspeakable" in text else super().encode(text)


@pytest.mark.parametrize("wrong", [257, 70_000, -1])
def test_a_token_outside_the_vocabulary_is_refused_with_the_document(tmp_path, wrong):
    corpus = corpus_of([["a", "b"], ["c", "unspeakable", "d"]], 10)
    with pytest.raises(DataError, match=f"id {wrong}, but its vocabulary has 257 tokens") as caught:
        build_corpus(tmp_path, corpus, tokenizer=FaultyTokenizer(wrong=wrong))
    assert caught.value.where == "/corpus/1.txt, record 2 at byte 2"
    assert caught.value.exit_code == 4


def test_a_text_that_cannot_be_encoded_is_named(tmp_path):
    corpus = corpus_of([["a", "b"], ["c", "unspeakable", "d"]], 10)
    with pytest.raises(DataError, match="no token for") as caught:
        build_corpus(tmp_path, corpus, tokenizer=FaultyTokenizer())
    assert caught.value.where == "/corpus/1.txt, record 2 at byte 2"
    assert caught.value.hint == "another vocabulary"


def test_no_text_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no text"):
        build_corpus(tmp_path / "a", corpus_of([], 10))
    assert not (tmp_path / "a").exists()
    for _ in range(2):
        with pytest.raises(DataError, match="Cannot read any record"):
            build_corpus(tmp_path / "b", corpus_of([["! bad"]], 10), bad_record_fraction=1.0)


def test_a_cache_of_another_recipe_is_refused(tmp_path):
    build_corpus(tmp_path, small_corpus())
    other = recipe_for(TOKENIZER, row_tokens=65)
    for action in (
        lambda: build_corpus(tmp_path, small_corpus(), recipe=other),
        lambda: CacheReader.open(tmp_path, other),
    ):
        with pytest.raises(DataError) as caught:
            action()
        assert other.digest in caught.value.what
        assert recipe_for(TOKENIZER).digest in caught.value.what
        assert caught.value.exit_code == 4


def test_the_tokenizer_must_be_that_of_the_recipe(tmp_path):
    with pytest.raises(DataError, match="does not match the recipe"):
        build_corpus(tmp_path, small_corpus(), recipe=recipe_for(ByteTokenizer(2)))
    assert list(tmp_path.iterdir()) == []


def test_another_source_is_refused(tmp_path):
    build_corpus(tmp_path, small_corpus())
    with pytest.raises(DataError, match="differs from the one that the cache was built from"):
        build_corpus(tmp_path, small_corpus(seed=6))


def test_an_unreadable_source_is_distinguished_from_an_unwritable_cache(tmp_path):
    corpus = small_corpus()

    def read_unit(unit):
        yield from corpus.read_unit(corpus.units[0])
        raise PermissionError(errno.EACCES, "Permission denied", "/corpus/0.txt")

    with pytest.raises(DataError, match="Cannot read unit 0 of the source") as caught:
        build(tmp_path, dataclasses.replace(work_of(corpus), read_unit=read_unit), corpus.units)
    assert caught.value.where == "/corpus/0.txt"

    def refuse(operation: FileOperation) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(operation.path))

    with atomic.observe(refuse), pytest.raises(DataError, match="Cannot write to the cache: Permission") as caught:
        build_corpus(tmp_path / "other", corpus)
    assert "write permission" in caught.value.hint


# A full disk


def test_a_full_disk_at_any_write_loses_nothing(tmp_path):
    corpus = small_corpus(num_files=2, lines_per_file=20, lines_per_unit=10)
    operations: list[FileOperation] = []
    with atomic.observe(operations.append):
        clean = build_corpus(tmp_path / "clean", corpus)
    places = [n for n, op in enumerate(operations) if op.kind in {"write", "create", "mkdir", "fsync", "rename"}]
    assert len(places) >= 60
    for number, place in enumerate(places):
        directory = tmp_path / str(number)
        seen: list[FileOperation] = []

        def fill(operation: FileOperation, seen=seen, place=place) -> None:
            seen.append(operation)
            if len(seen) == place + 1:
                raise OSError(errno.ENOSPC, "No space left on device", str(operation.path))

        with atomic.observe(fill), pytest.raises(DataError) as caught:
            build_corpus(directory, corpus)
        assert caught.value.exit_code == 4
        assert re.search(r"about [\d,]+ bytes remaining", caught.value.what)
        done = len(Manifest.open(directory).units) if (directory / "manifest").exists() else 0
        # An entry that was written but not synced exists, but was not reported as committed.
        unsure = seen[-1].kind == "fsync" and seen[-1].path.name == "log.jsonl" and done > 0
        assert caught.value.saved.startswith(f"{done - unsure} of 4 units")
        report = build_corpus(directory, corpus)
        assert report.digest == clean.digest
        assert report.units_built + report.units_adopted == 4 - done
        assert not list(directory.rglob(".tmp-*"))


@pytest.mark.parametrize("builds", [[133], [133, 1], [133, 0]], ids=["one build", "another build", "nothing built"])
def test_needed_bytes_are_near_what_the_rest_takes(tmp_path, builds):
    """After builds that each end at so many writes of chunks, 33 to a unit; every other unit compresses well."""
    generator = np.random.default_rng(5)
    letters = [chr(97 + number) for number in range(26)]
    files = [["".join(generator.choice(letters[: 26 if file % 2 else 1], 40)) for _ in range(200)] for file in range(8)]
    corpus = corpus_of(files, 200)
    sizes = build_corpus(tmp_path / "clean", corpus).compressed_bytes
    for num_writes in builds:
        writes = 0

        def fill(operation: FileOperation, num_writes=num_writes) -> None:
            nonlocal writes
            writes += operation.kind == "write" and operation.path.name.endswith(".psc")
            if writes == num_writes:
                raise OSError(errno.ENOSPC, "No space left on device")

        with atomic.observe(fill), pytest.raises(DataError) as caught:
            build_corpus(tmp_path / "full", corpus)
    written = sum(path.stat().st_size for path in tmp_path.glob("full/chunks/*/*.psc"))
    needed = int(caught.value.what.split(" about ")[1].split(" bytes")[0].replace(",", ""))
    assert abs(needed - (sizes - written)) < 0.05 * (sizes - written)


# Repair


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[300] ^= 1
    path.write_bytes(raw)


def test_repair_builds_what_is_damaged_or_lost_and_nothing_else(tmp_path):
    corpus = small_corpus()
    clean = build_corpus(tmp_path, corpus)
    rows = all_rows(CacheReader.open(tmp_path))
    damage(chunk_path(tmp_path, 1, 0))
    chunk_path(tmp_path, 3, 0).unlink()
    with pytest.raises(DataError, match="2 of"):
        CacheReader.open(tmp_path).verify()
    assert build_corpus(tmp_path, corpus).units_built == 0  # nothing is missing; damage is looked for when asked to
    report = build_corpus(tmp_path, corpus, verify="full")
    assert (report.units_built, report.digest) == (2, clean.digest)
    reader = CacheReader.open(tmp_path)
    reader.verify()
    assert all_rows(reader) == rows
    assert build_corpus(tmp_path, corpus, verify="full").units_built == 0


def test_repair_with_another_codec_keeps_the_content(tmp_path):
    corpus = small_corpus()
    clean = build_corpus(tmp_path, corpus, codec="lz4")
    damage(chunk_path(tmp_path, 2, 0))
    report = build_corpus(tmp_path, corpus, codec="raw", verify="full")
    assert (report.units_built, report.digest) == (1, clean.digest)
    CacheReader.open(tmp_path).verify()


def test_repair_refuses_different_rows(tmp_path):
    corpus = small_corpus()
    build_corpus(tmp_path, corpus)
    damage(chunk_path(tmp_path, 1, 0))
    before = chunk_path(tmp_path, 1, 0).read_bytes()
    other = dataclasses.replace(small_corpus(seed=99), files=corpus.files, units=corpus.units)
    with pytest.raises(DataError, match="different rows than were committed"):
        build_corpus(tmp_path, other, verify="full")
    assert chunk_path(tmp_path, 1, 0).read_bytes() == before
