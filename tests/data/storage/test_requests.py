"""Transient failures are retried within a budget, refusals are not, and stalls are observable."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import logging
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from eventually import wait_until
from vorox.core.errors import DataError
from vorox.data.storage import RetryPolicy, StoreUnreachable, iterate_in_budget, retry_budget, stalls, waiting_for_data
from vorox.data.storage.failures import retry_after_seconds
from vorox.data.storage.requests import (
    NoConnection,
    RetryBudget,
    TransientError,
    backoff_seconds,
    current_budget,
    with_retries,
)

POLICY = RetryPolicy(retries_per_unit=5, first_backoff_seconds=1.0, longest_backoff_seconds=8.0, try_seconds=0.2)


class Script:
    """An attempt with scripted outcomes, and a sleep that only records."""

    def __init__(self, *outcomes: Exception | str) -> None:
        self.outcomes = list(outcomes)
        self.slept_seconds: list[float] = []
        self.tries = 0

    async def attempt(self) -> str:
        self.tries += 1
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def sleep(self, seconds: float) -> None:
        self.slept_seconds.append(seconds)

    def run(self, budget: RetryBudget | None = None, *, progress: Callable[[], int] = lambda: 0) -> str:
        return asyncio.run(
            with_retries(
                self.attempt, uri="s3://bucket/file", budget=budget or RetryBudget(POLICY), sleep=self.sleep,
                jitter=random.Random(1), progress=progress,
            )
        )  # fmt: skip


def failures(count: int) -> list[Exception]:
    return [TransientError(f"HTTP 503 number {number}") for number in range(count)]


def test_a_transient_failure_is_retried_until_success() -> None:
    script = Script(*failures(3), "content")
    assert script.run() == "content"
    assert script.tries == 4


def test_a_refusal_is_not_retried() -> None:
    script = Script(DataError("no"), "content")
    with pytest.raises(DataError, match="no"):
        script.run()
    assert script.tries == 1
    assert script.slept_seconds == []


def test_the_budget_belongs_to_the_unit_not_to_the_file() -> None:
    with retry_budget(POLICY) as budget:
        assert current_budget() is budget
        Script(*failures(3), "a").run(current_budget())
        assert budget.left == 2
        with pytest.raises(DataError, match="in 6 tries; last: HTTP 503 number 2") as caught:
            Script(*failures(4), "b").run(current_budget())
    assert caught.value.where == "s3://bucket/file"
    assert "same command again" in caught.value.hint
    assert current_budget() is not current_budget(), "outside, every reader has its own"


def test_an_inner_budget_inherits_the_policy() -> None:
    with retry_budget(POLICY), retry_budget() as inner:
        assert inner.policy is POLICY
        assert inner.left == 5


def test_the_budget_of_a_generator_is_invisible_to_its_consumer() -> None:
    closed: list[bool] = []

    def unit(name: str) -> Iterator[tuple[str, RetryBudget]]:
        try:
            for _ in range(3):
                yield name, current_budget()
        finally:
            closed.append(True)

    first, second = (iterate_in_budget(unit(name), POLICY) for name in "ab")
    with retry_budget() as outside:
        budgets = [(next(first), next(second)) for _ in range(2)]
        assert current_budget() is outside
    ((_, a), (_, b)), ((_, again), _) = budgets
    assert a is again
    assert len({id(a), id(b), id(outside)}) == 3
    assert a.policy is POLICY
    first.close()
    assert closed == [True]
    assert [name for name, _ in second] == ["b"]


def test_full_jitter_is_uniform_up_to_a_doubling_bound() -> None:
    jitter = random.Random(7)
    for number, bound in [(1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (5, 8.0), (4_000, 8.0)]:
        delays = [backoff_seconds(POLICY, number, jitter) for _ in range(2_000)]
        assert 0 <= min(delays) < 0.02 * bound
        assert 0.98 * bound < max(delays) <= bound
        assert abs(sum(delays) / len(delays) - bound / 2) < 0.03 * bound


def test_delays_are_a_function_of_the_jitter_generator() -> None:
    first, second = (Script(*failures(4), "x") for _ in range(2))
    first.run()
    second.run()
    assert first.slept_seconds == second.slept_seconds
    assert len(set(first.slept_seconds)) == 4


def test_progress_resets_the_delays() -> None:
    received = iter([0, 0, 0, 0, 100])
    script = Script(*failures(4), "x")
    script.run(progress=lambda: next(received))
    assert script.slept_seconds[3] <= 1.0
    expected = random.Random(1)
    assert script.slept_seconds == [expected.random() * bound for bound in (1.0, 2.0, 4.0, 1.0)]


def test_retry_after_is_a_lower_bound_of_the_delay() -> None:
    script = Script(TransientError("HTTP 429", 17.0), TransientError("HTTP 503", 0.0), "x")
    script.run()
    assert script.slept_seconds[0] == 17.0
    assert script.slept_seconds[1] <= 2.0


def test_a_retry_after_of_a_day_is_an_error() -> None:
    with pytest.raises(DataError, match=r"retry after 86,400 s \(HTTP 429\)"):
        Script(TransientError("HTTP 429", 86_400.0), "x").run()


def test_retry_after_is_seconds_or_a_date() -> None:
    now = datetime(2026, 11, 21, 6, 0, tzinfo=UTC)
    date = email.utils.format_datetime(now.replace(minute=2), usegmt=True)
    assert retry_after_seconds("120") == 120.0
    assert retry_after_seconds(date, now_unix_seconds=now.timestamp()) == 120.0
    assert retry_after_seconds(date, now_unix_seconds=now.timestamp() + 999) == 0.0
    assert [retry_after_seconds(value) for value in (None, "", "soon", "-1", "²")] == [None] * 5


def test_every_try_has_a_deadline() -> None:
    tries: list[int] = []

    async def attempt() -> str:
        tries.append(1)
        await asyncio.sleep(60 if len(tries) == 1 else 0)
        return "late but here"

    async def sleep(_: float) -> None: ...

    budget = RetryBudget(POLICY)
    assert asyncio.run(with_retries(attempt, uri="x", budget=budget, sleep=sleep)) == "late but here"
    assert (len(tries), budget.left) == (2, 4)


class TestWaiting:
    def test_a_stall_is_visible_while_it_lasts(self) -> None:
        seen: list[str] = []

        async def sleep(_: float) -> None:
            state = waiting_for_data()
            assert state is not None
            seen.append(f"{state.reason} {state.failed_tries} {state.uri}")

        def run(attempt: Callable[[], Awaitable[str]]) -> str:
            return asyncio.run(with_retries(attempt, uri="gs://b/x", budget=RetryBudget(POLICY), sleep=sleep))

        assert waiting_for_data() is None
        assert run(Script(*failures(2), "x").attempt) == "x"
        assert seen == ["HTTP 503 number 0 1 gs://b/x", "HTTP 503 number 1 2 gs://b/x"]
        assert waiting_for_data() is None
        with pytest.raises(DataError):
            run(Script(*failures(9)).attempt)
        assert waiting_for_data() is None, "giving up clears the stall as well"

    def test_the_oldest_stall_is_reported_and_threads_do_not_mix(self) -> None:
        first, second = stalls.Stall("first"), stalls.Stall("second")
        first.report("HTTP 503")
        thread = threading.Thread(target=second.report, args=("HTTP 429",))
        thread.start()
        thread.join()
        told = waiting_for_data()
        assert told is not None
        assert told.uri == "first"
        assert "waiting for data since" in str(told)
        first.clear()
        told = waiting_for_data()
        assert told is not None
        assert told.uri == "second"
        second.clear()
        second.clear()
        assert waiting_for_data() is None

    def test_a_short_stall_is_not_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        told: list[str | None] = []
        with stalls.observe_stalls(lambda state: told.append(str(state))):
            wait = stalls.Stall("hf://a/b")
            for _ in range(3):
                wait.report("HTTP 503")
            wait.clear()
        assert caplog.messages == told == []

    def test_the_log_reports_a_stall_without_further_failures(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A hanging server sends nothing, so ``report`` is not called again."""
        caplog.set_level(logging.INFO, "vorox.data.storage")
        for name in ("LOG_AFTER_SECONDS", "SHOW_AFTER_SECONDS", "TICK_SECONDS"):
            monkeypatch.setattr(stalls, name, 0.01)
        monkeypatch.setattr(stalls._state, "log_schedule", stalls._LogSchedule())
        told: list[stalls.WaitingForData | None] = []
        wait = stalls.Stall("hf://a/b")
        with stalls.observe_stalls(told.append):
            for _ in range(3):
                wait.report("HTTP 503")
            wait_until(lambda: len(caplog.messages) == 1 and len(told) >= 3)
            wait.clear()
        assert len(caplog.messages) == 2, "once at its start, once at its end"
        assert "because HTTP 503 after 3 failed tries [hf://a/b]" in caplog.messages[0]
        assert "data flows again" in caplog.messages[1]
        assert "3 failed tries" in caplog.messages[1]
        assert told[-1] is None
        assert told.count(None) == 1
        assert {state.uri for state in told if state is not None} == {"hf://a/b"}
        first, last = (cast(Any, record) for record in caplog.records)
        assert (first.event_kind, last.event_kind) == ("waiting_for_data", "data_flows_again")
        assert first.event_fields["uri"] == "hf://a/b"
        assert first.event_fields["since_unix_seconds"] <= time.time()
        assert last.event_fields["failed_tries"] == 3

    def test_a_reader_that_stops_waiting_does_not_report_that_data_flows(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("LOG_AFTER_SECONDS", "SHOW_AFTER_SECONDS", "TICK_SECONDS"):
            monkeypatch.setattr(stalls, name, 0.01)
        monkeypatch.setattr(stalls._state, "log_schedule", stalls._LogSchedule())
        told: list[stalls.WaitingForData | None] = []

        def wait_and_stop() -> None:
            with stalls.track_stall("s3://a/b") as stall:
                stall.report("HTTP 503")
                wait_until(lambda: len(caplog.messages) == 1)
                raise KeyboardInterrupt

        with stalls.observe_stalls(told.append):
            with pytest.raises(KeyboardInterrupt):
                wait_and_stop()
            wait_until(lambda: told[-1:] == [None])
        assert ["waiting for data" in message for message in caplog.messages] == [True]

    def test_consecutive_stalls_do_not_fill_the_log(self) -> None:
        """A store that fails for 6 s in every 10, all day, on a simulated clock."""
        times, lines = stalls._LogSchedule(), []
        for begin in range(0, 86_400, 10):
            times.start(begin)
            told = [now for now in range(begin, begin + 7) if times.is_due(now)]
            lines += told
            times.end(begin + 6)
        assert lines[0] == 5
        assert len(lines) < 6 + 86_400 / 600
        quiet = stalls._LogSchedule()
        for begin in (0, 7200, 14_400):
            quiet.start(begin)
            assert [now - begin for now in range(begin, begin + 1000) if quiet.is_due(now)] == [5, 65, 185, 425, 905]
            quiet.end(begin + 1000)

    def test_stalls_are_redacted(self) -> None:
        wait = stalls.Stall("https://host/x?token=hf_abcdefABCDEF123456")
        wait.report("password=hunter2hunter2")
        told = waiting_for_data()
        wait.clear()
        assert told is not None
        assert "hf_abc" not in str(told)
        assert "hunter2" not in str(told)

    def test_an_interrupted_reader_clears_its_stall(self) -> None:
        def fail() -> None:
            with stalls.track_stall("x") as wait:
                wait.report("late", failed=False)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fail()
        wait_until(lambda: waiting_for_data() is None)


# A store that was never reached


def test_a_store_that_was_never_reached_fails_after_the_first_connection_limit() -> None:
    """A wrong name or a missing network must not use up the whole budget before a run starts."""
    policy = RetryPolicy(first_backoff_seconds=0.02, longest_backoff_seconds=0.05, first_connection_seconds=0.3)
    told: list[str] = []

    class Told(stalls.Stall):
        def report(self, reason: str, *, failed: bool = True) -> None:
            told.append(reason)

    async def attempt() -> str:
        raise NoConnection("no connection to huggingface.co:443 (Name or service not known)")

    began = time.monotonic()
    budget = RetryBudget(policy, lambda uri: contextlib.nullcontext(Told(uri)))
    with pytest.raises(StoreUnreachable) as caught:
        asyncio.run(with_retries(attempt, uri="hf://never-reached/x.txt", budget=budget))
    assert time.monotonic() - began < 30
    assert caught.value.exit_code == 4
    assert "not reached in 0.3 s" in caught.value.what
    assert "data.sources.N.paths" in caught.value.hint
    assert all(re.search(r"\(gives up at \d\d:\d\d:\d\d UTC\)$", reason) for reason in told), told
    assert len(told) < policy.retries_per_unit


@pytest.mark.parametrize("answer", ["HTTP 503", "success"])
def test_a_store_that_was_reached_has_the_whole_budget(answer: str) -> None:
    policy = RetryPolicy(retries_per_unit=5, first_connection_seconds=0.0)
    uri = f"s3://reached-{answer[:4].lower()}/file"
    first = TransientError("HTTP 503") if answer == "HTTP 503" else "bytes"
    outcomes = [first, *(NoConnection("no connection") for _ in range(4)), "bytes"]

    async def attempt() -> str:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def sleep(_: float) -> None:
        pass

    budget = RetryBudget(policy)
    while outcomes:
        assert asyncio.run(with_retries(attempt, uri=uri, budget=budget, sleep=sleep)) == "bytes"
    assert budget.left == (0 if answer == "HTTP 503" else 1)
