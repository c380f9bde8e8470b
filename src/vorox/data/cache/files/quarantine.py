"""Quarantine: lists of unreadable records, and the limit on how many a unit may have.

A unit with unreadable records has a list ``quarantine/u<unit>.jsonl`` with the place of each, written before the unit
is committed. The limit applies per unit, so whether a unit passes does not depend on the units built before it.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import xxhash

from vorox.core.errors import DataError
from vorox.core.files.atomic import canonical_json, make_directory, write_file
from vorox.core.files.json_reader import parse_json
from vorox.core.pluralize import pluralize
from vorox.data.chat.column_meaning import OTHER_FILES, in_section
from vorox.data.documents import BAD_RECORDS_IN_A_ROW, BadRecord, SourceFile
from vorox.data.text.decompression import conversion

DIRECTORY_NAME = "quarantine"


def encoding_remedy(uri: str, num_files: int) -> str:
    """Return what to do about a file that is not UTF-8; the encoding of a source is that of all of its files."""
    setting = "set data.sources.0.encoding=cp1252 (or latin-1, utf-16 ...)"
    if num_files == 1:
        return f"if the text has another encoding, {setting}"
    return (
        f"if only some files have another encoding, convert them: {conversion(uri, of='cp1252')}; or give them a "
        f"source of their own; if all have it, {setting}"
    )


_FEWEST_RECORDS = 100
"""The limit of a smaller unit is that of this many records: the share in a few held-out ones is chance."""

_LARGE_SHARE = 0.05
"""From this share of the records on, a reason that a setting removes is no exception to be tolerated."""

_NUMBER = re.compile(r"\d+")
_SETTING = re.compile(r"[:;] ((?:set|unset|write|mark) .*)")
"""The remedy in a reason."""

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
        entries = [parse_json(line, path) for line in lines[:-1]]
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
            entry = parse_json(line, path, dict)
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


def report_damaged_files(
    directory: Path, unit: int, bad_records: Sequence[BadRecord], files: Sequence[SourceFile]
) -> None:
    """Warn about damaged files that were read in part."""
    for record in bad_records:
        if record.is_rest_of_file:
            uri, path = files[record.file_index].uri, quarantine_path(directory, unit)
            kept = f"kept: {pluralize(record.ordinal, 'record')}, the first {record.byte_offset:,} bytes of its content"
            text = f"Damaged file {uri}: {record.reason}; {kept}; listed in {path}"
            fields = {"uri": uri, "kept_records": record.ordinal, "kept_bytes": record.byte_offset, "list": str(path)}
            _log.warning("%s", text, extra={"event_kind": "damaged_file", "event_fields": fields})


def _likely_fraction(bad: int, records: int) -> float | None:
    """Return the fraction of bad records that other units, and the other split, are unlikely to exceed.

    It is three standard deviations above the share of this unit, in hundredths; ``None`` from a half on, where records
    are not the exception but the format is another one.
    """
    share = bad / records
    likely = share + 3 * math.sqrt(share * (1 - share) / records)
    return None if share >= 0.5 else min(math.ceil(100 * likely) / 100, 0.75)


def _usual(bad: Sequence[BadRecord]) -> tuple[BadRecord, int]:
    """Return the first record with the most frequent reason, numbers aside, and how many have that reason."""
    kinds = [_NUMBER.sub("N", record.reason) for record in bad]
    kind, count = Counter(kinds).most_common(1)[0]
    return bad[kinds.index(kind)], count


def split_remedy(reason: str) -> tuple[str, str]:
    """Return a reason without its remedy, and the remedy for the first source; empty if the reason has none."""
    found = _SETTING.search(reason)
    if found is None:
        return reason, ""
    remedy = in_section(found[1], "data.sources.0")
    return reason[: found.start()], remedy + (" (0 is the first source)" if "data.sources.0" in remedy else "")


def check_budget(
    directory: Path,
    unit: int,
    bad_records: Sequence[BadRecord],
    records_read: int,
    files: Sequence[SourceFile],
    bad_record_fraction: float,
    *,
    aborted: bool = False,
) -> None:
    """Refuse a unit with too many bad records; the rest of a damaged file has its own setting and does not count.

    Raises:
        DataError: More than the allowed fraction of its records (rounded up) are bad, or too many in a row.
    """
    bad = [record for record in bad_records if not record.is_rest_of_file]
    allowed = math.ceil(Fraction(str(bad_record_fraction)) * max(records_read, _FEWEST_RECORDS))
    if not bad or (len(bad) <= allowed and not aborted):
        return
    first, count = _usual(bad[-BAD_RECORDS_IN_A_ROW:] if aborted else bad)
    reason, remedy = (
        split_remedy(first.reason) if aborted or count >= _LARGE_SHARE * records_read else (first.reason, "")
    )
    place = files[first.file_index].uri + (
        f":{first.line}" if first.line is not None else f", byte {first.byte_offset}"
    )
    encoding = encoding_remedy(files[first.file_index].uri, len(files)) if "invalid UTF-8" in first.reason else ""
    if aborted:
        what = f"{BAD_RECORDS_IN_A_ROW} consecutive records are unreadable"
    else:
        what = f"{len(bad):,} of {records_read:,} records are unreadable, more than the {allowed:,} allowed"
    if remedy:
        remedy += f"; {OTHER_FILES}" if first.reason.startswith("no field ") and len(files) > 1 else ""
    elif aborted:
        remedy = "check data.sources.0.format and data.sources.0.text_field (0 is the first source), repair the file, "
        remedy += "or exclude it"
        remedy += (
            f"; {encoding_remedy(files[first.file_index].uri, len(files))}" if "invalid UTF-8" in first.reason else ""
        )
    else:
        needed = _likely_fraction(len(bad), records_read)
        remedy = "repair the file" + (f"; {encoding}" if encoding else "")
        if needed is None:
            remedy += "; check data.sources.0.format and its fields (0 is the first source)"
        else:
            remedy += (
                f"; or add data.sources.0.bad_record_fraction={needed:g} (0 is the first source) to leave them out"
            )
    reason = f"the first error: {reason}" if first is bad[0] else f"{count:,} of them as this one: {reason}"
    raise DataError(
        f"{what}; {reason}",
        where=place,
        hint=f"{remedy}; all are listed in {quarantine_path(directory, unit)}",
    )
