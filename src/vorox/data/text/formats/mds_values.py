"""The values of an MDS sample: text and token ids out of the bytes of its columns.

The encodings of mosaicml-streaming go in by name (``str``, ``ndarray:uint16``, ``bytes`` with a type that a person
says). A value that contradicts its encoding is an ``UnreadableRecord``; nothing is ever unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from vorox.data.text.formats.json_lines import UnreadableRecord

IDS = frozenset({"uint8", "uint16", "int16", "uint32", "int32", "uint64", "int64"})
"""Types that token ids may have."""

_TEXTS = frozenset({"str", "bytes", "json", "str_int", "str_float", "str_decimal"})
_NUMBERS = IDS | {"int8", "float16", "float32", "float64"}
_DTYPE_OF_CODE = {8: "uint8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64"}


def dtype_of(encoding: str, ids_dtype: str | None) -> str:
    """Type of the ids in a column; empty where every value says its own."""
    if encoding == "bytes":
        return ids_dtype or "unknown"
    kind, _, rest = encoding.partition(":")
    return rest.partition(":")[0] if kind == "ndarray" else "unknown"


def values_of(encodings: Mapping[str, str], fixed_sizes: Sequence[int | None], sample: bytes) -> dict[str, bytes]:
    """The columns of a sample, still encoded.

    Raises:
        UnreadableRecord: Their sizes contradict its length.
    """
    place = 4 * fixed_sizes.count(None)
    sizes = iter(np.frombuffer(sample[:place], "<u4").tolist() if len(sample) >= place else ())
    values: dict[str, bytes] = {}
    for name, size in zip(encodings, fixed_sizes, strict=True):
        length = next(sizes, len(sample)) if size is None else size
        values[name] = sample[place : place + length]
        place += length
    if place != len(sample):
        raise UnreadableRecord(f"its columns come to {place:,} bytes, the sample has {len(sample):,}")
    return values


def text_of(name: str, value: bytes) -> str:
    """A value as text.

    Raises:
        UnreadableRecord: It is not UTF-8.
    """
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableRecord(f"column {name!r} has invalid UTF-8 at byte {error.start}: {error.reason}") from error


def shown(name: str, encoding: str, value: bytes) -> str:
    """A value for a person."""
    if encoding in _TEXTS:
        return text_of(name, value)
    kind = "int64" if encoding == "int" else encoding
    return str(np.frombuffer(value, kind)[0]) if kind in _NUMBERS else f"({encoding}, {len(value):,} bytes)"


def ids_of(
    name: str, encoding: str, value: bytes, ids_dtype: str | None
) -> npt.NDArray[np.uint16] | npt.NDArray[np.uint32]:
    """Token ids of a value; those of an array of several axes row after row.

    Raises:
        UnreadableRecord: It is no array of them.
    """
    dtype, shape = dtype_of(encoding, ids_dtype), encoding.split(":")[2:]
    try:
        if not dtype:
            dtype, value = _DTYPE_OF_CODE[value[0]], value[1:]
        expected = math.prod(map(int, shape[0].split(","))) if shape else None
        if encoding != "bytes" and expected is None:
            axes, width = value[0] >> 2, 1 << (value[0] & 3)
            expected = math.prod(np.frombuffer(value[1 : 1 + axes * width], f"<u{width}").tolist())
            value = value[1 + axes * width :]
        ids = np.frombuffer(value, np.dtype(dtype).newbyteorder("<"))
    except (ValueError, LookupError) as error:
        raise UnreadableRecord(f"column {name!r} is no array of token ids") from error
    if expected is not None and len(ids) != expected:
        raise UnreadableRecord(f"column {name!r} holds {len(ids):,} ids, its shape says {expected:,}")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 1 << 32:
        raise UnreadableRecord(f"column {name!r} holds {int(ids.min())}, which is no token id")
    return ids.astype(np.uint16) if ids.dtype.itemsize <= 2 else ids.astype(np.uint32)
