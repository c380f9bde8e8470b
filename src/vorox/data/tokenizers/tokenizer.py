"""Text to token ids and back.

Texts go in, one array of ids per text comes out; every tokenizer is a ``tokenizer.json`` that transformers loads and
that gives the same ids there. Byte and character vocabularies are encoded by table, all others by the ``tokenizers``
library. Invariants: a document's text never becomes a special token, whatever it spells; the same text gives the same
ids on any number of threads; equal fingerprints give equal ids.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer

from vorox.core.atomic import canonical_json, make_directory, pretty_json, write_file
from vorox.core.errors import ConfigError, DataError
from vorox.data.rows import TokenArray
from vorox.data.tokenizers.encoders import (
    REPLACEMENT,
    Encoder,
    TokenType,
    encoder,
    is_byte_level,
    is_character_level,
    spells,
    token_bytes,
    writes_bytes,
)
from vorox.data.tokenizers.fast_path import FastPath, fast_path

TOKENIZER_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"
"""What ends a document where the configuration and the tokenizer say nothing else."""


class Tokenizer:
    """An immutable tokenizer. Make one with ``load`` or ``train``.

    Attributes:
        vocab_size: One more than the highest id.
        end_of_text: The token that follows every document.
        end_of_text_id: Its id.
        unknown_id: Id that stands for text the vocabulary lacks; ``None`` where there is no such text.
        dtype: Smallest of uint16 and uint32 that holds every id.
        lossless: Whether ids determine the text's bytes, so that bits per byte are exact.
        fingerprint: SHA-256 over everything that decides the ids; the way to them (``fast``) does not.
    """

    def __init__(self, text: str, end_of_text: str, *, where: str, fast: bool = False) -> None:
        value, library = _without_options(text, where)
        if not any(token["content"] == end_of_text and token["special"] for token in value["added_tokens"]):
            library.add_special_tokens([special_token(end_of_text)])
            value = json.loads(library.to_str())
        library.encode_special_tokens = True
        self._library = library
        self._value = value  # not what the library would write: another version of it may write other fields
        vocabulary: dict[str, int] = library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_text = end_of_text
        self.end_of_text_id = vocabulary[end_of_text]
        unknown: str | None = value["model"].get("unk_token")
        self.unknown_id = vocabulary.get(unknown) if unknown else None
        self.dtype: TokenType = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        identity = {"format": "tokenizer/1", "end_of_text": end_of_text, "tokenizer": value}
        self.fingerprint = hashlib.sha256(canonical_json(identity)).hexdigest()
        self.lossless = is_byte_level(value) or is_character_level(value)
        self._by_table = writes_bytes(value) or self.lossless
        self._reference: Encoder = encoder(value, library, end_of_text, self.dtype)
        self._fast = fast_path(value, library, self.dtype, self._reference) if fast else None
        self._encode: Encoder = self._fast or self._reference
        self._refuse_ambiguous_end(value, where)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        """Ids of each text, without special tokens.

        Raises:
            DataError: A text has half a surrogate pair, or a character that a character vocabulary lacks.
        """
        return self._encode(texts)

    def encode(self, text: str) -> TokenArray:
        return self._encode([text])[0]

    @property
    def fast_path_fallbacks(self) -> int:
        """How often the fast path was left because it differed: what was encoded meanwhile is to be encoded again."""
        return self._fast.changes if self._fast is not None else 0

    @property
    def is_fast(self) -> bool:
        """Whether a fast path is in use."""
        return self._fast is not None and not self._fast.changes

    def with_fast_path(self) -> Tokenizer:
        """The same tokenizer, which takes the fast path where there is one that is equal."""
        return self._by_way_of(fast_path(self._value, self._library, self.dtype, self._reference))

    def without_fast_path(self) -> Tokenizer:
        """The same tokenizer without a fast path: what decides."""
        return self if self._fast is None else self._by_way_of(None)

    def _by_way_of(self, path: FastPath | None) -> Tokenizer:
        """A copy that shares everything but the way to the ids."""
        other = object.__new__(Tokenizer)
        other.__dict__.update(self.__dict__)
        other._fast = path
        other._encode = path or self._reference
        return other

    def special_id(self, token: str) -> int | None:
        """The id of a special token; ``None`` where there is none of that name."""
        found = [added["id"] for added in self._value["added_tokens"] if added["special"] and added["content"] == token]
        return int(found[0]) if found else None

    def with_special_tokens(self, tokens: Sequence[str]) -> Tokenizer:
        """The same tokenizer with these special tokens behind all others, where it lacks them."""
        missing = [token for token in dict.fromkeys(tokens) if self.special_id(token) is None]
        if not missing:
            return self
        taken = [token for token in missing if self._library.token_to_id(token) is not None]
        if taken:
            raise ConfigError(
                f"{taken[0]!r} is an ordinary token of this vocabulary and cannot become a special one",
                where="tokenizer.special_tokens", hint="choose another name, such as <|fim_prefix|>",
            )  # fmt: skip
        library: Any = LibraryTokenizer.from_str(json.dumps(self._value))
        library.add_special_tokens([special_token(token) for token in missing])
        made = Tokenizer(library.to_str(), self.end_of_text, where="tokenizer.special_tokens")
        return made if self._fast is None else made.with_fast_path()

    def first_conflict(self, other: Tokenizer) -> int | None:
        """Return the first id that stands for another token in ``other``; ``None`` if one only has more tokens."""
        ours, theirs = self._tokens_by_id(), other._tokens_by_id()
        return min((token_id for token_id in ours.keys() & theirs if ours[token_id] != theirs[token_id]), default=None)

    def _tokens_by_id(self) -> dict[int, str]:
        vocabulary: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        return {token_id: token for token, token_id in vocabulary.items()}

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of some ids; bytes that are no text, and ids that are none, come out as U+FFFD."""
        table = self._token_bytes
        numbers = [int(token) for token in ids]
        if self._by_table:
            size = len(table)
            return b"".join(table[i] if i < size else REPLACEMENT for i in numbers).decode("utf-8", "replace")
        return self._library.decode(numbers, skip_special_tokens=False)

    def token_byte_lengths(self) -> npt.NDArray[np.int32]:
        """UTF-8 bytes of text that each id stands for, ``[vocab]``; special tokens stand for none.

        Exact where ``lossless``; elsewhere the bytes of the token's own decoding.
        """
        lengths = np.array([len(text) for text in self._token_bytes], dtype=np.int32)
        for token in self._value["added_tokens"]:
            if token["special"]:
                lengths[token["id"]] = 0
        return lengths

    @functools.cached_property
    def _token_bytes(self) -> list[bytes]:
        """The bytes of every id; not every use of a tokenizer asks for them, and they take a while."""
        return token_bytes(self._value, self._library.get_vocab(with_added_tokens=True), self.vocab_size)

    def files(self, max_positions_tokens: int | None = None) -> dict[str, bytes]:
        """Return the files that make this tokenizer, by name: for transformers, for checkpoints and for ``load``.

        The end of text also begins and pads, as in GPT-2. It stands for unknown text where the vocabulary has nothing
        else for it, because converters such as CTranslate2's ask for that token too. Rows are padded on the right,
        where positions count from the first token whether or not the model is told of the mask.

        Args:
            max_positions_tokens: Longest row of the model that this tokenizer belongs to.
        """
        unknown: str | None = self._value["model"].get("unk_token")
        config: dict[str, str | bool | int] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.end_of_text,
            "eos_token": self.end_of_text,
            "pad_token": self.end_of_text,
            "unk_token": self.end_of_text if unknown is None else unknown,
            "padding_side": "right",
            "clean_up_tokenization_spaces": False,
        }
        if max_positions_tokens is not None:
            config["model_max_length"] = max_positions_tokens
        text = json.dumps(self._value, ensure_ascii=False, separators=(",", ":"))
        return {TOKENIZER_NAME: text.encode("utf-8"), CONFIG_NAME: pretty_json(config)}

    def save(self, directory: Path) -> None:
        """Write ``files`` into a directory, each durably."""
        make_directory(directory)
        for name, content in self.files().items():
            write_file(directory / name, content)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process makes the same tokenizer of the same file."""
        return _remade, (self.files()[TOKENIZER_NAME].decode("utf-8"), self.end_of_text, self._fast is not None)

    def _refuse_ambiguous_end(self, value: dict[str, Any], where: str) -> None:
        ids = self._library.encode(self.end_of_text, add_special_tokens=False).ids
        if self.end_of_text_id in ids or spells(value, self.end_of_text):
            raise ConfigError(
                f"text that spells {self.end_of_text!r} would be taken for the end of the text", where=where,
                hint="choose a tokenizer.end_of_text that mixes letters and punctuation, such as <|endoftext|>",
            )  # fmt: skip


def _remade(text: str, end_of_text: str, fast: bool = False) -> Tokenizer:
    return Tokenizer(text, end_of_text, where="a tokenizer of another process", fast=fast)


def special_token(text: str) -> AddedToken:
    """The entry of a special token in the library's vocabulary."""
    return AddedToken(text, special=True, normalized=False)


def _without_options(text: str, where: str) -> tuple[dict[str, Any], Any]:
    """The parsed tokenizer with everything off that would cut, pad or randomise a document, and the library's own."""
    try:
        value: dict[str, Any] = json.loads(text)
        has_options = value.get("truncation") or value.get("padding") or value["model"].get("dropout")
        value["truncation"] = value["padding"] = None
        if value["model"].get("dropout"):  # a model that has no such key gets none: the fingerprint would change
            value["model"]["dropout"] = None
        library = LibraryTokenizer.from_str(json.dumps(value) if has_options else text)
        absent: dict[str, Any] = {"normalizer": None, "pre_tokenizer": None, "decoder": None, "added_tokens": []}
        return absent | value, library  # the library takes a section that is not there for an empty one
    except Exception as error:  # the library raises bare Exception
        raise DataError(
            f"not a tokenizer.json that this version of tokenizers reads: {error}", where=where,
            hint="save it anew with tokenizer.save(...) or transformers' save_pretrained",
        ) from error  # fmt: skip
