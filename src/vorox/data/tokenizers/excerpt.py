"""The text that a tokenizer is trained on: evenly spread over the training splits of all sources.

Sources and a budget in bytes go in, texts come out. Small files and records are taken whole, long ones in pieces cut
at lines. Invariants: nothing held out is ever seen, the same files give the same texts, the budget is shared by the
sources' weights, and reading takes time in proportion to the budget, not to the sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from vorox.core.schema.data import SourceConfig, ValidationConfig
from vorox.data.documents import Document, UnitSpan
from vorox.data.storage import StoredFile
from vorox.data.text.formats import boundary_after, boundary_before, read_records, records_are_lines
from vorox.data.text.sources import Source, cut_units
from vorox.data.text.splits import document_filter

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


def excerpt(
    sources: Sequence[Source],
    weights: Sequence[Fraction],
    validation: ValidationConfig,
    *,
    unit_bytes: int,
    budget_bytes: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[str]:
    """Texts of the training split, about ``budget_bytes`` of them, evenly spread; all of them if there are fewer."""
    spans = [
        [span for unit in cut_units(source, "train", validation, unit_bytes) for span in unit.spans]
        for source in sources
    ]
    shares = allocate(budget_bytes, weights, [_size(group) for group in spans])
    done, total = 0, sum(shares)
    for source, group, share in zip(sources, spans, shares, strict=True):
        for text in _spread(source, group, validation, share):
            yield text
            done += len(text.encode("utf-8"))
            if on_progress is not None:
                on_progress(min(done, total), total)


def _size(spans: Sequence[UnitSpan]) -> int:
    return sum(span.end_byte - span.start_byte for span in spans)


def _spread(source: Source, spans: Sequence[UnitSpan], validation: ValidationConfig, budget: int) -> Iterator[str]:
    """Walk over all pieces, keeping what was taken in proportion to what was passed."""
    size = _size(spans)
    cost = min(_PIECE_BYTES, max(1, budget // _PIECES))
    piece_bytes = max(cost, -(-size // _MOST_PIECES))
    everything = budget >= size
    passed = taken = 0
    for span in spans:
        stored = source.stored[span.file_index]
        accept = document_filter(validation, "train", source.places[span.file_index])
        if not records_are_lines(source.config) and not accept(span.start_byte):
            continue
        for start in range(span.start_byte, span.end_byte, piece_bytes):
            end = min(start + piece_bytes, span.end_byte)
            passed += end - start
            wanted = min(end - start, cost)
            if not everything and (taken + wanted) * size > passed * budget:
                continue
            piece = UnitSpan(span.file_index, start, start + (end - start if everything else wanted), 0)
            for text in _texts(source.config, stored, span, piece, accept):
                taken += len(text.encode("utf-8"))
                yield text


def _texts(
    config: SourceConfig, stored: StoredFile, span: UnitSpan, piece: UnitSpan, accept: Callable[[int], bool]
) -> Iterator[str]:
    """The records that begin in a piece of a span; a part of the text, cut at lines, where the record is the span."""
    if records_are_lines(config):
        start, end = (
            at if at in {span.start_byte, span.end_byte} else boundary_after(stored, at - 1, span.end_byte)
            for at in (piece.start_byte, piece.end_byte)
        )
    else:
        start = _back(config, stored, piece.start_byte, span)
        end = _back(config, stored, piece.end_byte, span)
    if start < end:
        aligned = UnitSpan(piece.file_index, start, end, 0)
        for record in read_records(config, stored, aligned, accept if records_are_lines(config) else _everything):
            if isinstance(record, Document) and record.text:
                yield record.text


def _everything(_: int) -> bool:
    return True


def _back(config: SourceConfig, stored: StoredFile, at: int, span: UnitSpan) -> int:
    if at in {span.start_byte, span.end_byte}:
        return at
    return boundary_before(config, stored, at, span.start_byte) or span.start_byte
