"""Shares of a profile: against a count of the milliseconds of a grid."""

from __future__ import annotations

import random

from vorox.core.step_profile import Activity, Interval, Operator, Phase, profile_table, seconds_by_use

LENGTH = 200


def spans(chooser: random.Random, count: int) -> list[Interval]:
    """Intervals of whole seconds, which may overlap and may reach out of the profile."""
    found = ((start, start + chooser.randint(0, 12)) for start in (chooser.randint(-20, LENGTH) for _ in range(count)))
    return [(float(start), float(end)) for start, end in found]


def test_every_second_counts_once_for_the_first_of_its_uses() -> None:
    for seed in range(30):
        chooser = random.Random(seed)
        cuts = [0, *sorted(chooser.sample(range(1, LENGTH), 20)), LENGTH]
        names = [chooser.choice(["data", "step", "sync", "settle", "save", "validation"]) for _ in cuts[1:]]
        phases = [Phase(name, (cuts[i], cuts[i + 1])) for i, name in enumerate(names)]
        compute, communication = spans(chooser, 15), spans(chooser, 15)

        def use(
            second: int, phases: list[Phase] = phases, activity: tuple[list[Interval], ...] = (compute, communication)
        ) -> str:
            phase = next(one.name for one in phases if one.interval[0] <= second < one.interval[1])
            if phase in {"save", "validation"}:
                return phase
            for name, intervals in zip(("compute", "communication"), activity, strict=True):
                if any(start <= second < end for start, end in intervals):
                    return name
            return {"sync": "communication", "data": "data"}.get(phase, "host")

        found = seconds_by_use(Activity(phases, compute, communication))
        uses = [use(second) for second in range(LENGTH)]
        assert {name: seconds for name, seconds in found.items() if seconds} == {
            name: uses.count(name) for name in set(uses)
        }


def test_without_measured_compute_it_belongs_to_the_host() -> None:
    found = seconds_by_use(Activity([Phase("data", (5, 6)), Phase("step", (6, 9)), Phase("sync", (9, 9.5))]))
    assert found == {"communication": 0.5, "data": 1.0, "compute and host": 3.0}


def test_the_table_ranks_by_device_time_where_there_is_any() -> None:
    on_host = [Operator("a::cheap", 2, 0.1, 0.0), Operator("a::dear", 1, 0.5, 0.0)]
    on_device = [Operator("a::dear", 1, 0.5, 0.1), Operator("a::cheap", 2, 0.1, 0.3)]
    for operators, first in ((on_host, "a::dear"), (on_device, "a::cheap")):
        lines = profile_table("Step 1", Activity([Phase("step", (0, 1))], [(0.0, 0.25)], (), operators)).splitlines()
        assert lines[0] == "Step 1: 1,000.0 ms"
        assert "  compute                  25.0%       250.0" in lines
        assert next(line.split()[0] for line in lines if "::" in line) == first
