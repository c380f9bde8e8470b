"""Pre-tokenization patterns on Python's ``re``: the same words as the ``tokenizers`` library.

The pattern of a ``tokenizer.json`` goes in; a function from text to words comes out. A pattern that ``re`` might
interpret differently is refused. Patterns use Unicode classes that ``re`` lacks, so every non-ASCII character is first
replaced by a placeholder for all characters of the same classes, and the original text is split at the same offsets.
Invariant: the library itself decides which characters are in a class, by the expression as written: ``\\w`` and
``[\\w]`` are different classes there.
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
"""The pattern of the pre-tokenizer ``ByteLevel``."""

ClassMembers = Callable[[str], set[str]]
"""Returns which of some distinct characters are in a class."""

_CLASS = re.compile(r"\\(?:[pP]\{\^?\w+\}|[sSdDwW])")
_ESCAPE = re.compile(r"\\(?:[rntfv]|[!-/:-@\[-`{-~ ])")
_POSIX_CLASS = re.compile(r"\[:\^?[a-z]+:\]")
_QUANTIFIER = re.compile(r"(?P<sign>[?*+])[?+]?|\{(?P<least>\d+)(?P<range>,(?P<most>\d*))?\}(?![?*+{])")
_GROUP = re.compile(r"\(\?[:=!>]")
_CASELESS = re.compile(r"\(\?i:((?:[a-zA-Z'|]|\[[a-zA-Z]+\])+)\)(?![*+{]|\?[?+])")
FOLDED_PAIR = re.compile(r"ss|st|f[fil]|\.[\w.]|\w\.", re.IGNORECASE)
"""Letter pairs that case-insensitive matching in the library equates with one character (``ß``, ``ﬁ``)."""
_NOT_LITERAL = frozenset("\\[](){}?*+|.^$")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_RARE = 16
"""Below one non-ASCII character in this many, they are replaced one by one."""
_FIRST_PLACEHOLDER = 0x80
_MAX_PLACEHOLDERS = 0x80
_UNSUPPORTED = 0x2028
_FOLDED = "\u017f\u212a\u0130\u0131"
"""Characters that match ``s``, ``k`` and ``i`` without regard to case."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a pattern: Python regex text, or a character class in the library's syntax."""

    text: str = ""
    expression: str = ""


class RefusedPattern(Exception):
    """A pattern that the two regex engines may interpret differently."""


class _Parser:
    """Parses a pattern into parts, tracking the minimum number of characters that each matches.

    A repeated group is refused if it can match the empty string, because engines end such loops differently, or if it
    contains choices, because backtracking may take exponential time. So is a pattern that can match the empty string.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern, self._position, self._choices = pattern, 0, 0
        self.parts: list[_Part] = []

    def parse(self) -> list[_Part]:
        if self._alternatives() == 0 or self._position != len(self._pattern):
            raise RefusedPattern
        return self.parts

    def _alternatives(self) -> int:
        """Parse up to the end of a group or pattern; return the minimum number of characters that it matches."""
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
        """Parse an atom with its quantifier; return the minimum number of characters that it matches."""
        choices = self._choices
        width = self._atom()
        quantifier = _QUANTIFIER.match(self._pattern, self._position)
        if quantifier is None:
            return width or 0
        if not width or (self._choices > choices and quantifier["sign"] != "?"):
            raise RefusedPattern  # a repeated assertion, a loop over the empty string, or one over choices
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
        """Parse a class, character or group; return the minimum characters that it matches, None for an assertion."""
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
        """Parse case-insensitive letters.

        Every alternative must begin at an apostrophe, so that letters of two groups are never adjacent: the library
        could match ``s`` and ``s`` of two groups as one ``ß``.
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
        RefusedPattern: Its end is ambiguous.
    """
    position, depth = 0, 0
    while position < len(text):
        rest = text[position:]
        token = _CLASS.match(rest) or _ESCAPE.match(rest)
        if depth and rest[0] == "[" and (posix := _POSIX_CLASS.match(rest)):
            token = posix
        if token:
            position += token.end()
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
    """A function from text to words, made by ``word_pattern``. Thread-safe."""

    def __init__(self, parts: Sequence[_Part], find_members: Callable[[str], ClassMembers]) -> None:
        self._parts = parts
        self._expressions = sorted({part.expression for part in parts if part.expression})
        self._find_members = [find_members(expression) for expression in self._expressions]
        self._folds = any(part.text.startswith("(?i:") for part in parts)
        self._members: dict[str, set[str]] = {expression: set() for expression in self._expressions}
        self._placeholders: dict[tuple[bool, ...], int] = {}
        self._table: dict[int, int] = {}
        self._learning = threading.Lock()
        ascii_characters = "".join(map(chr, range(_FIRST_PLACEHOLDER)))
        for expression, find_in_class in zip(self._expressions, self._find_members, strict=True):
            self._members[expression] |= find_in_class(ascii_characters)
        self._compiled = self._compile()

    def words(self, text: str) -> list[str] | None:
        """Return the matches of the pattern and the text between them, in order; None if the text is unsupported."""
        if text.isascii():
            words: list[str] = self._compiled.findall(text)
            return words if len("".join(words)) == len(text) else list(self._split(text, text))
        replaced = self._replaced(text)
        if replaced is None:
            return None
        words = self._compiled.findall(replaced)
        offsets = [0, *accumulate(map(len, words))]
        if offsets[-1] != len(text):
            return list(self._split(text, replaced))
        for index, is_original in enumerate(map(str.isascii, words)):
            if not is_original:
                words[index] = text[offsets[index] : offsets[index + 1]]
        return words

    def iterate(self, text: str) -> Iterator[str] | None:
        """Yield the same words lazily, in constant memory."""
        replaced = text if text.isascii() else self._replaced(text)
        return None if replaced is None else self._split(text, replaced)

    def _split(self, text: str, replaced: str) -> Iterator[str]:
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
        """Return the text with a placeholder for every non-ASCII character; None if one is unsupported."""
        non_ascii = _NOT_ASCII.findall(text)
        table, distinct = self._table, set(non_ascii)
        unknown = [character for character in distinct if ord(character) not in table]
        if unknown:
            self._learn(unknown)
        if len(non_ascii) * _RARE > len(text):
            replaced = text.translate(table)
        else:
            placeholders = {character: chr(table[ord(character)]) for character in distinct}
            replaced = _NOT_ASCII.sub(lambda found: placeholders[found[0]], text)
        return None if chr(_UNSUPPORTED) in replaced else replaced

    def _learn(self, characters: Iterable[str]) -> None:
        """Assign placeholders to characters, with new ones for new combinations of classes."""
        with self._learning:
            distinct = "".join(sorted(characters))
            inside = [find_in_class(distinct) for find_in_class in self._find_members]
            learned: dict[int, int] = {}
            for character in distinct:
                classes = tuple(character in members for members in inside)
                if self._folds and character in _FOLDED:
                    learned[ord(character)] = _UNSUPPORTED
                    continue
                if classes not in self._placeholders and len(self._placeholders) < _MAX_PLACEHOLDERS:
                    placeholder = self._placeholders[classes] = _FIRST_PLACEHOLDER + len(self._placeholders)
                    for expression, is_member in zip(self._expressions, classes, strict=True):
                        if is_member:
                            self._members[expression].add(chr(placeholder))
                learned[ord(character)] = self._placeholders.get(classes, _UNSUPPORTED)
            self._compiled = self._compile()  # before any text can contain the new placeholders
            self._table.update(learned)

    def _compile(self) -> re.Pattern[str]:
        text = ""
        for part in self._parts:
            listed = "".join(map(re.escape, sorted(self._members.get(part.expression, ()))))
            text += part.text if not part.expression else f"[{listed}]" if listed else "(?!)"
        return re.compile(text, re.ASCII)


class WordPatternSequence:
    """A sequence of patterns: each splits the words of the previous one."""

    def __init__(self, patterns: Sequence[WordPattern]) -> None:
        self._patterns = patterns

    def words(self, text: str) -> list[str] | None:
        runs = [text]
        for pattern in self._patterns:
            split = [pattern.words(run) for run in runs]
            runs = [word for words in split if words is not None for word in words]
            if None in split:
                return None
        return runs

    def iterate(self, text: str) -> Iterator[str] | None:
        if any(pattern.iterate(text) is None for pattern in self._patterns):
            return None
        words = iter([text])
        for pattern in self._patterns:
            words = _split_each(pattern, words)
        return words


def _split_each(pattern: WordPattern, runs: Iterable[str]) -> Iterator[str]:
    for run in runs:
        words = pattern.iterate(run)
        assert words is not None, "every character of the text has a placeholder"
        yield from words


def _regex_members(expression: str) -> ClassMembers:
    removing: Any = pre_tokenizers.Split(Regex(expression), behavior="removed")
    return lambda characters: set(characters).difference(*(piece for piece, _ in removing.pre_tokenize_str(characters)))


def _digit_members(_: str) -> ClassMembers:
    """Find the digits of the pre-tokenizer ``Digits``, which differ from ``\\p{N}``."""
    splitting: Any = pre_tokenizers.Digits(individual_digits=True)

    def find(characters: str) -> set[str]:
        between = "".join(f"a{character}" for character in characters)
        return {piece for piece, _ in splitting.pre_tokenize_str(between) if len(piece) == 1} - {"a"}

    return find


def digits_pattern(*, individual: bool) -> WordPattern:
    """Return the pattern of the pre-tokenizer ``Digits``."""
    return WordPattern([_Part(expression="digits"), _Part("" if individual else "+")], _digit_members)


def word_pattern(pattern: str) -> WordPattern | None:
    """Return the compiled pattern; None if ``re`` might split differently."""
    try:
        return WordPattern(_Parser(pattern).parse(), _regex_members)
    except (RefusedPattern, re.error, OverflowError, RecursionError):
        return None
    except Exception as error:  # the library raises bare Exception for an unknown class
        if type(error) is not Exception:
            raise
        return None
