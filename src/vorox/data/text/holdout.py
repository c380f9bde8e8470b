"""Holdout rules: which files and records belong to training and which to validation.

A position in a source (relative path, byte offset) goes in; its split comes out. Invariants: the split depends on the
position alone, not on the seed, the machine or the other files; the splits are disjoint and complete; a larger
fraction holds out everything that a smaller one does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Final, get_args

import xxhash

from vorox.core.schema.data import Split, ValidationConfig
from vorox.core.schema.source_formats import source_format
from vorox.data.text.split_names import is_validation_name, named_split

SPLITS: tuple[Split, ...] = get_args(Split)

NO_HOLDOUT: Final = ValidationConfig(split="file", held_out_fraction=0)
"""The rule of a source for training only."""
ALL_HELD_OUT: Final = ValidationConfig.model_construct(split="file", held_out_fraction=1.0, sources=())
"""The rule of a source for validation only."""

_DOMAIN = b"split/1\0"
_PART_BYTES, _MAX_PARTS, _MIN_SPAN_BYTES = 1 << 18, 64, 256


def recorded_holdout(split: Mapping[str, object], validation: ValidationConfig) -> ValidationConfig:
    """Return the rule that a recipe records in its section ``split``."""
    rule, share = str(split.get("held_out")), float(Fraction(str(split.get("held_out_fraction", "0"))))
    if rule == "none":
        return NO_HOLDOUT
    if rule == "named":
        return validation.model_copy(update={"split": "named"})
    return validation.model_copy(update={"split": rule, "held_out_fraction": share})


def _hash(path: str, byte_offset: int | None) -> int:
    text = _DOMAIN + path.encode("utf-8", "surrogateescape")
    if byte_offset is not None:
        text += b"\0" + byte_offset.to_bytes(8, "little")
    return xxhash.xxh3_64_intdigest(text)


def _threshold(validation: ValidationConfig) -> int:
    return int(Fraction(str(validation.held_out_fraction)) * 2**64)


def names_hold_out(form: str, paths: Iterable[str]) -> bool:
    """Whether the names of some files of a source mark them as validation data, and those of others for training."""
    splits = {named_split(path) for path in paths}
    return "validation" in splits and ("train" in splits or (source_format(form).names_splits and len(splits) > 1))


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


def held_out_spans(
    validation: ValidationConfig, path: str, size_bytes: int, *, max_parts: int | None = None
) -> list[tuple[int, int]]:
    """Return the held-out spans of a file under the rule ``span``, before alignment to record boundaries.

    A file is divided into equal parts of at least 256 KiB, at most 64 (or ``max_parts``). In each, a window of the
    held-out fraction begins at a place that follows from a hash of path and part; it continues at the start of its
    part. So the spans are spread over the file, are like the rest of it, and do not depend on other files. The window
    of a short file is at least 256 bytes or a tenth of it, so that it holds more than a line.
    """
    fraction = Fraction(str(validation.held_out_fraction))
    if not fraction or not size_bytes:
        return []
    num_parts = max(1, min(max_parts or _MAX_PARTS, size_bytes // _PART_BYTES))
    spans: list[tuple[int, int]] = []
    for part in range(num_parts):
        first, end = part * size_bytes // num_parts, (part + 1) * size_bytes // num_parts
        length = max(int(fraction * (end - first)), min(_MIN_SPAN_BYTES, (end - first) // 10))
        start = first + _hash(path, part) * (end - first) // 2**64
        spans += [(first, first + max(0, start + length - end)), (start, min(start + length, end))]
    return [(start, end) for start, end in spans if start < end]
