"""What a build tells while it runs, and what it says at the end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vorox.data.cache.manifest import Manifest


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """How far a build is.

    Attributes:
        units_done: Units done, those of earlier builds included.
        units: Units planned.
        documents: Documents that this build tokenised so far.
        text_bytes: UTF-8 bytes of their texts.
        tokens: Their tokens.
        waiting_for: Who builds this cache already, while this build waits for it; empty otherwise.
    """

    units_done: int
    units: int
    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    waiting_for: str = ""


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a complete cache holds, and what this build did for it.

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

    @property
    def utilisation_fraction(self) -> float:
        """Share of the rows that is not padding."""
        return 1 - self.padding_tokens / (self.rows * self.row_tokens)

    @property
    def ratio_to_uint16(self) -> float:
        """Size of the chunk files over that of the same rows as plain 16-bit numbers."""
        return self.compressed_bytes / (2 * self.rows * self.row_tokens)

    @property
    def ratio_to_uint32(self) -> float:
        """The same for 32-bit numbers."""
        return self.ratio_to_uint16 / 2

    @property
    def megabytes_per_second(self) -> float:
        """Text tokenised, packed and committed by this build per second."""
        return self.built_text_bytes / 1e6 / self.seconds


def build_report(
    manifest: Manifest,
    row_tokens: int,
    *,
    units_built: int,
    units_adopted: int,
    built_text_bytes: int,
    seconds: float,
) -> BuildReport:
    """The report on a cache in the state of ``manifest``."""

    def total(records: np.ndarray, name: str) -> int:
        return int(records[name].sum(dtype=np.int64))

    return BuildReport(
        digest=manifest.content_digest(0, manifest.planned_units),
        documents=total(manifest.units, "documents"),
        text_bytes=total(manifest.units, "text_bytes"),
        tokens=total(manifest.units, "tokens"),
        rows=manifest.num_rows,
        row_tokens=row_tokens,
        padding_tokens=total(manifest.chunks, "padding_tokens"),
        compressed_bytes=total(manifest.chunks, "size_bytes"),
        quarantined=total(manifest.units, "quarantined"),
        units=manifest.planned_units,
        units_built=units_built,
        units_adopted=units_adopted,
        built_text_bytes=built_text_bytes,
        seconds=seconds,
    )
