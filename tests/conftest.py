"""What holds for all tests: which frameworks there are, and how JAX starts.

A test says what it needs by its mark (``torch``, ``jax``, ``hf``) or by the folder that it lies in; where that is not
installed it is left out, and the summary says so. ``VOROX_TESTS_WITHOUT=torch,jax`` hides frameworks that are there.
JAX sees several devices on the CPU and compiles equal functions once; both are read when JAX starts, which no test
module does on import.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir(), "vorox-tests-jax")))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

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


MISSING = {mark for mark, package in PACKAGES.items() if not _is_installed(package)}
collect_ignore = [folder for folder, needed in FOLDERS.items() if needed & MISSING]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in sorted(MISSING):
            if item.get_closest_marker(mark) is not None:
                item.add_marker(pytest.mark.skip(reason=f"{PACKAGES[mark]} is not installed"))
    # Workers take whole files: those with the longest tests come first, or the last of them keeps everybody waiting.
    tests_of, slow_of = Counter(item.path for item in items), Counter[Path]()
    slow_of.update(item.path for item in items if item.get_closest_marker("slow") is not None)
    items.sort(key=lambda item: (-slow_of[item.path], -tests_of[item.path], item.path))


def pytest_report_header() -> list[str]:
    return [f"without {', '.join(sorted(MISSING))}: left out {', '.join(collect_ignore)}"] if MISSING else []
