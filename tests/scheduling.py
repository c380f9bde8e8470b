"""Which test runs when: recorded costs of the files in, two pools of workers out, the long files first.

A worker takes whole files, because modules share fixtures. ``-n auto`` starts one worker for every core, which take the
files that compute, and ``WAITING_WORKERS`` more for the files that mostly wait: for servers, child processes and time
limits. A pool whose files are done takes those of the other. A test that took a processor more than
``LONG_TEST_SECONDS`` is slow, whatever its marks: it runs in `make matrix`, not in `make test`. A file without tests of
the part that runs is not even imported. ``--record-costs`` (`make costs`) writes to ``costs.json`` what the quick tests
of a file cost together, and what each long test costs. A file without a record counts as a long one, so that nothing
waits for it at the end.

`make test` may take 8 minutes on two cores. Its cost is held in processor seconds, which depend least on the load of a
machine: ``tests/contract/test_time_limits.py`` fails if the records exceed ``FAST_PART_CPU_SECONDS``, and every run
reports what it cost, and which quick tests are long.

The slow tests are the matrix (`make matrix`). ``--part k/n`` runs one of n parts of about equal cost: what a part holds
depends on names and recorded costs only. ``--draw-minutes M`` runs as many tests as take M minutes of two cores, drawn
by the hash of the tree: every run of the same tree draws the same, another tree draws others. Both divide by test
function, because its cases share fixtures.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

COSTS_FILE = Path(__file__).with_name("costs.json")
COSTS: dict[str, list[float]] = json.loads(COSTS_FILE.read_text()) if COSTS_FILE.exists() else {}
"""The quick tests of a file, or a long test, to [wall seconds, CPU seconds of the worker and its child processes]."""
LONG_TEST_SECONDS = 0.35
WAITING_WORKERS = 2
UNKNOWN_SECONDS = 300.0
"""Longer than most files, so that one without a record, which may be the longest, does not begin at the end."""
FAST_PART_CPU_SECONDS = 550.0
"""What the quick tests may cost by the records: 8 minutes beside the check of types on slower cores."""
UNRECORDED_CPU_SECONDS = 5.0
MANY_MODULES = 100
"""A test that imports more is the first of its worker that needs a framework."""
FAST, SLOW = "not slow", "slow"
"""The parts of the suite, as ``-m`` names them."""
_MODULE_MARKS = re.compile(r"^pytestmark = (\[\n.*?^\]|.*?$)", re.MULTILINE | re.DOTALL)


def is_long_cost(cost: list[float]) -> bool:
    return cost[1] >= LONG_TEST_SECONDS


def is_long(test: str) -> bool:
    """Whether a test runs in `make matrix` because of its cost; the contract is checked by every `make test`."""
    return test in COSTS and is_long_cost(COSTS[test]) and not test.startswith("tests/contract/")


def _long_tests() -> Mapping[str, list[float]]:
    """Files to [wall seconds, CPU seconds] of their long tests."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for test, cost in COSTS.items():
        if "::" in test and is_long(test):
            file = test.partition("::")[0]
            sums[file] = [sum(pair) for pair in zip(sums[file], cost, strict=True)]
    return sums


LONG_TESTS = _long_tests()


def cost_of(file: str, part: str) -> list[float] | None:
    """Return [wall seconds, CPU seconds] of a file's tests in a part of the suite or, without one, in all of it."""
    quick, long = COSTS.get(file), LONG_TESTS.get(file)
    if part in (FAST, SLOW):
        return quick if part == FAST else long
    return [sum(pair) for pair in zip(quick, long, strict=True)] if quick and long else quick or long


def wall_seconds(file: str, part: str) -> float:
    return (cost_of(file, part) or [UNKNOWN_SECONDS])[0]


def mostly_waits(file: str, part: str) -> bool:
    wall, cpu = cost_of(file, part) or (1.0, 1.0)
    return cpu < wall / 2


def is_slow_module(text: str) -> bool:
    """Whether the marks of a module make all of its tests slow."""
    return any(re.search(r"\bmark\.slow\b", found[1]) for found in _MODULE_MARKS.finditer(text))


def is_of_other_part(file: str, text: str, part: str) -> bool:
    """Whether a file has no test in a part of the suite, by its marks and the recorded costs."""
    if part == FAST:
        return is_slow_module(text)
    return part == SLOW and "mark.slow" not in text and file not in LONG_TESTS


UNRECORDED_SLOW_CPU_SECONDS = 20.0
DRAWN_CPU_SECONDS_PER_MINUTE = 100.0
"""Recorded cost of a minute of two cores: less than 120, for start-up, collection, and files that end last."""


def function_of(test: str) -> str:
    """The test function of a case."""
    return test.partition("[")[0]


def slow_costs(tests: Iterable[str]) -> dict[str, float]:
    """Map the functions of some slow tests to their recorded CPU seconds."""
    costs: defaultdict[str, float] = defaultdict(float)
    for test in tests:
        costs[function_of(test)] += COSTS[test][1] if test in COSTS else 0.0
    return {function: cost or UNRECORDED_SLOW_CPU_SECONDS for function, cost in costs.items()}


def part_of(costs: Mapping[str, float], part: int, num_parts: int) -> set[str]:
    """The functions of part 1..n: each, the costliest first, joins the part that costs least so far."""
    sums = [0.0] * num_parts
    chosen: set[str] = set()
    for function in sorted(costs, key=lambda name: (-costs[name], name)):
        least = sums.index(min(sums))
        sums[least] += costs[function]
        if least == part - 1:
            chosen.add(function)
    return chosen


def draw(costs: Mapping[str, float], minutes: float, tree: str) -> set[str]:
    """The functions that a tree draws: in an order of its hash, each that the time left allows."""
    left = minutes * DRAWN_CPU_SECONDS_PER_MINUTE
    chosen: set[str] = set()
    for function in sorted(costs, key=lambda name: hashlib.sha256(f"{tree} {name}".encode()).digest()):
        if costs[function] <= left:
            left -= costs[function]
            chosen.add(function)
    return chosen


def tree_hash(root: Path) -> str:
    """The hash of git's tree of everything in a checkout that git does not ignore, committed or not."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"GIT_INDEX_FILE": f"{folder}/index"}
        for command in (["read-tree", "HEAD"], ["add", "--all"]):
            subprocess.run(["git", *command], cwd=root, env=environment, check=True, capture_output=True)
        command = ["git", "write-tree"]
        found = subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True, text=True)
    return found.stdout.strip()


class TwoPools(LoadFileScheduling):
    """Computing files to computing workers and waiting files to waiting workers, in the order of the collection."""

    def _assign_work_unit(self, node: Any) -> None:
        waits = self.numnodes > WAITING_WORKERS and int(node.gateway.id[2:]) % self.numnodes < WAITING_WORKERS
        part = self.config.option.markexpr
        own = next((file for file in self.workqueue if mostly_waits(file, part) == waits), None)
        if own is not None:
            self.workqueue.move_to_end(own, last=False)
        super()._assign_work_unit(node)


def cpu_seconds() -> float:
    """CPU seconds of this process, of the children that it waited for, and on Linux of those that run, with theirs.

    A server that forks the ranks of many tests ends with the worker, so what it waited for is that of no test then.
    """
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return own + sum(map(_cpu_seconds_of, _running_children()))


def _running_children() -> Iterator[int]:
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            yield from map(int, (thread / "children").read_text().split())


def _cpu_seconds_of(process: int) -> float:
    """CPU seconds of a process and of the children that it waited for; 0 if it has just ended."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


class CostRecorder:
    """Measures every test where it runs; the process that hears of all of them reports, and writes ``costs.json``."""

    def __init__(self, *, writes: bool) -> None:
        self._writes = writes
        self._tests: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._slow: set[str] = set()
        self._importing: set[str] = set()

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        item.stash[_STARTED] = time.perf_counter(), cpu_seconds()
        item.stash[_MODULES] = len(sys.modules)
        yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        outcome: Any = yield
        wall, cpu = item.stash[_STARTED]
        now = time.perf_counter(), cpu_seconds()
        is_slow = item.get_closest_marker("slow") is not None
        imports = len(sys.modules) - item.stash[_MODULES] > MANY_MODULES
        cost = [now[0] - wall, now[1] - cpu]
        outcome.get_result().user_properties = [("cost", cost), ("slow", is_slow), ("imports", imports)]
        item.stash[_STARTED] = now

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: dict[str, Any] = dict(report.user_properties)
        if "cost" in properties:
            measured = self._tests[report.nodeid]
            self._tests[report.nodeid] = [sum(pair) for pair in zip(measured, properties["cost"], strict=True)]
            if properties["slow"]:
                self._slow.add(report.nodeid)
            if properties["imports"]:
                self._importing.add(report.nodeid)

    def _is_long(self, test: str) -> bool:
        """Whether a test costs much by itself, not because it is the first that imports a framework."""
        stays = test in self._importing or test.startswith("tests/contract/")
        return is_long_cost(self._tests[test]) and not stays

    def _quick(self) -> dict[str, list[float]]:
        """The measured tests that run in `make test`."""
        return {test: cost for test, cost in self._tests.items() if test not in self._slow and not self._is_long(test)}

    def _files(self) -> dict[str, list[float]]:
        files: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for test, cost in self._quick().items():
            file = test.partition("::")[0]
            files[file] = [sum(pair) for pair in zip(files[file], cost, strict=True)]
        return files

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if config.option.markexpr != FAST or len(self._files()) < 2:
            return
        quick = {test: cost[1] for test, cost in self._tests.items() if test not in self._slow}
        limit = f"they may take {FAST_PART_CPU_SECONDS:,.0f} s"
        terminalreporter.write_line(f"The quick tests took {sum(quick.values()):,.0f} s of CPU time; {limit}.")
        long = quick.keys() - self._quick().keys()
        for test in sorted(long, key=quick.__getitem__, reverse=True)[:10]:
            terminalreporter.write_line(f"  {quick[test]:.1f} s in {test}: make it cheaper, or mark it slow")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._writes and not hasattr(session.config, "workerinput"):
            tests = {test: cost for test, cost in self._tests.items() if test not in self._importing}
            files = {} if session.config.option.markexpr == SLOW else self._files()  # their quick tests did not run
            costs = COSTS | {place: [round(seconds, 1) for seconds in cost] for place, cost in (tests | files).items()}
            kept = [place for place in sorted(costs) if "::" not in place or is_long_cost(costs[place])]
            lines = [
                f"{json.dumps(place)}: {costs[place]}" for place in kept if Path(place.partition("::")[0]).exists()
            ]
            COSTS_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


_STARTED = pytest.StashKey[tuple[float, float]]()
_MODULES = pytest.StashKey[int]()
