"""The fast path yields the library's ids on any text, and is disabled at the first difference."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as LibraryTokenizer

from cache_corpus import corpus_of, recipe_for
from tokenizer_patterns import ANY_TEXT, DEEPSEEK, FROM_THE_RIGHT, LLAMA3
from tokenizer_patterns import PATTERNS as KNOWN_PATTERNS
from transport import received
from vorox.core.errors import DataError
from vorox.core.schema.data import BuildPipelineConfig
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.data.cache.units.unit_builder import UnitBuilder
from vorox.data.storage import local_path
from vorox.data.tokenizers import fast_path as module
from vorox.data.tokenizers.loading import load, train
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.data.tokenizers.tokenizer_json import byte_alphabet
from vorox.data.tokenizers.word_pattern import GPT2_PATTERN

PATTERNS = {name: KNOWN_PATTERNS[name] for name in ("gpt2", "llama3", "o200k")}
TEXTS = [local_path(f"stdlib:{name}").read_text() for name in ("json/decoder.py", "textwrap.py", "tokenize.py")]


def library_with(pattern: str, *, size: int = 600, special: bool = True, normalizer: Any = None) -> Any:
    library: Any = LibraryTokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    library.decoder = decoders.ByteLevel()
    if normalizer is not None:
        library.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|endoftext|>"], initial_alphabet=sorted(byte_alphabet()), show_progress=False
    )
    library.train_from_iterator([*TEXTS, "".join(map(chr, range(0xA0, 0x800)))], trainer)
    if not special:
        library.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return library


def tokenizer_with(pattern: str, **options: Any) -> Tokenizer:
    text = library_with(pattern, **options).to_str()
    return Tokenizer(text, "<|endoftext|>", where="test", fast=True)


@pytest.fixture(scope="module")
def normalising() -> Tokenizer:
    return tokenizer_with(LLAMA3, normalizer=normalizers.NFC())


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    trained = train(TokenizerConfig(vocab_size=700), TEXTS).with_fast_path()
    return {"trained": trained, **{name: tokenizer_with(pattern) for name, pattern in PATTERNS.items()}}


def library_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The oracle: the library on the whole file."""
    library = LibraryTokenizer.from_str(tokenizer.files()["tokenizer.json"].decode())
    library.encode_special_tokens = True
    return library.encode(text, add_special_tokens=False).ids


class TestIds:
    @settings(max_examples=150, deadline=None)
    @given(text=ANY_TEXT)
    @pytest.mark.parametrize("name", ["trained", *PATTERNS])
    def test_are_those_of_the_library(self, tokenizers: dict[str, Tokenizer], name: str, text: str) -> None:
        tokenizer = tokenizers[name]
        assert tokenizer.encode_batch(["x", text])[1].tolist() == library_ids(tokenizer, text)
        assert tokenizer.is_fast

    def test_of_whole_files(self, tokenizers: dict[str, Tokenizer]) -> None:
        for tokenizer in tokenizers.values():
            found = tokenizer.encode_batch(TEXTS)
            for text, ids in zip(TEXTS, found, strict=True):
                assert ids.tolist() == library_ids(tokenizer, text)
                assert ids.dtype == tokenizer.dtype
                assert ids.flags.writeable
            assert tokenizer.is_fast

    def test_most_words_are_asked_of_the_library_once(
        self, tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokenizer = tokenizers["trained"].with_fast_path()
        asked: list[str] = []
        path = tokenizer._fast
        assert path is not None
        encode = path._encode_missing
        monkeypatch.setattr(path, "_encode_missing", lambda words: [asked.extend(words), encode(words)][1])
        first = tokenizer.encode_batch(TEXTS)
        asked.clear()
        again = tokenizer.encode_batch(TEXTS)
        assert asked == [word for word in sorted(asked) if len(word) > 64]
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))

    def test_a_memory_that_overflows_changes_nothing(
        self, tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_MAX_CACHED_WORDS", 50)
        monkeypatch.setattr(module, "_GROUP_CHARACTERS", 300)
        tokenizer = tokenizers["trained"].with_fast_path()
        assert tokenizer.encode(TEXTS[0]).tolist() == library_ids(tokenizer, TEXTS[0])
        path = tokenizer._fast
        assert path is not None
        assert len(path._known) < 200

    @pytest.mark.parametrize("window", [20, 57, 400])
    @pytest.mark.parametrize("name", ["trained", "llama3"])
    def test_batches_of_a_long_text_never_show(
        self, tokenizers: dict[str, Tokenizer], name: str, window: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_LONG_CHARACTERS", window)
        monkeypatch.setattr(module, "_BATCH_WORDS", window)
        tokenizer = tokenizers[name]
        text = TEXTS[1][:6000] + "\n\n   \n" * 50 + "é's ſ" * 20 + "a" * 500 + " " * 300
        assert tokenizer.encode(text).tolist() == library_ids(tokenizer, text)
        assert tokenizer.is_fast

    def test_special_tokens_stay_text_and_other_added_tokens_go_to_the_library(self) -> None:
        tokenizer = tokenizer_with(LLAMA3, special=False)
        text = "a<|endoftext|>b <tool> c"
        ids = tokenizer.encode(text).tolist()
        assert ids == library_ids(tokenizer, text)
        assert tokenizer.end_of_text_id not in ids
        assert 600 in ids  # the added token, which is not special, is one even in text

    @pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
    def test_text_is_normalised_as_the_library_does(self, form: str) -> None:
        tokenizer = tokenizer_with(LLAMA3, normalizer=getattr(normalizers, form)())
        path = tokenizer._fast
        assert path is not None
        for text in (
            "plain",
            "e\u0301 e\u0301tude",
            "é",
            "ﬁ ½ Å",
            "\u0301\u0300a\u0323\u0307",
            "한글 \u1112\u1161\u11ab",
        ):
            assert tokenizer.encode(text).tolist() == library_ids(tokenizer, text)
            assert path.encode_words([text])[0] is not None
        assert tokenizer.is_fast

    def test_a_pattern_may_look_ahead_over_any_distance(self) -> None:
        tokenizer = tokenizer_with(FROM_THE_RIGHT)
        for digits in (600, 601, 602):
            text = " a" * ((1 << 19) - 150) + " " + "7" * digits + " tail"
            assert tokenizer.encode(text).tolist() == library_ids(tokenizer, text)
        assert tokenizer.is_fast

    @pytest.mark.parametrize("normalized", [True, False])
    @pytest.mark.parametrize("form", ["NFC", "NFKC"])
    def test_added_tokens_are_found_where_the_library_finds_them(self, form: str, normalized: bool) -> None:
        """It looks for a normalised token in normalised text."""
        library = library_with(LLAMA3, normalizer=getattr(normalizers, form)())
        library.add_tokens([AddedToken("\ufb01x", normalized=normalized, special=False)])
        library.add_tokens([AddedToken("e\u0301!", normalized=normalized, special=False)])
        tokenizer = Tokenizer(library.to_str(), "<|endoftext|>", where="test", fast=True)
        assert tokenizer.is_fast
        for text in ("a fix b", "a \ufb01x b", "\xe9! e\u0301!", "\ufb01 x", "fi", "plain"):
            assert tokenizer.encode(text).tolist() == library_ids(tokenizer, text)
        assert tokenizer.is_fast

    @settings(max_examples=60, deadline=None)
    @given(text=ANY_TEXT | st.text("e\u0301\u0323a\u0300ﬁ½한\u1112\u1161 "))
    def test_any_text_is_normalised_as_the_library_does(self, normalising: Tokenizer, text: str) -> None:
        assert normalising.encode(text).tolist() == library_ids(normalising, text)
        assert normalising.is_fast

    def test_threads_share_what_they_learn(self, tokenizers: dict[str, Tokenizer]) -> None:
        tokenizer = tokenizers["o200k"].with_fast_path()
        parts = [[text[start : start + 700] for start in range(0, len(text), 700)] for text in TEXTS * 4]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(tokenizer.encode_batch, parts))
        reference = tokenizer.without_fast_path()
        for part, ids in zip(parts, found, strict=True):
            for one, expected in zip(ids, reference.encode_batch(part), strict=True):
                assert np.array_equal(one, expected)
        assert tokenizer.is_fast

    def test_long_documents(self, tokenizers: dict[str, Tokenizer]) -> None:
        for unit in ("word word\n", "größer 中文 it's\n"):
            text = unit * (3_000_000 // len(unit))
            tokenizer = tokenizers["trained"]
            ids = tokenizer.encode(text)
            assert tokenizer.token_byte_lengths()[ids].sum() == len(text.encode())
            assert np.array_equal(ids[:1000], library_ids(tokenizer, text[:20_000])[:1000])
            assert tokenizer.is_fast

    def test_half_surrogates_are_refused_as_ever(self, tokenizers: dict[str, Tokenizer]) -> None:
        for tokenizer in tokenizers.values():
            with pytest.raises(DataError, match="half a surrogate pair at character 4"):
                tokenizer.encode_batch(["fine", "abc\ud83d"])

    def test_travels_to_other_processes(self, tokenizers: dict[str, Tokenizer]) -> None:
        again = received(tokenizers["llama3"])
        assert again.is_fast
        assert again.fingerprint == tokenizers["llama3"].fingerprint
        assert not received(tokenizers["llama3"].without_fast_path()).is_fast


class TestSeveralCuts:
    """Pre-tokenizers that cut more than once, as those of StarCoder, SmolLM and DeepSeek."""

    SPLIT: ClassVar[dict[str, Any]] = {"type": "Split", "behavior": "Isolated", "invert": False}
    BYTES: ClassVar[dict[str, Any]] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    STEPS: ClassVar[dict[str, list[dict[str, Any]]]] = {
        "single digits": [{"type": "Digits", "individual_digits": True}, {**BYTES, "use_regex": True}],
        "all digits": [{"type": "Digits", "individual_digits": False}, {**BYTES, "use_regex": True}],
        "deepseek": [
            {**SPLIT, "pattern": {"Regex": r"\p{N}{1,3}"}},
            {**SPLIT, "pattern": {"Regex": "[一-龥぀-ゟ゠-ヿ]+"}},
            {**SPLIT, "pattern": {"Regex": DEEPSEEK}},
            {**BYTES, "use_regex": False},
        ],
        "three digits, then words": [
            {**SPLIT, "pattern": {"Regex": r"\p{N}{1,3}"}},
            {**SPLIT, "pattern": {"Regex": r"[!-/:-~]+"}},
            {**SPLIT, "pattern": {"Regex": LLAMA3}},
            {**BYTES, "use_regex": False},
        ],
    }

    @pytest.fixture(scope="class")
    @staticmethod
    def several() -> list[Tokenizer]:
        made: list[Tokenizer] = []
        for steps in TestSeveralCuts.STEPS.values():
            value = json.loads(library_with(GPT2_PATTERN).to_str())
            value["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
            made.append(Tokenizer(json.dumps(value), "<|endoftext|>", where="test", fast=True))
        return made

    @settings(max_examples=150, deadline=None)
    @given(text=ANY_TEXT | st.text("ab12\u0663\u00bd !.é一龥ゟ"))
    def test_ids_are_those_of_the_library(self, several: list[Tokenizer], text: str) -> None:
        for tokenizer in several:
            assert tokenizer.encode(text).tolist() == library_ids(tokenizer, text)
            assert tokenizer.is_fast

    def test_digits_are_those_of_the_pre_tokenizer_and_not_of_the_patterns(self, several: list[Tokenizer]) -> None:
        """Its table of Unicode is a newer one than that of the regular expressions."""
        text = "".join(f" {chr(point)}{chr(point + 1)}a" for point in (0x11DE0, 0x16FF4, 0x0663, 0xBC, 0x2160))
        for tokenizer in several:
            assert tokenizer.encode(text).tolist() == library_ids(tokenizer, text)
            assert tokenizer.is_fast

    def test_of_whole_files_in_batches(self, several: list[Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
        for window in (90, 1 << 20):
            monkeypatch.setattr(module, "_LONG_CHARACTERS", window)
            monkeypatch.setattr(module, "_BATCH_WORDS", window)
            for tokenizer in several:
                for text in (*TEXTS, "12345 67\u0663 é" * 300):
                    assert tokenizer.encode(text).tolist() == library_ids(tokenizer, text)
                assert tokenizer.is_fast


class TestWhereThereIsNone:
    @pytest.mark.parametrize("kind", ["byte", "char"])
    def test_tables_are_faster_still(self, kind: Any) -> None:
        assert not train(TokenizerConfig(kind=kind), TEXTS).with_fast_path().is_fast

    def test_other_pre_tokenizers(self, tmp_path: Path) -> None:
        for change in (
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
            {"type": "Sequence", "pretokenizers": [
                {"type": "Punctuation", "behavior": "Isolated"},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ]},
            {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ]},
            None,
        ):  # fmt: skip
            value = json.loads(library_with(GPT2_PATTERN).to_str())
            value["pre_tokenizer"] = change
            (tmp_path / "t.json").write_text(json.dumps(value))
            tokenizer = load(tmp_path / "t.json", end_of_text="<|endoftext|>").with_fast_path()
            assert not tokenizer.is_fast
            assert tokenizer.encode(TEXTS[0]).tolist() == library_ids(tokenizer, TEXTS[0])


class _Wrong:
    """A pattern that cuts some texts otherwise: before every ``q``."""

    def __init__(self, right: Any, marks: Sequence[str]) -> None:
        self._right, self._marks = right, marks

    def words(self, text: str) -> list[str] | None:
        if not any(mark in text for mark in self._marks):
            return self._right.words(text)
        return [part for word in self._right.words(text) for part in word.replace("the", "t\0he").split("\0")]


class TestDifference:
    def wrong(self, *marks: str) -> Tokenizer:
        tokenizer = train(TokenizerConfig(vocab_size=700), TEXTS).with_fast_path()
        assert tokenizer._fast is not None
        tokenizer._fast._pattern = _Wrong(tokenizer._fast._pattern, marks)  # type: ignore[assignment]
        return tokenizer

    def test_at_start_is_told_and_ends_it(self, caplog: pytest.LogCaptureFixture) -> None:
        tokenizer = self.wrong("the")
        with caplog.at_level(logging.WARNING):
            found = tokenizer.encode_batch(TEXTS)
        assert [ids.tolist() for ids in found] == [library_ids(tokenizer, text) for text in TEXTS]
        assert not tokenizer.is_fast
        assert tokenizer.fast_path_fallbacks == 1
        assert "fast path of the tokenizer is disabled" in caplog.text

    def test_later_is_noticed_in_the_share_that_is_checked(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokenizer = self.wrong("MARK")
        texts = [f"the {number}" for number in range(50)]
        for _ in range(3):
            assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == [library_ids(tokenizer, t) for t in texts]
        assert tokenizer.is_fast
        monkeypatch.setattr(module, "_CHECKED_ONE_IN", 8)
        marked = [f"MARK the {number}" for number in range(200)]
        found = tokenizer.encode_batch(marked)
        assert [ids.tolist() for ids in found] == [library_ids(tokenizer, text) for text in marked]
        assert not tokenizer.is_fast
        assert tokenizer.fast_path_fallbacks == 1
        assert "fast path of the tokenizer is disabled" in caplog.text

    @pytest.mark.parametrize("staged", [True, False])
    def test_a_unit_in_which_it_is_noticed_is_wholly_of_the_library(
        self, staged: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines = [[f"the plain line {number}" for number in range(40)] for _ in range(2)]
        lines[1] = [line.replace("plain", "MARK") for line in lines[1]]
        corpus = corpus_of(lines, 40)
        monkeypatch.setattr("vorox.data.text.unit_reader._BATCH_DOCUMENTS", 8)
        # Nothing is checked but the last line, when the others of its unit have long been encoded, wrongly.
        monkeypatch.setattr(module, "_is_checked", lambda text: text == "the MARK line 39")

        def built(tokenizer: Tokenizer) -> list[Any]:
            recipe = recipe_for(tokenizer)  # type: ignore[arg-type]
            pipeline = BuildPipelineConfig(staged=staged)
            work = UnitBuilder(corpus.files, corpus.read_unit, tokenizer, recipe, pipeline=pipeline)
            return [[record.content for _, record in unit.chunks] for unit in work.run(corpus.units)]

        tokenizer = self.wrong("MARK")
        found = built(tokenizer)
        assert tokenizer.fast_path_fallbacks == 1
        assert found == built(tokenizer.without_fast_path())
        monkeypatch.setattr(module, "_is_checked", lambda text: False)
        assert built(self.wrong("MARK")) != found  # so it would have been wrong

    def test_share_that_is_checked_is_small_and_depends_on_the_text_alone(self) -> None:
        texts = [f"text {number}" for number in range(20_000)]
        checked = [text for text in texts if module._is_checked(text)]
        assert 10 < len(checked) < 80
        assert checked == [text for text in texts if module._is_checked(text)]
