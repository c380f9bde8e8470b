"""Which text of a source is held out for validation: the rule that is configured, or the first one that fits it.

A listed source and ``data.validation`` go in; the source with its rule comes out, and a sentence that says what the
rule holds out. Little is read: records up to the first one of each split. Invariants: a rule is a function of the
configuration and of the source's files; one that leaves either split empty is refused before anything is built, and
``auto`` never chooses one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from vorox.core.errors import ConfigError
from vorox.core.pluralize import pluralize
from vorox.core.schema.data import DataConfig, ValidationConfig
from vorox.data.documents import Unit
from vorox.data.text.formats import has_many_records
from vorox.data.text.holdout import (
    NO_HOLDOUT,
    SPLIT_NAMED_FORMATS,
    SPLITS,
    Split,
    file_split,
    holds_out_files,
    is_validation_name,
)
from vorox.data.text.listing import Note
from vorox.data.text.sources import Source, read_units
from vorox.data.text.unit_splitter import UnitSplitter

_FEWEST_HELD_OUT_FILES = 4
_MOST_OFF = 4
"""``auto`` holds out files where their share of the bytes is at most this many times too large or too small."""
_LARGER_SHARES, _LARGEST_SHARE = (4, 16, 64), 0.5
"""Of few records a share is held out that is this many times larger, until it holds one."""
_PROBE_BYTES = 1 << 20
_MOST_PROBED_BYTES = 64 << 20


def select_holdout(source: Source, data: DataConfig) -> Source:
    """The source with the rule by which its text is held out.

    Raises:
        ConfigError: The configured rule holds out nothing, or leaves nothing to train on.
        DataError: A file cannot be read.
    """
    validation = data.validation
    if validation.sources:
        by_name = _rule(validation, "named")
        return replace(source, holdout=by_name if _has_named_files(source) else NO_HOLDOUT)
    if validation.split != "named" and validation.held_out_fraction == 0:
        return replace(source, holdout=NO_HOLDOUT)
    if validation.split != "auto":
        for split in SPLITS:
            if not _has_records(source, split, validation, data.cache.unit_bytes, limit_bytes=None):
                raise _refusal(source, split, validation)
        return replace(source, holdout=validation)
    for rule in _candidates(source, validation, grows=data.cache.grow):
        if all(_has_records(source, split, rule, data.cache.unit_bytes, _MOST_PROBED_BYTES) for split in SPLITS):
            return replace(source, holdout=rule)
    note = Note("validation", f"nothing of source {source.config.name!r} can be held out, for it is a single record")
    return replace(source, holdout=NO_HOLDOUT, notes=(*source.notes, note))


def _candidates(source: Source, validation: ValidationConfig, *, grows: bool) -> Iterator[ValidationConfig]:
    """The rules of ``auto``, the first that fits being taken.

    A cache that takes up new files must keep its rule, so what it is may not depend on how many files there are.
    """
    if _has_named_files(source):
        yield _rule(validation, "named")
    by_file = _rule(validation, "file")
    if not grows and _holds_out_enough_files(source, by_file):
        yield by_file
    if has_many_records(source.config):
        yield _rule(validation, "document")
    yield _rule(validation, "tail")
    if has_many_records(
        source.config
    ):  # few records, and none at whose end the file may be cut: rows of a Parquet file
        for factor in _LARGER_SHARES:
            share = min(_LARGEST_SHARE, validation.held_out_fraction * factor)
            yield _rule(validation, "document").model_copy(update={"held_out_fraction": share})


def _rule(validation: ValidationConfig, split: str) -> ValidationConfig:
    return validation.model_copy(update={"split": split})


def _has_named_files(source: Source) -> bool:
    """Whether some shards are for validation by their names or folders, and others are not."""
    return (
        source.config.format in SPLIT_NAMED_FORMATS and len({is_validation_name(place) for place in source.places}) == 2
    )


def _held_out_files(source: Source, rule: ValidationConfig) -> list[int]:
    return [index for index, place in enumerate(source.places) if file_split(rule, place) == "validation"]


def _holds_out_enough_files(source: Source, rule: ValidationConfig) -> bool:
    held_out = _held_out_files(source, rule)
    share = Fraction(sum(source.files[index].size_bytes for index in held_out), max(1, source.size_bytes))
    wanted = Fraction(str(rule.held_out_fraction))
    return len(held_out) >= _FEWEST_HELD_OUT_FILES and wanted / _MOST_OFF <= share <= wanted * _MOST_OFF < 1


def _has_records(
    source: Source, split: Split, rule: ValidationConfig, unit_bytes: int, limit_bytes: int | None
) -> bool:
    """Whether a rule leaves a split any record within the first ``limit_bytes`` that it is looked for in."""
    if holds_out_files(rule):
        return any(file_split(rule, place) == split for place in source.places)
    probe_bytes = min(_PROBE_BYTES, unit_bytes) if has_many_records(source.config) else unit_bytes
    looked_at = 0
    for span, size_bytes in UnitSplitter(source, split, rule, probe_bytes).pieces():
        if any(True for _ in read_units(source, [Unit(0, (span,))], split, rule)):
            return True
        looked_at += size_bytes
        if limit_bytes is not None and looked_at >= limit_bytes:
            return False
    return False


def _refusal(source: Source, split: Split, rule: ValidationConfig) -> ConfigError:
    num_files = len(source.files)
    files = f"{pluralize(num_files, 'file')}, {source.size_bytes:,} bytes"
    name = f"source {source.config.name!r} ({files})"
    what = {"file": "files", "document": "documents", "tail": "tails"}.get(rule.split)
    share = (
        f"data.validation.held_out_fraction={rule.held_out_fraction:g} of the {what}"
        if what
        else "data.validation.split=named"
    )
    empty = f"leaves no text of {name} to train on" if split == "train" else f"holds out nothing of {name}"
    return ConfigError(
        f"{share} {empty}",
        where="data.validation",
        hint="set data.validation.split=auto to hold out what fits the source, "
        "or data.validation.held_out_fraction=0 to train without validation",
    )


def describe_holdout(source: Source) -> str:
    """What the rule of a source holds out, for a person: ``12 of 640 files of stdlib``."""
    rule, name, files = source.holdout, source.config.name, len(source.files)
    share = f"{rule.held_out_fraction * 100:g}%"
    if holds_out_files(rule):
        held_out = len(_held_out_files(source, rule))
        if not held_out:
            return f"nothing of {name}"
        how = " by their names" if rule.split == "named" else ""
        return f"{held_out:,} of {pluralize(files, 'file')} of {name}{how}, {files - held_out:,} to train on"
    if rule.split == "document":
        return f"{share} of the documents of {name}"
    return f"the last {share} of {source.files[0].uri.rpartition('/')[2] if files == 1 else f'every file of {name}'}"


def held_out_bytes(source: Source) -> int:
    """Bytes of the files that are held out; about, where records are."""
    if holds_out_files(source.holdout):
        return sum(source.files[index].size_bytes for index in _held_out_files(source, source.holdout))
    return int(source.size_bytes * source.holdout.held_out_fraction)
