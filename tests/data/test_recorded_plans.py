"""Recorded plans: the format of ``plan.jsonl``, and the rows that it means, stay as they were recorded.

``plans/`` contains a plan of each scenario below in format ``plan/2``, and ``plans/rows.json`` the digest of the plan
and of the rows at its positions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from fake_rows import FakeRows, GrowingRows
from vorox.core.schema.data import GrowthConfig
from vorox.data.order.growth import PlanGrower
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_changes import (
    RequestedMixtureStage,
    cache_growth_events,
    horizon_update_events,
    mixture_update_events,
)
from vorox.data.order.plan_events import (
    Bucket,
    GrowthRule,
    MaskedDocument,
    MaskEvent,
    PlanEvent,
    PlanSource,
    PlanStart,
    RollbackEvent,
    SkipEvent,
)

FIXTURES = Path(__file__).parent / "plans"
BATCH = 10


def source_of(reader: FakeRows, weight: str, **limits: Any) -> PlanSource:
    digest = hashlib.sha256(reader.name.encode()).hexdigest()  # recipes may change, plans may not
    reader.recipe = type("Recipe", (), {"digest": digest})()
    return PlanSource(reader.name, Fraction(weight), digest, reader.row_tokens, **limits)


def start_of(readers: list[Any], growth: GrowthRule | None = None, **limits: Any) -> PlanStart:
    weights = ("0.7", "0.3", "1/8")
    sources = tuple(source_of(reader, weight, **limits) for reader, weight in zip(readers, weights, strict=False))
    return PlanStart(7, True, BATCH, sources, growth)


def complete_readers() -> list[FakeRows]:
    return [FakeRows("code", [40, 60]), FakeRows("text", [30, 0, 3])]


def wanted(start_position: int = 0, row_pieces: int = 1, **weights: str) -> RequestedMixtureStage:
    return RequestedMixtureStage(
        start_position, {name: Fraction(weight) for name, weight in weights.items()}, row_pieces
    )


def exhausted_source(path: Path) -> DataPlan:
    readers = complete_readers()
    start = start_of(readers, max_epochs=2, on_exhausted="drop")
    plan = DataPlan.create(path, start, readers)
    plan.extend_to(60, readers)
    plan.extend_to(250, readers)
    return plan


def mixture_update(path: Path) -> DataPlan:
    readers = complete_readers()
    start = start_of(readers)
    plan = DataPlan.create(path, start, readers)
    plan.extend_to(600, readers)
    web = FakeRows("web", [50])
    third = source_of(web, "0.5", max_epochs=9)
    plan.add(mixture_update_events(plan.state, [start.sources[0], third], [wanted(code="0.5", web="0.5")], 60))
    plan.extend_to(300, [readers[0], None, web])
    fewer = replace(start.sources[0], max_epochs=1, on_exhausted="drop")
    sources = [fewer, start.sources[1], replace(third, max_epochs=None)]
    plan.add(mixture_update_events(plan.state, sources, [wanted(code="1", text="2/3", web="1")], 150))
    plan.extend_to(400, [*readers, web])
    return plan


def staged_mixture(path: Path) -> DataPlan:
    readers = complete_readers()
    start = start_of(readers)
    plan = DataPlan.create(path, start, readers)
    stages = [wanted(code="7", text="3"), wanted(50, 2, text="1"), wanted(120, 4, code="0.125", text="0.25")]
    plan.add(mixture_update_events(plan.state, start.sources, stages))
    plan.extend_to(300, readers)
    return plan


def length_change(path: Path) -> DataPlan:
    readers = complete_readers()
    plan = DataPlan.create(path, start_of(readers), readers)
    for position, total_steps, warmup_steps in [(0, 10, 2), (50, 20, 2), (90, 20, 4), (70, 12, 2)]:
        plan.add(horizon_update_events(plan.state, position, total_steps, warmup_steps))
        plan.extend_to(total_steps * BATCH, readers)
    return plan


def grown_cache(path: Path) -> DataPlan:
    readers = [FakeRows("code", [6, 6])]
    plan = DataPlan.create(path, start_of(readers), readers)
    plan.extend_to(100, readers)
    extended = [FakeRows("code", [6, 6, 5])]
    plan.add(cache_growth_events(plan.state, extended, 20))
    plan.extend_to(100, extended)
    return plan


def skipped_and_masked(path: Path) -> DataPlan:
    readers = complete_readers()
    plan = DataPlan.create(path, start_of(readers), readers)
    plan.extend_to(120, readers)
    plan.add([SkipEvent(30, "loss_spike", 7.25, 4.5), SkipEvent(40, "loss_spike", 9.0, None)])
    plan.add([RollbackEvent(50, 70, 8.5, 4.5, 40), SkipEvent(40, "withdrawn", 3.5, None)])
    plan.add([MaskEvent(80, (MaskedDocument("code", "ab", 7), MaskedDocument("text", "cd", 0)))])
    return plan


def buckets(path: Path) -> DataPlan:
    readers = [FakeRows("web.easy", [9]), FakeRows("web.hard", [20])]
    bounds = (None, Fraction(5, 2), None)
    sources = tuple(
        replace(source, bucket=Bucket("web", "tokens_per_document", low, high))
        for source, low, high in zip(start_of(readers).sources, bounds[:-1], bounds[1:], strict=True)
    )
    plan = DataPlan.create(path, PlanStart(1, False, 4, sources), readers)
    plan.extend_to(40, readers)
    return plan


def grow(
    path: Path, rule: GrowthRule, on_starve: str, unit_orders: list[list[int]], target: int, **limits: Any
) -> DataPlan:
    """Build the next unit of each source whenever rows are missing; where a run repeats, at every third step."""
    built: list[set[int]] = [{order[0]} for order in unit_orders]
    rows = [[3, 0, 5, 2, 4, 6, 1, 8, 2, 5, 7, 3], [4, 4, 0, 0, 9]]
    readers = [
        GrowingRows(name, unit_rows, own) for name, unit_rows, own in zip(("code", "text"), rows, built, strict=True)
    ]
    plan = DataPlan.create(path, start_of(readers, rule, **limits), readers)
    for reader in readers:
        reader.refreshed = _refreshed_with_recipe(reader)  # type: ignore[method-assign]
    growth = GrowthConfig.model_validate({"mode": rule.mode, "horizon_steps": 1, "on_starve": on_starve})
    grower = PlanGrower(plan, readers, growth)

    def build_more() -> bool:
        for own, order in zip(built, unit_orders, strict=True):
            own.update([unit for unit in order if unit not in own][:1])
        return False

    for position in range(BATCH, target + 1, BATCH):
        if on_starve == "repeat" and position // BATCH % 3 == 0:
            build_more()
        grower.cover(position, stop=build_more)
    return plan


def _refreshed_with_recipe(reader: GrowingRows) -> Callable[..., GrowingRows]:
    original, recipe = reader.refreshed, reader.recipe

    def refreshed(*, awaited_units: int = 0) -> GrowingRows:
        again = original(awaited_units=awaited_units)
        again.recipe = recipe
        again.refreshed = _refreshed_with_recipe(again)  # type: ignore[method-assign]
        return again

    return refreshed


LIMITS = {"max_epochs": 6, "on_exhausted": "drop"}
ORDERS = [[1, 4, 0, 2, 11, 7, 3, 10, 5, 6, 8, 9], [4, 0, 2, 1, 3]]

SCENARIOS: dict[str, Callable[[Path], DataPlan]] = {
    "exhausted_source": exhausted_source,
    "mixture_update": mixture_update,
    "staged_mixture": staged_mixture,
    "length_change": length_change,
    "grown_cache": grown_cache,
    "skipped_and_masked": skipped_and_masked,
    "buckets": buckets,
    "strict": lambda path: grow(path, GrowthRule("strict", 1, 4), "wait", ORDERS, 300, **LIMITS),
    "strict_in_segments": lambda path: grow(path, GrowthRule("strict", 1, 4, "segments"), "wait", ORDERS, 300),
    "elastic": lambda path: grow(path, GrowthRule("elastic"), "wait", ORDERS, 250, **LIMITS),
    "elastic_repeating": lambda path: grow(path, GrowthRule("elastic"), "repeat", ORDERS, 200),
}


def rows_digest(plan: DataPlan) -> str:
    """Digest of the row and the source at every position."""
    found = plan.locate(np.arange(plan.num_positions))
    columns = [found.source_index, found.epoch, found.unit_start, found.row]
    return hashlib.sha256(np.stack(columns).astype("<i8").tobytes()).hexdigest()


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_plan_is_written_byte_for_byte_as_recorded(tmp_path: Path, name: str) -> None:
    plan = SCENARIOS[name](tmp_path / "plan.jsonl")
    assert plan.path.read_bytes() == (FIXTURES / f"{name}.jsonl").read_bytes()


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_recorded_plan_is_read_with_the_same_rows_and_digests(name: str) -> None:
    plan = DataPlan.open(FIXTURES / f"{name}.jsonl")
    expected = json.loads((FIXTURES / "rows.json").read_text())[name]
    assert {"digest": plan.digest, "num_positions": plan.num_positions, "rows": rows_digest(plan)} == expected
    assert plan.num_positions >= 60 or name == "buckets"


def test_the_scenarios_have_every_kind_of_event() -> None:
    """So that a field which old plans lack is noticed here: reading must give it the value that they meant."""
    lines = [line for name in SCENARIOS for line in (FIXTURES / f"{name}.jsonl").read_text().splitlines()]
    known = {field.default for event in get_args(PlanEvent) for field in fields(event) if field.name == "kind"}
    assert {json.loads(line)["body"]["kind"] for line in lines} == known
