"""The first records of some files, and whether they have the columns that a source names.

A source and its files go in; records with all of their fields come out, as the reader of the format yields them.
Detection decides by them what columns mean, and a misspelt column is found before anything is built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from vorox.core.errors import ConfigError, DataError
from vorox.core.schema.data import SourceConfig
from vorox.data.chat.column_meaning import in_section, missing_column, named_columns
from vorox.data.documents import BadRecord
from vorox.data.storage import StoredFile
from vorox.data.text.formats import field_check, first_rows, has_fields

_BYTES = 1 << 20
_RECORDS = 1000
QUICK_BYTES = 1 << 16
"""What the check of a source reads, which may be remote, unless a column is missing there."""

_FURTHER_FILES = 7
_MAY_BE_ABSENT = frozenset({"system_field", "history_field", "tools_field", "images_field", "metadata_fields"})
"""Settings whose column not every record has."""


def first_records(
    config: SourceConfig, file: StoredFile, most_bytes: int | None = None
) -> tuple[list[Mapping[str, object]], list[BadRecord]]:
    """Return the first records of a file, and those that cannot be read, up to about a MiB; see ``first_rows``."""
    rows: list[Mapping[str, object]] = []
    bad: list[BadRecord] = []
    left = _BYTES
    with contextlib.closing(first_rows(config, file, most_bytes)) as found:
        for row in found:
            if isinstance(row, BadRecord):
                bad.append(row)
                left -= row.byte_length
            else:
                rows.append(row)
                left -= sum(len(value) if isinstance(value, str | bytes) else 8 for value in row.values())
            if left <= 0 or len(rows) + len(bad) >= _RECORDS:
                break
    return rows, bad


def further_files(files: Sequence[StoredFile]) -> list[StoredFile]:
    """Return some files at even distances."""
    count = min(len(files), _FURTHER_FILES)
    return [files[index * len(files) // count] for index in range(count)]


def check_columns(config: SourceConfig, files: Sequence[StoredFile], key: str) -> tuple[str, ...]:
    """Check that a source has the columns that its settings name.

    Args:
        config: The source.
        files: Its files; what cannot be read is left to the build.
        key: Its key in the configuration, for messages.

    Returns:
        Messages about columns that not every record has, and that no sampled record has.

    Raises:
        ConfigError: A column is missing.
    """
    filled = [file for file in files if file.size_bytes]
    check = field_check(config)
    if not filled or config.has_tokens or not has_fields(config):
        return ()
    if check is not None:
        try:
            check(config, filled[0])
        except DataError as error:
            raise ConfigError(error.what, where=error.where, hint=in_section(error.hint, key)) from error
        return ()
    wanted, present, num_records = list(named_columns(config)), dict[str, None](), 0
    with contextlib.suppress(DataError):
        looks = [(filled[0], QUICK_BYTES), *((file, None) for file in [filled[0], *further_files(filled[1:])])]
        for file, most_bytes in looks:
            rows, _ = first_records(config, file, most_bytes)
            num_records += len(rows) if most_bytes is None else 0
            present.update((name, None) for row in rows for name in _names(row))
            if all(name in present for name, _ in wanted):
                return ()
    missing = [(name, setting) for name, setting in wanted if name not in present] if num_records else []
    for name, setting in missing:
        remedy = missing_column(config, name, setting, list(present))
        if setting in _MAY_BE_ABSENT and "=" not in remedy:
            continue
        shown = ", ".join(map(repr, [one for one in present if "." not in one][:20])) or "no fields"
        raise ConfigError(
            f"No record has {name!r}; the first {num_records:,} have {shown}", where=f"{key}.{setting}",
            hint=in_section(remedy, key),
        )  # fmt: skip
    return tuple(
        f"none of the first {num_records:,} records of {config.name} has {name!r} ({setting})"
        for name, setting in missing
    )


def _names(fields: Mapping[str, object], before: str = "") -> Iterator[str]:
    """Yield the names of fields, those inside objects as paths."""
    for name, value in fields.items():
        yield before + name
        if isinstance(value, dict):
            yield from _names(cast("Mapping[str, object]", value), f"{before}{name}.")
