"""Convert tiktoken encodings to ``tokenizer.json``: by name, rank file or GPT-2's ``vocab.bpe``.

A path or name goes in; a ``Tokenizer`` comes out, so that checkpoints carry a file that transformers loads. tiktoken
merges the two neighbours whose token has the lowest rank; a tokenizer.json lists merges, so every pair that forms a
token is listed in rank order. Invariant: the ids equal tiktoken's; if tiktoken is installed, this is checked before
the tokenizer is used.
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
from vorox.core.platform.installation import install_command
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.data.tokenizers.fast_path import adversarial_texts
from vorox.data.tokenizers.tokenizer import END_OF_TEXT, Tokenizer
from vorox.data.tokenizers.tokenizer_json import byte_alphabet
from vorox.data.tokenizers.word_pattern import FOLDED_PAIR, GPT2_PATTERN, RefusedPattern, bracket_expression

_MAX_FILE_BYTES = 256 << 20
_INTERVAL = re.compile(r"(\{\d+(?:,\d*)?\})(\+?)(?!\?)")
_CONSTRUCT = re.compile(
    r"\(\?(?:[:=!>]|<[=!]|i:(?=(?P<caseless>[^)]*)))|\((?!\?)|\\(?:[pP]\{\^?\w+\}|[sSdDz]|[rntfv]|[!-/:-@\[-`{-~ ])"
    r"|[^\\\[\]{}(]"
)
_OTHER_IN_BRACKETS = re.compile(r"\\[wW]|\[:|--|~~")
"""Bracket constructs that tiktoken interprets differently: word classes, POSIX classes, set differences."""


@dataclass(frozen=True)
class _Ranks:
    """The definition of a tiktoken encoding."""

    ranks: Mapping[bytes, int]
    pattern: str
    special_tokens: Mapping[str, int]


def load_tiktoken(config: TokenizerConfig) -> Tokenizer:
    """Load the tokenizer of ``tokenizer.kind: tiktoken``.

    Raises:
        ConfigError: The settings conflict, or tiktoken is needed for a named encoding but not installed.
        DataError: The file or encoding cannot be read.
    """
    assert config.path is not None
    file = Path(config.path).expanduser()
    if file.suffix in {".tiktoken", ".bpe"} or file.exists():
        found = _read_ranks(file, config.pattern or GPT2_PATTERN)
    elif config.pattern is not None:
        raise ConfigError(
            f"Encoding {config.path!r} has its own pattern", where="tokenizer.pattern",
            hint="remove tokenizer.pattern, or set tokenizer.path to a .tiktoken file",
        )  # fmt: skip
    else:
        found = _load_encoding(config.path)
    _check_pattern(found.pattern)
    end_of_text = config.end_of_text or END_OF_TEXT
    special_tokens = {end_of_text: max(found.ranks.values()) + 1, **found.special_tokens}
    if found.special_tokens and end_of_text not in found.special_tokens:
        special_tokens[end_of_text] = max(found.special_tokens.values()) + 1
    text = _tokenizer_json(_Ranks(found.ranks, found.pattern, special_tokens), config.path)
    tokenizer = Tokenizer(text, end_of_text, where=config.path)
    _check_against_tiktoken(tokenizer, found, config.path)
    return tokenizer


def _check_pattern(pattern: str) -> None:
    """Reject invalid patterns, patterns that the two libraries interpret differently, and patterns that skip text.

    tiktoken drops text that matches no word; a tokenizer.json keeps it.
    """
    try:
        removing: Any = pre_tokenizers.Split(Regex(library_pattern(pattern)), behavior="removed")
    except RefusedPattern as error:
        raise ConfigError(
            f"tokenizer.json may not read {str(error) or pattern!r} as tiktoken does", where="tokenizer.pattern",
            hint="use only \\p{..}, \\s, \\d, brackets and (?:..), or tokenizer.kind=huggingface",
        ) from error  # fmt: skip
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"tokenizer.pattern is not a regular expression: {error}",
            where="tokenizer.pattern", hint="copy the pattern from the model's code",
        ) from error  # fmt: skip
    unmatched = [piece for text in _distinguishing_texts(pattern) for piece, _ in removing.pre_tokenize_str(text)]
    if unmatched:
        raise ConfigError(
            f"The pattern matches no word in {unmatched[0][:20]!r}; tiktoken would drop that text",
            where="tokenizer.pattern", hint="add an alternative for the rest, such as |[^\\p{L}]",
        )  # fmt: skip


def _distinguishing_texts(pattern: str) -> list[str]:
    """Return texts that distinguish patterns: every pair of ASCII characters and of characters in the pattern."""
    letters = sorted({*map(chr, range(128)), *pattern})
    pairs = ["".join(first + second for second in letters) for first in letters]
    return [*adversarial_texts(), *pairs, *letters, *("".join(line[::-1]) for line in pairs)]


def _read_ranks(file: Path, pattern: str) -> _Ranks:
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise DataError("The file is too large for the ranks of a tokenizer", where=str(file))
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise DataError(
            f"Cannot read the ranks of the tokenizer: {error.strerror}", where=str(file),
            hint="set tokenizer.path to a .tiktoken file, a vocab.bpe, or an encoding such as gpt2",
        ) from error  # fmt: skip
    ranks = _parse_merges(lines, file) if file.suffix == ".bpe" else _parse_ranks(lines, file)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or len(set(ranks.values())) != len(ranks) or min(ranks.values()) < 0:
        what = f"no rank for byte {missing[0]}" if missing else "two tokens of one rank"
        raise DataError(f"The file does not hold the ranks of a byte-level tokenizer: {what}", where=str(file))
    return _Ranks(ranks, pattern, {})


def _parse_ranks(lines: list[bytes], file: Path) -> dict[bytes, int]:
    """Parse lines of a base64 token and its rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise DataError(
                "The line is not a base64 token and its rank", where=f"{file}, line {number}",
                hint="a .tiktoken file has such lines; name a file of GPT-2 merges *.bpe",
            ) from error  # fmt: skip
    return ranks


def _parse_merges(lines: list[bytes], file: Path) -> dict[bytes, int]:
    """Parse GPT-2 merges: ranks of the bytes in the order of their printable characters, then one merge per line."""
    alphabet = byte_alphabet()
    ranks = {bytes([byte]): rank for rank, byte in enumerate(alphabet.values())}
    for number, line in enumerate(lines, 1):
        pair = line.decode("utf-8", "replace").split()
        if not pair or (number == 1 and line.startswith(b"#version")):
            continue
        if len(pair) != 2 or any(character not in alphabet for character in "".join(pair)):
            raise DataError("The line is not a pair of tokens to merge", where=f"{file}, line {number}")
        token = bytes(alphabet[character] for character in "".join(pair))
        ranks.setdefault(token, len(ranks))
    return ranks


def _load_encoding(name: str) -> _Ranks:
    try:
        import tiktoken
    except ImportError as error:
        raise ConfigError(
            f"Encoding {name!r} needs tiktoken, which is not installed", where="tokenizer.path",
            hint=f"{install_command('tiktoken')}, or set tokenizer.path to a .tiktoken file",
        ) from error  # fmt: skip
    known = sorted(tiktoken.list_encoding_names())
    if name not in known:
        raise ConfigError(
            f"tokenizer.path {name!r} is neither a file nor a known encoding", where="tokenizer.path",
            hint=f"set it to a .tiktoken file, a vocab.bpe, or one of {', '.join(known)}",
        )  # fmt: skip
    try:
        encoding: Any = tiktoken.get_encoding(name)
    except Exception as error:  # network errors, hash mismatches, full disks
        raise DataError(
            f"tiktoken cannot load the encoding {name!r}: {error}", where="tokenizer.path",
            hint="set TIKTOKEN_CACHE_DIR to a folder that has it, download it once, or set a .tiktoken file",
        ) from error  # fmt: skip
    return _Ranks(encoding._mergeable_ranks, encoding._pat_str, encoding._special_tokens)


def library_pattern(pattern: str) -> str:
    """Translate a tiktoken pattern to the regex syntax of tokenizer.json.

    The differences: ``{1,3}+`` is possessive in tiktoken but a nested repetition in tokenizer.json, and ``^`` and
    ``$`` match at the ends of the text in tiktoken but of a line in tokenizer.json.

    Raises:
        RefusedPattern: The two may interpret a part of it differently; the message is that part.
    """
    translated: list[str] = []
    starts, start, position = [0], 0, 0
    while position < len(pattern):
        rest = pattern[position:]
        repeated = _INTERVAL.match(rest)
        if repeated:
            translated[start:] = (
                [f"(?>{''.join(translated[start:])}{repeated[1]})"]
                if repeated[2]
                else [*translated[start:], repeated[1]]
            )
            position += repeated.end()
            continue
        construct = _next_construct(rest)
        if construct.startswith("("):
            starts.append(len(translated))
        elif construct == ")" and len(starts) > 1:
            start = starts.pop()
        elif construct not in {"?", "*", "+", "|"}:
            start = len(translated)
        translated.append({"^": r"\A", "$": r"\z"}.get(construct, construct))
        position += len(construct)
    return "".join(translated)


def _next_construct(rest: str) -> str:
    """Return the leading construct, which both libraries interpret alike or ``library_pattern`` translates."""
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
    spellings = {token: "".join([letters[byte] for byte in token]) for token in ranks}
    merges: list[list[str]] = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = sorted((ranks[a], ranks[b], a, b) for a, b in cuts if a in ranks and b in ranks)
        merges += [[spellings[a], spellings[b]] for _, _, a, b in pairs]
    words = {"type": "Split", "pattern": {"Regex": library_pattern(found.pattern)}, "behavior": "Isolated"}
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    gpt2 = found.pattern == GPT2_PATTERN
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    vocabulary = {spellings[token]: rank for token, rank in ranks.items()}
    ambiguous = [token for token in found.special_tokens if token in vocabulary]
    if ambiguous:
        raise ConfigError(
            f"Text that contains {ambiguous[0]!r} would be encoded as a special token", where=where,
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


def _check_against_tiktoken(tokenizer: Tokenizer, found: _Ranks, where: str) -> None:
    """Compare the ids with tiktoken's, if it is installed, on texts that distinguish patterns and merges."""
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
            f"tiktoken rejects the pattern: {error}",
            where="tokenizer.pattern",
            hint="copy the pattern from tiktoken's code",
        ) from error
    texts = _distinguishing_texts(found.pattern)
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        if ids.tolist() != encoding.encode_ordinary(text):
            raise DataError(
                f"No tokenizer.json reproduces the ids of this tokenizer, for example for {text[:40]!r}", where=where,
                hint="use the model's tokenizer from the hub with tokenizer.kind=huggingface",
            )  # fmt: skip
