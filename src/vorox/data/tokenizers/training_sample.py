"""The text that a tokenizer is trained on: evenly spread over the training splits of all sources.

Sources and a budget in bytes go in, texts come out. Small files and records are taken whole, long ones in pieces cut
at lines. Invariants: nothing held out is ever seen, the same files give the same texts, the budget is shared by the
sources' weights, and reading takes time in proportion to the budget, not to the sources.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from vorox.core.schema.data import SourceConfig
from vorox.data.documents import Document, UnitSpan
from vorox.data.storage import StoredFile
from vorox.data.text.file_content import Limits, SequentialReads
from vorox.data.text.formats import (
    RecordBlock,
    has_many_records,
    line_end_after,
    read_records,
    records_are_lines,
    split_blocks,
    text_boundary_before,
)
from vorox.data.text.holdout import document_filter
from vorox.data.text.sources import Source
from vorox.data.text.unit_splitter import split_into_units

_PIECES = 128
_PIECE_BYTES = 1 << 16
_MOST_PIECES = 1 << 16


def allocate(budget: int, weights: Sequence[Fraction], available: Sequence[int]) -> list[int]:
    """Share a budget by weight; what a source does not have goes to the others.

    Returns:
        A share for each source, never more than it has and in sum never more than the budget.
    """
    shares = [0] * len(weights)
    open_sources: list[int] = [index for index, size in enumerate(available) if size > 0]
    left = budget
    while open_sources:
        total = sum((weights[index] for index in open_sources), Fraction(0))
        full: list[int] = [i for i in open_sources if available[i] * total <= left * weights[i]]
        for index in full or open_sources:
            shares[index] = available[index] if full else int(left * weights[index] / total)
        if not full:
            break
        left -= sum(available[index] for index in full)
        open_sources = [index for index in open_sources if index not in full]
    return shares


def training_sample(
    sources: Sequence[Source],
    weights: Sequence[Fraction],
    *,
    unit_bytes: int,
    budget_bytes: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[str]:
    """Texts of the training split, about ``budget_bytes`` of them, evenly spread; all of them if there are fewer."""
    spans = [
        [span for unit in split_into_units(source, "train", source.holdout, unit_bytes) for span in unit.spans]
        for source in sources
    ]
    sizes = [_size(source, group) for source, group in zip(sources, spans, strict=True)]
    shares = allocate(budget_bytes, weights, sizes)
    done, total = 0, sum(shares)
    with contextlib.closing(SequentialReads()) as reads:
        for source, group, size, share in zip(sources, spans, sizes, shares, strict=True):
            for text in reads.during(_spread(source, group, size, share)):
                yield text
                done += len(text.encode("utf-8"))
                if on_progress is not None:
                    on_progress(min(done, total), total)


def _size(source: Source, spans: Sequence[UnitSpan]) -> int:
    """Bytes of text, about; none where a source has tokens in place of text."""
    if source.config.has_tokens:
        return 0
    return sum(piece.text_bytes for span in spans for piece in _pieces(source, span, 1 << 62))


def _has_marked_records(config: SourceConfig) -> bool:
    """Whether records are many and their places known, so that none has to be looked for from the middle of a file."""
    return has_many_records(config) and not records_are_lines(config)


def _pieces(source: Source, span: UnitSpan, block_bytes: int) -> Iterator[RecordBlock]:
    """Runs of whole records in a span, or stretches of it where records are found from anywhere."""
    if _has_marked_records(source.config):
        stored = source.stored[span.file_index]
        yield from split_blocks(source.config, stored, span.start_byte, span.end_byte, block_bytes, span.first_ordinal)
        return
    for start in range(span.start_byte, span.end_byte, block_bytes):
        end = min(start + block_bytes, span.end_byte)
        yield RecordBlock(start, end, 0, end - start)


def _spread(source: Source, spans: Sequence[UnitSpan], size: int, budget: int) -> Iterator[str]:
    """Walk over all pieces, keeping what was taken in proportion to what was passed."""
    if budget == 0:
        return
    cost = min(_PIECE_BYTES, max(1, budget // _PIECES))
    block_bytes = max(cost, -(-size // _MOST_PIECES))
    everything = budget >= size
    passed = taken = 0
    for span in spans:
        accept = document_filter(source.holdout, "train", source.relative_paths[span.file_index])
        if not has_many_records(source.config) and not accept(span.start_byte):
            continue
        for piece in _pieces(source, span, block_bytes):
            passed += piece.text_bytes
            wanted = min(piece.text_bytes, cost)
            if not everything and (taken + wanted) * size > passed * budget:
                continue
            for text in _texts(source, span, piece, piece.text_bytes if everything else wanted, accept):
                taken += len(text.encode("utf-8"))
                yield text


def _texts(
    source: Source, span: UnitSpan, piece: RecordBlock, wanted_bytes: int, accept: Callable[[int], bool]
) -> Iterator[str]:
    """The records that begin in the first ``wanted_bytes`` of a piece; a part of the text where the record is the
    span."""
    config, stored, index = source.config, source.stored[span.file_index], span.file_index
    if _has_marked_records(config):
        taken = 0
        whole = UnitSpan(index, piece.start_byte, piece.end_byte, piece.first_ordinal)
        for record in read_records(config, stored, whole, accept):
            if isinstance(record, Document) and record.text:
                taken += len(record.text.encode("utf-8"))
                yield record.text
            if taken >= wanted_bytes:
                return
        return
    ends = (piece.start_byte, piece.start_byte + wanted_bytes)
    if records_are_lines(config):
        limits = Limits.from_source(config)
        start, end = (
            at if at in {span.start_byte, span.end_byte} else line_end_after(stored, at - 1, span.end_byte, limits)
            for at in ends
        )
    else:
        start, end = (_back(config, stored, at, span) for at in ends)
    if start < end:
        aligned = UnitSpan(index, start, end, 0)
        for record in read_records(config, stored, aligned, accept if records_are_lines(config) else _everything):
            if isinstance(record, Document) and record.text:
                yield record.text


def _everything(_: int) -> bool:
    return True


def _back(config: SourceConfig, stored: StoredFile, at: int, span: UnitSpan) -> int:
    if at in {span.start_byte, span.end_byte}:
        return at
    return text_boundary_before(stored, at, span.start_byte, Limits.from_source(config)) or span.start_byte
