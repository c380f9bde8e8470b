"""Which test runs when: recorded costs of the files in, two pools of workers out, the long files first.

A worker takes whole files, because modules share fixtures. ``-n auto`` starts one worker for every core, which take the
files that compute, and ``WAITING_WORKERS`` more for the files that mostly wait: for servers, child processes and time
limits. A pool whose files are done takes those of the other. A test that took a processor more than
``LONG_TEST_SECONDS`` is slow, whatever its marks: it runs in `make slow`, not in `make test`. ``--record-costs`` (`make
costs`) writes what files and long tests cost to ``costs.json``. A file without a record counts as a long one, so that
nothing waits for it at the end.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

COSTS_FILE = Path(__file__).with_name("costs.json")
COSTS: dict[str, list[float]] = json.loads(COSTS_FILE.read_text()) if COSTS_FILE.exists() else {}
"""File, or long test, to [wall seconds, CPU seconds of the worker and the child processes that it waited for]."""
LONG_TEST_SECONDS = 1.0
WAITING_WORKERS = 2
UNKNOWN_SECONDS = 60.0


def wall_seconds(file: str) -> float:
    return COSTS[file][0] if file in COSTS else UNKNOWN_SECONDS


def mostly_waits(file: str) -> bool:
    wall, cpu = COSTS.get(file, (1.0, 1.0))
    return cpu < wall / 2


def is_long_cost(cost: list[float]) -> bool:
    return cost[1] >= LONG_TEST_SECONDS


def is_long(test: str) -> bool:
    """Whether a test runs in `make slow` because of its cost; the contract is checked by every `make test`."""
    return test in COSTS and is_long_cost(COSTS[test]) and not test.startswith("tests/contract/")


class TwoPools(LoadFileScheduling):
    """Computing files to computing workers and waiting files to waiting workers, in the order of the collection."""

    def _assign_work_unit(self, node: Any) -> None:
        waits = self.numnodes > WAITING_WORKERS and int(node.gateway.id[2:]) % self.numnodes < WAITING_WORKERS
        own = next((file for file in self.workqueue if mostly_waits(file) == waits), None)
        if own is not None:
            self.workqueue.move_to_end(own, last=False)
        super()._assign_work_unit(node)


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class CostRecorder:
    """Measures every test where it runs; the process that hears of all of them writes ``costs.json``."""

    def __init__(self) -> None:
        self._costs: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        item.stash[_STARTED] = time.perf_counter(), _cpu_seconds()
        yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        outcome: Any = yield
        wall, cpu = item.stash[_STARTED]
        now = time.perf_counter(), _cpu_seconds()
        outcome.get_result().user_properties = [("cost", [now[0] - wall, now[1] - cpu])]
        item.stash[_STARTED] = now

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, seconds in report.user_properties:
            if name == "cost":
                for place in (report.nodeid.partition("::")[0], report.nodeid):
                    self._costs[place] = [sum(pair) for pair in zip(self._costs[place], seconds, strict=True)]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            costs = COSTS | {place: [round(seconds, 1) for seconds in cost] for place, cost in self._costs.items()}
            kept = [place for place in sorted(costs) if "::" not in place or is_long_cost(costs[place])]
            lines = [
                f"{json.dumps(place)}: {costs[place]}" for place in kept if Path(place.partition("::")[0]).exists()
            ]
            COSTS_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


_STARTED = pytest.StashKey[tuple[float, float]]()
