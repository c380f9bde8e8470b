"""The training sample of a tokenizer: texts evenly spread over the training splits of all sources.

Sources and a budget in bytes go in; texts come out. Small files and records are sampled whole, long ones in blocks of
lines. Invariants: held-out text is never sampled; the same files give the same texts; the budget is divided by the
weights of the sources; the cost of reading is proportional to the budget, not to the sources.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from vorox.core.schema.data import SourceConfig
from vorox.data.documents import Document, UnitSpan
from vorox.data.storage import StoredFile
from vorox.data.text.file_content import SequentialReads, limits_of
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

_MIN_BLOCKS = 128
_BLOCK_BYTES = 1 << 16
_MAX_BLOCKS = 1 << 16


def allocate(budget: int, weights: Sequence[Fraction], available: Sequence[int]) -> list[int]:
    """Divide a budget by weight; the unused part of a small source goes to the others.

    Returns:
        A share for each source, at most what is available and in total at most the budget.
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
    """Yield about ``budget_bytes`` of text, evenly spread over the training splits; all text if there is less."""
    spans = [
        [span for unit in split_into_units(source, "train", source.holdout, unit_bytes) for span in unit.spans]
        for source in sources
    ]
    sizes = [_size(source, group) for source, group in zip(sources, spans, strict=True)]
    shares = allocate(budget_bytes, weights, sizes)
    done, total = 0, sum(shares)
    with contextlib.closing(SequentialReads()) as reads:
        for source, group, size, share in zip(sources, spans, sizes, shares, strict=True):
            for text in reads.iterate(_spread(source, group, size, share)):
                yield text
                done += len(text.encode("utf-8"))
                if on_progress is not None:
                    on_progress(min(done, total), total)


def _size(source: Source, spans: Sequence[UnitSpan]) -> int:
    """Return the approximate bytes of text; 0 for sources of tokens."""
    if source.config.has_tokens:
        return 0
    return sum(block.text_bytes for span in spans for block in _blocks(source, span, 1 << 62))


def _has_located_records(config: SourceConfig) -> bool:
    """Whether the format locates its records, so that record boundaries need not be searched for."""
    return has_many_records(config) and not records_are_lines(config)


def _blocks(source: Source, span: UnitSpan, block_bytes: int) -> Iterator[RecordBlock]:
    """Yield blocks of whole records, or byte ranges of the span where record boundaries can be searched for."""
    if _has_located_records(source.config):
        stored = source.stored[span.file_index]
        yield from split_blocks(source.config, stored, span.start_byte, span.end_byte, block_bytes, span.first_ordinal)
        return
    for start in range(span.start_byte, span.end_byte, block_bytes):
        end = min(start + block_bytes, span.end_byte)
        yield RecordBlock(start, end, 0, end - start)


def _spread(source: Source, spans: Sequence[UnitSpan], size: int, budget: int) -> Iterator[str]:
    """Sample every block in proportion to the budget."""
    if budget == 0:
        return
    cost = min(_BLOCK_BYTES, max(1, budget // _MIN_BLOCKS))
    block_bytes = max(cost, -(-size // _MAX_BLOCKS))
    everything = budget >= size
    passed = sampled = 0
    for span in spans:
        accept = document_filter(source.holdout, "train", source.relative_paths[span.file_index])
        if not has_many_records(source.config) and not accept(span.start_byte):
            continue
        for block in _blocks(source, span, block_bytes):
            passed += block.text_bytes
            wanted = min(block.text_bytes, cost)
            if not everything and (sampled + wanted) * size > passed * budget:
                continue
            for text in _texts(source, span, block, block.text_bytes if everything else wanted, accept):
                sampled += len(text.encode("utf-8"))
                yield text


def _texts(
    source: Source, span: UnitSpan, block: RecordBlock, wanted_bytes: int, accept: Callable[[int], bool]
) -> Iterator[str]:
    """Yield the records that begin in the first ``wanted_bytes`` of a block; a part of the text if the record is the
    span."""
    config, stored, index = source.config, source.stored[span.file_index], span.file_index
    if _has_located_records(config):
        sampled = 0
        whole = UnitSpan(index, block.start_byte, block.end_byte, block.first_ordinal)
        for record in read_records(config, stored, whole, accept):
            if isinstance(record, Document) and record.text:
                sampled += len(record.text.encode("utf-8"))
                yield record.text
            if sampled >= wanted_bytes:
                return
        return
    ends = (block.start_byte, block.start_byte + wanted_bytes)
    if records_are_lines(config):
        limits = limits_of(config)
        start, end = (
            at if at in {span.start_byte, span.end_byte} else line_end_after(stored, at - 1, span.end_byte, limits)
            for at in ends
        )
    else:
        start, end = (_align(config, stored, at, span) for at in ends)
    if start < end:
        aligned = UnitSpan(index, start, end, 0)
        for record in read_records(config, stored, aligned, accept if records_are_lines(config) else _accept_all):
            if isinstance(record, Document) and record.text:
                yield record.text


def _accept_all(_: int) -> bool:
    return True


def _align(config: SourceConfig, stored: StoredFile, at: int, span: UnitSpan) -> int:
    if at in {span.start_byte, span.end_byte}:
        return at
    return text_boundary_before(stored, at, span.start_byte, limits_of(config)) or span.start_byte
