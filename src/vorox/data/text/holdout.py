"""Which text is held out for validation.

A place in a source goes in, a yes or no comes out. Invariants: the answer depends on nothing but the place (not on
the seed, the machine, the other files, or their number), train and validation are disjoint and together complete, and
a larger share holds out everything that a smaller one does.
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
"""The rule of a source that only trains."""
ALL_HELD_OUT: Final = ValidationConfig.model_construct(split="file", held_out_fraction=1.0, sources=())
"""The rule of a source that only validates."""

SPLIT_NAMED_FORMATS = frozenset({"bin", "mds", "arrow"})
"""Formats whose writers name shards, or the folders that they are in, by their split."""

_DOMAIN = b"split/1\0"
_NAMED = re.compile(r"(?:^|[_.-])val(?:id(?:ation)?)?(?:[_.-]|$)", re.IGNORECASE)


def _hash(place: str, byte_offset: int | None) -> int:
    text = _DOMAIN + place.encode("utf-8", "surrogateescape")
    if byte_offset is not None:
        text += b"\0" + byte_offset.to_bytes(8, "little")
    return xxhash.xxh3_64_intdigest(text)


def _threshold(validation: ValidationConfig) -> int:
    return int(Fraction(str(validation.held_out_fraction)) * 2**64)


def is_validation_name(place: str) -> bool:
    """Whether the name of a file, or of a folder that it is in, says that it is for validation: ``val.bin``."""
    return any(_NAMED.search(name) for name in place.split("/"))


def holds_out_files(validation: ValidationConfig) -> bool:
    """Whether a file is in one split as a whole."""
    return validation.split in {"named", "file"}


def file_split(validation: ValidationConfig, place: str) -> Split:
    """The split of a whole file, by its name relative to the source's location."""
    if validation.split == "named":
        return "validation" if is_validation_name(place) else "train"
    return "validation" if _hash(place, None) < _threshold(validation) else "train"


def document_filter(validation: ValidationConfig, split: Split, place: str) -> Callable[[int], bool]:
    """Whether the record that starts at a byte of this file belongs to the split; always, unless documents are split.

    The byte offset is the key, so that a record's split is known without reading what lies before it; in Parquet, whose
    rows have no bytes of their own, the ordinal stands in its place.
    """
    assert validation.split != "auto" or not validation.held_out_fraction, "the rule of a source is chosen by now"
    if validation.split != "document":
        return lambda _: True
    threshold = _threshold(validation)
    return lambda byte_offset: (_hash(place, byte_offset) < threshold) == (split == "validation")


def tail_start(validation: ValidationConfig, size_bytes: int) -> int:
    """First byte of the held-out tail of a file, before it is moved to a record boundary."""
    return size_bytes - int(Fraction(str(validation.held_out_fraction)) * size_bytes)
