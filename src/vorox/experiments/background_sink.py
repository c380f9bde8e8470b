"""Sinks whose client runs in a background thread, so that it never blocks a step."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping

QUEUE_STEPS = 100_000
"""Capacity of the queue; further steps are dropped and counted."""
CLOSE_SECONDS = 30.0
_POLL_SECONDS = 0.5

Entries = Iterator[tuple[int, dict[str, float]]]
"""Steps and their values, in the order of writing; it ends when the sink is closed."""


class BackgroundSink:
    """Passes values to a client through a queue.

    Args:
        name: Name of the sink.
        send: Starts the client, passes it all entries and closes it; runs in the background thread.
    """

    def __init__(self, name: str, send: Callable[[Entries], None]) -> None:
        self.name = name
        self._send = send
        self._dropped = 0
        self._error: BaseException | None = None
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(QUEUE_STEPS)
        self._thread = threading.Thread(target=self._work, name=f"vorox-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Enqueue the values of a step; never blocks."""
        self._raise()
        try:
            self._queue.put_nowait((step, dict(values)))
        except queue.Full:
            self._dropped += 1
            raise RuntimeError(f"the client is blocked; {self._dropped} steps were dropped") from None

    def flush(self) -> None:
        """Report an error of the background thread, which sends without being flushed."""
        self._raise()

    def close(self) -> None:
        """Wait for queued values, up to ``CLOSE_SECONDS``, and for the room that the end takes in a full queue."""
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=min(_POLL_SECONDS, CLOSE_SECONDS))
                break
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._raise()
        if self._thread.is_alive():
            raise TimeoutError(f"the client has not finished within {CLOSE_SECONDS:g} s")

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        try:
            self._send(iter(self._queue.get, None))
        except BaseException as error:
            self._error = error
