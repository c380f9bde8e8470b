"""gzip and zstd streams, read forward in bounded memory.

Compressed bytes come in from any reader, decompressed bytes go out piece by piece. Invariants: a stream of several gzip
members or zstd frames is their contents one after the other; a stream that ends early or is damaged is an error at its
place; and the pieces, so also the last one before an error, are a function of the compressed bytes alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Literal, Protocol

import zstandard

Compression = Literal["gz", "zst"]

SUFFIXES: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
NAMES: dict[Compression, str] = {"gz": "gzip", "zst": "zstd"}

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE_MAGIC = range(0x184D2A50, 0x184D2A60)
_UNKNOWN_START = ("incorrect header check", "Unknown frame descriptor")
_CHECKSUM_MESSAGES = ("incorrect data check", "incorrect length check", "checksum")
_FIRST_READ_BYTES, _LEAST_READ_BYTES, MOST_READ_BYTES = 1 << 9, 1 << 6, 1 << 12
"""Compressed bytes that are decompressed at once: fewer where they become more, for the libraries set no limit."""
_FEW_BYTES, _MANY_BYTES = 1 << 18, 1 << 20
_LARGEST_WINDOW_BYTES = 1 << 27
SIGNATURE_BYTES = 512
"""First bytes of the content of a member or frame that tell what it is."""


class BrokenStream(ValueError):
    """Compressed data that is damaged, ends early or is something else; the message says what.

    Attributes:
        is_damage: False where the data may be sound, but is refused.
        is_checksum: A member or frame was read to its end, and its checksum does not match.
    """

    def __init__(self, message: str, *, is_damage: bool = True) -> None:
        super().__init__(message)
        self.is_damage = is_damage
        self.is_checksum = any(words in message for words in _CHECKSUM_MESSAGES)


class NotCompressed(BrokenStream):
    """Data that does not begin as its name says."""

    def __init__(self, message: str) -> None:
        super().__init__(message, is_damage=False)


class Reader(Protocol):
    """A reader that returns the requested number of bytes, or those that are left."""

    def read(self, size: int, /) -> bytes: ...


def compression_of(name: str) -> Compression | None:
    """Return the compression that the ending of a name stands for."""
    return next((kind for suffix, kind in SUFFIXES.items() if name.lower().endswith(suffix)), None)


def looks_like(start: bytes) -> Compression | None:
    """Return the compression that data begins like."""
    if start.startswith(_GZIP_MAGIC):
        return "gz"
    is_skippable = len(start) >= 4 and int.from_bytes(start[:4], "little") in _SKIPPABLE_MAGIC
    return "zst" if is_skippable or start.startswith(_ZSTD_MAGIC) else None


class DecompressedStream:
    """The content of a compressed stream, read forward by the libraries' streaming decoders.

    Zeros behind a gzip member are padding; zstd skips skippable frames.

    Args:
        kind: The compression.
        reader: The compressed bytes, from the start.
        check_member: Called with the first bytes of the content of every member and frame; may raise.
        most_read_bytes: Compressed bytes that are decompressed at once, at most.

    Attributes:
        offset: Decompressed bytes that were returned.
        taken_bytes: Compressed bytes that were read for them.
        member_offset: Place in the content where the current member or frame begins.
    """

    def __init__(
        self,
        kind: Compression,
        reader: Reader,
        check_member: Callable[[bytes], None] | None = None,
        most_read_bytes: int = MOST_READ_BYTES,
    ) -> None:
        self._most_read_bytes = most_read_bytes
        self._kind: Compression = kind
        self._reader, self._check_member = reader, check_member
        self._decoder: Any = None  # of the current member or frame
        self._head: bytes | None = None  # of its content, until it is checked
        self._pending = b""
        self._read_bytes = _FIRST_READ_BYTES
        self.offset = self.taken_bytes = self.member_offset = 0

    def read(self) -> bytes:
        """Return the next piece of the content; nothing at its end.

        Raises:
            BrokenStream: The stream cannot be read on.
        """
        while True:
            if self._decoder is None and self._kind == "gz":
                self._pending = self._pending.lstrip(b"\0")
            if self._pending:
                piece = self._decompress()
                self.offset += len(piece)
                if piece:
                    return piece
            elif not self._fill():
                if self._decoder is not None:
                    raise BrokenStream(f"the {NAMES[self._kind]} data ends in the middle")
                return b""

    def _fill(self) -> bool:
        is_start = self.taken_bytes == 0
        self._pending = self._reader.read(self._read_bytes)
        self.taken_bytes += len(self._pending)
        found = looks_like(self._pending)
        if is_start and found != self._kind:
            start = self._pending[:4].hex(" ") or "(none)"
            how = f"like {NAMES[found]}" if found else f"with the bytes {start}"
            raise NotCompressed(f"the name says {NAMES[self._kind]}, but it begins {how}")
        return bool(self._pending)

    def _decompress(self) -> bytes:
        if self._decoder is None:
            self._decoder, self.member_offset = _decoder(self._kind), self.offset
            self._head = None if self._check_member is None else b""
        try:
            piece: bytes = self._decoder.decompress(self._pending)
        except (zlib.error, zstandard.ZstdError) as error:
            raise self._broken(str(error)) from error
        if self._check_member is not None and self._head is not None:
            self._head += piece[:SIGNATURE_BYTES]
            if len(self._head) >= SIGNATURE_BYTES or self._decoder.eof:
                self._check_member(self._head[:SIGNATURE_BYTES])
                self._head = None
        if len(piece) > _MANY_BYTES:
            self._read_bytes = max(_LEAST_READ_BYTES, self._read_bytes // 4)
        elif len(piece) < _FEW_BYTES:
            self._read_bytes = min(self._most_read_bytes, self._read_bytes * 2)
        self._pending = b""
        if self._decoder.eof:
            self._pending, self._decoder = self._decoder.unused_data, None
        return piece

    def _broken(self, message: str) -> BrokenStream:
        name = NAMES[self._kind]
        if "requires too much memory" in message:
            return BrokenStream(
                f"the zstd window is larger than {_LARGEST_WINDOW_BYTES >> 20} MiB; compress it without --long=31",
                is_damage=False,
            )
        if any(words in message for words in _UNKNOWN_START):
            return BrokenStream(f"behind the {name} data lies something else")
        return BrokenStream(f"damaged {name} data: {message.rpartition(': ')[2]}")


def _decoder(kind: Compression) -> Any:
    """Return a streaming decoder of one member or frame; both libraries' have the same interface."""
    makers: dict[Compression, Callable[[], Any]] = {
        "gz": lambda: zlib.decompressobj(16 + zlib.MAX_WBITS),
        "zst": lambda: zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW_BYTES).decompressobj(),
    }
    return makers[kind]()
