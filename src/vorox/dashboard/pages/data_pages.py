"""The data page: mixture, epochs, packing, growth; documents of a step, steps of a document.

A run's plan and caches go in, opened with ``RunDataIndex``; plain JSON values come out. Opened runs stay open until
their plan grows.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vorox.core.errors import VoroxError
from vorox.core.run_layout import RunLayout
from vorox.dashboard.metrics.series import MetricSeries
from vorox.data.cache.reader import CacheReader
from vorox.data.order.difficulty_buckets import SourceReader, cache_of
from vorox.data.provenance import queries as provenance_queries
from vorox.data.provenance.queries import DocumentOrigin, RowOrigin
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.data.tokenizers.loading import load
from vorox.data.tokenizers.tokenizer import Tokenizer

_MAX_OPEN_RUNS = 4
_MAX_DOCUMENTS = 100
_MAX_OCCURRENCES = 500
_EXCERPT_TOKENS = 48
_PACKING_ROWS = 512


class DataPages:
    """Answers questions on the data of runs. Thread-safe; one question at a time."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, tuple[tuple[int, int], RunDataIndex]] = OrderedDict()
        self._tokenizers: dict[Path, Tokenizer | None] = {}
        self._lock = threading.RLock()

    def close(self) -> None:
        with self._lock:
            for _, index in self._open.values():
                index.close()
            self._open.clear()

    def _index(self, directory: Path) -> RunDataIndex:
        status = RunLayout(directory).plan.stat() if RunLayout(directory).plan.exists() else None
        version = (0, 0) if status is None else (status.st_size, status.st_mtime_ns)
        known = self._open.pop(directory, None)
        if known is None or known[0] != version:
            if known is not None:
                known[1].close()
            known = (version, RunDataIndex.open(directory))
        self._open[directory] = known
        while len(self._open) > _MAX_OPEN_RUNS:
            self._open.popitem(last=False)[1][1].close()
        return known[1]

    def mixture(self, directory: Path, step: int) -> dict[str, Any]:
        """Return, per source: requested and sampled share, epochs, rows and packing; and the events of the plan.

        Args:
            directory: The run directory.
            step: Steps finished.
        """
        with self._lock:
            index = self._index(directory)
            plan, position = index.plan, min(index.plan.start.batch_sizes.position_of(step), index.plan.num_positions)
            counts = plan.state.mixture.counts(position)
            weights = plan.state.mixture.stage_at(max(0, position - 1)).weights
            total_weight = float(sum(weights.values())) or 1.0
            sources = [
                {
                    "name": source.name,
                    "requested_fraction": float(weights.get(number, 0)) / total_weight,
                    "sampled_fraction": counts[number] / position if position else None,
                    "rows_sampled": counts[number],
                    "epochs": counts[number] / reader.num_rows if reader.num_rows else None,
                    "rows": reader.num_rows,
                    "row_tokens": reader.row_tokens,
                    "packed_fraction": _packed_fraction(cache_of(reader)),
                    "files": len(reader.files),
                    "units": len(cache_of(reader).units),
                    "is_complete": reader.units_final,
                }
                for number, (source, reader) in enumerate(zip(plan.sources, index.readers, strict=True))
            ]
            return {"sources": sources, "stages": _stages(index), "growth": _growth(index), "position": position}

    def documents(self, directory: Path, step: int) -> dict[str, Any]:
        """Return the documents behind the rows of a step, each with the start of its text in the row."""
        with self._lock:
            index = self._index(directory)
            rows = provenance_queries.where(index, step)
            tokenizer = self._tokenizer(directory)
            found = [
                {
                    "slot": row.slot,
                    "source": row.source,
                    "epoch": row.epoch,
                    "row": row.row,
                    **{key: value for key, value in asdict(document).items() if key not in {"text_xxh3", "version"}},
                    "excerpt": ""
                    if document.is_masked or document.is_erased
                    else _excerpt(tokenizer, index.readers[row.source_index], row, document),
                }
                for row, document in _first_documents(rows)
            ]
            num_documents = sum(len(row.documents) for row in rows)
            padding = sum(row.padding_tokens for row in rows)
            tokens = sum(row.num_tokens for row in rows)
            return {"step": step, "state": rows[0].state, "documents": found, "num_documents": num_documents,
                    "rows": len(rows), "tokens": tokens, "padding_tokens": padding}  # fmt: skip

    def steps(self, directory: Path, uri: str, ordinal: int | None) -> dict[str, Any]:
        """Return the steps of the run that train on a file, or on one of its documents."""
        with self._lock:
            listed = provenance_queries.when(self._index(directory), uri, ordinal=ordinal)
            found = [one for one in listed if one.state != "beyond"]
            rows = [asdict(one) for one in found[:_MAX_OCCURRENCES]]
            return {"uri": found[0].uri if found else uri, "ordinal": ordinal, "total": len(found), "steps": rows}

    def _tokenizer(self, directory: Path) -> Tokenizer | None:
        if directory not in self._tokenizers:
            try:
                self._tokenizers[directory] = load(RunLayout(directory).tokenizer)
            except VoroxError:
                self._tokenizers[directory] = None  # token ids have no text
        return self._tokenizers[directory]


def _first_documents(rows: tuple[RowOrigin, ...]) -> list[tuple[RowOrigin, DocumentOrigin]]:
    return [(row, document) for row in rows for document in row.documents][:_MAX_DOCUMENTS]


def _excerpt(tokenizer: Tokenizer | None, reader: SourceReader, row: RowOrigin, document: DocumentOrigin) -> str:
    tokens = cache_of(reader).read_rows(np.array([row.row], np.int64)).tokens_NC[0]
    length = min(document.num_tokens, _EXCERPT_TOKENS)
    ids = tokens[document.row_token : document.row_token + length].tolist()
    return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)


def _packed_fraction(cache: CacheReader) -> float | None:
    """Return the share of positions that are not padding, over evenly spaced rows."""
    count = min(_PACKING_ROWS, cache.num_rows)
    if not count:
        return None
    rows = (np.arange(count, dtype=np.int64) * 2 + 1) * cache.num_rows // (2 * count)
    lengths = sum(int(cache.read_rows(rows[at : at + 64]).segment_lengths.sum()) for at in range(0, count, 64))
    return min(1.0, lengths / (count * cache.row_tokens))


def _stages(index: RunDataIndex) -> list[dict[str, Any]]:
    names, sizes = [source.name for source in index.plan.sources], index.plan.start.batch_sizes
    return [
        {
            "step": sizes.step_at(stage.start_position) + 1,
            "weights": {
                names[number]: float(weight) / float(sum(stage.weights.values()))
                for number, weight in sorted(stage.weights.items())
            },
        }
        for stage in index.plan.stages
    ]


def _growth(index: RunDataIndex) -> list[dict[str, Any]]:
    """Return the segments of the plan: which rows of a source it made available, and from which draw on."""
    return [
        {
            "source": segment.source,
            "start_draw": segment.start_draw,
            "epoch": segment.epoch,
            "rows": segment.num_rows,
            "units": sum(part.end - part.start for part in segment.ranges),
        }
        for segments in index.plan.segments
        for segment in segments[:200]
    ]


def queue_names(series: MetricSeries) -> list[str]:
    """Return the metrics of queues, loader and build pipeline that a run has."""
    return [
        name
        for name in series.names
        if name in {"queue_depth", "data_wait_seconds", "epoch"} or (name.startswith("pipeline/") and "depth" in name)
    ]
