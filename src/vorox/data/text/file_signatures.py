"""File signatures: compression by suffix and magic bytes, and rejection of binary content.

File names and first bytes go in; the compression, or a ``DataError`` that names the binary format, comes out.
"""

from __future__ import annotations

import re
from typing import Literal

from vorox.core.errors import DataError
from vorox.data.storage import StoredFile

Compression = Literal["gz", "zst"]

SUFFIXES: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
NAMES: dict[Compression, str] = {"gz": "gzip", "zst": "zstd"}

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE_MAGIC = range(0x184D2A50, 0x184D2A60)
SIGNATURE_BYTES = 512
"""Leading bytes of a file, gzip member or zstd frame that are checked for signatures."""

_UNPACK = "unpack it and give the folder: {unpack}"
_READ = "convert it to jsonl, one record with a field `text` per document: {convert}"
_LEAVE = "remove it from data.sources, or set its format"
_SIGNATURES: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"PAR1", "Parquet", "set format: parquet, and give the file the suffix .parquet"),
    (0, b"ARROW1", "an Arrow file", _READ.format(convert="datasets.load_dataset('arrow', ...).to_json(...)")),
    (0, b"Obj\x01", "an Avro file", _READ.format(convert="fastavro --json-lines")),
    (0, b"SQLite format 3\0", "a SQLite database", _READ.format(convert="sqlite3 FILE '.mode json' 'SELECT ...'")),
    (0, b"\x89HDF", "an HDF5 file", _READ.format(convert="h5py")),
    (257, b"ustar", "a tar archive", _UNPACK.format(unpack="mkdir DIR && tar -xf FILE -C DIR")),
    (0, b"PK\x03\x04", "a zip archive", _UNPACK.format(unpack="unzip FILE -d DIR")),
    (0, b"PK\x05\x06", "an empty zip archive", _LEAVE),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK.format(unpack="7z x FILE -oDIR")),
    (0, b"Rar!\x1a\x07", "a rar archive", _UNPACK.format(unpack="unrar x FILE DIR/")),
    (0, b"070701", "a cpio archive", _UNPACK.format(unpack="mkdir DIR && cd DIR && cpio -id < FILE")),
    (0, b"070707", "a cpio archive", _UNPACK.format(unpack="mkdir DIR && cd DIR && cpio -id < FILE")),
    (0, b"!<arch>\n", "an ar archive", _UNPACK.format(unpack="ar x FILE")),
    (0, b"\xfd7zXZ\0", "xz data", "decompress it, or recompress it: xz -dc FILE | zstd > FILE.zst"),
    (0, b"BZh", "bzip2 data", "decompress it, or recompress it: bzip2 -dc FILE | zstd > FILE.zst"),
    (0, b"\x04\x22\x4d\x18", "LZ4 data", "decompress it, or recompress it: lz4 -dc FILE | zstd > FILE.zst"),
    (0, b"LZIP\x01", "lzip data", "decompress it, or recompress it: lzip -dc FILE | zstd > FILE.zst"),
    (0, b"\x1f\x9d", "Unix compress data", "decompress it: uncompress FILE"),
    (0, b"WARC/", "a WARC or WET archive of web pages", _READ.format(convert="warcio, or trafilatura for WARC")),
    (0, b"filedesc://", "an ARC archive of web pages", _READ.format(convert="warcio recompress, then warcio")),
    (
        0,
        b"\x93NUMPY",
        "a NumPy array",
        "for token ids, convert it to .bin and set format: bin: numpy.load('FILE').astype('uint16').tofile('FILE.bin')",
    ),
    (0, b"\x7fELF", "a program", _LEAVE),
    (0, b"\x89PNG", "a PNG image", _LEAVE),
    (0, b"GIF8", "a GIF image", _LEAVE),
    (0, b"\xff\xd8\xff", "a JPEG image", _LEAVE),
    (0, b"%PDF-", "a PDF document", "extract its text: pdftotext FILE"),
    (0, b"\xd0\xcf\x11\xe0", "an Office document", "save it as text"),
    (0, b"{\\rtf", "an RTF document", "save it as text"),
    (0, b"\xff\xfe", "UTF-16 text", "convert it to UTF-8: iconv -f UTF-16 -t UTF-8 FILE"),
    (0, b"\xfe\xff", "UTF-16 text", "convert it to UTF-8: iconv -f UTF-16 -t UTF-8 FILE"),
)
"""(offset, signature, what the file is, what to do)."""

_CERTAIN = {
    b"BZh": re.compile(rb"BZh[1-9]1AY&SY"),
    b"WARC/": re.compile(rb"WARC/[0-9.]+\r?\n"),
    b"filedesc://": re.compile(rb"filedesc://\S+ \S+ [0-9]{8,14} \S+ [0-9]+\r?\n"),
    b"GIF8": re.compile(rb"GIF8[79]a"),
    b"070701": re.compile(rb"070701[0-9A-Fa-f]{104}"),
    b"070707": re.compile(rb"070707[0-7]{70}"),
    b"ustar": re.compile(rb"[^\0]*\0"),
}
"""Stricter patterns for signatures that could also begin a text."""
_TAR, _CHECKSUM = "a tar archive", slice(148, 156)


def compression_by_suffix(name: str) -> Compression | None:
    """Return the compression that the suffix of a name declares."""
    return next((kind for suffix, kind in SUFFIXES.items() if name.lower().endswith(suffix)), None)


def compression_by_magic(start: bytes) -> Compression | None:
    """Return the compression that the magic bytes declare."""
    if start.startswith(_GZIP_MAGIC):
        return "gz"
    is_skippable = len(start) >= 4 and int.from_bytes(start[:4], "little") in _SKIPPABLE_MAGIC
    return "zst" if is_skippable or start.startswith(_ZSTD_MAGIC) else None


def reject_binary(file: StoredFile, start: bytes) -> None:
    """Reject content that starts with the signature of a binary format.

    Args:
        file: The file, for the message.
        start: The first ``SIGNATURE_BYTES`` of its content, or of a later gzip member or zstd frame, decompressed.

    Raises:
        DataError: The content is not text; the message names the format and a command that converts it.
    """
    found = compression_by_magic(start)
    if found is not None:
        what = f"{NAMES[found]} data, but its name does not end in .{found}"
        hint = f"add the suffix .{found} to the file name, so that it is decompressed"
    else:
        known = _identify(start) or _identify(start.lstrip(b"\xef\xbb\xbf\r\n"))
        if known is None:
            return
        what, hint = known
    raise DataError(
        f"The file is not UTF-8 text; it looks like {what}", where=file.uri, hint=hint.replace("FILE", file.uri)
    )


def _identify(start: bytes) -> tuple[str, str] | None:
    """Return the format of binary content and what to do; ``None`` if it may be text."""
    for offset, signature, what, hint in _SIGNATURES:
        certain = _CERTAIN.get(signature)
        if start.startswith(signature, offset) and (certain is None or certain.match(start)):
            return what, hint
    if _is_tar_header(start):
        return next((what, hint) for _, _, what, hint in _SIGNATURES if what == _TAR)
    order = _utf16_byte_order(start)
    return None if order is None else ("UTF-16 text", f"convert it to UTF-8: iconv -f UTF-16{order} -t UTF-8 FILE")


def _is_tar_header(start: bytes) -> bool:
    """Whether the content starts with a valid tar header checksum: tar had no signature before POSIX."""
    digits = start[_CHECKSUM].strip(b" \0")
    if len(start) < SIGNATURE_BYTES or not re.fullmatch(rb"[0-7]+", digits):
        return False
    blank = start[: _CHECKSUM.start] + b" " * 8 + start[_CHECKSUM.stop :]
    return sum(blank[:SIGNATURE_BYTES]) == int(digits, 8)


def _utf16_byte_order(start: bytes) -> str | None:
    """Return ``LE`` or ``BE`` where every other byte is NUL, as in mostly Latin UTF-16 without a byte order mark."""
    first, second = start[0::2], start[1::2]
    for low, high, order in ((first, second, "LE"), (second, first, "BE")):
        if len(start) >= 16 and 0 not in low and 2 * high.count(0) >= len(high):
            return order
    return None
