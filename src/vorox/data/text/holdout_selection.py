"""Selecting the holdout rule of a source: the configured rule, or with ``auto`` the first one that fits.

A listed source and ``data.validation`` go in; the source with its rule, and a description of it, come out. Only the
records up to the first one of each split are read. Invariants: the rule depends on the configuration and the source's
files; a rule that leaves a split empty is rejected before anything is built, and ``auto`` never selects one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from vorox.core.errors import ConfigError
from vorox.core.pluralize import pluralize
from vorox.core.schema.data import DataConfig, ValidationConfig
from vorox.data.documents import Unit
from vorox.data.text.file_content import is_stored_as_read, limits_of
from vorox.data.text.formats import has_many_records
from vorox.data.text.holdout import (
    NO_HOLDOUT,
    SPLITS,
    Split,
    file_split,
    holds_out_files,
    names_hold_out,
)
from vorox.data.text.listing import Note
from vorox.data.text.sources import Source
from vorox.data.text.unit_reader import read_units
from vorox.data.text.unit_splitter import UnitSplitter, held_out_bytes_of, split_into_units

_MIN_HELD_OUT_FILES = 2
_FILE_FACTORS = (1, 2, 4)
"""Of a folder with few files, a larger share is held out, so that it is several whole files."""
_MAX_SHARE_FACTOR = 4
"""``auto`` holds out files if their share of the bytes is within this factor of the configured one."""
_SHARE_FACTORS, _MAX_SHARE = (4, 16, 64), 0.5
"""A source of few records gets a share larger by these factors, until it holds a record."""
_PROBE_BYTES = 1 << 20
_MAX_PROBED_BYTES = 64 << 20
_MAX_MEASURED_FILES = 1000
"""The spans of more files are not measured: each may be a request to a store."""


def select_holdout(source: Source, data: DataConfig) -> Source:
    """Return the source with its holdout rule.

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
                raise _empty_split_error(source, split, validation)
        return _with_share(replace(source, holdout=validation), data.cache.unit_bytes)
    for rule in _candidates(source, validation, grows=data.cache.grow):
        if all(_has_records(source, split, rule, data.cache.unit_bytes, _MAX_PROBED_BYTES) for split in SPLITS):
            return _with_share(replace(source, holdout=rule), data.cache.unit_bytes)
    note = Note("validation", f"nothing of source {source.config.name!r} can be held out because it is a single record")
    return replace(source, holdout=NO_HOLDOUT, notes=(*source.notes, note))


def _candidates(source: Source, validation: ValidationConfig, *, grows: bool) -> Iterator[ValidationConfig]:
    """Yield the rules of ``auto`` in order of preference.

    A cache that grows by new files must keep its rule, so its rule must not depend on the number of files.
    """
    if _has_named_files(source):
        yield _rule(validation, "named")
    for factor in () if grows else _FILE_FACTORS:
        share = min(_MAX_SHARE, validation.held_out_fraction * factor)
        by_file = _rule(validation, "file").model_copy(update={"held_out_fraction": share})
        if _holds_out_enough_files(source, by_file):
            yield by_file
    if has_many_records(source.config):
        yield _rule(validation, "document")
    yield _rule(validation, "span")
    if has_many_records(source.config):  # too few for the fraction, and no span: rows of a Parquet file
        for factor in _SHARE_FACTORS:
            share = min(_MAX_SHARE, validation.held_out_fraction * factor)
            yield _rule(validation, "document").model_copy(update={"held_out_fraction": share})


def _rule(validation: ValidationConfig, split: str) -> ValidationConfig:
    return validation.model_copy(update={"split": split})


def _has_named_files(source: Source) -> bool:
    return names_hold_out(source.config.format, source.relative_paths)


def _held_out_files(source: Source, rule: ValidationConfig) -> list[int]:
    return [index for index, path in enumerate(source.relative_paths) if file_split(rule, path) == "validation"]


def _holds_out_enough_files(source: Source, rule: ValidationConfig) -> bool:
    held_out = _held_out_files(source, rule)
    share = Fraction(sum(source.files[index].size_bytes for index in held_out), max(1, source.size_bytes))
    wanted = Fraction(str(rule.held_out_fraction))
    return (
        len(held_out) >= _MIN_HELD_OUT_FILES and wanted / _MAX_SHARE_FACTOR <= share <= wanted * _MAX_SHARE_FACTOR < 1
    )


def _has_records(
    source: Source, split: Split, rule: ValidationConfig, unit_bytes: int, limit_bytes: int | None
) -> bool:
    """Whether a rule leaves a record in a split, within the first ``limit_bytes`` probed."""
    if holds_out_files(rule):
        return any(file_split(rule, path) == split for path in source.relative_paths)
    probe_bytes = min(_PROBE_BYTES, unit_bytes) if has_many_records(source.config) else unit_bytes
    probed_bytes = 0
    for span, size_bytes in UnitSplitter(source, split, rule, probe_bytes).spans():
        if any(True for _ in read_units(source, [Unit(0, (span,))], split, rule)):
            return True
        probed_bytes += size_bytes
        if limit_bytes is not None and probed_bytes >= limit_bytes:
            return False
    return False


def _with_share(source: Source, unit_bytes: int) -> Source:
    """Return the source with the share that its rule really holds out, unless reading it would take long.

    Spans end at records and single records are drawn by a hash, so of a small source the share is far from the
    configured one.
    """
    rule, num_files = source.holdout, len(source.files)
    is_small = source.size_bytes <= _MAX_PROBED_BYTES
    if rule.split == "span":
        is_compressed = any(not is_stored_as_read(file, limits_of(source.config)) for file in source.stored)
        if num_files > _MAX_MEASURED_FILES or (is_compressed and not is_small):
            return source
        sizes = [held_out_bytes_of(source, index, rule) for index in range(num_files)]
        held_out, total = (sum(column) for column in zip(*sizes, strict=True))
    elif rule.split == "document" and source.size_bytes <= _PROBE_BYTES:
        units = (split_into_units(source, split, rule, unit_bytes) for split in SPLITS)
        train, held_out = (
            sum(1 for _ in read_units(source, found, split, rule)) for found, split in zip(units, SPLITS, strict=True)
        )
        total = train + held_out
    else:
        return source
    return replace(source, held_out_share=held_out / max(1, total))


def _empty_split_error(source: Source, split: Split, rule: ValidationConfig) -> ConfigError:
    num_files = len(source.files)
    files = f"{pluralize(num_files, 'file')}, {source.size_bytes:,} bytes"
    name = f"source {source.config.name!r} ({files})"
    what = {"file": "files", "document": "documents", "span": "text"}.get(rule.split)
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
    """Describe what the rule of a source holds out, such as ``12 of 640 files of stdlib``."""
    rule, name, files = source.holdout, source.config.name, len(source.files)
    if holds_out_files(rule):
        held_out = len(_held_out_files(source, rule))
        if not held_out:
            return f"nothing of {name}"
        how = " by their names" if rule.split == "named" else ""
        return f"{held_out:,} of {pluralize(files, 'file')} of {name}{how}, {files - held_out:,} to train on"
    measured = source.held_out_share
    about, share = ("about ", rule.held_out_fraction) if measured is None else ("", measured)
    if rule.split == "document":
        return f"{about}{_percent(share)} of the documents of {name}"
    if files == 1:
        return f"spans of {source.files[0].uri.rpartition('/')[2]}, {about}{_percent(share)} of it"
    return f"spans of the {files:,} files of {name}, {about}{_percent(share)} of the text"


def held_out_bytes(source: Source) -> int:
    """Return the bytes of held-out files or spans; an estimate where records are held out, or spans not measured."""
    if holds_out_files(source.holdout):
        return sum(source.files[index].size_bytes for index in _held_out_files(source, source.holdout))
    share = source.holdout.held_out_fraction if source.held_out_share is None else source.held_out_share
    return int(source.size_bytes * share)


def _percent(share: float) -> str:
    """Return a share as a percentage: ``33.3%``, ``1%``, ``0.02%``."""
    percent = 100 * share
    return f"{percent:.1f}".removesuffix(".0") + "%" if percent >= 0.1 else f"{percent:.1g}%"
