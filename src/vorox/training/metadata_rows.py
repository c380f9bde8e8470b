"""Rows of the metadata database for a run: its plan, attempts and caches, and samples on request.

In: the plan, the caches and the record of attempts, which are the source of truth. Out: rows with natural keys. The
background writer of a run and a later ``vorox data sql --refresh`` produce the same rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from vorox.core.atomic import canonical_json
from vorox.core.attempts import Attempt, lineage
from vorox.core.chained_log import HashChainedLog
from vorox.core.run_lookup import run_attempts
from vorox.data.cache.reader import CacheReader
from vorox.data.difficulty_buckets import SourceReader
from vorox.data.plan import DataPlan
from vorox.data.provenance_queries import RowOrigin
from vorox.experiments.metadata import Row


def run_identity(run_directory: Path) -> str:
    """Return the key of a run in a shared database: its id and a digest of its first start."""
    attempts = run_attempts(run_directory)
    began = [attempts[0].get(name) for name in ("started_at", "pid")] if attempts else []
    return f"{run_directory.resolve().name}:{hashlib.sha256(canonical_json(began)).hexdigest()[:6]}"


def run_rows(run_id: str, run_directory: Path, plan: DataPlan, readers: Sequence[SourceReader | None]) -> Iterator[Row]:
    """Yield the run and the caches that it reads."""
    yield Row(
        "run",
        {
            "run_id": run_id,
            "directory": str(run_directory.resolve()),
            "seed": plan.start.seed,
            "global_batch_sequences": plan.start.global_batch_sequences,
            "plan_digest": plan.digest,
        },
    )
    for index, (source, reader) in enumerate(zip(plan.sources, readers, strict=True)):
        if reader is None:
            continue  # an earlier attempt has written it
        yield Row(
            "run_source",
            {"run_id": run_id, "source_index": index, "name": source.name, "cache": reader.directory.name},
        )


def plan_rows(run_id: str, plan: DataPlan) -> Iterator[Row]:
    """Yield the plan's events as written."""
    events = HashChainedLog(plan.path).read()[0]
    for number, event in enumerate(events[: plan.num_events], start=1):  # a live run may be appending
        yield Row(
            "plan_event",
            {
                "run_id": run_id,
                "number": number,
                "kind": event["kind"],
                "start_position": event.get("start_position"),
                "payload": canonical_json(event).decode(),
                "digest": plan.digest_at(number) or "",
            },
        )


def segment_rows(run_id: str, plan: DataPlan) -> Iterator[Row]:
    """Yield the segments of the plan: passes and their numbers of rows."""
    for source_index, segments in enumerate(plan.segments):
        for number, segment in enumerate(segments):
            yield Row(
                "segment",
                {
                    "run_id": run_id,
                    "source_index": source_index,
                    "number": number,
                    "first_epoch": segment.epoch,
                    "num_epochs": segment.num_epochs,
                    "num_rows": segment.num_rows,
                    "start_draw": segment.start_draw,
                },
            )


def attempt_rows(run_id: str, attempts: Sequence[Attempt], position_of: Callable[[int], int]) -> Iterator[Row]:
    """Yield the steps and positions of each attempt, and how many of them count.

    Args:
        run_id: The run.
        attempts: Its attempts so far.
        position_of: Returns the position in the data after a step.
    """
    for line in lineage(attempts):
        attempt = line.attempt
        yield Row(
            "attempt",
            {
                "run_id": run_id,
                "attempt": attempt.number,
                "parent": line.parent,
                "first_state": attempt.start_step,
                "first_position": attempt.first_position,
                "kept_until": line.kept_until,
                "kept_position": position_of(line.kept_until),
                "last_step": attempt.last_step,
                "last_position": position_of(attempt.last_step),
                "is_newest": int(line.is_newest),
            },
        )


def inventory_rows(reader: CacheReader) -> Iterator[Row]:
    """Yield the files, units and chunks of a cache; many rows, so only on request."""
    manifest, cache = reader.manifest, reader.directory.name
    for index, file in enumerate(reader.files):
        values = {"cache": cache, "file_index": index, "uri": file.uri}
        yield Row("source_file", {**values, "version": file.version, "size_bytes": file.size_bytes})
    starts = manifest.unit_row_starts
    for record in manifest.units:
        unit, documents, text_bytes, tokens, quarantined = record.item()
        counts = {"documents": documents, "text_bytes": text_bytes, "tokens": tokens, "quarantined": quarantined}
        rows = {"first_row": int(starts[unit]), "num_rows": int(starts[unit + 1] - starts[unit])}
        yield Row("unit", {"cache": cache, "unit": unit, **counts, **rows})
    for index in range(len(manifest.chunks)):
        chunk = manifest.chunk(index)
        yield Row(
            "chunk",
            {
                "cache": cache,
                "unit": chunk.unit,
                "part": chunk.part,
                "num_rows": chunk.rows,
                "tokens": chunk.tokens,
                "padding_tokens": chunk.padding_tokens,
                "documents": chunk.documents,
                "size_bytes": chunk.size_bytes,
                "content": chunk.content,
            },
        )


def sample_rows(run_id: str, origins: Iterable[RowOrigin]) -> Iterator[Row]:
    """Yield a row per piece of a document in a row of data."""
    for origin in origins:
        for part, document in enumerate(origin.documents):
            yield Row(
                "sample",
                {
                    "run_id": run_id,
                    "position": origin.position,
                    "part": part,
                    "step": origin.step,
                    "slot": origin.slot,
                    "source": origin.source,
                    "epoch": origin.epoch,
                    "cache_row": origin.row,
                    "uri": document.uri,
                    "ordinal": document.ordinal,
                    "byte_offset": document.byte_offset,
                    "byte_length": document.byte_length,
                    "first_token": document.first_token,
                    "num_tokens": document.num_tokens,
                    "row_token": document.row_token,
                },
            )
