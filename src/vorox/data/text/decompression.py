"""Streaming decoding in bounded memory: gzip and zstd, and text in other encodings than UTF-8.

Stored bytes go in from any reader or file; decoded blocks come out, forward from the start. Invariants: gzip members
and zstd frames are concatenated; a truncated or corrupt stream is an error at its offset, and so is a decompression
bomb; text of another encoding comes out as UTF-8, invalid where it was invalid; the blocks, including the last one
before an error, depend on the stored bytes alone.
"""

from __future__ import annotations

import codecs
import contextlib
import shlex
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import zstandard

from vorox.core.errors import DataError
from vorox.core.schema.source_formats import Compression
from vorox.data.storage import StoredFile, open_range, open_seekable

UTF_8 = "utf-8"

NAMES: dict[Compression, str] = {"gz": "gzip", "zst": "zstd"}

SIGNATURE_BYTES = 512
"""Leading bytes of a file, gzip member or zstd frame that are checked for signatures."""
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = (b"\x28\xb5\x2f\xfd", *(number.to_bytes(4, "little") for number in range(0x184D2A50, 0x184D2A60)))
"""Of a frame, and of the sixteen kinds of skippable ones."""
_UNKNOWN_START = ("incorrect header check", "Unknown frame descriptor")
_CHECKSUM_MESSAGES = ("incorrect data check", "incorrect length check", "checksum")
_FIRST_READ_BYTES, _MIN_READ_BYTES, MAX_READ_BYTES = 1 << 9, 1 << 6, 1 << 12
"""Compressed bytes per decoder call: fewer where they expand more, because the libraries cannot limit the output."""
_FEW_BYTES, _MANY_BYTES = 1 << 18, 1 << 20
_MAX_WINDOW_BYTES = 1 << 27
_BUFFER_BYTES = 1 << 20
_LOOK_BACK_BYTES = 4 << 20
"""A range may begin this far before the last decoded byte without decoding from the start again."""
_LONGEST_MARK = 3
_FEWEST_CHARACTERS, _FEWEST_BYTES = 8, 16
"""Of valid UTF-8, before text of a multi-byte or 16-bit encoding is unlikely to be valid by chance."""
_ALWAYS_ALLOWED_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the content of a compressed file.

    Attributes:
        max_bytes: Decompressed bytes, at most.
        max_ratio: Decompressed bytes per compressed byte, at most; applies above 256 MiB.
        keeps_readable: A damaged file is read up to its damage instead of being rejected.
        is_text: Every gzip member and zstd frame must be text; one with a binary signature is rejected.
        encoding: The encoding of the text; the content is its UTF-8.
    """

    max_bytes: int = 1 << 40
    max_ratio: float = 1000.0
    keeps_readable: bool = False
    is_text: bool = False
    encoding: str = UTF_8


@dataclass(frozen=True, slots=True)
class Damage:
    """The point after which a compressed file cannot be read.

    Attributes:
        end_byte: End of the readable content.
        reason: What is wrong and where.
    """

    end_byte: int
    reason: str


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


class _PlainStream:
    """Stored bytes, read forward: a ``DecompressedStream`` without compression."""

    member_offset = 0

    def __init__(self, reader: Reader, read_bytes: int) -> None:
        self._reader, self._read_bytes = reader, read_bytes
        self.offset = 0

    @property
    def consumed_bytes(self) -> int:
        return self.offset

    def read(self) -> bytes:
        block = self._reader.read(self._read_bytes)
        self.offset += len(block)
        return block


def _mark_invalid(error: UnicodeError) -> tuple[str, int]:
    """Put half a surrogate pair in place of invalid bytes: it is invalid as UTF-8 too."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\udcff", error.end


codecs.register_error("vorox-mark-invalid", _mark_invalid)


class OtherEncoding(ValueError):
    """Text that is not in the declared encoding.

    Attributes:
        encoding: The encoding that it is in.
    """

    def __init__(self, message: str, encoding: str = UTF_8) -> None:
        super().__init__(message)
        self.encoding = encoding


class _EncodingCheck:
    """Recognises UTF-8 and UTF-16 text under another declared encoding, whose decoder may accept it as other text.

    Every byte is a character in an 8-bit encoding, so UTF-8 text would be read as other characters without an error.

    Args:
        encoding: The declared encoding.
    """

    def __init__(self, encoding: str) -> None:
        self._is_wide = encoding.startswith(("utf-16", "utf-32"))
        self._is_unicode = encoding.startswith("utf")
        self._fewest = 1 if _is_single_byte(encoding) else _FEWEST_CHARACTERS
        self._utf_8 = None if self._is_unicode and not self._is_wide else codecs.getincrementaldecoder(UTF_8)()
        self._start, self._num_bytes, self._num_characters = b"", 0, 0

    def add(self, block: bytes) -> None:
        """Look at the next bytes; empty ones end the text.

        Raises:
            OtherEncoding: The text has another encoding.
        """
        if len(self._start) < _LONGEST_MARK:
            self._start += block[:_LONGEST_MARK]
            self._check_mark()
        if self._utf_8 is None:
            return
        if self._is_wide and b"\0" in block:
            self._utf_8 = None  # as almost all UTF-16, by its spaces
            return
        self._num_bytes += len(block)
        try:
            text = self._utf_8.decode(block, final=not block)
        except UnicodeDecodeError:
            self._utf_8 = None
            return
        if not text.isascii():
            self._num_characters += sum(not character.isascii() for character in text)
        is_utf_8 = self._num_bytes >= _FEWEST_BYTES if self._is_wide else self._num_characters >= self._fewest
        if not block and is_utf_8:
            raise OtherEncoding("the file is UTF-8 text")

    def _check_mark(self) -> None:
        if self._is_unicode and not self._is_wide:
            return
        if self._start.startswith(codecs.BOM_UTF8):
            raise OtherEncoding("the file begins with the byte order mark of UTF-8")
        if not self._is_unicode and self._start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise OtherEncoding("the file begins with the byte order mark of UTF-16", "utf-16")


def _is_single_byte(encoding: str) -> bool:
    """Whether every byte is a character of its own: no decoder state is left after any of them."""
    decoder = codecs.getincrementaldecoder(encoding)("ignore")
    for byte in range(256):
        decoder.reset()
        decoder.decode(bytes([byte]))
        if decoder.getstate()[0]:
            return False
    return True


class _TranscodedStream:
    """Text of another encoding as UTF-8.

    Args:
        inner: The stored or decompressed bytes.
        encoding: Their encoding.
    """

    def __init__(self, inner: _PlainStream | DecompressedStream, encoding: str) -> None:
        self._inner, self._check = inner, _EncodingCheck(encoding)
        self._decoder = codecs.getincrementaldecoder(encoding)("vorox-mark-invalid")
        self._is_at_end = False
        self.offset = self.member_offset = self._inner_member = 0

    @property
    def consumed_bytes(self) -> int:
        return self._inner.consumed_bytes

    def read(self) -> bytes:
        """As ``DecompressedStream.read``."""
        while not self._is_at_end:
            block = self._inner.read()
            if self._inner.member_offset != self._inner_member:
                self._inner_member, self.member_offset = self._inner.member_offset, self.offset
            self._is_at_end = not block
            self._check.add(block)
            text = self._decoder.decode(block, final=self._is_at_end)
            if text:
                data = text.encode(UTF_8, "surrogatepass")
                self.offset += len(data)
                return data
        return b""


def conversion(uri: str, *, of: str = UTF_8, to: str = UTF_8) -> str:
    """Return the command that converts a text file to another encoding in place."""
    name = shlex.quote(uri)
    if uri.lower().endswith((".gz", ".zst", ".zstd")):
        return f"decompress {name}, then iconv -f {of} -t {to}"
    new = shlex.quote(f"{uri}.new")
    return f"iconv -f {of} -t {to} {name} > {new} && mv {new} {name}"


def compression_by_magic(start: bytes) -> Compression | None:
    """Return the compression that the magic bytes declare."""
    return "gz" if start.startswith(GZIP_MAGIC) else "zst" if start.startswith(ZSTD_MAGIC) else None


def _decoder(kind: Compression) -> Any:
    """Return a streaming decoder of one member or frame; both libraries have the same interface."""
    decoders: dict[Compression, Callable[[], Any]] = {
        "gz": lambda: zlib.decompressobj(16 + zlib.MAX_WBITS),
        "zst": lambda: zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj(),
    }
    return decoders[kind]()


class DecodedFile:
    """The content of a file that is compressed or in another encoding, decoded forward from its start.

    Args:
        file: The file.
        kind: Its compression, if any.
        limits: Limits on its content.
        check_member: Called with the first decompressed bytes of every member and frame; may raise.
        max_read_bytes: Compressed bytes per decoder call, at most.

    Attributes:
        position: Offset of the next byte that ``read`` returns.
    """

    def __init__(
        self,
        file: StoredFile,
        kind: Compression | None,
        limits: Limits,
        check_member: Callable[[bytes], None] | None = None,
        max_read_bytes: int = MAX_READ_BYTES,
    ) -> None:
        self.file, self.limits, self.position = file, limits, 0
        self._base, self._recent = 0, bytearray()
        self._open = contextlib.ExitStack()
        # open_seekable checks a local file against its listing on every read, not only at the end.
        source = self._open.enter_context(open_seekable(file) if file.scheme is None else open_range(file))
        stream: _PlainStream | DecompressedStream | _TranscodedStream
        if kind is None:
            stream = _PlainStream(source, max_read_bytes)
        else:
            stream = DecompressedStream(kind, source, check_member, max_read_bytes)
        self._stream = stream if limits.encoding == UTF_8 else _TranscodedStream(stream, limits.encoding)

    def read(self, size: int) -> bytearray:
        """Return at least one and at most ``size`` bytes; empty at the end.

        Raises:
            DataError: The content cannot be read any further, or is not in the source's encoding.
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
        except (OtherEncoding, UnicodeError) as error:
            encoding, name = self.limits.encoding, self.file.uri
            found = error.encoding if isinstance(error, OtherEncoding) else UTF_8
            raise DataError(
                f"The source's encoding is {encoding}, but {error}", where=name,
                hint="if this file alone has another encoding, give it a source of its own, or convert it: "
                f"{conversion(name, of=found, to=encoding)}; if all have, correct data.sources.0.encoding (0 is the "
                "first source; the default is utf-8)",
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
