"""Plans over growing caches: the same order at any speed of the builder (strict), exact replay (elastic), durable
events before use, and every policy for missing rows."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventually import PATIENCE_SECONDS, wait_until
from fake_rows import FakeRows, GrowingRows
from vorox.core.batch import DataShard
from vorox.core.errors import DataError
from vorox.core.files.chained_log import HashChainedLog
from vorox.core.schema.data import GrowthConfig
from vorox.data.order.growth import DataNotReady, PlanGrower, await_planned_units
from vorox.data.order.loader import first_cursor, open_batches
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_changes import make_segment
from vorox.data.order.plan_events import GrowthRule, PlanSource, PlanStart
from vorox.data.storage.stalls import waiting_for_data

BATCH = 4
Place = tuple[int, int, int, int]
"""Source, pass, unit, row in the unit."""


def start_of(readers: list[Any], rule: GrowthRule, *, batch: int = BATCH, **limits: Any) -> PlanStart:
    sources = tuple(
        PlanSource(reader.name, Fraction(number + 1), reader.recipe.digest, reader.row_tokens, **limits)
        for number, reader in enumerate(readers)
    )
    return PlanStart(7, True, batch, sources, rule)


def grower_of(plan: DataPlan, readers: list[Any], **options: Any) -> PlanGrower:
    rule = plan.start.growth
    assert rule is not None
    defaults = {"mode": rule.mode, "horizon_steps": options.pop("horizon_steps", 1)}
    growth = GrowthConfig.model_validate({**defaults, "on_starve": options.pop("on_starve", "stop")})
    return PlanGrower(plan, readers, growth, **options)


def places(plan: DataPlan, readers: list[GrowingRows], count: int) -> list[Place]:
    """Where the rows of the first positions are, by unit: what does not depend on how rows are numbered today."""
    found = plan.locate(np.arange(count))
    result: list[Place] = []
    for source, epoch, unit, row in zip(found.source_index, found.epoch, found.unit_start, found.row, strict=True):
        reader = readers[int(source)]
        result.append((int(source), int(epoch), *reader.place(int(reader.unit_row_starts[unit]) + int(row))))
    return result


UNIT_ROWS = {"code": [3, 0, 5, 2, 4, 6, 1], "text": [4, 4, 0, 0, 9]}


def caches(built: dict[str, set[int]] | None = None, cut: dict[str, list[int]] | None = None) -> list[GrowingRows]:
    return [
        GrowingRows(
            name, list(rows), set(range(len(rows))) if built is None else built[name], cut=cut[name] if cut else None
        )
        for name, rows in UNIT_ROWS.items()
    ]


def run_while_building(path: Path, rule: GrowthRule, seed: int, count: int, **options: Any) -> DataPlan:
    """Cover position by position; whenever rows are missing, and now and then besides, a random unit gets built.

    In mode strict the sources are split into units meanwhile: ``cut`` is the initial number of units.
    """
    chooser = random.Random(seed)
    built: dict[str, set[int]] = {name: set() for name in UNIT_ROWS}
    first = options.pop("cut", 0)
    cut = {name: [first] for name in UNIT_ROWS} if first and rule.mode == "strict" else None
    readers = caches(built, cut)
    plan = DataPlan.create(path, start_of(readers, rule), readers)
    grower = grower_of(plan, list(readers), **options)

    def build_one() -> bool:
        left = [
            (name, unit) for name, rows in UNIT_ROWS.items() for unit in range(len(rows)) if unit not in built[name]
        ]
        if left:
            name, unit = chooser.choice(left)
            built[name].add(unit)
        return bool(left)

    for position in range(BATCH, count + 1, BATCH):
        for _ in range(chooser.choice([0, 0, 1, 3])):
            build_one()
        while True:
            try:
                grower.cover(position)
                break
            except DataNotReady:
                units_final = cut is None or all(cut[name][0] >= len(rows) for name, rows in UNIT_ROWS.items())
                assert build_one() or not units_final, "everything is built and still not enough"
    return plan


def test_strict_segments_double_up_to_the_largest(tmp_path: Path) -> None:
    readers = [GrowingRows("code", [2] * 20, set(range(20)))]
    rule = GrowthRule("strict", 1, 4)
    plan = DataPlan.create(tmp_path / "plan.jsonl", start_of(readers, rule), readers)
    grower_of(plan, list(readers)).cover(80)
    units = [(part.start, part.end) for segment in plan.segments[0] for part in segment.ranges]
    assert units[:7] == [(0, 1), (1, 3), (3, 7), (7, 11), (11, 15), (15, 19), (19, 20)]
    assert units[7] == (0, 20)  # a later pass is one segment over everything
    assert [segment.epoch for segment in plan.segments[0]][:8] == [0] * 7 + [1]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 8), st.integers(1, 6), st.integers(0, 7))
def test_strict_order_does_not_depend_on_the_builder(
    tmp_path_factory: pytest.TempPathFactory, seed: int, first: int, most: int, horizon: int, cut: int
) -> None:
    """Nor on how much of the source is split into units."""
    rule = GrowthRule("strict", min(first, most), most)
    directory = tmp_path_factory.mktemp("plans")
    complete = caches()
    at_once = DataPlan.create(directory / "once.jsonl", start_of(complete, rule), complete)
    grower_of(at_once, list(complete), horizon_steps=horizon).cover(120)
    slowly = run_while_building(directory / "slow.jsonl", rule, seed, 120, horizon_steps=horizon, cut=cut)
    assert places(slowly, complete, 120) == places(at_once, complete, 120)
    common = min(at_once.num_events, slowly.num_events)
    assert slowly.digest_at(common) == at_once.digest_at(common)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from(["strict", "elastic"]))
def test_every_pass_reads_every_row_once_and_replays_from_the_recorded_events(
    tmp_path_factory: pytest.TempPathFactory, seed: int, horizon: int, mode: str
) -> None:
    path = tmp_path_factory.mktemp("plans") / "plan.jsonl"
    plan = run_while_building(path, GrowthRule(mode, 1, 4), seed, 160, horizon_steps=horizon, cut=seed % 3)
    complete = caches()
    before = places(plan, complete, 160)
    assert places(DataPlan.open(path), complete, 160) == before
    DataPlan.open(path).check(complete)
    seen = Counter(before)
    assert set(seen.values()) == {1}
    for index, rows in enumerate(UNIT_ROWS.values()):
        everything = {(unit, row) for unit, count in enumerate(rows) for row in range(count)}
        passes = max(epoch for source, epoch, _, _ in before if source == index)
        assert passes >= 1
        for epoch in range(passes):
            assert {(u, r) for s, e, u, r in before if (s, e) == (index, epoch)} == everything


def test_what_is_there_depends_on_the_moment_only_in_elastic_mode(tmp_path: Path) -> None:
    """The test above would pass on any fixed order: here two moments really differ."""
    complete = caches()
    orders = {
        mode: {
            tuple(
                places(run_while_building(tmp_path / f"{mode}{seed}", GrowthRule(mode, 1, 4), seed, 40), complete, 40)
            )
            for seed in range(5)
        }
        for mode in ("strict", "elastic")
    }
    assert len(orders["strict"]) == 1
    assert len(orders["elastic"]) > 1


def test_a_plan_that_covers_a_step_is_not_asked_what_is_there_today(tmp_path: Path) -> None:
    plan = run_while_building(tmp_path / "plan.jsonl", GrowthRule("elastic"), 3, 40)
    content, complete = plan.path.read_bytes(), caches()
    resumed = DataPlan.open(plan.path)
    grower_of(resumed, list(complete), last_position=40).cover(20)
    grower_of(resumed, list(complete), last_position=40).cover(40)
    assert plan.path.read_bytes() == content


@pytest.mark.parametrize("mode", ["strict", "elastic"])
def test_events_are_durable_before_rows_are_located_by_them(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "plan.jsonl"

    class Watched(GrowingRows):
        def read_rows(self, rows: np.ndarray) -> Any:
            on_disk = DataPlan.open(path)
            known = {
                unit
                for segment in on_disk.segments[0]
                for part in segment.ranges
                for unit in range(part.start, part.end)
            }
            assert {self.place(int(row))[0] for row in rows} <= known
            return super().read_rows(rows)

        def refreshed(self, *, awaited_units: int = 0) -> Watched:
            del awaited_units
            return Watched(self.name, self._plan, self._built)

    built = {0}
    reader = Watched("code", [4] * 10, built)
    start = start_of([reader], GrowthRule(mode, 1, 2))
    plan = DataPlan.create(path, start, [reader])
    grower = grower_of(plan, [reader], on_starve="wait", last_position=40)
    with open_batches(
        plan, [reader], shard=DataShard(), cursor=first_cursor(plan, 7), global_batch_sequences=BATCH,
        micro_batch_sequences=2, document_mask=True, num_threads=2, prefetch_batches=3, grower=grower,
    ) as batches:  # fmt: skip
        rows: list[int] = []
        for step in range(10):
            built.add(min(9, step + 1))
            built.add(min(9, step + 2))
            batch = next(batches)
            rows += batch.row_digests_AB.reshape(-1).tolist()
            cursor = batch.cursor_after
            assert plan.digest_at(cursor.plan_events) == cursor.plan_digest
            assert DataPlan.open(path).digest_at(cursor.plan_events) == cursor.plan_digest
    assert len(set(rows)) == 40


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_batches_over_a_growing_cache_are_those_over_the_complete_one(tmp_path: Path, threads: int) -> None:
    def digests(name: str, readers: list[GrowingRows], build: set[int] | None) -> tuple[list[str], list[Any]]:
        plan = DataPlan.create(tmp_path / name, start_of(readers, GrowthRule("strict", 1, 4)), readers)
        grower = grower_of(plan, list(readers), on_starve="wait", last_position=200, horizon_steps=3)
        found, cursors = [], []

        def work() -> None:
            for unit in chooser.sample(range(30), 30):
                time.sleep(0.002)
                assert build is not None
                build.add(unit)

        chooser = random.Random(threads)
        builder = threading.Thread(target=work)
        if build is not None:
            builder.start()
        with open_batches(
            plan, list(readers), shard=DataShard(), cursor=first_cursor(plan, 7), global_batch_sequences=BATCH,
            micro_batch_sequences=2, document_mask=True, num_threads=threads, prefetch_batches=2, grower=grower,
        ) as batches:  # fmt: skip
            for _ in range(50):
                batch = next(batches)
                found.append(batch.digest())
                cursors.append(batch.cursor_after)
        if build is not None:
            builder.join()
        return found, cursors

    rows, built = [3, 4, 0, 5] * 7 + [2, 2], set[int]()
    growing = digests("growing", [GrowingRows("code", rows, built)], built)
    complete = digests("complete", [GrowingRows("code", rows, set(range(30)))], None)
    assert growing == complete


def test_starving_waits_says_so_and_goes_on(tmp_path: Path) -> None:
    built = {0}
    reader = GrowingRows("code", [4, 4], built)
    plan = DataPlan.create(tmp_path / "plan.jsonl", start_of([reader], GrowthRule("strict", 1, 1)), [reader])
    grower = grower_of(plan, [reader], on_starve="wait")
    grower.cover(4)
    waiter = threading.Thread(target=grower.cover, args=(8,))
    waiter.start()
    wait_until(lambda: waiting_for_data() is not None)
    waiting = waiting_for_data()
    assert waiting is not None
    assert "source 'code' has 1 of 2 units built" in waiting.reason
    assert plan.num_positions == 4
    built.add(1)
    waiter.join(PATIENCE_SECONDS)
    assert not waiter.is_alive()
    assert plan.num_positions >= 8
    assert waiting_for_data() is None


def test_a_wait_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    reader = GrowingRows("code", [4, 4], {0})
    plan = DataPlan.create(tmp_path / "plan.jsonl", start_of([reader], GrowthRule("elastic")), [reader])
    asked: list[int] = []
    message = r"Step 2 has no rows yet: source 'code' has 1 of 2 units built; the first missing one is unit 1"
    with pytest.raises(DataNotReady, match=message):
        grower_of(plan, [reader], on_starve="wait").cover(8, stop=lambda: len(asked) > 1 or asked.append(1) is not None)
    batches = open_batches(
        plan, [reader], shard=DataShard(), cursor=first_cursor(plan, 7), global_batch_sequences=BATCH,
        micro_batch_sequences=4, document_mask=False, num_threads=2, grower=grower_of(plan, [reader], on_starve="wait"),
    )  # fmt: skip
    next(batches)
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("vorox-prefetch")]


def test_elastic_repeats_what_is_there_rather_than_wait(tmp_path: Path) -> None:
    built = {1}
    reader = GrowingRows("code", [2, 3, 4], built)
    plan = DataPlan.create(tmp_path / "plan.jsonl", start_of([reader], GrowthRule("elastic"), batch=1), [reader])
    grower = grower_of(plan, [reader], on_starve="repeat", horizon_steps=1)
    grower.cover(7)
    built.add(2)
    grower.cover(16)
    units = [[(p.start, p.end) for p in segment.ranges] for segment in plan.segments[0]]
    epochs = [segment.epoch for segment in plan.segments[0]]
    assert (units[:3], epochs[:3]) == ([[(1, 2)], [(1, 2)], [(1, 2)]], [0, 1, 2])
    assert (units[3], epochs[3]) == ([(2, 3)], 2)  # what came joins the pass that runs
    assert (units[4], epochs[4]) == ([(1, 3)], 3)


def test_repeated_passes_end_at_the_limit(tmp_path: Path) -> None:
    built = {1}
    reader = GrowingRows("code", [2, 3, 4], built)
    start = start_of([reader], GrowthRule("elastic"), batch=1, max_epochs=2)
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, [reader])
    grower = grower_of(plan, [reader], on_starve="repeat")
    grower.cover(2)
    built.add(2)
    grower.cover(14)
    with pytest.raises(DataError, match="exhausted at step 15: max_epochs is 2 and an epoch has 7 rows"):
        grower.cover(15)


@pytest.mark.parametrize(("horizon_steps", "num_passes"), [(10, 5), (9, 5), (8, 4)])
def test_one_segment_has_the_later_passes_of_the_horizon(tmp_path: Path, horizon_steps: int, num_passes: int) -> None:
    reader = GrowingRows("code", [2] * 4, set(range(4)))
    plan = DataPlan.create(tmp_path / "plan.jsonl", start_of([reader], GrowthRule("strict", 4, 4)), [reader])
    grower_of(plan, [reader], horizon_steps=horizon_steps).cover(8)
    passes = [(segment.epoch, segment.num_epochs) for segment in plan.segments[0]]
    assert passes == [(0, 1), (1, num_passes)]  # from row 8, steps of 4 rows


def test_gaps_are_recorded_and_survive_their_filling(tmp_path: Path) -> None:
    """Rows behind a gap move when it is filled; their addresses do not."""
    built = {1, 3, 4}
    reader = GrowingRows("code", [2, 3, 4, 5, 6], built)
    plan = DataPlan.create(tmp_path / "plan.jsonl", start_of([reader], GrowthRule("elastic"), batch=2), [reader])
    grower_of(plan, [reader]).cover(14)
    segment = plan.segments[0][0]
    assert [(p.start, p.end, p.num_rows) for p in segment.ranges] == [(1, 2, 3), (3, 5, 11)]
    early = places(plan, [reader], 14)
    full = GrowingRows("code", [2, 3, 4, 5, 6], {0, 1, 2, 3, 4})
    assert places(DataPlan.open(plan.path), [full], 14) == early
    for position, (_, _, unit, row) in enumerate(early):
        today = int(full.unit_row_starts[unit]) + row
        assert position in plan.positions_of(0, today, full).tolist()
    DataPlan.open(plan.path).check([full])
    with pytest.raises(DataError, match="changed"):
        DataPlan.open(plan.path).check([GrowingRows("code", [2, 3, 4, 5, 7], {0, 1, 2, 3, 4})])


def test_units_that_are_planned_later_join_the_pass_that_runs(tmp_path: Path) -> None:
    rows, built = [4, 4], {0, 1}
    reader = GrowingRows("code", rows, built)
    plan = DataPlan.create(tmp_path / "plan.jsonl", start_of([reader], GrowthRule("strict", 2, 4)), [reader])
    grower = grower_of(plan, [reader])
    grower.cover(8)  # looks a step ahead, where the second pass begins
    rows += [6, 2]
    built |= {2, 3}
    grower.cover(16)
    grower.cover(40)
    ranges = [(s.epoch, [(p.start, p.end) for p in s.ranges]) for s in plan.segments[0]]
    assert ranges[:4] == [(0, [(0, 2)]), (1, [(0, 2)]), (1, [(2, 4)]), (2, [(0, 4)])]


@pytest.mark.parametrize("policy", ["error", "drop", "repeat"])
def test_a_source_that_is_used_up(tmp_path: Path, policy: str) -> None:
    complete = caches()
    start = start_of(complete, GrowthRule("strict", 1, 4), max_epochs=2, on_exhausted=policy)
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, complete)
    said: list[str] = []
    grower = grower_of(plan, list(complete), report=lambda kind, text: said.append(f"{kind}: {text}"))
    if policy == "error":
        with pytest.raises(DataError, match=r"Source 'text' is exhausted at step 13: max_epochs is 2 .* 17 rows"):
            grower.cover(120)
        return
    if policy == "repeat":
        grower.cover(120)
        assert max(epoch for _, epoch, _, _ in places(plan, complete, 120)) > 1
        return
    with pytest.raises(DataError, match="All sources are exhausted"):
        grower.cover(120)
    first_without = 48 // BATCH + 1  # steps count from 1
    used_up = f"mixture: source 'text' is used up after 2 passes and no longer drawn from step {first_without} on"
    assert any(used_up in text for text in said)
    sources = [source for source, *_ in places(plan, complete, plan.num_positions)]
    assert sources[48:] == [0] * (plan.num_positions - 48)  # 48 draws hold 32 of the 34 rows of two passes
    assert plan.num_positions - 48 + 16 == 42 // BATCH * BATCH


def test_a_crash_between_an_event_and_its_step_changes_nothing(tmp_path: Path) -> None:
    """Continuing from any prefix of the plan on disk, even in the middle of a line, gives the same order."""
    rule, complete = GrowthRule("strict", 1, 2), caches()
    straight = run_while_building(tmp_path / "straight", rule, 1, 100)
    expected, lines = places(straight, complete, 100), straight.path.read_bytes().splitlines(keepends=True)
    assert len(lines) > 8
    for count in range(1, len(lines)):
        for torn in (b"", lines[count][:17]):
            path = tmp_path / f"crashed{count}{len(torn)}"
            path.write_bytes(b"".join(lines[:count]) + torn)
            plan = DataPlan.open_or_create(path, straight.start, complete)
            grower_of(plan, list(complete)).cover(100)
            assert places(DataPlan.open(path), complete, 100) == expected


def test_a_process_that_follows_reads_what_the_first_has_decided(tmp_path: Path) -> None:
    built = {0, 1}
    reader = GrowingRows("code", [4, 4, 4], built)
    path = tmp_path / "plan.jsonl"
    decides = DataPlan.create(path, start_of([reader], GrowthRule("elastic")), [reader])
    follows = DataPlan.open(path)
    first = grower_of(decides, [reader])
    second = grower_of(follows, [GrowingRows("code", [4, 4, 4], built)], decides=False)
    with pytest.raises(DataNotReady, match="rank 0 has not added more of source 'code'"):
        second.cover(4, stop=lambda: True)
    first.cover(8)
    second.cover(8)
    built.add(2)
    first.cover(12)
    second.cover(12)
    assert follows.digest == decides.digest
    seen = second.readers[0]
    assert isinstance(seen, GrowingRows)
    assert seen.seen == {0, 1, 2}
    assert follows.num_events == len(HashChainedLog(path).read()[0])


class EndedBuild(GrowingRows):
    """A cache whose background build ends between two looks, having built everything: looked at last before that."""

    looks_before_end = 1

    @property
    def is_building(self) -> bool:
        self.looks_before_end -= 1
        return self.looks_before_end >= 0

    def missing_units(self, unit_start: int, unit_end: int) -> Any:
        everything = np.arange(unit_start, unit_end)
        return everything[:0] if self.has_looked_again else everything[1:]

    has_looked_again = False

    def refreshed(self, *, awaited_units: int = 0) -> Any:
        self.has_looked_again = self.looks_before_end < 0
        return self


@pytest.mark.parametrize("looks_before_end", [0, 1, 2])
def test_units_of_a_build_that_has_ended_are_seen(tmp_path: Path, looks_before_end: int) -> None:
    rows = EndedBuild("code", [2] * 4, set(range(4)))
    rows.looks_before_end = looks_before_end
    plan = DataPlan.create(tmp_path / "plan.jsonl", start_of([rows], GrowthRule("elastic")), [rows])
    complete = GrowingRows("code", [2] * 4, set(range(4)))
    segment = make_segment(complete, "code", 0, 0, 1, [(0, 4)])
    assert segment is not None
    plan.add([segment])
    (seen,) = await_planned_units(plan, [rows])
    assert seen is not None
    assert len(seen.missing_units(0, 4)) == 0


def test_a_source_without_rows_is_refused(tmp_path: Path) -> None:
    reader = GrowingRows("code", [0, 0], {0, 1})
    plan = DataPlan.create(tmp_path / "plan.jsonl", start_of([reader], GrowthRule("strict")), [reader])
    with pytest.raises(DataError, match="'code' has no rows"):
        grower_of(plan, [reader]).cover(4)


def test_a_complete_plan_and_a_growing_one_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    reader = FakeRows("code", [4, 4])
    growing = start_of([reader], GrowthRule("strict"))
    plan = DataPlan.create(tmp_path / "plan.jsonl", growing, [reader])
    with pytest.raises(Exception, match="growth"):
        DataPlan.open_or_create(plan.path, PlanStart(7, True, BATCH, growing.sources), [reader])
