"""What holds for all tests: which frameworks there are, in which order they run, and how JAX starts.

A test says what it needs by its mark (``torch``, ``jax``, ``hf``) or by the folder that it lies in; where that is not
installed it is left out, and the summary says so. ``TESTS_WITHOUT=torch,jax`` hides frameworks that are there.
JAX sees several devices on the CPU and compiles equal functions once, also from one run of the suite to the next; both
are read when JAX starts, which no test module does on import.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import platform
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eventually import wait_until
from scheduling import (
    WAITING_WORKERS,
    CostRecorder,
    TwoPools,
    draw,
    function_of,
    is_long,
    is_of_other_part,
    part_of,
    slow_costs,
    tree_hash,
    wall_seconds,
)
from vorox.core.platform import environment
from vorox.core.platform.environment import usable_cores


def _compiled_code() -> Path:
    """Where compiled code is kept for the next run; another folder for a processor that can do other things."""
    cpuinfo = Path("/proc/cpuinfo")
    features = re.findall(r"^(?:flags|Features)\s*:.*", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    digest = hashlib.sha256((features[0] if features else platform.processor()).encode()).hexdigest()
    return Path(__file__).parents[1] / ".cache" / "tests" / digest[:12]


if "PYTEST_XDIST_WORKER" not in os.environ:  # workers take it over
    _STATE = tempfile.TemporaryDirectory(prefix="vorox-state-")
    os.environ["XDG_STATE_HOME"] = _STATE.name  # where a user's trust in the code of runs is kept
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_compiled_code() / "jax"))
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_compiled_code() / "inductor"))
# A pool of compiling processes imports PyTorch in each, which takes longer than the few kernels of a test.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Compiling takes longer than running what was compiled. The same setting everywhere keeps equal bits equal.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

PACKAGES = {"torch": "torch", "jax": "jax", "hf": "transformers"}
FOLDERS = {"backends/torch_engine": {"torch"}, "backends/jax_engine": {"jax"}, "huggingface": {"torch", "hf"},
           "parity": {"torch", "jax"}}  # fmt: skip
"""Folders whose modules import a framework when they are collected."""


class _Hidden:
    """Makes packages look as if they were not installed."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:  # fmt: skip
        if name.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])
        return None


_WITHOUT = {name for name in os.environ.get("TESTS_WITHOUT", "").split(",") if name}
if _WITHOUT:
    # transformers runs without torch, but nothing of what is tested with it does.
    hidden = {"torch": {"torch", "transformers"}, "jax": {"jax", "jaxlib", "flax", "optax", "orbax"}}
    sys.meta_path.insert(0, _Hidden(set().union(*(hidden[name] for name in _WITHOUT))))


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


SLOW_LIMIT_SECONDS = 1800
TESTS = Path(__file__).parent
MISSING = {mark for mark, package in PACKAGES.items() if not _is_installed(package)}
collect_ignore = [folder for folder, needed in FOLDERS.items() if needed & MISSING]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without tests of the part that runs: importing what they test takes every worker seconds."""
    part = config.option.markexpr
    if not part or collection_path.suffix != ".py" or not collection_path.is_relative_to(TESTS):
        return None
    file = collection_path.relative_to(TESTS.parent).as_posix()
    return True if is_of_other_part(file, collection_path.read_text(encoding="utf-8"), part) else None


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` deselects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if is_long(item.nodeid):
            item.add_marker(pytest.mark.slow)
        for mark in sorted(MISSING):
            if item.get_closest_marker(mark) is not None:
                item.add_marker(pytest.mark.skip(reason=f"{PACKAGES[mark]} is not installed"))
        if item.get_closest_marker("slow") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_SECONDS))
    _select_part(config, items)
    part = config.option.markexpr
    items.sort(key=lambda item: (-wall_seconds(file := item.nodeid.partition("::")[0], part), file))


def _select_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the slow tests of a part (``--part``) or of a draw (``--draw-minutes``)."""
    part, minutes = config.option.part, config.option.draw_minutes
    if part is None and minutes is None:
        return
    costs = slow_costs(item.nodeid for item in items if item.get_closest_marker("slow") is not None)
    if part is not None:
        index, _, count = part.partition("/")
        chosen = part_of(costs, int(index), int(count))
    else:
        chosen = draw(costs, minutes, config.option.draw_tree)
    left_out = [item for item in items if function_of(item.nodeid) not in chosen]
    items[:] = [item for item in items if function_of(item.nodeid) in chosen]
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return usable_cores() + WAITING_WORKERS


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TwoPools:
    return TwoPools(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-costs", action="store_true", help="Write what files and long tests cost to tests/costs.json."
    )
    parser.addoption("--part", metavar="K/N", help="Run part K of N of the slow tests, divided by recorded cost.")
    parser.addoption(
        "--draw-minutes", type=float, metavar="M", help="Run slow tests of M minutes, drawn by the hash of the tree."
    )
    parser.addoption("--draw-tree", metavar="HASH", help="Draw what the tree of this hash draws (default: this tree).")


def _let_hypothesis_wait() -> None:
    """A busy machine draws examples slowly; that is no fault of a test."""
    with contextlib.suppress(ImportError):
        from hypothesis import HealthCheck, settings

        settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("busy")


def _begin_elsewhere(config: pytest.Config) -> None:
    """Let every worker collect the files from another one on.

    All workers collect all files. Where nothing is compiled yet, each compiles a part and loads the others' parts.
    """
    if not hasattr(config, "workerinput") or [Path(name).resolve() for name in config.args] != [TESTS]:
        return
    files = [str(file) for file in sorted(TESTS.rglob("test_*.py"))]
    index, count = int(config.workerinput["workerid"][2:]), config.workerinput["workercount"]
    first = len(files) * index // count
    config.args[:] = files[first:] + files[:first]


def _ask_git_once() -> None:
    """Let git describe the tree of the project once: every run records it, and no test changes it."""
    ask, answers = environment._git, dict[tuple[str, ...], bytes | None]()  # pyright: ignore[reportPrivateUsage]

    def remember(directory: Path, *arguments: str) -> bytes | None:
        if not directory.is_relative_to(TESTS.parent):
            return ask(directory, *arguments)
        question = (str(directory), *arguments)
        if question not in answers:
            answers[question] = ask(directory, *arguments)
        return answers[question]

    environment._git = remember  # pyright: ignore[reportPrivateUsage]


def pytest_configure(config: pytest.Config) -> None:
    _begin_elsewhere(config)
    _let_hypothesis_wait()
    _ask_git_once()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell started the tests in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what they start on a terminal obeys Ctrl-C
    if config.option.draw_minutes is not None and config.option.draw_tree is None:
        config.option.draw_tree = tree_hash(TESTS.parent)  # workers take it over
    config.pluginmanager.register(CostRecorder(writes=config.getoption("--record-costs")))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FailureReport(config))
    if (config.option.part or config.option.draw_minutes) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_SelectionReport())


@pytest.fixture(autouse=True)
def _no_request_outlives_its_test() -> Iterator[None]:
    """Fail where a request to a store is retried after its test; the next test would wait for data in its place."""
    yield
    requests: Any = sys.modules.get("vorox.data.storage.requests")
    if requests is None or not requests.has_background():
        return
    loop = requests.background().loop
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not asyncio.all_tasks(loop), seconds=10)
    left = asyncio.all_tasks(loop)
    for task in left:
        loop.call_soon_threadsafe(task.cancel)
    assert not left


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = [f"without {', '.join(sorted(MISSING))}: left out {', '.join(collect_ignore)}"] if MISSING else []
    if config.option.part is not None:
        lines.append(f"matrix: part {config.option.part}")
    elif config.option.draw_minutes is not None:
        lines.append(
            f"matrix: {config.option.draw_minutes:g} minutes, drawn by tree {config.option.draw_tree} "
            f"(the same again: --draw-tree {config.option.draw_tree})"
        )
    return lines


IS_COMPLETE = os.environ.get("TESTS_COMPLETE") == "1"
"""Set by `.ci/run`, which installs all that the tests use: what is missing is an error there, and skipped elsewhere."""
_ABSENCE = re.compile(r"not installed|could not import|No module named")
_MAY_BE_ABSENT = re.compile(r"sbatch|slurm|munge|kube|sky|vllm", re.IGNORECASE)
"""Programs of clusters and of GPUs, which are on few machines."""


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    outcome: Any = yield
    _fail_if_absent(outcome.get_result())


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    outcome: Any = yield
    _fail_if_absent(outcome.get_result())


def _fail_if_absent(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Fail a test, or a module, that is skipped for something that is not installed where all must be."""
    if IS_COMPLETE and report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        reason = str(report.longrepr[2])
        if _ABSENCE.search(reason) and not _MAY_BE_ABSENT.search(reason):
            report.outcome = "failed"
            report.longrepr = f"{reason}\nTESTS_COMPLETE=1 makes this an error; without it, the test is skipped."


class _FailureReport:
    """Name a failure when it happens: the report of all of them comes last, or never where time runs out."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._config.get_terminal_writer().line(f"\nFAILED {report.nodeid} ({report.when})")


class _SelectionReport:
    """Print which test functions of the matrix ran, from the reports of all workers."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
            self._counts[function_of(report.nodeid)] += 1

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(f"This part of the matrix: {len(self._counts)} functions")
        for function, count in sorted(self._counts.items()):
            terminalreporter.write_line(f"  {function}" + (f" ({count} cases)" if count > 1 else ""))
