"""The background event loop of this process, on which all requests to stores run, and the clients that live with it.

A coroutine goes in; its result, or the ``DataError`` that ended it, comes out in the calling thread. Invariants: one
loop per process, made on first use; a forked child gets a loop and clients of its own and never closes its parent's.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from vorox.data.storage.retry import RetryBudget

T = TypeVar("T")

Close = Callable[[], Awaitable[None]]


class _Background:
    def __init__(self) -> None:
        self.process = os.getpid()
        self.clients: dict[str, tuple[Any, Close]] = {}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="vorox-storage", daemon=True).start()


_lock = threading.Lock()
_made: list[_Background] = []
"""The last one is this process's. Those before came through a fork: they are kept so that not even the garbage
collector closes them, because that would take the parent's sockets out of the poll set that both processes share."""


def _background() -> _Background:
    with _lock:
        if not _made or _made[-1].process != os.getpid():
            _made.append(_Background())
            atexit.register(_close_at_exit, os.getpid())
        return _made[-1]


def _unlock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)


def _close_at_exit(process: int) -> None:
    if process == os.getpid():
        with contextlib.suppress(Exception):
            close_connections()


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the background loop of this process."""
    return _background().loop


def start(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Start work on the background loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop())


def finish(future: Future[T], uri: str, budget: RetryBudget) -> T:
    """Wait for started work; report it as waiting for data once it is late."""
    try:
        with contextlib.suppress(TimeoutError):
            return future.result(timeout=budget.policy.late_seconds)
        if future.done():
            return future.result()
        with budget.waits(uri) as wait:
            wait.because(f"no answer for {budget.policy.late_seconds:g} s", failed=False)
            return future.result()
    except BaseException:
        future.cancel()
        raise


def run(coroutine: Coroutine[Any, Any, T], uri: str, budget: RetryBudget) -> T:
    """Do work on the background loop and wait for it."""
    return finish(start(coroutine), uri, budget)


async def client(name: str, make: Callable[[], Awaitable[tuple[T, Close]]]) -> T:
    """Return the client of this process with a name, made on first use.

    Args:
        name: What it is called.
        make: Makes it, and a function that closes it.
    """
    clients = _background().clients
    if name not in clients:
        made, close = await make()
        if name in clients:  # another task was faster while this one waited
            await close()
        else:
            clients[name] = made, close
    return clients[name][0]


async def drop_client(name: str) -> None:
    """Close a client, if there is one. The next request makes a new one, with the environment as it is then."""
    _, close = _background().clients.pop(name, (None, None))
    if close is not None:
        await close()


def close_connections() -> None:
    """Close every connection of this process. The next request opens new ones, with the environment as it is then."""
    if not _made or _made[-1].process != os.getpid():
        return

    async def close() -> None:
        for name in list(_made[-1].clients):
            await drop_client(name)

    start(close()).result(timeout=10)
