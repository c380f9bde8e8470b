"""Quarantine: lists of unreadable records, and the limit on how many a unit may have.

A unit with unreadable records has a list ``quarantine/u<unit>.jsonl`` with the place of each, written before the unit
is committed. The limit applies per unit, so whether a unit passes does not depend on the units built before it.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from vorox.core.atomic import canonical_json, make_directory, write_file
from vorox.core.errors import DataError
from vorox.core.pluralize import pluralize
from vorox.data.documents import BAD_RECORDS_IN_A_ROW, BadRecord, SourceFile

if TYPE_CHECKING:
    from vorox.data.cache.unit_builder import BuiltUnit

DIRECTORY_NAME = "quarantine"

_log = logging.getLogger("vorox.data.cache")


def quarantine_path(directory: Path, unit: int) -> Path:
    return directory / DIRECTORY_NAME / f"u{unit:09d}.jsonl"


def write_quarantine(directory: Path, unit: int, records: Sequence[BadRecord], files: Sequence[SourceFile]) -> None:
    """Write the list of a unit's unreadable records durably."""
    path = quarantine_path(directory, unit)
    make_directory(path.parent)
    lines: list[bytes] = []
    for record in records:
        body = {
            "uri": files[record.file_index].uri,
            "line": record.line,
            "reason": record.reason,
            "file": record.file_index,
            "ordinal": record.ordinal,
            "byte_offset": record.byte_offset,
            "byte_length": record.byte_length,
        }
        lines.append(canonical_json({**body, "xxh3": _checksum(body)}))
    write_file(path, b"\n".join([*lines, b""]))


def _checksum(body: Mapping[str, Any]) -> str:
    return format(xxhash.xxh3_64_intdigest(canonical_json(body)), "016x")


def verify_quarantine(directory: Path, unit: int, expected: int) -> None:
    """Check the list of a unit against its checksums and the count in the manifest.

    Raises:
        DataError: It is missing, has a different number of records, or a line is damaged.
    """
    path = quarantine_path(directory, unit)
    try:
        lines = path.read_bytes().split(b"\n")
        entries = [json.loads(line) for line in lines[:-1]]
        sound = lines[-1] == b"" and len(entries) == expected
        for line, entry in zip(lines, entries, strict=False):
            body = {key: value for key, value in entry.items() if key != "xxh3"}
            sound = sound and canonical_json({**body, "xxh3": _checksum(body)}) == line
    except (OSError, ValueError, AttributeError):
        sound = False
    if not sound:
        raise DataError(
            f"The quarantine list of unit {unit} ({expected:,} records) is missing or damaged",
            where=str(path), hint="remove the file and the unit's chunks, then run `vorox data fill` to rebuild both",
        )  # fmt: skip


def count_quarantined(directory: Path, unit: int) -> int:
    path = quarantine_path(directory, unit)
    return path.read_bytes().count(b"\n") if path.exists() else 0


def first_quarantined(directory: Path, most: int = 3) -> list[tuple[str, str]]:
    """Return place and reason of the first quarantined records of a cache."""
    found: list[tuple[str, str]] = []
    for path in sorted((directory / DIRECTORY_NAME).glob("u*.jsonl")):
        for line in path.read_bytes().splitlines():
            if len(found) == most:
                return found
            entry = json.loads(line)
            place = f":{entry['line']}" if entry["line"] is not None else f", byte {entry['byte_offset']:,}"
            found.append((f"{entry['uri']}{place}", entry["reason"]))
    return found


def report_quarantine(directory: Path, count: int) -> None:
    """Warn about quarantined records: how many, the first of them, and where all are listed."""
    if count == 0:
        return
    listed = directory / DIRECTORY_NAME
    first = [f"{place}: {reason}" for place, reason in first_quarantined(directory)]
    more = f"; and {count - len(first):,} more" if count > len(first) else ""
    text = f"Skipped {pluralize(count, 'unreadable record')}: {'; '.join(first)}{more}; all are listed in {listed}"
    fields = {"count": count, "first": first, "list": str(listed)}
    _log.warning("%s", text, extra={"event_kind": "quarantine", "event_fields": fields})


def report_damaged_files(directory: Path, built: BuiltUnit, files: Sequence[SourceFile]) -> None:
    """Warn about damaged files that were read in part."""
    for record in built.bad_records:
        if record.is_rest_of_file:
            uri, path = files[record.file_index].uri, quarantine_path(directory, built.unit_id)
            kept = f"kept: {pluralize(record.ordinal, 'record')}, the first {record.byte_offset:,} bytes of its content"
            text = f"Damaged file {uri}: {record.reason}; {kept}; listed in {path}"
            fields = {"uri": uri, "kept_records": record.ordinal, "kept_bytes": record.byte_offset, "list": str(path)}
            _log.warning("%s", text, extra={"event_kind": "damaged_file", "event_fields": fields})


def check_budget(directory: Path, built: BuiltUnit, files: Sequence[SourceFile], bad_record_fraction: float) -> None:
    """Refuse a unit with too many bad records; the rest of a damaged file has its own setting and does not count.

    Raises:
        DataError: More than the allowed fraction of its records (rounded up) are bad, or too many in a row.
    """
    bad = [record for record in built.bad_records if not record.is_rest_of_file]
    allowed = math.ceil(Fraction(str(bad_record_fraction)) * built.records_read)
    if not bad or (len(bad) <= allowed and not built.aborted):
        return
    first = bad[-BAD_RECORDS_IN_A_ROW] if built.aborted else bad[0]
    place = files[first.file_index].uri + (
        f":{first.line}" if first.line is not None else f", byte {first.byte_offset}"
    )
    if built.aborted:
        what = f"{BAD_RECORDS_IN_A_ROW} consecutive records are unreadable"
        remedy = "check data.sources.0.format and data.sources.0.text_field (0 is the first source), repair the file, "
        remedy += "or exclude it"
    else:
        needed = math.ceil(1000 * len(bad) / built.records_read) / 1000
        what = f"{len(bad):,} of {built.records_read:,} records are unreadable, more than the {allowed:,} allowed"
        remedy = f"repair the file, or add data.sources.0.bad_record_fraction={needed:g} (0 is the first source)"
    raise DataError(
        f"{what}; the first error: {first.reason}",
        where=place,
        hint=f"{remedy}; all are listed in {quarantine_path(directory, built.unit_id)}",
    )
