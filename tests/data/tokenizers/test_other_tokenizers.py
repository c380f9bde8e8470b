"""Tokenizers of tiktoken and of Hugging Face models yield the ids of their own packages."""

from __future__ import annotations

import base64
import json
import pickle
import random
import shutil
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servers.hub import HubServer, model_hub
from vorox.core.config import load_config
from vorox.core.errors import ConfigError, DataError
from vorox.core.schema.data import DataConfig
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.data.storage import local_path
from vorox.data.tokenizers.loading import load, train
from vorox.data.tokenizers.store import resolve_tokenizer
from vorox.data.tokenizers.tiktoken_conversion import library_pattern
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.data.tokenizers.tokenizer_json import byte_alphabet

tiktoken = pytest.importorskip("tiktoken")
transformers = pytest.importorskip("transformers")

R50K = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"""
    r"""|\s+(?!\S)|\s"""
)
TEXT = local_path("stdlib:textwrap.py").read_text()
ANY_TEXT = st.text(st.characters(codec="utf-8")) | st.text(
    " \n\t\r's1!é中\u0663\u017f😀\u0300thequickbrown<|endoftext|>"
)


def make(**options: Any) -> Tokenizer:
    """As a run makes it."""
    data = DataConfig.model_validate({"sources": [{"name": "s", "format": "python_stdlib"}]})
    config = TokenizerConfig.model_validate(options)
    return resolve_tokenizer(
        config, data, [], [Fraction(1)], root=Path("/nowhere"), build=False, on_progress=lambda *_: None
    )


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """Trained by tiktoken's own teaching code."""
    from tiktoken._educational import bpe_train

    return bpe_train(TEXT[:6000] + "äöü é 中文 12345 " * 3, 420, CL100K, visualise=None)


@pytest.fixture(scope="module")
def rank_file(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("ranks") / "small.tiktoken"
    file.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    return file


class TestTiktoken:
    @pytest.fixture(scope="class")
    @staticmethod
    def pairs(ranks: dict[bytes, int], rank_file: Path) -> list[tuple[Tokenizer, Any]]:
        return [
            (
                make(kind="tiktoken", path=str(rank_file), pattern=pattern),
                tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}),
            )
            for pattern in (CL100K, R50K)
        ]

    @pytest.fixture(scope="class")
    @staticmethod
    def saved(pairs: list[tuple[Tokenizer, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
        """What transformers makes of the saved tokenizers."""
        folders = [tmp_path_factory.mktemp("saved") for _ in pairs]
        for (tokenizer, _), folder in zip(pairs, folders, strict=True):
            tokenizer.save(folder)
        return [transformers.AutoTokenizer.from_pretrained(folder) for folder in folders]

    @settings(max_examples=150, deadline=None)
    @given(text=ANY_TEXT)
    def test_ids_are_those_of_tiktoken(self, pairs: list[tuple[Tokenizer, Any]], text: str) -> None:
        for tokenizer, oracle in pairs:
            assert tokenizer.encode(text).tolist() == oracle.encode_ordinary(text)
            assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_whole_files_by_the_fast_path(self, pairs: list[tuple[Tokenizer, Any]]) -> None:
        for tokenizer, oracle in pairs:
            assert tokenizer.is_fast
            assert tokenizer.lossless
            assert tokenizer.encode(TEXT * 3).tolist() == oracle.encode_ordinary(TEXT * 3)
            assert tokenizer.is_fast

    def test_end_of_text_comes_behind_the_ranks(self, pairs: list[tuple[Tokenizer, Any]]) -> None:
        assert pairs[0][0].end_of_text_id == 420
        assert pairs[0][0].vocab_size == 421
        assert 420 not in pairs[0][0].encode("<|endoftext|>").tolist()

    @settings(max_examples=60, deadline=None)
    @given(text=ANY_TEXT)
    def test_ids_are_those_of_transformers_as_well(self, saved: list[Any], pairs: list[Any], text: str) -> None:
        for theirs, (tokenizer, oracle) in zip(saved, pairs, strict=True):
            text_without_specials = text.replace("<|endoftext|>", "")
            ids = theirs.encode(text_without_specials, add_special_tokens=False)
            assert ids == tokenizer.encode(text_without_specials).tolist()
            assert ids == oracle.encode_ordinary(text_without_specials)

    def test_saved_file_gives_transformers_the_same_ids(
        self, pairs: list[tuple[Tokenizer, Any]], tmp_path: Path
    ) -> None:
        for number, (tokenizer, oracle) in enumerate(pairs):
            tokenizer.save(tmp_path / str(number))
            theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / str(number))
            text = TEXT[:3000] + " it's \u0663\u0663\u0663\u0663 1234567 \r\n\r\n  x"
            assert theirs.encode(text, add_special_tokens=False) == oracle.encode_ordinary(text)
            assert theirs.eos_token == "<|endoftext|>"
            again = load(tmp_path / str(number))
            assert again.fingerprint == tokenizer.fingerprint

    def test_patterns_mean_the_same_to_the_other_engine(self) -> None:
        assert library_pattern(R50K) == R50K.replace(r"\s++$", r"\s++\z")
        assert r"|(?>\p{N}{1,3})|" in library_pattern(CL100K)
        assert library_pattern(r"[a-z]{2}+\$|a{2}") == r"(?>[a-z]{2})\$|a{2}"

    @pytest.mark.parametrize(
        ("pattern", "library"),
        [
            (r"[$€]\p{N}+", r"[$€]\p{N}+"), (r"[^$]|\$|[\$]$", r"[^$]|\$|[\$]\z"),
            (r"^a|[^a]|[\^^]", r"\Aa|[^a]|[\^^]"), (r"[a&&[^$]]", r"[a&&[^$]]"),
            (r"(?:ab|c){2}+d", r"(?>(?:ab|c){2})d"), (r"[}{]{1,2}+", r"(?>[}{]{1,2})"), (r"\{{2}+", r"(?>\{{2})"),
            (r"(?:a{2}+b){3}+", r"(?>(?:(?>a{2})b){3})"), (r"(?i:'s|'t)?$", r"(?i:'s|'t)?\z"),
        ],
    )  # fmt: skip
    def test_every_construct_is_read_as_what_it_is(self, pattern: str, library: str) -> None:
        assert library_pattern(pattern) == library

    @pytest.mark.parametrize(
        "pattern",
        [r"\w+|\W", r"[\w]+|\s|.", r"(?i)a|.", r"(?m:^a)|.", r"\pL+|.", r"[[:alpha:]]+|.", r"[a--b]|.", r"\ba|.",
         r"(?i:ss)|.", r"\p{L}+|\s+", r"a{2}?|."],
    )  # fmt: skip
    def test_what_the_two_read_differently_is_refused(self, rank_file: Path, pattern: str) -> None:
        with pytest.raises(ConfigError) as caught:
            make(kind="tiktoken", path=str(rank_file), pattern=pattern)
        assert caught.value.where == "tokenizer.pattern"

    @pytest.mark.parametrize("installed", [True, False])
    def test_dollar_in_brackets_is_a_dollar(
        self, tmp_path: Path, installed: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ranks = {bytes([byte]): byte for byte in range(256)}
        ranks |= {
            token: 256 + index for index, token in enumerate((b"$1", b"$10", b"$100", b" z", b"10", b"00", b"z1"))
        }
        lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
        (tmp_path / "a.tiktoken").write_bytes(b"".join(lines))
        pattern = r"[$€]\p{N}+|\p{L}+|\p{N}+|\s+|[^\s\p{L}\p{N}]"
        oracle = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        if not installed:
            monkeypatch.setitem(sys.modules, "tiktoken", None)
        tokenizer = make(kind="tiktoken", path=str(tmp_path / "a.tiktoken"), pattern=pattern)
        for text in ("$100", "az10", "cost $100 z10", "€10$"):
            assert tokenizer.encode(text).tolist() == oracle.encode_ordinary(text)

    def test_merges_of_gpt2(self, tmp_path: Path) -> None:
        letters = {byte: letter for letter, byte in byte_alphabet().items()}
        merges = [(b"t", b"h"), (b"th", b"e"), (b" ", b"the"), (b"i", b"n"), (b"in", b"g"), (b"\xc3", b"\xa4")]
        lines = [" ".join("".join(letters[byte] for byte in part) for part in merge) for merge in merges]
        (tmp_path / "vocab.bpe").write_text("#version: 0.2\n" + "\n".join(lines) + "\n", encoding="utf-8")
        tokenizer = make(kind="tiktoken", path=str(tmp_path / "vocab.bpe"))
        # The bytes come in the order of their printable characters: "!" is 0, as in GPT-2.
        assert tokenizer.encode("!").tolist() == [0]
        assert tokenizer.encode(" the thing \u00e4").tolist()[0] == 256 + 2
        assert [tokenizer.decode([index]) for index in range(256, 262)] == ["th", "the", " the", "in", "ing", "ä"]
        assert tokenizer.end_of_text_id == 262

    def test_named_encoding_keeps_its_special_tokens(
        self, ranks: dict[bytes, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        special = {"<|endoftext|>": 430, "<|fim_prefix|>": 431, "<|endofprompt|>": 449}
        encoding = tiktoken.Encoding("x", pat_str=CL100K, mergeable_ranks=ranks, special_tokens=special)
        monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
        tokenizer = make(kind="tiktoken", path="cl100k_base")
        assert tokenizer.vocab_size == 450
        assert tokenizer.end_of_text_id == 430
        text = "a <|fim_prefix|> b"
        assert tokenizer.encode(text).tolist() == encoding.encode_ordinary(text)
        assert tokenizer.decode([431, 449]) == "<|fim_prefix|><|endofprompt|>"

    def test_encoding_that_cannot_be_fetched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unreachable(name: str) -> Any:
            raise ConnectionError("no route to host")

        monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
        with pytest.raises(DataError, match="no route to host") as caught:
            make(kind="tiktoken", path="gpt2")
        assert "TIKTOKEN_CACHE_DIR" in caught.value.hint

    def test_without_the_package(self, rank_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "tiktoken", None)
        assert make(kind="tiktoken", path=str(rank_file)).vocab_size == 421  # files need no package
        with pytest.raises(ConfigError, match="not installed") as caught:
            make(kind="tiktoken", path="gpt2")
        assert "[tiktoken]" in caught.value.hint

    @pytest.mark.parametrize(
        ("name", "content", "match"),
        [
            ("a.tiktoken", b"not base64! 1\n", "The line is not a base64 token"),
            ("a.tiktoken", b"YQ== one\n", "The line is not a base64 token"),
            ("a.tiktoken", b"YQ== 1\n", "no rank for byte 0"),
            ("a.tiktoken", b"".join(base64.b64encode(bytes([b])) + b" 7\n" for b in range(256)), "two tokens of one"),
            ("a.bpe", b"#version\na b c\n", "The line is not a pair of tokens"),
        ],
    )  # fmt: skip
    def test_broken_files_are_named(self, tmp_path: Path, name: str, content: bytes, match: str) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=match) as caught:
            make(kind="tiktoken", path=str(tmp_path / name))
        assert name in caught.value.where

    def test_missing_file_unknown_encoding_and_wrong_pattern(self, rank_file: Path) -> None:
        with pytest.raises(DataError, match="No such file"):
            make(kind="tiktoken", path="nowhere.tiktoken")
        with pytest.raises(ConfigError, match="'gpt-5' is neither a file nor a known encoding"):
            make(kind="tiktoken", path="gpt-5")
        with pytest.raises(ConfigError, match="has its own pattern"):
            make(kind="tiktoken", path="gpt2", pattern=R50K)
        with pytest.raises(ConfigError) as caught:
            make(kind="tiktoken", path=str(rank_file), pattern=r"\p{Nonsense}|.")
        assert caught.value.where == "tokenizer.pattern"


@pytest.fixture
def models(tmp_path: Path) -> Iterator[HubServer]:
    with model_hub(tmp_path / "hub") as hub:
        yield hub


class TestHuggingFace:
    def folder(self, tmp_path: Path, end: str = "</s>") -> Path:
        trained = train(TokenizerConfig(vocab_size=500, end_of_text=end), [TEXT])
        trained.save(tmp_path / "model")
        return tmp_path / "model"

    def test_directory_with_its_own_end(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path)
        tokenizer = make(kind="huggingface", path=str(folder))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert tokenizer.end_of_text == "</s>"
        assert tokenizer.end_of_text_id == theirs.eos_token_id
        assert tokenizer.vocab_size == 500
        assert tokenizer.encode(TEXT).tolist() == theirs.encode(TEXT, add_special_tokens=False)
        assert tokenizer.is_fast
        assert make(kind="huggingface", path=str(folder), end_of_text="<end/>").vocab_size == 501
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
        assert make(kind="huggingface", path=str(folder)).fingerprint == tokenizer.fingerprint
        (folder / "tokenizer_config.json").unlink()
        assert make(kind="huggingface", path=str(folder)).end_of_text == "<|endoftext|>"

    def test_repository_at_a_revision(self, tmp_path: Path, models: HubServer) -> None:
        folder = self.folder(tmp_path)
        files: dict[str, bytes | None] = {file.name: file.read_bytes() for file in folder.iterdir()}
        first = models.commit("owner/model", {**files, "weights.safetensors": b"x" * 5000})
        old = make(kind="huggingface", path="owner/model")
        assert old.fingerprint == make(kind="huggingface", path=str(folder)).fingerprint
        shutil.rmtree(folder)
        train(TokenizerConfig(vocab_size=510, end_of_text="</s>"), [TEXT]).save(folder)
        models.commit("owner/model", {file.name: file.read_bytes() for file in folder.iterdir()})
        assert make(kind="huggingface", path="owner/model").vocab_size == 510
        assert make(kind="huggingface", path="owner/model", revision=first).fingerprint == old.fingerprint
        assert not any("weights" in request.path for request in models.log.requests)

    def test_pinned_revision_needs_no_network_the_second_time(
        self, tmp_path: Path, models: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = self.folder(tmp_path)
        sha = models.commit("owner/model", {file.name: file.read_bytes() for file in folder.iterdir()})
        first = make(kind="huggingface", path="owner/model", revision=sha)
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        assert make(kind="huggingface", path="owner/model", revision=sha).fingerprint == first.fingerprint
        with pytest.raises(DataError, match="cannot be downloaded") as caught:
            make(kind="huggingface", path="owner/model")
        assert "tokenizer.revision" in caught.value.hint

    @pytest.mark.parametrize("options", [{"path": "owner/none"}, {"path": "owner/model", "revision": "v9"}])
    def test_what_is_not_there(self, tmp_path: Path, models: HubServer, options: dict[str, Any]) -> None:
        models.commit("owner/model", {"README.md": b"nothing"})
        with pytest.raises(DataError, match="repository or revision does not exist") as caught:
            make(kind="huggingface", **options)
        assert "owner/" in caught.value.where

    def test_repository_without_a_tokenizer(self, models: HubServer) -> None:
        models.commit("owner/model", {"README.md": b"nothing", "config.json": b"{}"})
        with pytest.raises(DataError, match=r"No tokenizer\.json was found, and transformers cannot convert"):
            make(kind="huggingface", path="owner/model")

    def test_old_files_are_converted(self, tmp_path: Path) -> None:
        """GPT-2's vocab.json and merges.txt, without a tokenizer.json."""
        folder = self.folder(tmp_path, "<|endoftext|>")
        value = json.loads((folder / "tokenizer.json").read_bytes())
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.json").write_text(json.dumps(value["model"]["vocab"]))
        (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, value["model"]["merges"])))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
        )
        tokenizer = make(kind="huggingface", path=str(folder))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert tokenizer.encode(TEXT).tolist() == theirs.encode(TEXT, add_special_tokens=False)
        assert tokenizer.end_of_text_id == theirs.eos_token_id

    def test_without_transformers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(ConfigError, match="not installed") as caught:
            make(kind="huggingface", path=str(tmp_path))
        assert "[hf]" in caught.value.hint

    def test_what_is_no_name(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="neither a directory nor the name"):
            make(kind="huggingface", path="/no/such/place")
        with pytest.raises(ConfigError, match="A directory has no revisions"):
            make(kind="huggingface", path=str(tmp_path), revision="main")
        with pytest.raises(ConfigError, match="needs a path"):
            make(kind="huggingface")


class TestConfiguration:
    @pytest.mark.parametrize(
        ("overrides", "said"),
        [
            (["tokenizer.kind=huggingface"], "needs tokenizer.path"),
            (["tokenizer.kind=tiktoken"], "needs tokenizer.path"),
            (["tokenizer.kind=tiktoken", "tokenizer.path=gpt2", "tokenizer.revision=main"], "tokenizer.revision"),
            (["tokenizer.kind=huggingface", "tokenizer.path=a/b", "tokenizer.pattern=x"], "tokenizer.pattern"),
            (["tokenizer.end_of_text=''"], "tokenizer.end_of_text is empty"),
        ],
    )
    def test_what_has_no_effect_or_is_missing_is_said(self, overrides: list[str], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            load_config("quickstart", overrides)

    def test_fast_path_can_be_turned_off(self, rank_file: Path) -> None:
        on = make(kind="tiktoken", path=str(rank_file))
        off = make(kind="tiktoken", path=str(rank_file), fast_path="off")
        assert on.is_fast
        assert not off.is_fast
        assert on.fingerprint == off.fingerprint
        assert on.encode(TEXT).tolist() == off.encode(TEXT).tolist()


def unigram(directory: Path) -> Any:
    """A tokenizer like that of T5 or XGLM, whose model has the special tokens as pieces; written by its libraries."""
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    library: Any = LibraryTokenizer(models.Unigram())
    library.normalizer = normalizers.NFKC()
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    library.decoder = decoders.Metaspace(prepend_scheme="always")
    special = ["<pad>", "<unk>", "<s>", "</s>", "<end>"]
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False)
    library.train_from_iterator([TEXT, "</> " * 20], trainer)
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>",
        additional_special_tokens=["<end>"],
    )  # fmt: skip
    theirs.save_pretrained(directory)
    return theirs


def test_special_pieces_of_a_unigram_model_are_text_in_text(tmp_path: Path) -> None:
    theirs = unigram(tmp_path)
    ours = make(kind="huggingface", path=str(tmp_path))
    chooser = random.Random(seed := random.randrange(1 << 30))
    for _ in range(200):
        text = " ".join(chooser.choices([*TEXT.split()[:80], "zebra", "3", "日", "ﬁ"], k=chooser.randint(0, 12)))
        assert ours.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"], (seed, text)
        assert ours.encode_as_transformers(text) == theirs(text)["input_ids"], (seed, text)
    assert (ours.start_ids, ours.end_of_text_id) == ((2,), 3)
    for text in ("a </s> b", "<s>", "<pad><end>", "\ufdd0\ufdd1</s>"):
        assert theirs(text, add_special_tokens=False)["input_ids"] != ours.encode(text).tolist()
        assert not {0, 2, 3, 4} & set(ours.encode(text).tolist()), text
    assert "".join(theirs.convert_ids_to_tokens(ours.encode("a </s> b").tolist())) == "▁a▁</s>▁b", "its characters"
    assert ours.encode_with_specials(["go<end>"])[0][0].tolist()[-1] == 4
    assert pickle.loads(pickle.dumps(ours)).encode("a </s>").tolist() == ours.encode("a </s>").tolist()
