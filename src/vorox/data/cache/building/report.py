"""Progress of preparing a corpus and building its caches, and the final report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vorox.core.files.chained_log import HashChainedLog, LogPosition
from vorox.data.cache.files.manifest import LOG_NAME, Manifest
from vorox.data.cache.pipeline.statistics import BuildStatistics
from vorox.data.documents import Unit
from vorox.data.transforms.apply import Counts, TransformCount

_DEFAULT_CACHE_BYTES_PER_TEXT_BYTE = 0.4

PrepareProgress = Callable[[str, int, int, Mapping[str, float]], None]
"""Callback for progress: (phase, done, total, rates), in bytes of text. Phases: ``list NAME``, ``tokenizer``,
``check NAME train`` (in bytes of the cache), ``compare NAME train`` (search for duplicates), ``build NAME train``,
``build NAME validation``, and ``wait NAME train`` while other processes build the rest. Rates while building:
``text_mb_per_second``, ``tokens_per_second``, ``documents_per_second``, ``chunks``, ``utilisation_fraction``,
``ratio_to_uint32``, ``ratio_to_uint16``."""


def report_nothing(phase: str, done: int, total: int, rates: Mapping[str, float]) -> None:
    """A ``PrepareProgress`` without effect."""
    del phase, done, total, rates


class _SizeRatios:
    """Ratios of rows and chunk file sizes; subclasses define the fields."""

    __slots__ = ()
    rows: int
    row_tokens: int
    padding_tokens: int
    compressed_bytes: int

    @property
    def utilisation_fraction(self) -> float:
        """Fraction of the row positions that is not padding."""
        return 1 - self.padding_tokens / max(self.rows * self.row_tokens, 1)

    @property
    def ratio_to_uint16(self) -> float:
        """Size of the chunk files relative to the same rows as uint16."""
        return self.compressed_bytes / max(2 * self.rows * self.row_tokens, 1)

    @property
    def ratio_to_uint32(self) -> float:
        """Size of the chunk files relative to the same rows as uint32."""
        return self.ratio_to_uint16 / 2


@dataclass(frozen=True, slots=True)
class BuildProgress(_SizeRatios):
    """Progress of a build.

    Attributes:
        units_done: Units done, including those of other builders and earlier builds.
        units: Units planned.
        documents: Documents tokenised by this build so far, by all of its workers.
        text_bytes: UTF-8 bytes of their texts.
        tokens: Their tokens.
        waiting_for: The builder of the remaining units, while this build waits for it; else empty.
        source_bytes_done: Source bytes of the units done.
        source_bytes: Source bytes of all units.
        chunks: Chunk files committed.
        rows: Their rows.
        row_tokens: Tokens of a row.
        padding_tokens: Padding positions in the rows.
        compressed_bytes: Size of the chunk files.
        compared_bytes: Source bytes searched for duplicates; 0 outside that search.
        stages: Counters of this process's pipeline; None before it starts, and for builders in other processes.
    """

    units_done: int
    units: int
    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    waiting_for: str = ""
    source_bytes_done: int = 0
    source_bytes: int = 0
    chunks: int = 0
    rows: int = 0
    row_tokens: int = 0
    padding_tokens: int = 0
    compressed_bytes: int = 0
    compared_bytes: int = 0
    stages: BuildStatistics | None = None


OnProgress = Callable[[BuildProgress], None]


@dataclass(frozen=True, slots=True)
class BuildReport(_SizeRatios):
    """The content of a cache, and this build's share of it.

    Attributes:
        digest: Dataset digest.
        documents: Documents in the cache.
        text_bytes: UTF-8 bytes of their texts.
        tokens: Their tokens including end-of-text tokens, each counted once.
        targets: Tokens of the rows that are trained on.
        rows: Packed rows.
        row_tokens: Tokens of a row.
        padding_tokens: Padding positions in the rows.
        compressed_bytes: Size of all chunk files.
        quarantined: Quarantined records.
        units: Units of the cache.
        units_built: Units built by this build.
        units_adopted: Units that this build found complete on disk, written by a build that was killed.
        built_text_bytes: Text bytes tokenised by this build.
        seconds: Duration of this build.
        chunks: Chunk files of the cache.
        units_missing: Planned units that are not built: in progress elsewhere, or left by a build that was stopped.
        stages: Counters of this process's pipeline; None if nothing was built in this process.
        transforms: Counts of each transform over the units of the cache, by its index and name: ``0/length``.
            Adopted units are not counted.
    """

    digest: str
    documents: int
    text_bytes: int
    tokens: int
    targets: int
    rows: int
    row_tokens: int
    padding_tokens: int
    compressed_bytes: int
    quarantined: int
    units: int
    units_built: int
    units_adopted: int
    built_text_bytes: int
    seconds: float
    chunks: int
    units_missing: int
    stages: BuildStatistics | None = None
    transforms: Mapping[str, TransformCount] = field(default_factory=dict[str, TransformCount])


def _total(records: npt.NDArray[np.void], name: str) -> int:
    return int(records[name].sum(dtype=np.int64))


class ProgressTracker:
    """The progress of one scheduler, reported whenever it changes.

    Args:
        units: The planned units; an append-only list is allowed.
        row_tokens: Tokens of a row.
        on_progress: Called with every new state.

    Attributes:
        progress: The latest state.
    """

    def __init__(self, units: Sequence[Unit], row_tokens: int, on_progress: OnProgress | None) -> None:
        self._units, self._on_progress = units, on_progress
        self._sizes_U = _source_bytes(units)
        self._generation = -1
        self._uncommitted_bytes = self._uncommitted_text_bytes = 0
        self.progress = BuildProgress(
            0, len(units), source_bytes=int(self._sizes_U.sum()), row_tokens=row_tokens
        )  # fmt: skip

    def update(self, **changes: int | str) -> None:
        """Change fields of the progress and report it."""
        self.progress = replace(self.progress, **changes)
        if self._on_progress is not None:
            self._on_progress(self.progress)

    def set_stages(self, statistics: BuildStatistics) -> None:
        """Set the counters of the pipeline, which the next report includes."""
        self.progress = replace(self.progress, stages=statistics)

    def add_documents(self, documents: int, text_bytes: int, tokens: int) -> None:
        """Count documents that were tokenised."""
        before = self.progress
        self.update(
            documents=before.documents + documents,
            text_bytes=before.text_bytes + text_bytes,
            tokens=before.tokens + tokens,
        )

    def add_unit(self, unit: int, size_bytes: int) -> None:
        """Count a unit that is about to be written and committed."""
        self._uncommitted_bytes, self._uncommitted_text_bytes = size_bytes, int(self._unit_bytes()[unit])

    @property
    def needed_bytes(self) -> int:
        """Size of the chunk files of all units that are not committed, estimated from those of all builders."""
        progress = self.progress
        built_bytes = progress.compressed_bytes + self._uncommitted_bytes
        text_bytes = progress.source_bytes_done + self._uncommitted_text_bytes
        ratio = built_bytes / text_bytes if text_bytes else _DEFAULT_CACHE_BYTES_PER_TEXT_BYTE
        return round(ratio * (progress.source_bytes - progress.source_bytes_done))

    def observe(self, manifest: Manifest) -> None:
        """Report what is committed, if that has changed."""
        if manifest.generation == self._generation:
            return
        self._generation = manifest.generation
        self._uncommitted_bytes = self._uncommitted_text_bytes = 0
        sizes_U = self._unit_bytes()
        units = manifest.units["unit"].astype(np.int64)
        self.update(
            waiting_for="",
            units_done=int(np.count_nonzero(units < len(sizes_U))),
            source_bytes_done=int(sizes_U[units[units < len(sizes_U)]].sum()),
            chunks=len(manifest.chunks),
            rows=manifest.num_rows,
            padding_tokens=_total(manifest.chunks, "padding_tokens"),
            compressed_bytes=_total(manifest.chunks, "size_bytes"),
        )

    def _unit_bytes(self) -> npt.NDArray[np.int64]:
        """Return the source bytes of every unit known so far."""
        if len(self._sizes_U) < len(self._units):
            self._sizes_U = np.append(self._sizes_U, _source_bytes(self._units[len(self._sizes_U) :]))
            self.progress = replace(self.progress, units=len(self._units), source_bytes=int(self._sizes_U.sum()))
        return self._sizes_U

    @contextlib.contextmanager
    def silenced(self) -> Generator[None]:
        """Suppress reports: the cache is built alongside another one."""
        on_progress, self._on_progress = self._on_progress, None
        try:
            yield
        finally:
            self._on_progress = on_progress


def _source_bytes(units: Collection[Unit]) -> npt.NDArray[np.int64]:
    """Return the bytes of source text of each unit."""
    return np.array([unit.size_bytes for unit in units], np.int64)


def bytes_reporter(report: PrepareProgress, name: str) -> Callable[[BuildProgress], None]:
    """Return a callback that reports build progress in bytes of text, which is finer than units."""
    started = time.perf_counter()
    done = text_bytes = 0

    def on_progress(progress: BuildProgress) -> None:
        nonlocal done, text_bytes
        if progress.compared_bytes:
            report(f"compare {name}", progress.compared_bytes, progress.source_bytes, {})
            return
        done = max(progress.source_bytes_done, done + progress.text_bytes - text_bytes)
        done, text_bytes = min(done, progress.source_bytes), progress.text_bytes
        seconds = max(time.perf_counter() - started, 1e-9)
        rates = {
            "text_mb_per_second": progress.text_bytes / 1e6 / seconds,
            "tokens_per_second": progress.tokens / seconds,
            "documents_per_second": progress.documents / seconds,
        }
        if progress.chunks:
            rates["chunks"] = progress.chunks
            rates["utilisation_fraction"] = progress.utilisation_fraction
            rates["ratio_to_uint32"] = progress.ratio_to_uint32
            rates["ratio_to_uint16"] = progress.ratio_to_uint16
        report(f"wait {name}" if progress.waiting_for else f"build {name}", done, progress.source_bytes, rates)

    return on_progress


def transform_counts(directory: Path) -> Counts:
    """Return the counts of each transform over all committed units of a cache."""
    bodies, _ = HashChainedLog(directory / LOG_NAME).read_after(LogPosition())
    units: dict[int, dict[str, list[int]]] = {}
    for done in (done for body in bodies for done in body.get("done", ())):
        if "transforms" in done:
            units[done["unit"]] = done["transforms"]
    total: Counts = {}
    for counts in units.values():
        for name, values in counts.items():
            total[name] = total.get(name, TransformCount()) + TransformCount(*values)
    return total


def build_report(
    manifest: Manifest,
    row_tokens: int,
    *,
    units_built: int = 0,
    units_adopted: int = 0,
    built_text_bytes: int = 0,
    seconds: float = 0.0,
    stages: BuildStatistics | None = None,
    transforms: Mapping[str, TransformCount] | None = None,
) -> BuildReport:
    """Return the report of a cache at the state of ``manifest``, and of the units that this build contributed."""
    return BuildReport(
        digest=manifest.content_digest(0, manifest.planned_units),
        documents=_total(manifest.units, "documents"),
        text_bytes=_total(manifest.units, "text_bytes"),
        tokens=_total(manifest.units, "tokens"),
        rows=manifest.num_rows,
        row_tokens=row_tokens,
        padding_tokens=_total(manifest.chunks, "padding_tokens"),
        compressed_bytes=_total(manifest.chunks, "size_bytes"),
        quarantined=_total(manifest.units, "quarantined"),
        targets=_total(manifest.units, "targets"),
        units=manifest.planned_units,
        units_built=units_built,
        units_adopted=units_adopted,
        built_text_bytes=built_text_bytes,
        seconds=seconds,
        chunks=len(manifest.chunks),
        units_missing=manifest.planned_units - len(manifest.units),
        stages=stages,
        transforms=dict(transforms or {}),
    )
