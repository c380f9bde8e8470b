"""The storage event loop of this process, and the clients bound to it.

A coroutine goes in; its result, or the ``DataError`` that ended it, is returned in the calling thread. Invariants: one
loop per process, created on first use; a forked child gets its own loop and clients and never closes its parent's.
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
_instances: list[_Background] = []
"""The last one belongs to this process. Earlier ones were inherited by fork and stay referenced, because collecting
them would close their selector and remove the parent's sockets from the epoll set that both processes share."""


def _background() -> _Background:
    with _lock:
        if not _instances or _instances[-1].process != os.getpid():
            _instances.append(_Background())
            atexit.register(_close_at_exit, os.getpid())
        return _instances[-1]


def _reset_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_lock)


def _close_at_exit(process: int) -> None:
    if process == os.getpid():
        with contextlib.suppress(Exception):
            close_connections()


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the background loop of this process."""
    return _background().loop


def start(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Schedule a coroutine on the background loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop())


def finish(future: Future[T], uri: str, budget: RetryBudget) -> T:
    """Wait for scheduled work and return its result; report a stall once it is late."""
    try:
        with contextlib.suppress(TimeoutError):
            return future.result(timeout=budget.policy.late_seconds)
        if future.done():
            return future.result()
        with budget.tracker(uri) as stall:
            stall.report(f"no response for {budget.policy.late_seconds:g} s", failed=False)
            return future.result()
    except BaseException:
        future.cancel()
        raise


def run(coroutine: Coroutine[Any, Any, T], uri: str, budget: RetryBudget) -> T:
    """Run a coroutine on the background loop and return its result."""
    return finish(start(coroutine), uri, budget)


async def client(name: str, create: Callable[[], Awaitable[tuple[T, Close]]]) -> T:
    """Return this process's client of a name, created on first use.

    Args:
        name: Its name.
        create: Returns a new client and the function that closes it.
    """
    clients = _background().clients
    if name not in clients:
        created, close = await create()
        if name in clients:  # another task created one meanwhile
            await close()
        else:
            clients[name] = created, close
    return clients[name][0]


async def drop_client(name: str) -> None:
    """Close a client, if it exists. The next request creates a new one from the environment of that moment."""
    _, close = _background().clients.pop(name, (None, None))
    if close is not None:
        await close()


def close_connections() -> None:
    """Close every connection of this process. Later requests reconnect, with the environment of that moment."""
    if not _instances or _instances[-1].process != os.getpid():
        return

    async def close() -> None:
        for name in list(_instances[-1].clients):
            await drop_client(name)

    start(close()).result(timeout=10)
