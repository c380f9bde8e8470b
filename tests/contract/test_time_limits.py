"""The suite is quick: its recorded cost is held, and a test that hangs fails and shows where every thread stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scheduling import (
    COSTS,
    FAST,
    FAST_PART_CPU_SECONDS,
    SLOW,
    UNRECORDED_CPU_SECONDS,
    CostRecorder,
    cpu_seconds,
    draw,
    is_of_other_part,
    is_slow_module,
    part_of,
    slow_costs,
    tree_hash,
)

ROOT = Path(__file__).parents[2]

HANGS = """
import ctypes, threading

def waits_beside():
    threading.Event().wait()

def test_hangs():
    threading.Thread(target=waits_beside, daemon=True).start()
    {hang}
"""


@pytest.mark.parametrize(
    ("hang", "limit"),
    [
        ("threading.Event().wait()", ["-o", "timeout=1"]),
        ("while True: ctypes.PyDLL(None).sleep(1000)", ["-o", "timeout=0", "-o", "faulthandler_timeout=1"]),
    ],
    ids=["waiting", "deaf"],
)
def test_what_hangs_fails_and_shows_every_thread(tmp_path: Path, hang: str, limit: list[str]) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS.format(hang=hang))
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:xdist", *limit, "."]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 1, found.stdout + found.stderr
    assert "waits_beside" in found.stdout + found.stderr
    assert "test_hangs" in found.stdout + found.stderr


def test_every_test_has_a_limit(request: pytest.FixtureRequest) -> None:
    config = request.config
    assert 0 < float(config.getini("timeout")) < float(config.getini("faulthandler_timeout"))
    assert config.getini("faulthandler_exit_on_timeout")


def test_the_quick_tests_take_less_than_eight_minutes_of_two_cores() -> None:
    """By the records. Make tests cheaper, or mark them slow, and record their costs: `make costs ARGS=FILE`."""
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "tests").rglob("test_*.py")}
    quick = [file for file, path in files.items() if not is_slow_module(path.read_text(encoding="utf-8"))]
    slow_only = {test.partition("::")[0] for test in COSTS} - COSTS.keys()  # each test has a record
    costs = {
        file: COSTS[file][1] if file in COSTS else 0.0 if file in slow_only else UNRECORDED_CPU_SECONDS
        for file in quick
    }
    most = sorted(costs, key=costs.__getitem__, reverse=True)[:10]
    assert sum(costs.values()) < FAST_PART_CPU_SECONDS, {file: costs[file] for file in most}


@pytest.mark.parametrize(
    ("text", "is_slow"),
    [
        ("pytestmark = pytest.mark.slow\n", True),
        ("pytestmark = [pytest.mark.torch, pytest.mark.slow]\n", True),
        ("pytestmark = [\n    pytest.mark.torch,\n    pytest.mark.slow,  # [for a reason]\n]\nX = 1\n", True),
        ("pytestmark = [\n    pytest.mark.torch,\n]\n\n\n@pytest.mark.slow\ndef test_it() -> None: ...\n", False),
        ("pytestmark = pytest.mark.torch\nX = [pytest.mark.slow]\n", False),
        ("@pytest.mark.slow\ndef test_it() -> None: ...\n", False),
    ],
)
def test_files_without_a_test_of_a_part_are_left_out(text: str, is_slow: bool) -> None:
    assert is_slow_module(text) == is_slow
    assert is_of_other_part("tests/test_any.py", text, FAST) == is_slow
    assert not is_of_other_part("tests/test_any.py", text, SLOW), "it has a slow test"
    assert not is_of_other_part("tests/test_any.py", text, "")


def test_a_file_without_slow_tests_is_left_out_unless_a_test_is_long() -> None:
    recorded = next(test for test, cost in COSTS.items() if "::" in test and cost[1] > 5).partition("::")[0]
    assert is_of_other_part("tests/test_any.py", "def test_it() -> None: ...\n", SLOW)
    assert not is_of_other_part(recorded, "def test_it() -> None: ...\n", SLOW)


def test_a_run_reports_what_the_quick_tests_cost_and_which_of_them_are_long() -> None:
    recorder, lines = CostRecorder(writes=False), []
    reports = [
        ("a.py::quick", 0.125, False, False), ("a.py::quick", 0.125, False, False), ("a.py::slow", 50.0, True, False),
        ("b.py::long", 2.0, False, False), ("b.py::imports", 3.0, False, True),
        ("tests/contract/c.py::it", 4.0, False, False),
    ]  # fmt: skip
    for test, seconds, is_slow, imports in reports:
        properties = [("cost", [2 * seconds, seconds]), ("slow", is_slow), ("imports", imports)]
        recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=test, user_properties=properties))  # type: ignore[arg-type]
    config = SimpleNamespace(option=SimpleNamespace(markexpr=FAST))
    recorder.pytest_terminal_summary(SimpleNamespace(write_line=lines.append), config)  # type: ignore[arg-type]
    assert lines == [
        f"The quick tests took 9 s of CPU time; they may take {FAST_PART_CPU_SECONDS:,.0f} s.",
        "  2.0 s in b.py::long: make it cheaper, or mark it slow",
    ]
    assert recorder._files() == {"a.py": [0.5, 0.25], "b.py": [6.0, 3.0], "tests/contract/c.py": [8.0, 4.0]}


def test_parts_of_the_matrix_divide_it_at_about_equal_cost() -> None:
    costs = slow_costs(test for test in COSTS if "::" in test)
    parts = [part_of(costs, index, 4) for index in range(1, 5)]
    assert sorted(name for part in parts for name in part) == sorted(costs)
    sums = [sum(costs[name] for name in part) for part in parts]
    assert max(sums) - min(sums) <= max(costs.values())


def test_a_tree_draws_the_same_tests_every_time_and_every_test_is_drawn_by_some_tree() -> None:
    costs = {f"test_{index}": 1.0 + index % 7 for index in range(60)} | {"test_huge": 150.0}
    drawn = [draw(costs, 1.0, f"tree {index}") for index in range(60)]
    assert drawn == [draw(dict(reversed(costs.items())), 1.0, f"tree {index}") for index in range(60)]
    assert all(80 < sum(costs[name] for name in names) <= 100 for names in drawn)
    assert set().union(*drawn) == costs.keys() - {"test_huge"}, "one that is longer than the draw is in no draw"
    assert max(cost for cost in slow_costs(COSTS).values()) < 12 * 100, "CI draws 12 minutes: every test fits"


def test_the_hash_of_a_tree_depends_on_its_content_not_on_what_is_committed(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "one")
    one = tree_hash(tmp_path)
    (tmp_path / "file").write_text("two")
    two = tree_hash(tmp_path)
    assert two != one
    git("commit", "--all", "-m", "two")
    assert tree_hash(tmp_path) == two


@pytest.mark.parametrize(
    ("complete", "reason", "outcome"),
    [
        ("1", "rocket is not installed", "failed"),
        ("1", "sbatch not installed", "skipped"),
        ("1", "needs a GPU", "skipped"),
        ("", "rocket is not installed", "skipped"),
    ],
)
def test_what_is_missing_is_an_error_where_all_must_be_installed(
    tmp_path: Path, complete: str, reason: str, outcome: str
) -> None:
    (tmp_path / "test_it.py").write_text(f"import pytest\n\ndef test_it() -> None:\n    pytest.skip({reason!r})\n")
    (tmp_path / "conftest.py").write_text("from tests_conftest import *  # noqa: F403\n")
    (tmp_path / "tests_conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-q", "test_it.py"]
    environment = os.environ | {"TESTS_COMPLETE": complete, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'src'}"}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert f"1 {outcome}" in found.stdout, found.stdout + found.stderr


SERVER = """
import os, time
if os.fork() == 0:
    while time.process_time() < 0.5: pass
    os._exit(0)
os.wait()
print(flush=True)
input()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="running children are read from /proc")
def test_the_cost_of_a_test_is_that_of_processes_forked_by_a_server_that_goes_on() -> None:
    before = cpu_seconds()
    with subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        during = cpu_seconds()
        server.communicate(b"\n")
    assert during - before > 0.4
    assert cpu_seconds() - during < 0.4, "none of it counts twice"
