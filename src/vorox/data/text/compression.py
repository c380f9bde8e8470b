"""gzip and zstd streams, read forward in bounded memory, with the places where reading may begin anew.

Compressed bytes come in from any reader, decompressed bytes go out; ``offset`` and ``taken_bytes`` say how far both
are. A decoder holds no file: it may be put aside between two reads and go on with another reader of the same bytes.
Invariants: a stream of several gzip members or zstd frames is their contents one after the other, a stream that ends
early or is damaged is an error at its place, and no read makes more than it was asked for.
"""

from __future__ import annotations

import zlib
from typing import IO, Literal, Protocol, cast

import zstandard

Compression = Literal["gz", "zst"]

SUFFIXES: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
NAMES: dict[Compression, str] = {"gz": "gzip", "zst": "zstd"}

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE_MAGIC = range(0x184D2A50, 0x184D2A60)

_CHECKSUM_MESSAGES = ("incorrect data check", "incorrect length check", "checksum")
_PIECE_BYTES = 1 << 16
_LARGEST_WINDOW_BYTES = 1 << 27
_LARGEST_FRAME_HEADER_BYTES = 18
_RESTART_DISTANCE_BYTES = 1 << 22


class BrokenStream(ValueError):
    """Compressed data that is damaged, ends early or is something else; the message says what.

    Attributes:
        is_damage: Not so where the data may be sound, but is refused.
        is_checksum: A member or frame was read to its end, and something in it is not what was compressed.
    """

    def __init__(self, message: str, *, is_damage: bool = True) -> None:
        super().__init__(message)
        self.is_damage = is_damage
        self.is_checksum = any(words in message for words in _CHECKSUM_MESSAGES)


class Reader(Protocol):
    """Anything that gives bytes one after the other."""

    def read(self, size: int, /) -> bytes: ...


class Decoder(Protocol):
    """A stream, decompressed as far as ``offset``.

    Attributes:
        offset: Decompressed bytes given out.
        taken_bytes: Compressed bytes taken from the reader: where the next reader has to begin.
        restarts: (compressed, decompressed) places where a new decoder may begin, some MiB apart.
        began: The same two places of the member or frame at hand.
    """

    @property
    def offset(self) -> int: ...
    @property
    def taken_bytes(self) -> int: ...
    @property
    def restarts(self) -> list[tuple[int, int]]: ...
    @property
    def began(self) -> tuple[int, int]: ...

    def read(self, reader: Reader, size: int) -> bytes:
        """At least one byte and at most ``size``; nothing at the end of the stream.

        Raises:
            BrokenStream: The stream cannot be read on.
        """
        ...


def compression_of(name: str) -> Compression | None:
    """What the ending of a name says."""
    return next((kind for suffix, kind in SUFFIXES.items() if name.lower().endswith(suffix)), None)


def looks_like(start: bytes) -> Compression | None:
    """What the first bytes say."""
    if start.startswith(GZIP_MAGIC):
        return "gz"
    if start.startswith(ZSTD_MAGIC) or _is_skippable(start):
        return "zst"
    return None


def decoder_at(kind: Compression, taken_bytes: int = 0, offset: int = 0) -> Decoder:
    """A decoder that begins at a restart: the start of the stream, or of one of its members or frames."""
    return GzipDecoder(taken_bytes, offset) if kind == "gz" else ZstdDecoder(taken_bytes, offset)


def _is_skippable(start: bytes) -> bool:
    return len(start) >= 4 and int.from_bytes(start[:4], "little") in _SKIPPABLE_MAGIC


def _add_restart(restarts: list[tuple[int, int]], place: tuple[int, int]) -> None:
    if not restarts or place[1] - restarts[-1][1] >= _RESTART_DISTANCE_BYTES:
        restarts.append(place)


class GzipDecoder:
    """Members of gzip, one after the other; zeros behind the last are padding."""

    def __init__(self, taken_bytes: int = 0, offset: int = 0) -> None:
        self.offset = offset
        self.taken_bytes = taken_bytes
        self.restarts: list[tuple[int, int]] = []
        self.began = (taken_bytes, offset)
        self._member: zlib._Decompress | None = None  # pyright: ignore[reportPrivateUsage]
        self._pending = b""

    def read(self, reader: Reader, size: int) -> bytes:
        while True:
            if self._member is None and not self._begin_member(reader):
                return b""
            assert self._member is not None
            if not self._pending:
                self._pending = self._take(reader)
            try:
                piece = self._member.decompress(self._pending, size)
            except zlib.error as error:
                raise BrokenStream(f"damaged gzip data: {str(error).partition(': ')[2] or error}") from error
            ended = not self._pending
            self._pending = self._member.unconsumed_tail
            if self._member.eof:
                self._pending = self._member.unused_data
                self._member = None
            elif ended and not piece:
                raise BrokenStream("the gzip data ends in the middle")
            self.offset += len(piece)
            if piece:
                return piece

    def _take(self, reader: Reader) -> bytes:
        piece = reader.read(_PIECE_BYTES)
        self.taken_bytes += len(piece)
        return piece

    def _begin_member(self, reader: Reader) -> bool:
        """Whether there is another member."""
        while len(self._pending) < 2:
            piece = self._take(reader)
            if not piece:
                break
            self._pending += piece
        if self._pending.startswith(b"\0"):
            self._pending = self._pending.lstrip(b"\0")
            return self._begin_member(reader)
        if not self._pending:
            return False
        self.began = (self.taken_bytes - len(self._pending), self.offset)
        if not self._pending.startswith(GZIP_MAGIC):
            raise BrokenStream("behind the gzip data lies something else")
        _add_restart(self.restarts, self.began)
        self._member = zlib.decompressobj(16 + zlib.MAX_WBITS)
        return True


class ZstdDecoder:
    """Frames of zstd, one after the other; skippable frames are skipped."""

    def __init__(self, taken_bytes: int = 0, offset: int = 0) -> None:
        self.offset = offset
        self.restarts: list[tuple[int, int]] = []
        self.began = (taken_bytes, offset)
        self._frames = _ZstdFrames(taken_bytes)
        self._frame: zstandard.ZstdDecompressionReader | None = None

    @property
    def taken_bytes(self) -> int:
        return self._frames.taken_bytes

    def read(self, reader: Reader, size: int) -> bytes:
        self._frames.reader = reader
        try:
            while True:
                if self._frame is None:
                    self.began = (self._frames.at, self.offset)
                    begin = self._frames.begin()
                    if begin is None:
                        return b""
                    self.began = (begin, self.offset)
                    _add_restart(self.restarts, self.began)
                    decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW_BYTES)
                    self._frame = decompressor.stream_reader(cast("IO[bytes]", self._frames), read_size=_PIECE_BYTES)
                piece = self._frame.read(size)
                if piece:
                    self.offset += len(piece)
                    return piece
                self._frames.check_ended()
                self._frame = None
        except zstandard.ZstdError as error:
            if "requires too much memory" in str(error):
                raise BrokenStream(
                    f"the zstd window is larger than {_LARGEST_WINDOW_BYTES >> 20} MiB; compress it without --long=31",
                    is_damage=False,
                ) from error
            raise BrokenStream(f"damaged zstd data: {str(error).rpartition(': ')[2]}") from error
        finally:
            self._frames.reader = None


class _ZstdFrames:
    """The compressed bytes, given out frame by frame: ``read`` stops where a frame ends.

    The library cannot say where a frame ended; the sizes of its blocks do.
    """

    def __init__(self, taken_bytes: int) -> None:
        self.reader: Reader | None = None
        self.taken_bytes = taken_bytes
        self._pending = b""
        self._left_bytes = 0  # of what is known to belong to the frame
        self._then: Literal["block", "checksum", "end"] = "end"
        self._has_checksum = False

    @property
    def at(self) -> int:
        """Compressed bytes that were given out."""
        return self.taken_bytes - len(self._pending)

    def begin(self) -> int | None:
        """Place of the next frame; ``None`` at the end of the stream."""
        while self._fill(4) and _is_skippable(self._pending):
            if not self._fill(8):
                raise BrokenStream("the zstd data ends in the middle")
            self._skip(8 + int.from_bytes(self._pending[4:8], "little"))
        if not self._pending:
            return None
        if not self._pending.startswith(ZSTD_MAGIC):
            raise BrokenStream("behind the zstd data lies something else")
        self._fill(_LARGEST_FRAME_HEADER_BYTES)
        self._has_checksum = zstandard.get_frame_parameters(self._pending).has_checksum
        self._left_bytes, self._then = zstandard.frame_header_size(self._pending), "block"
        return self.at

    def read(self, size: int) -> bytes:
        if self._left_bytes == 0 and not self._next_part():
            return b""
        if not self._fill(1):
            raise BrokenStream("the zstd data ends in the middle")
        piece = self._pending[: min(size, self._left_bytes)]
        self._pending = self._pending[len(piece) :]
        self._left_bytes -= len(piece)
        return piece

    def check_ended(self) -> None:
        if self._left_bytes or self._then != "end":
            raise BrokenStream("the zstd data ends in the middle")

    def _next_part(self) -> bool:
        """Go on to the next block or to the checksum; whether the frame has one."""
        if self._then == "end":
            return False
        if self._then == "checksum":
            self._left_bytes, self._then = 4, "end"
            return True
        if not self._fill(3):
            raise BrokenStream("the zstd data ends in the middle")
        header = int.from_bytes(self._pending[:3], "little")
        is_last, kind, size = header & 1, header >> 1 & 3, header >> 3
        self._left_bytes = 3 + (1 if kind == 1 else size)  # 1: one byte, repeated
        if is_last:
            self._then = "checksum" if self._has_checksum else "end"
        return True

    def _fill(self, size: int) -> bool:
        """Have ``size`` bytes at hand, if there are so many."""
        assert self.reader is not None
        while len(self._pending) < size:
            piece = self.reader.read(_PIECE_BYTES)
            if not piece:
                return False
            self.taken_bytes += len(piece)
            self._pending += piece
        return True

    def _skip(self, size: int) -> None:
        while size > len(self._pending):
            size -= len(self._pending)
            self._pending = b""
            if not self._fill(1):
                raise BrokenStream("the zstd data ends in the middle")
        self._pending = self._pending[size:]
