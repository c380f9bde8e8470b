"""Webhook: posts events of a run as JSON to a URL, from a background thread.

Events of the log and the error that ends the run go in; requests that Slack-compatible receivers show come out. Posting
takes part in no decision: the queue is bounded, every request has a time limit, and a receiver that fails or hangs is
reported once. Only rank 0 posts. The URL is a secret: the configuration names the environment variable that has it.
"""

from __future__ import annotations

import contextlib
import html
import http.client
import math
import os
import queue
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from vorox.core.errors import Preempted
from vorox.core.files.json_lines import encode
from vorox.core.pluralize import pluralize
from vorox.core.processes.child_process import child_command
from vorox.core.redaction import held_secret, hold_secret
from vorox.core.schema import LogConfig
from vorox.records.failure_record import failure_record
from vorox.records.log import RunLog
from vorox.records.run_context import RunContext

FORMAT = "vorox-event/1"
NOTICE_VARIABLE = "VOROX_NOTICE_URL"
"""Environment variable that gives the program of ``end_notice`` the URL."""
QUEUE_EVENTS = 100
"""Capacity of the queue; when it is full, the oldest event is dropped."""
TIMEOUT_SECONDS = 10.0
CLOSE_SECONDS = 5.0
RETRY_SECONDS = (1.0, 4.0)
"""Waits before the second and third try."""
REPEAT_SECONDS = 60.0
"""Warnings of one kind are posted at most this often; the next one counts those left out."""
_EVENTS = {
    "resumed": ("lifecycle", "resumed"),
    "engine": ("lifecycle", "started"),
    "finished": ("lifecycle", "finished"),
    "checkpoint_saved": ("checkpoints", "checkpoint"),
    "validation": ("validations", "validation"),
}
"""The group and the posted name of events, by their kind in the log; all other warnings are of the group warnings."""
_UNPOSTED = {"format", "traceback"}
"""Fields of a failure that are not posted."""
_NOT_POSTED = ("library_message", "webhook_failed")


class _Refused(Exception):
    """The receiver refuses the request, and would again."""


class Webhook:
    """Posts the events of one attempt of a run.

    Args:
        url: The receiver.
        run: Id of the run.
        attempt: Number of the attempt.
        groups: What is posted (``log.webhook_events``).
        log: Reports a failing receiver.
    """

    def __init__(self, url: str, run: str, attempt: int, groups: Sequence[str], log: RunLog) -> None:
        self._url, self._groups, self._log = url, groups, log
        self._origin = {"format": FORMAT, "run": run, "attempt": attempt, "host": socket.gethostname()}
        self._has_resumed = self._has_reported = False
        self._num_enqueued = self._num_delivered = 0
        self._repeats: dict[str, tuple[float, int]] = {}
        self._lock, self._is_closing = threading.Lock(), threading.Event()
        self._queue: queue.Queue[bytes | None] = queue.Queue(QUEUE_EVENTS)
        self._opener = _opener()
        self._thread = threading.Thread(target=self._work, name="vorox-webhook", daemon=True)
        self._thread.start()

    def notify(self, record: Mapping[str, Any]) -> None:
        """Enqueue an event of the log, if its group is posted; never blocks. Any thread may call it."""
        kind, level = str(record["kind"]), str(record["level"])
        group, event = _EVENTS.get(kind, ("warnings" if level != "info" else "", kind))
        if event == "started" and self._has_resumed:
            return
        self._has_resumed = self._has_resumed or event == "resumed"
        if group not in self._groups or kind in _NOT_POSTED:
            return
        fields = dict(record.get("fields") or {})
        if group == "warnings":
            num_left_out = self._count_repeats(kind)
            if num_left_out is None:
                return
            fields |= {"num_left_out": num_left_out} if num_left_out else {}
        self._enqueue(event, level, str(record["message"]), fields)

    def notify_end(self, error: BaseException) -> None:
        """Enqueue the error that ends the run, with its exit code."""
        if "lifecycle" not in self._groups:
            return
        failure = {key: value for key, value in failure_record(error).items() if key not in _UNPOSTED}
        if isinstance(error, KeyboardInterrupt):
            failure["what"] = "Interrupted"
        self._enqueue_end(failure, is_stop=isinstance(error, Preempted | KeyboardInterrupt))

    def notify_failure(self, failure: Mapping[str, Any]) -> None:
        """Enqueue a recorded failure, on behalf of a run that cannot post it itself."""
        self._enqueue_end({key: value for key, value in failure.items() if key not in _UNPOSTED}, is_stop=False)

    def _enqueue_end(self, failure: Mapping[str, Any], *, is_stop: bool) -> None:
        message = f"{failure['what']} (exit code {failure['exit_code']})"
        self._enqueue(*(("stopped", "warning") if is_stop else ("failed", "error")), message, failure)

    def close(self) -> None:
        """Wait for queued events, up to ``CLOSE_SECONDS``; report how many were not delivered."""
        self._is_closing.set()
        self._put(None)
        self._thread.join(CLOSE_SECONDS)
        num_lost = self._num_enqueued - self._num_delivered
        if num_lost > int(self._has_reported):
            self._report(f"Webhook: {pluralize(num_lost, 'event')} of this attempt not delivered")

    def _count_repeats(self, kind: str) -> int | None:
        """Return how many warnings of a kind were left out before this one; ``None`` if this one is, too."""
        now = time.monotonic()
        with self._lock:
            last, count = self._repeats.get(kind, (-math.inf, 0))
            is_due = now - last >= REPEAT_SECONDS
            self._repeats[kind] = (now, 0) if is_due else (last, count + 1)
        return count if is_due else None

    def _enqueue(self, event: str, level: str, message: str, fields: Mapping[str, Any]) -> None:
        shown = html.escape(f"[{self._origin['run']}] {event}: {message}", quote=False)  # & < > are Slack's markup
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        body = {"text": shown, **self._origin, "event": event, "level": level, "message": message, "time": at}
        with self._lock:
            self._num_enqueued += 1
        self._put(encode({**body, "fields": fields}))

    def _put(self, entry: bytes | None) -> None:
        """Enqueue an entry; if the queue is full, drop the oldest one."""
        while True:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(entry)
                return
            with contextlib.suppress(queue.Empty):
                self._queue.get_nowait()

    def _work(self) -> None:
        while (body := self._queue.get()) is not None:
            try:
                self._deliver(body)
                self._num_delivered += 1
            except Exception as error:  # a receiver must not stop anything
                if not self._has_reported:
                    self._has_reported = True
                    self._report(f"Webhook failed ({_reason(error)}); training continues; reported once")

    def _deliver(self, body: bytes) -> None:
        for wait_seconds in (*RETRY_SECONDS, None):
            try:
                self._post(body)
                return
            except _Refused:
                raise
            except Exception:
                if wait_seconds is None:
                    raise
                self._is_closing.wait(wait_seconds)

    def _post(self, body: bytes) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "vorox"}
        request = urllib.request.Request(self._url, body, headers, method="POST")  # noqa: S310 - checked to be http(s)
        try:
            self._opener.open(request, timeout=TIMEOUT_SECONDS).close()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in {408, 429} or error.code >= 500:
                raise ConnectionError(f"HTTP {error.code}") from None
            raise _Refused(f"HTTP {error.code}") from None

    def _report(self, text: str) -> None:
        self._log.event("webhook_failed", text, level="warning")


def _opener() -> urllib.request.OpenerDirector:
    """Return an opener without redirects, which would become a GET without the event."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler, urllib.request.HTTPHandler, urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler, urllib.request.HTTPErrorProcessor,
    ):  # fmt: skip
        opener.add_handler(handler())
    return opener


def _reason(error: Exception) -> str:
    """Return why a request failed, without the URL."""
    if isinstance(error, http.client.HTTPException):
        return type(error).__name__
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(cause) or type(cause).__name__


@contextlib.contextmanager
def posting_events(run: RunContext, log: RunLog) -> Generator[None]:
    """Post the events that the block logs, and the error that ends it; do nothing without ``log.webhook``."""
    url = find_url(run.config.log, log) if run.is_main else None
    if url is None:
        yield
        return
    webhook = Webhook(url, run.run_id, run.attempt, run.config.log.webhook_events, log)
    log.on_event = webhook.notify
    try:
        yield
    except BaseException as error:
        webhook.notify_end(error)
        raise
    finally:
        log.on_event = None
        webhook.close()


def find_url(config: LogConfig, log: RunLog) -> str | None:
    """Return the URL that ``log.webhook`` names, held as a secret; ``None`` with a warning if there is none."""
    if config.webhook is None:
        return None
    variable = config.webhook.removeprefix("env:")
    url = _url_in(variable)
    if not url.startswith(("http://", "https://")):
        what = "is not an http(s) URL" if url else "is not set"
        text = (
            f"No events are posted: {variable} (log.webhook) {what}. The run was started with a webhook, whose URL is "
            f"not recorded: export {variable}=URL, or set log.webhook=null"
        )
        log.event("webhook_failed", text, level="warning")
        return None
    hold_secret(variable, url)
    return url


def _url_in(variable: str) -> str:
    return held_secret(variable) or os.environ.get(variable, "")


def end_notice(run: RunContext) -> tuple[list[str], dict[str, str]]:
    """Return the program that posts the end of a run which cannot post it, and its environment; empty without one."""
    config = run.config.log
    url = "" if config.webhook is None else _url_in(config.webhook.removeprefix("env:"))
    if not run.is_main or not url.startswith(("http://", "https://")) or "lifecycle" not in config.webhook_events:
        return [], {}
    words = child_command("vorox.experiments.end_notice", str(run.directory), str(run.attempt))
    return words, {NOTICE_VARIABLE: url}
