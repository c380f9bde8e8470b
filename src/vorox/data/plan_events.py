"""The events of a plan and how they are written: the format of ``plan.jsonl``.

Events are JSON objects with exactly the fields below; an unknown kind, field or version is refused, because skipping
it would silently give another order. Durability and chaining are the log's business (``core/atomic.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from vorox.core.errors import ConfigError, DataError
from vorox.data import mixture, order

FORMAT = "plan/1"


@dataclass(frozen=True, slots=True)
class PlanSource:
    """One source of a run.

    Attributes:
        name: Its name, unique in the run.
        weight: Share of the rows, up to a common factor.
        recipe_digest: Recipe of its cache.
        row_tokens: Tokens of a stored row: sequence length plus one.
        max_epochs: Passes over it that are allowed; None for any number.
    """

    name: str
    weight: Fraction
    recipe_digest: str
    row_tokens: int
    max_epochs: int | None = None


@dataclass(frozen=True, slots=True)
class PlanStart:
    """What a run fixes before its first step.

    Attributes:
        seed: Seed of the data order.
        shuffle: Whether rows are permuted; if not, sources are read in stored order.
        global_batch_sequences: Rows of a step, over all processes.
        sources: In the configuration's order.
    """

    seed: int
    shuffle: bool
    global_batch_sequences: int
    sources: tuple[PlanSource, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """Whole epochs over a range of a source's units.

    Attributes:
        source_index: The source, in the start's order.
        start_draw: First draw of the source that it answers.
        epoch: Its first pass over the source.
        num_epochs: Passes that it holds, each in an order of its own.
        unit_start: First unit.
        unit_end: Unit after the last.
        num_rows: Rows of those units.
        content_digest: Digest of those units' content.
    """

    source_index: int
    start_draw: int
    epoch: int
    num_epochs: int
    unit_start: int
    unit_end: int
    num_rows: int
    content_digest: str

    @property
    def end_draw(self) -> int:
        """The draw after its last."""
        return self.start_draw + self.num_epochs * self.num_rows


def encode_start(start: PlanStart) -> dict[str, Any]:
    return {
        "kind": "start",
        "format": FORMAT,
        "order": order.NAME,
        "mixture": mixture.NAME,
        "seed": start.seed,
        "shuffle": start.shuffle,
        "global_batch_sequences": start.global_batch_sequences,
        "sources": [
            {
                "name": source.name,
                "weight": f"{source.weight.numerator}/{source.weight.denominator}",
                "recipe": source.recipe_digest,
                "row_tokens": source.row_tokens,
                "max_epochs": source.max_epochs,
            }
            for source in start.sources
        ],
    }


def decode_start(event: Mapping[str, Any], path: Path) -> PlanStart:
    where = f"{path}:1"
    _require_kind(event, "start", where)
    names = event.get("format"), event.get("order"), event.get("mixture")
    if names != (FORMAT, order.NAME, mixture.NAME):
        raise DataError(
            f"the plan has formats {names}, this version reads {(FORMAT, order.NAME, mixture.NAME)}", where=where,
            hint="continue the run with the version that began it",
        )  # fmt: skip
    fields = {"seed": int, "shuffle": bool, "global_batch_sequences": int, "sources": list}
    seed, shuffle, batch, sources = _take(event, {"format": str, "order": str, "mixture": str, **fields}, where)[3:]
    start = PlanStart(seed, shuffle, batch, tuple(_decode_source(source, where) for source in sources))
    if len({source.name for source in start.sources}) < len(start.sources):
        raise ConfigError("two sources have the same name", where="data.sources", hint="name them apart")
    if start.global_batch_sequences < 1:
        raise ConfigError(f"a global batch of {batch} rows is impossible", where="train.global_batch_sequences")
    return start


def _decode_source(value: Mapping[str, Any], where: str) -> PlanSource:
    name, weight, recipe, row_tokens, max_epochs = _take(
        {"kind": "source", **value},
        {"name": str, "weight": str, "recipe": str, "row_tokens": int, "max_epochs": (int, type(None))}, where,
    )  # fmt: skip
    try:
        return PlanSource(name, Fraction(weight), recipe, row_tokens, max_epochs)
    except (ValueError, ZeroDivisionError) as error:
        raise DataError(f"the start event has weight {weight!r}", where=where) from error


def encode_segment(segment: Segment, start: PlanStart) -> dict[str, Any]:
    return {
        "kind": "segment",
        "source": start.sources[segment.source_index].name,
        "start_draw": segment.start_draw,
        "epoch": segment.epoch,
        "num_epochs": segment.num_epochs,
        "units": [segment.unit_start, segment.unit_end],
        "num_rows": segment.num_rows,
        "content": segment.content_digest,
    }


def decode_segment(event: Mapping[str, Any], start: PlanStart, where: str) -> Segment:
    _require_kind(event, "segment", where)
    fields = {
        "source": str, "start_draw": int, "epoch": int, "num_epochs": int, "units": list, "num_rows": int,
        "content": str,
    }  # fmt: skip
    name, start_draw, epoch, num_epochs, units, num_rows, content = _take(event, fields, where)
    names = [source.name for source in start.sources]
    sound = name in names and len(units) == 2 and all(type(unit) is int for unit in units)
    if not sound or num_rows < 1 or num_epochs < 1 or not 0 <= units[0] < units[1]:
        raise DataError(f"the segment makes no sense: {dict(event)}", where=where)
    return Segment(names.index(name), start_draw, epoch, num_epochs, units[0], units[1], num_rows, content)


def _require_kind(event: Mapping[str, Any], kind: str, where: str) -> None:
    if event.get("kind") != kind:
        raise DataError(
            f"the plan has an event of kind {event.get('kind')!r} where this version knows only {kind!r}", where=where,
            hint="continue the run with the version that wrote it",
        )  # fmt: skip


def _take(event: Mapping[str, Any], fields: Mapping[str, Any], where: str) -> list[Any]:
    """The values of exactly these fields, in their order."""
    for name in sorted(event.keys() ^ {"kind", *fields}):
        state = "an unknown" if name in event else "no"
        raise DataError(
            f"the {event['kind']} event has {state} field {name!r}", where=where,
            hint="continue the run with the version that wrote it",
        )  # fmt: skip
    for name, kind in fields.items():
        value = event[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise DataError(f"the {event['kind']} event has {name} = {value!r}", where=where)
    return [event[name] for name in fields]
