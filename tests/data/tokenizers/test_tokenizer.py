"""Ids equal those of transformers on any number of threads and encode exactly the text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, pre_tokenizers

from vorox.core.errors import ConfigError, DataError
from vorox.core.schema.data import SourceConfig
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.data.storage import local_path
from vorox.data.text.sources import list_source
from vorox.data.tokenizers.loading import load, train
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.data.tokenizers.tokenizer_json import byte_alphabet

KINDS = ("bpe", "byte", "char")
EXTRA = "äöüß€😀 \u3000\x00\x7f\ufeff\u200d\U0010ffff\r\n\t<|endoftext|>"
TEXTS = (
    *(local_path(f"stdlib:{name}").read_text() for name in ("json/decoder.py", "textwrap.py", "tokenize.py")),
    EXTRA,
    "".join(map(chr, range(0x250))),
)
ALPHABET = sorted(set("".join(TEXTS)))


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {kind: make(kind) for kind in KINDS}


def make(kind: str, **options: Any) -> Tokenizer:
    return train(TokenizerConfig.model_validate({"kind": kind, "vocab_size": 600, **options}), TEXTS)


@pytest.mark.parametrize(("kind", "size", "end"), [("bpe", 600, 0), ("byte", 257, 256), ("char", None, None)])
def test_vocabularies(tokenizers: dict[str, Tokenizer], kind: str, size: int | None, end: int | None) -> None:
    tokenizer = tokenizers[kind]
    assert tokenizer.vocab_size == (size or len(ALPHABET) + 1)
    assert tokenizer.end_of_text_id == (len(ALPHABET) if end is None else end)
    assert tokenizer.lossless
    assert tokenizer.unknown_id is None


def test_byte_ids_are_bytes_and_character_ids_are_sorted(tokenizers: dict[str, Tokenizer]) -> None:
    assert tokenizers["byte"].encode("Aä\0").tolist() == [65, 0xC3, 0xA4, 0]
    assert tokenizers["char"].encode("".join(ALPHABET)).tolist() == list(range(len(ALPHABET)))


def test_bpe_compresses_and_knows_every_byte(tokenizers: dict[str, Tokenizer]) -> None:
    text = TEXTS[0]
    assert len(tokenizers["bpe"].encode(text)) < 0.5 * len(text)
    every_byte = "".join(map(chr, range(256))) + "\u0800\U00010000\U000fffff"
    assert tokenizers["bpe"].decode(tokenizers["bpe"].encode(every_byte)) == every_byte


@pytest.mark.parametrize("kind", ["bpe", "byte"])
@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(codec="utf-8")) | st.text("ab \n<|endoftext|>é😀\0"))
def test_round_trip(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    ids = tokenizers[kind].encode(text)
    assert tokenizers[kind].decode(ids) == text
    assert tokenizers[kind].token_byte_lengths()[ids].sum() == len(text.encode())
    assert tokenizers[kind].end_of_text_id not in ids


@settings(max_examples=100, deadline=None)
@given(text=st.text(ALPHABET))
def test_round_trip_of_characters(tokenizers: dict[str, Tokenizer], text: str) -> None:
    ids = tokenizers["char"].encode(text)
    assert len(ids) == len(text)
    assert tokenizers["char"].decode(ids) == text
    assert tokenizers["char"].token_byte_lengths()[ids].sum() == len(text.encode())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["", "\0", "\0\0a", "<|endoftext|>", "a<|endoftext|>b", " ", "\n\n\n"])
def test_awkward_documents(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    before, ids, after = tokenizer.encode_batch(["x", text, "x"])
    assert tokenizer.decode(ids) == text
    assert tokenizer.end_of_text_id not in ids
    assert before.tolist() == after.tolist()
    assert ids.dtype == tokenizer.dtype == np.uint16


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_at_all(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    assert tokenizers[kind].encode_batch([]) == []
    assert tokenizers[kind].decode([]) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_half_surrogate_pairs_are_refused(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    with pytest.raises(DataError, match=r"surrogate pair at character 4|U\+D83D") as caught:
        tokenizers[kind].encode_batch(["fine", "abc\ud83d"])
    assert caught.value.hint


def test_unknown_character_is_named() -> None:
    tokenizer = train(TokenizerConfig(kind="char"), ["abc", "cd"])
    with pytest.raises(DataError, match=r"'€' \(U\+20AC\) is not in the vocabulary") as caught:
        tokenizer.encode("ab€")
    assert caught.value.where == "character 3 of a text"
    with pytest.raises(DataError, match=r"'\]'"):
        tokenizer.encode("a]")  # between the known characters


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_decode_to_their_text_and_other_ids_to_a_mark(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    ids = [*tokenizer.encode("a").tolist(), tokenizer.end_of_text_id, tokenizer.vocab_size + 5]
    assert tokenizer.decode(ids) == "a<|endoftext|>\ufffd"
    assert tokenizer.token_byte_lengths()[tokenizer.end_of_text_id] == 0
    assert tokenizer.token_byte_lengths().shape == (tokenizer.vocab_size,)


def test_half_a_character_decodes_to_a_mark(tokenizers: dict[str, Tokenizer]) -> None:
    assert tokenizers["byte"].decode([0x61, 0xC3]) == "a\ufffd"


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize("kind", ["byte", "char"])
@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("model", {"end_of_word_suffix": "</w>"}),
        ("model", {"continuing_subword_prefix": "##"}),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [BYTE_LEVEL, BYTE_LEVEL]}),
        ("pre_tokenizer", None),
        ("decoder", None),
        ("normalizer", None),
    ],
)
def test_tables_stand_in_for_the_library_only_where_they_are_equal(
    tokenizers: dict[str, Tokenizer], kind: str, section: str, change: dict[str, Any] | None
) -> None:
    value = json.loads(tokenizers[kind].files()["tokenizer.json"])
    if change is None:
        del value[section]
    elif section == "model":
        value[section].update(change)
    else:
        value[section] = change
    tokenizer = Tokenizer(json.dumps(value), "<|endoftext|>", where="test")
    library = LibraryTokenizer.from_str(json.dumps(value))
    library.encode_special_tokens = True
    for text in ("hello world", "é x", ""):
        assert tokenizer.encode(text).tolist() == library.encode(text, add_special_tokens=False).ids


class TestLongDocuments:
    def test_a_long_document_has_the_ids_of_the_whole(self, tokenizers: dict[str, Tokenizer]) -> None:
        """Long texts are encoded in segments; the library on the whole text is the oracle."""
        listed = list_source(SourceConfig(name="s", format="python_stdlib", max_bytes=3 << 20))
        text = "".join(local_path(file.uri).read_text() for file in listed.stored)[: 2 << 20]
        library = LibraryTokenizer.from_str(tokenizers["bpe"].files()["tokenizer.json"].decode())
        library.encode_special_tokens = True
        expected = library.encode(text, add_special_tokens=False).ids
        assert np.array_equal(tokenizers["bpe"].encode(text), expected)

    @settings(max_examples=200, deadline=None)
    @given(text=st.text("aZé1 \n\t<|>'s.\u3000", min_size=10, max_size=200), piece=st.integers(1, 30))
    def test_pieces_never_show(self, tokenizers: dict[str, Tokenizer], text: str, piece: int) -> None:
        whole = tokenizers["bpe"].encode(text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("vorox.data.tokenizers.tokenizer._SEGMENT_CHARACTERS", piece)
            assert np.array_equal(tokenizers["bpe"].encode(text), whole)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("unit", ["a", " ", "\n", "word word\n", "😀"])
    def test_ten_megabytes(self, tokenizers: dict[str, Tokenizer], kind: str, unit: str) -> None:
        size = 10_000_000 if kind != "bpe" or unit == "word word\n" else 300_000
        text = unit * (size // len(unit.encode()))
        ids = tokenizers[kind].encode(text)
        assert tokenizers[kind].token_byte_lengths()[ids].sum() == len(text.encode())
        assert tokenizers[kind].decode(ids[:1000]) == text[: len(tokenizers[kind].decode(ids[:1000]))]


class TestTraining:
    PROGRAM = (
        "import sys, hashlib; from vorox.core.schema import *; from vorox.data.tokenizers.loading import train; "
        "from vorox.data.text.sources import list_source; from vorox.data.storage import local_path; "
        "listed = list_source(SourceConfig(name='s', format='python_stdlib', max_bytes=1 << 20)); "
        "tokenizer = train(TokenizerConfig(vocab_size=1500), (local_path(f.uri).read_text() for f in listed.stored)); "
        "print(hashlib.sha256(tokenizer.files()['tokenizer.json']).hexdigest(), tokenizer.fingerprint)"
    )

    def test_is_the_same_whatever_the_threads(self) -> None:
        outputs: set[str] = set()
        threads: tuple[dict[str, str], ...] = (
            {"RAYON_NUM_THREADS": "1"},
            {"RAYON_NUM_THREADS": "4"},
            {"TOKENIZERS_PARALLELISM": "false"},
            {"PYTHONHASHSEED": "3"},
        )
        for setting in threads:
            result = subprocess.run(
                [sys.executable, "-c", self.PROGRAM],
                env={**os.environ, **setting},
                capture_output=True,
                text=True,
                check=True,
            )
            outputs.add(result.stdout)
        assert len(outputs) == 1
        assert len(outputs.pop().split()[0]) == 64

    def test_of_too_little_text_the_vocabulary_has_all_pairs_and_no_more(self) -> None:
        made = train(TokenizerConfig(kind="bpe", vocab_size=4096), ["a short text, a short text"])
        assert 257 < made.vocab_size < 300
        assert made.decode(made.encode("a short text")) == "a short text"

    @pytest.mark.parametrize("kind", ["bpe", "byte"])
    @pytest.mark.parametrize("end", ["the", "a", "..."])
    def test_an_end_of_text_that_could_be_text_is_refused(self, kind: str, end: str) -> None:
        if kind == "byte" and len(end) > 1:
            assert make(kind, end_of_text=end).encode(end).tolist() == list(end.encode())
            return
        size = 259 if len(end) > 1 else 257
        config = TokenizerConfig.model_validate({"kind": kind, "vocab_size": size, "end_of_text": end})
        with pytest.raises(ConfigError, match="would be encoded as the end") as caught:
            train(config, [f"{end}\n" * 500 + "xy\n" * 100])
        assert caught.value.hint

    def test_an_end_of_text_that_is_a_character_is_refused(self) -> None:
        with pytest.raises(ConfigError):
            make("char", end_of_text="a")

    def test_characters_need_text(self) -> None:
        with pytest.raises(DataError, match="needs text"):
            train(TokenizerConfig(kind="char"), [])

    @pytest.mark.parametrize("options", [{"kind": "file"}, {"kind": "bpe", "path": "x.json"}])
    def test_path_belongs_to_kind_file(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError) as caught:
            train(TokenizerConfig.model_validate(options), TEXTS)
        assert caught.value.where == "tokenizer.path"


class TestFiles:
    @pytest.mark.parametrize("kind", KINDS)
    def test_saved_is_loaded_equal(self, tokenizers: dict[str, Tokenizer], kind: str, tmp_path: Path) -> None:
        tokenizer = tokenizers[kind]
        tokenizer.save(tmp_path / "tokenizer")
        for path in (tmp_path / "tokenizer", tmp_path / "tokenizer" / "tokenizer.json"):
            again = load(path)
            assert again.fingerprint == tokenizer.fingerprint
            assert again.files() == tokenizer.files()
            assert again.end_of_text_id == tokenizer.end_of_text_id
            assert all(
                np.array_equal(a, b)
                for a, b in zip(again.encode_batch(TEXTS), tokenizer.encode_batch(TEXTS), strict=True)
            )

    def test_fingerprints_tell_tokenizers_apart(self, tokenizers: dict[str, Tokenizer]) -> None:
        others = [*tokenizers.values(), make("bpe", vocab_size=601), make("byte", end_of_text="<eot>")]
        assert len({tokenizer.fingerprint for tokenizer in others}) == len(others)

    def test_formatting_of_the_file_does_not_count(self, tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
        value = json.loads(tokenizers["bpe"].files()["tokenizer.json"])
        (tmp_path / "t.json").write_text(json.dumps(value, indent=3))
        again = load(tmp_path / "t.json", end_of_text="<|endoftext|>")
        assert again.fingerprint == tokenizers["bpe"].fingerprint

    def test_missing_end_of_text_is_added(self, tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
        tokenizers["bpe"].save(tmp_path)
        other = load(tmp_path, end_of_text="<end/>")
        assert other.vocab_size == 601
        assert other.end_of_text_id == 600
        assert other.decode(other.encode("<end/><|endoftext|>")) == "<end/><|endoftext|>"
        assert not set(other.encode("<end/><|endoftext|>").tolist()) & {0, 600}

    def test_options_that_cut_pad_or_randomise_are_off(self, tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
        value = json.loads(tokenizers["bpe"].files()["tokenizer.json"])
        value["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
        value["padding"] = {
            "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "<|endoftext|>",
        }  # fmt: skip
        value["model"]["dropout"] = 0.5
        (tmp_path / "t.json").write_text(json.dumps(value))
        again = load(tmp_path / "t.json", end_of_text="<|endoftext|>")
        assert np.array_equal(again.encode(TEXTS[0]), tokenizers["bpe"].encode(TEXTS[0]))
        assert again.fingerprint == tokenizers["bpe"].fingerprint

    def test_truncation_does_not_count_where_a_model_knows_no_dropout(self) -> None:
        words = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2}, "unk_token": "?"}
        special = {"id": 3, "content": "<end/>", "single_word": False, "lstrip": False, "rstrip": False}
        value = {
            "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
            "added_tokens": [special | {"normalized": False, "special": True}],
            "pre_tokenizer": {"type": "Whitespace"}, "decoder": None, "model": words,
        }  # fmt: skip
        cut = value | {"truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}}
        plain, other = (Tokenizer(json.dumps(each), "<end/>", where="here") for each in (value, cut))
        assert other.fingerprint == plain.fingerprint
        assert other.encode("a b a").tolist() == plain.encode("a b a").tolist() == [0, 1, 0]

    @pytest.mark.parametrize(
        "damage",
        [lambda path: path.unlink(), lambda path: path.write_text("{"), lambda path: path.write_text('{"a": 1}')],
    )
    def test_missing_or_broken_file_is_named(
        self, tokenizers: dict[str, Tokenizer], tmp_path: Path, damage: Callable[[Path], Any]
    ) -> None:
        tokenizers["bpe"].save(tmp_path)
        damage(tmp_path / "tokenizer.json")
        with pytest.raises(DataError) as caught:
            load(tmp_path)
        assert "tokenizer.json" in caught.value.where
        with pytest.raises(DataError):
            train(TokenizerConfig(kind="file", path=str(tmp_path / "tokenizer.json")), ())

    def test_directory_without_a_named_end_asks_for_it(self, tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
        tokenizers["bpe"].save(tmp_path)
        (tmp_path / "tokenizer_config.json").unlink()
        with pytest.raises(DataError, match="Cannot read the tokenizer") as caught:
            load(tmp_path)
        assert caught.value.where.endswith("tokenizer_config.json")
        assert load(tmp_path, end_of_text="<|endoftext|>").vocab_size == 600

    def test_other_vocabularies_load_with_their_unknown_token(self, tmp_path: Path) -> None:
        library = LibraryTokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "</s>": 70_000}, unk_token="<unk>"))
        library.save(str(tmp_path / "words.json"))
        tokenizer = load(tmp_path / "words.json", end_of_text="<|end|>")
        assert tokenizer.unknown_id == 0
        assert not tokenizer.lossless
        assert tokenizer.dtype == np.uint32
        assert tokenizer.encode_batch(["hello", "what"])[1].tolist() == [0]

    def test_vocabulary_in_which_the_end_is_a_word_is_refused(self, tmp_path: Path) -> None:
        library = LibraryTokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
        library.save(str(tmp_path / "words.json"))
        with pytest.raises(ConfigError, match="would be encoded as the end of the text"):
            load(tmp_path / "words.json", end_of_text="</s>")


def test_byte_alphabet_is_that_of_gpt2() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert {alphabet["Ġ"], alphabet["Ċ"], alphabet["!"], alphabet["ÿ"]} == {0x20, 0x0A, 0x21, 0xFF}
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.hf
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_it_and_gives_the_same_ids(
    tokenizers: dict[str, Tokenizer], kind: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = tokenizers[kind]
    tokenizer.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert theirs.eos_token == "<|endoftext|>"
    assert theirs.eos_token_id == tokenizer.end_of_text_id
    assert len(theirs) == tokenizer.vocab_size
    for text in (*TEXTS[:3], "", "a b", "".join(ALPHABET[:200])):
        ids = tokenizer.encode(text).tolist()
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert theirs.decode(ids) == text
    spelled = "a<|endoftext|>b"
    assert theirs(spelled, split_special_tokens=True)["input_ids"] == tokenizer.encode(spelled).tolist()
    assert theirs(spelled)["input_ids"].count(tokenizer.end_of_text_id) == 1
