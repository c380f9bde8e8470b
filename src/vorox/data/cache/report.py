"""What a build tells while it runs, and what it says at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vorox.core.chained_log import HashChainedLog, LogPosition
from vorox.data.cache.manifest import LOG_NAME, Manifest
from vorox.data.pipeline.pipeline import PipelineStatistics
from vorox.data.transforms.apply import Counts, TransformCount, add_counts


class _Sizes:
    """What rows and chunk files come to; the figures are fields of whoever inherits."""

    __slots__ = ()
    rows: int
    row_tokens: int
    padding_tokens: int
    compressed_bytes: int

    @property
    def utilisation_fraction(self) -> float:
        """Share of the rows that is not padding."""
        return 1 - self.padding_tokens / max(self.rows * self.row_tokens, 1)

    @property
    def ratio_to_uint16(self) -> float:
        """Size of the chunk files over that of the same rows as plain 16-bit numbers."""
        return self.compressed_bytes / max(2 * self.rows * self.row_tokens, 1)

    @property
    def ratio_to_uint32(self) -> float:
        """The same for 32-bit numbers."""
        return self.ratio_to_uint16 / 2


@dataclass(frozen=True, slots=True)
class BuildProgress(_Sizes):
    """How far a build is.

    Attributes:
        units_done: Units done, those of other builders and of earlier builds included.
        units: Units planned.
        documents: Documents that this build tokenised so far, all its workers together.
        text_bytes: UTF-8 bytes of their texts.
        tokens: Their tokens.
        waiting_for: Who builds what is left, while this build waits for it; empty otherwise.
        source_bytes_done: Bytes of the source that the units done are made of.
        source_bytes: Bytes of the source that all units are made of.
        chunks: Chunk files committed.
        rows: Their rows.
        row_tokens: Tokens of a row.
        padding_tokens: Positions of the rows that hold no token.
        compressed_bytes: Size of the chunk files.
        compared_bytes: Bytes of the source in which duplicates were looked for; 0 except while they are.
        stages: How the stages of this process get on; None before they do, and for builders in other processes.
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
    stages: PipelineStatistics | None = None


@dataclass(frozen=True, slots=True)
class BuildReport(_Sizes):
    """What a cache holds, and what this build did for it.

    Attributes:
        digest: Dataset digest.
        documents: Documents in the cache.
        text_bytes: UTF-8 bytes of their texts.
        tokens: Their tokens, ends of text included, none counted twice.
        rows: Packed rows.
        row_tokens: Tokens of a row.
        padding_tokens: Positions of the rows that hold no token.
        compressed_bytes: Size of all chunk files.
        quarantined: Records put aside.
        units: Units of the cache.
        units_built: Units that this build made.
        units_adopted: Units that this build found complete on disk, left by one that was killed.
        built_text_bytes: Text that this build tokenised.
        seconds: What this build took.
        chunks: Chunk files of the cache.
        units_missing: Units that are planned and not built: another builder's, or left by one that was stopped.
        stages: How the stages of this process got on; None where nothing was built in it.
        transforms: What each transform did to the units of the cache, by its place in the list and its name:
            ``0/length``. Of units that were adopted nothing is known.
    """

    digest: str
    documents: int
    text_bytes: int
    tokens: int
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
    stages: PipelineStatistics | None = None
    transforms: Mapping[str, TransformCount] = field(default_factory=dict[str, TransformCount])

    @property
    def megabytes_per_second(self) -> float:
        """Text tokenised, packed and committed by this build per second."""
        return self.built_text_bytes / 1e6 / max(self.seconds, 1e-9)


def _total(records: npt.NDArray[np.void], name: str) -> int:
    return int(records[name].sum(dtype=np.int64))


def committed(manifest: Manifest, source_bytes_U: npt.NDArray[np.int64]) -> dict[str, int]:
    """The fields of ``BuildProgress`` that the manifest decides; ``source_bytes_U`` has the size of each unit."""
    units = manifest.units["unit"].astype(np.int64)
    return {
        "units_done": int(np.count_nonzero(units < len(source_bytes_U))),
        "source_bytes_done": int(source_bytes_U[units[units < len(source_bytes_U)]].sum()),
        "chunks": len(manifest.chunks),
        "rows": manifest.num_rows,
        "padding_tokens": _total(manifest.chunks, "padding_tokens"),
        "compressed_bytes": _total(manifest.chunks, "size_bytes"),
    }


def transform_counts(directory: Path) -> Counts:
    """What each transform did to the units of a cache, whoever built them."""
    bodies, _ = HashChainedLog(directory / LOG_NAME).read_after(LogPosition())
    units: dict[int, dict[str, list[int]]] = {}
    for done in (done for body in bodies for done in body.get("done", ())):
        if "transforms" in done:
            units[done["unit"]] = done["transforms"]
    total: Counts = {}
    for counts in units.values():
        add_counts(total, {name: TransformCount(*values) for name, values in counts.items()})
    return total


def build_report(
    manifest: Manifest,
    row_tokens: int,
    *,
    units_built: int,
    units_adopted: int,
    built_text_bytes: int,
    seconds: float,
    stages: PipelineStatistics | None = None,
    transforms: Mapping[str, TransformCount] | None = None,
) -> BuildReport:
    """The report on a cache in the state of ``manifest``."""
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
