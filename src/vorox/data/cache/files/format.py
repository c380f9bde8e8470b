"""The chunk file format ``.psc``: an immutable file of packed rows, every byte covered by a checksum.

    HEADER       256 bytes: shape, section offsets, section hashes, and the CRC-32 of the header
    PAYLOAD      blocks of rows, each compressed separately (stored raw where compression does not help)
    BLOCK INDEX  {u32 stored bytes, u32 low half of xxh3-64 of the stored bytes} per block
    SEGMENTS     u32 row_ptr[rows + 1]; {u32 document, u32 token offset in the document, u32 tokens} per segment
    DOCUMENTS    one ``DOCUMENT`` record per document with a segment in the chunk
    FOOTER       32 bytes: file length, xxh3-64 of everything before it, and the CRC-32 of the footer

With the flag ``LOSS_MASK``, each row of the payload ends with one bit per token: whether it is trained on. Without it,
all tokens are. With the flag ``ERASED``, the documents end with one bit per document: whether its tokens were erased
(``cache/upkeep/erasure.py``). Such a chunk keeps the content digest that it had before.

Little-endian; sections start at multiples of 8. ``encode_chunk`` writes chunks, ``chunk.Chunk`` reads them. The CRC-32
is zlib's; the hashes of blocks and sections are xxh3-64, seed 0. The *content digest* covers rows, segments and
documents before compression. It identifies the chunk and does not depend on the codec or its version, unlike the hash
of the file.

Legend: R rows of the chunk, C tokens of a row, S segments, D documents.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import lz4.block  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from vorox.core.files.atomic import canonical_json
from vorox.data.documents import SourceFile, Unit
from vorox.data.rows import TokenArray

MAGIC = b"\x89PSC\r\n\x1a\n"
VERSION = 2
HEADER_BYTES = 256
FOOTER_MAGIC = b"PSC-END\n"
CODECS = {"raw": 0, "lz4": 1, "lz4hc": 2, "zstd": 3}
ZSTD_LEVEL = 3
SEGMENT_BYTES = 12
LOSS_MASK = 1
"""Flag of the header: the payload has a loss mask."""
ERASED = 2
"""Flag of the header: documents were erased."""

# magic, version, header bytes, flags | token bytes, codec, byte shuffle, 0 | row tokens, rows, rows per block |
# unused, part, documents | 4 x (offset, bytes) | recipe, source set | real tokens, padding tokens |
# xxh3 of block index, segments, documents | content | parts of the unit | CRC-32
HEADER = struct.Struct("<8sHHI BBBB III 8xII 8Q 32s32s QQ QQQ 32s I I")
FOOTER = struct.Struct("<QQ8sII")

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
"""A document: index of its file within its unit, its place in the file, and the size and hash of its text."""

Uint32Array = npt.NDArray[np.uint32]

LARGEST_UINT32 = (1 << 32) - 1
_lz4: Any = lz4.block  # untyped
_xxh3 = xxhash.xxh3_64_intdigest


@dataclass(frozen=True, slots=True)
class ErasedDocuments:
    """The documents of a chunk whose tokens were erased.

    Attributes:
        is_erased_D: Whether each document was erased.
        content: The content digest of the chunk before.
    """

    is_erased_D: npt.NDArray[np.bool_]
    content: bytes


@dataclass(frozen=True, slots=True)
class ChunkContent:
    """The rows of one chunk, before compression.

    Attributes:
        tokens_RC: Token ids, uint16 or uint32.
        row_ptr: Where each row's segments start, ``[R + 1]``.
        segments_S3: Document (index into ``documents_D``), token offset in it, and tokens of each segment.
        documents_D: ``DOCUMENT`` records.
        loss_mask_RC: Whether each token is trained on; ``None``: all are.
        erased: The documents that were erased; ``None``: none were.
    """

    tokens_RC: TokenArray
    row_ptr: Uint32Array
    segments_S3: Uint32Array
    documents_D: npt.NDArray[np.void]
    loss_mask_RC: npt.NDArray[np.bool_] | None = None
    erased: ErasedDocuments | None = None

    @property
    def num_targets(self) -> int:
        """Number of tokens that are trained on; the first one of a segment never is."""
        lengths_S = self.segments_S3[:, 2].astype(np.int64)
        if self.loss_mask_RC is None:
            return int((lengths_S - 1).clip(0).sum())
        row_S = np.repeat(np.arange(len(self.tokens_RC)), np.diff(self.row_ptr.astype(np.int64)))
        before_S = np.cumsum(lengths_S) - lengths_S
        start_S = before_S - before_S[self.row_ptr[:-1].astype(np.int64)][row_S]
        return int(self.loss_mask_RC.sum()) - int(self.loss_mask_RC[row_S, start_S].sum())

    def row_bytes(self) -> npt.NDArray[np.uint8]:
        """Return the stored bytes of each row: its token ids, then its loss mask."""
        tokens_RN = np.ascontiguousarray(self.tokens_RC).view(np.uint8)
        if self.loss_mask_RC is None:
            return tokens_RN
        return np.concatenate([tokens_RN, np.packbits(self.loss_mask_RC, axis=1)], axis=1)


@dataclass(frozen=True, slots=True)
class ChunkOrigin:
    """The origin of a chunk: part ``part`` of ``num_parts`` of a unit, with digests of recipe and source files.

    A chunk does not name its number in a cache: caches share the chunks of the units that they have in common.
    """

    part: int
    num_parts: int
    recipe: bytes
    source_set: bytes


def source_set_digest(unit: Unit, files: Sequence[SourceFile], *, uses_paths: bool = False) -> bytes:
    """Return the SHA-256 of a unit's input: its ranges of records, and the versions of their files.

    Neither the place of a file nor the number of the unit counts; the relative path does where the holdout rule hashes
    it (``uses_paths``).
    """
    numbers = {index: number for number, index in enumerate(unit.file_indexes)}
    spans = [[numbers[span.file_index], *span[1:]] for span in unit.spans]
    found = [files[index] for index in unit.file_indexes]
    pinned = [[file.size_bytes, file.version, *([file.path] if uses_paths else [])] for file in found]
    return hashlib.sha256(canonical_json([spans, pinned])).digest()


def unit_key(recipe: str, source_set: bytes, duplicates: Sequence[str] = ()) -> str:
    """Return the key of a unit.

    Args:
        recipe: Digest of the recipe, which includes the holdout rule.
        source_set: Digest of the unit's ranges of records and of the versions of their files.
        duplicates: Digests of the duplicates that transforms remove from the unit, if they compare a whole source.
    """
    return hashlib.sha256(canonical_json(["unit/1", recipe, source_set.hex(), *duplicates])).hexdigest()[:40]


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """The manifest's record of a chunk. ``content`` and ``file_sha256`` are SHA-256 in hex."""

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
    """The header fields, in file order."""

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


def content_digest(content: ChunkContent, part: int) -> bytes:
    """Return the SHA-256 of a chunk's content, before documents were erased, and its number within the unit."""
    if content.erased is not None:
        return content.erased.content
    tokens_RC = content.tokens_RC
    shape = (tokens_RC.itemsize, tokens_RC.shape[1], tokens_RC.shape[0], part)
    digest = hashlib.sha256(b"psc-content/2" + struct.pack("<4Q", *shape))
    for array in (tokens_RC, content.row_ptr, content.segments_S3, content.documents_D):
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    if content.loss_mask_RC is not None:
        digest.update(b"loss-mask/1" + np.packbits(content.loss_mask_RC, axis=1).tobytes())
    return digest.digest()


def stored_row_bytes(row_tokens: int, token_bytes: int, flags: int) -> int:
    """Return the bytes of a stored row, before compression."""
    return row_tokens * token_bytes + (-(-row_tokens // 8) if flags & LOSS_MASK else 0)


def default_block_rows(row_tokens: int) -> int:
    """Return the rows per compressed block: about a thousand tokens, at least one row."""
    return max(1, 1024 // (row_tokens - 1))


def encode_chunk(
    content: ChunkContent, origin: ChunkOrigin, *, unit: int = 0, codec: str = "lz4", block_rows: int | None = None
) -> tuple[bytearray, ChunkRecord]:
    """Return the bytes of a chunk file, and its manifest record in a cache where its unit has the number ``unit``."""
    tokens_RC, rows = content.tokens_RC, content.row_bytes()
    num_rows, row_tokens = tokens_RC.shape
    flags = (content.loss_mask_RC is not None) * LOSS_MASK | (content.erased is not None) * ERASED
    block_rows = block_rows or default_block_rows(row_tokens)
    num_tokens = int(content.segments_S3[:, 2].sum(dtype=np.int64))
    blocks = [_compress(rows[start : start + block_rows].tobytes(), codec) for start in range(0, num_rows, block_rows)]
    index = np.array([(len(block), _xxh3(block) & LARGEST_UINT32) for block in blocks], "<u4").tobytes()
    segments = content.row_ptr.astype("<u4").tobytes() + content.segments_S3.astype("<u4").tobytes()
    documents = content.documents_D.astype(DOCUMENT).tobytes()
    if content.erased is not None:
        documents += np.packbits(content.erased.is_erased_D).tobytes()
    body = bytearray(HEADER_BYTES)
    places: list[int] = []
    for section in (b"".join(blocks), index, segments, documents):
        places += [len(body), len(section)]
        body += section
        body += bytes(-len(body) % 8)
    digest = content_digest(content, origin.part)
    hashes = (_xxh3(index), _xxh3(segments), _xxh3(documents))
    fields = (
        *(MAGIC, VERSION, HEADER_BYTES, flags),
        *(tokens_RC.itemsize, CODECS[codec], 0, 0),
        *(row_tokens, num_rows, block_rows, origin.part, len(content.documents_D)),
        *places,
        *(origin.recipe, origin.source_set, num_tokens, tokens_RC.size - num_tokens),
        *hashes,
        *(digest, origin.num_parts),
    )
    header = HEADER.pack(*fields, 0)[:-4]
    body[:HEADER_BYTES] = header + struct.pack("<I", zlib.crc32(header))
    footer = struct.pack("<QQ8s", len(body) + FOOTER.size, _xxh3(body), FOOTER_MAGIC)
    body += footer + struct.pack("<II", zlib.crc32(footer), 0)
    record = ChunkRecord(
        unit=unit,
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
    if codec == "zstd":
        compressed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(block)
    else:
        mode = "high_compression" if codec == "lz4hc" else "default"
        compressed: bytes = _lz4.compress(block, mode=mode, store_size=False)
    return compressed if len(compressed) < len(block) else block
