"""The content of stored files: decompressed ranges, and rejection of binary content.

A listed file goes in; byte ranges of its decompressed content, and its length, come out. Compressed files are decoded
forward from the start. ``SequentialReads`` reuses the decoder of the last range, so that consecutive units decode a
file once. Invariants: suffix and magic bytes agree on the compression; memory is bounded; a truncated stream, a
decompression bomb or binary content is a ``DataError`` that states what was found.
"""

from __future__ import annotations

import codecs
import contextlib
import contextvars
import functools
import io
import re
import tempfile
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any, BinaryIO, TypeVar, cast

from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig
from vorox.core.schema.source_formats import COMPRESSIONS, source_format
from vorox.data.storage import StoredFile, open_range, open_seekable, run_in_context
from vorox.data.text.decompression import (
    GZIP_MAGIC,
    MAX_READ_BYTES,
    SIGNATURE_BYTES,
    UTF_8,
    ZSTD_MAGIC,
    Compression,
    Damage,
    DecodedFile,
    Limits,
)

T = TypeVar("T")

_BUFFER_BYTES = 1 << 20
_EXACT_READ_BYTES = 1 << 9
DEFAULT_LIMITS = Limits()


def limits_of(config: SourceConfig) -> Limits:
    """Return the limits on the compressed files of a source."""
    return Limits(
        max_bytes=config.max_decompressed_bytes,
        max_ratio=config.max_decompression_ratio,
        keeps_readable=config.damaged_files == "keep_readable",
        is_text=source_format(config.format).is_text,
        encoding=codecs.lookup(config.encoding).name if source_format(config.format).is_text else UTF_8,
    )


def without_compression(name: str) -> str:
    """Return the name of a file without the ending of its compression."""
    ending = next((ending for ending in COMPRESSIONS if name.lower().endswith(ending)), "")
    return name[: len(name) - len(ending)]


def compressed_copies(uris: Iterable[str]) -> dict[str, str]:
    """Return the files that are compressed copies of others, each with the other: ``a.txt.gz`` beside ``a.txt``."""
    first: dict[str, str] = {}
    for uri in sorted(uris):  # a.txt sorts before a.txt.gz
        first.setdefault(without_compression(uri), uri)
    return {uri: original for uri in uris if (original := first[without_compression(uri)]) != uri}


def compression_by_suffix(name: str) -> Compression | None:
    """Return the compression that the suffix of a name declares."""
    return next((kind for suffix, kind in COMPRESSIONS.items() if name.lower().endswith(suffix)), None)


def is_stored_as_read(file: StoredFile, limits: Limits) -> bool:
    """Whether the content of a file is its stored bytes, any range of which can be read by itself."""
    return compression_by_suffix(file.uri) is None and limits.encoding == UTF_8


class SequentialReads:
    """Reuses the decoder of the last range for the next range of the same file."""

    def __init__(self) -> None:
        self._kept: DecodedFile | None = None

    def iterate(self, items: Iterator[T]) -> Iterator[T]:
        """Iterate over items whose computation reads ranges through this object."""
        return run_in_context(items, _reads, self)

    def take(self, file: StoredFile, limits: Limits, start_byte: int) -> DecodedFile | None:
        """Return the kept decoder if it is this file's and can seek to ``start_byte``."""
        kept = self._kept
        if kept is None or (kept.file, kept.limits) != (file, limits) or not kept.can_seek_to(start_byte):
            return None
        self._kept = None
        return kept

    def keep(self, content: DecodedFile) -> None:
        """Keep a decoder in place of the previous one."""
        self.close()
        self._kept = content

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None


_reads: contextvars.ContextVar[SequentialReads | None] = contextvars.ContextVar("sequential_reads", default=None)


def _decode(file: StoredFile, limits: Limits, max_read_bytes: int = MAX_READ_BYTES) -> DecodedFile:
    kind = compression_by_suffix(file.uri)
    is_utf_8 = limits.encoding == UTF_8  # text of another encoding is checked by the readers, as UTF-8
    check_member = functools.partial(reject_binary, file) if limits.is_text and is_utf_8 else None
    return DecodedFile(file, kind, limits, check_member, max_read_bytes)


@contextlib.contextmanager
def _open_decoded(file: StoredFile, start_byte: int, limits: Limits) -> Generator[DecodedFile]:
    """Open a file at a position; afterwards, keep its decoder if a ``SequentialReads`` is active."""
    reads = _reads.get()
    content = None if reads is None else reads.take(file, limits, start_byte)
    if content is None:
        content = _decode(file, limits)
    try:
        content.seek_to(start_byte)
        yield content
    except BaseException:
        content.close()
        raise
    if reads is None:
        content.close()
    else:
        reads.keep(content)


class _Range(io.RawIOBase):
    """The decoded bytes from the current position to ``end_byte``."""

    def __init__(self, content: DecodedFile, end_byte: int | None) -> None:
        self._content, self._end_byte = content, end_byte

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = len(buffer)
        if self._end_byte is not None:
            size = min(size, self._end_byte - self._content.position)
        data = self._content.read(size) if size > 0 else b""
        memoryview(buffer)[: len(data)] = data
        return len(data)


@contextlib.contextmanager
def open_content(
    file: StoredFile, start_byte: int = 0, end_byte: int | None = None, limits: Limits = DEFAULT_LIMITS
) -> Generator[BinaryIO]:
    """Open a byte range of a file's content: decompressed, and as UTF-8.

    Raises:
        DataError: The file cannot be read, changed since it was listed, is not compressed as its suffix declares, or
            cannot be decompressed.
    """
    if is_stored_as_read(file, limits):
        with open_range(file, start_byte, end_byte) as reader:
            yield reader
        return
    damage = detect_damage(file, limits) if end_byte is None else None
    end_byte = damage.end_byte if damage is not None else end_byte
    with _open_decoded(file, start_byte, limits) as content:
        yield cast("BinaryIO", io.BufferedReader(_Range(content, end_byte), _BUFFER_BYTES))


@contextlib.contextmanager
def open_content_seekable(file: StoredFile, limits: Limits = DEFAULT_LIMITS) -> Generator[BinaryIO]:
    """Open a file for random access; a compressed one is decompressed into a temporary file first."""
    if compression_by_suffix(file.uri) is None:
        with contextlib.closing(open_seekable(file)) as reader:
            yield reader
        return
    with tempfile.TemporaryFile() as unpacked, open_content(file, 0, None, limits) as content:
        while data := content.read(_BUFFER_BYTES):
            unpacked.write(data)
        unpacked.seek(0)
        yield cast("BinaryIO", unpacked)


@functools.lru_cache(maxsize=1 << 12)
def _scan(file: StoredFile, limits: Limits) -> tuple[int, Damage | None]:
    """Return the length and the damage of a decoded file; one pass per process."""
    with contextlib.closing(_decode(file, limits)) as content:
        return content.find_damage()


def length_bytes(file: StoredFile, limits: Limits = DEFAULT_LIMITS) -> int:
    """Return the length of the content; a compressed file, or one in another encoding, is read once."""
    return file.size_bytes if is_stored_as_read(file, limits) else _scan(file, limits)[0]


def detect_damage(file: StoredFile, limits: Limits) -> Damage | None:
    """Return the damage of a compressed file if the source keeps readable content; reads the file once.

    Raises:
        DataError: The file cannot be read for another reason.
    """
    kind = compression_by_suffix(file.uri)
    return None if kind is None or not limits.keeps_readable else _scan(file, limits)[1]


def compressed_length_bytes(file: StoredFile, end_byte: int, limits: Limits = DEFAULT_LIMITS) -> int:
    """Return the stored bytes that encode the content up to ``end_byte``; depends on file and offset alone."""
    strict = replace(limits, keeps_readable=False)
    with contextlib.closing(_decode(file, strict, _EXACT_READ_BYTES)) as content:
        content.seek_to(end_byte)
        return content.consumed_bytes


_UNPACK = "unpack it and give the folder: {unpack}"
_WEBDATASET = (
    "; images in it (WebDataset) are read only if a record names them: write DIR/metadata.jsonl with "
    '{"file_name": "0.png", "text": "CAPTION"} per line, and set images_field=file_name'
)
_READ = "convert it to jsonl, one record with a field `text` per document: {convert}"
_LEAVE = "remove it from data.sources, or set its format"
_RENAME = "add the suffix {suffix} to the file name, so that it is decompressed"
_ENCODED = (
    "if all files of the source are so, set data.sources.0.encoding={name} (0 is the first source); if it is this one, "
    "convert it: iconv -f {name} -t utf-8 FILE > FILE.new && mv FILE.new FILE; or give it a source of its own"
)
_SIGNATURES: tuple[tuple[int, bytes, str, str], ...] = (
    (0, GZIP_MAGIC, "gzip data, but its name does not end in .gz", _RENAME.format(suffix=".gz")),
    *(
        (0, magic, "zstd data, but its name does not end in .zst", _RENAME.format(suffix=".zst"))
        for magic in ZSTD_MAGIC
    ),
    (0, b"PAR1", "Parquet", "set format: parquet, and give the file the suffix .parquet"),
    (0, b"ARROW1", "an Arrow file", _READ.format(convert="datasets.load_dataset('arrow', ...).to_json(...)")),
    (0, b"Obj\x01", "an Avro file", _READ.format(convert="fastavro --json-lines")),
    (0, b"SQLite format 3\0", "a SQLite database", _READ.format(convert="sqlite3 FILE '.mode json' 'SELECT ...'")),
    (0, b"\x89HDF", "an HDF5 file", _READ.format(convert="h5py")),
    (257, b"ustar", "a tar archive", _UNPACK.format(unpack="mkdir DIR && tar -xf FILE -C DIR") + _WEBDATASET),
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
    *(
        (
            0,
            bytes((0x80, protocol)),
            "a Python pickle",
            _READ.format(convert="Python's module pickle, if you trust its writer"),
        )
        for protocol in range(2, 6)
    ),
    (0, b"\x7fELF", "a program", _LEAVE),
    (0, b"\x89PNG", "a PNG image", _LEAVE),
    (0, b"GIF8", "a GIF image", _LEAVE),
    (0, b"\xff\xd8\xff", "a JPEG image", _LEAVE),
    (0, b"%PDF-", "a PDF document", "extract its text: pdftotext FILE"),
    (0, b"\xd0\xcf\x11\xe0", "an Office document", "save it as text"),
    (0, b"{\\rtf", "an RTF document", "save it as text"),
    (0, b"\xff\xfe", "UTF-16 text", _ENCODED.format(name="utf-16")),
    (0, b"\xfe\xff", "UTF-16 text", _ENCODED.format(name="utf-16")),
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


def reject_binary(file: StoredFile, start: bytes) -> None:
    """Reject content that starts with the signature of a binary format.

    Args:
        file: The file, for the message.
        start: The start of its content, or of a later gzip member or zstd frame, decompressed; only the first
            ``SIGNATURE_BYTES`` count.

    Raises:
        DataError: The content is not text; the message names the format and a command that converts it.
    """
    start = start[:SIGNATURE_BYTES]
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
    name = f"utf-16-{order}".lower()
    return None if order is None else ("UTF-16 text", _ENCODED.format(name=name))


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
