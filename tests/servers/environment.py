"""Pointing this process at a server for a while, with all connections closed before and after."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from vorox.data.storage import close_connections


@contextmanager
def pointed_at(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block."""
    before = {name: os.environ.get(name) for name in variables}
    close_connections()
    os.environ.update(variables)
    try:
        yield
    finally:
        close_connections()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
