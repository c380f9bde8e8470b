"""What a parsed ``tokenizer.json`` says: the kind of its vocabulary and the bytes of its tokens.

The text of the file goes in; its values and the library's tokenizer come out, and the other functions answer questions
about the values. Invariant: truncation, padding and dropout, which would change ids, are off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer as LibraryTokenizer

from vorox.core.errors import DataError
from vorox.core.files.json_reader import parse_json
from vorox.data.rows import TokenArray

TokenType = type[np.uint16] | type[np.uint32]
Encoder = Callable[[Sequence[str]], list[TokenArray]]

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
REPLACEMENT = REPLACEMENT_CHARACTER.encode()


def parse(text: str, where: str) -> tuple[dict[str, Any], Any]:
    """Parse a tokenizer.json with truncation, padding and dropout off; return it and the library's tokenizer."""
    try:
        value: dict[str, Any] = parse_json(text, where, dict)
        has_options = value.get("truncation") or value.get("padding") or value["model"].get("dropout")
        value["truncation"] = value["padding"] = None
        if value["model"].get("dropout"):  # never added: a new key would change the fingerprint
            value["model"]["dropout"] = None
        library = LibraryTokenizer.from_str(json.dumps(value) if has_options else text)
        absent: dict[str, Any] = {"normalizer": None, "pre_tokenizer": None, "decoder": None, "added_tokens": []}
        return absent | value, library  # the library treats an absent section as empty
    except Exception as error:  # the library raises bare Exception
        raise DataError(
            f"This version of tokenizers cannot read the tokenizer.json: {error}", where=where,
            hint="save it again with tokenizer.save(...) or transformers' save_pretrained",
        ) from error  # fmt: skip


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


def section(value: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a section of the file; empty if it is absent."""
    found: dict[str, Any] | None = value[name]
    return {} if found is None else found


def uses_byte_alphabet(value: dict[str, Any]) -> bool:
    """Whether the vocabulary represents bytes by the characters of ``byte_alphabet``."""
    return section(value, "decoder").get("type") == "ByteLevel"


def is_byte_level(value: dict[str, Any]) -> bool:
    """Whether the ids of every text encode exactly its bytes."""
    pre_tokenizer = section(value, "pre_tokenizer")
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
    model, decoder = value["model"], section(value, "decoder")
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


def added_ids(value: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the post-processor adds before and after a text, as transformers does by default."""
    processor: dict[str, Any] = value.get("post_processor") or {}
    kind = processor.get("type")
    if kind == "Sequence":
        start: tuple[int, ...] = ()
        end: tuple[int, ...] = ()
        for part in processor["processors"]:
            before, after = added_ids({"post_processor": part})
            start, end = before + start, end + after
        return start, end
    if kind in {"BertProcessing", "RobertaProcessing"}:
        return (int(processor["cls"][1]),), (int(processor["sep"][1]),)
    if kind != "TemplateProcessing":  # ByteLevel adds nothing
        return (), ()
    pieces: list[dict[str, Any]] = processor["single"]
    at = next((index for index, piece in enumerate(pieces) if "Sequence" in piece), len(pieces))

    def ids(part: list[dict[str, Any]]) -> tuple[int, ...]:
        named = [processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"] for piece in part]
        return tuple(int(token) for tokens in named for token in tokens)

    return ids(pieces[:at]), ids(pieces[at + 1 :])


def reject_lone_surrogates(texts: Iterable[str]) -> None:
    """Locate the lone surrogate of a text that cannot be encoded.

    Raises:
        DataError: A text has a lone surrogate, which UTF-8 cannot encode.
    """
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"A text has half a surrogate pair at character {error.start + 1}, which UTF-8 cannot encode",
                hint="repair the text, for example with "
                "text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')",
            ) from error
