"""What of a text is compared to find its duplicates: two hashes of all of it, or its MinHash.

A text goes in, a row of unsigned numbers comes out. An index decides, text after text, whether one like it was there
before. Invariant: signatures are functions of the text and the arguments alone, and an index of the texts in the order
in which they were added.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import xxhash
from annotated_types import Ge, Gt, Le

from vorox.core.errors import ConfigError
from vorox.core.installation import install_command
from vorox.data.transforms.identity import version

Signature = npt.NDArray[Any]
Scope = Literal["corpus", "unit"]

_WORD = re.compile(r"\w+")
_MINHASH: Mapping[str, Any] = {"seed": 1, "scheme": "affine32"}
_LARGEST_UINT64 = (1 << 64) - 1


class Index(Protocol):
    """Texts that were there before, by their signatures."""

    def is_duplicate(self, signature: Signature) -> bool:
        """Whether a text like this one was added."""
        ...

    def add(self, signature: Signature) -> None: ...


@version(1)
def exact_duplicates(text: str, *, scope: Scope = "corpus") -> Signature:
    """Remove texts that were there before, character for character.

    Args:
        text: The text.
        scope: ``corpus``: anywhere before in the source, found in a first pass over all of it. ``unit``: before in
            the same unit of work, without a first pass.
    """
    del scope
    value = xxhash.xxh3_128_intdigest(text.encode())
    return np.array([value >> 64, value & _LARGEST_UINT64], np.uint64)


@version(1)
def near_duplicates(
    text: str,
    *,
    scope: Scope = "corpus",
    threshold: Annotated[float, Gt(0), Le(1)] = 0.8,
    ngram_words: Annotated[int, Ge(1)] = 5,
    permutations: Annotated[int, Ge(16), Le(1024)] = 128,
) -> Signature:
    """Remove texts whose runs of words are mostly those of one that was there before.

    MinHash (Broder 1997) with locality-sensitive hashing, by the library datasketch.

    Args:
        text: The text; case and punctuation do not count.
        scope: As for exact duplicates.
        threshold: Estimated Jaccard similarity of the sets of runs, from which on a text is removed.
        ngram_words: Words of a run.
        permutations: Numbers of a MinHash; the error of the estimate is about 1 / sqrt of it.
    """
    del scope, threshold
    words = _WORD.findall(text.lower())
    runs = {" ".join(words[start : start + ngram_words]) for start in range(max(len(words) - ngram_words + 1, 1))}
    minhash = _datasketch().MinHash(num_perm=permutations, hashfunc=xxhash.xxh32_intdigest, **_MINHASH)
    minhash.update_batch([run.encode() for run in sorted(runs)])
    return np.asarray(minhash.hashvalues, np.uint32)


class ExactIndex:
    """A set of signatures."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def is_duplicate(self, signature: Signature) -> bool:
        return signature.tobytes() in self._seen

    def add(self, signature: Signature) -> None:
        self._seen.add(signature.tobytes())


class NearIndex:
    """MinHashes by their bands; candidates are compared number by number."""

    def __init__(self, threshold: float, permutations: int) -> None:
        library = _datasketch()
        self._threshold = threshold
        self._index: Any = library.MinHashLSH(threshold=threshold, num_perm=permutations)
        self._as_minhash: Callable[[Signature], Any] = lambda signature: library.LeanMinHash(
            hashvalues=signature, **_MINHASH
        )
        self._signatures: list[Signature] = []

    def is_duplicate(self, signature: Signature) -> bool:
        candidates: list[int] = self._index.query(self._as_minhash(signature))
        least = self._threshold * len(signature)
        return any(np.count_nonzero(self._signatures[index] == signature) >= least for index in candidates)

    def add(self, signature: Signature) -> None:
        self._index.insert(len(self._signatures), self._as_minhash(signature))
        self._signatures.append(signature)


def index_for(name: str, args: Mapping[str, Any]) -> Index:
    """An empty index for a transform of duplicates."""
    return ExactIndex() if name == "exact_duplicates" else NearIndex(args["threshold"], args["permutations"])


def check_library(name: str) -> None:
    """Refuse near duplicates where the library is missing.

    Raises:
        ConfigError: Naming the extra that has it.
    """
    if name == "near_duplicates":
        _datasketch()


def _datasketch() -> Any:
    try:
        return importlib.import_module("datasketch")
    except ImportError as error:
        raise ConfigError(
            "near_duplicates needs datasketch", where="data.transforms", hint=install_command("dedup")
        ) from error
