"""Where the rows of a step came from, and which steps saw a document: ``where`` and ``when``.

In: a run directory and the caches that it reads; no database, no engine, no network. Out: documents with their files,
bytes and tokens for the rows of a step; steps, slots and epochs for the bytes of a file, with what became of each
step (``core.attempts``). Nothing is looked up in a record of what was read: the plan is evaluated, or inverted, and the
chunk says whose tokens a row holds. Invariant: the two are inverse; what ``where`` says of a position, ``when`` finds.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from vorox.core.attempts import StepInterval, intervals, read_attempts
from vorox.core.errors import ConfigError
from vorox.core.run_layout import RunLayout
from vorox.data.byte_of_document import ByteFinder, Granularity
from vorox.data.cache.reader import CacheReader
from vorox.data.parts import SourceReader, cache_of
from vorox.data.storage import absolute
from vorox.data.trail import Trail, noted, open_trail

__all__ = ["DocumentOrigin", "Occurrence", "RowOrigin", "Trail", "open_trail", "rows_at", "when", "where"]

_MOST_NAMED = 8

State = Literal["kept", "rolled_back", "open", "planned", "beyond"]
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DocumentOrigin:
    """A stretch of one document's tokens in a row.

    Attributes:
        uri: File of the document.
        version: What pins the file's content.
        ordinal: Number of the record within the file, from 0.
        byte_offset: First byte of the record in the (decompressed) file.
        byte_length: Bytes of the record.
        first_token: First of the document's tokens that stands here.
        num_tokens: So many of them do.
        document_tokens: Tokens of the whole document, its end of text included.
        row_token: Where in the row they begin.
        text_xxh3: xxh3-64 of the whole document's text.
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


@dataclass(frozen=True, slots=True)
class RowOrigin:
    """What one slot of a step was trained on.

    Attributes:
        step: From 1.
        slot: Place in the global batch, from 0.
        position: Place in the run's data, from 0.
        source: Name of the source.
        source_index: The source, in the order of the plan's start.
        epoch: Pass over the source, from 0.
        row: Row of the source's cache.
        num_tokens: Tokens of documents in the row; what is left of it is padding.
        padding_tokens: Positions of padding.
        documents: In row order.
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


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One time that tokens of a document were, or will be, trained on.

    Attributes:
        uri: File of the document.
        source: Name of the source.
        step: From 1.
        slot: Place in the global batch, from 0.
        position: Place in the run's data.
        epoch: Pass over the source, from 0.
        row: Row of the source's cache.
        state: ``kept``, ``rolled_back`` (done by an attempt whose work was lost from there on), ``open`` (done, and in
            no checkpoint yet), ``planned`` (not done) or ``beyond`` (the plan covers it, the run ends before it).
        attempt: Which attempt did it; ``None`` where none did.
        granularity: What the row is known to hold of what was asked for: a piece of the ``file``; tokens of the
            ``record``, or of the ``row group`` with the byte; or the ``byte`` itself.
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


def where(trail: Trail, step: int, slot: int | None = None) -> tuple[RowOrigin, ...]:
    """The documents behind the rows of a step.

    Args:
        trail: The run.
        step: From 1.
        slot: Only this slot of the global batch. None: all of them, in order.

    Raises:
        ConfigError: There is no such step or slot.
        DataError: A chunk is missing or damaged.
    """
    positions = trail.positions_of_step(step)
    if slot is not None and not 0 <= slot < len(positions):
        raise ConfigError(f"there is no slot {slot}: a step has the slots 0 to {len(positions) - 1}", where="--slot")
    chosen = positions if slot is None else positions[slot : slot + 1]
    return tuple(rows_at(trail, np.array(chosen, np.int64)))


def rows_at(trail: Trail, positions: Positions) -> Iterator[RowOrigin]:
    """The rows at some positions, with their documents, in the order given."""
    found = trail.plan.locate(positions)
    for number, position in enumerate(positions.tolist()):
        index = int(found.source_index[number])
        reader = trail.readers[index]
        row = int(found.row[number]) + int(reader.unit_row_starts[found.unit_start[number]])
        documents = _documents(reader, row)
        num_tokens = sum(document.num_tokens for document in documents)
        step, slot = trail.step_and_slot(position)
        yield RowOrigin(
            step=step,
            slot=slot,
            position=position,
            source=trail.plan.sources[index].name,
            source_index=index,
            epoch=int(found.epoch[number]),
            row=_cache_row(reader, row),
            num_tokens=num_tokens,
            padding_tokens=reader.row_tokens - num_tokens,
            documents=documents,
        )


def _cache_row(reader: SourceReader, row: int) -> int:
    """The row of the cache that is a row of a source, which may be a part of a cache."""
    return row if isinstance(reader, CacheReader) else int(reader.base_rows(np.array([row]))[0])


def _documents(reader: SourceReader, row: int) -> tuple[DocumentOrigin, ...]:
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
            )
        )
        row_token += span.length
    return tuple(documents)


def when(trail: Trail, uri: str, byte: int | None = None, *, ordinal: int | None = None) -> tuple[Occurrence, ...]:
    """Every time that a file, or one of its documents, was or will be trained on, by step and slot.

    A step that several attempts did is there once for each. A document that was packed into several rows, or read in
    several epochs, is there for each of them.

    Args:
        trail: The run.
        uri: The file, or enough of the end of its name to tell it from the others.
        byte: Only the document whose record has this byte; in Parquet, those of the row group that has it. Of a
            document in several rows only those that hold the byte, where its tokens tell (see ``granularity``).
        ordinal: Only the document with this number within the file, from 0.

    Raises:
        ConfigError: There is no such file, or several. One of ``data.validation.sources`` is in no step.
        DataError: A chunk is missing or damaged.
    """
    history = intervals(read_attempts(trail.directory))
    total_steps = next((steps for steps in noted(trail.directory, "total_steps") if type(steps) is int), None)
    places: list[tuple[int, str, str, int, Granularity]] = []
    finder = ByteFinder(RunLayout(trail.directory).tokenizer)
    for index, file_index in _files(trail, uri):
        reader, name = trail.readers[index], trail.plan.sources[index].name
        file = reader.files[file_index]
        known: dict[int, Granularity] | None = None
        if byte is not None and ordinal is None:
            cache = cache_of(reader)
            known = finder.narrowed(cache, cache.rows_of_document(file_index, byte), file_index, byte)
        for row in reader.rows_of_document(file_index, byte, ordinal).tolist():
            positions, cache_row = trail.plan.positions_of(index, row, reader), _cache_row(reader, row)
            held: Granularity = "file" if ordinal is None else "record"
            if known is not None:
                if cache_row not in known:
                    continue
                held = known[cache_row]
            places.extend((position, file.uri, name, cache_row, held) for position in positions.tolist())
    epochs = trail.plan.locate(np.array([position for position, *_ in places], np.int64)).epoch
    found: list[Occurrence] = []
    for (position, full_uri, name, cache_row, held), epoch in zip(places, epochs.tolist(), strict=True):
        step, slot = trail.step_and_slot(position)
        found += [
            Occurrence(full_uri, name, step, slot, position, epoch, cache_row, state, attempt, held)
            for state, attempt in _executions(history, step, total_steps)
        ]
    return tuple(sorted(found, key=lambda one: (one.position, one.attempt or 0)))


def _executions(history: Sequence[StepInterval], step: int, total_steps: int | None) -> list[tuple[State, int | None]]:
    """What became of a step, for each attempt that did it."""
    done: list[tuple[State, int | None]] = [
        (part.outcome, part.attempt) for part in history if part.first_step <= step <= part.last_step
    ]
    if any(state != "rolled_back" for state, _ in done):
        return done
    return [*done, ("planned" if total_steps is None or step <= total_steps else "beyond", None)]


def _files(trail: Trail, name: str) -> list[tuple[int, int]]:
    """(source, file) of every file that a name means: all of one uri.

    Raises:
        ConfigError: None has it, or files of several uris do.
    """
    names = {name, absolute(name)} if "://" not in name else {name}
    listed = [
        (index, number, file.uri)
        for index, reader in enumerate(trail.readers)
        for number, file in enumerate(reader.files)
    ]  # fmt: skip
    found = [entry for entry in listed if entry[2] in names]
    if not found:
        ends = "/" + name.lstrip("./").replace("\\", "/")
        found = [entry for entry in listed if ("/" + entry[2].replace("\\", "/").replace(":", "/")).endswith(ends)]
    uris = sorted({uri for _, _, uri in found})
    if len(uris) == 1:
        return [(index, number) for index, number, _ in found]
    if uris:
        more = f" and {len(uris) - _MOST_NAMED:,} more" if len(uris) > _MOST_NAMED else ""
        raise ConfigError(
            f"{name} is the end of {len(uris):,} names: {', '.join(uris[:_MOST_NAMED])}{more}",
            where="--source", hint="write more of the name",
        )  # fmt: skip
    if is_held_out(trail, name):
        return []
    near = _nearest(name, sorted({uri for _, _, uri in listed}))
    hint = f"did you mean {' or '.join(near)}?" if near else "`vorox data peek` shows names of files"
    raise ConfigError(f"no file {name} in the {len(listed):,} files that this run reads", where="--source", hint=hint)


def is_held_out(trail: Trail, name: str) -> bool:
    """Whether a file, by its name or the end of it, is one of ``data.validation.sources``, which no step trains on."""
    names, ends = {name, absolute(name)} if "://" not in name else {name}, "/" + name.lstrip("./")
    directories = [
        Path(path) for paths in noted(trail.directory, "validation_caches") for path in cast("list[str]", paths)
    ]
    files = (file.uri for path in dict.fromkeys(directories) if path.is_dir() for file in CacheReader.open(path).files)
    return any(uri in names or uri.endswith(ends) for uri in files)


def _nearest(name: str, uris: Sequence[str]) -> list[str]:
    """Up to three names whose last parts, without their endings, resemble the last part of ``name``."""
    by_last: dict[str, str] = {}
    for uri in uris:
        by_last.setdefault(uri.rpartition("/")[2].partition(".")[0], uri)
    wanted = name.rpartition("/")[2].partition(".")[0]
    close = difflib.get_close_matches(wanted, list(by_last), n=3, cutoff=0.6)
    likeness = [difflib.SequenceMatcher(None, wanted, last).ratio() for last in close]
    return [by_last[last] for last, ratio in zip(close, likeness, strict=True) if ratio >= max(likeness) - 0.1]
