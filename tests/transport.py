"""What arrives in another process: a value sent through a pipe of ``multiprocessing``, as workers get theirs."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def received(value: T) -> T:
    """The value as the other end of a pipe has it. A thread reads, since a pipe holds little."""
    reading, writing = multiprocessing.Pipe(duplex=False)
    with reading, writing, ThreadPoolExecutor(1) as pool:
        arrived = pool.submit(reading.recv)
        writing.send(value)
        return arrived.result(60)
