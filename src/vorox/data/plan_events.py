"""The events of a plan: a discriminated union, and the JSON form of each in ``plan.jsonl``.

``start`` fixes what a run never changes; ``segment`` gives a source more rows; ``source`` adds a source or changes its
limits; ``stage`` changes the mixture from a position on; ``cut`` takes back passes that no step has reached;
``horizon`` fixes the length of the run from a position on.

Invariant: an event is read only if it would be written back byte for byte. A field, kind or version that is not known
is refused, because skipping it would silently change the order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal, NamedTuple, cast

from pydantic import ConfigDict, Field, PlainSerializer, TypeAdapter, ValidationError, field_serializer, model_validator
from pydantic.dataclasses import dataclass
from pydantic.fields import computed_field

from vorox.core.atomic import canonical_json
from vorox.core.errors import DataError

Weight = Annotated[Fraction, PlainSerializer(lambda value: f"{value.numerator}/{value.denominator}")]
_CONFIG = ConfigDict(validate_by_name=True)


def _json_name(name: str) -> Any:
    """The name of a field in JSON."""
    return Field(validation_alias=name, serialization_alias=name)


def _omitted_if(default: object) -> Any:
    """Leave a field out of the JSON while it has its default, as versions did that lacked it."""
    return Field(exclude_if=lambda value: value == default)


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Bucket:
    """The chunks of a source whose statistic lies in ``[low, high)``.

    Attributes:
        source: The source that is divided.
        statistic: ``tokens_per_document`` or ``bytes_per_token``.
        low: Lower bound; ``None`` for the first bucket.
        high: Upper bound; ``None`` for the last.
    """

    source: Annotated[str, _json_name("of")]
    statistic: str
    low: Weight | None
    high: Weight | None


@dataclass(frozen=True, slots=True, config=_CONFIG)
class PlanSource:
    """One source of a run.

    Attributes:
        name: Its name, unique in the run.
        weight: Share of the rows at the start, up to a common factor; 0 for a source that later stages add.
        recipe_digest: Recipe of its cache.
        row_tokens: Tokens of a stored row: sequence length plus one.
        max_epochs: Passes over it that are allowed; ``None`` for any number.
        on_exhausted: What happens after the last of them: ``error``, ``drop`` or ``repeat``.
        bucket: Which chunks of a cache it consists of; ``None`` for all.
    """

    name: str
    weight: Weight
    recipe_digest: Annotated[str, _json_name("recipe")]
    row_tokens: int
    max_epochs: int | None = None
    on_exhausted: Annotated[str, _omitted_if("error")] = "error"
    bucket: Annotated[Bucket | None, _json_name("part"), _omitted_if(None)] = None

    @property
    def epoch_limit(self) -> int | None:
        """Passes after which it is used up; ``None`` if it never is."""
        return None if self.on_exhausted == "repeat" else self.max_epochs


@dataclass(frozen=True, slots=True)
class GrowthRule:
    """How segments are cut from caches that are still being built.

    Attributes:
        mode: ``strict``: ranges of units that are fixed in advance; ``elastic``: the units that are built when rows run
            short.
        first_segment_units: Units of a source's first segment (strict).
        max_segment_units: Each segment doubles the one before, up to this many units (strict).
        later_passes: Whether later passes are ``whole`` or in ``segments`` like the first, so that at most two of them
            are read at a time (strict).
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
        sources: The sources, in the configuration's order.
        growth: How growing caches are planned; ``None`` when they are complete before the first step.
        order: The permutation that shuffles rows (``data/permutation.py``).
        mixture: The mixing of sources (``data/mixture.py``).
    """

    seed: int
    shuffle: bool
    global_batch_sequences: int
    sources: tuple[PlanSource, ...]
    growth: Annotated[GrowthRule | None, _omitted_if(None)] = None
    kind: Literal["start"] = "start"
    format: Literal["plan/1"] = "plan/1"
    order: Literal["perm/1"] = "perm/1"
    mixture: Literal["mix/1"] = "mix/1"


class UnitRange(NamedTuple):
    """The units ``[start, end)`` and how many rows they have."""

    start: int
    end: int
    num_rows: int


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Segment:
    """Whole passes over some units of a source, or the part of a pass that is built so far.

    Attributes:
        source: Name of the source.
        start_draw: First draw of the source that it answers.
        epoch: Its first pass over the source.
        num_epochs: Passes that it holds, each in an order of its own.
        ranges: Its units, ascending.
        content_digest: Digest of those units' content.
    """

    source: str
    start_draw: int
    epoch: int
    num_epochs: int
    ranges: Annotated[tuple[UnitRange, ...], _json_name("units")]
    content_digest: Annotated[str, _json_name("content")]
    kind: Literal["segment"] = "segment"

    @model_validator(mode="before")
    @classmethod
    def _read_single_range(cls, value: Any) -> Any:
        """Read a single range as it is written: ``[start, end]``, with all of the segment's rows."""
        if not isinstance(value, dict):
            return value
        body = cast("dict[str, Any]", value)
        match body.get("units"):
            case [int(start), end]:
                return {**body, "units": [[start, end, body.get("num_rows")]]}
            case _:
                return body

    @field_serializer("ranges")
    def _write_single_range(self, ranges: Sequence[UnitRange]) -> list[Any]:
        return list(ranges[0][:2]) if len(ranges) == 1 else [list(part) for part in ranges]

    @computed_field
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
        """The pass after its last."""
        return self.epoch + self.num_epochs


@dataclass(frozen=True, slots=True)
class SourceEvent:
    """A source that the run did not have, or other limits for one that it has."""

    source: PlanSource
    kind: Literal["source"] = "source"


@dataclass(frozen=True, slots=True, config=_CONFIG)
class StageEvent:
    """A mixture from a position on, in place of everything planned from there.

    Attributes:
        start_position: First position; a multiple of the global batch.
        weights: Share of each source that is drawn, by name.
        row_pieces: Pieces that stored rows are cut into.
        reason: ``declared`` at the start, ``changed`` at a resume, ``exhausted`` when a source was used up.
        draw_counts: How often each source was drawn before, by name: where it continues. ``None`` until it is encoded.
        messages: What repeats and what is skipped, for people.
    """

    start_position: int
    weights: Mapping[str, Weight]
    row_pieces: int = 1
    reason: str = "declared"
    draw_counts: Annotated[Mapping[str, int] | None, _json_name("drawn")] = None
    messages: Annotated[tuple[str, ...], _json_name("says")] = ()
    kind: Literal["stage"] = "stage"


@dataclass(frozen=True, slots=True)
class Cut:
    """The passes from ``epoch`` on over a source are taken back before any step reaches them."""

    source: str
    epoch: int
    kind: Literal["cut"] = "cut"


@dataclass(frozen=True, slots=True)
class HorizonEvent:
    """The length of the run that the schedule uses from a position on, in place of every later one.

    Attributes:
        start_position: First position; a multiple of the global batch.
        total_steps: Steps of the whole run.
        warmup_steps: Steps over which the learning rate rises; ``None`` where an ``Extension`` gave the length.
    """

    start_position: int
    total_steps: int
    warmup_steps: int | None
    kind: Literal["horizon"] = "horizon"


@dataclass(frozen=True, slots=True)
class Extension:
    """Another length as earlier versions recorded it. Read, never written.

    Attributes:
        start_position: First position.
        before_steps: Steps of the whole run before it.
        total_steps: Steps of the whole run from it on.
    """

    start_position: int
    before_steps: int
    total_steps: int
    kind: Literal["extend"] = "extend"


PlanEvent = PlanStart | Segment | SourceEvent | StageEvent | Cut | HorizonEvent | Extension
_EVENT: TypeAdapter[PlanEvent] = TypeAdapter(Annotated[PlanEvent, Field(discriminator="kind")])


def encode_event(event: PlanEvent) -> dict[str, Any]:
    """Return an event as JSON."""
    return _EVENT.dump_python(event, mode="json", by_alias=True)


def decode_event(body: Mapping[str, Any], where: str) -> PlanEvent:
    """Read an event.

    Args:
        body: Its JSON.
        where: File and line, for errors.

    Raises:
        DataError: Its kind, a field or a value is not one that this version writes.
    """
    try:
        event = _EVENT.validate_python(body)
    except ValidationError as error:
        first = error.errors()[0]
        _, *names = first["loc"] or [None]  # the kind, then the fields from the event inwards
        if not names:
            raise _refused(f"is of kind {body.get('kind')!r}, which this version does not know", where) from None
        if first["type"] == "missing":
            raise _refused(f"({body['kind']}) has no field {names[-1]!r}", where) from None
        name = str(names[0])
        raise _refused(f"({body['kind']}) has {name} = {body[name]!r}: {first['msg']}", where) from None
    written = encode_event(event)
    for name in sorted({*body, *written}):
        if name not in written:
            raise _refused(f"({body['kind']}) has an unknown field {name!r}", where)
        if name not in body:
            raise _refused(f"({body['kind']}) has no field {name!r}", where)
        if canonical_json({name: body[name]}) != canonical_json({name: written[name]}):
            raise _refused(f"({body['kind']}) has {name} = {body[name]!r} instead of {written[name]!r}", where)
    return event


def _refused(reason: str, where: str) -> DataError:
    return DataError(
        f"an event of the plan {reason}", where=where, hint="continue the run with the version that wrote it"
    )


def combined_digest(digests: Sequence[str]) -> str:
    """Return the digest of several ranges of units; of one range, its own."""
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()
