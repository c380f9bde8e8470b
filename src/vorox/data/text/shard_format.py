"""The token shard format of llm.c (``.bin``): a header followed by little-endian token ids.

Paths go in, arrays of ids come out, and vice versa. Two kinds exist: magic 20240520, version 1, uint16; and magic
20240801, version 7, uint32. The header is 256 int32, or three uint32 in a variant; both start with magic, version and
number of tokens. A file without a header is readable if the configuration states the type of its ids. Invariant: the
file size determines the header variant, and must match the header exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.core.files.atomic import write_file
from vorox.data.rows import TokenArray

HEADER_BYTES = 1024
SHORT_HEADER_BYTES = 12
MAX_TOKENS = (1 << 31) - 1
"""The header's token count is an int32."""

_TOKEN_BYTES: dict[tuple[int, int], int] = {(20240520, 1): 2, (20240801, 7): 4}
_KINDS = {token_bytes: kind for kind, token_bytes in _TOKEN_BYTES.items()}


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """The layout of a shard.

    Attributes:
        token_bytes: Bytes of a token id: 2 or 4.
        num_tokens: Number of tokens.
        header_bytes: Size of the header.
    """

    token_bytes: int
    num_tokens: int
    header_bytes: int

    @property
    def dtype(self) -> str:
        return f"<u{self.token_bytes}"


def parse_header(start: bytes, size_bytes: int, where: str) -> ShardHeader:
    """Return the layout of a shard from its first bytes and its size.

    Args:
        start: At least the first 12 bytes.
        size_bytes: Size of the file.
        where: Name of the file, for errors.

    Raises:
        DataError: The file is not a shard, is of an unknown kind, or its size does not match its header.
    """
    if size_bytes < SHORT_HEADER_BYTES or len(start) < SHORT_HEADER_BYTES:
        raise DataError(
            f"A file of {size_bytes} bytes is too small for a token shard",
            where=where,
            hint="download or write the file again",
        )
    magic, version, num_tokens = (int(value) for value in np.frombuffer(start[:SHORT_HEADER_BYTES], "<u4"))
    token_bytes = _TOKEN_BYTES.get((magic, version))
    if token_bytes is None:
        known = " or ".join(f"{magic} version {version}" for magic, version in _TOKEN_BYTES)
        raise DataError(
            f"Not a token shard: the file starts with magic {magic}, version {version} instead of {known}", where=where,
            hint="if the file has only token ids, like nanoGPT's train.bin, set data.sources.0.ids_dtype=uint16 or "
            "uint32 (0 is the first source); otherwise set data.sources.0.format to its format",
        )  # fmt: skip
    for header_bytes in (HEADER_BYTES, SHORT_HEADER_BYTES):
        if size_bytes == header_bytes + num_tokens * token_bytes:
            return ShardHeader(token_bytes, num_tokens, header_bytes)
    held = max(0, size_bytes - HEADER_BYTES) / token_bytes
    raise DataError(
        f"The header states {num_tokens:,} tokens of {token_bytes} bytes, but the file of {size_bytes:,} bytes holds "
        f"{held:,.10g}",
        where=where, hint="the shard is truncated or its header is wrong: download or write it again",
    )  # fmt: skip


def headerless(start: bytes, size_bytes: int, token_bytes: int, where: str) -> ShardHeader:
    """Return the layout of a file that contains only token ids.

    Raises:
        DataError: The file has a header, or its size is not a multiple of the id size.
    """
    if len(start) >= SHORT_HEADER_BYTES:
        magic, version, _ = (int(value) for value in np.frombuffer(start[:SHORT_HEADER_BYTES], "<u4"))
        if (magic, version) in _TOKEN_BYTES:
            raise DataError(
                "The token shard has a header, which would be read as tokens", where=where,
                hint="remove the source's ids_dtype",
            )  # fmt: skip
    if size_bytes % token_bytes:
        raise DataError(
            f"A file of {size_bytes:,} bytes is not a whole number of ids of {token_bytes} bytes", where=where,
            hint="set the source's ids_dtype to the type that the file was written with, or download the file again",
        )  # fmt: skip
    return ShardHeader(token_bytes, size_bytes // token_bytes, 0)


def read_header(path: Path) -> ShardHeader:
    """Read the header of a local shard.

    Raises:
        DataError: As ``parse_header``; or the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return parse_header(file.read(SHORT_HEADER_BYTES), path.stat().st_size, str(path))
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"Cannot read the shard: {reason}", where=str(path), hint="check the path") from error


def read_shard(path: Path) -> TokenArray:
    """Return the tokens of a local shard as a memory map.

    Raises:
        DataError: As ``read_header``.
    """
    header = read_header(path)
    if header.num_tokens == 0:
        return np.zeros(0, header.dtype)
    mapped = np.memmap(path, dtype=header.dtype, mode="r", offset=header.header_bytes, shape=(header.num_tokens,))
    return cast(TokenArray, mapped)


def long_header(token_bytes: int, num_tokens: int) -> bytes:
    """Return the 1,024-byte header for ``num_tokens`` tokens of 2 or 4 bytes each."""
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = (*_KINDS[token_bytes], num_tokens)
    return header.tobytes()


def write_shard(path: Path, tokens: npt.NDArray[np.unsignedinteger]) -> None:
    """Write a shard with the long header, durably: uint16 ids as version 1, uint32 ids as version 7.

    Raises:
        DataError: There are more tokens than the header can count.
    """
    token_bytes = tokens.dtype.itemsize
    if tokens.ndim != 1 or tokens.dtype.kind != "u" or token_bytes not in _KINDS:
        raise ValueError(f"A shard is a 1-D array of uint16 or uint32, not {tokens.dtype} {tokens.shape}")
    if len(tokens) > MAX_TOKENS:
        raise DataError(
            f"{len(tokens):,} tokens exceed the limit of one shard ({MAX_TOKENS:,})", where=str(path),
            hint="write several shards",
        )  # fmt: skip
    body = np.empty(HEADER_BYTES + len(tokens) * token_bytes, np.uint8)
    body[:HEADER_BYTES] = np.frombuffer(long_header(token_bytes, len(tokens)), np.uint8)
    body[HEADER_BYTES:].view(f"<u{token_bytes}")[:] = tokens
    write_file(path, body.data)
