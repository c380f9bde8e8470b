"""A faster way to the same ids: words are looked up instead of being encoded again each time they occur.

Text is cut into words as the tokenizer cuts it; the ids of a word are asked of the library once and remembered. The
library's own way stays the reference: before the first use both are compared on text made to tell them apart and on a
keyed sample of the first documents, and afterwards on a small keyed share of all documents. Invariant: what is returned
never differs from what was compared; at the first difference the fast way is left for good, aloud, and ``changes``
counts up, so that whoever was in the middle of a unit can encode it again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import xxhash
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import pre_tokenizers

from vorox.data.rows import TokenArray
from vorox.data.tokenizers.encoders import Encoder, TokenType, text_bytes
from vorox.data.tokenizers.word_pattern import GPT2_PATTERN, WordPattern, WordPatterns, digits_pattern, word_pattern

Item = TypeVar("Item")
Result = TypeVar("Result")

_logger = logging.getLogger(__name__)

_GROUP_CHARACTERS = 1 << 18
_LONG_CHARACTERS = 1 << 20
"""Longer texts are cut word by word, so that the words of a whole document never lie in memory at once."""
_BATCH_WORDS = 1 << 16
_MOST_WORDS = 1 << 19
_LONGEST_WORD = 64
_MOST_LITERALS = 64
_SAMPLE_CHARACTERS = 1 << 17
_CHECKED_ONE_IN = 512
_UNICODE_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}
"""Normalizers that leave ASCII as it is."""
_AWKWARD = " \n\t\r\x0b\x1c\x85\xa0a's1!<|>é中\u3000٣ſ😀\u0300\0"


def adversarial_texts() -> list[str]:
    """Every triple of characters that patterns tell apart, in a few long texts and alone."""
    triples = ["".join(triple) for triple in itertools.product(_AWKWARD, repeat=3)]
    together = ["".join(triples[start : start + 500]) for start in range(0, len(triples), 500)]
    return [
        *triples[::7],
        *together,
        "",
        "it's IT'S we'll\u2019s  \n\n x\r\n\r\n",
        "a" * 1000,
        " " * 999 + "x",
        "12345" * 99,
    ]


def word_cuts(value: dict[str, Any]) -> WordPattern | WordPatterns | None:
    """The cuts by which a parsed tokenizer.json makes words that are encoded apart.

    None where the tokenizer cuts in another way or not at all, or where Python's engine might cut otherwise.
    """
    pre_tokenizer: dict[str, Any] = value["pre_tokenizer"] or {}
    *steps, last = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    patterns = [_cut(step) for step in steps]
    if last.get("use_regex", True):
        patterns.append(word_pattern(GPT2_PATTERN))
    known = [pattern for pattern in patterns if pattern is not None]
    if not known or len(known) != len(patterns):
        return None
    return known[0] if len(known) == 1 else WordPatterns(known)


def _cut(step: dict[str, Any]) -> WordPattern | None:
    """The cuts of one pre-tokenizer of a sequence; None if they are not known."""
    if step["type"] == "Digits":
        return digits_pattern(individual=step["individual_digits"])
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"] or "Regex" not in step["pattern"]:
        return None
    return word_pattern(step["pattern"]["Regex"])


class FastPath:
    """An ``Encoder``. Make one with ``fast_path``. Safe to use from several threads.

    Attributes:
        changes: How often the way of encoding changed because the two ways differed: 0, then 1 for ever.
    """

    def __init__(
        self,
        words: WordPattern | WordPatterns,
        word_library: Any,
        dtype: TokenType,
        reference: Encoder,
        *,
        literals: Sequence[str],
        normalizer: Any = None,
    ) -> None:
        self._pattern, self._word_library, self._dtype, self._reference = words, word_library, dtype, reference
        self._literals, self._normalizer = literals, normalizer
        self._known: dict[str, bytes] = {}
        self._tested = False
        self._testing = threading.Lock()
        self.changes = 0

    def __call__(self, texts: Sequence[str]) -> list[TokenArray]:
        if not self._tested:
            with self._testing:
                if not self._tested:
                    self._test(texts)
                    self._tested = True
        if self.changes:
            return self._reference(texts)
        found = self.encode_words(texts)
        other = [index for index, ids in enumerate(found) if ids is None]
        checked = [index for index, text in enumerate(texts) if found[index] is not None and _is_checked(text)]
        for index, ids in zip(other, self._reference([texts[index] for index in other]), strict=True):
            found[index] = ids
        self._compare([texts[index] for index in checked], [found[index] for index in checked])
        return self._reference(texts) if self.changes else cast("list[TokenArray]", found)

    def _test(self, texts: Sequence[str]) -> None:
        sample: list[str] = []
        size = 0
        for text in sorted(texts, key=_key):
            if sample and size + len(text) > _SAMPLE_CHARACTERS:
                continue
            sample.append(text[:_SAMPLE_CHARACTERS])
            size += len(sample[-1])
        tried = [*adversarial_texts(), *sample]
        self._compare(tried, self.encode_words(tried))

    def _compare(self, texts: Sequence[str], found: Sequence[TokenArray | None]) -> None:
        for text, ids, expected in zip(texts, found, self._reference(texts), strict=True):
            if ids is not None and not np.array_equal(ids, expected):
                self.changes = 1
                _logger.warning(
                    "the fast path of the tokenizer gave other ids than the tokenizer for a text of %d characters that "
                    "begins with %r; it is not used any more; `vorox data verify` tells whether a cache is affected",
                    len(text), text[:40],
                )  # fmt: skip
                return

    def encode_words(self, texts: Sequence[str]) -> list[TokenArray | None]:
        """Ids by looking up words; None for texts that only the reference can encode."""
        results: list[bytearray | None] = [bytearray() for _ in texts]
        waiting: list[tuple[int, list[str]]] = []
        size = 0
        for index, text in enumerate(texts):
            for words, characters in self._words(text):
                if words is None:
                    results[index] = None
                    break
                waiting.append((index, words))
                size += characters
                if size >= _GROUP_CHARACTERS:
                    self._look_up(waiting, results)
                    waiting, size = [], 0
        self._look_up(waiting, results)
        return [
            None if result is None else cast("TokenArray", np.frombuffer(result, self._dtype)) for result in results
        ]

    def _words(self, text: str) -> Iterator[tuple[list[str] | None, int]]:
        """Yield the words of a text in lists of bounded size, and their characters; None if the reference must do it.

        No text is cut before it is matched: a pattern that looks ahead may look as far as it likes.
        """
        if not text.isascii():
            text_bytes(text)  # says where half a surrogate pair is
        if any(literal in text for literal in self._literals):
            yield None, 0
            return
        if self._normalizer is not None and not text.isascii():
            text = self._normalizer.normalize_str(text)
            if any(literal in text for literal in self._literals):
                yield None, 0
                return
        if len(text) <= _LONG_CHARACTERS:
            yield self._pattern.words(text), len(text)
            return
        words = self._pattern.iterate(text)
        if words is None:
            yield None, 0
            return
        while batch := list(itertools.islice(words, _BATCH_WORDS)):
            yield batch, sum(map(len, batch))

    def _look_up(self, waiting: Sequence[tuple[int, list[str]]], results: list[bytearray | None]) -> None:
        known = self._known
        words_here: set[str] = set()
        words_here.update(*(words for _, words in waiting))
        missing = sorted(itertools.filterfalse(known.__contains__, words_here))
        learned = self._learn(missing) if missing else {}
        for index, words in waiting:
            result = results[index]
            if result is None:
                continue
            ids = list(map(known.get, words))
            if None in ids:  # words that are not remembered, or the memory began anew
                ids = [learned[w] if known_ids is None else known_ids for w, known_ids in zip(words, ids, strict=True)]
            result += b"".join(cast("list[bytes]", ids))

    def _learn(self, words: Sequence[str]) -> dict[str, bytes]:
        encodings = self._word_library.encode_batch_fast(words, add_special_tokens=False)
        learned = {
            word: np.array(encoding.ids, self._dtype).tobytes()
            for word, encoding in zip(words, encodings, strict=True)
        }  # fmt: skip
        if len(self._known) + len(learned) > _MOST_WORDS:
            self._known = {}
        self._known.update((word, ids) for word, ids in learned.items() if len(word) <= _LONGEST_WORD)
        return learned


def _key(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def _is_checked(text: str) -> bool:
    return _key(text) % _CHECKED_ONE_IN == 0


def rebuild_after_fallback(
    tokenizer: object,
    items: Iterable[Item],
    build: Callable[[Iterable[Item]], Generator[Result]],
    rebuild: Callable[[Item], Result],
) -> Generator[Result]:
    """Build a result of each item, and again those during which the tokenizer left its fast path.

    Some text of such an item was encoded by the way that turned out wrong. The only place that handles this: a build
    goes through here, and neither its stages nor its caller knows of the fast path.

    Args:
        tokenizer: Encodes text in ``build`` and ``rebuild``.
        items: Taken by ``build``, from any of its threads.
        build: Makes one result of each item, in order; may work ahead.
        rebuild: Makes the result of one item.
    """
    begun: deque[tuple[Item, int]] = deque()

    def changes() -> int:
        return getattr(tokenizer, "fast_path_fallbacks", 0)

    def noted() -> Iterator[Item]:
        for item in items:
            begun.append((item, changes()))
            yield item

    with contextlib.closing(build(noted())) as results:
        for result in results:
            item, before = begun.popleft()
            while before != changes():
                before = changes()
                result = rebuild(item)
            yield result


def fast_path(value: dict[str, Any], library: Any, dtype: TokenType, reference: Encoder) -> FastPath | None:
    """The fast way for a parsed tokenizer.json; None where there is none that is equal by construction.

    Args:
        value: The parsed tokenizer.
        library: The library's own; its model and its normalizer are shared, not copied.
        dtype: Of the ids.
        reference: The way that decides.
    """
    normalizer: dict[str, Any] = value["normalizer"] or {}
    literals: list[str] = [token["content"] for token in value["added_tokens"] if not token["special"]]
    if normalizer:  # the library looks for a normalised token in normalised text
        literals += [library.normalizer.normalize_str(literal) for literal in literals]
    known_normalizer = not normalizer or normalizer.get("type") in _UNICODE_FORMS
    words = word_cuts(value)
    if words is None or not known_normalizer or len(literals) > _MOST_LITERALS or not value["model"].get("merges"):
        return None
    whole_words: Any = LibraryTokenizer(library.model)
    whole_words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return FastPath(
        words, whole_words, dtype, reference, literals=literals, normalizer=library.normalizer if normalizer else None
    )  # fmt: skip
