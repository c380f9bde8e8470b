"""Signatures for deduplication: a 128-bit hash of a text, or its MinHash.

A text goes in, an array of unsigned integers comes out. An index of signatures decides whether a similar text was added
before. Invariant: a signature is a function of the text and the arguments alone; an index depends only on the texts and
the order in which they were added.
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
from vorox.core.platform.installation import install_command
from vorox.data.transforms.identity import version

Signature = npt.NDArray[Any]
Scope = Literal["corpus", "unit"]

_WORD = re.compile(r"\w+")
_MINHASH: Mapping[str, Any] = {"seed": 1, "scheme": "affine32"}
_LARGEST_UINT64 = (1 << 64) - 1


class Index(Protocol):
    """An index of texts by their signatures."""

    def is_duplicate(self, signature: Signature) -> bool:
        """Return whether an equal or similar text was added."""
        ...

    def add(self, signature: Signature) -> None: ...


@version(1)
def exact_duplicates(text: str, *, scope: Scope = "corpus") -> Signature:
    """Remove exact copies of earlier texts.

    Args:
        text: The text.
        scope: ``corpus``: compare with all earlier texts of the source, which takes a first pass over it. ``unit``:
            compare with earlier texts of the same unit, without a first pass.
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
    """Remove texts that are similar to an earlier text.

    MinHash (Broder 1997) over word n-grams with locality-sensitive hashing, by the library datasketch.

    Args:
        text: The text; case and punctuation are ignored.
        scope: As for ``exact_duplicates``.
        threshold: Estimated Jaccard similarity of the n-gram sets at which a text is removed.
        ngram_words: Words per n-gram.
        permutations: Size of a MinHash; the standard error of the estimate is about 1 / sqrt(permutations).
    """
    del scope, threshold
    words = _WORD.findall(text.lower())
    runs = {" ".join(words[start : start + ngram_words]) for start in range(max(len(words) - ngram_words + 1, 1))}
    minhash = datasketch().MinHash(num_perm=permutations, hashfunc=xxhash.xxh32_intdigest, **_MINHASH)
    minhash.update_batch([run.encode() for run in sorted(runs)])
    return np.asarray(minhash.hashvalues, np.uint32)


class ExactIndex:
    """An index of exact signatures."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def is_duplicate(self, signature: Signature) -> bool:
        return signature.tobytes() in self._seen

    def add(self, signature: Signature) -> None:
        self._seen.add(signature.tobytes())


class NearIndex:
    """An LSH index of MinHashes; candidates are compared by their full signatures."""

    def __init__(self, threshold: float, permutations: int) -> None:
        library = datasketch()
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


def exact_index(args: Mapping[str, Any]) -> Index:
    """Return an empty index for ``exact_duplicates``."""
    del args
    return ExactIndex()


def near_index(args: Mapping[str, Any]) -> Index:
    """Return an empty index for ``near_duplicates``."""
    return NearIndex(args["threshold"], args["permutations"])


def datasketch() -> Any:
    """Import the library for near duplicates.

    Raises:
        ConfigError: The library is missing; the hint is the command that installs it.
    """
    try:
        return importlib.import_module("datasketch")
    except ImportError as error:
        raise ConfigError(
            "Transform near_duplicates needs the library datasketch",
            where="data.transforms",
            hint=install_command("dedup"),
        ) from error
