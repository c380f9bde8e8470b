"""What holds for all tests: which frameworks there are, in which order they run, and how JAX starts.

A test says what it needs by its mark (``torch``, ``jax``, ``hf``) or by the folder that it lies in; where that is not
installed it is left out, and the summary says so. ``VOROX_TESTS_WITHOUT=torch,jax`` hides frameworks that are there.
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
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eventually import wait_until
from scheduling import WAITING_WORKERS, CostRecorder, TwoPools, is_long, is_of_other_part, wall_seconds
from vorox.core import environment
from vorox.core.environment import usable_cores


def _compiled_code() -> Path:
    """Where compiled code is kept for the next run; another folder for a processor that can do other things."""
    cpuinfo = Path("/proc/cpuinfo")
    features = re.findall(r"^(?:flags|Features)\s*:.*", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    digest = hashlib.sha256((features[0] if features else platform.processor()).encode()).hexdigest()
    return Path(__file__).parents[1] / ".cache" / "tests" / digest[:12]


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
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


_WITHOUT = {name for name in os.environ.get("VOROX_TESTS_WITHOUT", "").split(",") if name}
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
    part = config.option.markexpr
    items.sort(key=lambda item: (-wall_seconds(file := item.nodeid.partition("::")[0], part), file))


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
    _ask_git_once()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell started the tests in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what they start on a terminal obeys Ctrl-C
    config.pluginmanager.register(CostRecorder(writes=config.getoption("--record-costs")))


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


def pytest_report_header() -> list[str]:
    return [f"without {', '.join(sorted(MISSING))}: left out {', '.join(collect_ignore)}"] if MISSING else []
