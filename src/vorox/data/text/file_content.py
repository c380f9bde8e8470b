"""Reading stored files with transparent decompression, size limits and damage detection.

A listed file goes in; byte ranges of its decompressed content, and its length, come out. Compressed files are decoded
forward from the start. ``SequentialReads`` reuses the decoder of the last range, so that consecutive units decode a
file once. Invariants: suffix and magic bytes agree on the compression; memory is bounded; a truncated stream or a
decompression bomb is a ``DataError`` with its offset.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import io
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, TypeVar, cast

from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig
from vorox.data.storage import StoredFile, open_range, open_seekable, run_in_context
from vorox.data.text.decompression import MAX_READ_BYTES, BrokenStream, DecompressedStream, NotCompressed
from vorox.data.text.file_signatures import Compression, compression_by_suffix, reject_binary

T = TypeVar("T")

_BUFFER_BYTES = 1 << 20
_LOOK_BACK_BYTES = 4 << 20
"""A range may begin this far before the last decoded byte without decoding from the start again."""
_EXACT_READ_BYTES = 1 << 9
_ALWAYS_ALLOWED_BYTES = 1 << 28
_TEXT_FORMATS = frozenset({"txt", "jsonl", "csv"})


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the content of a compressed file.

    Attributes:
        max_bytes: Decompressed bytes, at most.
        max_ratio: Decompressed bytes per compressed byte, at most; applies above 256 MiB.
        keeps_readable: A damaged file is read up to its damage instead of being rejected.
        is_text: Every gzip member and zstd frame must be text; one with a binary signature is rejected.
    """

    max_bytes: int = 1 << 40
    max_ratio: float = 1000.0
    keeps_readable: bool = False
    is_text: bool = False

    @classmethod
    def from_source(cls, config: SourceConfig) -> Limits:
        return cls(
            max_bytes=config.max_decompressed_bytes,
            max_ratio=config.max_decompression_ratio,
            keeps_readable=config.damaged_files == "keep_readable",
            is_text=config.format in _TEXT_FORMATS,
        )


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Damage:
    """The point after which a compressed file cannot be read.

    Attributes:
        end_byte: End of the readable content.
        reason: What is wrong and where.
    """

    end_byte: int
    reason: str


class _DecodedFile:
    """The content of a compressed file, decoded forward from its start.

    Attributes:
        position: Offset of the next byte that ``read`` returns.
    """

    def __init__(
        self, file: StoredFile, kind: Compression, limits: Limits, max_read_bytes: int = MAX_READ_BYTES
    ) -> None:  # fmt: skip
        self.file, self.limits, self.position = file, limits, 0
        self._base, self._recent = 0, bytearray()
        self._open = contextlib.ExitStack()
        # open_seekable checks a local file against its listing on every read, not only at the end.
        source = self._open.enter_context(open_seekable(file) if file.scheme is None else open_range(file))
        check = functools.partial(reject_binary, file) if limits.is_text else None
        self._stream = DecompressedStream(kind, source, check, max_read_bytes)

    def read(self, size: int) -> bytearray:
        """Return at least one and at most ``size`` bytes; empty at the end.

        Raises:
            DataError: The content cannot be read any further.
        """
        start = self.position - self._base
        if start == len(self._recent):
            if start > 2 * _LOOK_BACK_BYTES:
                del self._recent[:-_LOOK_BACK_BYTES]
                self._base, start = self.position - _LOOK_BACK_BYTES, _LOOK_BACK_BYTES
            self._recent += self._next_block()
        data = self._recent[start : start + size]
        self.position += len(data)
        return data

    def can_seek_to(self, position: int) -> bool:
        """Whether ``seek_to`` supports a position: any ahead, and a few MiB back."""
        return position >= self._base

    def seek_to(self, position: int) -> None:
        """Move to a position that ``can_seek_to`` allows, or to the end of the content if it comes first."""
        assert self.can_seek_to(position)
        self.position = min(self.position, position)
        while self.position < position and self.read(position - self.position):
            pass

    def find_damage(self) -> tuple[int, Damage | None]:
        """Read to the end; return the readable length, and the damage if the source keeps readable content.

        A member or frame with a wrong checksum is unreadable as a whole, because any byte of it may be wrong.
        """
        try:
            while self.read(_BUFFER_BYTES):
                pass
        except DataError as error:
            broken = error.__cause__
            if not (self.limits.keeps_readable and isinstance(broken, BrokenStream) and broken.is_damage):
                raise
            end = self._stream.member_offset if broken.is_checksum else self.position
            return end, Damage(end, error.what)
        return self.position, None

    @property
    def consumed_bytes(self) -> int:
        """Compressed bytes read so far."""
        return self._stream.consumed_bytes

    def close(self) -> None:
        self._open.close()

    def _next_block(self) -> bytes:
        before = self._stream.offset
        try:
            block = self._stream.read()
        except NotCompressed as error:
            hint = "give the file the suffix of its format, or download it again"
            raise DataError(str(error), where=self.file.uri, hint=hint) from error
        except BrokenStream as error:
            raise DataError(
                f"{error}, at byte {before:,} of the decompressed content (byte {self.consumed_bytes:,} of "
                f"{self.file.size_bytes:,})",
                where=self.file.uri, hint="download or write the file again, or remove it from data.sources",
            ) from error  # fmt: skip
        self._reject_bomb()
        return block

    def _reject_bomb(self) -> None:
        length, consumed_bytes, limits = self._stream.offset, self.consumed_bytes, self.limits
        allowed = max(_ALWAYS_ALLOWED_BYTES, int(limits.max_ratio * max(consumed_bytes, 1)))
        if length <= min(allowed, limits.max_bytes):
            return
        option = "max_decompressed_bytes" if length > limits.max_bytes else "max_decompression_ratio"
        raise DataError(
            f"{consumed_bytes:,} compressed bytes expand to more than {length:,}: this looks like a decompression bomb",
            where=self.file.uri,
            hint=f"remove the file from data.sources; if you trust it, raise the source's {option}",
        )


class SequentialReads:
    """Reuses the decoder of the last range for the next range of the same file."""

    def __init__(self) -> None:
        self._kept: _DecodedFile | None = None

    def iterate(self, items: Iterator[T]) -> Iterator[T]:
        """Iterate over items whose computation reads ranges through this object."""
        return run_in_context(items, _reads, self)

    def take(self, file: StoredFile, limits: Limits, start_byte: int) -> _DecodedFile | None:
        """Return the kept decoder if it is this file's and can seek to ``start_byte``."""
        kept = self._kept
        if kept is None or (kept.file, kept.limits) != (file, limits) or not kept.can_seek_to(start_byte):
            return None
        self._kept = None
        return kept

    def keep(self, content: _DecodedFile) -> None:
        """Keep a decoder in place of the previous one."""
        self.close()
        self._kept = content

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None


_reads: contextvars.ContextVar[SequentialReads | None] = contextvars.ContextVar("sequential_reads", default=None)


@contextlib.contextmanager
def _open_decoded(file: StoredFile, kind: Compression, start_byte: int, limits: Limits) -> Generator[_DecodedFile]:
    """Open a file at a position; afterwards, keep its decoder if a ``SequentialReads`` is active."""
    reads = _reads.get()
    content = None if reads is None else reads.take(file, limits, start_byte)
    if content is None:
        content = _DecodedFile(file, kind, limits)
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

    def __init__(self, content: _DecodedFile, end_byte: int | None) -> None:
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
    """Open a byte range of a file's decompressed content.

    Raises:
        DataError: The file cannot be read, changed since it was listed, is not compressed as its suffix declares, or
            cannot be decompressed.
    """
    kind = compression_by_suffix(file.uri)
    if kind is None:
        with open_range(file, start_byte, end_byte) as reader:
            yield reader
        return
    damage = detect_damage(file, limits) if end_byte is None else None
    end_byte = damage.end_byte if damage is not None else end_byte
    with _open_decoded(file, kind, start_byte, limits) as content:
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
def _scan(file: StoredFile, kind: Compression, limits: Limits) -> tuple[int, Damage | None]:
    """Return the length and the damage of a compressed file; one pass per process."""
    with contextlib.closing(_DecodedFile(file, kind, limits)) as content:
        return content.find_damage()


def length_bytes(file: StoredFile, limits: Limits = DEFAULT_LIMITS) -> int:
    """Return the length of the decompressed content; a compressed file is read once."""
    kind = compression_by_suffix(file.uri)
    return file.size_bytes if kind is None else _scan(file, kind, limits)[0]


def detect_damage(file: StoredFile, limits: Limits) -> Damage | None:
    """Return the damage of a compressed file if the source keeps readable content; reads the file once.

    Raises:
        DataError: The file cannot be read for another reason.
    """
    kind = compression_by_suffix(file.uri)
    return None if kind is None or not limits.keeps_readable else _scan(file, kind, limits)[1]


def compressed_length_bytes(file: StoredFile, end_byte: int, limits: Limits = DEFAULT_LIMITS) -> int:
    """Return the compressed bytes that encode the content up to ``end_byte``; depends on file and offset alone."""
    kind = compression_by_suffix(file.uri)
    assert kind is not None, "the file must be compressed"
    strict = replace(limits, keeps_readable=False)
    with contextlib.closing(_DecodedFile(file, kind, strict, _EXACT_READ_BYTES)) as content:
        content.seek_to(end_byte)
        return content.consumed_bytes
