"""Transforms on the way into a cache: one digest however it is built, provenance of the records, counts that add up."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_corpus import ByteTokenizer, Corpus, corpus_of, recipe_for
from vorox.core.errors import ConfigError, DataError
from vorox.core.schema.data import BuildPipelineConfig, DataConfig, SourceConfig, TransformConfig
from vorox.data.cache.build import BuildOptions, build
from vorox.data.cache.building.report import BuildProgress
from vorox.data.cache.files.manifest import Manifest
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.units.duplicates import duplicates_path, read_unit_duplicates
from vorox.data.cache.units.first_pass import find_duplicates
from vorox.data.cache.units.unit_builder import UnitBuilder
from vorox.data.documents import SourceFile, TokenDocument, Unit, UnitSpan
from vorox.data.transforms.apply import TransformCount
from vorox.data.transforms.identity import version
from vorox.data.transforms.registry import check_transforms, recipe_of, resolve_transforms, transforms_of
from vorox.experiments.metrics import metric

TOKENIZER = ByteTokenizer()
HERE = __name__


def shout(text: str, *, marks: int = 1) -> str:
    return text.upper() + "!" * marks


@version(3)
def twice(text: str, rng: np.random.Generator, *, gone: float = 0.0) -> list[str] | None:
    """Nothing, or the text and the text with a number drawn for it."""
    return None if rng.random() < gone else [text, f"{text} {rng.integers(10**9)}"]


def reverse(tokens: np.ndarray) -> np.ndarray:
    return tokens[::-1]


def noisy(tokens: np.ndarray, rng: np.random.Generator, *, delay_seconds: float = 0.0) -> np.ndarray:
    time.sleep(delay_seconds * rng.random())
    return np.where(rng.random(len(tokens)) < 0.2, 7, tokens)


def fails(text: str) -> str:
    if "k" in text:
        raise ZeroDivisionError("no k, please")
    return text


def number(text: str) -> Any:
    return 5


def one_argument(words: str) -> str:
    return words


sys.modules["transform_functions"] = sys.modules[HERE]


def config(name: str, **args: Any) -> TransformConfig:
    return TransformConfig(name=name if ":" not in name else f"transform_functions{name}", args=args)


def work_of(corpus: Corpus, transforms: Sequence[TransformConfig], seed: int = 0, **pipeline: Any) -> UnitBuilder:
    resolved = resolve_transforms(transforms, "train", "data.transforms")
    recipe = recipe_for(TOKENIZER, row_tokens=129, transforms=recipe_of(resolved, seed))
    return UnitBuilder(
        corpus.files, corpus.read_unit, TOKENIZER, recipe, transforms=resolved, transform_seed=seed,
        pipeline=BuildPipelineConfig(**pipeline),
    )  # fmt: skip


def texts(directory: Path) -> list[tuple[int, int, str]]:
    """File, ordinal and text of every document of a cache, read back from its rows, in order of place."""
    reader = CacheReader.open(directory)
    block = reader.read_rows(np.arange(reader.num_rows))
    found = []
    for row in range(reader.num_rows):
        line, start = block.tokens_NC[row].tolist(), 0
        for document in reader.documents_of(row):
            ids = line[start : start + document.length]
            start += document.length
            assert document.document_token_offset == 0
            assert ids.pop() == TOKENIZER.end_of_text_id
            found.append((document.file_index, document.ordinal, bytes(ids).decode()))
    return sorted(found)


CORPUS = corpus_of(
    [["one fish two fish", "short", "red fish blue fish", "one fish two fish"],
     ["black fish", "red fish blue fish", "", "old fish new fish", "short"]],
    2,
)  # fmt: skip

PLACES = [(document.file_index, document.ordinal, document.text) for document in CORPUS.documents()]


def test_texts_keep_the_place_of_their_record_whatever_becomes_of_them(tmp_path):
    transforms = [config("length", min_characters=6), config(":shout", marks=2), config(":twice", gone=0.3)]
    work = work_of(CORPUS, transforms, seed=11)
    report = build(tmp_path, work, CORPUS.units)
    found = texts(tmp_path)
    long = [(file, ordinal, text.upper() + "!!") for file, ordinal, text in PLACES if len(text) >= 6]
    assert {place[:2] for place in found} < {place[:2] for place in long}
    originals = [place for place in found if place in long]
    assert len(found) == 2 * len(originals) == report.documents > 0
    for file, ordinal, text in found:
        (original,) = (whole for f, o, whole in long if (f, o) == (file, ordinal))
        assert text.startswith(original)
    draws = {text.removeprefix(original) for _, _, text in found for _, _, original in long if text != original}
    assert len(draws) > len(originals) / 2  # every document has its own
    reader = CacheReader.open(tmp_path)
    hashes = {(file, ordinal): xxhash.xxh3_64_intdigest(text.encode()) for file, ordinal, text in PLACES}
    for document in itertools.chain.from_iterable(map(reader.documents_of, range(reader.num_rows))):
        assert document.text_xxh3 == hashes[document.file_index, document.ordinal]


def test_what_each_transform_did_is_counted():
    transforms = [config("length", min_characters=6), config("exact_duplicates", scope="unit"), config(":twice")]
    units = list(work_of(CORPUS, transforms).run(CORPUS.units))
    total: dict[str, list[int]] = {}
    for unit in units:
        for name, count in unit.transforms.items():
            row = total.setdefault(name, [0, 0, 0])
            row[:] = [row[0] + count.inputs, row[1] + count.removed, row[2] + count.added]
    twice = "2/transform_functions:twice"
    assert total == {"0/length": [9, 3, 0], "1/exact_duplicates": [6, 0, 0], twice: [6, 0, 6]}
    assert sum(unit.statistics.documents for unit in units) == 12
    assert sum(unit.records_read for unit in units) == 9


@pytest.mark.parametrize("staged", [True, False])
def test_the_report_says_what_transforms_did_and_which_stage_is_slowest(tmp_path, staged):
    work = work_of(CORPUS, [config("length", min_characters=6)], staged=staged)
    told: list[BuildProgress] = []
    report = build(tmp_path, work, CORPUS.units, on_progress=told.append)
    assert report.transforms == {"0/length": TransformCount(9, 3, 0)}
    if not staged:
        assert report.stages is None
        return
    assert report.stages is not None
    assert report.stages.bottleneck in [stage.name for stage in report.stages.stages]
    assert told[-1].stages is not None
    again = build(tmp_path, work, CORPUS.units)
    assert (again.stages, again.transforms) == (None, report.transforms)
    assert build(tmp_path / "two", work, CORPUS.units, BuildOptions(workers=2)).transforms == report.transforms


def test_the_first_of_equal_texts_in_the_source_stays(tmp_path):
    work = work_of(CORPUS, [config("exact_duplicates")])
    told: list[BuildProgress] = []
    report = build(tmp_path, work, CORPUS.units, BuildOptions(mode="inverse"), on_progress=told.append)
    ends = np.cumsum([unit.size_bytes for unit in CORPUS.units]).tolist()
    assert [progress.compared_bytes for progress in told if progress.compared_bytes] == ends
    assert told[-1].compared_bytes == 0
    seen: set[str] = set()
    expected = [place for place in PLACES if not (place[2] in seen or seen.add(place[2]))]
    assert texts(tmp_path) == sorted(expected)
    assert report.documents == 6 == len(expected)


def test_near_duplicates_differ_in_little(tmp_path):
    pytest.importorskip("datasketch")
    generator = np.random.default_rng(3)
    base = [" ".join(f"w{index}" for index in generator.integers(0, 10**6, 60)) for _ in range(6)]
    near = [text.replace(text.split()[30], "other").upper() for text in base]
    half = [" ".join([*text.split()[:30], *base[index - 1].split()[30:]]) for index, text in enumerate(base)]
    corpus = corpus_of([base, [*near, *half]], 4)
    transforms = [config("near_duplicates", threshold=0.7)]
    work = dataclasses.replace(work_of(corpus, transforms), recipe=recipe_for(
        TOKENIZER, row_tokens=2049, transforms=recipe_of(resolve_transforms(transforms, "train", "k"), 0)))  # fmt: skip
    build(tmp_path, work, corpus.units)
    assert [text for _, _, text in texts(tmp_path)] == [*base, *half]


ALL = [
    config("length", min_characters=3),
    config("exact_duplicates"),
    config(":twice", gone=0.2),
    config("exact_duplicates", scope="unit"),
    config("near_duplicates", threshold=0.9, permutations=32),
    config(":noisy", delay_seconds=0.0005),
    config("token_dropout", fraction=0.1),
]


def larger_corpus(num_files: int = 4) -> Corpus:
    generator = random.Random(8)
    words = ["fish", "cat", "dog", "house", "tree", "one", "two"]
    lines = [[" ".join(generator.choices(words, k=generator.choice([1, 2, 6, 9]))) for _ in range(12)] for _ in "abcd"]
    return corpus_of(lines[:num_files], 5)


def digest_of(directory: Path) -> str:
    manifest = Manifest.open(directory)
    return manifest.content_digest(0, manifest.planned_units)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("datasketch")
    directory = tmp_path_factory.mktemp("reference")
    build(directory, work_of(larger_corpus(), ALL, seed=4, staged=False), larger_corpus().units)
    return digest_of(directory)


@settings(max_examples=12, deadline=None)
@given(
    threads=st.tuples(*[st.integers(1, 4)] * 4), queue_bytes=st.sampled_from([1, 300, 1 << 20]),
    mode=st.sampled_from(["forward", "inverse", "gaps"]),
)  # fmt: skip
def test_threads_credits_and_order_change_no_bit(tmp_path_factory, reference, threads, queue_bytes, mode):
    names = ("filter_threads", "tokenize_threads", "augment_threads", "pack_threads")
    corpus = larger_corpus()
    work = work_of(corpus, ALL, seed=4, queue_bytes=queue_bytes, **dict(zip(names, threads, strict=True)))
    directory = tmp_path_factory.mktemp("staged")
    build(directory, work, corpus.units, BuildOptions(mode=mode))
    assert digest_of(directory) == reference


@pytest.mark.slow
def test_processes_change_no_bit(tmp_path, reference):
    corpus = larger_corpus()
    work = work_of(corpus, [transform for transform in ALL if ":" not in transform.name], seed=4)
    digests = set()
    for workers in (1, 2):
        build(tmp_path / str(workers), work, corpus.units, BuildOptions(workers=workers))
        digests.add(digest_of(tmp_path / str(workers)))
    assert len(digests) == 1


def test_a_seed_an_argument_or_a_function_more_is_another_recipe(reference):
    corpus = larger_corpus()
    base = work_of(corpus, ALL, seed=4).recipe
    assert base.digest == work_of(corpus, ALL, seed=4, queue_bytes=7).recipe.digest
    others = [
        work_of(corpus, ALL, seed=5).recipe,
        work_of(corpus, ALL[:-1], seed=4).recipe,
        work_of(corpus, [*ALL[:-1], config("token_dropout", fraction=0.2)], seed=4).recipe,
        work_of(corpus, [ALL[1], ALL[0], *ALL[2:]], seed=4).recipe,
    ]
    assert len({base.digest, *(recipe.digest for recipe in others)}) == 5
    length = [config("length", min_characters=3)]
    assert work_of(corpus, length, seed=1).recipe == work_of(corpus, length, seed=2).recipe  # nothing is drawn
    assert work_of(corpus, []).recipe.digest == recipe_for(TOKENIZER, row_tokens=129).digest


def test_new_files_are_compared_with_all_before_and_change_nothing_of_it(tmp_path):
    transforms = [config("exact_duplicates")]
    small, large = larger_corpus(2), larger_corpus(4)
    build(tmp_path, work_of(small, transforms), small.units)
    before = Manifest.open(tmp_path)
    first = digest_of(tmp_path)
    build(tmp_path, work_of(large, transforms), large.units)
    after = Manifest.open(tmp_path)
    assert after.content_digest(0, before.planned_units) == first
    seen: set[str] = set()
    places = [(document.file_index, document.ordinal, document.text) for document in large.documents()]
    assert texts(tmp_path) == sorted(place for place in places if not (place[2] in seen or seen.add(place[2])))
    in_one_build = tmp_path / "one build"
    build(in_one_build, work_of(large, transforms), large.units)
    assert digest_of(in_one_build) == digest_of(tmp_path)


def test_a_damaged_list_of_duplicates_is_refused_and_rebuilt(tmp_path):
    corpus = larger_corpus()
    work = work_of(corpus, [config("exact_duplicates")])
    build(tmp_path, work, corpus.units)
    digest = digest_of(tmp_path)
    path = duplicates_path(tmp_path, work.transforms[0], 3)
    raw = path.read_bytes()
    for place in range(0, len(raw), 7):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :])
        with pytest.raises(DataError, match="Cannot read the duplicates"):
            next(work.with_directory(tmp_path).run([corpus.units[3]]))
    path.write_bytes(duplicates_path(tmp_path, work.transforms[0], 2).read_bytes())
    with pytest.raises(DataError, match="belongs to a different unit"):
        next(work.with_directory(tmp_path).run([corpus.units[3]]))
    for file in path.parent.iterdir():
        file.unlink()
    find_duplicates(work.with_directory(tmp_path), corpus.units)
    assert path.read_bytes() == raw
    (built,) = work.with_directory(tmp_path).run([corpus.units[3]])
    assert [record for _, record in built.chunks] == Manifest.open(tmp_path).unit_chunks(3)
    assert digest_of(tmp_path) == digest


def test_lists_computed_from_a_different_text_are_refused(tmp_path):
    transforms = [config("exact_duplicates")]
    small, large = larger_corpus(2), larger_corpus(4)
    other = corpus_of([["other text", *["x"] * 4], ["y"]], 5)
    lists = {}
    for name, corpus in {"small": small, "other": other}.items():
        work = work_of(corpus, transforms).with_directory(tmp_path / name)
        find_duplicates(work, corpus.units)
        lists[name] = lists_of(work, tmp_path / name)
    lists["small"](0).write_bytes(lists["other"](0).read_bytes())
    extended = work_of(large, transforms).with_directory(tmp_path / "small")
    with pytest.raises(DataError, match="computed from a different text") as caught:
        find_duplicates(extended, large.units)
    assert caught.value.where == str(lists["small"](0))
    work = work_of(small, transforms).with_directory(tmp_path / "again")
    find_duplicates(work, small.units)
    again = lists_of(work, tmp_path / "again")
    again(0).write_bytes(
        dataclasses.replace(read_unit_duplicates(again(0)), removed_R3=np.array([[0, 0, 0]])).to_bytes()[0]
    )
    with pytest.raises(DataError, match="computed from a different text") as caught:  # unit 1 names another unit 0
        find_duplicates(work_of(large, transforms).with_directory(tmp_path / "again"), large.units)
    assert caught.value.where == str(again(1))


def test_near_duplicates_need_their_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(ConfigError, match="needs the library datasketch") as caught:
        resolve_transforms([config("near_duplicates")], "train", "k")
    assert "[dedup]" in caught.value.hint


def test_a_stopped_first_pass_continues(tmp_path):
    corpus = larger_corpus()
    whole = work_of(corpus, [config("exact_duplicates")]).with_directory(tmp_path / "whole")
    find_duplicates(whole, corpus.units)
    parts = dataclasses.replace(whole, directory=tmp_path / "parts")
    path = lists_of(parts, tmp_path / "parts")
    for count in (3, 3, 7, len(corpus.units)):
        find_duplicates(parts, corpus.units, stop=lambda count=count: path(count - 1).exists())
        assert path(count - 1).exists()
    for unit in corpus.units:
        assert path(unit.unit_id).read_bytes() == lists_of(whole, tmp_path / "whole")(unit.unit_id).read_bytes()


def lists_of(work: UnitBuilder, directory: Path):
    return lambda unit: duplicates_path(directory, work.transforms[0], unit)


@pytest.mark.parametrize(
    ("name", "message"),
    [(":fails", "ZeroDivisionError: no k, please"), (":number", "returned int instead of text")],
)  # fmt: skip
@pytest.mark.parametrize("staged", [True, False])
def test_a_transform_that_fails_names_the_document(name, message, staged):
    work = work_of(CORPUS, [config(name)], staged=staged)
    with pytest.raises(DataError, match=message) as caught:
        list(work.run(CORPUS.units))
    assert caught.value.exit_code == 4
    place = "/corpus/1.txt, record 1 at byte 0" if name == ":fails" else "/corpus/0.txt, record 1 at byte 0"
    assert caught.value.where == place
    if staged:
        (note,) = caught.value.__notes__
        assert "'filter'" in note
        assert "unit 2" in note or name == ":number"


@pytest.mark.parametrize(
    ("transform", "message", "where"),
    [
        ({"name": "lenght"}, "did you mean length", "data.transforms.0.name"),
        ({"name": "no.such.module:f"}, "ModuleNotFoundError", "data.transforms.0.name"),
        ({"name": "transform_functions:nothing"}, "Cannot import transform", "data.transforms.0.name"),
        ({"name": "transform_functions:one_argument"}, "first parameter .* named 'words'", "data.transforms.0.name"),
        ({"name": "transform_functions:CORPUS"}, "not a function", "data.transforms.0.name"),
        ({"name": "length", "args": {"min_character": 3}}, "did you mean min_characters",
         "data.transforms.0.args.min_character"),
        ({"name": "length", "args": {"min_characters": -1}}, "greater than or equal to 0",
         "data.transforms.0.args.min_characters"),
        ({"name": "length", "args": {"min_characters": "3"}}, "valid integer", "data.transforms.0.args.min_characters"),
        ({"name": "token_dropout"}, "needs the argument 'fraction'", "data.transforms.0.args"),
        ({"name": "near_duplicates", "args": {"scope": "file"}}, "'corpus' or 'unit'", "data.transforms.0.args.scope"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_before_anything_is_read(transform, message, where):
    data = DataConfig(sources=(SourceConfig(name="a", format="txt", paths=("x",)),), transforms=(transform,))
    with pytest.raises(ConfigError, match=message) as caught:
        check_transforms(data)
    assert caught.value.where == where
    assert caught.value.exit_code == 2


def test_text_comes_before_tokens_and_a_source_of_tokens_has_none():
    with pytest.raises(ConfigError, match="length works on text but follows token_length"):
        resolve_transforms([config("token_length"), config("length")], "train", "k")
    with pytest.raises(ConfigError, match="would undo token_dropout"):
        resolve_transforms([config("token_dropout", fraction=0.1), config("fill_in_the_middle")], "train", "k")
    tokens = SourceConfig(name="t", format="bin", paths=("x",), tokenizer="y")
    data = DataConfig(sources=(tokens,), transforms=(config("length"),))
    with pytest.raises(ConfigError, match="source 't' consists of tokens"):
        transforms_of(data, tokens, "train", "data.sources.0")
    own = tokens.model_copy(update={"transforms": (config("token_length", min_tokens=2),)})
    assert [transform.name for transform in transforms_of(data, own, "train", "data.sources.0")] == ["token_length"]
    assert transforms_of(data, own, "validation", "data.sources.0") == ()


def test_a_foreign_function_is_known_by_its_source_or_its_version():
    (shouting,) = recipe_of(resolve_transforms([config(":shout")], "train", "k"), 0)
    assert shouting["source_sha256"] == hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    assert shouting["args"] == {"marks": 1}
    (doubling,) = recipe_of(resolve_transforms([config(":twice")], "train", "k"), 9)
    assert doubling == {
        "function": "transform_functions:twice", "version": 3, "args": {"gone": 0.0}, "number": 0, "seed": 9
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_records_that_are_tokens_are_packed_as_they_are(tmp_path, dtype):
    generator = np.random.default_rng(1)
    documents = [generator.integers(0, 256, size).astype(dtype) for size in (5, 0, 40, 1)]
    files = (SourceFile("/shards/a.bin", 1000, "v"),)

    def read_unit(unit: Unit):
        for ordinal, ids in enumerate(documents):
            yield TokenDocument(0, ordinal, 10 * ordinal, 10, ids)

    unit = Unit(0, (UnitSpan(0, 0, 1000, 0),))
    recipe = recipe_for(TOKENIZER, row_tokens=129)
    report = build(tmp_path, UnitBuilder(files, read_unit, TOKENIZER, recipe), [unit])
    assert (report.documents, report.tokens, report.text_bytes) == (4, 5 + 0 + 40 + 1 + 4, 0)
    reader = CacheReader.open(tmp_path)
    (row,) = reader.read_rows(np.arange(1)).tokens_NC
    found, start = {}, 0
    for document in reader.documents_of(0):
        found[document.ordinal] = row[start : start + document.length].tolist()
        start += document.length
    assert found == {
        ordinal: [*ids.tolist(), TOKENIZER.end_of_text_id] for ordinal, ids in enumerate(documents)
    }  # fmt: skip
    reverse_only = resolve_transforms([config(":reverse")], "train", "k")
    (built,) = UnitBuilder(files, read_unit, TOKENIZER, recipe, transforms=reverse_only).run([unit])
    assert built.statistics.tokens == report.tokens
    documents[2][3] = 257
    with pytest.raises(DataError, match="The source contains id 257, but the vocabulary has 257 tokens") as caught:
        list(UnitBuilder(files, read_unit, TOKENIZER, recipe).run([unit]))
    assert caught.value.where == "/shards/a.bin, record 3 at byte 20"


def test_a_tokenizer_that_falls_back_rebuilds_the_unit():
    class Fickle(ByteTokenizer):
        calls = fast_path_fallbacks = 0

        def encode_batch(self, texts):
            type(self).calls += 1
            if self.calls == 2:
                type(self).fast_path_fallbacks = 1
            wrong = 1 if not self.fast_path_fallbacks else 0
            return [self.encode(text) ^ wrong for text in texts]

    lines = ["x" * 600_000, "y" * 600_000, "z" * 600_000, "w" * 10]
    corpus = corpus_of([lines, ["later"]], 4)
    recipe = recipe_for(TOKENIZER, row_tokens=4097, chunk_rows=4096)
    work = UnitBuilder(corpus.files, corpus.read_unit, Fickle(), recipe)
    steady = UnitBuilder(corpus.files, corpus.read_unit, TOKENIZER, recipe)
    assert [unit.chunks for unit in work.run(corpus.units)] == [unit.chunks for unit in steady.run(corpus.units)]
    assert Fickle.calls > 3


def test_progress_and_statistics_are_reported_in_the_iterating_thread():
    pytest.importorskip("datasketch")
    told, statistics, threads = [], [], set()

    def on_documents(documents: int, text_bytes: int, tokens: int) -> None:
        told.append((documents, text_bytes, tokens))
        threads.add(threading.current_thread())

    units = list(work_of(CORPUS, ALL).with_directory(Path("unused")).run([], on_documents=on_documents))
    assert units == []
    work = work_of(CORPUS, [config("length", min_characters=6)])
    built = list(work.run(CORPUS.units, on_documents=on_documents, on_statistics=statistics.append))
    assert threads == {threading.main_thread()}
    assert sum(row[0] for row in told) == sum(unit.statistics.documents for unit in built) == 6
    assert sum(row[1] for row in told) == sum(unit.statistics.text_bytes for unit in built)
    assert sum(row[2] for row in told) == sum(unit.statistics.tokens for unit in built)
    last = statistics[-1]
    for name, value in last.metrics().items():
        assert metric(name).description
        assert isinstance(value, float)
    for stage in last.stages:  # a unit is one batch here
        assert stage.items == len(CORPUS.units), stage.name
    assert [stage.name for stage in last.stages] == ["decode", "filter", "tokenize", "gather", "pack", "write"]
    assert last.bottleneck in {stage.name for stage in last.stages}
