"""Connections of this process to stores: one client per name, created on first use.

A name and a function that creates the client go in; the client comes out. Clients live in the background loop of
``requests``. Invariant: a forked child has its own clients and never closes its parent's.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from vorox.data.storage.requests import background, has_background, start

T = TypeVar("T")

Close = Callable[[], Awaitable[None]]


async def client(name: str, create: Callable[[], Awaitable[tuple[T, Close]]]) -> T:
    """Return this process's client of a name, created on first use.

    Args:
        name: Its name.
        create: Returns a new client and the function that closes it.
    """
    clients = background().clients
    if name not in clients:
        created, close = await create()
        if name in clients:  # another task created one meanwhile
            await close()
        else:
            clients[name] = created, close
    return clients[name][0]


async def drop_client(name: str) -> None:
    """Close a client, if it exists. The next request creates a new one from the environment of that moment."""
    _, close = background().clients.pop(name, (None, None))
    if close is not None:
        await close()


def close_connections() -> None:
    """Close every connection of this process. Later requests reconnect, with the environment of that moment."""

    async def close() -> None:
        for name in list(background().clients):
            await drop_client(name)

    if has_background() and background().clients:
        start(close()).result(timeout=10)


@atexit.register
def _close_at_exit() -> None:
    with contextlib.suppress(Exception):
        close_connections()
