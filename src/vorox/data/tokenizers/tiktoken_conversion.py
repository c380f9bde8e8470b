"""Tokenizers of tiktoken as a tokenizer.json: by the name of an encoding, from a file of ranks, or GPT-2's vocab.bpe.

A path or name goes in, a ``Tokenizer`` comes out, so that checkpoints carry a file that transformers loads. tiktoken
joins whatever two neighbours give the token of the lowest rank; a tokenizer.json lists pairs, so every pair that gives
a token is listed in the order of ranks. Invariant: the ids are tiktoken's; where tiktoken is installed that is tested
before the tokenizer is used.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, pre_tokenizers

from vorox.core.errors import ConfigError, DataError
from vorox.core.installation import install_command
from vorox.core.schema.data import TokenizerConfig
from vorox.data.tokenizers.encoders import byte_alphabet
from vorox.data.tokenizers.fast_path import adversarial_texts
from vorox.data.tokenizers.tokenizer import END_OF_TEXT, Tokenizer
from vorox.data.tokenizers.word_pattern import FOLDED_PAIR, GPT2_PATTERN, RefusedPattern, bracket_expression

_LARGEST_FILE_BYTES = 256 << 20
_INTERVAL = re.compile(r"(\{\d+(?:,\d*)?\})(\+?)(?!\?)")
_CONSTRUCT = re.compile(
    r"\(\?(?:[:=!>]|<[=!]|i:(?=(?P<caseless>[^)]*)))|\((?!\?)|\\(?:[pP]\{\^?\w+\}|[sSdDz]|[rntfv]|[!-/:-@\[-`{-~ ])"
    r"|[^\\\[\]{}(]"
)
_OTHER_IN_BRACKETS = re.compile(r"\\[wW]|\[:|--|~~")
"""In brackets, tiktoken reads these otherwise: other letters, ASCII alone, differences of sets."""


@dataclass(frozen=True)
class _Ranks:
    """What tiktoken makes a tokenizer of."""

    ranks: Mapping[bytes, int]
    pattern: str
    special_tokens: Mapping[str, int]


def load_tiktoken(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that ``tokenizer.kind: tiktoken`` asks for.

    Raises:
        ConfigError: The section contradicts itself, or names an encoding and tiktoken is not installed.
        DataError: The file or the encoding cannot be read.
    """
    assert config.path is not None
    file = Path(config.path).expanduser()
    if file.suffix in {".tiktoken", ".bpe"} or file.exists():
        found = _read(file, config.pattern or GPT2_PATTERN)
    elif config.pattern is not None:
        raise ConfigError(
            f"the encoding {config.path!r} has a pattern of its own", where="tokenizer.pattern",
            hint="leave tokenizer.pattern out, or give a .tiktoken file as tokenizer.path",
        )  # fmt: skip
    else:
        found = _named(config.path)
    _check_pattern(found.pattern)
    end_of_text = config.end_of_text or END_OF_TEXT
    special_tokens = {end_of_text: max(found.ranks.values()) + 1, **found.special_tokens}
    if found.special_tokens and end_of_text not in found.special_tokens:
        special_tokens[end_of_text] = max(found.special_tokens.values()) + 1
    text = _tokenizer_json(_Ranks(found.ranks, found.pattern, special_tokens), config.path)
    tokenizer = Tokenizer(text, end_of_text, where=config.path)
    _refuse_difference(tokenizer, found, config.path)
    return tokenizer


def _check_pattern(pattern: str) -> None:
    """Refuse what is no pattern, what the two libraries read differently, and what leaves text out.

    tiktoken drops the text between two words, a tokenizer.json keeps it.
    """
    try:
        removing: Any = pre_tokenizers.Split(Regex(library_pattern(pattern)), behavior="removed")
    except RefusedPattern as error:
        raise ConfigError(
            f"a tokenizer.json might read {str(error) or pattern!r} otherwise than tiktoken", where="tokenizer.pattern",
            hint="write it with \\p{..}, \\s, \\d, brackets and (?:..), or take tokenizer.kind=huggingface",
        ) from error  # fmt: skip
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"not a regular expression: {error}", where="tokenizer.pattern", hint="give the pattern of the model's code"
        ) from error  # fmt: skip
    left = [piece for text in _texts_for(pattern) for piece, _ in removing.pre_tokenize_str(text)]
    if left:
        raise ConfigError(
            f"the pattern matches no word in {left[0][:20]!r}; tiktoken would drop that text",
            where="tokenizer.pattern", hint="add an alternative for the rest, such as |[^\\p{L}]",
        )  # fmt: skip


def _texts_for(pattern: str) -> list[str]:
    """Texts made to tell this pattern from others: every pair of ASCII characters and of what it names itself."""
    letters = sorted({*map(chr, range(128)), *pattern})
    pairs = ["".join(first + second for second in letters) for first in letters]
    return [*adversarial_texts(), *pairs, *letters, *("".join(line[::-1]) for line in pairs)]


def _read(file: Path, pattern: str) -> _Ranks:
    try:
        if file.stat().st_size > _LARGEST_FILE_BYTES:
            raise DataError("the file is too large to hold the ranks of a tokenizer", where=str(file))
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise DataError(
            f"cannot read the ranks of the tokenizer: {error.strerror}", where=str(file),
            hint="give a .tiktoken file, a vocab.bpe, or the name of an encoding such as gpt2",
        ) from error  # fmt: skip
    ranks = _merged_ranks(lines, file) if file.suffix == ".bpe" else _listed_ranks(lines, file)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or len(set(ranks.values())) != len(ranks) or min(ranks.values()) < 0:
        what = f"no rank for byte {missing[0]}" if missing else "two tokens of one rank"
        raise DataError(f"not the ranks of a byte-level tokenizer: {what}", where=str(file))
    return _Ranks(ranks, pattern, {})


def _listed_ranks(lines: list[bytes], file: Path) -> dict[bytes, int]:
    """Lines of a token in base64 and its rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise DataError(
                "not a line of a token in base64 and its rank", where=f"{file}, line {number}",
                hint="a .tiktoken file has such lines; GPT-2's merges are a file that ends in .bpe",
            ) from error  # fmt: skip
    return ranks


def _merged_ranks(lines: list[bytes], file: Path) -> dict[bytes, int]:
    """GPT-2's merges: the bytes in the order of their printable characters, then one token per line."""
    alphabet = byte_alphabet()
    ranks = {bytes([byte]): rank for rank, byte in enumerate(alphabet.values())}
    for number, line in enumerate(lines, 1):
        pair = line.decode("utf-8", "replace").split()
        if not pair or (number == 1 and line.startswith(b"#version")):
            continue
        if len(pair) != 2 or any(character not in alphabet for character in "".join(pair)):
            raise DataError("not a line of two tokens that are merged", where=f"{file}, line {number}")
        token = bytes(alphabet[character] for character in "".join(pair))
        ranks.setdefault(token, len(ranks))
    return ranks


def _named(name: str) -> _Ranks:
    try:
        import tiktoken
    except ImportError as error:
        raise ConfigError(
            f"the encoding {name!r} needs tiktoken, which is not installed", where="tokenizer.path",
            hint=f"{install_command('tiktoken')}, or give a .tiktoken file as tokenizer.path",
        ) from error  # fmt: skip
    known = sorted(tiktoken.list_encoding_names())
    if name not in known:
        raise ConfigError(
            f"there is no file and no encoding {name!r}", where="tokenizer.path",
            hint=f"give a .tiktoken file, a vocab.bpe, or one of {', '.join(known)}",
        )  # fmt: skip
    try:
        encoding: Any = tiktoken.get_encoding(name)
    except Exception as error:  # requests' errors, hash mismatches, full disks: whatever its download meets
        raise DataError(
            f"tiktoken cannot load the encoding {name!r}: {error}", where="tokenizer.path",
            hint="set TIKTOKEN_CACHE_DIR to a folder that has it, or go online once; or give a .tiktoken file",
        ) from error  # fmt: skip
    return _Ranks(encoding._mergeable_ranks, encoding._pat_str, encoding._special_tokens)


def library_pattern(pattern: str) -> str:
    """A pattern of tiktoken as the library of tokenizer.json reads it.

    There ``{1,3}+`` repeats what is repeated, where tiktoken means that it does not give back; and ``^`` and ``$`` are
    the ends of a line, where tiktoken means those of the text.

    Raises:
        RefusedPattern: The two might read a part of it differently; the message is that part.
    """
    made: list[str] = []
    starts, start, position = [0], 0, 0
    while position < len(pattern):
        rest = pattern[position:]
        repeated = _INTERVAL.match(rest)
        if repeated:
            made[start:] = (
                [f"(?>{''.join(made[start:])}{repeated[1]})"] if repeated[2] else [*made[start:], repeated[1]]
            )
            position += repeated.end()
            continue
        piece = _piece(rest)
        if piece.startswith("("):
            starts.append(len(made))
        elif piece == ")" and len(starts) > 1:
            start = starts.pop()
        elif piece not in {"?", "*", "+", "|"}:
            start = len(made)
        made.append({"^": r"\A", "$": r"\z"}.get(piece, piece))
        position += len(piece)
    return "".join(made)


def _piece(rest: str) -> str:
    """The construct at the beginning of this text that both read alike, or that ``library_pattern`` translates."""
    if rest[0] == "[":
        expression = bracket_expression(rest)
        if _OTHER_IN_BRACKETS.search(expression):
            raise RefusedPattern(expression)
        return expression
    found = _CONSTRUCT.match(rest)
    if found is None or (found["caseless"] and FOLDED_PAIR.search(found["caseless"])):
        raise RefusedPattern(rest[:12])
    return found[0]


def _tokenizer_json(found: _Ranks, where: str) -> str:
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    ranks = found.ranks
    written = {token: "".join([letters[byte] for byte in token]) for token in ranks}
    merges: list[list[str]] = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = sorted((ranks[a], ranks[b], a, b) for a, b in cuts if a in ranks and b in ranks)
        merges += [[written[a], written[b]] for _, _, a, b in pairs]
    words = {"type": "Split", "pattern": {"Regex": library_pattern(found.pattern)}, "behavior": "Isolated"}
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    gpt2 = found.pattern == GPT2_PATTERN
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    vocabulary = {written[token]: rank for token, rank in ranks.items()}
    taken = [token for token in found.special_tokens if token in vocabulary]
    if taken:
        raise ConfigError(
            f"text that spells {taken[0]!r} would be taken for a special token", where=where,
            hint="choose another tokenizer.end_of_text",
        )  # fmt: skip
    value = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **plain}
            for token, index in sorted(found.special_tokens.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "pre_tokenizer": {**as_bytes, "use_regex": True}
        if gpt2
        else {"type": "Sequence", "pretokenizers": [{**words, "invert": False}, as_bytes]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
            "vocab": {**vocabulary, **found.special_tokens}, "merges": merges,
        },
    }  # fmt: skip
    return json.dumps(value, ensure_ascii=False)


def _refuse_difference(tokenizer: Tokenizer, found: _Ranks, where: str) -> None:
    """Compare with tiktoken, where it is installed, on text made to tell patterns and merges apart."""
    try:
        import tiktoken
    except ImportError:
        return
    try:
        encoding: Any = tiktoken.Encoding(
            "vorox", pat_str=found.pattern, mergeable_ranks=dict(found.ranks), special_tokens={}
        )
    except ValueError as error:
        raise ConfigError(
            f"tiktoken does not read this pattern: {error}",
            where="tokenizer.pattern",
            hint="give that of tiktoken's code",
        ) from error
    texts = _texts_for(found.pattern)
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        if ids.tolist() != encoding.encode_ordinary(text):
            raise DataError(
                f"a tokenizer.json cannot give the ids of this tokenizer, for example for {text[:40]!r}", where=where,
                hint="take the tokenizer of the model from the hub with tokenizer.kind=huggingface",
            )  # fmt: skip
