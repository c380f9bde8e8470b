"""The content of a stored file: its bytes, or what they decompress to, by offset.

A listed file goes in; ranges, random access and the length of its content come out, whether it is compressed or not.
What one pass over a compressed file learns (length, restarts) and the decoders that stand where a range ended are kept
in the process, so that units read one after the other never decompress from the start again. Invariants: name and
first bytes agree about the compression, memory is bounded whatever a stream expands to, and a stream that ends early
or expands beyond all measure is a ``DataError`` with its place.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, cast

from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig
from vorox.data.storage import StoredFile, open_range, open_seekable
from vorox.data.text.compression import (
    NAMES,
    BrokenStream,
    Compression,
    Decoder,
    Reader,
    compression_of,
    decoder_at,
    looks_like,
)

_PIECE_BYTES = 1 << 20
_SMALL_PIECE_BYTES = 1 << 10
_SALVAGED_BYTES = 1 << 9
_ALWAYS_ALLOWED_BYTES = 1 << 28
_MOST_FILES_KNOWN = 4096
_MOST_DECODERS_KEPT = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """What a compressed file may come to.

    Attributes:
        max_bytes: Decompressed bytes.
        max_ratio: Decompressed bytes for each compressed one, counted from 256 MiB on.
        keeps_readable: A damaged file ends where its damage begins, instead of being refused.
    """

    max_bytes: int = 1 << 40
    max_ratio: float = 1000.0
    keeps_readable: bool = False

    @classmethod
    def of(cls, config: SourceConfig) -> Limits:
        keeps_readable = config.damaged_files == "keep_readable"
        return cls(config.max_decompressed_bytes, config.max_decompression_ratio, keeps_readable)


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Damage:
    """Where the content of a compressed file ends because the rest cannot be read.

    Attributes:
        end_byte: Behind the last decompressed byte that any way of reading gives.
        reason: What is wrong and where, for a person.
    """

    end_byte: int
    reason: str


@dataclass
class _Known:
    """What was learnt of a compressed file.

    Attributes:
        length_bytes: Of its content, once the end was seen.
        damage: What keeps the end from being seen, once that was looked for.
        restarts: (compressed, decompressed) places where decompressing may begin, ascending.
        decoders: Those that were put aside, the latest last.
    """

    length_bytes: int | None = None
    damage: Damage | None = None
    restarts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    decoders: list[Decoder] = field(default_factory=list[Decoder])


_known: OrderedDict[tuple[str, str], _Known] = OrderedDict()
_lock = threading.Lock()


def _forget() -> None:
    """In a forked process: nobody there would ever release a lock that another thread held."""
    global _lock
    _lock = threading.Lock()
    _known.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _remembered(file: StoredFile) -> _Known:
    """What is known of a file; the caller has the lock."""
    key = (file.uri, file.stamp)
    known = _known.setdefault(key, _Known())
    _known.move_to_end(key)
    while len(_known) > _MOST_FILES_KNOWN:
        _known.popitem(last=False)
    return known


def _take_decoder(file: StoredFile, kind: Compression, offset: int) -> Decoder:
    """The decoder that has the least way to go."""
    with _lock:
        known = _remembered(file)
        ready = max(
            (decoder for decoder in known.decoders if decoder.offset <= offset),
            key=lambda decoder: decoder.offset, default=None,
        )  # fmt: skip
        restart = max((place for place in known.restarts if place[1] <= offset), default=(0, 0))
        if ready is None or ready.offset < restart[1]:
            return decoder_at(kind, *restart)
        known.decoders.remove(ready)
        return ready


def _put_aside(file: StoredFile, decoder: Decoder) -> None:
    with _lock:
        known = _remembered(file)
        if not known.restarts or (decoder.restarts and decoder.restarts[-1] > known.restarts[-1]):
            known.restarts = sorted({*known.restarts, *decoder.restarts})
        known.decoders = [other for other in known.decoders if other.offset != decoder.offset] + [decoder]
        kept = 0
        for other in reversed(_known.values()):  # the least recently used files lose theirs first
            surplus = kept + len(other.decoders) - _MOST_DECODERS_KEPT
            del other.decoders[: max(0, surplus)]
            kept += len(other.decoders)


def length_bytes(file: StoredFile, limits: Limits = DEFAULT_LIMITS) -> int:
    """Length of the content; for a compressed file one pass over it, once in a process."""
    if compression_of(file.uri) is None:
        return file.size_bytes
    damage = damage_of(file, limits)
    if damage is not None:
        return damage.end_byte
    with _lock:
        known = _remembered(file).length_bytes
        start = max((place[1] for place in _remembered(file).restarts), default=0)
    if known is not None:
        return known
    with open_content(file, start, None, limits) as reader:
        while reader.read(_PIECE_BYTES):
            pass
    with _lock:
        length = _remembered(file).length_bytes
    assert length is not None, "a stream was read to its end"
    return length


def damage_of(file: StoredFile, limits: Limits) -> Damage | None:
    """Where a compressed file is damaged, for a source that keeps what is readable: one pass, once in a process.

    The place is a function of the file: what comes before it is read alike in whatever portions. Of a member or frame
    whose checksum is wrong nothing counts as readable, for anything in it may be wrong.

    Raises:
        DataError: The file cannot be read for another reason.
    """
    kind = compression_of(file.uri)
    if kind is None or not limits.keeps_readable:
        return None
    with _lock:
        known = _remembered(file)
        if known.length_bytes is not None or known.damage is not None:
            return known.damage
    decoder, strict = decoder_at(kind), replace(limits, keeps_readable=False)
    with open_range(file) as opened:
        raw = _Decompressed(file, decoder, _checked(file, kind, opened), None, strict)
        try:
            while raw.piece(_PIECE_BYTES):
                pass
        except DataError as error:
            broken = error.__cause__
            if not isinstance(broken, BrokenStream) or not broken.is_damage:
                raise
            end = decoder.began[1] if broken.is_checksum else _sound_end(file, kind, decoder)
            damage = Damage(end, error.what)
        else:
            return None
    with _lock:
        _remembered(file).damage = damage
    return damage


def _sound_end(file: StoredFile, kind: Compression, broken: Decoder) -> int:
    """Where the sound part of a broken member or frame ends: what a decoder gives when it is asked for little.

    One byte less, for a decoder looks at what follows as soon as it can, and must not see the damage.
    """
    decoder, sure = decoder_at(kind, *broken.began), broken.offset - 1
    with open_range(file, broken.began[0], None) as opened, contextlib.suppress(BrokenStream):
        while decoder.offset < sure:
            decoder.read(opened, min(_PIECE_BYTES, sure - decoder.offset))
        while decoder.read(opened, _SALVAGED_BYTES):
            pass
    return max(broken.began[1], decoder.offset - 1)


def compressed_bytes(file: StoredFile, end_byte: int, limits: Limits = DEFAULT_LIMITS) -> int:
    """Bytes of a compressed file that were taken when its content up to a place was given out.

    It is read from the start, so that the answer is a function of the file and the place alone.
    """
    kind = compression_of(file.uri)
    assert kind is not None, "asked of a compressed file"
    decoder = decoder_at(kind)
    with open_range(file) as opened:
        source = _InSmallPieces(_checked(file, kind, opened))
        _Decompressed(file, decoder, source, None, limits).skip_to(end_byte)
    return decoder.taken_bytes


class _InSmallPieces:
    """The same bytes, so few at a time that a decoder has hardly more of them than it needs."""

    def __init__(self, source: Reader) -> None:
        self._source = source

    def read(self, size: int, /) -> bytes:
        return self._source.read(min(size, _SMALL_PIECE_BYTES))


class _Decompressed(io.RawIOBase):
    """The bytes ``[start, end)`` of what a compressed file comes to."""

    def __init__(
        self, file: StoredFile, decoder: Decoder, source: Reader, end_byte: int | None, limits: Limits
    ) -> None:
        self._file, self._decoder, self._source, self._limits = file, decoder, source, limits
        self._end_byte = end_byte
        self._place = decoder.offset

    def skip_to(self, start_byte: int) -> None:
        while self._place < start_byte and self.piece(min(_PIECE_BYTES, start_byte - self._place)):
            pass

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = len(memoryview(buffer))
        if self._end_byte is not None:
            size = min(size, self._end_byte - self._place)
        piece = self.piece(size) if size > 0 else b""
        memoryview(buffer)[: len(piece)] = piece
        return len(piece)

    def piece(self, size: int) -> bytes:
        try:
            piece = self._decoder.read(self._source, size)
        except BrokenStream as error:
            raise DataError(
                f"{error}, {self._place:,} bytes into what it decompresses to (byte {self._decoder.taken_bytes:,} of "
                f"{self._file.size_bytes:,})",
                where=self._file.uri, hint="fetch or write the file again, or take it out of data.sources",
            ) from error  # fmt: skip
        self._place += len(piece)
        if not piece:
            with _lock:
                _remembered(self._file).length_bytes = self._place
        self._refuse_bombs()
        return piece

    def _refuse_bombs(self) -> None:
        allowed = max(_ALWAYS_ALLOWED_BYTES, int(self._limits.max_ratio * max(self._decoder.taken_bytes, 1)))
        if self._place <= min(allowed, self._limits.max_bytes):
            return
        option = "max_decompressed_bytes" if self._place > self._limits.max_bytes else "max_decompression_ratio"
        raise DataError(
            f"{self._decoder.taken_bytes:,} compressed bytes came to more than {self._place:,}: this looks like a "
            "decompression bomb",
            where=self._file.uri,
            hint=f"take the file out of data.sources; if you trust it, raise the source's {option}",
        )


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
        with open_range(file, start_byte, end_byte) as reader:
            yield reader
        return
    damage = damage_of(file, limits) if end_byte is None else None
    end_byte = damage.end_byte if damage is not None else end_byte
    decoder = _take_decoder(file, kind, start_byte)
    with open_range(file, decoder.taken_bytes, None) as opened:
        source = _checked(file, kind, opened) if decoder.taken_bytes == 0 else opened
        raw = _Decompressed(file, decoder, source, end_byte, limits)
        raw.skip_to(start_byte)
        with io.BufferedReader(raw, _PIECE_BYTES) as reader:
            yield cast("BinaryIO", reader)
    _put_aside(file, decoder)


class _Prefixed:
    """Bytes that were read already, then the rest."""

    def __init__(self, prefix: bytes, rest: BinaryIO) -> None:
        self._prefix, self._rest = prefix, rest

    def read(self, size: int, /) -> bytes:
        if not self._prefix:
            return self._rest.read(size)
        piece, self._prefix = self._prefix[:size], self._prefix[size:]
        return piece


def _checked(file: StoredFile, kind: Compression, source: BinaryIO) -> Reader:
    start = source.read(8)
    found = looks_like(start)
    if found == kind:
        return _Prefixed(start, source)
    said = f"it begins like {NAMES[found]}" if found else f"it begins with the bytes {start[:4].hex(' ') or '(none)'}"
    raise DataError(
        f"the name says {NAMES[kind]}, but {said}", where=file.uri,
        hint="name the file after what it is, or fetch it again",
    )  # fmt: skip


@contextlib.contextmanager
def open_content_seekable(file: StoredFile, limits: Limits = DEFAULT_LIMITS) -> Generator[BinaryIO]:
    """The content for random access. In a compressed file going back costs decompressing again."""
    if compression_of(file.uri) is None:
        with contextlib.closing(open_seekable(file)) as reader:
            yield reader
        return
    with contextlib.closing(_Seekable(file, limits)) as raw:
        yield cast("BinaryIO", raw)


class _Seekable(io.RawIOBase):
    """Random access to decompressed bytes: every read is a range of its own."""

    def __init__(self, file: StoredFile, limits: Limits) -> None:
        self._file, self._limits = file, limits
        self._length_bytes = length_bytes(file, limits)
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length_bytes}[whence]
        self._place = base + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        end = min(self._place + len(view), self._length_bytes)
        if end <= self._place:
            return 0
        with open_content(self._file, self._place, end, self._limits) as reader:
            piece = reader.read(end - self._place)
        view[: len(piece)] = piece
        self._place += len(piece)
        return len(piece)
