"""Telling content that is no text by its first bytes, and what to do about it."""

from __future__ import annotations

from vorox.core.errors import DataError
from vorox.data.storage import StoredFile
from vorox.data.text.compression import NAMES, looks_like

_FOREIGN: dict[bytes, str] = {
    b"PAR1": "Parquet",
    b"PK\x03\x04": "a zip archive",
    b"\x7fELF": "a program",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"%PDF-": "a PDF document",
    b"SQLite format 3\0": "a SQLite database",
    b"\xfd7zXZ\0": "xz data",
    b"BZh9": "bzip2 data",
    b"7z\xbc\xaf": "a 7z archive",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}


def refuse_foreign(file: StoredFile, start: bytes) -> None:
    """Refuse content that begins like something other than text.

    Raises:
        DataError: Naming what it looks like.
    """
    found = looks_like(start)
    if found is not None:
        what = f"{NAMES[found]} data, but its name does not end in .{found}"
        hint = f"name the file ....{found}, so that it is decompressed"
    else:
        name = next((name for magic, name in _FOREIGN.items() if start.startswith(magic)), None)
        if name is None:
            return
        what = name
        hint = "convert it to UTF-8" if name.startswith("UTF-16") else "take it out of data.sources, or say its format"
    raise DataError(f"the file is not UTF-8 text but looks like {what}", where=file.uri, hint=hint)
