"""Trying again: what failed for a moment is tried until its unit of work has used up its budget.

An attempt (a coroutine) goes in; its result comes out, or the ``DataError`` that says how often it was tried and why
it failed. Delays are full-jitter exponential, or what the server's Retry-After asks. Invariants: only what may pass by
itself is tried again (never a refusal), every try has a deadline, and what was received stays received: an attempt
that is repeated goes on behind the last byte it got.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import email.utils
import math
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TypeVar

from vorox.core.errors import DataError
from vorox.core.redaction import redact
from vorox.data.storage.contexts import iterated_with
from vorox.data.storage.waiting import Waiter, may_wait

T = TypeVar("T")

Waits = Callable[[str], contextlib.AbstractContextManager[Waiter]]
"""Opens a wait for something of a uri: somebody to tell, until the block is left."""

_LONGEST_RETRY_AFTER_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How patient reading from stores is.

    Attributes:
        retries_per_unit: Failed tries that one unit of work may have in all; some 13 minutes of an outage.
        first_backoff_seconds: The longest delay after the first failure; it doubles with each further one.
        longest_backoff_seconds: Where that ends. The delay is drawn evenly between nothing and this bound.
        connect_seconds: For a connection to stand.
        stall_seconds: Without a byte until a try is given up; the next one goes on behind the last byte.
        try_seconds: For one try in all.
        late_seconds: Without an answer until the reader counts as waiting for data.
        piece_bytes: Asked for at a time.
        first_connection_seconds: Without a connection to a store that this process never reached, until it is given
            up: a wrong name or a missing network is said before a run begins, not after the whole budget.
    """

    retries_per_unit: int = 60
    first_backoff_seconds: float = 0.5
    longest_backoff_seconds: float = 30.0
    connect_seconds: float = 10.0
    stall_seconds: float = 20.0
    try_seconds: float = 300.0
    late_seconds: float = 5.0
    piece_bytes: int = 8 << 20
    first_connection_seconds: float = 60.0


class TransientError(Exception):
    """What may pass by itself. Leaves this room only as the reason of a ``DataError``.

    Args:
        reason: For a person, without secrets: ``HTTP 503``.
        retry_after_seconds: What the server asked to wait.
    """

    def __init__(self, reason: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class NoConnection(TransientError):
    """Nobody answered at the store's address: the network, the name or the store may be away."""


class StoreUnreachable(DataError):
    """A store did not answer rightly for as long as was to be waited: it may later."""


class RetryBudget:
    """The failed tries that one unit of work has left, shared by all its readers and threads.

    Args:
        policy: How patient to be.
        waits: Whom failed and late tries are told; by default everybody who asks whether data is waited for.
    """

    def __init__(self, policy: RetryPolicy, waits: Waits = may_wait) -> None:
        self.policy, self.waits = policy, waits
        self._left = policy.retries_per_unit
        self._lock = threading.Lock()

    @property
    def left(self) -> int:
        return self._left

    def spend(self, uri: str, reason: str) -> None:
        """Take one, or raise the error that ends the unit."""
        with self._lock:
            self._left -= 1
            if self._left >= 0:
                return
        raise StoreUnreachable(
            f"the store did not answer rightly in {self.policy.retries_per_unit + 1:,} tries; the last time: {reason}",
            where=uri, hint="check the network and the store, then run the same command again; nothing is lost",
        )  # fmt: skip


_reached: set[str] = set()
"""Stores that this process has had a connection to."""


class FirstConnection:
    """The time that a store which was never reached has left.

    Args:
        uri: Something in the store.
        limit_seconds: From now until it is given up.
    """

    def __init__(self, uri: str, limit_seconds: float) -> None:
        self._uri, self._limit_seconds = uri, limit_seconds
        self._store = "/".join(uri.split("/", 3)[:3])
        self._deadline = time.monotonic() + limit_seconds

    def made(self) -> None:
        """The store answered, whatever it said."""
        _reached.add(self._store)

    def deadline_text(self) -> str:
        """When it is given up, for a person; empty for a store that was reached."""
        if self._store in _reached:
            return ""
        left_seconds = max(0.0, self._deadline - time.monotonic())
        return f" (gives up at {time.strftime('%H:%M:%S UTC', time.gmtime(time.time() + left_seconds))})"

    def seconds_left(self, reason: str) -> float:
        """How long another try may wait.

        Raises:
            StoreUnreachable: No longer.
        """
        if self._store in _reached:
            return math.inf
        left_seconds = self._deadline - time.monotonic()
        if left_seconds <= 0:
            raise StoreUnreachable(
                f"the store was not reached in {self._limit_seconds:g} s; the last time: {reason}", where=self._uri,
                hint="check the name and the network, or name files on this machine in data.sources.N.paths; then run "
                "the same command again",
            )  # fmt: skip
        return left_seconds


_current: contextvars.ContextVar[RetryBudget | None] = contextvars.ContextVar("retry_budget", default=None)


@contextlib.contextmanager
def retry_budget(policy: RetryPolicy | None = None, *, waits: Waits | None = None) -> Generator[RetryBudget]:
    """Let everything that is read inside share one budget: a unit of work. Without it every reader has its own.

    Args:
        policy: How patient to be. ``None``: as outside, else as ``RetryPolicy`` says.
        waits: Whom failed and late tries are told. ``None``: as outside.
    """
    outside = _current.get() or RetryBudget(RetryPolicy())
    budget = RetryBudget(policy or outside.policy, waits or outside.waits)
    token = _current.set(budget)
    try:
        yield budget
    finally:
        _current.reset(token)


def in_one_budget(items: Iterator[T], policy: RetryPolicy) -> Iterator[T]:
    """The same items, all read out of one budget: for generators, which must not set it for whoever iterates."""
    return iterated_with(items, _current, RetryBudget(policy))


def current_budget(otherwise: RetryBudget | None = None) -> RetryBudget:
    """The budget of the unit of work around the caller, else the one given, else a new one."""
    return _current.get() or otherwise or RetryBudget(RetryPolicy())


def backoff_seconds(policy: RetryPolicy, failures: int, jitter: random.Random) -> float:
    """Delay after so many failures in a row: evenly drawn from nothing to the exponential bound ("full jitter")."""
    bound = min(policy.longest_backoff_seconds, policy.first_backoff_seconds * 2.0 ** min(failures - 1, 60))
    return jitter.random() * bound


def retry_after_seconds(value: str | None, *, now_unix_seconds: float | None = None) -> float | None:
    """What a Retry-After header asks for: a number of seconds or a date; ``None`` if there is none or it is neither."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        then = email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError):
        return None
    return max(0.0, then - (time.time() if now_unix_seconds is None else now_unix_seconds))


def jitter_of(uri: str) -> random.Random:
    """Where delays are drawn from: they decide no result, and must differ between processes that failed together."""
    return random.Random(f"{os.getpid()} {uri}")


async def with_retries(
    attempt: Callable[[], Awaitable[T]],
    *,
    uri: str,
    budget: RetryBudget,
    jitter: random.Random | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    progress: Callable[[], int] = lambda: 0,
    has_deadline: bool = True,
) -> T:
    """Repeat an attempt until it succeeds, is refused, or the budget is used up.

    Args:
        attempt: One try. It raises ``TransientError`` for what may pass, a ``DataError`` for what will not.
        uri: What it is about, for messages.
        budget: Of the unit of work.
        jitter: Where delays are drawn from.
        sleep: How to wait.
        progress: Bytes received so far: a try that got further starts the delays anew.
        has_deadline: Whether a try may take ``try_seconds`` only; not so where each of its requests has a limit.

    Raises:
        DataError: A refusal, or too many failures.
    """
    policy, jitter = budget.policy, jitter or jitter_of(uri)
    failures, before = 0, progress()
    contact = FirstConnection(uri, policy.first_connection_seconds)
    with budget.waits(uri) as wait:
        while True:
            try:
                async with asyncio.timeout(policy.try_seconds if has_deadline else None):
                    result = await attempt()
                contact.made()
                return result
            except TimeoutError:
                failure = TransientError(f"the try took longer than {policy.try_seconds:g} s")
            except TransientError as error:
                failure = error
                if not isinstance(error, NoConnection):
                    contact.made()
            if (now := progress()) > before:
                failures, before = 0, now
            failures += 1
            reason = redact(failure.reason)
            wait.because(reason + contact.deadline_text())
            budget.spend(uri, reason)
            longest_seconds = contact.seconds_left(reason)
            asked = failure.retry_after_seconds or 0.0
            if asked > _LONGEST_RETRY_AFTER_SECONDS:
                raise DataError(
                    f"the store asks to come back in {asked:,.0f} s ({reason})", where=uri,
                    hint="run the same command again then; nothing is lost",
                )  # fmt: skip
            await sleep(min(max(asked, backoff_seconds(policy, failures, jitter)), longest_seconds))
