"""The ranks of a run as threads of one process, with a channel in memory."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tiny_runs import NumpyBackend, run
from vorox.core.errors import VoroxError
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig

RANK = threading.local()
"""The rank of the thread that runs it."""


class ThreadBackend(NumpyBackend):
    """The numpy engine on the rank of the thread; one rank elsewhere."""

    def connect(self, config: RunConfig) -> DistributedContext:
        return getattr(RANK, "dist", DistributedContext())


class Store:
    """A channel in memory.

    Attributes:
        values: What is stored.
        operations: Number of operations by thread, which is a rank.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.operations: dict[int, Counter[str]] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        self._count("put")
        with self._changed:
            self.values.setdefault(key, value)
            self._changed.notify_all()

    def replace(self, key: str, value: bytes) -> None:
        self._count("replace")
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_seconds: float) -> bytes | None:
        self._count("get")
        with self._changed:
            self._changed.wait_for(lambda: key in self.values, timeout_seconds)
            return self.values.get(key)

    def get_all(self, folder: str, names: Sequence[str], timeout_seconds: float) -> list[bytes] | None:
        self._count("get_all")
        keys = [f"{folder}/{name}" for name in names]
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self.values for key in keys), timeout_seconds):
                return None
            return [self.values[key] for key in keys]

    def remove(self, key: str) -> None:
        self._count("remove")
        with self._changed:
            self.values.pop(key, None)

    def _count(self, operation: str) -> None:
        self.operations.setdefault(threading.get_ident(), Counter())[operation] += 1


def together(
    count: int, program: Callable[[DistributedContext], Any], store: Store | None = None
) -> tuple[list[Any], Store]:
    """What every process of a run gets from one program; an error is a result."""
    store = store or Store()

    def one(index: int) -> Any:
        dist = DistributedContext(index, count, store)
        try:
            with dist.propagating_failure():
                return program(dist)
        except VoroxError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count))), store


def run_ranks(count: int, config: RunConfig) -> list[Any]:
    """What every rank of a run on one machine returned or raised; the first one leads the builds."""

    def program(dist: DistributedContext) -> Any:
        RANK.dist = dist
        dist.local_rank = dist.rank
        return run(config)

    return together(count, program)[0]
