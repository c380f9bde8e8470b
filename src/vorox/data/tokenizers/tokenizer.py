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
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer

from vorox.core.errors import ConfigError, DataError
from vorox.core.files.atomic import canonical_json, make_directory, pretty_json, write_file
from vorox.core.schema.vision import IMAGE_TOKEN, QWEN_IMAGE_TOKEN
from vorox.data.chat.template import ChatTemplate
from vorox.data.images.tokens import FIRST_IMAGE_ID, one_id_per_image
from vorox.data.rows import TokenArray
from vorox.data.size_groups import batch_by_size
from vorox.data.tokenizers.base_settings import CONFIG_NAME, GENERATION_NAME, BaseSettings, chat_template_value, ids_of
from vorox.data.tokenizers.fast_path import FastPath, make_fast_path
from vorox.data.tokenizers.library_guard import call_library, has_regex
from vorox.data.tokenizers.tokenizer_json import (
    REPLACEMENT,
    REPLACEMENT_CHARACTER,
    Encoder,
    TokenType,
    added_ids,
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
END_OF_TEXT = "<|endoftext|>"
"""The default end-of-text token."""

_BATCH_CHARACTERS = 2 << 20
_SEGMENT_CHARACTERS = 1 << 18
_DECODED_AT_ONCE = 1 << 16
_HIDDEN = "\ufdd0\ufdd1"
"""Before the name of a special piece of a Unigram model; noncharacters of Unicode, which text replaces."""
_WORD_END = re.compile(r"(?<=[A-Za-z])(?=[ \n])")


class Tokenizer:
    """An immutable tokenizer, made by ``load`` or ``train``.

    Attributes:
        vocab_size: Highest id plus one.
        end_of_text: The token that ends every document.
        end_of_text_id: Its id.
        start_ids: What the tokenizer adds before a text, such as BOS: before every document and prompt.
        end_ids: What follows every document: what the tokenizer adds after a text, and ``end_of_text_id``.
        unknown_id: Id of the unknown token; ``None`` if the vocabulary has none.
        dtype: uint16 if it holds every id, else uint32.
        lossless: Whether ids determine the text's bytes, so that bits per byte are exact.
        fingerprint: SHA-256 over everything that determines the ids; independent of the fast path.
        settings: What else the directory of the tokenizer says; empty for a tokenizer that Vorox makes.
        chat_template: Renders conversations, and is saved with the tokenizer; not part of the fingerprint.
    """

    chat_template: ChatTemplate | None = None
    settings: BaseSettings = BaseSettings()
    start_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...]

    def __init__(
        self,
        text: str,
        end_of_text: str,
        *,
        where: str,
        fast: bool = False,
        settings: BaseSettings | None = None,
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
        self._text_library = _text_library(value, library)
        if self._text_library is not library:
            identity["special_pieces"] = "hidden"
        self.fingerprint = hashlib.sha256(canonical_json(identity)).hexdigest()
        self.lossless = is_byte_level(value) or is_character_level(value)
        self._by_table = uses_byte_alphabet(value) or self.lossless
        self._has_regex = has_regex(value)
        self._reference: Encoder = _reference_encoder(value, self._text_library, end_of_text, self.dtype)
        self._fast = make_fast_path(value, library, self.dtype, self._reference) if fast else None
        self._encode: Encoder = self._fast or self._reference
        self.start_ids, after = added_ids(value)
        unknown_ids = [token for token in (*self.start_ids, *after) if token >= self.vocab_size]
        if unknown_ids:
            raise DataError(
                f"The post-processor of the tokenizer adds id {unknown_ids[0]}, which its vocabulary lacks",
                where=where, hint="correct post_processor in its tokenizer.json",
            )  # fmt: skip
        self._added_end_ids = after
        self.end_ids = after if after[-1:] == (self.end_of_text_id,) else (*after, self.end_of_text_id)
        self.settings = settings or BaseSettings()
        template = self.settings.chat_template
        self.chat_template = None if template is None else self._chat_template(template)
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
        try:
            encodings = call_library(
                lambda: self._library_with_specials.encode_batch(list(texts), add_special_tokens=False),
                sum(map(len, texts)),
                is_bounded=self._has_regex,
            )
        except TypeError:
            reject_lone_surrogates(texts)
            raise
        for encoding in encodings:
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

    def encode_as_transformers(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text as transformers does: special tokens in it are recognised, others are added."""
        ids: list[int] = self.encode_with_specials([text])[0][0].tolist()
        return [*self.start_ids, *ids, *self._added_end_ids] if add_special_tokens else ids

    @functools.cached_property
    def _library_with_specials(self) -> Any:
        value = json.loads(self._library.to_str())
        value["post_processor"] = None  # it would trim white space from the ranges of tokens
        return LibraryTokenizer.from_str(json.dumps(value))

    def with_chat_template(self, source: str) -> Tokenizer:
        """Return this tokenizer with a chat template."""
        other = self._with_encoder(self._fast)
        for name in ("stop_ids", "turn_end_ids"):
            other.__dict__.pop(name, None)
        other.chat_template = self._chat_template(source)
        return other

    def _chat_template(self, source: str) -> ChatTemplate:
        return ChatTemplate(source, self.settings.token("bos_token") or "", self.end_of_text, self.special_tokens)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """All special tokens, which text never matches."""
        return tuple(token["content"] for token in self._value["added_tokens"] if token["special"])

    @property
    def start_of_chat(self) -> str:
        """The Jinja text that writes ``start_ids``, for templates that Vorox adds to the tokenizer."""
        text = "".join(self.token_text(token) for token in self.start_ids)
        return "{{ bos_token }}" if text and text == self.settings.token("bos_token") else _jinja_text(text)

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

    def without_special(self, ids: Sequence[int]) -> list[int]:
        """Return ids without those of special tokens."""
        special = {token["id"] for token in self._value["added_tokens"] if token["special"]}
        return [token for token in ids if token not in special]

    @property
    def prefix_id(self) -> int:
        """The id that stands before a text without context: BOS, or the end of text if the tokenizer has none."""
        bos = self.settings.token("bos_token")
        found = None if bos is None else self.token_id(bos)
        return self.end_of_text_id if found is None else found

    def token_id(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary; ``None`` if it does not exist."""
        found: int | None = self._library.token_to_id(token)
        return found

    def token_text(self, token_id: int) -> str:
        """Return a token of the vocabulary as it is written in tokenizer.json."""
        found: str | None = self._library.id_to_token(token_id)
        return found or ""

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
        extended = Tokenizer(
            library.to_str(), self.end_of_text, where="tokenizer.special_tokens", settings=self._own_settings
        )
        return extended if self._fast is None else extended.with_fast_path()

    def first_conflict(self, other: Tokenizer) -> int | None:
        """Return the lowest id whose token differs in ``other``; ``None`` if one vocabulary extends the other."""
        ours, theirs = self._tokens_by_id(), other._tokens_by_id()
        return min((token_id for token_id in ours.keys() & theirs if ours[token_id] != theirs[token_id]), default=None)

    def tokens_beyond(self, other: Tokenizer) -> list[str]:
        """Return the tokens whose ids ``other`` does not have, by id."""
        ours = self._tokens_by_id()
        return [ours[token_id] for token_id in sorted(ours.keys() - other._tokens_by_id().keys())]

    def _tokens_by_id(self) -> dict[int, str]:
        vocabulary: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        return {token_id: token for token, token_id in vocabulary.items()}

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Decode ids; invalid UTF-8 and ids outside the vocabulary become U+FFFD, an image becomes one token."""
        if len(ids) and int(np.max(ids)) >= FIRST_IMAGE_ID:
            found = [self.special_id(token) for token in (IMAGE_TOKEN, QWEN_IMAGE_TOKEN)]
            image_token_id = next((token_id for token_id in found if token_id is not None), self.vocab_size)
            ids = one_id_per_image(np.asarray(ids), image_token_id)
        if not self._by_table:
            return self._library.decode([int(token) for token in ids], skip_special_tokens=False)
        table, parts = self._token_bytes, list[bytes]()
        size = len(table)
        for first in range(0, len(ids), _DECODED_AT_ONCE):
            numbers = map(int, ids[first : first + _DECODED_AT_ONCE])
            parts.append(b"".join(table[i] if i < size else REPLACEMENT for i in numbers))
        return b"".join(parts).decode("utf-8", "replace")

    def text_bytes(self, ids: npt.NDArray[Any]) -> bytes:
        """Return the bytes of the text of ids, special tokens excluded; exact if ``lossless``."""
        flat, starts_V, lengths_V = self._flat_bytes
        lengths = lengths_V[ids]
        ends = np.cumsum(lengths)
        if not len(ids) or not ends[-1]:
            return b""
        offsets: npt.NDArray[np.int64] = starts_V[ids] - (ends - lengths)
        return flat[np.repeat(offsets, lengths) + np.arange(ends[-1])].tobytes()

    @functools.cached_property
    def _flat_bytes(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The bytes of all ids in a row, and where those of each id start and how many they are."""
        sizes = np.array([len(text) for text in self._token_bytes], np.int64)
        flat = np.frombuffer(b"".join(self._token_bytes), np.uint8)
        return flat, np.cumsum(sizes) - sizes, self.token_byte_lengths().astype(np.int64)

    def token_byte_lengths(self) -> npt.NDArray[np.int32]:
        """Return the UTF-8 bytes of each id, ``[vocab]``; 0 for special tokens.

        Exact if ``lossless``; otherwise the length of the token decoded by itself.
        """
        lengths = np.array([len(text) for text in self._token_bytes], dtype=np.int32)
        special = [token["id"] for token in self._value["added_tokens"] if token["special"]]
        lengths[[*special, *self.start_ids, *self.end_ids]] = 0
        return lengths

    @functools.cached_property
    def _token_bytes(self) -> list[bytes]:
        """The bytes of every id, computed on first use because that is slow."""
        return token_bytes(self._value, self._library.get_vocab(with_added_tokens=True), self.vocab_size)

    def files(self, max_positions_tokens: int | None = None) -> dict[str, bytes]:
        """Return the files of this tokenizer by name, for transformers, checkpoints and ``load``.

        Of a tokenizer that was loaded, ``tokenizer_config.json`` and ``generation_config.json`` keep what they had. Of
        a tokenizer that Vorox makes, the end-of-text token is also the BOS and padding token, as in GPT-2, and the
        unknown token if the vocabulary has none, because converters such as CTranslate2's require one. The class is
        the general one, which uses the tokenizer.json as it is. Padding is on the right, so that positions start at
        the first token even if the model ignores the mask.

        Args:
            max_positions_tokens: Maximum sequence length of the model.
        """
        unknown: str | None = self._value["model"].get("unk_token")
        config: dict[str, Any] = dict(self.settings.tokenizer)
        if not config:
            config = {
                "bos_token": self.end_of_text,
                "pad_token": self.end_of_text,
                "unk_token": self.end_of_text if unknown is None else unknown,
            }
            if self.chat_template is not None:  # a template writes its own
                del config["bos_token"]
        config = {
            "padding_side": "right",
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],  # transformers 4 adds ids that models refuse
            **config,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        if self.settings.token("eos_token") != self.end_of_text:
            config["eos_token"] = self.end_of_text
        template = chat_template_value(self._own_settings)
        if template is not None:
            config["chat_template"] = template
        if max_positions_tokens is not None:
            known = config.get("model_max_length")
            config["model_max_length"] = max(known if isinstance(known, int) else 0, max_positions_tokens)
        text = json.dumps(self._value, ensure_ascii=False, separators=(",", ":"))
        return {
            TOKENIZER_NAME: text.encode("utf-8"),
            CONFIG_NAME: pretty_json(config),
            GENERATION_NAME: pretty_json({**self.settings.generation, **self.special_ids()}),
        }

    def special_ids(self) -> dict[str, int | list[int]]:
        """Return ``bos_token_id``, ``eos_token_id`` and ``pad_token_id`` of ``generation_config.json``.

        Generation stops at all ids of the base, the end of text, and what ends an answer in the chat template.
        """
        given, found = self.settings.generation, dict[str, int | list[int]]()
        for name in ("bos_token", "pad_token"):
            token = self.settings.token(name) if self.settings.tokenizer else self.end_of_text
            value = given.get(f"{name}_id", None if token is None else self.token_id(token))
            if value is not None:
                found[f"{name}_id"] = value
        ends = self.stop_ids
        return {**found, "eos_token_id": ends[0] if len(ends) == 1 else list(ends)}

    def model_ids(self) -> dict[str, int | list[int]]:
        """Return the ids of special tokens for ``config.json``: those that the base had there, and where it stops."""
        ids = self.special_ids()
        if not self.settings.tokenizer:
            return {name: ids[name] for name in ("bos_token_id", "eos_token_id")}
        known = self.settings.model_ids
        kept = {name: known.get(name, ids.get(name)) for name in ("bos_token_id", "pad_token_id")}
        ends = tuple(dict.fromkeys((*ids_of(known.get("eos_token_id")), *self.stop_ids)))
        return {
            **{name: value for name, value in kept.items() if value is not None},
            "eos_token_id": ends[0] if len(ends) == 1 else list(ends),
        }

    @functools.cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids at which a completion ends."""
        ids = (*ids_of(self.settings.generation.get("eos_token_id")), self.end_of_text_id, *self.turn_end_ids)
        return tuple(dict.fromkeys(ids))

    @property
    def repetition_penalty(self) -> float:
        """What ``generation_config.json`` sets for completions, sampled or not; 1 without it, or if it is no factor."""
        value = self.settings.generation.get("repetition_penalty")
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
        return 1.0

    @functools.cached_property
    def turn_end_ids(self) -> tuple[int, ...]:
        """The token that the chat template writes after an answer; none without a template, or if it is no token."""
        text = "" if self.chat_template is None else self.chat_template.turn_end()
        if not text:
            return ()
        first = self.encode_with_specials([text])[0][0][:1].tolist()
        return tuple(token["id"] for token in self._value["added_tokens"] if [token["id"]] == first)

    @property
    def _own_settings(self) -> BaseSettings:
        """The settings with the chat template in use; the others of the base belong to its own."""
        template = None if self.chat_template is None else self.chat_template.source
        is_own = template == self.settings.chat_template
        named: Mapping[str, str] = self.settings.named_templates if is_own else {}
        return replace(self.settings, chat_template=template, named_templates=named)

    def save(self, directory: Path) -> None:
        """Write ``files`` into a directory durably."""
        make_directory(directory)
        for name, content in self.files().items():
            write_file(directory / name, content)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the tokenizer.json."""
        text = self.files()[TOKENIZER_NAME].decode("utf-8")
        return _unpickle, (text, self.end_of_text, self._fast is not None, self._own_settings)

    def _reject_ambiguous_end(self, value: dict[str, Any], where: str) -> None:
        ids = call_library(
            lambda: self._text_library.encode(self.end_of_text, add_special_tokens=False),
            len(self.end_of_text),
            is_bounded=self._has_regex,
        ).ids
        if self.end_of_text_id in ids or can_produce(value, self.end_of_text):
            raise ConfigError(
                f"Text that contains {self.end_of_text!r} would be encoded as the end of the text", where=where,
                hint="set tokenizer.end_of_text to a mix of letters and punctuation, such as <|endoftext|>",
            )  # fmt: skip


def _unpickle(text: str, end_of_text: str, fast: bool, settings: BaseSettings) -> Tokenizer:
    return Tokenizer(text, end_of_text, where="a tokenizer of another process", fast=fast, settings=settings)


def _jinja_text(text: str) -> str:
    return f"{{{{ {json.dumps(text)} }}}}" if text else ""


def special_token(text: str) -> AddedToken:
    """Return the library's entry for a special token."""
    return AddedToken(text, special=True, normalized=False)


def _text_library(value: dict[str, Any], library: Any) -> Any:
    """Return the library for text, in which special tokens are text.

    The pieces of a Unigram model include its special tokens, which text would match; they get a name that it lacks.
    """
    special = {token["content"] for token in value["added_tokens"] if token["special"]}
    model = value["model"]
    if model.get("type") != "Unigram" or not any(piece in special for piece, _ in model["vocab"]):
        return library
    pieces = [[_HIDDEN + piece if piece in special else piece, score] for piece, score in model["vocab"]]
    added = [token for token in value["added_tokens"] if not token["special"]]
    text = {**value, "model": {**model, "vocab": pieces}, "added_tokens": added, "post_processor": None}
    found: Any = LibraryTokenizer.from_str(json.dumps(text))
    found.encode_special_tokens = True
    return found


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
    separable = words and all(token["special"] for token in added)
    hides_specials = model.get("type") == "Unigram"
    return _library_encoder(
        library, dtype, separable=separable, has_regex=has_regex(value), hides_specials=hides_specials
    )


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


def _library_encoder(
    library: Any, dtype: TokenType, *, separable: bool, has_regex: bool, hides_specials: bool
) -> Encoder:
    def encode(texts: Sequence[str]) -> list[TokenArray]:
        texts = [text.replace(_HIDDEN, REPLACEMENT_CHARACTER) for text in texts] if hides_specials else texts
        segments = [list(_split_long(text)) if separable else [text] for text in texts]
        arrays: list[TokenArray] = []
        # Bounded batches: an encoding takes about 150 bytes per token until its ids are copied.
        for batch in batch_by_size(
            ((segment, len(segment)) for group in segments for segment in group), _BATCH_CHARACTERS
        ):
            try:
                encodings = call_library(
                    lambda batch=batch: library.encode_batch_fast(batch, add_special_tokens=False),
                    sum(map(len, batch)),
                    is_bounded=has_regex,
                )
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
