"""The tokenizer: encoding text to token ids and decoding them.

Texts go in; one array of ids per text comes out. Every tokenizer is a ``tokenizer.json`` that gives the same ids in
transformers. Byte and character vocabularies are encoded by table, all others by the ``tokenizers`` library.
Invariants: the text of a document never becomes a special token; ids do not depend on the number of threads; equal
fingerprints give equal ids.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer

from vorox.core.atomic import canonical_json, make_directory, pretty_json, write_file
from vorox.core.errors import ConfigError, DataError
from vorox.core.schema.vision import IMAGE_TOKEN, QWEN_IMAGE_TOKEN
from vorox.data.chat_template import ChatTemplate
from vorox.data.image_tokens import FIRST_IMAGE_ID, one_id_per_image
from vorox.data.rows import TokenArray
from vorox.data.size_groups import batch_by_size
from vorox.data.tokenizers.fast_path import FastPath, make_fast_path
from vorox.data.tokenizers.tokenizer_json import (
    REPLACEMENT,
    Encoder,
    TokenType,
    byte_alphabet,
    can_produce,
    is_byte_level,
    is_character_level,
    parse,
    reject_lone_surrogates,
    section,
    token_bytes,
    uses_byte_alphabet,
)

TOKENIZER_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"
"""The default end-of-text token."""

_BATCH_CHARACTERS = 2 << 20
_SEGMENT_CHARACTERS = 1 << 18
_WORD_END = re.compile(r"(?<=[A-Za-z])(?=[ \n])")


class Tokenizer:
    """An immutable tokenizer, made by ``load`` or ``train``.

    Attributes:
        vocab_size: Highest id plus one.
        end_of_text: The token after every document.
        end_of_text_id: Its id.
        unknown_id: Id of the unknown token; ``None`` if the vocabulary has none.
        dtype: uint16 if it holds every id, else uint32.
        lossless: Whether ids determine the text's bytes, so that bits per byte are exact.
        fingerprint: SHA-256 over everything that determines the ids; independent of the fast path.
        chat_template: Renders conversations, and is saved with the tokenizer; not part of the fingerprint.
    """

    chat_template: ChatTemplate | None = None
    bos_token: str = ""

    def __init__(
        self,
        text: str,
        end_of_text: str,
        *,
        where: str,
        fast: bool = False,
        chat_template: str | None = None,
        bos_token: str = "",
    ) -> None:
        value, library = parse(text, where)
        if not any(token["content"] == end_of_text and token["special"] for token in value["added_tokens"]):
            library.add_special_tokens([special_token(end_of_text)])
            value = json.loads(library.to_str())
        library.encode_special_tokens = True
        self._library = library
        self._value = value  # as parsed: other versions of the library serialise other fields
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
        self._by_table = uses_byte_alphabet(value) or self.lossless
        self._reference: Encoder = _reference_encoder(value, library, end_of_text, self.dtype)
        self._fast = make_fast_path(value, library, self.dtype, self._reference) if fast else None
        self._encode: Encoder = self._fast or self._reference
        self.bos_token = bos_token
        self.chat_template = None if chat_template is None else self._chat_template(chat_template)
        self._reject_ambiguous_end(value, where)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        """Encode each text, without special tokens.

        Raises:
            DataError: A text has a lone surrogate, or a character that a character vocabulary lacks.
        """
        return self._encode(texts)

    def encode(self, text: str) -> TokenArray:
        return self._encode([text])[0]

    def encode_with_specials(self, texts: Sequence[str]) -> list[tuple[TokenArray, npt.NDArray[np.int64]]]:
        """Encode rendered conversations, in which special tokens are recognised.

        Returns:
            For each text, its ids, and the first character and the end of each token in the text, ``[tokens, 2]``.

        Raises:
            DataError: A text has a character that a character vocabulary lacks.
        """
        found: list[tuple[TokenArray, npt.NDArray[np.int64]]] = []
        for encoding in self._library_with_specials.encode_batch(list(texts), add_special_tokens=False):
            ranges_N2 = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            found.append((cast("TokenArray", np.array(encoding.ids, self.dtype)), ranges_N2))
        if is_character_level(self._value):
            for text, (_, ranges_N2) in zip(texts, found, strict=True):
                if int((ranges_N2[:, 1] - ranges_N2[:, 0]).sum()) < len(text):
                    raise DataError(
                        "A conversation has a character that is not in the vocabulary", where="tokenizer.kind",
                        hint="a character vocabulary covers only its training text; use tokenizer.kind: byte or bpe",
                    )  # fmt: skip
        return found

    @functools.cached_property
    def _library_with_specials(self) -> Any:
        value = json.loads(self._library.to_str())
        value["post_processor"] = None  # it would trim white space from the ranges of tokens
        return LibraryTokenizer.from_str(json.dumps(value))

    def with_chat_template(self, source: str) -> Tokenizer:
        """Return this tokenizer with a chat template."""
        other = self._with_encoder(self._fast)
        other.chat_template = self._chat_template(source)
        return other

    def _chat_template(self, source: str) -> ChatTemplate:
        special = tuple(token["content"] for token in self._value["added_tokens"] if token["special"])
        return ChatTemplate(source, self.bos_token, self.end_of_text, special)

    @property
    def fast_path_fallbacks(self) -> int:
        """1 after the fast path differed and was disabled, else 0; work in progress at that time must be repeated."""
        return self._fast.fallbacks if self._fast is not None else 0

    @property
    def is_fast(self) -> bool:
        """Whether a fast path is in use."""
        return self._fast is not None and not self._fast.fallbacks

    def with_fast_path(self) -> Tokenizer:
        """Return this tokenizer with a fast path, if an equivalent one exists."""
        return self._with_encoder(make_fast_path(self._value, self._library, self.dtype, self._reference))

    def without_fast_path(self) -> Tokenizer:
        """Return this tokenizer without a fast path: the reference."""
        return self if self._fast is None else self._with_encoder(None)

    def _with_encoder(self, path: FastPath | None) -> Tokenizer:
        """Return a copy that shares everything but the encoder."""
        other = object.__new__(Tokenizer)
        other.__dict__.update(self.__dict__)
        other._fast = path
        other._encode = path or self._reference
        return other

    def special_id(self, token: str) -> int | None:
        """Return the id of a special token; ``None`` if it does not exist."""
        found = [added["id"] for added in self._value["added_tokens"] if added["special"] and added["content"] == token]
        return int(found[0]) if found else None

    def with_special_tokens(self, tokens: Sequence[str]) -> Tokenizer:
        """Return this tokenizer with the missing ones of these special tokens appended to the vocabulary."""
        missing = [token for token in dict.fromkeys(tokens) if self.special_id(token) is None]
        if not missing:
            return self
        ordinary = [token for token in missing if self._library.token_to_id(token) is not None]
        if ordinary:
            raise ConfigError(
                f"{ordinary[0]!r} is an ordinary token of this vocabulary and cannot become a special one",
                where="tokenizer.special_tokens", hint="choose another name, such as <|fim_prefix|>",
            )  # fmt: skip
        library: Any = LibraryTokenizer.from_str(json.dumps(self._value))
        library.add_special_tokens([special_token(token) for token in missing])
        own = None if self.chat_template is None else self.chat_template.source
        extended = Tokenizer(
            library.to_str(), self.end_of_text, where="tokenizer.special_tokens", chat_template=own,
            bos_token=self.bos_token,
        )  # fmt: skip
        return extended if self._fast is None else extended.with_fast_path()

    def first_conflict(self, other: Tokenizer) -> int | None:
        """Return the lowest id whose token differs in ``other``; ``None`` if one vocabulary extends the other."""
        ours, theirs = self._tokens_by_id(), other._tokens_by_id()
        return min((token_id for token_id in ours.keys() & theirs if ours[token_id] != theirs[token_id]), default=None)

    def _tokens_by_id(self) -> dict[int, str]:
        vocabulary: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        return {token_id: token for token, token_id in vocabulary.items()}

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Decode ids; invalid UTF-8 and ids outside the vocabulary become U+FFFD, an image becomes one token."""
        if len(ids) and int(np.max(ids)) >= FIRST_IMAGE_ID:
            found = [self.special_id(token) for token in (IMAGE_TOKEN, QWEN_IMAGE_TOKEN)]
            image_token_id = next((token_id for token_id in found if token_id is not None), self.vocab_size)
            ids = one_id_per_image(np.asarray(ids), image_token_id)
        table = self._token_bytes
        numbers = [int(token) for token in ids]
        if self._by_table:
            size = len(table)
            return b"".join(table[i] if i < size else REPLACEMENT for i in numbers).decode("utf-8", "replace")
        return self._library.decode(numbers, skip_special_tokens=False)

    def token_byte_lengths(self) -> npt.NDArray[np.int32]:
        """Return the UTF-8 bytes of each id, ``[vocab]``; 0 for special tokens.

        Exact if ``lossless``; otherwise the length of the token decoded by itself.
        """
        lengths = np.array([len(text) for text in self._token_bytes], dtype=np.int32)
        for token in self._value["added_tokens"]:
            if token["special"]:
                lengths[token["id"]] = 0
        return lengths

    @functools.cached_property
    def _token_bytes(self) -> list[bytes]:
        """The bytes of every id, computed on first use because that is slow."""
        return token_bytes(self._value, self._library.get_vocab(with_added_tokens=True), self.vocab_size)

    def files(self, max_positions_tokens: int | None = None) -> dict[str, bytes]:
        """Return the files of this tokenizer by name, for transformers, checkpoints and ``load``.

        The end-of-text token is also the BOS and padding token, as in GPT-2, and the unknown token if the vocabulary
        has none, because converters such as CTranslate2's require one. Padding is on the right, so that positions
        start at the first token even if the model ignores the mask.

        Args:
            max_positions_tokens: Maximum sequence length of the model.
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
        if self.chat_template is not None:
            config |= {"chat_template": self.chat_template.source, "bos_token": self.bos_token}
            if not self.bos_token:  # the template writes none
                del config["bos_token"]
        if max_positions_tokens is not None:
            config["model_max_length"] = max_positions_tokens
        text = json.dumps(self._value, ensure_ascii=False, separators=(",", ":"))
        return {TOKENIZER_NAME: text.encode("utf-8"), CONFIG_NAME: pretty_json(config)}

    def save(self, directory: Path) -> None:
        """Write ``files`` into a directory durably."""
        make_directory(directory)
        for name, content in self.files().items():
            write_file(directory / name, content)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the tokenizer.json."""
        text = self.files()[TOKENIZER_NAME].decode("utf-8")
        template = None if self.chat_template is None else self.chat_template.source
        return _unpickle, (text, self.end_of_text, self._fast is not None, template, self.bos_token)

    def _reject_ambiguous_end(self, value: dict[str, Any], where: str) -> None:
        ids = self._library.encode(self.end_of_text, add_special_tokens=False).ids
        if self.end_of_text_id in ids or can_produce(value, self.end_of_text):
            raise ConfigError(
                f"Text that contains {self.end_of_text!r} would be encoded as the end of the text", where=where,
                hint="set tokenizer.end_of_text to a mix of letters and punctuation, such as <|endoftext|>",
            )  # fmt: skip


def _unpickle(text: str, end_of_text: str, fast: bool, chat_template: str | None, bos_token: str) -> Tokenizer:
    return Tokenizer(
        text, end_of_text, where="a tokenizer of another process", fast=fast, chat_template=chat_template,
        bos_token=bos_token,
    )  # fmt: skip


def special_token(text: str) -> AddedToken:
    """Return the library's entry for a special token."""
    return AddedToken(text, special=True, normalized=False)


def _reference_encoder(value: dict[str, Any], library: Any, end_of_text: str, dtype: TokenType) -> Encoder:
    """Return the reference encoder of a tokenizer."""
    model, added = value["model"], value["added_tokens"]
    # Special tokens are never matched in text: text that spells one is encoded as ordinary text.
    only_special_added = all(token["special"] for token in added) and end_of_text in {t["content"] for t in added}
    if only_special_added and is_character_level(value):
        return _character_encoder(model["vocab"], dtype)
    if only_special_added and is_byte_level(value) and not model["merges"] and not model.get("ignore_merges"):
        return _byte_encoder(model["vocab"], dtype)
    pre_tokenizer = section(value, "pre_tokenizer")
    words = is_byte_level(value) and pre_tokenizer.get("type") == "ByteLevel" and pre_tokenizer.get("use_regex", True)
    return _library_encoder(library, dtype, separable=words and all(token["special"] for token in added))


def _byte_encoder(vocabulary: dict[str, int], dtype: TokenType) -> Encoder:
    table = np.zeros(256, dtype=dtype)
    for character, byte in byte_alphabet().items():
        table[byte] = vocabulary[character]

    def encode(texts: Sequence[str]) -> list[TokenArray]:
        try:
            return [cast("TokenArray", table[np.frombuffer(text.encode("utf-8"), dtype=np.uint8)]) for text in texts]
        except UnicodeEncodeError:
            reject_lone_surrogates(texts)
            raise

    return encode


def _character_encoder(vocabulary: dict[str, int], dtype: TokenType) -> Encoder:
    characters = {ord(text): index for text, index in vocabulary.items() if len(text) == 1}
    table = np.full(max(characters) + 2, -1, dtype=np.int32)  # the last entry is for all higher characters
    table[list(characters)] = list(characters.values())

    def encode_one(text: str) -> TokenArray:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        ids = table[np.minimum(points, len(table) - 1)]
        if ids.size and int(ids.min()) < 0:
            index = int(np.argmin(ids))
            raise DataError(
                f"Character {text[index]!r} (U+{ord(text[index]):04X}) is not in the vocabulary",
                where=f"character {index + 1} of a text",
                hint="a character vocabulary covers only its training text; use tokenizer.kind: byte or bpe",
            )
        return cast("TokenArray", ids.astype(dtype))

    return lambda texts: [encode_one(text) for text in texts]


def _library_encoder(library: Any, dtype: TokenType, *, separable: bool) -> Encoder:
    def encode(texts: Sequence[str]) -> list[TokenArray]:
        segments = [list(_split_long(text)) if separable else [text] for text in texts]
        arrays: list[TokenArray] = []
        # Bounded batches: an encoding takes about 150 bytes per token until its ids are copied.
        for batch in batch_by_size(
            ((segment, len(segment)) for group in segments for segment in group), _BATCH_CHARACTERS
        ):
            try:
                encodings = library.encode_batch_fast(batch, add_special_tokens=False)
            except TypeError:
                reject_lone_surrogates(batch)
                raise
            arrays.extend(cast("TokenArray", np.array(encoding.ids, dtype=dtype)) for encoding in encodings)
        results: list[TokenArray] = []
        position = 0
        for group in segments:
            parts = arrays[position : position + len(group)]
            results.append(parts[0] if len(parts) == 1 else cast("TokenArray", np.concatenate(parts)))
            position += len(group)
        return results

    return encode


def _split_long(text: str) -> Iterator[str]:
    """Split a long text between a letter and white space, where every GPT-2 style pattern ends a word."""
    start = 0
    while len(text) - start > _SEGMENT_CHARACTERS:
        match = _WORD_END.search(text, start + _SEGMENT_CHARACTERS)
        if match is None:
            break
        yield text[start : match.start()]
        start = match.start()
    yield text[start:] if start else text
