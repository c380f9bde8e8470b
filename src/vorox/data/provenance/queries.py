"""Provenance queries: the documents behind a step (``where``), the steps of a document (``when``).

A run's plan and caches go in; no database, engine or network is needed. ``where`` returns documents with their files,
bytes and tokens; ``when`` returns steps, slots and epochs, with the state of each step (``records.attempts``). Nothing
is recorded per row: the plan is evaluated or inverted, and the chunk lists the documents of a row. Invariant: the two
queries are inverse; ``when`` finds every position whose ``where`` names the document, and those at which an abandoned
attempt read it by an earlier state of the plan (``attempt_plans``).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, cast

import numpy as np
import numpy.typing as npt
import xxhash

from vorox.core.errors import ConfigError, DataError
from vorox.core.run_layout import RunLayout
from vorox.data.cache.reader import CacheReader
from vorox.data.corpus.run_views import VALIDATION_NOTE
from vorox.data.documents import DocumentSpan
from vorox.data.order.difficulty_buckets import SourceReader, cache_of
from vorox.data.order.document_masks import DocumentMasks
from vorox.data.provenance.attempt_plans import abandoned_plans
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.data.storage import canonical_uri
from vorox.data.text.formats import has_row_groups
from vorox.data.tokenizers.loading import load
from vorox.records.attempts import StepInterval, intervals
from vorox.records.executed_steps import executed_attempts
from vorox.records.run_lookup import attempt_notes

__all__ = [
    "DocumentOrigin",
    "Occurrence",
    "RowOrigin",
    "RunDataIndex",
    "abandoned_rows",
    "rows_at",
    "when",
    "when_text",
    "where",
]

_MAX_NAMES = 8
_MAX_INVERTED_ROWS = 1000
_POSITIONS_AT_ONCE = 1 << 20
_ROWS_AT_ONCE = 64
_LOCATED_AT_ONCE = 4096

State = Literal["kept", "skipped", "rolled_back", "open", "planned", "beyond"]
Granularity = Literal["byte", "record", "row group", "file"]
"""What a row is known to contain: the byte itself; tokens of its record or (Parquet) row group; tokens of the file."""

Positions = npt.NDArray[np.int64]
_Place = tuple[int, str, str, int, Granularity, bool]
"""Position, file, source, row of the cache, how precisely it is known, and whether what matches is masked."""


@dataclass(frozen=True, slots=True)
class DocumentOrigin:
    """The tokens of one document in a row.

    Attributes:
        uri: File of the document.
        version: Identifier of the file's content.
        ordinal: Index of the record in the file, from 0.
        byte_offset: First byte of the record in the (decompressed) file.
        byte_length: Bytes of the record.
        first_token: Index, within the document, of the first token in the row.
        num_tokens: Number of the document's tokens in the row.
        document_tokens: Tokens of the whole document, including its end-of-text token.
        row_token: Index, within the row, of the first token.
        text_xxh3: xxh3-64 of the record's whole text.
        copy: Index of the document among those that transforms made of the record.
        is_masked: Whether the run trained on a filler in its place (an event ``mask`` of the plan).
        is_erased: Whether its tokens were erased from the cache.
    """

    uri: str
    version: str
    ordinal: int
    byte_offset: int
    byte_length: int
    first_token: int
    num_tokens: int
    document_tokens: int
    row_token: int
    text_xxh3: int
    copy: int = 0
    is_masked: bool = False
    is_erased: bool = False


@dataclass(frozen=True, slots=True)
class RowOrigin:
    """The row in one slot of a step, with its documents.

    Attributes:
        step: The step, from 1.
        slot: Index in the global batch, from 0.
        position: Index in the run's data order, from 0.
        source: Name of the source.
        source_index: Index into the plan's sources.
        epoch: Epoch of the source, from 0.
        row: Row number in the source's cache.
        num_tokens: Number of tokens that are not padding.
        padding_tokens: Number of padding tokens.
        documents: The documents in row order.
        state: What became of the step; see ``Occurrence``. Of several attempts, the last one counts.
    """

    step: int
    slot: int
    position: int
    source: str
    source_index: int
    epoch: int
    row: int
    num_tokens: int
    padding_tokens: int
    documents: tuple[DocumentOrigin, ...]
    state: State = "kept"


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One step that trains on tokens of a document.

    Attributes:
        uri: File of the document.
        source: Name of the source.
        step: The step, from 1.
        slot: Index in the global batch, from 0.
        position: Index in the run's data order, from 0.
        epoch: Epoch of the source, from 0.
        row: Row number in the source's cache.
        state: ``kept``; ``skipped`` (executed, but the update was not applied); ``rolled_back`` (executed by an
            attempt whose later steps were lost); ``open`` (executed, not in a checkpoint yet); ``planned`` (not
            executed); ``beyond`` (in the plan, after the end of the run).
        attempt: The attempt that executed the step; ``None`` if none did.
        granularity: How precisely the row is known to match the query.
        is_masked: Whether a filler was or will be trained on in place of every document of the row that matches.
    """

    uri: str
    source: str
    step: int
    slot: int
    position: int
    epoch: int
    row: int
    state: State
    attempt: int | None
    granularity: Granularity
    is_masked: bool = False


def where(run_data: RunDataIndex, step: int, slot: int | None = None) -> tuple[RowOrigin, ...]:
    """Return the documents behind the rows of a step.

    Args:
        run_data: The run.
        step: The step, from 1.
        slot: Only this slot of the global batch; ``None`` for all slots, in order.

    Raises:
        ConfigError: The step or slot does not exist.
        DataError: A chunk is missing or damaged, or the record of the executed steps is lost.
    """
    positions = run_data.positions_of_step(step)
    if slot is not None and not 0 <= slot < len(positions):
        raise ConfigError(f"Slot {slot} does not exist: a step has slots 0 to {len(positions) - 1}", where="--slot")
    chosen = positions if slot is None else positions[slot : slot + 1]
    return tuple(rows_at(run_data, np.array(chosen, np.int64)))


def rows_at(run_data: RunDataIndex, positions: Positions) -> Iterator[RowOrigin]:
    """Yield the rows at some positions, in the order given, with their documents."""
    yield from _rows(_readings(run_data)[0], positions)


def abandoned_rows(run_data: RunDataIndex, first_position: int, end_position: int) -> Iterator[tuple[int, RowOrigin]]:
    """Yield the rows that abandoned attempts read at positions where the plan has others now, each with the attempt."""
    position_of = run_data.plan.start.batch_sizes.position_of
    for reading in _readings(run_data)[1:]:
        for part in reading.history:
            first, end = position_of(part.first_step - 1), position_of(part.last_step)
            positions = np.arange(max(first, first_position), min(end, end_position), dtype=np.int64)
            for start in range(0, len(positions), _LOCATED_AT_ONCE):
                for row in _rows(reading, positions[start : start + _LOCATED_AT_ONCE]):
                    yield part.attempt, row


def _rows(reading: _Reading, positions: Positions) -> Iterator[RowOrigin]:
    run_data = reading.run_data
    found, masks = run_data.plan.locate(positions), DocumentMasks(run_data.plan.state)
    for number, position in enumerate(positions.tolist()):
        index = int(found.source_index[number])
        reader = run_data.readers[index]
        row = int(found.row[number]) + int(reader.unit_row_starts[found.unit_start[number]])
        documents = _documents(reader, row, partial(masks.is_masked, index, position=position))
        num_tokens = sum(document.num_tokens for document in documents)
        step, slot = run_data.step_and_slot(position)
        yield RowOrigin(
            step=step,
            slot=slot,
            position=position,
            source=run_data.plan.sources[index].name,
            source_index=index,
            epoch=int(found.epoch[number]),
            row=_cache_row(reader, row),
            num_tokens=num_tokens,
            padding_tokens=reader.row_tokens - num_tokens,
            documents=documents,
            state=reading.of(step)[-1][0],
        )


def _cache_row(reader: SourceReader, row: int) -> int:
    """Return the cache's row number of a row of a source, which may be a bucket of the cache."""
    return row if isinstance(reader, CacheReader) else int(reader.base_rows(np.array([row]))[0])


def _documents(reader: SourceReader, row: int, is_masked: Callable[[str, int], bool]) -> tuple[DocumentOrigin, ...]:
    documents: list[DocumentOrigin] = []
    row_token = 0
    for span in reader.documents_of(row):
        documents.append(
            DocumentOrigin(
                uri=span.uri,
                version=reader.files[span.file_index].version,
                ordinal=span.ordinal,
                byte_offset=span.byte_offset,
                byte_length=span.byte_length,
                first_token=span.document_token_offset,
                num_tokens=span.length,
                document_tokens=span.document_tokens,
                row_token=row_token,
                text_xxh3=span.text_xxh3,
                copy=span.copy,
                is_masked=is_masked(reader.files[span.file_index].version, span.ordinal),
                is_erased=span.is_erased,
            )
        )
        row_token += span.length
    return tuple(documents)


def when(
    run_data: RunDataIndex, uri: str, byte: int | None = None, *, ordinal: int | None = None
) -> tuple[Occurrence, ...]:
    """Return every step that trains on a file, or on one of its documents, by step and slot.

    A step executed by several attempts is listed once per attempt; a document in several rows or epochs, once for each.

    Args:
        run_data: The run.
        uri: The file, or a unique ending of its name.
        byte: Only the document whose record contains this byte; in Parquet, the documents of its row group. If a
            document spans several rows, only the rows that contain the byte, as far as tokens reveal it (see
            ``granularity``).
        ordinal: Only the document with this index in the file, from 0.

    Raises:
        ConfigError: No file matches, or several do.
        DataError: A chunk is missing or damaged, or the record of the executed steps is lost.
    """
    files, found = files_named(run_data, uri), list[Occurrence]()
    for reading in _readings(run_data):
        places: list[_Place] = []
        for index, file_index in files:
            places += _places(reading, index, file_index, byte, ordinal)
        found += _occurrences(places, reading)
    return _in_order(found)


def _places(reading: _Reading, index: int, file_index: int, byte: int | None, ordinal: int | None) -> Iterator[_Place]:
    """Yield the positions at which a reading of the plan has a file of a source, or one of its documents."""
    run_data = reading.run_data
    if index >= len(run_data.readers):
        return  # the source joined later
    reader, source = run_data.readers[index], run_data.plan.sources[index].name
    rows = reader.rows_of_document(file_index, byte, ordinal)
    closest: Granularity = "file" if ordinal is None else "record"
    granularity: dict[int, Granularity] | None = None

    def matches(span: DocumentSpan) -> bool:
        has_byte = byte is None or span.byte_offset <= byte < span.byte_offset + span.byte_length
        return span.file_index == file_index and has_byte and ordinal in {None, span.ordinal}

    for position, row in _positions_of_rows(run_data, index, rows, reading.end_position):
        cache_row = _cache_row(reader, row)
        if granularity is None and byte is not None and ordinal is None:  # reads the document: only if it is needed
            granularity = _rows_with_byte(run_data, cache_of(reader), file_index, byte)
        if granularity is None or cache_row in granularity:
            known = closest if granularity is None else granularity[cache_row]
            is_masked = reading.is_masked(index, row, position, matches)
            yield position, reader.files[file_index].uri, source, cache_row, known, is_masked


def _positions_of_rows(
    run_data: RunDataIndex, index: int, rows: Positions, end_position: int
) -> Iterator[tuple[int, int]]:
    """Yield the positions of rows of a source, each with its row.

    A few rows are inverted through the plan. Of many rows, such as those of a whole file, only the positions up to the
    end of the run are looked through, in one pass: what the plan has beyond is not listed.
    """
    reader = run_data.readers[index]
    if len(rows) <= _MAX_INVERTED_ROWS:
        for row in rows.tolist():
            for position in run_data.plan.positions_of(index, row, reader).tolist():
                yield position, row
        return
    is_wanted = np.zeros(reader.num_rows, np.bool_)
    is_wanted[rows] = True
    for first in range(0, end_position, _POSITIONS_AT_ONCE):
        positions = np.arange(first, min(first + _POSITIONS_AT_ONCE, end_position), dtype=np.int64)
        found = run_data.plan.locate(positions)
        here = np.flatnonzero(found.source_index == index)
        read = found.row[here] + reader.unit_row_starts[found.unit_start[here]]
        wanted = is_wanted[read]
        yield from zip(positions[here[wanted]].tolist(), read[wanted].tolist(), strict=True)


def when_text(run_data: RunDataIndex, text_hashes: Sequence[int]) -> tuple[Occurrence, ...]:
    """Return every step that trains on records with some texts, from any file, by step and slot.

    Args:
        run_data: The run.
        text_hashes: The xxh3-64 of the whole texts of records: after chat templates, before transforms.
    """
    found: list[Occurrence] = []
    for reading in _readings(run_data):
        places: list[_Place] = []
        plan, readers = reading.run_data.plan, reading.run_data.readers
        for index, reader in enumerate(readers):
            source = plan.sources[index].name
            for row in reader.rows_of_text(text_hashes).tolist():
                uris = {span.uri: None for span in reader.documents_of(row) if span.text_xxh3 in text_hashes}
                positions, cache_row = plan.positions_of(index, row, reader).tolist(), _cache_row(reader, row)
                for uri in uris:

                    def matches(span: DocumentSpan, uri: str = uri) -> bool:
                        return span.uri == uri and span.text_xxh3 in text_hashes

                    for position in positions:
                        is_masked = reading.is_masked(index, row, position, matches)
                        places.append((position, uri, source, cache_row, "record", is_masked))
        found += _occurrences(places, reading)
    return _in_order(found)


class _Reading:
    """A state of the plan, and the steps that were or will be executed by it.

    Attributes:
        run_data: The run, with this state of its plan.
        history: The steps that attempts executed by it.
        end_position: Number of positions of these steps and those before them.

    Args:
        run_data: The run, with this state of its plan.
        history: The steps that attempts executed by it.
        is_current: Whether it is the plan as it is now, by which all other steps are planned.
    """

    def __init__(self, run_data: RunDataIndex, history: Sequence[StepInterval], *, is_current: bool) -> None:
        self.run_data, self.history, self._is_current = run_data, history, is_current
        lengths = attempt_notes(run_data.directory, "total_steps") if is_current else [0]  # of an earlier: none to come
        lengths += [horizon.total_steps for horizon in reversed(run_data.plan.state.horizons)]  # without run.json
        self._total_steps = next((steps for steps in lengths if type(steps) is int), None)
        last = max([self._total_steps or 0, *(part.last_step for part in self.history)])
        covered = run_data.plan.num_positions
        end = run_data.plan.start.batch_sizes.position_of(last) if self._total_steps is not None else covered
        self.end_position = min(covered, end)
        self._known: dict[int, list[tuple[State, int | None]]] = {}
        self._masks = DocumentMasks(run_data.plan.state)

    def is_masked(self, index: int, row: int, position: int, matches: Callable[[DocumentSpan], bool]) -> bool:
        """Whether all documents of a row that match are masked at a position."""
        if not self._masks.events:
            return False
        reader = self.run_data.readers[index]
        spans = [span for span in reader.documents_of(row) if matches(span)]
        return bool(spans) and all(
            self._masks.is_masked(index, reader.files[span.file_index].version, span.ordinal, position)
            for span in spans
        )

    def of(self, step: int) -> list[tuple[State, int | None]]:
        """Return the state of a step for each attempt that executed it by this plan, or as it is planned."""
        if step not in self._known:
            is_skipped = self.run_data.is_skipped(step)
            done = _executions(self.history, step, is_skipped)
            if self._is_current and all(state == "rolled_back" for state, _ in done):
                is_planned = self._total_steps is None or step <= self._total_steps
                done.append(("planned" if is_planned else "beyond", None))
            self._known[step] = done
        return self._known[step]


def _readings(run_data: RunDataIndex) -> list[_Reading]:
    """Return the plan as it is now, and its earlier states by which abandoned attempts read other rows.

    Raises:
        DataError: The record of the executed steps, or of the plan that they were executed by, is lost.
    """
    history = intervals(executed_attempts(run_data.directory))
    abandoned = abandoned_plans(run_data.directory, run_data.plan, history)
    elsewhere = {part for _, parts in abandoned for part in parts}
    found = [_Reading(run_data, [part for part in history if part not in elsewhere], is_current=True)]
    for plan, parts in abandoned:
        readers = run_data.readers[: len(plan.sources)]  # sources only join
        plan.check(readers)
        found.append(_Reading(replace(run_data, plan=plan, readers=readers), parts, is_current=False))
    return found


def _occurrences(places: Sequence[_Place], reading: _Reading) -> list[Occurrence]:
    run_data = reading.run_data
    epochs = run_data.plan.locate(np.array([position for position, *_ in places], np.int64)).epoch
    found: list[Occurrence] = []
    for (position, full_uri, source, cache_row, known, is_masked), epoch in zip(places, epochs.tolist(), strict=True):
        step, slot = run_data.step_and_slot(position)
        found += [
            Occurrence(full_uri, source, step, slot, position, epoch, cache_row, state, attempt, known, is_masked)
            for state, attempt in reading.of(step)
        ]
    return found


def _in_order(found: Sequence[Occurrence]) -> tuple[Occurrence, ...]:
    return tuple(sorted(found, key=lambda one: (one.position, one.attempt or 0)))


def _rows_with_byte(run_data: RunDataIndex, cache: CacheReader, file_index: int, byte: int) -> dict[int, Granularity]:
    """Return the rows of a cache that contain a byte of a file, and how precisely that is known.

    No row with the byte is omitted: if the byte cannot be traced to a token, all rows of its record are returned.
    """
    rows = cache.rows_of_document(file_index, byte).tolist()
    format_name = cache.recipe.source.get("format")
    if format_name is not None and has_row_groups(format_name):
        return dict.fromkeys(rows, "row group")
    pieces: list[tuple[int, int, DocumentSpan]] = []
    for row in rows:
        row_token = 0
        for span in cache.documents_of(row):
            if span.file_index == file_index and span.byte_offset <= byte < span.byte_offset + span.byte_length:
                pieces.append((row, row_token, span))
            row_token += span.length
    if any(span.length < span.document_tokens for _, _, span in pieces):
        token = _token_with_byte(run_data, cache, pieces, byte)
        if token is None:
            return dict.fromkeys([row for row, _, _ in pieces], "record")
        pieces = [(row, at, span) for row, at, span in pieces if 0 <= token - span.document_token_offset < span.length]
    return dict.fromkeys([row for row, _, _ in pieces], "byte")


def _token_with_byte(
    run_data: RunDataIndex, cache: CacheReader, pieces: Sequence[tuple[int, int, DocumentSpan]], byte: int
) -> int | None:
    """Return the token of a document that contains a byte; ``None`` if the text is not the bytes of the record.

    The tokens are trusted only if they decode to the text that was packed and that text is as long as the record: true
    for txt, false if a record wraps its text (jsonl, csv) or a transform changed it.
    """
    document = pieces[0][2]
    if len({(span.ordinal, span.document_tokens) for _, _, span in pieces}) > 1:
        return None
    try:
        tokenizer = load(RunLayout(run_data.directory).tokenizer)
    except DataError:
        return None
    if not tokenizer.lossless:
        return None
    wanted, found, done_bytes = byte - document.byte_offset, None, 0
    end_of_text = document.document_tokens - len(cache.recipe.document_end_ids)
    digest, done_tokens = xxhash.xxh3_64(), len(cache.recipe.start_ids)
    for tokens, first in _tokens_in_order(cache, pieces):
        if first > done_tokens:
            return None  # a part is in no row
        ids = tokens[done_tokens - first : max(end_of_text - first, 0)]
        text = tokenizer.text_bytes(ids)
        if found is None and wanted < done_bytes + len(text):
            ends = np.cumsum(tokenizer.token_byte_lengths()[ids])
            found = done_tokens + int(np.searchsorted(ends, wanted - done_bytes, side="right"))
        digest.update(text)
        done_tokens, done_bytes = done_tokens + len(ids), done_bytes + len(text)
    is_whole = done_tokens == end_of_text and done_bytes == document.byte_length
    return found if is_whole and digest.intdigest() == document.text_xxh3 else None


def _tokens_in_order(
    cache: CacheReader, pieces: Sequence[tuple[int, int, DocumentSpan]]
) -> Iterator[tuple[npt.NDArray[np.integer], int]]:
    """Yield the tokens of a document, with their place in it, a few rows at a time."""
    ordered = sorted(pieces, key=lambda piece: piece[2].document_token_offset)
    for start in range(0, len(ordered), _ROWS_AT_ONCE):
        part = ordered[start : start + _ROWS_AT_ONCE]
        block = cache.read_rows(np.array([row for row, _, _ in part], np.int64))
        for tokens_C, (_, row_token, span) in zip(block.tokens_NC, part, strict=True):
            yield tokens_C[row_token : row_token + span.length], span.document_token_offset


def _executions(history: Sequence[StepInterval], step: int, is_skipped: bool) -> list[tuple[State, int | None]]:
    """Return the state of a step for each attempt that executed it."""
    return [
        ("skipped" if is_skipped and part.outcome != "rolled_back" else part.outcome, part.attempt)
        for part in history
        if part.first_step <= step <= part.last_step
    ]


def files_named(run_data: RunDataIndex, name: str, where: str = "--source") -> list[tuple[int, int]]:
    """Return (source index, file index) of every file that matches a name; all have the same URI.

    A file of the validation set has none.

    Args:
        run_data: The run.
        name: The file, or a unique ending of its name.
        where: The option, for errors.

    Raises:
        ConfigError: No file matches, or files with different URIs do.
    """
    found = matching_files(run_data, name)
    uris = sorted({uri for _, _, uri in found})
    if len(uris) == 1:
        return [(index, number) for index, number, _ in found]
    if uris:
        more = f" and {len(uris) - _MAX_NAMES:,} more" if len(uris) > _MAX_NAMES else ""
        raise ConfigError(
            f"{name} matches {len(uris):,} files: {', '.join(uris[:_MAX_NAMES])}{more}",
            where=where, hint="give more of the name",
        )  # fmt: skip
    if is_held_out(run_data, name):
        return []
    listed = {uri for _, _, uri in _listed(run_data)}
    near = _nearest(name, sorted(listed))
    hint = f"did you mean {' or '.join(near)}?" if near else "`vorox data peek` shows the names of files"
    what = f"No file matches {name} among the {len(listed):,} files of this run"
    raise ConfigError(what, where=where, hint=hint)


def matching_files(run_data: RunDataIndex, name: str) -> list[tuple[int, int, str]]:
    """Return source index, file index and URI of every file with a name, or else of those whose names end with it."""
    names, listed = {name, canonical_uri(name)} if "://" not in name else {name}, _listed(run_data)
    ends = "/" + name.lstrip("./").replace("\\", "/")
    return [entry for entry in listed if entry[2] in names] or [
        entry for entry in listed if ("/" + entry[2].replace("\\", "/").replace(":", "/")).endswith(ends)
    ]


def _listed(run_data: RunDataIndex) -> list[tuple[int, int, str]]:
    places = ((index, number) for index, reader in enumerate(run_data.readers) for number in range(len(reader.files)))
    return [(index, number, run_data.readers[index].files[number].uri) for index, number in places]


def is_held_out(run_data: RunDataIndex, name: str) -> bool:
    """Return whether a file, by the end of its name, is in ``data.validation.sources``, so no step trains on it."""
    names, ends = {name, canonical_uri(name)} if "://" not in name else {name}, "/" + name.lstrip("./")
    directories = [
        Path(path)
        for paths in attempt_notes(run_data.directory, VALIDATION_NOTE)
        for path in cast("dict[str, str]", paths).values()
    ]
    files = (file.uri for path in dict.fromkeys(directories) if path.is_dir() for file in CacheReader.open(path).files)
    return any(uri in names or uri.endswith(ends) for uri in files)


def _nearest(name: str, uris: Sequence[str]) -> list[str]:
    """Return up to three URIs whose file names, without suffixes, are similar to that of ``name``."""
    by_last: dict[str, str] = {}
    for uri in uris:
        by_last.setdefault(uri.rpartition("/")[2].partition(".")[0], uri)
    wanted = name.rpartition("/")[2].partition(".")[0]
    close = difflib.get_close_matches(wanted, list(by_last), n=3, cutoff=0.6)
    likeness = [difflib.SequenceMatcher(None, wanted, last).ratio() for last in close]
    return [by_last[last] for last, ratio in zip(close, likeness, strict=True) if ratio >= max(likeness) - 0.1]
