"""The fast path: a cache from pre-tokenized words to ids, checked against the library.

Text is split into words by the tokenizer's pattern; the library encodes each distinct word once. The library remains
the reference: both are compared before the first use, on adversarial texts and a sample of the first documents, and
afterwards on a small fraction of all documents. Invariant: at the first difference the fast path is disabled
permanently with a warning, and ``fallbacks`` is incremented, so that units in progress can be encoded again.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import xxhash
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import pre_tokenizers

from vorox.data.rows import TokenArray
from vorox.data.tokenizers.tokenizer_json import Encoder, TokenType, reject_lone_surrogates
from vorox.data.tokenizers.word_pattern import (
    GPT2_PATTERN,
    WordPattern,
    WordPatternSequence,
    digits_pattern,
    word_pattern,
)

_logger = logging.getLogger(__name__)

_GROUP_CHARACTERS = 1 << 18
_LONG_CHARACTERS = 1 << 20
"""Longer texts are split lazily, so that the words of a whole document are never in memory together."""
_BATCH_WORDS = 1 << 16
_MAX_CACHED_WORDS = 1 << 19
_MAX_WORD_CHARACTERS = 64
_MAX_LITERALS = 64
_SAMPLE_CHARACTERS = 1 << 17
_CHECKED_ONE_IN = 512
_UNICODE_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}
"""Normalizers that do not change ASCII."""
_ADVERSARIAL_CHARACTERS = " \n\t\r\x0b\x1c\x85\xa0a's1!<|>é中\u3000٣ſ😀\u0300\0"


def adversarial_texts() -> list[str]:
    """Return texts with every triple of characters that patterns treat differently, joined and alone."""
    triples = ["".join(triple) for triple in itertools.product(_ADVERSARIAL_CHARACTERS, repeat=3)]
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


def pre_tokenizer_pattern(value: dict[str, Any]) -> WordPattern | WordPatternSequence | None:
    """Return the pattern by which a parsed tokenizer.json splits text into independently encoded words.

    None if it splits in another way or not at all, or if Python's regex engine might split differently.
    """
    pre_tokenizer: dict[str, Any] = value["pre_tokenizer"] or {}
    *steps, last = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    patterns = [_step_pattern(step) for step in steps]
    if last.get("use_regex", True):
        patterns.append(word_pattern(GPT2_PATTERN))
    known = [pattern for pattern in patterns if pattern is not None]
    if not known or len(known) != len(patterns):
        return None
    return known[0] if len(known) == 1 else WordPatternSequence(known)


def _step_pattern(step: dict[str, Any]) -> WordPattern | None:
    """Return the pattern of one pre-tokenizer of a sequence; None if it is not supported."""
    if step["type"] == "Digits":
        return digits_pattern(individual=step["individual_digits"])
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"] or "Regex" not in step["pattern"]:
        return None
    return word_pattern(step["pattern"]["Regex"])


class FastPath:
    """An ``Encoder`` with a word cache, made by ``make_fast_path``. Thread-safe.

    Attributes:
        fallbacks: 0 while the fast path is in use; 1 after it differed from the reference and was disabled.
    """

    def __init__(
        self,
        words: WordPattern | WordPatternSequence,
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
        self.fallbacks = 0

    def __call__(self, texts: Sequence[str]) -> list[TokenArray]:
        if not self._tested:
            with self._testing:
                if not self._tested:
                    self._test(texts)
                    self._tested = True
        if self.fallbacks:
            return self._reference(texts)
        found = self.encode_words(texts)
        other = [index for index, ids in enumerate(found) if ids is None]
        checked = [index for index, text in enumerate(texts) if found[index] is not None and _is_checked(text)]
        for index, ids in zip(other, self._reference([texts[index] for index in other]), strict=True):
            found[index] = ids
        self._compare([texts[index] for index in checked], [found[index] for index in checked])
        return self._reference(texts) if self.fallbacks else cast("list[TokenArray]", found)

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
                self.fallbacks = 1
                _logger.warning(
                    "The fast path of the tokenizer is disabled: its ids differ from the tokenizer's for a text of %d "
                    "characters that begins with %r. Run `vorox data verify` to check existing caches.",
                    len(text), text[:40],
                )  # fmt: skip
                return

    def encode_words(self, texts: Sequence[str]) -> list[TokenArray | None]:
        """Encode texts by looking up words; None for texts that only the reference can encode."""
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
        """Yield the words of a text in bounded lists, with their characters; None if only the reference can encode it.

        A text is never split before it is matched, because patterns may look ahead without limit.
        """
        if not text.isascii():
            reject_lone_surrogates([text])
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
        encoded = self._encode_missing(missing) if missing else {}
        for index, words in waiting:
            result = results[index]
            if result is None:
                continue
            ids = list(map(known.get, words))
            if None in ids:  # words that are too long to cache, or the cache was cleared
                ids = [encoded[w] if known_ids is None else known_ids for w, known_ids in zip(words, ids, strict=True)]
            result += b"".join(cast("list[bytes]", ids))

    def _encode_missing(self, words: Sequence[str]) -> dict[str, bytes]:
        encodings = self._word_library.encode_batch_fast(words, add_special_tokens=False)
        encoded = {
            word: np.array(encoding.ids, self._dtype).tobytes()
            for word, encoding in zip(words, encodings, strict=True)
        }  # fmt: skip
        if len(self._known) + len(encoded) > _MAX_CACHED_WORDS:
            self._known = {}
        self._known.update((word, ids) for word, ids in encoded.items() if len(word) <= _MAX_WORD_CHARACTERS)
        return encoded


def _key(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def _is_checked(text: str) -> bool:
    return _key(text) % _CHECKED_ONE_IN == 0


def make_fast_path(value: dict[str, Any], library: Any, dtype: TokenType, reference: Encoder) -> FastPath | None:
    """Return the fast path of a tokenizer; None if none is equivalent by construction.

    Args:
        value: The parsed tokenizer.json.
        library: The library's tokenizer; its model and normalizer are shared, not copied.
        dtype: Dtype of the ids.
        reference: The encoder whose ids are authoritative.
    """
    normalizer: dict[str, Any] = value["normalizer"] or {}
    literals: list[str] = [token["content"] for token in value["added_tokens"] if not token["special"]]
    if normalizer:  # the library matches normalised tokens in normalised text
        literals += [library.normalizer.normalize_str(literal) for literal in literals]
    known_normalizer = not normalizer or normalizer.get("type") in _UNICODE_FORMS
    words = pre_tokenizer_pattern(value)
    if words is None or not known_normalizer or len(literals) > _MAX_LITERALS or not value["model"].get("merges"):
        return None
    whole_words: Any = LibraryTokenizer(library.model)
    whole_words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return FastPath(
        words, whole_words, dtype, reference, literals=literals, normalizer=library.normalizer if normalizer else None
    )  # fmt: skip
