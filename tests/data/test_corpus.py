"""From a configuration to rows: every byte arrives once, changes are noticed, errors name place and remedy."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vorox.core.errors import ConfigError, DataError
from vorox.core.files.atomic import FileOperation, observe
from vorox.core.schema import RunConfig
from vorox.data.cache.reader import CacheReader
from vorox.data.corpus.cache_location import cache_root
from vorox.data.corpus.corpus import Corpus, prepare
from vorox.data.provenance import inspection
from vorox.data.provenance.inspection import peek, stats, verify, xz_bits_per_byte
from vorox.data.provenance.xz_baseline import compress
from vorox.data.tokenizers.tokenizer import Tokenizer

WORDS = (
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "rho",
)


def sentence(number: int) -> str:
    """A line of words, different for every number."""
    return " ".join(WORDS[(number * step + step) % len(WORDS)] for step in range(1, 12)) + f" {number}.\n"


def write_texts(folder: Path, count: int = 40) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        (folder / f"{n:03}.txt").write_text("".join(sentence(100 * n + k) for k in range(10 + n)))
    return folder


def write_lines(path: Path, count: int = 400) -> Path:
    path.write_text("".join(json.dumps({"text": sentence(n), "id": n}) + "\n" for n in range(count)))
    return path


def configuration(root: Path, *sources: dict[str, Any], **sections: Any) -> RunConfig:
    data = {
        "sources": list(sources),
        "sequence_length_tokens": 32,
        "cache": {"directory": str(root / "cache"), "unit_bytes": 40_000},
        "validation": {"split": "document", "held_out_fraction": 0.2},
        **sections.pop("data", {}),
    }
    tokenizer = {"kind": "bpe", "vocab_size": 300, "train_bytes": 20_000, **sections.pop("tokenizer", {})}
    return RunConfig.model_validate({"data": data, "tokenizer": tokenizer, "train": {"num_steps": 1}, **sections})


def texts_source(root: Path, **options: Any) -> dict[str, Any]:
    return {"name": "texts", "format": "txt", "paths": [str(root / "texts")], **options}


@contextmanager
def unprivileged(folder: Path) -> Iterator[None]:
    """Drop root's privileges temporarily: root may read and write everything."""
    user = os.geteuid()
    for place in (folder, *folder.parents):
        if place.stat().st_uid == user and place.parent != place and not place.stat().st_mode & 0o001:
            place.chmod(place.stat().st_mode | 0o011)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def texts(tmp_path: Path) -> RunConfig:
    write_texts(tmp_path / "texts")
    return configuration(tmp_path, texts_source(tmp_path))


def documents_in(reader: CacheReader) -> dict[tuple[str, int], list[int]]:
    """Every document of a cache, its tokens put together again from all rows."""
    found: dict[tuple[str, int], dict[int, int]] = {}
    for row in range(reader.num_rows):
        block = reader.read_rows(np.array([row]))
        position = 0
        for span in reader.documents_of(row):
            tokens = block.tokens_NC[0, position : position + span.length].tolist()
            position += span.length
            document = found.setdefault((span.uri, span.byte_offset), {})
            for offset, token in enumerate(tokens, span.document_token_offset):
                assert document.setdefault(offset, token) == token, "fragments that overlap disagree"
    return {key: [tokens[i] for i in range(len(tokens))] for key, tokens in sorted(found.items())}


def contents(corpus: Corpus) -> list[str]:
    return [reader.digest for reader in (*corpus.train, *corpus.validation)]


@pytest.mark.parametrize("split", ["file", "document", "span"])
@pytest.mark.parametrize("kind", ["bpe", "byte", "char"])
def test_every_byte_of_text_arrives_exactly_once(tmp_path: Path, split: str, kind: str) -> None:
    write_texts(tmp_path / "texts", 25)
    (tmp_path / "lines").mkdir()
    for n in range(12):
        write_lines(tmp_path / "lines" / f"{n:02}.jsonl", 5 + 3 * n)
    config = configuration(
        tmp_path, texts_source(tmp_path), {"name": "lines", "format": "jsonl", "paths": [str(tmp_path / "lines")]},
        data={"validation": {"split": split, "held_out_fraction": 0.3}}, tokenizer={"kind": kind},
    )  # fmt: skip
    corpus = prepare(config)
    end = corpus.tokenizer.end_of_text_id
    for source in corpus.sources:
        assert source.validation is not None
        train, held_out = documents_in(source.train), documents_in(source.validation)
        assert not set(train) & set(held_out)
        texts: dict[str, str] = {}
        for (uri, _), tokens in sorted({**train, **held_out}.items()):
            assert tokens[-1] == end
            assert end not in tokens[:-1]
            texts[uri] = texts.get(uri, "") + corpus.tokenizer.decode(tokens[:-1])
        if source.name == "texts":
            assert texts == {str(path): path.read_text() for path in sorted((tmp_path / "texts").iterdir())}
        else:
            lines = {f"{n:02}": "".join(map(sentence, range(5 + 3 * n))) for n in range(12)}
            assert texts == {str(tmp_path / "lines" / f"{name}.jsonl"): text for name, text in lines.items()}


def test_a_second_call_builds_nothing_and_gives_the_same(texts: RunConfig) -> None:
    first = prepare(texts)
    again = prepare(texts, build=False)
    assert contents(again) == contents(first)
    assert again.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert [report.units_built for report in again.reports.values()] == [0, 0]
    assert again.estimated_tokens == first.estimated_tokens > 0


def test_corpora_are_the_same_wherever_they_are_built(tmp_path: Path) -> None:
    corpora: list[Corpus] = []
    for place in ("here", "over/there"):
        write_texts(tmp_path / place / "texts")
        corpora.append(prepare(configuration(tmp_path / place, texts_source(tmp_path / place))))
    assert contents(corpora[0]) == contents(corpora[1])
    recipes = [[reader.directory.name.rpartition("-")[0] for reader in corpus.train] for corpus in corpora]
    assert recipes[0] == recipes[1]


def test_directories_are_named_by_source_split_and_recipe(texts: RunConfig) -> None:
    corpus = prepare(texts)
    (train,), (validation,) = corpus.train, corpus.validation
    assert train.directory.parent == cache_root(texts.data)
    assert train.directory.name.startswith(f"texts-train-{train.recipe.digest[:12]}-")
    assert validation.directory.name.startswith(f"texts-validation-{validation.recipe.digest[:12]}-")


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": {"kind": "byte"}},
        {"tokenizer": {"vocab_size": 301}},
        {"data": {"sequence_length_tokens": 33}},
        {"data": {"packing": "concat"}},
        {"data": {"validation": {"split": "document", "held_out_fraction": 0.21}}},
        {"data": {"validation": {"split": "span", "held_out_fraction": 0.2}}},
    ],
)
def test_what_changes_rows_changes_the_cache(tmp_path: Path, texts: RunConfig, change: dict[str, Any]) -> None:
    before = prepare(texts)
    after = prepare(configuration(tmp_path, texts_source(tmp_path), **change))
    assert after.train[0].directory != before.train[0].directory
    assert after.train[0].recipe.digest != before.train[0].recipe.digest


@pytest.mark.parametrize("change", [{"run": {"seed": 7}}, {"data": {"shuffle": False, "loader": {"num_threads": 3}}}])
def test_what_does_not_change_rows_shares_the_cache(tmp_path: Path, texts: RunConfig, change: dict[str, Any]) -> None:
    before = prepare(texts)
    after = prepare(configuration(tmp_path, texts_source(tmp_path, weight=5, max_epochs=3), **change), build=False)
    assert after.train[0].directory == before.train[0].directory


class TestChangedText:
    @pytest.mark.parametrize("kind", ["bpe", "byte"])
    def test_edited_file_gets_another_cache_and_the_old_one_stays(
        self, tmp_path: Path, texts: RunConfig, kind: str
    ) -> None:
        config = configuration(tmp_path, texts_source(tmp_path), tokenizer={"kind": kind})
        before = prepare(config)
        victim = tmp_path / "texts" / "007.txt"
        content = victim.read_bytes()
        victim.write_bytes(content.replace(b"alpha", b"alphA", 1))  # same length
        with pytest.raises(DataError, match=r"not been trained|not built") as caught:
            prepare(config, build=False)
        assert "vorox data build" in caught.value.hint
        after = prepare(config)
        assert contents(after) != contents(before)
        assert after.train[0].directory != before.train[0].directory
        victim.write_bytes(content)
        assert contents(prepare(config, build=False)) == contents(before)

    @pytest.mark.parametrize("change", ["new", "gone", "renamed"])
    def test_other_files_get_another_cache(self, tmp_path: Path, texts: RunConfig, change: str) -> None:
        before = prepare(texts)
        folder = tmp_path / "texts"
        {
            "new": lambda: (folder / "new.txt").write_text(sentence(99_999)),
            "gone": lambda: (folder / "003.txt").unlink(),
            "renamed": lambda: (folder / "003.txt").rename(folder / "zzz.txt"),
        }[change]()
        after = prepare(texts)
        assert after.train[0].directory != before.train[0].directory
        assert contents(after) != contents(before)

    def test_moved_folder_keeps_its_rows_and_its_documents_their_new_names(self, tmp_path: Path) -> None:
        write_texts(tmp_path / "texts")
        before = prepare(configuration(tmp_path, texts_source(tmp_path)))
        (tmp_path / "texts").rename(tmp_path / "moved")
        moved = texts_source(tmp_path, paths=[str(tmp_path / "moved")])
        after = prepare(configuration(tmp_path, moved))
        assert [report.units_built for report in after.reports.values()] == [0, 0]
        assert contents(after) == contents(before)
        assert {span.uri for span in before.train[0].documents_of(0)} <= {
            str(tmp_path / "texts" / path.name) for path in (tmp_path / "moved").iterdir()
        }
        assert {span.uri for span in after.train[0].documents_of(0)} <= {
            str(path) for path in (tmp_path / "moved").iterdir()
        }
        verify(after)

    def test_change_between_listing_and_reading_stops_the_build(
        self, tmp_path: Path, texts: RunConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = configuration(tmp_path, texts_source(tmp_path), tokenizer={"kind": "byte"})

        def meddle(phase: str, done: int, total: int, rates: Mapping[str, float]) -> None:
            if phase == "list texts" and done == total:
                (tmp_path / "texts" / "030.txt").write_text("something else\n")

        with pytest.raises(DataError, match="changed after it was listed") as caught:
            prepare(config, on_progress=meddle)
        assert caught.value.where.endswith("030.txt")
        verify(prepare(config))


def test_complete_cache_may_lie_on_a_read_only_disk(tmp_path: Path, texts: RunConfig) -> None:
    first = prepare(texts)
    for path in (tmp_path / "cache", *(tmp_path / "cache").rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        with unprivileged(tmp_path):
            corpus = prepare(texts)
            assert contents(corpus) == contents(first)
            verify(corpus)
            assert xz_bits_per_byte(corpus) is not None
    finally:
        for path in (tmp_path / "cache", *(tmp_path / "cache").rglob("*")):
            path.chmod(0o755)


def test_progress_tells_phases_amounts_and_rates(texts: RunConfig) -> None:
    calls: list[tuple[str, int, int, dict[str, float]]] = []
    prepare(texts, on_progress=lambda phase, done, total, rates: calls.append((phase, done, total, dict(rates))))
    phases = list(dict.fromkeys(call[0] for call in calls))
    assert phases == ["list texts", "tokenizer", "build texts train", "build texts validation"]
    for phase in phases:
        amounts = [(done, total) for name, done, total, _ in calls if name == phase]
        assert all(0 <= done <= total for done, total in amounts)
        assert amounts == sorted(amounts)
        assert amounts[-1][0] >= 0.9 * amounts[-1][1]
    assert calls[-1][3]["text_mb_per_second"] > 0
    assert calls[-1][3]["tokens_per_second"] > 0


class TestWeights:
    @pytest.mark.parametrize(
        ("weights", "expected"),
        [
            ([0.1, 0.2], [Fraction(1, 3), Fraction(2, 3)]),
            ([1, "1/3"], [Fraction(3, 4), Fraction(1, 4)]),
            ([0.693584, 0.306416], [Fraction(43349, 62500), Fraction(19151, 62500)]),
        ],
    )
    def test_are_exact(self, tmp_path: Path, weights: list[Any], expected: list[Fraction]) -> None:
        write_texts(tmp_path / "texts", 10)
        sources = [texts_source(tmp_path, name=f"s{n}", weight=weight) for n, weight in enumerate(weights)]
        corpus = prepare(configuration(tmp_path, *sources, tokenizer={"kind": "byte"}))
        assert list(corpus.weights) == expected
        assert corpus.names == ("s0", "s1")
        assert len(corpus.train) == len(corpus.validation) == 2

    @pytest.mark.parametrize("weight", [0, -1, "x", "1/0"])
    def test_that_are_none_are_refused(self, tmp_path: Path, weight: Any) -> None:
        write_texts(tmp_path / "texts", 3)
        with pytest.raises(ConfigError) as caught:
            prepare(configuration(tmp_path, texts_source(tmp_path, weight=weight)))
        assert caught.value.where == "data.sources.0.weight"

    def test_names_are_unique(self, tmp_path: Path) -> None:
        write_texts(tmp_path / "texts", 3)
        with pytest.raises(ConfigError, match=r"name=texts is also the name of data\.sources\.0"):
            prepare(configuration(tmp_path, texts_source(tmp_path), texts_source(tmp_path)))


class TestRefusals:
    """Each names what is wrong, where, and what to do; nothing half-built is left in the way."""

    def refuse(self, config: RunConfig, kind: type[DataError] | type[ConfigError], what: str, where: str) -> str:
        with pytest.raises(kind, match=what) as caught:
            prepare(config)
        assert where in caught.value.where
        assert caught.value.hint
        return caught.value.hint

    def test_missing_path(self, tmp_path: Path) -> None:
        self.refuse(configuration(tmp_path, texts_source(tmp_path)), DataError, "No such file", str(tmp_path / "texts"))

    def test_empty_folder(self, tmp_path: Path) -> None:
        (tmp_path / "texts").mkdir()
        self.refuse(configuration(tmp_path, texts_source(tmp_path)), DataError, "empty", str(tmp_path / "texts"))

    def test_unreadable_file(self, tmp_path: Path, texts: RunConfig) -> None:
        file = tmp_path / "texts" / "004.txt"
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache").chmod(0o777)
        file.chmod(0)
        with unprivileged(tmp_path):
            self.refuse(texts, DataError, "Permission denied", str(file))

    @pytest.mark.parametrize("kind", ["bpe", "byte"])
    def test_cache_that_cannot_be_written(self, tmp_path: Path, texts: RunConfig, kind: str) -> None:
        config = configuration(tmp_path, texts_source(tmp_path), tokenizer={"kind": kind})
        (tmp_path / "cache").mkdir(mode=0o555)
        with unprivileged(tmp_path):
            what = r"(Cannot (write|store) .*|cannot be stored): Permission denied"
            self.refuse(config, DataError, what, str(tmp_path / "cache"))

    def test_full_disk(self, tmp_path: Path, texts: RunConfig) -> None:
        """At every write of the preparation: refused with the place, and completed by the next call."""
        reference = contents(prepare(configuration(tmp_path / "reference", texts_source(tmp_path))))
        refusals: list[DataError] = []
        for allowed in range(0, 200, 3):
            count = 0

            def refuse(operation: FileOperation, allowed: int = allowed) -> None:
                nonlocal count
                count += operation.kind == "write"
                if count > allowed:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(operation.path))

            try:
                with observe(refuse):
                    prepare(texts)
                break
            except DataError as error:
                refusals.append(error)
        assert len(refusals) > 2
        assert all("disk is full" in error.what or "No space left" in error.what for error in refusals)
        assert all(error.hint for error in refusals)
        assert contents(prepare(texts)) == reference

    def test_nothing_held_out(self, tmp_path: Path) -> None:
        (tmp_path / "texts").mkdir()
        (tmp_path / "texts" / "only.txt").write_text(sentence(1) * 50)
        config = configuration(
            tmp_path, texts_source(tmp_path), tokenizer={"kind": "byte"},
            data={"validation": {"split": "file", "held_out_fraction": 0.01}},
        )  # fmt: skip
        hint = self.refuse(config, ConfigError, "holds out nothing of source 'texts'", "data.validation")
        assert "data.validation.split=auto" in hint
        better = config.data.validation.model_copy(update={"split": "auto"})
        fixed = config.model_copy(update={"data": config.data.model_copy(update={"validation": better})})
        assert len(prepare(fixed).validation) == 1

    def test_everything_held_out(self, tmp_path: Path) -> None:
        (tmp_path / "texts").mkdir()
        (tmp_path / "texts" / "only.txt").write_text(sentence(1) * 50)
        config = configuration(
            tmp_path, texts_source(tmp_path), tokenizer={"kind": "byte"},
            data={"validation": {"split": "file", "held_out_fraction": 0.999}},
        )  # fmt: skip
        self.refuse(config, ConfigError, "leaves no text of source 'texts'", "data.validation")

    def test_jsonl_of_which_no_line_is_held_out(self, tmp_path: Path) -> None:
        write_lines(tmp_path / "a.jsonl", 3)
        source = {"name": "lines", "format": "jsonl", "paths": [str(tmp_path / "a.jsonl")]}
        config = configuration(
            tmp_path, source, tokenizer={"kind": "byte"},
            data={"validation": {"split": "document", "held_out_fraction": 0.0001}},
        )  # fmt: skip
        self.refuse(config, ConfigError, "of the documents holds out nothing", "data.validation")

    def test_nothing_held_out_on_purpose_is_fine(self, tmp_path: Path, texts: RunConfig) -> None:
        config = configuration(
            tmp_path, texts_source(tmp_path), data={"validation": {"split": "document", "held_out_fraction": 0}}
        )
        corpus = prepare(config)
        assert corpus.validation == ()
        assert xz_bits_per_byte(corpus) is None
        assert len(documents_in(corpus.train[0])) == 40

    def test_too_many_bad_lines(self, tmp_path: Path) -> None:
        lines = write_lines(tmp_path / "a.jsonl", 300).read_text().splitlines()
        lines[100:110] = ['{"text": broken'] * 10
        (tmp_path / "a.jsonl").write_text("\n".join(lines))
        source = {"name": "lines", "format": "jsonl", "paths": [str(tmp_path / "a.jsonl")]}
        config = configuration(tmp_path, source, data={"cache": {"directory": str(tmp_path / "c")}})
        with pytest.raises(DataError) as caught:
            prepare(config)
        assert "a.jsonl" in str(caught.value)
        tolerant = configuration(tmp_path, {**source, "bad_record_fraction": 0.1})
        corpus = prepare(tolerant)
        assert sum(report.quarantined for report in corpus.reports.values()) == 10
        kept = [len(documents_in(reader)) for reader in (*corpus.train, *corpus.validation)]
        assert sum(kept) == 290

    def test_cache_directory_that_cannot_be_made(self, tmp_path: Path, texts: RunConfig) -> None:
        (tmp_path / "file").write_text("")
        config = configuration(
            tmp_path, texts_source(tmp_path), data={"cache": {"directory": str(tmp_path / "file" / "x")}}
        )
        self.refuse(config, ConfigError, "Cannot create the cache directory", str(tmp_path / "file"))

    def test_nothing_is_made_when_building_is_off(self, tmp_path: Path, texts: RunConfig) -> None:
        with pytest.raises(DataError, match="not been trained") as caught:
            prepare(texts, build=False)
        assert "vorox data build" in caught.value.hint
        prepare(texts)
        with pytest.raises(DataError, match="train cache of source 'texts' is not built"):
            prepare(configuration(tmp_path, texts_source(tmp_path), data={"packing": "concat"}), build=False)

    def test_damaged_tokenizer_is_not_replaced_in_silence(self, tmp_path: Path, texts: RunConfig) -> None:
        prepare(texts)
        (file,) = (tmp_path / "cache" / "tokenizers").glob("*/tokenizer.json")
        value = json.loads(file.read_bytes())
        value["model"]["merges"].pop()
        file.write_text(json.dumps(value))
        self.refuse(texts, DataError, "does not match its fingerprint", str(file.parent))


def test_half_trained_tokenizer_is_trained_again(tmp_path: Path, texts: RunConfig) -> None:
    first = prepare(texts)
    (identity,) = (tmp_path / "cache" / "tokenizers").glob("*/IDENTITY.json")
    identity.unlink()
    (identity.parent / "tokenizer.json").write_text("{")
    assert prepare(texts).tokenizer.fingerprint == first.tokenizer.fingerprint


def test_tokenizer_is_trained_on_the_training_split_only(tmp_path: Path) -> None:
    """The held-out text is full of pairs that the training text lacks; none may become a token."""
    folder = tmp_path / "texts"
    folder.mkdir()
    text = "".join(sentence(n) for n in range(300))
    (folder / "a.txt").write_text(text + "ZQZQZQZQ\n" * (len(text) // 20))
    config = configuration(
        tmp_path, texts_source(tmp_path), data={"validation": {"split": "span", "held_out_fraction": 0.4}},
        tokenizer={"train_bytes": 1 << 20},
    )  # fmt: skip
    tokenizer = prepare(config).tokenizer
    assert len(tokenizer.encode("ZQ")) == 2
    assert len(tokenizer.encode("alpha")) < 5


class TestInspection:
    def test_peek_shows_text_and_where_it_comes_from(self, texts: RunConfig) -> None:
        corpus = prepare(texts)
        for split in ("train", "validation"):
            rows = peek(corpus, 5, split=split)  # type: ignore[arg-type]
            assert len(rows) == 5
            assert [row.row for row in rows] == sorted({row.row for row in rows})
            for row in rows:
                assert sum(segment.num_tokens for segment in row.segments) + row.padding_tokens == 33
                for segment in row.segments:
                    source = Path(segment.uri).read_bytes()[segment.byte_offset :][: segment.byte_length].decode()
                    assert segment.text.removesuffix("<|endoftext|>") in source

    def test_stats_agree_with_counting_by_hand(self, texts: RunConfig) -> None:
        corpus = prepare(texts)
        for found, reader in zip(stats(corpus), (*corpus.train, *corpus.validation), strict=True):
            documents = documents_in(reader)
            counts = Counter(token for tokens in documents.values() for token in tokens)
            text_bytes = sum(len(corpus.tokenizer.decode(tokens[:-1]).encode()) for tokens in documents.values())
            num_tokens = sum(counts.values()) - len(documents)
            assert found.report.documents == len(documents)
            assert found.report.text_bytes == text_bytes
            assert found.report.tokens == num_tokens + len(documents)
            assert found.tokens.largest_token_id == max(counts)
            assert found.tokens.distinct_tokens == len(counts)
            assert found.tokens.unknown_fraction == 0
            assert found.rows_counted == reader.num_rows
            assert found.tokens.bytes_per_token == pytest.approx(
                text_bytes / num_tokens, rel=0.02
            )  # overlaps count twice
            assert found.utilisation_fraction == pytest.approx(found.report.utilisation_fraction)

    def test_unknown_tokens_are_counted(self, tmp_path: Path) -> None:
        from tokenizers import Tokenizer as LibraryTokenizer
        from tokenizers import models, pre_tokenizers

        library = LibraryTokenizer(models.WordLevel({"[UNK]": 0, "alpha": 1}, unk_token="[UNK]"))
        library.pre_tokenizer = pre_tokenizers.Whitespace()
        library.save(str(tmp_path / "words.json"))
        (tmp_path / "texts").mkdir()
        (tmp_path / "texts" / "a.txt").write_text("alpha beta alpha gamma\n" * 100)
        config = configuration(
            tmp_path, texts_source(tmp_path), tokenizer={"kind": "file", "path": str(tmp_path / "words.json")},
            data={"validation": {"split": "document", "held_out_fraction": 0}, "sequence_length_tokens": 999},
        )  # fmt: skip
        (found,) = stats(prepare(config))
        assert found.tokens.unknown_fraction == 0.5
        assert found.tokens.entropy_bits == pytest.approx(1)  # two kinds of token, half and half
        assert "50.00% of the tokens are the unknown token" in found.warnings[0]
        assert "bits per byte are not reported" in found.warnings[1]

    def test_verify_passes_and_tells_how_far_it_is(self, texts: RunConfig) -> None:
        corpus = prepare(texts)
        calls: list[tuple[str, int, int]] = []
        verify(corpus, on_progress=lambda *call: calls.append(call))
        names = {"check texts files", "check texts train", "check texts validation"}
        assert {name for name, _, _ in calls} == names
        assert {name for name, done, total in calls if done == total} == names
        assert all(done <= total for _, done, total in calls)

    def test_verify_finds_a_flipped_byte(self, tmp_path: Path, texts: RunConfig) -> None:
        corpus = prepare(texts)
        chunk = sorted(corpus.train[0].directory.rglob("*.psc"))[0]
        content = bytearray(chunk.read_bytes())
        content[len(content) // 2] ^= 1
        chunk.write_bytes(content)
        with pytest.raises(DataError) as caught:
            verify(prepare(texts))
        assert chunk.name in caught.value.where

    def test_verify_finds_text_that_changed_behind_its_stamp(
        self, tmp_path: Path, texts: RunConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        corpus = prepare(texts)
        monkeypatch.setattr(
            inspection, "content_hash", lambda file: "0" * 64 if "005" in file.uri else _version(corpus, file.uri)
        )
        with pytest.raises(DataError, match="does not match its recorded hash") as caught:
            verify(corpus)
        assert caught.value.where.endswith("005.txt")

    def test_verify_finds_rows_that_are_not_their_documents(
        self, texts: RunConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        corpus = prepare(texts)
        encode = Tokenizer.encode_batch
        monkeypatch.setattr(
            Tokenizer,
            "encode_batch",
            lambda self, texts: encode(self, [text.replace("alpha", "alphb") for text in texts]),
        )
        with pytest.raises(DataError, match="does not match the tokens of this document"):
            verify(corpus)

    def test_xz_speaks_of_the_validation_text(self, tmp_path: Path, texts: RunConfig) -> None:
        corpus = prepare(texts)
        decoded = [corpus.tokenizer.decode(tokens[:-1]) for tokens in documents_in(corpus.validation[0]).values()]
        text = "".join(decoded).encode()
        assert xz_bits_per_byte(corpus) == 8 * compress(text) / len(text)


def _version(corpus: Corpus, uri: str) -> str:
    return {file.uri: file.version for file in corpus.sources[0].source.files}[uri]


PROGRAM = """
import sys
from vorox.core.schema import RunConfig
from vorox.data.corpus.corpus import prepare
def report(name, *_):
    if sys.argv[2:]:
        print(name, flush=True)
        sys.stdin.readline()  # until the parent lets it go on
corpus = prepare(RunConfig.model_validate_json(sys.argv[1]), on_progress=report)
print(corpus.tokenizer.fingerprint, *[reader.digest for reader in (*corpus.train, *corpus.validation)])
"""


def start(config: RunConfig, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, config.model_dump_json(), *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def expected_line(corpus: Corpus) -> str:
    return " ".join([corpus.tokenizer.fingerprint, *contents(corpus)])


def test_runs_that_start_together_share_one_build(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", 60)
    config = configuration(tmp_path, texts_source(tmp_path))
    processes = [start(config) for _ in range(3)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    corpus = prepare(config, build=False)
    assert {output.strip() for output, _ in outputs} == {expected_line(corpus)}
    verify(corpus)


def kill_after(reports: int, phase: str, process: subprocess.Popen[str]) -> None:
    """Kill a process that waits after each of its reports, when it has made so many of this phase."""
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            reports -= line.strip() == phase
            if reports == 0:
                process.kill()
                break
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.returncode == -signal.SIGKILL, "it ended before that"


@pytest.mark.slow
def test_killed_builds_are_completed_to_the_same_content(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", 120)
    undisturbed, config = (
        configuration(
            tmp_path, texts_source(tmp_path), data={"cache": {"directory": str(tmp_path / name), "unit_bytes": 8_000}}
        )
        for name in ("reference", "killed")
    )
    reference = prepare(undisturbed)
    for phase, reports in [("tokenizer", 20), *[("build texts train", 14)] * 8, *[("build texts validation", 15)] * 2]:
        kill_after(reports, phase, start(config, "step by step"))
    corpus = prepare(config)
    assert expected_line(corpus) == expected_line(reference)
    verify(corpus)


def test_default_place_of_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = configuration(tmp_path, texts_source(tmp_path), data={"cache": {}}).data
    monkeypatch.setenv("VOROX_CACHE", str(tmp_path / "from environment"))
    assert cache_root(data) == tmp_path / "from environment"
    monkeypatch.delenv("VOROX_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root(data) == tmp_path / ".cache" / "vorox"


@pytest.mark.parametrize("change", [lambda file: file.write_bytes(b"{"), lambda file: file.unlink()])
def test_lost_memory_of_hashes_changes_nothing(tmp_path: Path, texts: RunConfig, change: Callable[[Path], Any]) -> None:
    first = prepare(texts)
    for file in (tmp_path / "cache" / "versions").glob("*.json"):
        change(file)
    assert contents(prepare(texts, build=False)) == contents(first)


def test_repair_builds_damaged_chunks_again(texts: RunConfig) -> None:
    corpus = prepare(texts)
    before = contents(corpus)
    chunk = sorted(corpus.root.rglob("*.psc"))[0]
    damaged = bytearray(chunk.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    chunk.write_bytes(damaged)
    with pytest.raises(DataError, match="repair"):
        verify(prepare(texts))
    repaired = prepare(texts, repair=True)
    assert contents(repaired) == before
    verify(repaired)
