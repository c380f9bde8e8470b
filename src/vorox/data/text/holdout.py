"""Holdout rules: which files and records belong to training and which to validation.

A position in a source (relative path, byte offset) goes in; its split comes out. Invariants: the split depends on the
position alone, not on the seed, the machine or the other files; the splits are disjoint and complete; a larger
fraction holds out everything that a smaller one does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Final, Literal

import xxhash

from vorox.core.schema.data import ValidationConfig

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")

NO_HOLDOUT: Final = ValidationConfig(split="file", held_out_fraction=0)
"""The rule of a source for training only."""
ALL_HELD_OUT: Final = ValidationConfig.model_construct(split="file", held_out_fraction=1.0, sources=())
"""The rule of a source for validation only."""

SPLIT_NAMED_FORMATS = frozenset({"bin", "mds", "arrow"})
"""Formats whose writers name shards or their folders by split."""

_DOMAIN = b"split/1\0"
_NAMED = re.compile(r"(?:^|[_.-])val(?:id(?:ation)?)?(?:[_.-]|$)", re.IGNORECASE)


def _hash(path: str, byte_offset: int | None) -> int:
    text = _DOMAIN + path.encode("utf-8", "surrogateescape")
    if byte_offset is not None:
        text += b"\0" + byte_offset.to_bytes(8, "little")
    return xxhash.xxh3_64_intdigest(text)


def _threshold(validation: ValidationConfig) -> int:
    return int(Fraction(str(validation.held_out_fraction)) * 2**64)


def is_validation_name(path: str) -> bool:
    """Whether the name of a file or of a parent folder marks it as validation data, such as ``val.bin``."""
    return any(_NAMED.search(name) for name in path.split("/"))


def holds_out_files(validation: ValidationConfig) -> bool:
    """Whether a rule assigns whole files to a split."""
    return validation.split in {"named", "file"}


def file_split(validation: ValidationConfig, path: str) -> Split:
    """Return the split of a whole file, by its path relative to the source's location."""
    if validation.split == "named":
        return "validation" if is_validation_name(path) else "train"
    return "validation" if _hash(path, None) < _threshold(validation) else "train"


def document_filter(validation: ValidationConfig, split: Split, path: str) -> Callable[[int], bool]:
    """Return a predicate: whether the record at a byte offset of this file belongs to the split.

    It is always true unless single documents are held out. The key is the byte offset, so that the split of a record
    is known without reading the text before it; in formats with row groups the key is the ordinal.
    """
    assert validation.split != "auto" or not validation.held_out_fraction, "the rule is not selected yet"
    if validation.split != "document":
        return lambda _: True
    threshold = _threshold(validation)
    return lambda byte_offset: (_hash(path, byte_offset) < threshold) == (split == "validation")


def tail_start(validation: ValidationConfig, size_bytes: int) -> int:
    """Return the first byte of the held-out tail of a file, before alignment to a record boundary."""
    return size_bytes - int(Fraction(str(validation.held_out_fraction)) * size_bytes)
