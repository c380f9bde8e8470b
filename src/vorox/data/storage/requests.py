"""Requests to stores: run in the background, and retried within the budget of a unit of work.

An attempt (a coroutine) goes in; its result comes out, or a ``DataError`` with the number of tries and the last reason.
Delays are exponential with full jitter, or as long as the server's Retry-After requests. Invariants: only transient
failures are retried, never a refusal; every try has a deadline; bytes already received are kept, and a repeated attempt
continues behind the last one; one event loop per process, and a forked child has its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from vorox.core.errors import DataError
from vorox.core.redaction import redact
from vorox.core.schema.data import SourceConfig
from vorox.data.storage.stalls import StallTracker, track_stall

T = TypeVar("T")
V = TypeVar("V")

_LONGEST_RETRY_AFTER_SECONDS = 3600.0
_STOP_POLL_SECONDS = 0.5
"""Poll interval of a thread that waits for a late request and may be stopped."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How patiently stores are read.

    Attributes:
        retries_per_unit: Failed tries allowed for one unit of work; about 13 minutes of an outage.
        first_backoff_seconds: Upper bound of the delay after the first failure; doubles with every further one.
        longest_backoff_seconds: Limit of that bound. Delays are uniform between zero and the bound.
        connect_seconds: Time limit for a connection.
        stall_seconds: Time limit without a byte; the next try continues behind the last byte.
        try_seconds: Time limit of one try.
        late_seconds: Time without a response after which the reader counts as waiting for data.
        request_bytes: Largest range of one request.
        first_connection_seconds: Time limit for the first connection to a store, so that a wrong name or a missing
            network fails before a run starts, not after the whole budget.
    """

    retries_per_unit: int = 60
    first_backoff_seconds: float = 0.5
    longest_backoff_seconds: float = 30.0
    connect_seconds: float = 10.0
    stall_seconds: float = 20.0
    try_seconds: float = 300.0
    late_seconds: float = 5.0
    request_bytes: int = 8 << 20
    first_connection_seconds: float = 60.0

    @classmethod
    def from_source(cls, config: SourceConfig) -> RetryPolicy:
        return cls(retries_per_unit=config.max_retries_per_unit, stall_seconds=config.stall_seconds)


class TransientError(Exception):
    """A failure worth a retry. Never leaves this package, except as the reason of a ``DataError``.

    Args:
        reason: For a person, without secrets: ``HTTP 503``.
        retry_after_seconds: The delay that the server requests.
    """

    def __init__(self, reason: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class NoConnection(TransientError):
    """No response at the store's address: the network or the store is down, or the name is wrong."""


class StoreUnreachable(DataError):
    """A store gave no usable response within the retry budget. It may later."""


class RetryBudget:
    """The failed tries that one unit of work has left, shared by all its readers and threads.

    Args:
        policy: How patient to be.
        tracker: Receives failed and late tries; by default they count as waiting for data.
    """

    def __init__(self, policy: RetryPolicy, tracker: StallTracker = track_stall) -> None:
        self.policy, self.tracker = policy, tracker
        self._left = policy.retries_per_unit
        self._lock = threading.Lock()

    @property
    def left(self) -> int:
        return self._left

    def spend(self, uri: str, reason: str) -> None:
        """Use one retry.

        Raises:
            StoreUnreachable: None is left.
        """
        with self._lock:
            self._left -= 1
            if self._left >= 0:
                return
        raise StoreUnreachable(
            f"Unexpected response from the store in {self.policy.retries_per_unit + 1:,} tries; last: {reason}",
            where=uri, hint="check the network and the store, then run the same command again; nothing is lost",
        )  # fmt: skip


_reached: set[str] = set()
"""Stores that this process has connected to."""


class FirstConnection:
    """The time limit for the first connection to a store.

    Args:
        uri: An object of the store.
        limit_seconds: The limit, from now.
    """

    def __init__(self, uri: str, limit_seconds: float) -> None:
        self._uri, self._limit_seconds = uri, limit_seconds
        self._store = "/".join(uri.split("/", 3)[:3])
        self._deadline = time.monotonic() + limit_seconds

    def mark_reached(self) -> None:
        """Record that the store responded, with any status."""
        _reached.add(self._store)

    def deadline_text(self) -> str:
        """Return the deadline for a person; empty for a store that was reached."""
        if self._store in _reached:
            return ""
        left_seconds = max(0.0, self._deadline - time.monotonic())
        return f" (gives up at {time.strftime('%H:%M:%S UTC', time.gmtime(time.time() + left_seconds))})"

    def seconds_left(self, reason: str) -> float:
        """Return how long the next try may be delayed.

        Raises:
            StoreUnreachable: The time is up.
        """
        if self._store in _reached:
            return math.inf
        left_seconds = self._deadline - time.monotonic()
        if left_seconds <= 0:
            raise StoreUnreachable(
                f"The store was not reached in {self._limit_seconds:g} s; last: {reason}", where=self._uri,
                hint="check the name and the network, or use local files in data.sources.N.paths; then run the same "
                "command again",
            )  # fmt: skip
        return left_seconds


def run_in_context(items: Iterator[T], variable: contextvars.ContextVar[V], value: V) -> Iterator[T]:
    """Yield the items of an iterator that runs with ``variable`` set to ``value``; its consumer does not see the value.

    A generator that is left early is closed in the same context.
    """
    context = contextvars.copy_context()
    context.run(variable.set, value)
    try:
        while True:
            try:
                item = context.run(next, items)
            except StopIteration:
                return
            yield item
    finally:
        if isinstance(items, Generator):
            context.run(cast("Generator[T]", items).close)


_current: contextvars.ContextVar[RetryBudget | None] = contextvars.ContextVar("retry_budget", default=None)


@contextlib.contextmanager
def retry_budget(policy: RetryPolicy | None = None, *, tracker: StallTracker | None = None) -> Generator[RetryBudget]:
    """Share one budget among all reads of a unit of work, until the block ends. Without it, every reader has its own.

    Args:
        policy: How patient to be. ``None`` inherits the enclosing budget's, else the default.
        tracker: Receives failed and late tries. ``None`` inherits.
    """
    outer = _current.get() or RetryBudget(RetryPolicy())
    budget = RetryBudget(policy or outer.policy, tracker or outer.tracker)
    token = _current.set(budget)
    try:
        yield budget
    finally:
        _current.reset(token)


def iterate_in_budget(items: Iterator[T], policy: RetryPolicy) -> Iterator[T]:
    """Yield the items of a generator, all of whose reads share one budget."""
    return run_in_context(items, _current, RetryBudget(policy))


def current_budget(default: RetryBudget | None = None) -> RetryBudget:
    """Return the budget of the enclosing unit of work, else the default, else a new one."""
    return _current.get() or default or RetryBudget(RetryPolicy())


def backoff_seconds(policy: RetryPolicy, failures: int, jitter: random.Random) -> float:
    """Return the delay after some consecutive failures: uniform between zero and the exponential bound."""
    bound = min(policy.longest_backoff_seconds, policy.first_backoff_seconds * 2.0 ** min(failures - 1, 60))
    return jitter.random() * bound


def new_jitter(uri: str) -> random.Random:
    """Return a generator for delays. It affects no result, and must differ between processes that failed together."""
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
        attempt: One try. Raises ``TransientError`` for failures worth a retry, ``DataError`` for refusals.
        uri: Its object, for messages.
        budget: That of the unit of work.
        jitter: Generator for the delays.
        sleep: Waits for some seconds.
        progress: Bytes received so far. Progress resets the delays.
        has_deadline: Whether ``try_seconds`` limits each try; off where each of its requests has a limit of its own.

    Raises:
        DataError: A refusal, or too many failures.
    """
    policy, jitter = budget.policy, jitter or new_jitter(uri)
    failures, before = 0, progress()
    first_connection = FirstConnection(uri, policy.first_connection_seconds)
    with budget.tracker(uri) as stall:
        while True:
            try:
                async with asyncio.timeout(policy.try_seconds if has_deadline else None):
                    result = await attempt()
                first_connection.mark_reached()
                return result
            except TimeoutError:
                failure = TransientError(f"the try took longer than {policy.try_seconds:g} s")
            except TransientError as error:
                failure = error
                if not isinstance(error, NoConnection):
                    first_connection.mark_reached()
            if (now := progress()) > before:
                failures, before = 0, now
            failures += 1
            reason = redact(failure.reason)
            stall.report(reason + first_connection.deadline_text())
            budget.spend(uri, reason)
            longest_seconds = first_connection.seconds_left(reason)
            requested_seconds = failure.retry_after_seconds or 0.0
            if requested_seconds > _LONGEST_RETRY_AFTER_SECONDS:
                raise DataError(
                    f"The store requests a retry after {requested_seconds:,.0f} s ({reason})", where=uri,
                    hint="run the same command again then; nothing is lost",
                )  # fmt: skip
            delay_seconds = max(requested_seconds, backoff_seconds(policy, failures, jitter))
            await sleep(min(delay_seconds, longest_seconds))


class RetryingClient:
    """Runs the requests of one operation, retried within one budget.

    Args:
        uri: The object or location, for messages.
        budget: That of the unit of work.
    """

    def __init__(self, uri: str, budget: RetryBudget) -> None:
        self.uri, self.budget = uri, budget

    @property
    def policy(self) -> RetryPolicy:
        return self.budget.policy

    async def run(self, attempt: Callable[[], Awaitable[T]], *, has_deadline: bool = True) -> T:
        """Repeat an attempt until it succeeds: see ``with_retries``."""
        return await with_retries(attempt, uri=self.uri, budget=self.budget, has_deadline=has_deadline)


class Background:
    """The event loop of a process, in a thread, and the clients that ``connections`` keeps for it."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.clients: dict[str, tuple[Any, Callable[[], Awaitable[None]]]] = {}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="vorox-storage", daemon=True).start()


_lock = threading.Lock()
_instances: list[Background] = []
"""The last one belongs to this process. Earlier ones were inherited by fork and stay referenced, because collecting
them would close their selector and remove the parent's sockets from the epoll set that both processes share."""


def background() -> Background:
    """Return the background of this process, created on first use."""
    with _lock:
        if not has_background():
            _instances.append(Background())
        return _instances[-1]


def has_background() -> bool:
    """Whether this process has a background; one that a fork inherited is not its own."""
    return bool(_instances) and _instances[-1].process == os.getpid()


def _reset_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_lock)


def start(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Schedule a coroutine on the background loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, background().loop)


_stop: contextvars.ContextVar[Callable[[], bool]] = contextvars.ContextVar("stop", default=lambda: False)


@contextlib.contextmanager
def abandon_late_requests(stop: Callable[[], bool]) -> Generator[None]:
    """Within the block, wait no longer for a store that is late once ``stop`` returns true.

    So a closed build ends within seconds, not with the retry budget of a store that is away. Threads that run in a
    copy of the caller's context obey too.
    """
    token = _stop.set(stop)
    try:
        yield
    finally:
        _stop.reset(token)


def finish(future: Future[T], uri: str, budget: RetryBudget) -> T:
    """Wait for scheduled work and return its result; report a stall once it is late. The caller cancels it.

    Raises:
        StoreUnreachable: The work is late and its reader was closed: see ``abandon_late_requests``.
    """
    late_seconds, stop = budget.policy.late_seconds, _stop.get()
    if wait([future], late_seconds).done:
        return future.result()
    with budget.tracker(uri) as stall:
        stall.report(f"no response for {late_seconds:g} s", failed=False)
        while not wait([future], _STOP_POLL_SECONDS).done:
            if stop():
                raise StoreUnreachable("Reading was stopped while the store did not respond", where=uri)
        return future.result()


def run(coroutine: Coroutine[Any, Any, T], uri: str, budget: RetryBudget) -> T:
    """Run a coroutine on the background loop and return its result; cancel it if the caller is interrupted."""
    future = start(coroutine)
    try:
        return finish(future, uri, budget)
    except BaseException:
        future.cancel()
        raise
