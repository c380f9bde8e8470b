"""The xz baseline: bits per byte of a general-purpose compressor on the validation text.

The documents of the validation split go in, in source order; bits per byte of ``xz -9e`` come out. Results are stored
next to the caches, because compression takes about a second per megabyte. Invariant: the text equals the validation
cache's, so the model's bits per byte are comparable.
"""

from __future__ import annotations

import contextlib
import hashlib
import lzma
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vorox.core.files.atomic import canonical_json, make_directory, write_file
from vorox.core.files.json_reader import read_json
from vorox.data.documents import Document
from vorox.data.text.sources import Source
from vorox.data.text.unit_reader import read_units
from vorox.data.text.unit_splitter import split_into_units

DEFAULT_MAX_BYTES = 16 << 20
_SMALLEST_DICTIONARY = 1 << 16
_LARGEST_DICTIONARY = 1 << 26


@dataclass(frozen=True, slots=True)
class CompressorBaseline:
    """The result of compressing a text.

    Attributes:
        text_bytes: Size of the text.
        compressed_bytes: Size of the compressed text.
        complete: Whether the text is the whole validation text, or only its beginning.
    """

    text_bytes: int
    compressed_bytes: int
    complete: bool

    @property
    def bits_per_byte(self) -> float:
        return 8 * self.compressed_bytes / self.text_bytes


def compress(text: bytes) -> int:
    """Return the size of a text compressed with ``xz -9e``.

    The dictionary is limited to the size of the text: the same result as the preset's 64 MiB, without its 700 MB of
    memory.
    """
    window = min(max(_SMALLEST_DICTIONARY, 1 << (len(text) - 1).bit_length()), _LARGEST_DICTIONARY)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": window}]
    return len(lzma.compress(text, format=lzma.FORMAT_XZ, filters=filters))


def validation_text(sources: Sequence[Source], unit_bytes: int) -> Iterable[bytes]:
    """Yield the held-out documents of all sources in order."""
    for source in sources:
        units = split_into_units(source, "validation", source.holdout, unit_bytes)
        for record in read_units(source, units, "validation", source.holdout):
            if isinstance(record, Document):
                yield record.text.encode("utf-8")


def xz_baseline(
    sources: Sequence[Source],
    *,
    unit_bytes: int,
    results: Path | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> CompressorBaseline | None:
    """Return the baseline of the validation text, from a stored result if possible.

    Args:
        sources: The sources whose held-out text is compressed.
        unit_bytes: Size of a unit, at which large text files are split into documents.
        results: Directory of stored results.
        max_bytes: Compress at most this much text.

    Returns:
        ``None`` if nothing is held out, or a source consists of tokens instead of text.
    """
    if any(source.config.has_tokens for source in sources):
        return None
    texts = [[source.digest, source.definition] for source in sources]
    rules = [[source.holdout.split, source.holdout.held_out_fraction] for source in sources]
    identity = ["xz/2", texts, rules, unit_bytes, max_bytes]
    name = hashlib.sha256(canonical_json(identity)).hexdigest()[:16]
    path = results / f"xz-{name}.json" if results is not None else None
    if path is not None and path.exists():
        with contextlib.suppress(ValueError, TypeError, KeyError):  # recompute a damaged result
            value = read_json(path)
            return CompressorBaseline(int(value["text_bytes"]), int(value["compressed_bytes"]), bool(value["complete"]))
    pieces: list[bytes] = []
    size_bytes = 0
    for piece in validation_text(sources, unit_bytes):
        pieces.append(piece)
        size_bytes += len(piece)
        if size_bytes > max_bytes:
            break
    if size_bytes == 0:
        return None
    text = b"".join(pieces)[:max_bytes]
    baseline = CompressorBaseline(len(text), compress(text), complete=size_bytes <= max_bytes)
    if path is not None:
        with contextlib.suppress(OSError):  # storing the result is optional
            make_directory(path.parent)
            write_file(path, canonical_json(asdict(baseline)))
    return baseline
