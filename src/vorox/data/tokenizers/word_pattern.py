"""Cutting text into words by the pattern of a tokenizer, with the regular expressions of Python's standard library.

The pattern of a ``tokenizer.json`` goes in, a function from text to words comes out; a pattern that Python would read
otherwise is refused. The patterns speak of Unicode classes that Python's engine lacks, so every character outside ASCII
is first replaced by one that stands for all characters of the same classes, and the words are cut at the same places
of the original. Invariant: which class a character is in is asked of the very library that is to be equalled, never of
another table of Unicode.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tokenizers import Regex, pre_tokenizers

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What the pre-tokenizer ``ByteLevel`` cuts by, where it cuts."""

_CLASS = re.compile(r"\\(?:(?P<not>[pP])\{(?P<property>\w+)\}|(?P<short>[sSdDwW]))")
_FOREIGN = re.compile(r"\[[^\[\]\\&]+\]")
_CASELESS = re.compile(r"\(\?i:([^)]*)")
_LETTERS = re.compile(r"(?:[a-zA-Z'|]|\[[a-zA-Z]+\])*")
_REPEAT = re.compile(r"\{\d+(,\d*)?\}(?![+?])")
_GROUP = re.compile(r"\((\?(:|!|=|>|i:))")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_RARE = 16
"""Where fewer than one character in so many is not ASCII, they are replaced one by one."""
_FIRST_STAND_IN = 0x80
_STAND_INS = 0x80
_ODD = 0x2028
_FOLDED = "\u017f\u212a\u0130\u0131"
"""Characters that are ``s``, ``k`` and ``i`` to an engine that ignores case."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of a pattern: text as Python reads it, or a class of characters."""

    text: str
    name: str = ""
    negated: bool = False
    bracketed: bool = False


def _parse(pattern: str) -> list[_Part] | None:
    """The pattern in pieces; None where Python would or might read it otherwise."""
    if not all(_LETTERS.fullmatch(inside) for inside in _CASELESS.findall(pattern)):
        return None  # a class without regard to case is another class
    parts: list[_Part] = []
    position, bracketed = 0, False
    while position < len(pattern):
        rest = pattern[position:]
        foreign = None if bracketed else _FOREIGN.match(rest)
        if foreign and not foreign[0].isascii():
            parts.append(_Part("", foreign[0]))  # as a whole a class of which the library is asked
            position += foreign.end()
            continue
        found = _CLASS.match(rest)
        if found:
            short = found["short"] or ""
            name = rf"\{short.lower()}" if short else rf"\p{{{found['property']}}}"
            parts.append(_Part("", name, short.isupper() or found["not"] == "P", bracketed))
            position += found.end()
            continue
        taken = _plain(rest, bracketed)
        if taken is None:
            return None
        if rest[0] in "[]":
            bracketed = rest[0] == "["
        parts.append(_Part(taken.replace(r"\z", r"\Z")))
        position += len(taken)
    return None if bracketed else parts


def _plain(rest: str, bracketed: bool) -> str | None:
    """What both engines read alike at the beginning of this text; None if nothing."""
    first = rest[0]
    if not first.isascii():
        return None
    if first == "\\":
        escape = rest[:2]
        known = escape[1:] in set("rntfv") or (escape[1:].isascii() and not escape[1:].isalnum() and len(escape) == 2)
        return escape if known or (escape == r"\z" and not bracketed) else None
    if bracketed:
        doubled = rest[:2] in {"&&", "--", "||", "~~"}
        return None if first == "[" or doubled else first
    if first == "[":
        opening = "[^" if rest.startswith("[^") else "["
        return None if rest[len(opening) :].startswith("]") else opening
    if first == "(":
        group = _GROUP.match(rest)
        return group[0] if group else None
    if first == "{":
        repeat = _REPEAT.match(rest)
        return repeat[0] if repeat else None
    return None if first in "]}.^$" else first


class WordPattern:
    """Cuts text into words. Make one with ``word_pattern``. Safe to use from several threads."""

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts
        self._names = sorted({part.name for part in parts if part.name})
        self._contains = [_membership(name) for name in self._names]
        self._folds = any(part.text.startswith("(?i:") for part in parts)
        self._members: dict[str, set[str]] = {name: set() for name in self._names}
        self._stand_ins: dict[tuple[bool, ...], int] = {}
        self._changing = threading.Lock()
        self._table = _Table(self._stand_in)
        for point in range(_FIRST_STAND_IN):
            self._enter(chr(point), self._classes(chr(point)))
        self._compiled = self._compile()

    def words(self, text: str) -> list[str] | None:
        """What the pattern matches and what lies between, one after the other; None where it cannot be told."""
        if text.isascii():
            words: list[str] = self._compiled.findall(text)
            return words if len("".join(words)) == len(text) else self._with_gaps(text)
        replaced = self._replaced(text)
        if replaced is None:
            return None
        words = self._compiled.findall(replaced)
        places = [0, *accumulate(map(len, words))]
        if places[-1] != len(text):
            words = self._with_gaps(replaced)
            places = [0, *accumulate(map(len, words))]
        for index, is_original in enumerate(map(str.isascii, words)):
            if not is_original:
                words[index] = text[places[index] : places[index + 1]]
        return words

    def _with_gaps(self, replaced: str) -> list[str]:
        """What the pattern matches and what lies between."""
        return [piece for piece in re.split(f"({self._compiled.pattern})", replaced, flags=re.ASCII) if piece]

    def _replaced(self, text: str) -> str | None:
        """The text with a stand-in for every character outside ASCII; None if one of them has none."""
        foreign = _NOT_ASCII.findall(text)
        if len(foreign) * _RARE > len(text):
            replaced = text.translate(self._table)
        else:
            stand_ins = {character: chr(self._table[ord(character)]) for character in set(foreign)}
            replaced = _NOT_ASCII.sub(lambda found: stand_ins[found[0]], text)
        return None if chr(_ODD) in replaced else replaced

    def _classes(self, character: str) -> tuple[bool, ...]:
        return tuple(contains(character) for contains in self._contains)

    def _enter(self, character: str, classes: tuple[bool, ...]) -> None:
        for name, inside in zip(self._names, classes, strict=True):
            if inside:
                self._members[name].add(character)

    def _stand_in(self, point: int) -> int:
        """The character that stands for all of the same classes as this one."""
        if point < _FIRST_STAND_IN:
            return point
        if self._folds and chr(point) in _FOLDED:
            return _ODD
        with self._changing:
            classes = self._classes(chr(point))
            known = self._stand_ins.get(classes)
            if known is not None:
                return known
            if len(self._stand_ins) == _STAND_INS:
                return _ODD
            stand_in = _FIRST_STAND_IN + len(self._stand_ins)
            self._enter(chr(stand_in), classes)
            self._compiled = self._compile()  # before anybody can have a text with the new character
            self._stand_ins[classes] = stand_in
            return stand_in

    def _compile(self) -> re.Pattern[str]:
        everything = {*map(chr, range(_FIRST_STAND_IN + len(self._stand_ins) + 1))}
        text = ""
        for part in self._parts:
            if not part.name:
                text += part.text
                continue
            members = everything - self._members[part.name] if part.negated else self._members[part.name]
            listed = "".join(map(re.escape, sorted(members)))
            text += listed if part.bracketed else f"[{listed}]" if listed else "(?!)"
        return re.compile(text, re.ASCII)


class WordPatterns:
    """Patterns one after the other: each cuts what the one before it left."""

    def __init__(self, patterns: Sequence[WordPattern]) -> None:
        self._patterns = patterns

    def words(self, text: str) -> list[str] | None:
        runs = [text]
        for pattern in self._patterns:
            cut = [pattern.words(run) for run in runs]
            runs = [piece for pieces in cut if pieces is not None for piece in pieces]
            if None in cut:
                return None
        return runs


class _Table(dict[int, int]):
    """For ``str.translate``: learns a character when it first meets it."""

    def __init__(self, learn: Callable[[int], int]) -> None:
        super().__init__()
        self._learn = learn

    def __missing__(self, point: int) -> int:
        self[point] = stand_in = self._learn(point)
        return stand_in


def _membership(name: str) -> Callable[[str], bool]:
    """Whether a character is in a class, asked of the library."""
    removing: Any = pre_tokenizers.Split(Regex(name), behavior="removed")
    return lambda character: not removing.pre_tokenize_str(character)


def word_patterns(patterns: Sequence[str]) -> WordPattern | WordPatterns | None:
    """A function that cuts by these patterns one after the other; None if Python's engine might cut otherwise."""
    known = [found for pattern in patterns if (found := word_pattern(pattern)) is not None]
    if not known or len(known) != len(patterns):
        return None
    return known[0] if len(known) == 1 else WordPatterns(known)


def word_pattern(pattern: str) -> WordPattern | None:
    """A function that cuts by this pattern; None if Python's engine might cut otherwise."""
    parts = _parse(pattern)
    if parts is None:
        return None
    try:
        return WordPattern(parts)
    except (re.error, ValueError):  # one of the two engines does not know a construct
        return None
    except Exception as error:  # the library raises bare Exception for a class that it does not know
        if type(error) is not Exception:
            raise
        return None
