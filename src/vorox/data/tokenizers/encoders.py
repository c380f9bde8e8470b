"""Encoders of a parsed ``tokenizer.json``, and the bytes of each token.

The values of the file go in; lookup tables and encoder functions come out. Byte and character vocabularies are encoded
by table, all others by the ``tokenizers`` library in batches of bounded size. Invariant: an encoder returns the ids
that the library returns for the whole text, regardless of batching.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from vorox.core.errors import DataError
from vorox.data.rows import TokenArray
from vorox.data.size_groups import batch_by_size

TokenType = type[np.uint16] | type[np.uint32]
Encoder = Callable[[Sequence[str]], list[TokenArray]]

_BATCH_CHARACTERS = 2 << 20
_SEGMENT_CHARACTERS = 1 << 18
_WORD_END = re.compile(r"(?<=[A-Za-z])(?=[ \n])")
REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
REPLACEMENT = REPLACEMENT_CHARACTER.encode()


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's table: the byte of each printable character of a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


def can_produce(value: dict[str, Any], token: str) -> bool:
    """Whether merges can produce this token from ordinary text."""
    merges: list[Any] = value["model"].get("merges") or []
    return len(token) == 1 or any("".join(merge).replace(" ", "") == token for merge in merges)


def _section(value: dict[str, Any], name: str) -> dict[str, Any]:
    section: dict[str, Any] | None = value[name]
    return section if section is not None else {}


def uses_byte_alphabet(value: dict[str, Any]) -> bool:
    """Whether the vocabulary represents bytes by the characters of ``byte_alphabet``."""
    return _section(value, "decoder").get("type") == "ByteLevel"


def is_byte_level(value: dict[str, Any]) -> bool:
    """Whether the ids of every text encode exactly its bytes."""
    pre_tokenizer = _section(value, "pre_tokenizer")
    steps: list[dict[str, Any]] = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    keeps_text = all(step.get("behavior") == "Isolated" for step in steps[:-1])
    is_unchanged = value["normalizer"] is None and not steps[-1].get("add_prefix_space", True)
    is_complete = value["model"]["type"] == "BPE" and set(byte_alphabet()) <= set(value["model"]["vocab"])
    is_bytes = uses_byte_alphabet(value) and steps[-1].get("type") == "ByteLevel"
    return is_bytes and keeps_text and is_unchanged and is_complete and _has_plain_tokens(value["model"])


def _has_plain_tokens(model: dict[str, Any]) -> bool:
    """Whether tokens have no prefix or suffix for their position in the word."""
    return not model.get("continuing_subword_prefix") and not model.get("end_of_word_suffix")


def is_character_level(value: dict[str, Any]) -> bool:
    model, decoder = value["model"], _section(value, "decoder")
    plain = value["normalizer"] is None and value["pre_tokenizer"] is None and decoder.get("type") == "Fuse"
    listed = model["type"] == "BPE" and not model["merges"] and _has_plain_tokens(model)
    return plain and listed and model.get("unk_token") is None


def _bytes_by_letter() -> dict[int, str]:
    """Return a ``str.translate`` table from ``byte_alphabet`` to Latin-1; other characters become U+FFFD."""
    others = dict.fromkeys(range(256), REPLACEMENT_CHARACTER)
    return others | {ord(letter): chr(byte) for letter, byte in byte_alphabet().items()}


def token_bytes(value: dict[str, Any], vocabulary: dict[str, int], vocab_size: int) -> list[bytes]:
    """Return the bytes of each id; unused ids decode to U+FFFD."""
    letters = _bytes_by_letter() if uses_byte_alphabet(value) else {}
    added = {token["content"] for token in value["added_tokens"]}
    table = [REPLACEMENT] * vocab_size
    for token, index in vocabulary.items():
        if letters and token not in added:
            try:
                table[index] = token.translate(letters).encode("latin-1")
                continue
            except UnicodeEncodeError:
                pass
        if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            table[index] = bytes([int(token[3:5], 16)])
        else:
            table[index] = (token if token in added else token.replace("▁", " ")).encode("utf-8")
    return table


def encoder(value: dict[str, Any], library: Any, end_of_text: str, dtype: TokenType) -> Encoder:
    """Return the reference encoder of a tokenizer."""
    model, added = value["model"], value["added_tokens"]
    # Special tokens are never matched in text: text that spells one is encoded as ordinary text.
    only_special_added = all(token["special"] for token in added) and end_of_text in {t["content"] for t in added}
    if only_special_added and is_character_level(value):
        return _character_encoder(model["vocab"], dtype)
    if only_special_added and is_byte_level(value) and not model["merges"] and not model.get("ignore_merges"):
        return _byte_encoder(model["vocab"], dtype)
    pre_tokenizer = _section(value, "pre_tokenizer")
    words = is_byte_level(value) and pre_tokenizer.get("type") == "ByteLevel" and pre_tokenizer.get("use_regex", True)
    return _library_encoder(library, dtype, separable=words and all(token["special"] for token in added))


def _byte_encoder(vocabulary: dict[str, int], dtype: TokenType) -> Encoder:
    table = np.zeros(256, dtype=dtype)
    for character, byte in byte_alphabet().items():
        table[byte] = vocabulary[character]

    def encode(texts: Sequence[str]) -> list[TokenArray]:
        return [cast("TokenArray", table[np.frombuffer(encode_utf8(text), dtype=np.uint8)]) for text in texts]

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
                for text in batch:
                    encode_utf8(text)  # raises the error that locates the surrogate
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


def encode_utf8(text: str) -> bytes:
    """Encode a text as UTF-8.

    Raises:
        DataError: The text has a lone surrogate, which UTF-8 cannot encode.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"A text has half a surrogate pair at character {error.start + 1}, which UTF-8 cannot encode",
            hint="repair the text, for example with text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')",
        ) from error
