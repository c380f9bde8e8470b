"""The events of a plan: a discriminated union, and its JSON form in ``plan.jsonl``.

``start`` records settings that never change during a run; ``segment`` gives a source more rows; ``source`` adds a
source or changes its limits; ``stage`` changes the mixture from a position onwards; ``cut`` removes passes that no step
has reached; ``horizon`` sets the length of the run from a position onwards; ``skip`` names a step whose update
was not applied, ``rollback`` steps that are skipped after a return to an earlier state; ``mask`` names documents whose
tokens are a filler, and no targets, from a position onwards. ``PlanState.apply`` applies an event.

In JSON an event has every field of its class, by its name; a weight is ``"numerator/denominator"``. Invariant: reading
an event and writing it again gives the same bytes. Unknown fields, kinds and versions are refused, because skipping
them would silently change the order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PlainSerializer, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from vorox.core.batch_sizes import BatchSizes, BatchStage, batch_sizes
from vorox.core.errors import DataError
from vorox.core.files.atomic import canonical_json

Weight = Annotated[Fraction, PlainSerializer(lambda value: f"{value.numerator}/{value.denominator}")]
FORMAT = "plan/2"


@dataclass(frozen=True, slots=True)
class Bucket:
    """The chunks of a source whose statistic is in ``[low, high)``.

    Attributes:
        source: The source that is split.
        statistic: ``tokens_per_document`` or ``bytes_per_token``.
        low: Lower bound; ``None`` for the first bucket.
        high: Upper bound; ``None`` for the last bucket.
    """

    source: str
    statistic: str
    low: Weight | None
    high: Weight | None


@dataclass(frozen=True, slots=True)
class PlanSource:
    """One source of a run.

    Attributes:
        name: Name, unique in the run.
        weight: Weight at the start, up to a common factor; 0 for a source that a later stage adds.
        recipe_digest: Recipe of its cache.
        row_tokens: Tokens of a stored row: sequence length plus one.
        max_epochs: Maximum number of passes over the source; ``None`` for no limit.
        on_exhausted: Policy after the last pass: ``error``, ``drop`` or ``repeat``.
        bucket: The chunks of the cache that make up the source; ``None`` for all.
    """

    name: str
    weight: Weight
    recipe_digest: str
    row_tokens: int
    max_epochs: int | None = None
    on_exhausted: str = "error"
    bucket: Bucket | None = None

    @property
    def configured_name(self) -> str:
        """The source of the configuration whose cache has these rows."""
        return self.name if self.bucket is None else self.bucket.source

    @property
    def epoch_limit(self) -> int | None:
        """Number of passes after which the source is exhausted; ``None`` if it never is."""
        return None if self.on_exhausted == "repeat" else self.max_epochs


@dataclass(frozen=True, slots=True)
class GrowthRule:
    """How segments are formed from caches that are still being built.

    Attributes:
        mode: ``strict``: ranges of units that are fixed in advance; ``elastic``: the units built by the time rows run
            short.
        first_segment_units: Units in a source's first segment (strict).
        max_segment_units: Each segment is twice as long as the one before, up to this many units (strict).
        later_passes: Whether later passes are ``whole`` or split into ``segments`` like the first, so that at most two
            segments are read at a time (strict).
    """

    mode: str
    first_segment_units: int = 1
    max_segment_units: int = 64
    later_passes: str = "whole"


@dataclass(frozen=True, slots=True)
class PlanStart:
    """The settings of a run's data order, fixed before its first step.

    Attributes:
        seed: Seed of the data order.
        shuffle: Whether rows are permuted; otherwise sources are read in stored order.
        global_batch_sequences: Rows per step, over all ranks, before the first of ``batch_stages``.
        sources: The sources, in the configuration's order.
        growth: How growing caches are planned; ``None`` if caches are complete before the first step.
        batch_stages: Later stages of the batch size.
        order: Version of the permutation that shuffles rows (``data/permutation.py``).
        mixture: Version of the mixing of sources (``data/order/mixture.py``).
    """

    seed: int
    shuffle: bool
    global_batch_sequences: int
    sources: tuple[PlanSource, ...]
    growth: GrowthRule | None = None
    batch_stages: tuple[BatchStage, ...] = ()
    kind: Literal["start"] = "start"
    format: Literal["plan/2"] = FORMAT
    order: Literal["perm/1"] = "perm/1"
    mixture: Literal["mix/1"] = "mix/1"

    @property
    def batch_sizes(self) -> BatchSizes:
        """The rows of every step."""
        return batch_sizes(self.global_batch_sequences, self.batch_stages)


class UnitRange(NamedTuple):
    """The units ``[start, end)`` and their number of rows."""

    start: int
    end: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Whole passes over some units of a source, or the part of a pass that is built so far.

    Attributes:
        source: Name of the source.
        start_draw: First draw of the source that the segment covers.
        epoch: First pass over the source.
        num_epochs: Number of passes, each with its own order.
        ranges: The units, ascending.
        content_digest: Digest of the units' content.
    """

    source: str
    start_draw: int
    epoch: int
    num_epochs: int
    ranges: tuple[UnitRange, ...]
    content_digest: str
    kind: Literal["segment"] = "segment"

    @property
    def num_rows(self) -> int:
        """Rows of one pass."""
        return sum(part.num_rows for part in self.ranges)

    @property
    def end_draw(self) -> int:
        """The draw after the segment's last."""
        return self.start_draw + self.num_epochs * self.num_rows

    @property
    def next_epoch(self) -> int:
        """The pass after the segment's last."""
        return self.epoch + self.num_epochs


@dataclass(frozen=True, slots=True)
class SourceEvent:
    """A new source, or new limits of an existing one."""

    source: PlanSource
    kind: Literal["source"] = "source"


@dataclass(frozen=True, slots=True)
class MixtureStageEvent:
    """The mixture that applies from a position onwards; it replaces all later stages.

    Attributes:
        start_position: First position; a multiple of the global batch.
        weights: Weight of each sampled source, by name.
        row_pieces: Number of pieces that stored rows are split into.
        reason: ``declared`` at the start, ``changed`` by a resume, ``exhausted`` when a source ran out.
        draw_counts: Number of earlier draws per source, by name: where each continues. ``None`` until encoded.
        messages: What is repeated and what is skipped, for the log.
    """

    start_position: int
    weights: Mapping[str, Weight]
    row_pieces: int = 1
    reason: str = "declared"
    draw_counts: Mapping[str, int] | None = None
    messages: tuple[str, ...] = ()
    kind: Literal["stage"] = "stage"


@dataclass(frozen=True, slots=True)
class CutEvent:
    """Removal of a source's passes from ``epoch`` on, before any step reaches them."""

    source: str
    epoch: int
    kind: Literal["cut"] = "cut"


@dataclass(frozen=True, slots=True)
class HorizonEvent:
    """The length of the run from a position onwards; it replaces all later ones.

    Attributes:
        start_position: First position; a multiple of the global batch.
        total_steps: Steps of the whole run.
        warmup_steps: Warm-up steps of the learning rate.
    """

    start_position: int
    total_steps: int
    warmup_steps: int
    kind: Literal["horizon"] = "horizon"


@dataclass(frozen=True, slots=True)
class SkipEvent:
    """A step whose rows were read and whose update was not applied; it moves no row.

    Attributes:
        start_position: Its first position; a multiple of the global batch.
        reason: ``loss_spike``; ``withdrawn`` if a later attempt repeated the step and applied its update.
        loss: Its loss.
        max_loss: The largest loss whose update was applied; ``None`` if there was no limit.
    """

    start_position: int
    reason: Literal["loss_spike", "withdrawn"]
    loss: float
    max_loss: float | None
    kind: Literal["skip"] = "skip"


@dataclass(frozen=True, slots=True)
class RollbackEvent:
    """Steps whose rows are read and whose updates are not applied, because they led to a loss spike; it moves no row.

    Attributes:
        start_position: First position of the first step; a multiple of the global batch.
        end_position: First position after the last step, the spike.
        loss: Loss of the spike.
        max_loss: The limit that it was above.
        state_position: Position of the state that the run returned to.
    """

    start_position: int
    end_position: int
    loss: float
    max_loss: float
    state_position: int
    kind: Literal["rollback"] = "rollback"


@dataclass(frozen=True, slots=True)
class MaskedDocument:
    """A document of a run, by what stays when its cache is shared with other runs, grows or moves.

    Attributes:
        source: Name of its source in the configuration; of difficulty buckets, that of the source that is split.
        file_version: Identifier of the content of its file (``SourceFile.version``).
        ordinal: Index of its record in the file, from 0; all texts that transforms made of the record are meant.
    """

    source: str
    file_version: str
    ordinal: int


@dataclass(frozen=True, slots=True)
class MaskEvent:
    """Documents whose tokens are a filler, and no targets, from a position onwards; it moves no row.

    Attributes:
        start_position: First position; a multiple of the global batch.
        documents: The documents.
    """

    start_position: int
    documents: tuple[MaskedDocument, ...]
    kind: Literal["mask"] = "mask"


PlanEvent = (
    PlanStart
    | Segment
    | SourceEvent
    | MixtureStageEvent
    | CutEvent
    | HorizonEvent
    | SkipEvent
    | RollbackEvent
    | MaskEvent
)
_EVENT: TypeAdapter[PlanEvent] = TypeAdapter(Annotated[PlanEvent, Field(discriminator="kind")])


def encode_event(event: PlanEvent) -> dict[str, Any]:
    """Return an event as JSON."""
    return _EVENT.dump_python(event, mode="json")


def decode_event(body: Mapping[str, Any], where: str) -> PlanEvent:
    """Read an event.

    Args:
        body: Its JSON.
        where: File and line, for errors.

    Raises:
        DataError: This version does not know the event's kind, a field or a value.
    """
    try:
        event = _EVENT.validate_python(body)
    except ValidationError as error:
        first = error.errors()[0]
        _, *names = first["loc"] or [None]  # the kind, then the fields from the outermost inwards
        if not names:
            raise _invalid(f"is of kind {body.get('kind')!r}, which this version does not know", where) from None
        if first["type"] == "missing":
            raise _invalid(f"({body['kind']}) has no field {names[-1]!r}", where) from None
        name = str(names[0])
        raise _invalid(f"({body['kind']}) has {name} = {body[name]!r}: {first['msg']}", where) from None
    written = encode_event(event)
    for name in sorted({*body, *written}):
        if name not in written:
            raise _invalid(f"({body['kind']}) has an unknown field {name!r}", where)
        if name not in body:
            raise _invalid(f"({body['kind']}) has no field {name!r}", where)
        if canonical_json({name: body[name]}) != canonical_json({name: written[name]}):
            raise _invalid(f"({body['kind']}) has {name} = {body[name]!r} instead of {written[name]!r}", where)
    return event


def _invalid(reason: str, where: str) -> DataError:
    return DataError(
        f"A data plan event {reason}", where=where, hint="continue the run with the Vorox version that wrote it"
    )


def combined_digest(digests: Sequence[str]) -> str:
    """Return the combined digest of several ranges of units; a single digest is returned unchanged."""
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()
