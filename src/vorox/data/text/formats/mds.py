"""mds: shards as mosaicml-streaming writes them; a sample is a record, one of its columns is the text or the token ids.

A shard: the number of samples and where each begins and the last one ends, as uint32; the columns as JSON; the samples.
A sample: the sizes of its columns that have no fixed one, as uint32; the values. So a record has bytes of its own.
Invariant: before a shard is cut, its bytes have the hashes that ``index.json`` says.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig
from vorox.data.documents import BadRecord, Document, Record, TokenDocument, UnitSpan
from vorox.data.storage import StoredFile, open_range
from vorox.data.text.file_content import Limits, length_bytes, open_content
from vorox.data.text.formats.json_lines import UnreadableRecord
from vorox.data.text.formats.mds_values import IDS, dtype_of, ids_of, shown, text_of, values_of
from vorox.data.text.formats.record_blocks import RecordBlock, blocks_from_ends, too_large
from vorox.data.text.formats.token_shards import end_of_text

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Shard:
    """The beginning of a shard.

    Attributes:
        offsets: Where each sample begins in the content, and where the last one ends.
        encodings: Type of each column by its name, in the order of the values.
        sizes: Bytes of each column; ``None`` where every sample says its own.
    """

    offsets: npt.NDArray[np.int64]
    encodings: dict[str, str]
    sizes: tuple[int | None, ...]


@functools.lru_cache(maxsize=64)
def shard(file: StoredFile, limits: Limits) -> Shard:
    """What the beginning of a shard says.

    Raises:
        DataError: It is no shard, or contradicts its length.
    """
    size_bytes = length_bytes(file, limits)
    with open_content(file, 0, None, limits) as content:
        num_samples = int.from_bytes(content.read(4), "little")
        head = 4 + 4 * (num_samples + 1)
        if head > size_bytes:
            raise _damaged(file, f"{num_samples:,} samples cannot be in {size_bytes:,} bytes")
        offsets = np.frombuffer(content.read(head - 4), "<u4").astype(np.int64)
        if offsets[0] < head or offsets[-1] != size_bytes or not (np.diff(offsets) > 0).all():
            raise _damaged(file, "the places of its samples contradict its length")
        described = content.read(int(offsets[0]) - head)
    try:
        columns = json.loads(described)
        encodings = dict(zip(columns["column_names"], columns["column_encodings"], strict=True))
        sizes = tuple(size or None for size in columns["column_sizes"])
        is_known = (columns["format"], columns["version"]) == ("mds", 2) and len(sizes) == len(encodings)
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(file, "the description of its columns cannot be read") from error
    is_known &= all(isinstance(encoding, str) for encoding in encodings.values())
    if not is_known or not all(size is None or (type(size) is int and size > 0) for size in sizes):
        raise _damaged(file, "its columns are not described as in version 2 of the format")
    return Shard(offsets, encodings, sizes)


def _damaged(file: StoredFile, reason: str) -> DataError:
    return DataError(
        f"the MDS shard cannot be read: {reason}", where=file.uri, hint="it is damaged: fetch or write it again"
    )


@functools.lru_cache(maxsize=1 << 12)
def _check_hashes(file: StoredFile) -> None:
    for name, expected in file.hashes:
        digest: Any = None
        if name in hashlib.algorithms_available and not name.startswith("shake"):
            digest = hashlib.new(name, usedforsecurity=False)
        elif name.startswith("xxh"):
            digest = getattr(xxhash, name, bytes)()
        if not hasattr(digest, "hexdigest"):
            raise DataError(
                f"index.json has a hash of a kind that is not known: {name}", where=file.uri,
                hint="write the folder with hashes=['sha256']",
            )  # fmt: skip
        with open_range(file) as content:
            while piece := content.read(_PIECE_BYTES):
                digest.update(piece)
        if digest.hexdigest() != expected:
            raise _damaged(file, f"its {name} is {digest.hexdigest()}, index.json says {expected}")


def _opened(source: SourceConfig, file: StoredFile) -> Shard:
    """The shard, with the columns that the source asks for."""
    found = shard(file, Limits.from_source(source))
    name, key = (
        (source.text_field, "text_field") if source.tokens_field is None else (source.tokens_field, "tokens_field")
    )
    for column, setting in ((name, key), *((other, "metadata_fields") for other in source.metadata_fields)):
        if column not in found.encodings:
            raise DataError(
                f"the shard has no column {column!r}; it has {', '.join(map(repr, found.encodings)) or 'none'}",
                where=file.uri, hint=f"set the source's {setting} to one of them",
            )  # fmt: skip
    encoding = found.encodings[name]
    if source.tokens_field is None and encoding not in {"str", "bytes"}:
        raise DataError(
            f"column {name!r} holds {encoding}, not text", where=file.uri,
            hint=f"set the source's text_field to a column of text, or tokens_field={name} if it is token ids",
        )  # fmt: skip
    if source.tokens_field is not None and dtype_of(encoding, source.ids_dtype) not in {*IDS, ""}:
        raise DataError(
            f"column {name!r} holds {encoding}, of which it is not known what its ids are",
            where=file.uri,
            hint="set the source's ids_dtype to what they were written with"
            if encoding == "bytes"
            else "set the source's tokens_field to a column of integers",
        )
    return found


def measure(source: SourceConfig, file: StoredFile, end: int | None) -> int:
    """Bytes of samples up to a place."""
    limits = Limits.from_source(source)
    return max(0, (length_bytes(file, limits) if end is None else end) - int(shard(file, limits).offsets[0]))


def split_blocks(
    source: SourceConfig, file: StoredFile, start: int, end: int | None, block_bytes: int, first_ordinal: int
) -> Iterator[RecordBlock]:
    """Runs of whole samples."""
    _check_hashes(file)
    offsets = _opened(source, file).offsets
    begin, stop = max(start, int(offsets[0])), int(offsets[-1]) if end is None else end
    ends = offsets[(offsets > begin) & (offsets <= stop)]
    yield from blocks_from_ends([(stop, ends)], begin, block_bytes, first_ordinal)


def count(source: SourceConfig, file: StoredFile, start: int, end: int) -> int:
    """Samples that begin in a range."""
    begins = shard(file, Limits.from_source(source)).offsets[:-1]
    return int(((begins >= start) & (begins < end)).sum())


def read_records(
    source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Callable[[int], bool]
) -> Iterator[Record]:
    """The samples in a span whose first byte ``accept`` takes."""
    opened, limits = _opened(source, file), Limits.from_source(source)
    first, last = np.searchsorted(opened.offsets, (span.start_byte, span.end_byte)).tolist()
    places = opened.offsets[first : last + 1].tolist()
    if len(places) < 2:
        return
    ordinal = span.first_ordinal
    with open_content(file, places[0], places[-1], limits) as content:
        for offset, end in itertools.pairwise(places):
            place = (span.file_index, ordinal, offset, end - offset)
            ordinal += 1
            if end - offset > source.max_record_bytes:
                _skip(content, end - offset)
                if accept(offset):
                    yield BadRecord(*place, None, too_large(end - offset, source.max_record_bytes))
                continue
            sample = content.read(end - offset)
            if not accept(offset):
                continue
            try:
                record = _record(source, opened, sample, place)
            except UnreadableRecord as error:
                yield BadRecord(*place, None, str(error))
            else:
                if record is not None:
                    yield record


def _skip(content: Any, size_bytes: int) -> None:
    while size_bytes > 0:
        size_bytes -= len(content.read(min(size_bytes, _PIECE_BYTES)))


def _record(source: SourceConfig, opened: Shard, sample: bytes, place: tuple[int, int, int, int]) -> Record | None:
    """The document of a sample; ``None`` for one without tokens, which keeps its ordinal."""
    values = values_of(opened.encodings, opened.sizes, sample)
    if source.tokens_field is None:
        metadata = {name: shown(name, opened.encodings[name], values[name]) for name in source.metadata_fields}
        return Document(*place, text_of(source.text_field, values[source.text_field]), metadata or None)
    name = source.tokens_field
    tokens = ids_of(name, opened.encodings[name], values[name], source.ids_dtype)
    if len(tokens) and tokens[-1] == end_of_text(source):
        tokens = tokens[:-1]
    return TokenDocument(*place, tokens) if len(tokens) else None


def columns_of(file: StoredFile) -> tuple[Sequence[str], Sequence[str]]:
    """Names of the columns of text, and of those of token ids."""
    encodings = shard(file, Limits()).encodings
    texts = [name for name, encoding in encodings.items() if encoding == "str"]
    return texts, [name for name, encoding in encodings.items() if dtype_of(encoding, None) in {*IDS, ""}]
