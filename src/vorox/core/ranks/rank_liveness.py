"""Liveness of ranks: a rank that waits for others learns that one of them is dead, stopped or unreachable.

A thread of every rank renews a sign of life in the store that the ranks share. A rank that waits reads the signs of
those that it waits for: of a process that it can see, the operating system knows whether it is dead or stopped; of any
other, that it was silent for too long. A rank that works for a long time, as one that builds a cache, gives signs all
the while, so a wait may take any time that the work takes, and ends with a verdict if the work has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from vorox.core.errors import LostRankError, StalledError, VoroxError
from vorox.core.files.atomic import canonical_json
from vorox.core.files.file_holder import ProcessIdentity, this_process
from vorox.core.pluralize import pluralize

RENEW_SECONDS = 2.0
_CHECK_SECONDS = 0.5
_JOIN_SECONDS = 2.0
HAS_LOST_RANK = threading.Event()
"""Set once this process knows that another rank is gone: when the interpreter ends, frameworks would wait for it."""


class Store(Protocol):
    """The part of ``distributed_context.Channel`` that signs need."""

    def replace(self, key: str, value: bytes) -> None: ...
    def get(self, key: str, timeout_seconds: float) -> bytes | None: ...


class Liveness:
    """The sign of life of this rank, and what it knows about those of others.

    Args:
        store: The store that the ranks share.
        rank: This rank.
        timeout_seconds: Silence, or time in a stopped state, after which a rank is given up.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self, store: Store, rank: int, timeout_seconds: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._rank, self._timeout_seconds, self._clock = store, rank, timeout_seconds, clock
        self._known: dict[int, tuple[bytes | None, float]] = {}
        self._checked_at = clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="vorox-alive", daemon=True)

    def start(self) -> Liveness:
        """Give signs until the process ends."""
        self._thread.start()
        atexit.register(self.close)
        return self

    def close(self) -> None:
        """Give no more signs. Idempotent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)

    def _renew(self) -> None:
        count = 0
        with contextlib.suppress(Exception):  # the store has ended with rank 0
            while not self._ended.is_set():
                self.renew(count)
                count += 1
                self._ended.wait(RENEW_SECONDS)

    def renew(self, count: int) -> None:
        """Give a sign; each has another number."""
        self._store.replace(_key(self._rank), canonical_json({**this_process().to_json(), "count": count}))

    def lost(self, ranks: Collection[int]) -> VoroxError | None:
        """Return why one of the ranks will not answer; ``None`` if none is known to have ended.

        Called again and again while this rank waits. The time in which it was not called, as that of a suspended
        machine, does not count as silence.
        """
        now = self._clock()
        if now - self._checked_at < _CHECK_SECONDS:
            return None
        paused = now - self._checked_at > self._timeout_seconds / 2
        self._checked_at = now
        for rank in sorted({*ranks} - {self._rank}):
            found = self._store.get(_key(rank), 0.0)
            before, since = self._known.get(rank, (None, now))
            process = None if (found or before) is None else ProcessIdentity.parse(found or before or b"")
            if process is not None and process.is_dead():
                return _dead(rank, process)
            if paused or (found is not None and found != before):
                since = now
            if process is not None and process.is_visible and not process.is_stopped():
                since = now  # it works without giving signs, as native code that holds the interpreter lock
            self._known[rank] = found or before, since
            if now - since > self._timeout_seconds:
                return _silent(rank, process, now - since)
        return None


def _key(rank: int) -> str:
    return f"vorox/alive/{rank}"


def _dead(rank: int, process: ProcessIdentity) -> LostRankError:
    return LostRankError(
        f"Rank {rank} has ended: {process} was killed or crashed while this rank waited for it", where=f"rank {rank}",
        hint="see the output of that rank; the same command on all ranks continues the run",
    )  # fmt: skip


def _silent(rank: int, process: ProcessIdentity | None, seconds: float) -> StalledError:
    who = f"Rank {rank}" if process is None else f"Rank {rank}, {process},"
    is_stopped = process is not None and process.is_visible
    what = "is stopped (SIGSTOP)" if is_stopped else "gives no sign of life"
    hint = "see whether its machine and the network are up; parallel.start_timeout_seconds sets the time"
    return StalledError(
        f"{who} {what} for {pluralize(round(seconds), 'second')}, and this rank waits for it", where=f"rank {rank}",
        hint=f"{'continue (kill -CONT) or end that process' if is_stopped else hint}; the same command on all ranks "
        "continues the run",
    )  # fmt: skip
