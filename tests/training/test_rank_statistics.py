"""Stragglers in times that are made up, and what ranks tell each other, through the exchange of a step."""

from __future__ import annotations

from typing import Any

import pytest

from vorox.records.log import RunLog
from vorox.runtime.heartbeat import PHASES
from vorox.training.loop.rank_statistics import RankStatistics, Straggler, StragglerDetector

STEPS = 100


def found(
    times: list[tuple[float, float]], *, steps: int = STEPS, detector: StragglerDetector | None = None
) -> list[Straggler]:
    detector = detector or StragglerDetector(window_seconds=10.0, num_windows=3)
    return [one for _ in range(steps) if (one := detector.add(times)) is not None]


@pytest.mark.parametrize(("slow", "cause"), [((0.0, 2.0), "compute"), ((1.5, 0.5), "data")])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_slow_rank_is_named_with_its_cause_after_three_windows(
    world_size: int, slow: tuple[float, float], cause: str
) -> None:
    times = [(0.0, 1.0)] * world_size
    times[1] = slow if cause == "compute" else (1.5, 1.0)
    stragglers = found(times, steps=40)
    assert stragglers, "the windows have 10 s or less of the median rank"
    assert {(one.rank, one.cause) for one in stragglers} == {(1, cause)}
    assert stragglers[0].ratio == pytest.approx(2.0 if cause == "compute" else 2.5)
    assert stragglers[0].excess_seconds == pytest.approx(1.0 if cause == "compute" else 1.5)
    assert not found(times, steps=20 if world_size > 2 else 12), "two windows are not enough"


def test_equal_and_slightly_different_ranks_are_none() -> None:
    assert not found([(0.0, 1.0)] * 4)
    assert not found([(0.0, 1.0), (0.1, 1.2), (0.0, 0.9), (0.0, 1.4)])


def test_a_rank_that_is_slow_for_one_window_or_ranks_in_turn_are_none() -> None:
    detector = StragglerDetector(window_seconds=10.0, num_windows=3)
    even, one, two = [(0.0, 1.0)] * 4, [(0.0, 5.0), *[(0.0, 1.0)] * 3], [*[(0.0, 1.0)] * 3, (0.0, 5.0)]
    for times in [even, one, even, two, one, two, even] * 3:
        assert not found(times, steps=10, detector=detector)


def test_the_wait_for_the_slowest_rank_is_not_its_compute() -> None:
    """In a step of two ranks, the fast one waits in the sum of gradients for as long as the other computes longer."""

    class Engine:
        collective_seconds = 0.0

        def device_stats(self) -> dict[str, float]:
            return {}

    engine: Any = Engine()
    seconds = dict.fromkeys(PHASES, 0.0)
    mine = RankStatistics(engine, seconds, RunLog(None), lambda step: True)
    for step in (1, 2):
        assert "compute_seconds" not in mine.report(step), "the first step compiles, and is timed when it has ended"
        engine.collective_seconds += 3600.0
        mine.end_step()
        seconds["step"] += 3600.0 + 7.0 * step
        seconds["data"] += 5.0 * step
        seconds["sync"] += 3600.0
        engine.collective_seconds += 60.0  # in a validation after the step
    report = mine.report(3)
    assert (report["compute_seconds"], report["waited_seconds"]) == (14.0, 10.0)


def test_metrics_are_combined_by_their_reductions_and_a_straggler_is_logged() -> None:
    logged: list[str] = []
    log = RunLog(None, echo=lambda text, level: logged.append(f"{level}: {text}"))
    detector = StragglerDetector(window_seconds=1.0, num_windows=1)
    main = RankStatistics(None, {}, log, lambda step: True, detector)  # type: ignore[arg-type]
    main.receive([{"host": "a"}, {"host": "b"}])
    assert not main.metrics, "the first step compiles"
    memory = [{"memory/host_bytes": 3.0, "memory/host_available_bytes": 7.0}]
    memory += [{"memory/host_bytes": 5.0, "memory/host_available_bytes": 2.0}]
    first = {"waited_seconds": 0.0, "compute_seconds": 1.0, "metrics": memory[0]}
    second = {"waited_seconds": 1.0, "compute_seconds": 1.0, "metrics": memory[1]}
    main.receive([first, second])
    assert main.metrics == {
        "ranks/slowest_seconds": 2.0, "ranks/median_seconds": 1.5, "memory/host_bytes": 5.0,
        "memory/host_available_bytes": 2.0,
    }  # fmt: skip
    assert logged == [
        "warning: Rank 1 on host b is slower than the others: it waits for its batches 1.00 s longer per step (2.0 "
        "times the median)"
    ]
