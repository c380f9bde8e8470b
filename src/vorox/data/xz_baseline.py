"""What a general compressor reaches on the validation text: the number to read bits per byte against.

Documents of the validation split go in, in source order; bits per byte of xz at its strongest come out, remembered
beside the caches because it takes about a second per megabyte. Invariant: the text is that of the same files as the
validation cache, so the two numbers speak of the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import lzma
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vorox.core.atomic import canonical_json, make_directory, write_file
from vorox.data.documents import Document
from vorox.data.text.sources import Source, read_units
from vorox.data.text.unit_splitter import split_into_units

DEFAULT_MAX_BYTES = 16 << 20
_SMALLEST_DICTIONARY = 1 << 16
_LARGEST_DICTIONARY = 1 << 26


@dataclass(frozen=True, slots=True)
class CompressorBaseline:
    """What xz made of a text.

    Attributes:
        text_bytes: Bytes that were compressed.
        compressed_bytes: Bytes that they came to.
        complete: Whether that was the whole validation text, or its beginning.
    """

    text_bytes: int
    compressed_bytes: int
    complete: bool

    @property
    def bits_per_byte(self) -> float:
        return 8 * self.compressed_bytes / self.text_bytes


def compress(text: bytes) -> int:
    """Bytes that xz -9e makes of a text.

    The window is no larger than the text needs: the same result as the preset's 64 MiB, without its 700 MB of memory.
    """
    window = min(max(_SMALLEST_DICTIONARY, 1 << (len(text) - 1).bit_length()), _LARGEST_DICTIONARY)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": window}]
    return len(lzma.compress(text, format=lzma.FORMAT_XZ, filters=filters))


def validation_text(sources: Sequence[Source], unit_bytes: int) -> Iterable[bytes]:
    """The held-out documents of all sources, one after the other."""
    for source in sources:
        units = split_into_units(source, "validation", source.holdout, unit_bytes)
        for record in read_units(source, units, "validation", source.holdout):
            if isinstance(record, Document):
                yield record.text.encode("utf-8")


def xz_baseline(
    sources: Sequence[Source],
    *,
    unit_bytes: int,
    memory: Path | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> CompressorBaseline | None:
    """Compress the validation text, or remember what that came to.

    Args:
        sources: Whose held-out text.
        unit_bytes: Where large files are cut into documents.
        memory: Directory that results are kept in.
        max_bytes: Compress only the first so many bytes.

    Returns:
        ``None`` when nothing is held out, or when a source has tokens in place of text.
    """
    if any(source.config.has_tokens for source in sources):
        return None
    texts = [[source.digest, source.definition] for source in sources]
    rules = [[source.holdout.split, source.holdout.held_out_fraction] for source in sources]
    identity = ["xz/2", texts, rules, unit_bytes, max_bytes]
    name = hashlib.sha256(canonical_json(identity)).hexdigest()[:16]
    path = memory / f"xz-{name}.json" if memory is not None else None
    if path is not None and path.exists():
        with contextlib.suppress(ValueError, TypeError, KeyError):  # a damaged memory costs a second, nothing else
            value = json.loads(path.read_bytes())
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
        with contextlib.suppress(OSError):  # it is only a memory
            make_directory(path.parent)
            write_file(path, canonical_json(asdict(baseline)))
    return baseline
