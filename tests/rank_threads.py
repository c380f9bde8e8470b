"""The ranks of a run as threads of one process, with a channel in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vorox.core.distributed_context import DistributedContext
from vorox.core.errors import VoroxError


class Store:
    """A channel in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self.values.setdefault(key, value)
            self._changed.notify_all()

    def get(self, key: str, timeout_seconds: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self.values, timeout_seconds)
            return self.values.get(key)

    def remove(self, key: str) -> None:
        with self._changed:
            for known in [known for known in self.values if known == key or known.startswith(f"{key}/")]:
                del self.values[known]


def together(count: int, program: Callable[[DistributedContext], Any]) -> tuple[list[Any], Store]:
    """What every process of a run gets from one program; an error is a result."""
    store = Store()

    def one(index: int) -> Any:
        dist = DistributedContext(index, count, store)
        try:
            with dist.propagating_failure():
                return program(dist)
        except VoroxError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count))), store
