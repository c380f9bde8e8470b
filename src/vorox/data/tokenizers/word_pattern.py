"""Cutting text into words by the pattern of a tokenizer, with the regular expressions of Python's standard library.

The pattern of a ``tokenizer.json`` goes in, a function from text to words comes out; a pattern that Python would read
otherwise is refused. The patterns name Unicode classes that Python's engine lacks, so every character outside ASCII
is first replaced by a stand-in for all characters of the same classes, and the original is cut at the same places.
Invariant: the very library that is to be equalled decides which characters a class has, and is asked for the class as
it is written: ``\\w`` and ``[\\w]`` are different classes there.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tokenizers import Regex, pre_tokenizers

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of the pre-tokenizer ``ByteLevel``, where it cuts."""

ClassMembers = Callable[[str], set[str]]
"""Which of these characters, all different, are in a class."""

_CLASS = re.compile(r"\\(?:[pP]\{\^?\w+\}|[sSdDwW])")
_ESCAPE = re.compile(r"\\(?:[rntfv]|[!-/:-@\[-`{-~ ])")
_POSIX_CLASS = re.compile(r"\[:\^?[a-z]+:\]")
_QUANTIFIER = re.compile(r"(?P<sign>[?*+])[?+]?|\{(?P<least>\d+)(?P<range>,(?P<most>\d*))?\}(?![?*+{])")
_GROUP = re.compile(r"\(\?[:=!>]")
_CASELESS = re.compile(r"\(\?i:((?:[a-zA-Z'|]|\[[a-zA-Z]+\])+)\)(?![*+{]|\?[?+])")
FOLDED_PAIR = re.compile(r"ss|st|f[fil]|\.[\w.]|\w\.", re.IGNORECASE)
"""Letters that the library takes for one character (``ß``, ``ﬁ``) where case does not matter; a dot may be any."""
_NOT_LITERAL = frozenset("\\[](){}?*+|.^$")
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
    """A piece of a pattern: text as Python reads it, or a class of characters as the library reads it."""

    text: str = ""
    expression: str = ""


class RefusedPattern(Exception):
    """A pattern that the two engines might read differently."""


class _Parser:
    """Splits a pattern into parts, and knows how many characters each part matches at least.

    A repeated group is refused where it can match nothing, because engines end such a loop at different places, and
    where it has choices inside, because trying them all can take for ever. So is a pattern that can match nothing.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern, self._position, self._choices = pattern, 0, 0
        self.parts: list[_Part] = []

    def parse(self) -> list[_Part]:
        if self._alternatives() == 0 or self._position != len(self._pattern):
            raise RefusedPattern
        return self.parts

    def _alternatives(self) -> int:
        """Parse up to the end of a group or of the pattern; return the fewest characters that it matches."""
        fewest: list[int] = []
        here = 0
        while self._position < len(self._pattern) and self._pattern[self._position] != ")":
            if self._pattern[self._position] == "|":
                self._take("|")
                self._choices += 1
                fewest.append(here)
                here = 0
            else:
                here += self._item()
        return min([*fewest, here])

    def _item(self) -> int:
        """Parse an atom with its quantifier; return the fewest characters that it matches."""
        choices = self._choices
        width = self._atom()
        quantifier = _QUANTIFIER.match(self._pattern, self._position)
        if quantifier is None:
            return width or 0
        if not width or (self._choices > choices and quantifier["sign"] != "?"):
            raise RefusedPattern  # a repeated assertion, a loop around nothing, or one around choices
        self._take(quantifier[0])
        if quantifier["sign"]:
            self._choices += 1
            return width if quantifier["sign"] == "+" else 0
        least, most = int(quantifier["least"]), quantifier["most"]
        if (quantifier["range"] is None and least == 0) or (most and int(most) < max(least, 1)):
            raise RefusedPattern
        self._choices += quantifier["range"] is not None
        return width * least

    def _atom(self) -> int | None:
        """Parse one class, character or group; return the fewest characters that it matches, None if it asserts."""
        rest = self._pattern[self._position :]
        found = _CLASS.match(rest)
        expression = found[0] if found else bracket_expression(rest) if rest[0] == "[" else ""
        if expression:
            self.parts.append(_Part(expression=expression))
            self._position += len(expression)
            return 1
        if rest.startswith("(?i:"):
            return self._caseless(rest)
        group = _GROUP.match(rest)
        if group:
            self._take(group[0])
            width = self._alternatives()
            self._take(")")
            return None if group[0] in {"(?=", "(?!"} else width
        if rest.startswith(r"\z"):
            self._take(r"\z", r"\Z")
            return None
        escape = _ESCAPE.match(rest)
        if escape is None and (rest[0] in _NOT_LITERAL or not rest[0].isascii()):
            raise RefusedPattern
        self._take(escape[0] if escape else rest[0])
        return 1

    def _caseless(self, rest: str) -> int:
        """Parse letters without regard to case.

        Each alternative begins at an apostrophe, so that no letters of two groups are neighbours: ``s`` and ``s`` of
        two groups could be one ``ß`` to the library.
        """
        found = _CASELESS.match(rest)
        if found is None:
            raise RefusedPattern
        letters = re.sub(r"\[\w+\]", ".", found[1])
        alternatives = letters.split("|")
        behind_apostrophe = self._pattern[: self._position].endswith("'")
        apart = behind_apostrophe or all(alternative.startswith("'") for alternative in alternatives)
        if not apart or FOLDED_PAIR.search(letters) or not all(alternatives):
            raise RefusedPattern
        self._take(found[0])
        return min(map(len, alternatives))

    def _take(self, text: str, as_python: str | None = None) -> None:
        if not self._pattern.startswith(text, self._position):
            raise RefusedPattern
        self._position += len(text)
        self.parts.append(_Part(text if as_python is None else as_python))


def bracket_expression(text: str) -> str:
    """Return the bracket expression at the beginning of a text.

    Raises:
        RefusedPattern: Its end is not beyond doubt.
    """
    position, depth = 0, 0
    while position < len(text):
        rest = text[position:]
        taken = _CLASS.match(rest) or _ESCAPE.match(rest)
        if depth and rest[0] == "[" and (posix := _POSIX_CLASS.match(rest)):
            taken = posix
        if taken:
            position += taken.end()
            continue
        if rest[0] == "\\" or (rest[0] == "[" and depth and not text[:position].endswith("&&")):
            raise RefusedPattern
        position += 1
        if rest[0] == "[":
            depth += 1
            position += rest.startswith("[^")
            if text.startswith("]", position):
                raise RefusedPattern
        elif rest[0] == "]":
            depth -= 1
            if depth == 0:
                return text[:position]
    raise RefusedPattern


class WordPattern:
    """A function from text to words. Make one with ``word_pattern``. Safe to use from several threads."""

    def __init__(self, parts: Sequence[_Part], ask: Callable[[str], ClassMembers]) -> None:
        self._parts = parts
        self._expressions = sorted({part.expression for part in parts if part.expression})
        self._ask = [ask(expression) for expression in self._expressions]
        self._folds = any(part.text.startswith("(?i:") for part in parts)
        self._members: dict[str, set[str]] = {expression: set() for expression in self._expressions}
        self._stand_ins: dict[tuple[bool, ...], int] = {}
        self._table: dict[int, int] = {}
        self._learning = threading.Lock()
        ascii_characters = "".join(map(chr, range(_FIRST_STAND_IN)))
        for expression, ask_class in zip(self._expressions, self._ask, strict=True):
            self._members[expression] |= ask_class(ascii_characters)
        self._compiled = self._compile()

    def words(self, text: str) -> list[str] | None:
        """Return what the pattern matches and what lies between, in order; None where it cannot be known."""
        if text.isascii():
            words: list[str] = self._compiled.findall(text)
            return words if len("".join(words)) == len(text) else list(self._pieces(text, text))
        replaced = self._replaced(text)
        if replaced is None:
            return None
        words = self._compiled.findall(replaced)
        places = [0, *accumulate(map(len, words))]
        if places[-1] != len(text):
            return list(self._pieces(text, replaced))
        for index, is_original in enumerate(map(str.isascii, words)):
            if not is_original:
                words[index] = text[places[index] : places[index + 1]]
        return words

    def iterate(self, text: str) -> Iterator[str] | None:
        """Yield the same words one by one, in memory that does not grow with their number."""
        replaced = text if text.isascii() else self._replaced(text)
        return None if replaced is None else self._pieces(text, replaced)

    def _pieces(self, text: str, replaced: str) -> Iterator[str]:
        end = 0
        for match in self._compiled.finditer(replaced):
            start, stop = match.span()
            if start != end:
                yield text[end:start]
            yield text[start:stop]
            end = stop
        if end != len(text):
            yield text[end:]

    def _replaced(self, text: str) -> str | None:
        """The text with a stand-in for every character outside ASCII; None if one of them has none."""
        foreign = _NOT_ASCII.findall(text)
        table, distinct = self._table, set(foreign)
        unknown = [character for character in distinct if ord(character) not in table]
        if unknown:
            self._learn(unknown)
        if len(foreign) * _RARE > len(text):
            replaced = text.translate(table)
        else:
            stand_ins = {character: chr(table[ord(character)]) for character in distinct}
            replaced = _NOT_ASCII.sub(lambda found: stand_ins[found[0]], text)
        return None if chr(_ODD) in replaced else replaced

    def _learn(self, characters: Iterable[str]) -> None:
        """Find the stand-ins of characters, and make new ones for classes that had none."""
        with self._learning:
            distinct = "".join(sorted(characters))
            inside = [ask_class(distinct) for ask_class in self._ask]
            learned: dict[int, int] = {}
            for character in distinct:
                classes = tuple(character in members for members in inside)
                if self._folds and character in _FOLDED:
                    learned[ord(character)] = _ODD
                    continue
                if classes not in self._stand_ins and len(self._stand_ins) < _STAND_INS:
                    stand_in = self._stand_ins[classes] = _FIRST_STAND_IN + len(self._stand_ins)
                    for expression, is_member in zip(self._expressions, classes, strict=True):
                        if is_member:
                            self._members[expression].add(chr(stand_in))
                learned[ord(character)] = self._stand_ins.get(classes, _ODD)
            self._compiled = self._compile()  # before anybody can have a text with the new stand-ins
            self._table.update(learned)

    def _compile(self) -> re.Pattern[str]:
        text = ""
        for part in self._parts:
            listed = "".join(map(re.escape, sorted(self._members.get(part.expression, ()))))
            text += part.text if not part.expression else f"[{listed}]" if listed else "(?!)"
        return re.compile(text, re.ASCII)


class WordPatterns:
    """Patterns in a row: each cuts what the one before it left."""

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

    def iterate(self, text: str) -> Iterator[str] | None:
        if any(pattern.iterate(text) is None for pattern in self._patterns):
            return None
        words = iter([text])
        for pattern in self._patterns:
            words = _each_cut(pattern, words)
        return words


def _each_cut(pattern: WordPattern, runs: Iterable[str]) -> Iterator[str]:
    for run in runs:
        pieces = pattern.iterate(run)
        assert pieces is not None, "a text whose every character has a stand-in has them in every part"
        yield from pieces


def _ask_regex(expression: str) -> ClassMembers:
    removing: Any = pre_tokenizers.Split(Regex(expression), behavior="removed")
    return lambda characters: set(characters).difference(*(piece for piece, _ in removing.pre_tokenize_str(characters)))


def _ask_digits(_: str) -> ClassMembers:
    """The digits of the pre-tokenizer ``Digits``, whose table is another one than that of ``\\p{N}``."""
    cutting: Any = pre_tokenizers.Digits(individual_digits=True)

    def ask(characters: str) -> set[str]:
        between = "".join(f"a{character}" for character in characters)
        return {piece for piece, _ in cutting.pre_tokenize_str(between) if len(piece) == 1} - {"a"}

    return ask


def digits_pattern(*, individual: bool) -> WordPattern:
    """The cuts of the pre-tokenizer ``Digits``."""
    return WordPattern([_Part(expression="digits"), _Part("" if individual else "+")], _ask_digits)


def word_pattern(pattern: str) -> WordPattern | None:
    """A function that cuts by this pattern; None if Python's engine might cut otherwise."""
    try:
        return WordPattern(_Parser(pattern).parse(), _ask_regex)
    except (RefusedPattern, re.error, OverflowError, RecursionError):
        return None
    except Exception as error:  # the library raises bare Exception for a class that it does not know
        if type(error) is not Exception:
            raise
        return None
