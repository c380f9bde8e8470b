"""Token shards as llm.c and its relatives write them: a header, then nothing but token ids, little-endian.

Paths go in, arrays of ids come out, and the other way round. Two kinds: magic 20240520, version 1, uint16; magic
20240801, version 7, uint32. The header is 256 int32, in a variant three uint32; in both the first three are magic,
version and number of tokens. A file without a header is read where a person says what its ids are. Invariant: the
length of the file decides which header it is, and one that does not agree with it to the byte is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from vorox.core.atomic import write_file
from vorox.core.errors import DataError
from vorox.data.rows import TokenArray

HEADER_BYTES = 1024
SHORT_HEADER_BYTES = 12
MOST_TOKENS = (1 << 31) - 1
"""The number of tokens is an int32."""

_TOKEN_BYTES: dict[tuple[int, int], int] = {(20240520, 1): 2, (20240801, 7): 4}
_KINDS = {token_bytes: kind for kind, token_bytes in _TOKEN_BYTES.items()}


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """What a shard is.

    Attributes:
        token_bytes: 2 or 4.
        num_tokens: Its tokens.
        header_bytes: Where they begin.
    """

    token_bytes: int
    num_tokens: int
    header_bytes: int

    @property
    def dtype(self) -> str:
        return f"<u{self.token_bytes}"


def parse_header(start: bytes, size_bytes: int, where: str) -> ShardHeader:
    """What the first bytes of a shard and its length say.

    Args:
        start: At least the first 12 bytes.
        size_bytes: Length of the file.
        where: Its name, for messages.

    Raises:
        DataError: It is no shard, of a kind that is not known, cut short, or longer or shorter than it says.
    """
    if size_bytes < SHORT_HEADER_BYTES or len(start) < SHORT_HEADER_BYTES:
        raise DataError(
            f"a file of {size_bytes} bytes cannot be a token shard", where=where, hint="fetch or write it again"
        )
    magic, version, num_tokens = (int(value) for value in np.frombuffer(start[:SHORT_HEADER_BYTES], "<u4"))
    token_bytes = _TOKEN_BYTES.get((magic, version))
    if token_bytes is None:
        known = " or ".join(f"{magic} version {version}" for magic, version in _TOKEN_BYTES)
        raise DataError(
            f"the file begins with magic {magic}, version {version}: that is no token shard ({known})", where=where,
            hint="if it is nothing but token ids, as nanoGPT's train.bin, add data.sources.0.ids_dtype=uint16 or "
            "uint32 (0 is the first source); otherwise set data.sources.0.format to the format that it has",
        )  # fmt: skip
    for header_bytes in (HEADER_BYTES, SHORT_HEADER_BYTES):
        if size_bytes == header_bytes + num_tokens * token_bytes:
            return ShardHeader(token_bytes, num_tokens, header_bytes)
    held = max(0, size_bytes - HEADER_BYTES) / token_bytes
    raise DataError(
        f"the header says {num_tokens:,} tokens of {token_bytes} bytes, the file of {size_bytes:,} bytes has room for "
        f"{held:,.10g}",
        where=where, hint="the shard is cut short or its header lies: fetch or write it again",
    )  # fmt: skip


def headerless(start: bytes, size_bytes: int, token_bytes: int, where: str) -> ShardHeader:
    """The layout of a file that is nothing but token ids.

    Raises:
        DataError: It has a header after all, or is not a whole number of ids.
    """
    if len(start) >= SHORT_HEADER_BYTES:
        magic, version, _ = (int(value) for value in np.frombuffer(start[:SHORT_HEADER_BYTES], "<u4"))
        if (magic, version) in _TOKEN_BYTES:
            raise DataError(
                "the token shard has a header, which would be read as tokens", where=where,
                hint="leave the source's ids_dtype out",
            )  # fmt: skip
    if size_bytes % token_bytes:
        raise DataError(
            f"a file of {size_bytes:,} bytes is not a whole number of ids of {token_bytes} bytes", where=where,
            hint="set the source's ids_dtype to what it was written with, or fetch the file again",
        )  # fmt: skip
    return ShardHeader(token_bytes, size_bytes // token_bytes, 0)


def read_header(path: Path) -> ShardHeader:
    """The header of a local shard.

    Raises:
        DataError: As ``parse_header``; or the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return parse_header(file.read(SHORT_HEADER_BYTES), path.stat().st_size, str(path))
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror or error}", where=str(path), hint="check the path") from error


def read_shard(path: Path) -> TokenArray:
    """The tokens of a local shard, mapped into memory, not loaded.

    Raises:
        DataError: As ``read_header``.
    """
    header = read_header(path)
    if header.num_tokens == 0:
        return np.zeros(0, header.dtype)
    mapped = np.memmap(path, dtype=header.dtype, mode="r", offset=header.header_bytes, shape=(header.num_tokens,))
    return cast(TokenArray, mapped)


def long_header(token_bytes: int, num_tokens: int) -> bytes:
    """The 1,024 bytes before so many tokens of 2 or 4 bytes each."""
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
        raise ValueError(f"a shard holds a row of uint16 or uint32, not {tokens.dtype} {tokens.shape}")
    if len(tokens) > MOST_TOKENS:
        raise DataError(
            f"{len(tokens):,} tokens are more than one shard can count ({MOST_TOKENS:,})", where=str(path),
            hint="write several shards",
        )  # fmt: skip
    body = np.empty(HEADER_BYTES + len(tokens) * token_bytes, np.uint8)
    body[:HEADER_BYTES] = np.frombuffer(long_header(token_bytes, len(tokens)), np.uint8)
    body[HEADER_BYTES:].view(f"<u{token_bytes}")[:] = tokens
    write_file(path, body.data)
