"""The plan: exact coverage, inverse, prefix stability, errors, damage, every crash of an append, 10^8 rows."""

from __future__ import annotations

import hashlib
import time
import tracemalloc
from collections import Counter
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crash_enumeration import crash_states, record
from fake_rows import FakeRows
from vorox.core.errors import ConfigError, DataError
from vorox.core.files.chained_log import HashChainedLog
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_events import PlanSource, PlanStart


def source(reader: FakeRows, weight: str = "1", max_epochs: int | None = None) -> PlanSource:
    return PlanSource(reader.name, Fraction(weight), reader.recipe.digest, reader.row_tokens, max_epochs)


def two_sources() -> tuple[PlanStart, list[FakeRows]]:
    readers = [FakeRows("code", [5, 0, 9, 3]), FakeRows("text", [11])]
    sources = source(readers[0], "0.7"), source(readers[1], "0.3")
    return PlanStart(seed=7, shuffle=True, global_batch_sequences=10, sources=sources), readers


def rows_at(plan: DataPlan, positions: range) -> list[tuple[int, int, int]]:
    found = plan.locate(np.arange(positions.start, positions.stop))
    return list(zip(found.source_index.tolist(), found.epoch.tolist(), found.row.tolist(), strict=True))


def test_every_epoch_of_every_source_is_complete(tmp_path: Path) -> None:
    start, readers = two_sources()
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    plan.extend_to(400, readers)
    seen = Counter(rows_at(plan, range(400)))
    assert set(seen.values()) == {1}
    per_source = [sorted((e, r) for s, e, r in seen if s == index) for index in (0, 1)]
    assert [len(rows) for rows in per_source] == [280, 120]
    for rows, reader in zip(per_source, readers, strict=True):
        complete = len(rows) // reader.num_rows
        assert rows[: complete * reader.num_rows] == [(e, r) for e in range(complete) for r in range(reader.num_rows)]


def test_every_global_batch_has_the_exact_mixture(tmp_path: Path) -> None:
    start, readers = two_sources()
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    plan.extend_to(300, readers)
    by_batch = plan.locate(np.arange(300)).source_index.reshape(30, 10)
    assert (by_batch.sum(axis=1) == 3).all()
    # Each batch shuffles its slots differently: source 1 is not always in the same ones.
    assert len({tuple(batch) for batch in by_batch.tolist()}) > 20


@pytest.mark.parametrize("shuffle", [True, False])
def test_positions_of_inverts_locate(tmp_path: Path, shuffle: bool) -> None:
    start, readers = two_sources()
    start = PlanStart(start.seed, shuffle, start.global_batch_sequences, start.sources)
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    for position in (30, 180, 250):  # several segments
        plan.extend_to(position, readers)
    rows = rows_at(plan, range(plan.num_positions))
    for index, reader in enumerate(readers):
        for row in range(reader.num_rows):
            expected = [position for position, (s, _, r) in enumerate(rows) if (s, r) == (index, row)]
            assert plan.positions_of(index, row, reader).tolist() == expected
            assert len(expected) > 3


def test_without_shuffle_sources_are_read_in_stored_order(tmp_path: Path) -> None:
    reader = FakeRows("code", [4, 3])
    start = PlanStart(1, False, 2, (source(reader),))
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, [reader])
    plan.extend_to(16, [reader])
    assert [row for _, _, row in rows_at(plan, range(16))] == [*range(7), *range(7), 0, 1]


def test_frozen_order(tmp_path: Path) -> None:
    """Never to be changed under the same format names: runs are replayed from their plans."""
    start, readers = two_sources()
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    plan.extend_to(40, readers)
    assert rows_at(plan, range(10, 20)) == [
        (0, 0, 0),
        (0, 0, 7),
        (0, 0, 5),
        (1, 0, 5),
        (0, 0, 14),
        (1, 0, 4),
        (1, 0, 7),
        (0, 0, 6),
        (0, 0, 3),
        (0, 0, 8),
    ]


def test_frozen_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests of plans in checkpoints stay valid."""
    _, readers = two_sources()
    monkeypatch.setattr(DataPlan, "check", lambda plan, readers: None)
    limits = (("0.7", None), ("0.3", 40))
    sources = tuple(
        PlanSource(reader.name, Fraction(weight), "ab" * 32, 9, max_epochs)
        for reader, (weight, max_epochs) in zip(readers, limits, strict=True)
    )
    plan = DataPlan.create(tmp_path / "plan.jsonl", PlanStart(7, True, 10, sources), readers)
    plan.extend_to(40, readers)
    plan.extend_to(130, readers)
    assert plan.digest == "61d85dcdd1924bb1af2b579b1b88a3134a07ae8858ee98bf6e783fb4d792e96c"
    written = hashlib.sha256(plan.path.read_bytes()).hexdigest()
    assert written == "2486b0088fc8fc6d1f89301676f0d9df8210818df7fb88597b4c5f8f2b4499e1"


def test_every_epoch_has_an_order_of_its_own(tmp_path: Path) -> None:
    reader = FakeRows("code", [300])
    plan = DataPlan.create(tmp_path / "plan.jsonl", PlanStart(1, True, 4, (source(reader),)), [reader])
    plan.extend_to(900, [reader])
    positions = np.array([plan.positions_of(0, row, reader) for row in range(300)])
    place_in_epoch = np.argsort(np.argsort(positions, axis=0), axis=0)
    for first, second in [(0, 1), (1, 2), (0, 2)]:
        assert np.count_nonzero(place_in_epoch[:, first] == place_in_epoch[:, second]) < 10  # one expected


@pytest.mark.parametrize("change", ["seed", "name", "content"])
def test_order_depends_on_seed_source_and_content(tmp_path: Path, change: str) -> None:
    orders: list[list[int]] = []
    for variant in (0, 1):
        name = f"code{variant}" if change == "name" else "code"
        reader = FakeRows(name, [500], content=variant if change == "content" else 0)
        start = PlanStart(variant if change == "seed" else 0, True, 4, (source(reader),))
        plan = DataPlan.create(tmp_path / f"{variant}.jsonl", start, [reader])
        plan.extend_to(500, [reader])
        orders.append([row for _, _, row in rows_at(plan, range(500))])
    assert sorted(orders[0]) == sorted(orders[1])
    assert sum(a == b for a, b in zip(*orders, strict=True)) < 10


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 500), min_size=1, max_size=6), st.integers(0, 2**60))
def test_however_it_is_extended_the_order_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, targets: list[int], seed: int
) -> None:
    start, readers = two_sources()
    start = PlanStart(seed, True, start.global_batch_sequences, start.sources)
    directory = tmp_path_factory.mktemp("plans")
    at_once = DataPlan.create(directory / "a.jsonl", start, readers)
    at_once.extend_to(max(targets), readers)
    stepwise = DataPlan.create(directory / "b.jsonl", start, readers)
    for target in targets:
        before = rows_at(stepwise, range(stepwise.num_positions))
        stepwise.extend_to(target, readers)
        assert stepwise.num_positions >= target
        assert rows_at(stepwise, range(len(before))) == before
    reopened = DataPlan.open(directory / "b.jsonl")
    assert (reopened.digest, reopened.num_events) == (stepwise.digest, stepwise.num_events)
    common = range(min(at_once.num_positions, stepwise.num_positions))
    assert rows_at(reopened, common) == rows_at(at_once, common)


def test_a_longer_cache_joins_at_the_next_epoch_and_moves_nothing(tmp_path: Path) -> None:
    reader = FakeRows("code", [6, 6])
    start = PlanStart(3, True, 4, (source(reader),))
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, [reader])
    plan.extend_to(20, [reader])
    before = rows_at(plan, range(plan.num_positions))
    extended = FakeRows("code", [6, 6, 5])
    plan.check([extended])
    plan.extend_to(44, [extended])
    after = rows_at(plan, range(plan.num_positions))
    assert after[: len(before)] == before
    assert [sorted(row for _, e, row in after if e == epoch) for epoch in (1, 2)] == [[*range(12)], [*range(17)]]


def test_a_process_that_follows_prepares_before_the_new_events_count(tmp_path: Path) -> None:
    start, readers = two_sources()
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    other = DataPlan.open(plan.path)
    plan.extend_to(50, readers)
    seen: list[tuple[int, int]] = []
    assert other.refresh(lambda state: seen.append((state.num_positions, other.num_positions)))
    assert seen == [(plan.num_positions, 0)]
    assert other.digest == plan.digest


def test_extending_to_what_is_covered_writes_nothing(tmp_path: Path) -> None:
    start, readers = two_sources()
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    plan.extend_to(50, readers)
    content, digest = plan.path.read_bytes(), plan.digest
    plan.extend_to(plan.num_positions, readers)
    assert (plan.path.read_bytes(), plan.digest) == (content, digest)


def test_a_million_epochs_are_one_event(tmp_path: Path) -> None:
    reader = FakeRows("tiny", [3])
    plan = DataPlan.create(tmp_path / "plan.jsonl", PlanStart(1, True, 8, (source(reader),)), [reader])
    plan.extend_to(3_000_000, [reader])
    assert plan.num_events == 2
    occurrences = np.concatenate([plan.positions_of(0, row, reader) for row in range(3)])
    assert np.array_equal(np.sort(occurrences), np.arange(3_000_000))
    found = plan.locate(occurrences[::1000])
    assert found.row.tolist() == [0] * 1000 + [1] * 1000 + [2] * 1000
    assert int(plan.locate(np.arange(2_999_992, 3_000_000)).epoch.max()) == 999_999


def test_uncovered_positions_are_refused(tmp_path: Path) -> None:
    start, readers = two_sources()
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    assert plan.num_positions == 0
    plan.extend_to(5, readers)
    assert plan.num_positions % 10 == 0
    for position in (-1, plan.num_positions):
        with pytest.raises(DataError, match="is not covered: the data plan has"):
            plan.locate(np.array([0, position]))


def test_max_epochs_names_source_and_step_and_writes_nothing(tmp_path: Path) -> None:
    readers = [FakeRows("code", [100]), FakeRows("text", [11])]
    sources = source(readers[0], "0.7"), source(readers[1], "0.3", max_epochs=2)
    plan = DataPlan.create(tmp_path / "plan.jsonl", PlanStart(1, True, 10, sources), readers)
    plan.extend_to(70, readers)
    assert plan.num_positions == 70  # 7 steps take 21 of the 22 rows that two epochs of source "text" have
    content = plan.path.read_bytes()
    with pytest.raises(DataError, match=r"Source 'text' is exhausted at step 8: max_epochs is 2 .* 11 rows") as caught:
        plan.extend_to(80, readers)
    assert caught.value.where == "data.sources.1.max_epochs"
    assert plan.path.read_bytes() == content


def test_an_empty_source_is_refused(tmp_path: Path) -> None:
    reader = FakeRows("code", [0])
    plan = DataPlan.create(tmp_path / "plan.jsonl", PlanStart(1, True, 4, (source(reader),)), [reader])
    with pytest.raises(DataError, match="'code' has no rows"):
        plan.extend_to(1, [reader])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (FakeRows("code", [5, 0, 9, 3], content=1), "units 0 to 4 no longer hold the 17 rows"),
        (FakeRows("code", [5, 0, 9, 2]), "source 'code' changed"),
        (FakeRows("code", [5, 0, 12]), "source 'code' changed"),
        (FakeRows("code", [5, 0, 9, 3], row_tokens=10), "was made for"),
        (FakeRows("code", [5, 0, 9, 3], vocab_size=501), "was made for"),
    ],
)
def test_another_cache_is_refused(tmp_path: Path, changed: FakeRows, message: str) -> None:
    start, readers = two_sources()
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    plan.extend_to(100, readers)
    plan.check(readers)
    with pytest.raises(DataError, match=message):
        plan.check([changed, readers[1]])
    with pytest.raises(DataError, match=message):
        DataPlan.open_or_create(plan.path, start, [changed, readers[1]])


def test_other_settings_are_refused_on_a_begun_plan(tmp_path: Path) -> None:
    start, readers = two_sources()
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    assert DataPlan.open_or_create(plan.path, start, readers).digest == plan.digest
    with pytest.raises(ConfigError, match="seed = 7, the configuration 8"):
        DataPlan.open_or_create(plan.path, PlanStart(8, True, 10, start.sources), readers)
    with pytest.raises(DataError, match="plan already exists"):
        DataPlan.create(plan.path, start, readers)


def test_sources_of_one_name_are_refused(tmp_path: Path) -> None:
    reader = FakeRows("code", [5])
    with pytest.raises(ConfigError, match=r"is also the name of data\.sources\.0"):
        DataPlan.create(
            tmp_path / "plan.jsonl", PlanStart(1, True, 4, (source(reader), source(reader))), [reader, reader]
        )
    assert not (tmp_path / "plan.jsonl").exists()


def test_digest_at_tells_prefixes(tmp_path: Path) -> None:
    start, readers = two_sources()
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    first = plan.digest
    plan.extend_to(50, readers)
    assert plan.digest_at(1) == first
    assert plan.digest_at(plan.num_events) == plan.digest != first
    assert plan.digest_at(0) is None
    assert plan.digest_at(plan.num_events + 1) is None


SEGMENT = {
    "kind": "segment", "source": "code", "start_draw": 0, "epoch": 0, "num_epochs": 1, "ranges": [[0, 4, 17]],
    "content_digest": "c",
}  # fmt: skip


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({**SEGMENT, "kind": "window"}, "kind 'window'"),
        ({**SEGMENT, "window": 64}, "unknown field 'window'"),
        ({key: value for key, value in SEGMENT.items() if key != "epoch"}, "no field 'epoch'"),
        ({**SEGMENT, "num_rows": 17}, "unknown field 'num_rows'"),
        ({**SEGMENT, "num_epochs": "1"}, "num_epochs = '1'"),
        ({**SEGMENT, "num_epochs": True}, "num_epochs = True"),
        ({**SEGMENT, "ranges": [[0, 4, 0]]}, "Invalid segment event"),
        ({**SEGMENT, "source": "other"}, "Invalid segment event"),
        ({**SEGMENT, "ranges": [[4, 4, 17]]}, "Invalid segment event"),
        ({**SEGMENT, "start_draw": 1}, "does not continue"),
        ({**SEGMENT, "epoch": 1}, "does not continue"),
    ],
)
def test_unknown_events_are_refused(tmp_path: Path, event: dict[str, object], message: str) -> None:
    start, readers = two_sources()
    path = DataPlan.create(tmp_path / "plan.jsonl", start, readers).path
    HashChainedLog(path).append([SEGMENT])
    assert DataPlan.open(path).num_events == 2
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    HashChainedLog(path).append([event])
    with pytest.raises(DataError, match=message) as caught:
        DataPlan.open(path)
    assert caught.value.where == f"{path}:2"


@pytest.mark.parametrize(
    ("units", "is_refused"), [([4, 6], False), ([3, 5], True), ([0, 4], True), ([1, 2], True), ([2, 9], True)]
)
def test_a_pass_that_grows_reads_no_unit_twice(tmp_path: Path, units: list[int], is_refused: bool) -> None:
    """Units 0 to 3 are read; more of the same pass may follow, but none of these again."""
    start, readers = two_sources()
    path = DataPlan.create(tmp_path / "plan.jsonl", start, readers).path
    HashChainedLog(path).append([SEGMENT, {**SEGMENT, "start_draw": 17, "ranges": [[*units, 5]]}])
    refused = pytest.raises(DataError, match="does not continue") if is_refused else nullcontext()
    with refused:
        assert DataPlan.open(path).num_events == 3


@pytest.mark.parametrize("field", ["format", "order", "mixture"])
def test_another_version_is_refused(tmp_path: Path, field: str) -> None:
    start, readers = two_sources()
    path = DataPlan.create(tmp_path / "a.jsonl", start, readers).path
    body = HashChainedLog(path).read()[0][0]
    HashChainedLog(tmp_path / "b.jsonl").append([{**body, field: "next/2"}])
    with pytest.raises(DataError, match="next/2"):
        DataPlan.open(tmp_path / "b.jsonl")


def test_another_format_is_refused_with_the_command_that_trains_again(tmp_path: Path) -> None:
    HashChainedLog(tmp_path / "plan.jsonl").append([{"kind": "start", "format": "plan/1", "seed": 7}])
    with pytest.raises(DataError, match=r"format 'plan/1', but this version reads 'plan/2'") as caught:
        DataPlan.open(tmp_path / "plan.jsonl")
    assert caught.value.hint == f"train the run again: vorox train {tmp_path / 'config.yaml'} --resume never"


def test_no_plan(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Run has no data plan"):
        DataPlan.open(tmp_path / "plan.jsonl")


def test_damage_before_the_last_line_is_refused(tmp_path: Path) -> None:
    start, readers = two_sources()
    plan = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    plan.extend_to(100, readers)
    content = plan.path.read_bytes()
    last_line = content.rstrip(b"\n").rfind(b"\n")
    for offset in range(0, last_line, 7):
        plan.path.write_bytes(content[:offset] + bytes([content[offset] ^ 4]) + content[offset + 1 :])
        with pytest.raises(DataError):
            DataPlan.open(plan.path)


def test_another_writer_is_noticed(tmp_path: Path) -> None:
    start, readers = two_sources()
    first = DataPlan.create(tmp_path / "plan.jsonl", start, readers)
    second = DataPlan.open(first.path)
    first.extend_to(50, readers)
    with pytest.raises(DataError, match="Another process changed the data plan"):
        second.extend_to(60, readers)


def test_every_crash_of_create_and_extend_leaves_a_plan_that_continues(tmp_path: Path) -> None:
    """After a crash at any write, open_or_create and extend_to give the positions of a run without a crash."""
    start, readers = two_sources()
    for already in (0, 60):
        before, live = tmp_path / f"before{already}", tmp_path / f"live{already}"
        before.mkdir()
        live.mkdir()
        for directory in (before, live):
            if already:
                DataPlan.create(directory / "plan.jsonl", start, readers).extend_to(already, readers)

        def run(live: Path = live) -> None:
            plan = DataPlan.open_or_create(live / "plan.jsonl", start, readers)
            plan.extend_to(150, readers)
            plan.extend_to(260, readers)

        operations = record(run)
        straight = DataPlan.open(live / "plan.jsonl")
        expected = rows_at(straight, range(260))
        states = 0
        for name, directory in crash_states(before, live, operations, tmp_path / f"scratch{already}"):
            plan = DataPlan.open_or_create(directory / "plan.jsonl", start, readers)
            assert plan.num_positions >= already, name
            covered = plan.num_positions
            assert rows_at(plan, range(min(covered, 260))) == expected[:covered], name
            plan.extend_to(260, readers)
            assert rows_at(DataPlan.open(plan.path), range(260)) == expected, name
            states += 1
        assert states > 15


def test_a_hundred_million_rows_cost_nothing(tmp_path: Path) -> None:
    """10^8 rows in 24,415 units: opening, and finding any batch or any row, is independent of their number."""
    reader = FakeRows("web", [4096] * 24_414 + [256])
    assert reader.num_rows == 100_000_000
    start = PlanStart(5, True, 512, (source(reader),))
    DataPlan.create(tmp_path / "plan.jsonl", start, [reader]).extend_to(250_000_000, [reader])
    tracemalloc.start()
    began = time.perf_counter()
    plan = DataPlan.open(tmp_path / "plan.jsonl")
    plan.check([reader])
    positions = np.arange(125_000_192, 125_000_192 + 512)
    found = plan.locate(positions)
    seconds = time.perf_counter() - began
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 0.5  # measured: 5 ms
    assert peak_bytes < 8 << 20
    assert plan.num_events == 2
    assert set(found.epoch.tolist()) == {1}
    assert len(set(found.row.tolist())) == 512
    for position, row in zip(positions[:20].tolist(), found.row[:20].tolist(), strict=True):
        occurrences = plan.positions_of(0, row, reader)
        assert position in occurrences.tolist()
        assert plan.locate(occurrences).row.tolist() == [row] * len(occurrences)
