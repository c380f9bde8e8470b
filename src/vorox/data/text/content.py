"""The content of a stored file: its bytes, or what they decompress to.

A listed file goes in; ranges of its content and its length come out, whether it is compressed or not. Compressed
content is decoded from the start of the file, forward only. ``SequentialReads`` keeps the decoder of the last range, so
that units read one after the other are decoded once. Invariants: name and first bytes agree about the compression,
memory is bounded whatever a stream expands to, and a stream that ends early or expands beyond all measure is a
``DataError`` with its place.
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
from vorox.data.storage import StoredFile, open_seekable, scheme_of
from vorox.data.storage.contexts import iterated_with
from vorox.data.text.compression import (
    MOST_READ_BYTES,
    BrokenStream,
    Compression,
    DecompressedStream,
    NotCompressed,
    compression_of,
)
from vorox.data.text.range_cache import open_through_cache
from vorox.data.text.reject_binary import reject_binary

T = TypeVar("T")

_BUFFER_BYTES = 1 << 20
_LOOK_BACK_BYTES = 4 << 20
"""How far back from the last byte decoded a range may begin without decoding from the start again."""
_EXACT_READ_BYTES = 1 << 9
_ALWAYS_ALLOWED_BYTES = 1 << 28
_TEXT_FORMATS = frozenset({"txt", "jsonl", "csv"})


@dataclass(frozen=True, slots=True)
class Limits:
    """What the content of a compressed file may be.

    Attributes:
        max_bytes: Decompressed bytes.
        max_ratio: Decompressed bytes for each compressed one, counted from 256 MiB on.
        keeps_readable: A damaged file ends where its damage begins, instead of being refused.
        is_text: Every gzip member and zstd frame is text, and refused where it begins like something else.
    """

    max_bytes: int = 1 << 40
    max_ratio: float = 1000.0
    keeps_readable: bool = False
    is_text: bool = False

    @classmethod
    def of(cls, config: SourceConfig) -> Limits:
        return cls(
            max_bytes=config.max_decompressed_bytes,
            max_ratio=config.max_decompression_ratio,
            keeps_readable=config.damaged_files == "keep_readable",
            is_text=config.format in _TEXT_FORMATS,
        )


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Damage:
    """Where the content of a compressed file ends because the rest cannot be read.

    Attributes:
        end_byte: Behind the last byte of the content that counts as sound.
        reason: What is wrong and where, for a person.
    """

    end_byte: int
    reason: str


class _Content:
    """The content of a compressed file, decoded forward from its start.

    Attributes:
        position: Place of the next byte that ``read`` returns.
    """

    def __init__(
        self, file: StoredFile, kind: Compression, limits: Limits, most_read_bytes: int = MOST_READ_BYTES
    ) -> None:  # fmt: skip
        self.file, self.limits, self.position = file, limits, 0
        self._base, self._recent = 0, bytearray()
        self._open = contextlib.ExitStack()
        # A local file that stays open is checked against its listing by every read, not only at the end.
        source = self._open.enter_context(
            open_seekable(file) if scheme_of(file.uri) is None else open_through_cache(file, always=True)
        )
        check = functools.partial(reject_binary, file) if limits.is_text else None
        self._stream = DecompressedStream(kind, source, check, most_read_bytes)

    def read(self, size: int) -> bytearray:
        """Return at least one byte and at most ``size``; nothing at the end.

        Raises:
            DataError: The content cannot be read on.
        """
        start = self.position - self._base
        if start == len(self._recent):
            if start > 2 * _LOOK_BACK_BYTES:
                del self._recent[:-_LOOK_BACK_BYTES]
                self._base, start = self.position - _LOOK_BACK_BYTES, _LOOK_BACK_BYTES
            self._recent += self._next_piece()
        piece = self._recent[start : start + size]
        self.position += len(piece)
        return piece

    def reaches(self, position: int) -> bool:
        """Whether ``skip_to`` can go there: anywhere ahead, and a few MiB back."""
        return position >= self._base

    def skip_to(self, position: int) -> None:
        """Go to a place that it reaches; to the end of the content if that comes before."""
        assert self.reaches(position)
        self.position = min(self.position, position)
        while self.position < position and self.read(position - self.position):
            pass

    def find_damage(self) -> tuple[int, Damage | None]:
        """Read to the end; return the length, and the damage if the source keeps what is readable.

        Of a member or frame whose checksum is wrong nothing counts as sound, for anything in it may be wrong.
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
    def taken_bytes(self) -> int:
        """Compressed bytes that were read so far."""
        return self._stream.taken_bytes

    def close(self) -> None:
        self._open.close()

    def _next_piece(self) -> bytes:
        before = self._stream.offset
        try:
            piece = self._stream.read()
        except NotCompressed as error:
            hint = "name the file after what it is, or fetch it again"
            raise DataError(str(error), where=self.file.uri, hint=hint) from error
        except BrokenStream as error:
            raise DataError(
                f"{error}, {before:,} bytes into what it decompresses to (byte {self.taken_bytes:,} of "
                f"{self.file.size_bytes:,})",
                where=self.file.uri, hint="fetch or write the file again, or take it out of data.sources",
            ) from error  # fmt: skip
        self._refuse_bombs()
        return piece

    def _refuse_bombs(self) -> None:
        length, taken_bytes, limits = self._stream.offset, self.taken_bytes, self.limits
        allowed = max(_ALWAYS_ALLOWED_BYTES, int(limits.max_ratio * max(taken_bytes, 1)))
        if length <= min(allowed, limits.max_bytes):
            return
        option = "max_decompressed_bytes" if length > limits.max_bytes else "max_decompression_ratio"
        raise DataError(
            f"{taken_bytes:,} compressed bytes came to more than {length:,}: this looks like a decompression bomb",
            where=self.file.uri,
            hint=f"take the file out of data.sources; if you trust it, raise the source's {option}",
        )


class SequentialReads:
    """Reads of ranges in the order of their files: the decoder of the last range is kept and read on."""

    def __init__(self) -> None:
        self._kept: _Content | None = None

    def during(self, items: Iterator[T]) -> Iterator[T]:
        """Yield the same items, made while ranges are read on."""
        return iterated_with(items, _reads, self)

    def take(self, file: StoredFile, limits: Limits, start_byte: int) -> _Content | None:
        """Return the kept content if it is this file's and reaches a place."""
        kept = self._kept
        if kept is None or (kept.file, kept.limits) != (file, limits) or not kept.reaches(start_byte):
            return None
        self._kept = None
        return kept

    def keep(self, content: _Content) -> None:
        """Keep a content, in place of another one."""
        self.close()
        self._kept = content

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None


_reads: contextvars.ContextVar[SequentialReads | None] = contextvars.ContextVar("sequential_reads", default=None)


@contextlib.contextmanager
def _opened(file: StoredFile, kind: Compression, start_byte: int, limits: Limits) -> Generator[_Content]:
    """Open a content at a place; at the end, keep it for the next range if somebody reads sequentially."""
    reads = _reads.get()
    content = None if reads is None else reads.take(file, limits, start_byte)
    if content is None:
        content = _Content(file, kind, limits)
    try:
        content.skip_to(start_byte)
        yield content
    except BaseException:
        content.close()
        raise
    if reads is None:
        content.close()
    else:
        reads.keep(content)


class _Range(io.RawIOBase):
    """The bytes of a content from its position to a place."""

    def __init__(self, content: _Content, end_byte: int | None) -> None:
        self._content, self._end_byte = content, end_byte

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = len(buffer)
        if self._end_byte is not None:
            size = min(size, self._end_byte - self._content.position)
        piece = self._content.read(size) if size > 0 else b""
        memoryview(buffer)[: len(piece)] = piece
        return len(piece)


@contextlib.contextmanager
def open_content(
    file: StoredFile, start_byte: int = 0, end_byte: int | None = None, limits: Limits = DEFAULT_LIMITS
) -> Generator[BinaryIO]:
    """Read a part of a file's content.

    Raises:
        DataError: The file cannot be read, is not the one that was listed, is not compressed as its name says, or
            cannot be decompressed.
    """
    kind = compression_of(file.uri)
    if kind is None:
        with open_through_cache(file, start_byte, end_byte) as reader:
            yield reader
        return
    damage = damage_of(file, limits) if end_byte is None else None
    end_byte = damage.end_byte if damage is not None else end_byte
    with _opened(file, kind, start_byte, limits) as content:
        yield cast("BinaryIO", io.BufferedReader(_Range(content, end_byte), _BUFFER_BYTES))


@contextlib.contextmanager
def open_content_seekable(file: StoredFile, limits: Limits = DEFAULT_LIMITS) -> Generator[BinaryIO]:
    """Open the content for random access; that of a compressed file is decompressed to a temporary file first."""
    if compression_of(file.uri) is None:
        with contextlib.closing(open_seekable(file)) as reader:
            yield reader
        return
    with tempfile.TemporaryFile() as unpacked, open_content(file, 0, None, limits) as content:
        while piece := content.read(_BUFFER_BYTES):
            unpacked.write(piece)
        unpacked.seek(0)
        yield cast("BinaryIO", unpacked)


@functools.lru_cache(maxsize=1 << 12)
def _survey(file: StoredFile, kind: Compression, limits: Limits) -> tuple[int, Damage | None]:
    """Return the length and the damage of a compressed file: one pass, once in a process."""
    with contextlib.closing(_Content(file, kind, limits)) as content:
        return content.find_damage()


def length_bytes(file: StoredFile, limits: Limits = DEFAULT_LIMITS) -> int:
    """Return the length of the content; of a compressed file after one pass over it."""
    kind = compression_of(file.uri)
    return file.size_bytes if kind is None else _survey(file, kind, limits)[0]


def damage_of(file: StoredFile, limits: Limits) -> Damage | None:
    """Return where a compressed file is damaged, for a source that keeps what is readable: one pass over the file.

    Raises:
        DataError: The file cannot be read for another reason.
    """
    kind = compression_of(file.uri)
    return None if kind is None or not limits.keeps_readable else _survey(file, kind, limits)[1]


def compressed_bytes(file: StoredFile, end_byte: int, limits: Limits = DEFAULT_LIMITS) -> int:
    """Return how much of a compressed file its content up to a place takes: a function of file and place alone."""
    kind = compression_of(file.uri)
    assert kind is not None, "called for a compressed file"
    strict = replace(limits, keeps_readable=False)
    with contextlib.closing(_Content(file, kind, strict, _EXACT_READ_BYTES)) as content:
        content.skip_to(end_byte)
        return content.taken_bytes
