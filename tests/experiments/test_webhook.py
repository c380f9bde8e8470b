"""Events of runs at a receiver: a loopback server that records, hangs, or answers with errors."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
from eventually import wait_until
from numpy_engine import NumpyEngine
from vorox.core import redaction
from vorox.core.config import dump_yaml, resolve_config
from vorox.core.errors import ConfigError, NumericalError
from vorox.core.redaction import redact
from vorox.experiments import webhook
from vorox.experiments.webhook import Webhook
from vorox.records.log import RunLog

SECRET = "T0123/B4567/q8Zr1vXw"


class Receiver:
    """Records the bodies of requests; ``answer`` returns the status of the next one, and may hang."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.num_requests = 0
        self.answer: Callable[[], int] = lambda: 200
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.num_requests += 1
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status = receiver.answer()
                if status == 200:
                    receiver.bodies.append(body)
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads, self._server.block_on_close = True, False
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/services/{SECRET}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def events(self) -> list[str]:
        return [body["event"] for body in self.bodies]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    for name in ("http_proxy", "HTTP_PROXY", "VOROX_WEBHOOK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(redaction, "_held", {})
    monkeypatch.setattr(webhook, "RETRY_SECONDS", (0.001, 0.001))
    found = Receiver()
    yield found
    found.close()


def opened(receiver: Receiver, *groups: str) -> tuple[Webhook, RunLog, list[str]]:
    """A webhook on a log without files, and what the log shows."""
    shown: list[str] = []
    log = RunLog(None, echo=lambda text, _: shown.append(text))
    found = Webhook(receiver.url, "a-run", 1, groups or ("lifecycle", "warnings"), log)
    log.on_event = found.notify
    return found, log, shown


def test_a_run_posts_its_events_and_its_failure_and_records_no_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    here = [f"log.webhook={receiver.url}", "log.webhook_events=[lifecycle, warnings, checkpoints]"]
    plain = tiny_runs.result(tiny_runs.run(tiny_runs.configuration(tmp_path / "plain")))

    original = NumpyEngine.train_step

    def fail(self: NumpyEngine, batch: Any, **kwargs: float) -> Any:
        if batch.step + 1 == 7:
            raise NumericalError("Loss <is> gone", where="step 7", hint="lower the rate")
        return original(self, batch, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(NumpyEngine, "train_step", fail)
        with pytest.raises(NumericalError):
            tiny_runs.run(tiny_runs.configuration(tmp_path / "posting", here))
    assert receiver.events == ["started", "checkpoint", "failed"]
    failed = receiver.bodies[-1]
    assert {key: failed["fields"][key] for key in ("error", "what", "where", "hint", "exit_code")} == {
        "error": "NumericalError", "what": "Loss <is> gone", "where": "step 7", "hint": "lower the rate",
        "exit_code": 7,
    }  # fmt: skip
    assert "step-00000004" in failed["fields"]["saved"]
    assert failed["text"] == f"[{failed['run']}] failed: Loss &lt;is&gt; gone (exit code 7)"
    assert (failed["format"], failed["level"], failed["attempt"]) == ("vorox-event/1", "error", 1)

    receiver.bodies.clear()
    outcome = tiny_runs.run(tiny_runs.configuration(tmp_path / "posting", here))
    assert receiver.events == ["resumed", "checkpoint", "checkpoint", "finished"]
    assert receiver.bodies[-1]["attempt"] == 2
    ours = tiny_runs.result(outcome)
    assert {key: ours[key] for key in ("fingerprint", "position")} == {
        key: plain[key] for key in ("fingerprint", "position")
    }
    for path in outcome.run_directory.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path
    assert "env:VOROX_WEBHOOK" in (outcome.run_directory / "config.yaml").read_text()


def test_only_chosen_events_are_posted_and_repeated_warnings_are_counted(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, log, _ = opened(receiver, "warnings")
    log.event("finished", "no lifecycle")
    log.event("checkpoint_saved", "not asked for")
    log.event("held_out", "no warning")
    log.event("library_message", "of a library", level="warning")
    for step in range(50):
        log.event("loss_spike", "Spike", level="warning", step=step, max_loss=float("inf"))
    log.event("mirror_away", "Away", level="warning")
    monkeypatch.setattr(webhook, "REPEAT_SECONDS", 0.0)
    log.event("loss_spike", "Spike", level="warning", step=50)
    found.notify_end(RuntimeError("no lifecycle either"))
    found.close()
    assert [(body["event"], body["fields"]) for body in receiver.bodies] == [
        ("loss_spike", {"step": 0, "max_loss": "Infinity"}),
        ("mirror_away", {}),
        ("loss_spike", {"step": 50, "num_left_out": 49}),
    ]


@pytest.mark.parametrize(("status", "num_tries"), [(500, 3), (429, 3), (404, 1), (302, 1)])
def test_a_failing_receiver_is_reported_once(receiver: Receiver, status: int, num_tries: int) -> None:
    found, log, shown = opened(receiver)
    receiver.answer = lambda: status
    log.event("resumed", "Resuming")
    wait_until(lambda: any("Webhook failed" in text for text in shown))
    assert receiver.num_requests == num_tries
    log.event("finished", "Finished")
    found.close()
    assert shown == [
        "Resuming", f"Webhook failed (HTTP {status}); training continues; reported once", "Finished",
        "Webhook: 2 events of this attempt not delivered",
    ]  # fmt: skip
    assert receiver.bodies == []


def test_an_event_survives_a_short_outage(receiver: Receiver) -> None:
    found, log, shown = opened(receiver)
    statuses = iter([503, 200])
    receiver.answer = lambda: next(statuses)
    log.event("finished", "Finished")
    found.close()
    assert (receiver.events, shown) == (["finished"], ["Finished"])


def test_no_step_waits_for_a_receiver_that_hangs(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events beyond the queue are dropped, oldest first; the end waits for a limited time."""
    monkeypatch.setattr(webhook, "QUEUE_EVENTS", 3)
    monkeypatch.setattr(webhook, "CLOSE_SECONDS", 0.2)
    is_held, goes_on = threading.Event(), threading.Event()

    def hang() -> int:
        is_held.set()
        goes_on.wait()
        return 200

    receiver.answer = hang
    found, log, shown = opened(receiver, "checkpoints")
    started = time.monotonic()
    for step in range(200):
        log.event("checkpoint_saved", f"Saved {step}")
        if step == 0:
            assert is_held.wait(60)
    assert not goes_on.is_set()
    found.close()
    assert time.monotonic() - started < webhook.TIMEOUT_SECONDS, "nothing waited for the receiver"
    assert shown[-1] == "Webhook: 200 events of this attempt not delivered"
    goes_on.set()
    wait_until(lambda: len(receiver.bodies) == 3)
    assert [body["message"] for body in receiver.bodies] == ["Saved 0", "Saved 198", "Saved 199"]


def test_the_url_is_shown_nowhere(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    override = f"log.webhook={receiver.url}"
    resolved = resolve_config("quickstart", [override])
    assert resolved.config.log.webhook == "env:VOROX_WEBHOOK"
    assert SECRET not in dump_yaml(resolved.config, resolved)
    assert SECRET not in repr(resolved)
    assert SECRET not in redact(f"vorox train tiny {override}")
    for wrong in ("ftp://h/s", "hooks.slack.com/s", "[1]", "https:///s"):
        with pytest.raises(ConfigError, match=r"must be an http\(s\) URL, or env:VARIABLE"):
            resolve_config("quickstart", [f"log.webhook={wrong}"])
    monkeypatch.setattr(redaction, "_held", {})
    assert SECRET not in redact(
        f"see https://hooks.slack.com/services/{SECRET} or https://discord.com/api/webhooks/{SECRET}"
    )


def test_a_recorded_webhook_without_its_variable_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    shown: list[str] = []
    log = RunLog(None, echo=lambda text, _: shown.append(text))
    config = tiny_runs.configuration(tmp_path, ["log.webhook=env:MY_HOOK"]).log
    monkeypatch.delenv("MY_HOOK", raising=False)
    assert webhook.find_url(config, log) is None
    monkeypatch.setenv("MY_HOOK", "file:///etc/passwd")
    assert webhook.find_url(config, log) is None
    for text, what in zip(shown, ("is not set", "is not an http(s) URL"), strict=True):
        assert text.startswith(f"No events are posted: MY_HOOK (log.webhook) {what}.")
        assert text.endswith("export MY_HOOK=URL, or set log.webhook=null")
    monkeypatch.setenv("MY_HOOK", receiver.url)
    assert webhook.find_url(config, log) == receiver.url
    assert SECRET not in redact(receiver.url)


CHILD = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from vorox.core.schema import LogConfig
from vorox.experiments.webhook import end_notice
from vorox.runtime.heartbeat import Heartbeat
directory = Path(sys.argv[1])
run = SimpleNamespace(config=SimpleNamespace(log=LogConfig(webhook="env:VOROX_WEBHOOK")), is_main=True,
                      directory=directory, attempt=3)
with Heartbeat(directory, attempt=3, timeout_seconds=1.5, notice=end_notice(run)) as heartbeat:
    heartbeat.enter("step", 5)
    print("ready", flush=True)
    if sys.argv[2] != "finished":
        time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "stalled", "finished"])
def test_the_watchdog_posts_the_end_of_a_run_that_cannot(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    directory = tmp_path / "a-run"
    directory.mkdir()
    (directory / "failure.json").write_text('{"what": "of an earlier attempt", "attempt": 2, "exit_code": 4}')
    monkeypatch.setenv("VOROX_WEBHOOK", receiver.url)
    process = subprocess.Popen([sys.executable, "-c", CHILD, str(directory), end], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if end == "killed":
            process.kill()
        process.wait(60)
        wait_until(lambda: bool(receiver.bodies) or end == "finished", 60)
    finally:
        process.kill()
        process.communicate()
    if end == "finished":
        assert receiver.bodies == []
        return
    (body,) = receiver.bodies
    what, code = {"killed": ("Killed: ", 137), "stalled": ("Rank 0 on host ", 6)}[end]
    assert (body["event"], body["run"], body["attempt"], body["level"]) == ("failed", "a-run", 3, "error")
    assert body["message"].startswith(what)
    assert body["fields"]["exit_code"] == code
    assert "traceback" not in body["fields"]
    for path in directory.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path
