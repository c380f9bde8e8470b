"""A memory-mapped chunk file: rows, segments and documents by index, checked when they are read.

Opening checks header, footer, block index and segments; reading a row checks its block; reading documents checks them;
``verify`` checks every byte and the consistency of the header. Invariant: every value returned is what was written.
"""

from __future__ import annotations

import hashlib
import mmap
import sys
import threading
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

import lz4.block  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from vorox.core.errors import DataError
from vorox.core.files.disk_errors import read_hint
from vorox.data.cache.files.format import (
    CODECS,
    DOCUMENT,
    ERASED,
    FOOTER,
    FOOTER_MAGIC,
    HEADER,
    HEADER_BYTES,
    LARGEST_UINT32,
    LOSS_MASK,
    MAGIC,
    SEGMENT_BYTES,
    VERSION,
    ChunkContent,
    ChunkHeader,
    ChunkOrigin,
    ChunkRecord,
    ErasedDocuments,
    content_digest,
    stored_row_bytes,
)
from vorox.data.rows import TokenArray

_lz4: Any = lz4.block  # untyped
_zstd = threading.local()  # a decompressor is not thread-safe
_xxh3 = xxhash.xxh3_64_intdigest


def _decompress_zstd(stored: memoryview, raw_bytes: int) -> bytes:
    if zstandard.frame_content_size(stored) != raw_bytes:
        raise ValueError("its frame declares another size")
    try:
        decompressor = _zstd.decompressor
    except AttributeError:
        decompressor = _zstd.decompressor = zstandard.ZstdDecompressor()
    return decompressor.decompress(stored)


_DECOMPRESSORS: dict[int, Callable[[memoryview, int], bytes]] = {
    CODECS["lz4"]: _lz4.decompress,
    CODECS["lz4hc"]: _lz4.decompress,
    CODECS["zstd"]: _decompress_zstd,
}

REMEDY = "run `vorox data build --repair` with the same configuration to rebuild damaged units"


def damaged_chunk(path: Path, what: str) -> DataError:
    return DataError(f"Damaged chunk: {what}", where=str(path), hint=REMEDY)


def split_rows(stored: bytes, header: ChunkHeader) -> tuple[TokenArray, npt.NDArray[np.bool_] | None]:
    """Return the tokens and the loss mask in the stored bytes of rows; ``None`` if the chunk has no mask."""
    dtype, row_tokens = np.dtype(f"<u{header.token_bytes}"), header.row_tokens
    if not header.flags & LOSS_MASK:
        return cast("TokenArray", np.frombuffer(stored, dtype).reshape(-1, row_tokens)), None
    rows = np.frombuffer(stored, np.uint8).reshape(-1, stored_row_bytes(row_tokens, header.token_bytes, header.flags))
    token_bytes = row_tokens * header.token_bytes
    tokens_RC = np.ascontiguousarray(rows[:, :token_bytes]).view(dtype)
    return cast("TokenArray", tokens_RC), np.unpackbits(rows[:, token_bytes:], axis=1, count=row_tokens).view(np.bool_)


class Chunk:
    """An open chunk file. Any number of threads may read it.

    Returned views keep the mapping alive; dropping the last reference unmaps it.
    """

    __slots__ = (
        "_block_bytes", "_block_ends", "_block_rows", "_documents_checked", "_index", "_last_block_bytes", "_payload",
        "_row_bytes", "_row_ptr", "_segments", "_view", "header", "last_used", "path",
    )  # fmt: skip

    def __init__(self, path: Path, view: memoryview) -> None:
        self.path = path
        self.last_used = 0
        self._view = view
        self._documents_checked = False
        self.header = header = self._read_header()
        self._row_bytes = stored_row_bytes(header.row_tokens, header.token_bytes, header.flags)
        self._block_rows = header.rows_per_block
        self._block_bytes = self._block_rows * self._row_bytes
        self._last_block_bytes = ((header.num_rows - 1) % self._block_rows + 1) * self._row_bytes
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
            block_ends = block_ends.astype(np.uint32)  # halves the memory of an open chunk
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
            DataError: It is missing, truncated, or damaged in one of these places.
        """
        try:
            with path.open("rb", buffering=0) as file:
                size_bytes = file.seek(0, 2)
                if size_bytes < HEADER_BYTES + FOOTER.size:
                    raise damaged_chunk(path, f"the file has only {size_bytes} bytes")
                # trackfd=False releases the file descriptor, of which a process has few.
                extra: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
                mapped = mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ, **extra)
        except OSError as error:
            hint = read_hint(error) or REMEDY
            raise DataError(f"Cannot open a chunk: {error.strerror}", where=str(path), hint=hint) from error
        return cls(path, memoryview(mapped))

    def _section(self, offset: int, size_bytes: int) -> memoryview:
        return self._view[offset : offset + size_bytes]

    def _expect(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            raise damaged_chunk(self.path, f"{what} is {found}, expected {expected}")

    def _read_header(self) -> ChunkHeader:
        view = self._view
        header = ChunkHeader(*HEADER.unpack_from(view))
        self._expect("signature", header.magic, MAGIC)
        self._expect("header's CRC-32", zlib.crc32(view[: HEADER_BYTES - 4]), header.crc32)
        footer = view[len(view) - FOOTER.size :]
        file_bytes, _, footer_magic, footer_crc32, zero = FOOTER.unpack(footer)
        self._expect("end", (footer_magic, zero), (FOOTER_MAGIC, 0))
        self._expect("footer's CRC-32", zlib.crc32(footer[:24]), footer_crc32)
        self._expect("file length", len(view), file_bytes)
        understood = header.version == VERSION and header.codec in CODECS.values()
        if not understood or header.flags & ~(LOSS_MASK | ERASED) or header.byte_shuffle or header.reserved:
            raise DataError(
                f"Unsupported chunk: version {header.version}, codec {header.codec}, flags {header.flags}",
                where=str(self.path),
                hint="read it with the version that wrote it, or build the cache again",
            )
        return header

    @property
    def origin(self) -> ChunkOrigin:
        header = self.header
        return ChunkOrigin(header.part, header.num_parts, header.recipe, header.source_set)

    def block(self, block: int) -> memoryview | bytes:
        """Return the rows of a block as bytes, checked.

        Raises:
            DataError: The block is damaged.
        """
        start, end = self._block_ends[block], self._block_ends[block + 1]
        stored = self._payload[start:end]
        if _xxh3(stored) & LARGEST_UINT32 != self._index[2 * block + 1]:
            first = block * self.header.rows_per_block
            raise damaged_chunk(self.path, f"block {block}, from row {first} of the chunk, does not match its checksum")
        raw_bytes = self._last_block_bytes if end == self._payload.nbytes else self._block_bytes
        if end - start == raw_bytes:
            return stored
        try:
            return _DECOMPRESSORS[self.header.codec](stored, raw_bytes)
        except (ValueError, RuntimeError, zstandard.ZstdError) as error:  # lz4 raises RuntimeError
            raise damaged_chunk(
                self.path, f"block {block} does not decompress to {raw_bytes} bytes: {error}"
            ) from error

    def row(self, row: int) -> memoryview | bytes:
        """Return the stored bytes of a row, checked: its tokens, then its loss mask if the chunk has one."""
        if self._block_rows == 1:
            return self.block(row)
        block, row_in_block = divmod(row, self._block_rows)
        start = row_in_block * self._row_bytes
        return self.block(block)[start : start + self._row_bytes]

    def segments(self, row: int) -> memoryview:
        """Return the stored segments of a row, ``SEGMENT_BYTES`` each."""
        return self._segments[SEGMENT_BYTES * self._row_ptr[row] : SEGMENT_BYTES * self._row_ptr[row + 1]]

    def segment_table(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """Return the first segment of each row, then their number; and document, token offset and length of each."""
        return np.frombuffer(self._row_ptr, "<u4"), np.frombuffer(self._segments, "<u4").reshape(-1, 3)

    def documents(self) -> npt.NDArray[np.void]:
        """Return the ``DOCUMENT`` records, checked at the first call."""
        section = self._section(self.header.documents_offset, self.header.documents_bytes)
        if not self._documents_checked:
            self._expect("documents", _xxh3(section), self.header.documents_xxh3)
            self._documents_checked = True
        return np.frombuffer(section[: self._document_bytes] if self.is_erased else section, DOCUMENT)

    @property
    def is_erased(self) -> bool:
        """Whether documents were erased."""
        return bool(self.header.flags & ERASED)

    @property
    def _document_bytes(self) -> int:
        return self.header.num_documents * DOCUMENT.itemsize

    def erased(self) -> npt.NDArray[np.bool_]:
        """Return whether each document was erased, checked at the first call."""
        documents_D = self.documents()
        if not self.is_erased:
            return np.zeros(len(documents_D), np.bool_)
        start, header = self.header.documents_offset + self._document_bytes, self.header
        bits = np.frombuffer(self._section(start, header.documents_bytes - self._document_bytes), np.uint8)
        self._expect("bytes of the erased documents", len(bits), -(-header.num_documents // 8))
        return np.unpackbits(bits, count=header.num_documents).view(np.bool_)

    def erased_tokens(self, row: int) -> npt.NDArray[np.bool_]:
        """Return whether each token of a row is of an erased document, ``[row_tokens]``."""
        segments_S3 = np.frombuffer(self.segments(row), "<u4").reshape(-1, 3)
        found = np.repeat(self.erased()[segments_S3[:, 0]], segments_S3[:, 2])
        return np.pad(found, (0, self.header.row_tokens - len(found)))

    def documents_to_erase(self, records: Collection[tuple[int, int]]) -> npt.NDArray[np.bool_]:
        """Return the documents of some records (file of the unit, ordinal) that are not erased yet."""
        places = zip(*(self.documents()[name].tolist() for name in ("file", "ordinal")), strict=True)
        return np.array([place in records for place in places], np.bool_) & ~self.erased()

    def rows_of(self, file_index: int, byte: int | None, ordinal: int | None) -> npt.NDArray[np.int64]:
        """Return the rows with tokens of the documents of a file of the unit, at a byte or ordinal, ascending."""
        documents_D = self.documents()
        wanted_D = documents_D["file"] == file_index
        if byte is not None:
            starts = documents_D["byte_offset"].astype(np.int64)
            wanted_D &= (starts <= byte) & (byte < starts + documents_D["byte_length"])
        if ordinal is not None:
            wanted_D &= documents_D["ordinal"] == ordinal
        return self.rows_with(wanted_D)

    def rows_with(self, wanted_D: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Return the rows with tokens of the wanted documents, ascending."""
        row_ptr, segments_S3 = self.segment_table()
        return np.unique(np.searchsorted(row_ptr, np.flatnonzero(wanted_D[segments_S3[:, 0]]), side="right") - 1)

    def content(self) -> ChunkContent:
        """Return the whole content, every block checked."""
        header = self.header
        num_blocks = len(self._block_ends) - 1
        payload = b"".join([self.block(block) for block in range(num_blocks)])
        self._expect("bytes of all blocks", len(payload), header.num_rows * self._row_bytes)
        tokens_RC, loss_mask_RC = split_rows(payload, header)
        erased = ErasedDocuments(self.erased(), header.content) if self.is_erased else None
        return ChunkContent(tokens_RC, *self.segment_table(), self.documents(), loss_mask_RC, erased)

    def verify(self) -> ChunkContent:
        """Check every byte of the file and the consistency of its header; return the content.

        Where documents were erased, the content digest is that of the rows before, which nothing can prove any more:
        it is compared before the first erasure. Then the tokens of these documents are checked to be one id, and the
        hashes of their texts to be zero; the manifest has the hash of the file.

        Raises:
            DataError: The chunk is damaged.
        """
        view, header = self._view, self.header
        file_xxh3 = FOOTER.unpack(view[len(view) - FOOTER.size :])[1]
        self._expect("hash of the file", _xxh3(view[: len(view) - FOOTER.size]), file_xxh3)
        content = self.content()
        self._expect("content", content_digest(content, header.part).hex(), header.content.hex())
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
        self._expect("structure", "consistent" if well_formed else "inconsistent", "consistent")
        if content.erased is not None:
            is_erased_RC = np.stack([self.erased_tokens(row) for row in range(header.num_rows)])
            left = len(np.unique(content.tokens_RC[is_erased_RC])) > 1
            left |= bool(content.documents_D["text_xxh3"][content.erased.is_erased_D].any())
            self._expect("erased documents", "still there" if left else "gone", "gone")
        return content

    def matches(self, record: ChunkRecord) -> bool:
        """Whether the header matches the manifest record."""
        header = self.header
        found = (header.part, header.num_rows, header.num_tokens, header.num_padding_tokens)
        expected = (record.part, record.rows, record.tokens, record.padding_tokens)
        return found == expected and (header.num_documents, len(self._view), header.content.hex()) == (
            record.documents,
            record.size_bytes,
            record.content,
        )

    def record(self, unit: int) -> ChunkRecord:
        """Return the manifest record of this file as a chunk of a unit; hashes the whole file."""
        header = self.header
        return ChunkRecord(
            unit=unit,
            part=header.part,
            rows=header.num_rows,
            tokens=header.num_tokens,
            padding_tokens=header.num_padding_tokens,
            documents=header.num_documents,
            size_bytes=len(self._view),
            content=header.content.hex(),
            file_sha256=hashlib.sha256(self._view).hexdigest(),
        )
