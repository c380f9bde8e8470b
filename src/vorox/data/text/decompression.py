"""Streaming gzip and zstd decompression in bounded memory.

Compressed bytes go in from any reader; decompressed blocks come out. Invariants: gzip members and zstd frames are
concatenated; a truncated or corrupt stream is an error at its offset; and the blocks, including the last one before an
error, depend on the compressed bytes alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Protocol

import zstandard

from vorox.data.text.file_signatures import NAMES, SIGNATURE_BYTES, Compression, compression_by_magic

_UNKNOWN_START = ("incorrect header check", "Unknown frame descriptor")
_CHECKSUM_MESSAGES = ("incorrect data check", "incorrect length check", "checksum")
_FIRST_READ_BYTES, _MIN_READ_BYTES, MAX_READ_BYTES = 1 << 9, 1 << 6, 1 << 12
"""Compressed bytes per decoder call: fewer where they expand more, because the libraries cannot limit the output."""
_FEW_BYTES, _MANY_BYTES = 1 << 18, 1 << 20
_MAX_WINDOW_BYTES = 1 << 27


class BrokenStream(ValueError):
    """Compressed data that is corrupt, truncated or in another format; the message is the reason.

    Attributes:
        is_damage: False where the data may be intact but is refused.
        is_checksum: A member or frame was read to its end and its checksum does not match.
    """

    def __init__(self, message: str, *, is_damage: bool = True) -> None:
        super().__init__(message)
        self.is_damage = is_damage
        self.is_checksum = any(words in message for words in _CHECKSUM_MESSAGES)


class NotCompressed(BrokenStream):
    """Data whose magic bytes do not match its suffix."""

    def __init__(self, message: str) -> None:
        super().__init__(message, is_damage=False)


class Reader(Protocol):
    """A reader that returns the requested number of bytes, or all that remain."""

    def read(self, size: int, /) -> bytes: ...


class DecompressedStream:
    """A compressed stream, decompressed forward by the libraries' streaming decoders.

    Zeros after a gzip member are padding; skippable zstd frames are skipped.

    Args:
        kind: The compression.
        reader: The compressed bytes, from the start.
        check_member: Called with the first decompressed bytes of every member and frame; may raise.
        max_read_bytes: Compressed bytes per decoder call, at most.

    Attributes:
        offset: Decompressed bytes returned so far.
        consumed_bytes: Compressed bytes read so far.
        member_offset: Decompressed offset at which the current member or frame begins.
    """

    def __init__(
        self,
        kind: Compression,
        reader: Reader,
        check_member: Callable[[bytes], None] | None = None,
        max_read_bytes: int = MAX_READ_BYTES,
    ) -> None:
        self._max_read_bytes = max_read_bytes
        self._kind: Compression = kind
        self._reader, self._check_member = reader, check_member
        self._decoder: Any = None  # of the current member or frame
        self._head: bytes | None = None  # of its content, until it is checked
        self._pending = b""
        self._read_bytes = _FIRST_READ_BYTES
        self.offset = self.consumed_bytes = self.member_offset = 0

    def read(self) -> bytes:
        """Return the next decompressed block; empty at the end.

        Raises:
            BrokenStream: The stream cannot be read any further.
        """
        while True:
            if self._decoder is None and self._kind == "gz":
                self._pending = self._pending.lstrip(b"\0")
            if self._pending:
                block = self._decompress()
                self.offset += len(block)
                if block:
                    return block
            elif not self._fill():
                if self._decoder is not None:
                    raise BrokenStream(f"The {NAMES[self._kind]} data is truncated")
                return b""

    def _fill(self) -> bool:
        is_start = self.consumed_bytes == 0
        self._pending = self._reader.read(self._read_bytes)
        self.consumed_bytes += len(self._pending)
        found = compression_by_magic(self._pending)
        if is_start and found != self._kind:
            start = self._pending[:4].hex(" ") or "(none)"
            actual = f"is {NAMES[found]}" if found else f"begins with the bytes {start}"
            raise NotCompressed(f"The file name declares {NAMES[self._kind]}, but the content {actual}")
        return bool(self._pending)

    def _decompress(self) -> bytes:
        if self._decoder is None:
            self._decoder, self.member_offset = _decoder(self._kind), self.offset
            self._head = None if self._check_member is None else b""
        try:
            block: bytes = self._decoder.decompress(self._pending)
        except (zlib.error, zstandard.ZstdError) as error:
            raise self._broken(str(error)) from error
        if self._check_member is not None and self._head is not None:
            self._head += block[:SIGNATURE_BYTES]
            if len(self._head) >= SIGNATURE_BYTES or self._decoder.eof:
                self._check_member(self._head[:SIGNATURE_BYTES])
                self._head = None
        if len(block) > _MANY_BYTES:
            self._read_bytes = max(_MIN_READ_BYTES, self._read_bytes // 4)
        elif len(block) < _FEW_BYTES:
            self._read_bytes = min(self._max_read_bytes, self._read_bytes * 2)
        self._pending = b""
        if self._decoder.eof:
            self._pending, self._decoder = self._decoder.unused_data, None
        return block

    def _broken(self, message: str) -> BrokenStream:
        name = NAMES[self._kind]
        if "requires too much memory" in message:
            return BrokenStream(
                f"The zstd window is larger than {_MAX_WINDOW_BYTES >> 20} MiB; compress it without --long=31",
                is_damage=False,
            )
        if any(words in message for words in _UNKNOWN_START):
            return BrokenStream(f"Trailing bytes follow the {name} data")
        return BrokenStream(f"The {name} data is corrupt: {message.rpartition(': ')[2]}")


def _decoder(kind: Compression) -> Any:
    """Return a streaming decoder of one member or frame; both libraries have the same interface."""
    decoders: dict[Compression, Callable[[], Any]] = {
        "gz": lambda: zlib.decompressobj(16 + zlib.MAX_WBITS),
        "zst": lambda: zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj(),
    }
    return decoders[kind]()
