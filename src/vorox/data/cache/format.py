"""The chunk file ``.psc``: some thousand packed rows, immutable, every byte of it covered by a checksum.

    HEADER       256 bytes: what is in the file, where, hashes of the sections, CRC-32 of itself
    PAYLOAD      blocks of rows, each compressed on its own (stored as it is where compression does not help)
    BLOCK INDEX  {u32 stored bytes, u32 low half of xxh3-64 of the stored bytes} per block
    SEGMENTS     u32 row_ptr[rows + 1]; {u32 document, u32 token offset in the document, u32 tokens} per segment
    DOCUMENTS    one ``DOCUMENT`` record per document that has a segment here
    FOOTER       32 bytes: file length, xxh3-64 of everything before the footer, CRC-32 of itself

Little-endian; sections begin at multiples of 8. Opening checks header, footer, block index and segments; reading a
row checks its block; reading provenance checks the documents; ``verify`` checks everything. The *content digest*
covers rows, segments and documents as they are before compression: it is the identity of the chunk and stays the same
under another codec or another version of its library, while the file's own hash may change.

Legend: R rows of the chunk, C tokens of a row, S segments, D documents.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lz4.block  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
import numpy.typing as npt
import xxhash

from vorox.core.errors import DataError
from vorox.data.records import TokenArray

MAGIC = b"\x89PSC\r\n\x1a\n"
VERSION = 1
HEADER_BYTES = 256
FOOTER_MAGIC = b"PSC-END\n"
CODECS = {"raw": 0, "lz4": 1, "lz4hc": 2}
SEGMENT_BYTES = 12

# magic, version, header bytes, flags | token bytes, codec, byte shuffle, 0 | row tokens, rows, rows per block |
# unit, part, documents | 4 x (offset, bytes) | recipe, source set | real tokens, padding tokens |
# xxh3 of block index, segments, documents | content | parts of the unit | CRC-32
_HEADER = struct.Struct("<8sHHI BBBB III QII 8Q 32s32s QQ QQQ 32s I I")
_FOOTER = struct.Struct("<QQ8sII")

DOCUMENT = np.dtype(
    [
        ("file", "<u4"),
        ("ordinal", "<u8"),
        ("byte_offset", "<u8"),
        ("byte_length", "<u4"),
        ("num_tokens", "<u4"),
        ("text_bytes", "<u4"),
        ("text_xxh3", "<u8"),
    ]
)
"""A document: index of its file in the source's list, its place there, and what its text came to."""

Uint32Array = npt.NDArray[np.uint32]

_LARGEST_UINT32 = (1 << 32) - 1
_lz4: Any = lz4.block  # has no types
_decompress: Callable[[memoryview, int], bytes] = _lz4.decompress
_xxh3 = xxhash.xxh3_64_intdigest


@dataclass(frozen=True, slots=True)
class ChunkContent:
    """The rows of one chunk, before compression.

    Attributes:
        tokens_RC: Token ids, uint16 or uint32.
        row_ptr: Where each row's segments start, ``[R + 1]``.
        segments_S3: Document (index into ``documents_D``), token offset in it, and tokens of each segment.
        documents_D: ``DOCUMENT`` records.
    """

    tokens_RC: TokenArray
    row_ptr: Uint32Array
    segments_S3: Uint32Array
    documents_D: npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class ChunkOrigin:
    """What a chunk belongs to: part ``part`` of the ``num_parts`` of a unit built by a recipe from pinned files."""

    unit: int
    part: int
    num_parts: int
    recipe: bytes
    source_set: bytes


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """What the manifest says of a chunk. ``content`` and ``file_sha256`` are SHA-256 in hex."""

    unit: int
    part: int
    rows: int
    tokens: int
    padding_tokens: int
    documents: int
    size_bytes: int
    content: str
    file_sha256: str


class ChunkHeader(NamedTuple):
    """The header, field by field, in the order of the file."""

    magic: bytes
    version: int
    header_bytes: int
    flags: int
    token_bytes: int
    codec: int
    byte_shuffle: int
    reserved: int
    row_tokens: int
    num_rows: int
    rows_per_block: int
    unit: int
    part: int
    num_documents: int
    payload_offset: int
    payload_bytes: int
    block_index_offset: int
    block_index_bytes: int
    segments_offset: int
    segments_bytes: int
    documents_offset: int
    documents_bytes: int
    recipe: bytes
    source_set: bytes
    num_tokens: int
    num_padding_tokens: int
    block_index_xxh3: int
    segments_xxh3: int
    documents_xxh3: int
    content: bytes
    num_parts: int
    crc32: int


def content_digest(content: ChunkContent, unit: int, part: int) -> bytes:
    """SHA-256 of what a chunk holds and of its address."""
    tokens_RC = content.tokens_RC
    shape = (tokens_RC.itemsize, tokens_RC.shape[1], tokens_RC.shape[0], unit, part)
    digest = hashlib.sha256(b"psc-content/1" + struct.pack("<5Q", *shape))
    for array in (tokens_RC, content.row_ptr, content.segments_S3, content.documents_D):
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.digest()


def default_block_rows(row_tokens: int) -> int:
    """Rows compressed together: about a thousand tokens, one row where rows are that long."""
    return max(1, 1024 // (row_tokens - 1))


def encode_chunk(
    content: ChunkContent, origin: ChunkOrigin, *, codec: str = "lz4", block_rows: int | None = None
) -> tuple[bytearray, ChunkRecord]:
    """The bytes of a chunk file and what the manifest says of it."""
    tokens_RC = np.ascontiguousarray(content.tokens_RC)
    num_rows, row_tokens = tokens_RC.shape
    block_rows = block_rows or default_block_rows(row_tokens)
    num_tokens = int(content.segments_S3[:, 2].sum(dtype=np.int64))
    blocks = [
        _compress(tokens_RC[start : start + block_rows].tobytes(), codec) for start in range(0, num_rows, block_rows)
    ]
    index = np.array([(len(block), _xxh3(block) & _LARGEST_UINT32) for block in blocks], "<u4").tobytes()
    segments = content.row_ptr.astype("<u4").tobytes() + content.segments_S3.astype("<u4").tobytes()
    documents = content.documents_D.astype(DOCUMENT).tobytes()
    body = bytearray(HEADER_BYTES)
    places: list[int] = []
    for section in (b"".join(blocks), index, segments, documents):
        places += [len(body), len(section)]
        body += section
        body += bytes(-len(body) % 8)
    digest = content_digest(content, origin.unit, origin.part)
    hashes = (_xxh3(index), _xxh3(segments), _xxh3(documents))
    fields = (
        *(MAGIC, VERSION, HEADER_BYTES, 0),
        *(tokens_RC.itemsize, CODECS[codec], 0, 0),
        *(row_tokens, num_rows, block_rows, origin.unit, origin.part, len(content.documents_D)),
        *places,
        *(origin.recipe, origin.source_set, num_tokens, tokens_RC.size - num_tokens),
        *hashes,
        *(digest, origin.num_parts),
    )
    header = _HEADER.pack(*fields, 0)[:-4]
    body[:HEADER_BYTES] = header + struct.pack("<I", zlib.crc32(header))
    footer = struct.pack("<QQ8s", len(body) + _FOOTER.size, _xxh3(body), FOOTER_MAGIC)
    body += footer + struct.pack("<II", zlib.crc32(footer), 0)
    record = ChunkRecord(
        unit=origin.unit,
        part=origin.part,
        rows=num_rows,
        tokens=num_tokens,
        padding_tokens=tokens_RC.size - num_tokens,
        documents=len(content.documents_D),
        size_bytes=len(body),
        content=digest.hex(),
        file_sha256=hashlib.sha256(body).hexdigest(),
    )
    return body, record


def _compress(block: bytes, codec: str) -> bytes:
    if codec == "raw":
        return block
    mode = "high_compression" if codec == "lz4hc" else "default"
    compressed: bytes = _lz4.compress(block, mode=mode, store_size=False)
    return compressed if len(compressed) < len(block) else block


class Chunk:
    """A chunk file mapped into memory. Reading takes no lock and changes nothing, so any number of threads may.

    What was handed out keeps the mapping alive; dropping the last reference unmaps it.
    """

    __slots__ = (
        "_block_ends", "_documents_checked", "_index", "_payload", "_row_ptr", "_segments", "_view", "header",
        "last_used", "path",
    )  # fmt: skip

    def __init__(self, path: Path, view: memoryview) -> None:
        self.path = path
        self.last_used = 0
        self._view = view
        self._documents_checked = False
        self.header = header = self._checked_header()
        self._payload = self._section(header.payload_offset, header.payload_bytes)
        index = self._section(header.block_index_offset, header.block_index_bytes)
        segments = self._section(header.segments_offset, header.segments_bytes)
        self._expect("block index", _xxh3(index), header.block_index_xxh3)
        self._expect("segments", _xxh3(segments), header.segments_xxh3)
        self._index = index.cast("I")
        stored_bytes = np.frombuffer(index, "<u4")[::2]
        block_ends = np.zeros(len(stored_bytes) + 1, np.uint64)
        np.cumsum(stored_bytes, out=block_ends[1:])
        if header.payload_bytes < 1 << 32:
            block_ends = block_ends.astype(np.uint32)  # half the memory of a chunk that is open
        self._block_ends = block_ends.data
        self._expect("payload length", int(block_ends[-1]), header.payload_bytes)
        row_ptr_bytes = 4 * (header.num_rows + 1)
        self._row_ptr = segments[:row_ptr_bytes].cast("I")
        self._segments = segments[row_ptr_bytes:]
        self._expect("segments", len(self._segments), SEGMENT_BYTES * self._row_ptr[-1])

    @classmethod
    def open(cls, path: Path) -> Chunk:
        """Map a file and check its header, footer, block index and segments.

        Raises:
            DataError: It is missing, cut short, or damaged in one of these places.
        """
        try:
            with path.open("rb") as file:
                size_bytes = file.seek(0, 2)
                if size_bytes < HEADER_BYTES + _FOOTER.size:
                    raise damaged(path, f"the file has only {size_bytes} bytes")
                # Without trackfd every mapping would keep a file descriptor, of which there are few.
                extra: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
                mapped = mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ, **extra)
        except OSError as error:
            raise DataError(f"cannot open a chunk: {error.strerror}", where=str(path), hint=REMEDY) from error
        return cls(path, memoryview(mapped))

    def _section(self, offset: int, size_bytes: int) -> memoryview:
        return self._view[offset : offset + size_bytes]

    def _expect(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            raise damaged(self.path, f"the {what} should be {expected} and is {found}")

    def _checked_header(self) -> ChunkHeader:
        view = self._view
        header = ChunkHeader(*_HEADER.unpack_from(view))
        self._expect("signature", header.magic, MAGIC)
        self._expect("header's CRC-32", zlib.crc32(view[: HEADER_BYTES - 4]), header.crc32)
        footer = view[len(view) - _FOOTER.size :]
        file_bytes, _, footer_magic, footer_crc32, zero = _FOOTER.unpack(footer)
        self._expect("end", (footer_magic, zero), (FOOTER_MAGIC, 0))
        self._expect("footer's CRC-32", zlib.crc32(footer[:24]), footer_crc32)
        self._expect("file length", len(view), file_bytes)
        understood = header.version == VERSION and header.codec in CODECS.values()
        if not understood or header.flags or header.byte_shuffle or header.reserved:
            raise DataError(
                f"a chunk of version {header.version} with codec {header.codec} and flags {header.flags}, "
                "which this version does not read",
                where=str(self.path),
                hint="read it with the version that wrote it, or build the cache again",
            )
        return header

    @property
    def origin(self) -> ChunkOrigin:
        header = self.header
        return ChunkOrigin(header.unit, header.part, header.num_parts, header.recipe, header.source_set)

    @property
    def _row_bytes(self) -> int:
        return self.header.row_tokens * self.header.token_bytes

    def block(self, block: int) -> memoryview | bytes:
        """The rows of one block as bytes, checked.

        Raises:
            DataError: The stored bytes are not what was written.
        """
        start, end = self._block_ends[block], self._block_ends[block + 1]
        stored = self._payload[start:end]
        if _xxh3(stored) & _LARGEST_UINT32 != self._index[2 * block + 1]:
            first = block * self.header.rows_per_block
            raise damaged(self.path, f"block {block}, from row {first} of the chunk, does not match its checksum")
        rows = self.header.rows_per_block
        raw_bytes = min(rows, self.header.num_rows - block * rows) * self._row_bytes
        return stored if end - start == raw_bytes else _decompress(stored, raw_bytes)

    def row(self, row: int) -> memoryview | bytes:
        """The tokens of one row as bytes, checked."""
        block_rows = self.header.rows_per_block
        if block_rows == 1:
            return self.block(row)
        start = row % block_rows * self._row_bytes
        return memoryview(self.block(row // block_rows))[start : start + self._row_bytes]

    def segments(self, row: int) -> memoryview:
        """The segments of one row as they are stored: ``SEGMENT_BYTES`` each."""
        return self._segments[SEGMENT_BYTES * self._row_ptr[row] : SEGMENT_BYTES * self._row_ptr[row + 1]]

    def documents(self) -> npt.NDArray[np.void]:
        """The ``DOCUMENT`` records, checked at the first call."""
        section = self._section(self.header.documents_offset, self.header.documents_bytes)
        if not self._documents_checked:
            self._expect("documents", _xxh3(section), self.header.documents_xxh3)
            self._documents_checked = True
        return np.frombuffer(section, DOCUMENT)

    def content(self) -> ChunkContent:
        """Everything in the chunk, every block checked."""
        header = self.header
        num_blocks = len(self._block_ends) - 1
        payload = b"".join([self.block(block) for block in range(num_blocks)])
        tokens = np.frombuffer(payload, f"<u{header.token_bytes}")
        self._expect("tokens of all blocks", tokens.size, header.num_rows * header.row_tokens)
        return ChunkContent(
            tokens.reshape(header.num_rows, header.row_tokens),
            np.frombuffer(self._row_ptr, "<u4"),
            np.frombuffer(self._segments, "<u4").reshape(-1, 3),
            self.documents(),
        )

    def verify(self) -> ChunkContent:
        """Check every byte of the file, and that what it says of itself is true; returns what is in it.

        Raises:
            DataError: Something is not as it was written.
        """
        view, header = self._view, self.header
        file_xxh3 = _FOOTER.unpack(view[len(view) - _FOOTER.size :])[1]
        self._expect("hash of the file", _xxh3(view[: len(view) - _FOOTER.size]), file_xxh3)
        content = self.content()
        self._expect("content", content_digest(content, header.unit, header.part).hex(), header.content.hex())
        segments_S3 = content.segments_S3.astype(np.int64)
        row_ptr = content.row_ptr.astype(np.int64)
        tokens_R = np.diff(np.append(0, np.cumsum(segments_S3[:, 2]))[row_ptr])
        well_formed = (
            row_ptr[0] == 0
            and bool((np.diff(row_ptr) > 0).all())
            and bool((segments_S3[:, 2] > 0).all())
            and bool((tokens_R <= header.row_tokens).all())
            and bool((segments_S3[:, 0] < header.num_documents).all())
            and len(content.documents_D) == header.num_documents
            and int(tokens_R.sum()) == header.num_tokens
            and header.num_tokens + header.num_padding_tokens == content.tokens_RC.size
        )
        self._expect("structure", "sound" if well_formed else "contradictory", "sound")
        return content

    def record(self) -> ChunkRecord:
        """What the manifest should say of this file; hashes all of it."""
        header = self.header
        return ChunkRecord(
            unit=header.unit,
            part=header.part,
            rows=header.num_rows,
            tokens=header.num_tokens,
            padding_tokens=header.num_padding_tokens,
            documents=header.num_documents,
            size_bytes=len(self._view),
            content=header.content.hex(),
            file_sha256=hashlib.sha256(self._view).hexdigest(),
        )


REMEDY = "`vorox data build --repair` with the same configuration rebuilds what is damaged"


def damaged(path: Path, what: str) -> DataError:
    return DataError(f"damaged chunk: {what}", where=str(path), hint=REMEDY)
