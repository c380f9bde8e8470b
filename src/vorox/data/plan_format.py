"""How the events of a plan are written: the format of ``plan.jsonl``.

Events are JSON objects with exactly the fields below; an unknown kind, field or version is refused, because skipping it
would silently give another order. Fields that say nothing are left out, so that plans of earlier versions keep their
digests. Durability and chaining are the log's business (``core/chained_log.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

from vorox.core.errors import ConfigError, DataError
from vorox.data import mixture, order
from vorox.data.plan_events import (
    Cut,
    Extension,
    GrowthRule,
    HorizonEvent,
    Part,
    PlanSource,
    PlanStart,
    Segment,
    StageEvent,
    UnitRange,
)

FORMAT = "plan/1"

Event = Segment | PlanSource | StageEvent | Cut | HorizonEvent | Extension
"""Any event after the start."""


def encode_start(start: PlanStart) -> dict[str, Any]:
    event: dict[str, Any] = {
        "kind": "start",
        "format": FORMAT,
        "order": order.NAME,
        "mixture": mixture.NAME,
        "seed": start.seed,
        "shuffle": start.shuffle,
        "global_batch_sequences": start.global_batch_sequences,
        "sources": [_encode_source(source) for source in start.sources],
    }
    return event if start.growth is None else {**event, "growth": asdict(start.growth)}


def _encode_source(source: PlanSource) -> dict[str, Any]:
    value: dict[str, Any] = {
        "name": source.name,
        "weight": _written(source.weight),
        "recipe": source.recipe_digest,
        "row_tokens": source.row_tokens,
        "max_epochs": source.max_epochs,
    }
    if source.on_exhausted != "error":
        value["on_exhausted"] = source.on_exhausted
    if source.part is not None:
        part = source.part
        low, high = (None if bound is None else _written(bound) for bound in (part.low, part.high))
        value["part"] = {"of": part.of, "statistic": part.statistic, "low": low, "high": high}
    return value


def decode_start(event: Mapping[str, Any], path: Path) -> PlanStart:
    where = f"{path}:1"
    _require_kind(event, ("start",), where)
    names = event.get("format"), event.get("order"), event.get("mixture")
    if names != (FORMAT, order.NAME, mixture.NAME):
        raise DataError(
            f"the plan has formats {names}, this version reads {(FORMAT, order.NAME, mixture.NAME)}", where=where,
            hint="continue the run with the version that began it",
        )  # fmt: skip
    fields = {"seed": int, "shuffle": bool, "global_batch_sequences": int, "sources": list}
    *_, seed, shuffle, batch, sources, growth = _take(
        event, {"format": str, "order": str, "mixture": str, **fields}, where, {"growth": dict}
    )
    rule = None if growth is None else GrowthRule(*_take({"kind": "growth", **growth}, _GROWTH, where))
    start = PlanStart(seed, shuffle, batch, tuple(_decode_source(source, where) for source in sources), rule)
    if len({source.name for source in start.sources}) < len(start.sources):
        raise ConfigError("two sources have the same name", where="data.sources", hint="name them apart")
    if start.global_batch_sequences < 1:
        raise ConfigError(f"a global batch of {batch} rows is impossible", where="train.global_batch_sequences")
    return start


_GROWTH = {"mode": str, "first_segment_units": int, "max_segment_units": int, "later_passes": str}


def _decode_source(value: Mapping[str, Any], where: str) -> PlanSource:
    name, weight, recipe, row_tokens, max_epochs, on_exhausted, part = _take(
        {"kind": "source", **value},
        {"name": str, "weight": str, "recipe": str, "row_tokens": int, "max_epochs": (int, type(None))}, where,
        {"on_exhausted": str, "part": dict},
    )  # fmt: skip
    exact = _read_fraction(weight, "weight", where)
    if part is not None:
        optional = (str, type(None))
        of, statistic, low, high = _take(
            {"kind": "part", **part}, {"of": str, "statistic": str, "low": optional, "high": optional}, where
        )
        bounds = (None if bound is None else _read_fraction(bound, "bound", where) for bound in (low, high))
        part = Part(of, statistic, *bounds)
    return PlanSource(name, exact, recipe, row_tokens, max_epochs, on_exhausted or "error", part)


def encode_event(event: Event, names: Sequence[str]) -> dict[str, Any]:
    """Any event after the start.

    Args:
        event: What happens.
        names: The names of the plan's sources.
    """
    match event:
        case Segment():
            return _encode_segment(event, names)
        case PlanSource():
            return {"kind": "source", "source": _encode_source(event)}
        case StageEvent():
            return {
                "kind": "stage",
                "start_position": event.start_position,
                "weights": {name: _written(weight) for name, weight in event.weights.items()},
                "row_pieces": event.row_pieces,
                "reason": event.reason,
                "drawn": dict(event.drawn or {}),
                "says": list(event.says),
            }
        case Cut():
            return {"kind": "cut", **asdict(event)}
        case HorizonEvent():
            return {"kind": "horizon", **asdict(event)}
        case Extension():
            return {"kind": "extend", **asdict(event)}


def decode_event(event: Mapping[str, Any], names: Sequence[str], where: str) -> Event:
    """The inverse of ``encode_event``.

    Raises:
        DataError: The event is of an unknown kind or makes no sense.
    """
    _require_kind(event, ("segment", "source", "stage", "cut", "horizon", "extend"), where)
    match event["kind"]:
        case "segment":
            return _decode_segment(event, names, where)
        case "source":
            return _decode_source(_take(event, {"source": dict}, where)[0], where)
        case "stage":
            return _decode_stage(event, names, where)
        case "cut":
            return Cut(*_take(event, {"source": str, "epoch": int}, where))
        case "horizon":
            return _decode_horizon(event, where)
        case _:
            return Extension(*_take(event, {"start_position": int, "before_steps": int, "total_steps": int}, where))


def _decode_stage(event: Mapping[str, Any], names: Sequence[str], where: str) -> StageEvent:
    fields = {"start_position": int, "weights": dict, "row_pieces": int, "reason": str, "drawn": dict, "says": list}
    position, weights, pieces, reason, drawn, says = _take(event, fields, where)
    exact = {name: _read_fraction(weight, "weight", where) for name, weight in weights.items()}
    if position < 0 or pieces < 1 or not exact or not set(exact) <= set(names) or min(exact.values()) <= 0:
        raise _senseless(event, where)
    return StageEvent(position, exact, pieces, reason, drawn, tuple(says))


def _decode_horizon(event: Mapping[str, Any], where: str) -> HorizonEvent:
    position, total_steps, warmup_steps = _take(
        event, {"start_position": int, "total_steps": int, "warmup_steps": int}, where
    )
    if position < 0 or total_steps < 1 or warmup_steps < 0:
        raise _senseless(event, where)
    return HorizonEvent(position, total_steps, warmup_steps)


def _encode_segment(segment: Segment, names: Sequence[str]) -> dict[str, Any]:
    """Units are one pair ``[start, end]`` where there is one range, and triples ``[start, end, rows]`` of several."""
    first = segment.ranges[0]
    several = [[part.start, part.end, part.num_rows] for part in segment.ranges]
    return {
        "kind": "segment",
        "source": names[segment.source_index],
        "start_draw": segment.start_draw,
        "epoch": segment.epoch,
        "num_epochs": segment.num_epochs,
        "units": [first.start, first.end] if len(several) == 1 else several,
        "num_rows": segment.num_rows,
        "content": segment.content_digest,
    }


def _decode_segment(event: Mapping[str, Any], names: Sequence[str], where: str) -> Segment:
    fields = {
        "source": str, "start_draw": int, "epoch": int, "num_epochs": int, "units": list, "num_rows": int,
        "content": str,
    }  # fmt: skip
    name, start_draw, epoch, num_epochs, units, num_rows, content = _take(event, fields, where)
    parts = cast("list[list[int]]", [[*units, num_rows]] if units and isinstance(units[0], int) else units)
    sound = bool(parts) and all([type(value) for value in part] == [int] * 3 for part in parts)
    if not sound or name not in names or num_rows < 1 or num_epochs < 1:
        raise _senseless(event, where)
    ranges = tuple(UnitRange(*part) for part in parts)
    ends = [0, *(part.end for part in ranges)]
    ascending = all(before <= part.start < part.end for before, part in zip(ends, ranges, strict=False))
    segment = Segment(names.index(name), start_draw, epoch, num_epochs, ranges, content)
    if not ascending or segment.num_rows != num_rows or any(part.num_rows < 1 for part in ranges):
        raise _senseless(event, where)
    return segment


def _senseless(event: Mapping[str, Any], where: str) -> DataError:
    return DataError(f"the {event['kind']} makes no sense: {dict(event)}", where=where)


def _written(value: Fraction) -> str:
    return f"{value.numerator}/{value.denominator}"


def _read_fraction(value: str, name: str, where: str) -> Fraction:
    try:
        return Fraction(value)
    except (ValueError, ZeroDivisionError, TypeError) as error:
        raise DataError(f"the plan has a {name} {value!r}", where=where) from error


def _require_kind(event: Mapping[str, Any], kinds: Sequence[str], where: str) -> None:
    if event.get("kind") not in kinds:
        raise DataError(
            f"the plan has an event of kind {event.get('kind')!r} where this version knows {', '.join(kinds)}",
            where=where, hint="continue the run with the version that wrote it",
        )  # fmt: skip


def _take(
    event: Mapping[str, Any], fields: Mapping[str, Any], where: str, optional: Mapping[str, Any] | None = None
) -> list[Any]:
    """The values of exactly these fields, in their order; of the optional ones that are not there, ``None``."""
    optional = optional or {}
    for name in sorted((event.keys() - optional.keys()) ^ {"kind", *fields}):
        state = "an unknown" if name in event else "no"
        raise DataError(
            f"the {event['kind']} event has {state} field {name!r}", where=where,
            hint="continue the run with the version that wrote it",
        )  # fmt: skip
    for name, kind in {**fields, **{name: kind for name, kind in optional.items() if name in event}}.items():
        value = event[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise DataError(f"the {event['kind']} event has {name} = {value!r}", where=where)
    return [event[name] for name in fields] + [event.get(name) for name in optional]
