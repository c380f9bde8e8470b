"""Plans that change during a run, against a naive interpreter that samples rows one by one from lists; the message of
each change; sources exhausted, added and removed; larger caches; shuffle quality."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_rows import FakeRows, GrowingRows
from vorox.core.batch import DataShard
from vorox.core.errors import ConfigError, DataError
from vorox.data.order.loader import first_cursor, open_batches
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_changes import (
    RequestedMixtureStage,
    cache_growth_events,
    first_unread_epoch,
    horizon_update_events,
    make_segment,
    mixture_update_events,
)
from vorox.data.order.plan_events import (
    Bucket,
    CutEvent,
    HorizonEvent,
    MaskedDocument,
    MaskEvent,
    MixtureStageEvent,
    PlanSource,
    PlanStart,
    Segment,
    SourceEvent,
    UnitRange,
)
from vorox.data.order.plan_state import PlanState
from vorox.data.permutation import permutation_key, permute

Address = tuple[int, int, int, int]
"""Source, pass, first unit of the range, row in the range."""


def source_of(reader: FakeRows, weight: str = "1", **limits: Any) -> PlanSource:
    return PlanSource(reader.name, Fraction(weight), reader.recipe.digest, reader.row_tokens, **limits)


def addresses(plan: DataPlan, count: int | None = None) -> list[Address]:
    found = plan.locate(np.arange(plan.num_positions if count is None else count))
    columns = (found.source_index, found.epoch, found.unit_start, found.row)
    return list(zip(*(column.tolist() for column in columns), strict=True))


class Interpreter:
    """The plan as told: stages walked with counters, rows taken from lists, slots dealt out batch by batch.

    It shares with the code only the keyed permutation, which has tests and frozen vectors of its own.
    """

    def __init__(self, start: PlanStart) -> None:
        self.start = start
        self.names = [source.name for source in start.sources]
        self.stages: list[tuple[int, dict[int, Fraction]]] = [
            (0, {index: source.weight for index, source in enumerate(start.sources) if source.weight})
        ]
        self.rows: list[list[Address]] = [[] for _ in self.names]

    def source(self, name: str) -> None:
        if name not in self.names:
            self.names.append(name)
            self.rows.append([])

    def stage(self, position: int, weights: dict[str, Fraction]) -> None:
        self.stages = [stage for stage in self.stages if stage[0] < position]
        self.stages.append((position, {self.names.index(name): weight for name, weight in weights.items()}))

    def segment(self, segment: Segment) -> None:
        name = segment.source
        units = [unit for part in segment.ranges for unit in (part.start, part.end)]
        key = permutation_key(self.start.seed, "rows", name, *units, segment.content_digest)
        stored = [(part.start, row) for part in segment.ranges for row in range(part.num_rows)]
        for epoch in range(segment.epoch, segment.epoch + segment.num_epochs):
            order = np.arange(len(stored))
            order = permute(order, len(stored), key, epoch) if self.start.shuffle else order
            source = self.names.index(name)
            self.rows[source] += [(source, epoch, *stored[int(row)]) for row in order]

    def cut(self, index: int, epoch: int) -> None:
        self.rows[index] = [row for row in self.rows[index] if row[1] < epoch]

    def addresses(self) -> list[Address]:
        """Rows by position, as long as every draw of a whole batch has one."""
        drawn, result = [0] * len(self.names), list[Address]()
        size, slots = self.start.global_batch_sequences, permutation_key(self.start.seed, "slots")
        sources = self._sources()
        while True:
            batch: list[Address] = []
            for _ in range(size):
                source = next(sources)
                if drawn[source] == len(self.rows[source]):
                    return result
                batch.append(self.rows[source][drawn[source]])
                drawn[source] += 1
            number = np.full(size, len(result) // size)
            order = permute(np.arange(size), size, slots, number) if self.start.shuffle else range(size)
            result += [batch[int(slot)] for slot in order]

    def _sources(self) -> Any:
        position, walk = 0, iter(())
        stages = dict(self.stages)
        while True:
            if position in stages:
                walk = _walk(stages[position])
            yield next(walk)
            position += 1


def _walk(weights: dict[int, Fraction]) -> Any:
    """The source of one draw after the other: a weight-balanced tree with counters at its nodes."""

    def build(sources: list[int]) -> Any:
        if len(sources) == 1:
            return sources[0]
        total = sum(weights[source] for source in sources)
        cut = min(range(1, len(sources)), key=lambda at: (abs(total - 2 * sum(weights[s] for s in sources[:at])), at))
        share = Fraction(sum(weights[s] for s in sources[:cut])) / total
        return [share, 0, 0, build(sources[:cut]), build(sources[cut:])]

    tree = build(sorted(weights, key=lambda source: (-weights[source], source)))
    while True:
        node = tree
        while isinstance(node, list):
            node[1] += 1
            goes_left = node[1] * node[0] - node[2] >= Fraction(1, 2)
            node[2] += goes_left
            node = node[3] if goes_left else node[4]
        yield node


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_event_sequences_against_the_interpreter(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    batch = data.draw(st.integers(1, 7), label="batch")
    readers = [
        FakeRows(name, [*data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=6), label=name), 3])
        for name in "abcd"
    ]
    weight = st.fractions(Fraction(1, 20), 5, max_denominator=20)
    number = data.draw(st.integers(1, 3), label="sources")
    sources = tuple(replace(source_of(reader), weight=data.draw(weight)) for reader in readers[:number])
    start = PlanStart(data.draw(st.integers(0, 2**40)), data.draw(st.booleans()), batch, sources)
    plan = DataPlan.create(tmp_path_factory.mktemp("plan") / "plan.jsonl", start, readers[:number])
    naive = Interpreter(start)
    for _ in range(data.draw(st.integers(1, 12), label="events")):
        kind = data.draw(st.sampled_from(["pass", "pass", "part", "part", "stage", "source", "cut", "extend"]))
        if kind in ("pass", "part"):
            index = data.draw(st.integers(0, len(plan.sources) - 1))
            segment = _segment(plan, index, readers[index], kind, data)
            if segment is not None:
                plan.add([segment])
                naive.segment(segment)
        elif kind == "stage":
            names = [source.name for source in plan.sources]
            chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
            weights = {name: data.draw(weight) for name in chosen}
            position = data.draw(st.integers(0, 12)) * batch
            plan.add([MixtureStageEvent(position, weights)])
            naive.stage(position, weights)
        elif kind == "source" and len(plan.sources) < len(readers):
            reader = readers[len(plan.sources)]
            plan.add([SourceEvent(source_of(reader, "0"))])
            naive.source(reader.name)
        elif kind == "cut":
            index, epoch = data.draw(st.integers(0, len(plan.sources) - 1)), data.draw(st.integers(1, 3))
            plan.add([CutEvent(plan.sources[index].name, epoch)])
            naive.cut(index, epoch)
        elif kind == "extend":
            plan.add([HorizonEvent(0, 6, 1)])
    expected = naive.addresses()
    assert addresses(plan) == expected
    assert addresses(DataPlan.open(plan.path)) == expected
    for index, reader in enumerate(readers[: len(plan.sources)]):
        for row in range(reader.num_rows):
            stands = [
                position
                for position, (source, _, unit, offset) in enumerate(expected)
                if source == index and int(reader.unit_row_starts[unit]) + offset == row
            ]
            assert plan.positions_of(index, row, reader).tolist() == stands


def _segment(plan: DataPlan, index: int, reader: FakeRows, kind: str, data: st.DataObject) -> Segment | None:
    """A next segment: some passes over everything, or further units of the pass that runs."""
    group, num_units = plan.segments[index], len(reader.unit_row_starts) - 1
    end = group[-1].end_draw if group else 0
    if kind == "pass":
        epoch = group[-1].next_epoch if group else 0
        return make_segment(reader, plan.state.names[index], end, epoch, data.draw(st.integers(1, 3)), [(0, num_units)])
    new = not group or group[-1].num_epochs > 1 or data.draw(st.booleans())
    epoch = (group[-1].next_epoch if group else 0) if new else group[-1].epoch
    taken = {
        unit
        for segment in group
        if segment.epoch <= epoch < segment.next_epoch
        for part in segment.ranges
        for unit in range(part.start, part.end)
    }
    free = sorted({*range(num_units)} - taken)
    chosen = data.draw(st.lists(st.sampled_from(free), unique=True)) if free else []
    return make_segment(reader, plan.state.names[index], end, epoch, 1, [(unit, unit + 1) for unit in sorted(chosen)])


@pytest.mark.parametrize("sizes", [[200_000], [1] * 50 + [70_000, 130_000]])
def test_rows_that_follow_each_other_are_independent(tmp_path: Path, sizes: list[int]) -> None:
    """Bigrams of where in the cache consecutive rows come from: chi-square per degree of freedom is 1 by chance."""
    reader = FakeRows("code", sizes)
    for seed in (1, 2, 3):
        plan = DataPlan.create(tmp_path / f"{seed}.jsonl", PlanStart(seed, True, 8, (source_of(reader),)), [reader])
        plan.extend_to(reader.num_rows // 8 * 8, [reader])
        rows = plan.locate(np.arange(reader.num_rows // 8 * 8)).row
        buckets = rows * 40 // reader.num_rows
        pairs = np.bincount(buckets[:-1] * 40 + buckets[1:], minlength=1600).reshape(40, 40)
        expected = pairs.sum(1)[:, None] * pairs.sum(0)[None] / pairs.sum()
        chi_square = float(((pairs - expected) ** 2 / expected).sum()) / 39**2
        assert 0.9 < chi_square < 1.1  # its standard deviation is 0.036


def two(batch: int = 10, **limits: Any) -> tuple[PlanStart, list[FakeRows]]:
    readers = [FakeRows("code", [40, 60]), FakeRows("text", [30])]
    sources = source_of(readers[0], "0.7"), source_of(readers[1], "0.3", **limits)
    return PlanStart(7, True, batch, sources), readers


def wanted(**weights: str) -> list[RequestedMixtureStage]:
    return [RequestedMixtureStage(0, {name: Fraction(weight) for name, weight in weights.items()})]


def says(events: list[Any]) -> list[str]:
    return [text for event in events if isinstance(event, MixtureStageEvent) for text in event.messages]


def test_what_is_declared_already_is_no_event(tmp_path: Path) -> None:
    start, readers = two()
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    assert mixture_update_events(plan.state, start.sources, wanted(code="7", text="3")) == []
    stages = [*wanted(code="7", text="3"), RequestedMixtureStage(50, {"text": Fraction(1)}, 2)]
    plan.add(mixture_update_events(plan.state, start.sources, stages))
    assert [(stage.start_position, stage.row_pieces) for stage in plan.stages] == [(0, 1), (50, 2)]
    plan.extend_to(100, readers)
    for position in (0, 20, 50, 70):
        assert mixture_update_events(plan.state, start.sources, stages, position) == []


def test_changed_weights_hold_from_the_position_on_and_move_nothing_before(tmp_path: Path) -> None:
    start, readers = two()
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    plan.extend_to(200, readers)
    before = addresses(plan, 60)
    events = mixture_update_events(plan.state, start.sources, wanted(code="1", text="4"), 60)
    plan.add(events)
    plan.extend_to(200, readers)
    after = addresses(DataPlan.open(plan.path), 200)
    assert after[:60] == before
    assert Counter(source for source, *_ in after[60:]) == {0: 28, 1: 112}
    assert says(events) == [
        "code: 70.0% -> 20.0%; goes on after 42 rows, nothing repeats or is skipped",
        "text: 30.0% -> 80.0%; goes on after 18 rows, nothing repeats or is skipped",
    ]
    for source, rows in ((0, 100), (1, 30)):  # no row twice before its source's pass is over
        seen = [(epoch, unit, row) for s, epoch, unit, row in after if s == source]
        assert len(set(seen)) == len(seen)
        assert sorted(epoch for epoch, *_ in seen) == [at // rows for at in range(len(seen))]
    assert mixture_update_events(plan.state, start.sources, wanted(code="1", text="4"), 60) == []


def test_a_pass_whose_first_segment_is_read_has_begun() -> None:
    """Two segments of one pass: at the border between them, the next unread pass is the second."""
    state = PlanState.initial(PlanStart(7, True, 1, (PlanSource("code", Fraction(1), "ab", 9),))).apply_all(
        [Segment("code", 3 * unit, 0, 1, (UnitRange(unit, unit + 1, 3),), f"{unit}") for unit in range(2)]
    )
    assert [first_unread_epoch(state, 0, position) for position in range(7)] == [0, *[1] * 6]


def test_a_source_taken_out_and_one_put_in(tmp_path: Path) -> None:
    start, readers = two()
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    plan.extend_to(200, readers)
    web = FakeRows("web", [50])
    sources = [start.sources[0], source_of(web, "0.5")]
    events = mixture_update_events(plan.state, sources, wanted(code="0.5", web="0.5"), 60)
    plan.add(events)
    plan.extend_to(140, [readers[0], None, web])
    plan.check([readers[0], None, web])
    with pytest.raises(DataError, match="'web' changed"):
        plan.check([readers[0], None, FakeRows("web", [50], content=1)])
    assert says(events) == [
        "code: 70.0% -> 50.0%; goes on after 42 rows, nothing repeats or is skipped",
        "text: 30.0% -> no longer drawn; 12 unread rows of pass 1 are skipped",
        "web: not drawn before -> 50.0%, from its first row",
    ]
    assert Counter(source for source, *_ in addresses(plan, 140)[60:]) == {0: 40, 2: 40}
    back = mixture_update_events(plan.state, [*start.sources, sources[1]], wanted(code="1", text="1"), 100)
    assert "text: not drawn before -> 50.0%, from where it stopped, after 18 rows" in says(back)
    assert "web: 50.0% -> no longer drawn; 30 unread rows of pass 1 are skipped" in says(back)
    assert [source.name for source in plan.sources] == ["code", "text", "web"]


def test_a_source_of_that_name_with_other_content_is_refused(tmp_path: Path) -> None:
    start, readers = two()
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    other = replace(start.sources[1], recipe_digest="0" * 64)
    with pytest.raises(ConfigError, match="'text' has changed since the run started"):
        mixture_update_events(plan.state, [start.sources[0], other], wanted(code="1", text="1"), 10)


def test_a_used_up_source_is_dropped_by_a_recorded_event(tmp_path: Path) -> None:
    start, readers = two(max_epochs=1, on_exhausted="drop")
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    added = plan.extend_to(200, readers)
    found = addresses(plan, 200)
    assert Counter(source for source, *_ in found[:100]) == {0: 70, 1: 30}
    assert {source for source, *_ in found[100:]} == {0}
    assert "'text' is used up after 1 pass and no longer drawn from step 11 on; the 0 rows" in says(added)[0]
    assert plan.positions_of(1, 7, readers[1]).size == 1
    web = source_of(FakeRows("web", [9]), "0")  # a new source that is not sampled leaves the mixture as it is
    events = mixture_update_events(plan.state, [*start.sources, web], wanted(code="7", text="3"), 150)
    assert events == [SourceEvent(web)]
    # Dropping holds for the later stages too, and more passes bring it back, from where the run then stands.
    more = replace(start.sources[1], max_epochs=3)
    plan.add(mixture_update_events(plan.state, [start.sources[0], more], wanted(code="7", text="3"), 150))
    plan.extend_to(300, readers)
    assert addresses(plan, 150) == found[:150]
    assert Counter(source for source, *_ in addresses(plan, 300)[150:]) == {0: 105, 1: 45}


def test_fewer_passes_end_with_the_one_that_runs(tmp_path: Path) -> None:
    start, readers = two()
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    plan.extend_to(600, readers)
    before = addresses(plan, 150)
    less = replace(start.sources[1], max_epochs=1, on_exhausted="drop")  # the run is in its second pass
    plan.add(mixture_update_events(plan.state, [start.sources[0], less], wanted(code="7", text="3"), 150))
    plan.extend_to(600, readers)
    after = addresses(plan, 600)
    assert after[:150] == before
    assert Counter(source for source, *_ in after)[1] == 60


def test_everything_used_up_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    start, readers = two()
    limited = tuple(replace(source, max_epochs=1, on_exhausted="drop") for source in start.sources)
    plan = DataPlan.create(tmp_path / "plan.jsonl", replace(start, sources=limited), readers)
    content = plan.path.read_bytes()
    with pytest.raises(DataError, match="All sources are exhausted at step 14: 'code' was the last"):
        plan.extend_to(200, readers)
    assert plan.path.read_bytes() == content


def test_a_cache_that_grew_counts_from_the_next_pass_on(tmp_path: Path) -> None:
    reader = FakeRows("code", [6, 6])
    plan = DataPlan.create(tmp_path / "plan.jsonl", PlanStart(3, True, 4, (source_of(reader),)), [reader])
    plan.extend_to(60, [reader])  # five passes
    before = addresses(plan, 60)
    extended = FakeRows("code", [6, 6, 5])
    assert cache_growth_events(plan.state, [reader], 16) == []
    cuts = cache_growth_events(plan.state, [extended], 16)
    assert cuts == [CutEvent("code", 2)]  # position 16 is in the second pass
    plan.add(cuts)
    plan.extend_to(60, [extended])
    after = addresses(DataPlan.open(plan.path), 58 // 4 * 4)
    assert after[:24] == before[:24]
    third = [(unit, row) for _, epoch, unit, row in after if epoch == 2]
    assert sorted(third) == [(0, row) for row in range(17)]
    assert cache_growth_events(plan.state, [extended], 16) == []
    more = FakeRows("code", [6, 6, 5, 1])
    assert cache_growth_events(plan.state, [more], 28) == [CutEvent("code", 3)]  # in the third pass, of 17 rows
    assert cache_growth_events(plan.state, [more], 60) == []  # nothing is left to replan


def test_the_length_in_force_at_every_position_is_recorded(tmp_path: Path) -> None:
    start, readers = two()
    batch = start.global_batch_sequences
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    assert plan.horizon_at(0) is None
    for position, total_steps, warmup_steps, is_new in [
        (0, 10, 2, True), (0, 10, 2, False), (5, 10, 2, False), (5, 20, 2, True), (9, 20, 4, True), (12, 20, 4, False),
        (7, 20, 2, True),  # the run fell back: what was planned later does not hold
        (5, 10, 2, True), (6, 10, 2, False),
    ]:  # fmt: skip
        events = horizon_update_events(plan.state, position * batch, total_steps, warmup_steps)
        assert bool(events) == is_new, (position, total_steps)
        plan.add(events)
    known = [plan.horizon_at(step * batch) for step in (0, 4, 5, 99)]
    assert known == [HorizonEvent(0, 10, 2)] * 2 + [HorizonEvent(5 * batch, 10, 2)] * 2
    assert [DataPlan.open(plan.path).horizon_at(step * batch) for step in (0, 4, 5, 99)] == known


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (MixtureStageEvent(5, {"code": Fraction(1)}), "in the middle of a step"),
        (MixtureStageEvent(10, {"other": Fraction(1)}), "Invalid stage event"),
        (MixtureStageEvent(10, {}), "Invalid stage event"),
        (MixtureStageEvent(10, {"code": Fraction(1)}, 0), "Invalid stage event"),
        (MixtureStageEvent(10, {"code": Fraction(1)}, draw_counts={"code": 8, "text": 2}), "continues from"),
        (CutEvent("other", 1), "does not have"),
        (SourceEvent(PlanSource("code", Fraction(1), "other", 9)), "has changed"),
        (MaskEvent(10, ()), "Invalid mask event"),
        (MaskEvent(5, (MaskedDocument("code", "ab", 0),)), "Invalid mask event"),
        (MaskEvent(10, (MaskedDocument("other", "ab", 0),)), "Invalid mask event"),
        (MaskEvent(10, (MaskedDocument("code", "ab", -1),)), "Invalid mask event"),
    ],
)
def test_events_that_cannot_be_are_refused_before_they_are_written(tmp_path: Path, event: Any, message: str) -> None:
    start, readers = two()
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    content, digest = plan.path.read_bytes(), plan.digest
    with pytest.raises(DataError, match=message):
        plan.add([event])
    assert (plan.path.read_bytes(), plan.digest) == (content, digest)


@pytest.mark.parametrize(
    ("first", "second", "follows"),
    [
        ([(0, 2)], [(2, 4)], True),
        ([(2, 4)], [(0, 2)], True),
        ([(0, 1), (3, 4)], [(1, 3)], True),
        ([(0, 2)], [(1, 3)], False),
        ([(1, 3)], [(0, 2)], False),
        ([(1, 2)], [(0, 4)], False),
        ([(0, 4)], [(1, 2)], False),
    ],
)
def test_a_pass_goes_on_with_units_that_it_has_not_read(
    tmp_path: Path, first: list[tuple[int, int]], second: list[tuple[int, int]], follows: bool
) -> None:
    """Ranges that touch do not overlap."""
    reader = FakeRows("code", [3, 4, 5, 6])
    plan = DataPlan.create(tmp_path / "plan.jsonl", PlanStart(7, True, 2, (source_of(reader),)), [reader])
    begun = make_segment(reader, "code", 0, 0, 1, first)
    assert begun is not None
    plan.add([begun])
    rest = make_segment(reader, "code", begun.end_draw, 0, 1, second)
    assert rest is not None
    if follows:
        plan.add([rest])
        assert plan.segments[0] == (begun, rest)
    else:
        with pytest.raises(DataError, match="does not continue"):
            plan.add([rest])


def test_the_fewest_events_that_decide_everything_before_a_position(tmp_path: Path) -> None:
    start, readers = two()
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    plan.extend_to(30, readers)
    plan.add([MixtureStageEvent(20, {"code": Fraction(1)}), HorizonEvent(40, 20, 2)])
    plan.extend_to(90, readers)
    covered, decided = plan.state.covered_positions, plan.state.effective_from
    numbers = range(1, len(covered) + 1)
    for position in range(covered[-1] + 1):
        enough = [
            number
            for number in numbers
            if covered[number - 1] >= position and all(later >= position for later in decided[number:])
        ]
        assert plan.state.events_covering(position) == min(enough), position
    assert plan.state.events_covering(20) < plan.state.events_covering(21)  # the stage decides from 20 on


def test_rows_are_cut_from_a_stage_on_and_every_token_is_predicted_as_often(tmp_path: Path) -> None:
    reader = FakeRows("code", [40], row_tokens=13)
    start = PlanStart(11, True, 4, (source_of(reader),))
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, [reader])
    stages = [*wanted(code="1"), RequestedMixtureStage(20, {"code": Fraction(1)}, 3)]
    plan.add(mixture_update_events(plan.state, start.sources, stages))
    plan.extend_to(40, [reader])
    options: dict[str, Any] = {"global_batch_sequences": 4, "micro_batch_sequences": 2, "document_mask": True}
    with open_batches(plan, [reader], shard=DataShard(), cursor=first_cursor(plan, 11), **options) as batches:
        found = [next(batches) for _ in range(10)]
    assert [batch.tokens_ABT.shape for batch in found] == [(2, 2, 12)] * 5 + [(2, 6, 4)] * 5
    assert {batch.num_tokens for batch in found} == {48}
    assert len({digest for batch in found for digest in batch.row_digests_AB.reshape(-1).tolist()}) == 20 + 60
    for step, batch in enumerate(found):
        rows = plan.locate(np.arange(step * 4, step * 4 + 4)).row.tolist()
        tokens = [reader.tokens(row) for row in rows]
        assert batch.tokens_ABT.reshape(4, 12).tolist() == [row[:-1] for row in tokens]
        flat, segments, positions = [], [], []
        for row, stored in zip(rows, tokens, strict=True):
            owner, place = _naive_segments(reader.segments(row), 13)
            flat += [stored[at + 1] if owner[at] == owner[at + 1] and owner[at] else -100 for at in range(12)]
            length = 4 if step >= 5 else 12
            for cut in range(0, 12, length):
                ids = owner[cut : cut + length]
                segments += [0 if not one else one - ids[0] + 1 for one in ids]
                positions += [sum(ids[before] == one for before in range(at)) for at, one in enumerate(ids)]
            del place
        assert batch.labels_ABT.reshape(-1).tolist() == flat
        assert batch.segment_ids_ABT is not None
        assert batch.position_ids_ABT is not None
        assert batch.segment_ids_ABT.reshape(-1).tolist() == segments
        assert batch.position_ids_ABT.reshape(-1).tolist() == positions
        assert batch.num_target_tokens == sum(label != -100 for label in flat)


def _naive_segments(lengths: list[int], row_tokens: int) -> tuple[list[int], int]:
    """The number of each stored token's segment, 0 for padding."""
    owner = [number for number, length in enumerate(lengths, 1) for _ in range(length)]
    return owner + [0] * (row_tokens - len(owner)), len(owner)


def test_growing_rows_number_what_is_built() -> None:
    """The test double that other tests rely on."""
    built = {0, 2}
    reader = GrowingRows("code", [2, 3, 4], built)
    assert (reader.num_rows, [reader.place(row) for row in range(6)][2]) == (6, (2, 0))
    tokens = reader.tokens(2)
    built.add(1)
    assert reader.refreshed().tokens(5) == tokens


def test_a_cut_ends_every_segment_at_its_pass(tmp_path: Path) -> None:
    reader = FakeRows("code", [5])
    plan = DataPlan.create(tmp_path / "plan.jsonl", PlanStart(7, True, 1, (source_of(reader),)), [reader])
    for start_draw, epoch, num_epochs in [(0, 0, 2), (10, 2, 4), (30, 6, 1)]:
        segment = make_segment(reader, "code", start_draw, epoch, num_epochs, [(0, 1)])
        assert segment is not None
        plan.add([segment])
    for cut, kept in [(9, [(0, 2), (2, 4), (6, 1)]), (6, [(0, 2), (2, 4)]), (4, [(0, 2), (2, 2)]), (1, [(0, 1)])]:
        plan.add([CutEvent("code", cut)])
        assert [(segment.epoch, segment.num_epochs) for segment in plan.segments[0]] == kept
        assert plan.num_positions == 5 * sum(num_epochs for _, num_epochs in kept)


def test_a_row_of_a_later_segment_is_found(tmp_path: Path) -> None:
    """Segments that lack the row come before and after the one that has it."""
    reader = FakeRows("code", [3, 4, 5])
    plan = DataPlan.create(tmp_path / "plan.jsonl", PlanStart(7, True, 1, (source_of(reader),)), [reader])
    for start_draw, unit in [(0, 0), (3, 1), (7, 2)]:
        segment = make_segment(reader, "code", start_draw, 0, 1, [(unit, unit + 1)])
        assert segment is not None
        plan.add([segment])
    found = addresses(plan, 12)
    for row in range(12):
        unit = int(np.searchsorted(reader.unit_row_starts, row, side="right")) - 1
        position = found.index((0, 0, unit, row - int(reader.unit_row_starts[unit])))
        assert plan.positions_of(0, row, reader).tolist() == [position]


def test_the_state_has_one_length_for_a_position(tmp_path: Path) -> None:
    start, readers = two()
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    for position, total_steps in [(0, 10), (20, 12), (20, 14), (0, 8)]:
        plan.add([HorizonEvent(position, total_steps, 1)])
        assert plan.state.horizons[-1] == HorizonEvent(position, total_steps, 1)
        starts = [known.start_position for known in plan.state.horizons]
        assert starts == sorted(set(starts))


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (HorizonEvent(-10, 5, 0), "Invalid horizon event"),
        (HorizonEvent(0, 0, 0), "Invalid horizon event"),
        (HorizonEvent(0, 5, -1), "Invalid horizon event"),
        (HorizonEvent(5, 5, 0), "in the middle of a step"),
        (MixtureStageEvent(-10, {"code": Fraction(1)}), "Invalid stage event"),
        (MixtureStageEvent(10, {"code": Fraction(0)}), "Invalid stage event"),
        (MixtureStageEvent(10, {"code": Fraction(-1), "text": Fraction(1)}), "Invalid stage event"),
        (Segment("code", 0, 0, 0, (UnitRange(0, 1, 5),), "c"), "Invalid segment event"),
        (Segment("code", 0, 0, 1, (), "c"), "Invalid segment event"),
        (Segment("code", 0, 0, 1, (UnitRange(0, 1, 5), UnitRange(1, 2, 0)), "c"), "Invalid segment event"),
        (Segment("code", 0, 0, 1, (UnitRange(1, 2, 5), UnitRange(0, 1, 5)), "c"), "Invalid segment event"),
        (Segment("code", 0, 0, 1, (UnitRange(0, 2, 5), UnitRange(1, 3, 5)), "c"), "Invalid segment event"),
        (Segment("code", 0, 0, 1, (UnitRange(2, 2, 5),), "c"), "Invalid segment event"),
        (PlanStart(7, True, 10, ()), "second event of kind 'start'"),
    ],
)
def test_impossible_events_are_refused(tmp_path: Path, event: Any, message: str) -> None:
    start, readers = two()
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    with pytest.raises(DataError, match=message):
        plan.add([event])
    plan.add([HorizonEvent(0, 1, 0), Segment("code", 0, 0, 1, (UnitRange(0, 1, 1), UnitRange(1, 2, 1)), "c")])


@pytest.mark.parametrize("batch", [0, -1])
def test_an_impossible_batch_is_refused(tmp_path: Path, batch: int) -> None:
    start, readers = two()
    with pytest.raises(ConfigError, match=f"A global batch of {batch} rows"):
        DataPlan.create(tmp_path / "plan.jsonl", replace(start, global_batch_sequences=batch), readers)
    DataPlan.create(tmp_path / "one.jsonl", replace(start, global_batch_sequences=1), readers)


def test_a_row_is_found_behind_the_gaps_of_its_segment(tmp_path: Path) -> None:
    reader = FakeRows("code", [3, 4, 5, 2, 6])
    plan = DataPlan.create(tmp_path / "plan.jsonl", PlanStart(7, True, 1, (source_of(reader),)), [reader])
    segment = make_segment(reader, "code", 0, 0, 1, [(0, 1), (2, 3), (4, 5)])
    assert segment is not None
    plan.add([segment])
    found = addresses(plan, 14)
    shorter = FakeRows("code", [3, 4, 5])  # as a reader sees the cache that has not looked again
    for row in range(reader.num_rows):
        unit = int(np.searchsorted(reader.unit_row_starts, row, side="right")) - 1
        place = (0, 0, unit, row - int(reader.unit_row_starts[unit]))
        expected = [found.index(place)] if unit in (0, 2, 4) else []
        assert plan.positions_of(0, row, reader).tolist() == expected
        if row < shorter.num_rows:
            assert plan.positions_of(0, row, shorter).tolist() == expected


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_limits_of_one_source_change_alone(tmp_path: Path, index: int) -> None:
    readers = [FakeRows(name, [9]) for name in ("code", "text", "web")]
    sources = tuple(source_of(reader) for reader in readers)
    plan = DataPlan.create(tmp_path / "plan.jsonl", PlanStart(7, True, 3, sources), readers)
    changed = replace(sources[index], weight=Fraction(5), max_epochs=4, on_exhausted="repeat")
    plan.add([SourceEvent(changed)])
    expected = [changed if number == index else source for number, source in enumerate(sources)]
    assert list(plan.sources) == list(DataPlan.open(plan.path).sources) == expected
    for field in (
        {"row_tokens": 10},
        {"recipe_digest": "ab"},
        {"bucket": Bucket("web", "bytes_per_token", None, None)},
    ):
        with pytest.raises(DataError, match="has changed"):
            plan.add([SourceEvent(replace(changed, **field))])


def test_an_exhausted_source_stays_requested_and_its_rows_are_located_alone(tmp_path: Path) -> None:
    start, readers = two(max_epochs=1, on_exhausted="drop")
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    requested = plan.state.requested_stages
    plan.extend_to(200, readers)
    assert plan.state.requested_stages == requested == plan.stages[:1]
    assert len(plan.stages) == 2
    sources = plan.locate(np.arange(200)).source_index
    for source in (0, 1):
        alone = plan.locate(np.flatnonzero(sources == source))
        assert alone.row.tolist() == plan.locate(np.arange(200)).row[sources == source].tolist()
