"""The events of a plan.

``start`` fixes what a run never changes; ``segment`` gives a source more rows; ``source`` adds a source or changes its
limits; ``stage`` changes the mixture from a position on; ``cut`` takes back passes that no step has come to;
``horizon`` fixes the length of the run from a position on. ``plan_format`` writes and reads them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Part:
    """The chunks of a cache whose statistic lies in ``[low, high)``: a source by difficulty.

    Attributes:
        of: The source that is divided.
        statistic: ``tokens_per_document`` or ``bytes_per_token``.
        low: Lower bound; ``None`` for the first part.
        high: Upper bound; ``None`` for the last.
    """

    of: str
    statistic: str
    low: Fraction | None
    high: Fraction | None


@dataclass(frozen=True, slots=True)
class PlanSource:
    """One source of a run.

    Attributes:
        name: Its name, unique in the run.
        weight: Share of the rows at the start, up to a common factor; 0 for a source that later stages bring in.
        recipe_digest: Recipe of its cache.
        row_tokens: Tokens of a stored row: sequence length plus one.
        max_epochs: Passes over it that are allowed; None for any number.
        on_exhausted: What happens when they are used up: ``error``, ``drop`` or ``repeat``.
        part: Which chunks of a cache it is, if not all.
    """

    name: str
    weight: Fraction
    recipe_digest: str
    row_tokens: int
    max_epochs: int | None = None
    on_exhausted: str = "error"
    part: Part | None = None


@dataclass(frozen=True, slots=True)
class GrowthRule:
    """How segments are cut from caches that are still being built.

    Attributes:
        mode: ``strict``: ranges of units that are fixed in advance; ``elastic``: whatever is there when it is needed.
        first_segment_units: Units of a source's first segment (strict).
        max_segment_units: Each segment doubles the one before, up to this (strict).
        later_passes: Whether later passes are ``whole`` or in ``segments`` like the first, so that never more than two
            of them are read at a time (strict).
    """

    mode: str
    first_segment_units: int = 1
    max_segment_units: int = 64
    later_passes: str = "whole"


@dataclass(frozen=True, slots=True)
class PlanStart:
    """What a run fixes before its first step.

    Attributes:
        seed: Seed of the data order.
        shuffle: Whether rows are permuted; if not, sources are read in stored order.
        global_batch_sequences: Rows of a step, over all processes.
        sources: In the configuration's order.
        growth: How growing caches are taken up; ``None`` when they are complete before the first step.
    """

    seed: int
    shuffle: bool
    global_batch_sequences: int
    sources: tuple[PlanSource, ...]
    growth: GrowthRule | None = None


@dataclass(frozen=True, slots=True)
class UnitRange:
    """The units ``[start, end)`` and how many rows they have."""

    start: int
    end: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Whole epochs over some units of a source, or the part of an epoch that has come to be by now.

    Attributes:
        source_index: The source, in the plan's order.
        start_draw: First draw of the source that it answers.
        epoch: Its first pass over the source.
        num_epochs: Passes that it holds, each in an order of its own.
        ranges: Its units, ascending.
        content_digest: Digest of those units' content.
    """

    source_index: int
    start_draw: int
    epoch: int
    num_epochs: int
    ranges: tuple[UnitRange, ...]
    content_digest: str

    @property
    def num_rows(self) -> int:
        """Rows of one pass."""
        return sum(part.num_rows for part in self.ranges)

    @property
    def end_draw(self) -> int:
        """The draw after its last."""
        return self.start_draw + self.num_epochs * self.num_rows

    @property
    def next_epoch(self) -> int:
        return self.epoch + self.num_epochs


@dataclass(frozen=True, slots=True)
class StageEvent:
    """A mixture from a position on, in place of whatever was planned from there.

    Attributes:
        start_position: First position; a multiple of the global batch.
        weights: Share of each source that is drawn, by name.
        row_pieces: Pieces that stored rows are cut into.
        reason: ``declared`` at the start, ``changed`` at a resume, ``exhausted`` when a source was used up.
        drawn: How often each source was drawn before, by name: where it goes on.
        says: What repeats and what is skipped, for people.
    """

    start_position: int
    weights: Mapping[str, Fraction]
    row_pieces: int = 1
    reason: str = "declared"
    drawn: Mapping[str, int] | None = None
    says: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """Passes from ``epoch`` on over a source are taken back, because the cache grew before any step came to them."""

    source: str
    epoch: int


@dataclass(frozen=True, slots=True)
class HorizonEvent:
    """The length of the run that the schedule knows from a position on, in place of whatever was planned from there.

    Attributes:
        start_position: First position; a multiple of the global batch.
        total_steps: Steps of the whole run.
        warmup_steps: Steps over which the learning rate rises; ``None`` in plans of earlier versions, which do not
            record it.
    """

    start_position: int
    total_steps: int
    warmup_steps: int | None


@dataclass(frozen=True, slots=True)
class Extension:
    """How earlier versions recorded another length: ``total_steps`` from ``start_position`` on, before it
    ``before_steps``. Read, never written.
    """

    start_position: int
    before_steps: int
    total_steps: int


def combined_digest(digests: Sequence[str]) -> str:
    """The digest of several ranges of units: of one range, its own."""
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()
