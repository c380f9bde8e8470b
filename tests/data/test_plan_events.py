"""Plan events: reading and writing are inverse, and everything else is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import pytest

from processor_cost import cost
from vorox.core.errors import DataError
from vorox.data.order.plan_events import (
    Bucket,
    CutEvent,
    GrowthRule,
    HorizonEvent,
    MaskedDocument,
    MaskEvent,
    MixtureStageEvent,
    PlanEvent,
    PlanSource,
    PlanStart,
    RollbackEvent,
    Segment,
    SkipEvent,
    SourceEvent,
    UnitRange,
    combined_digest,
    decode_event,
    encode_event,
)
from vorox.data.order.plan_state import PlanState

HARD = PlanSource(
    "web.hard", Fraction(1, 3), "ab", 9, 3, "drop", Bucket("web", "bytes_per_token", None, Fraction(7, 2))
)
CODE = PlanSource("code", Fraction(2), "cd", 9)
EVENTS: list[PlanEvent] = [
    PlanStart(7, True, 10, (CODE,)),
    PlanStart(7, False, 10, (CODE, HARD), GrowthRule("strict", 2, 8, "segments")),
    Segment("code", 5, 1, 3, (UnitRange(0, 4, 17),), "ef"),
    Segment("code", 5, 1, 1, (UnitRange(0, 1, 2), UnitRange(3, 5, 8)), "ef"),
    SourceEvent(HARD),
    MixtureStageEvent(20, {"code": Fraction(1, 8)}, 2, "changed", {"code": 14}, ("code: 70.0% -> 20.0%",)),
    CutEvent("code", 2),
    HorizonEvent(30, 100, 5),
    SkipEvent(30, "loss_spike", 7.25, 4.5),
    SkipEvent(30, "withdrawn", 3.5, None),
    RollbackEvent(30, 50, 7.25, 4.5, 20),
    MaskEvent(30, (MaskedDocument("code", "ab", 7), MaskedDocument("web", "cd", 0))),
]


def name_of(event: PlanEvent) -> str:
    return event.kind


def paths(body: Mapping[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every field of an event and of the objects in it; shares and counts by source name are values."""
    for key, value in body.items():
        yield (*before, key)
        if isinstance(value, Mapping) and key not in ("weights", "draw_counts"):
            yield from paths(value, (*before, key))


def changed(body: Mapping[str, Any], path: tuple[str, ...], change: Any) -> dict[str, Any]:
    """A copy of an event in which ``change`` was called with the object that has a field."""
    copy = dict(body)
    if len(path) > 1:
        copy[path[0]] = changed(body[path[0]], path[1:], change)
    else:
        change(copy)
    return copy


@pytest.mark.parametrize("event", EVENTS, ids=name_of)
def test_events_are_read_as_they_are_written(event: PlanEvent) -> None:
    assert decode_event(encode_event(event), "here") == event


@pytest.mark.parametrize("event", EVENTS, ids=name_of)
def test_a_field_less_or_more_is_refused(event: PlanEvent) -> None:
    body = encode_event(event)
    for path in paths(body):
        more = changed(body, path, lambda fields: fields.update(window=64))
        with pytest.raises(DataError, match="window"):
            decode_event(more, "here")
        less = changed(body, path, lambda fields, name=path[-1]: fields.pop(name))
        with pytest.raises(DataError) as caught:
            decode_event(less, "plan.jsonl:3")
        assert caught.value.where == "plan.jsonl:3"


@pytest.mark.parametrize("event", EVENTS, ids=name_of)
def test_a_value_of_another_type_is_refused(event: PlanEvent) -> None:
    body = encode_event(event)
    for path in paths(body):
        for value in (True, "1", 1, 1.0, [], ["1"], {}, None):
            other = changed(body, path, lambda fields, name=path[-1], value=value: fields.update({name: value}))
            try:
                read = decode_event(other, "here")
            except DataError:
                continue
            again = encode_event(read)
            assert repr(again) == repr({key: other[key] for key in again}), f"{path} = {value!r} is read as another"


@pytest.mark.parametrize("weight", ["0.5", "2/4", "1/0", "half", ".5", " 1/2", "1"])
def test_a_weight_that_is_not_written_so_is_refused(weight: str) -> None:
    body = encode_event(SourceEvent(CODE))
    with pytest.raises(DataError, match="source"):
        decode_event({**body, "source": {**body["source"], "weight": weight}}, "here")


@pytest.mark.parametrize(
    "ranges", [[0], [0, 4], [0, 1, 2], [[0, 1]], [[0, 1, 17, 3]], ["0", "4"], [0, "4"], [[0, 4, "17"]], "04"]
)
def test_units_that_are_no_ranges_are_refused(ranges: Any) -> None:
    body = encode_event(EVENTS[2])
    with pytest.raises(DataError):
        decode_event({**body, "ranges": ranges}, "here")


def test_a_source_is_used_up_after_its_epochs_unless_it_repeats() -> None:
    assert CODE.epoch_limit is None
    assert HARD.epoch_limit == 3
    assert PlanSource("code", Fraction(1), "cd", 9, 3, "repeat").epoch_limit is None


def test_segments_of_one_range_and_of_several() -> None:
    one, several = EVENTS[2], EVENTS[3]
    assert isinstance(one, Segment)
    assert isinstance(several, Segment)
    assert (one.num_rows, one.end_draw, one.next_epoch) == (17, 5 + 3 * 17, 4)
    assert (several.num_rows, several.end_draw, several.next_epoch) == (10, 15, 2)
    assert encode_event(one)["ranges"] == [[0, 4, 17]]
    assert encode_event(several)["ranges"] == [[0, 1, 2], [3, 5, 8]]


def test_the_digest_of_several_ranges_is_of_all_of_them() -> None:
    assert combined_digest(["aa"]) == "aa"
    assert len({combined_digest(parts) for parts in (["aa", "bb"], ["bb", "aa"], ["aa"], ["aabb"])}) == 4
    assert (
        combined_digest(["aa", "bb"]) == "80c0d5c7137871baa75af2038f350bf60a4d45a131a653d0eb93f3cda3d28609"
    )  # recorded by runs


def test_skips_in_any_order_are_what_a_set_of_them_is() -> None:
    """Against a set, also withdrawn and skipped again. A step asks once; the number of skips hardly matters."""
    start, chooser = PlanState.initial(PlanStart(7, True, 10, (CODE,))), random.Random()
    state, skipped = start, set[int]()
    for _ in range(300):
        position, withdrawn = 10 * chooser.randrange(40), chooser.random() < 0.4
        state = state.apply(SkipEvent(position, "withdrawn" if withdrawn else "loss_spike", 1.0, None))
        (skipped.discard if withdrawn else skipped.add)(position)
        assert state.skipped_positions().tolist() == sorted(skipped)
        assert [at for at in range(0, 400, 10) if state.is_skipped(at)] == sorted(skipped)
    assert state.covered_positions == (0,) * 301
    many = start.apply_all([SkipEvent(10 * step, "loss_spike", 1.0, None) for step in range(2000)])
    assert cost(lambda: [many.is_skipped(19_995) for _ in range(1000)]) < 5, "by a scan, 25 times as much"
