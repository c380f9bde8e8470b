"""A run that waits for data says for what, since when and why, on its display and in its events; then it goes on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from servers.faults import Fault, fault_proxy
from servers.web import http_server
from tiny_runs import at_step, configuration, run, use_numpy_engine, write_text
from vorox.core.errors import DataError
from vorox.core.files.json_lines import read_lines
from vorox.data.storage import RetryPolicy, stalls
from vorox.data.storage.reading import RangeCache
from vorox.records.replay_chain import read_chain
from vorox.training.loop.display import NoDisplay

STREAMED = [
    "train.num_steps=40", "eval.every_steps=null", "data.mode=streaming", "data.growth.mode=strict",
    "data.growth.max_segment_units=1", "data.growth.later_passes=segments", "data.cache.unit_bytes=1500",
    "data.streaming.retention_bytes=24000", "data.loader.prefetch_batches=1",
]  # fmt: skip


class Shown(NoDisplay):
    def __init__(self) -> None:
        self.waits: list[str | None] = []
        self.messages: list[str] = []

    def waiting(self, text: str | None) -> None:
        self.waits.append(text)

    def message(self, text: str, level: str = "info") -> None:
        self.messages.append(f"{level}: {text}")


def test_a_run_shows_that_its_store_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    write_text(tmp_path / "text", documents=60)
    settled = configuration(tmp_path / "straight", [f"data.sources.0.paths=[{tmp_path / 'text'}]", *STREAMED])
    straight = run(settled)
    monkeypatch.setattr(stalls, "LOG_AFTER_SECONDS", 0.3)
    monkeypatch.setattr(stalls, "SHOW_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(stalls, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(stalls._state, "log_schedule", stalls._LogSchedule())
    # A text this small would be in memory by step 5.
    monkeypatch.setattr(RangeCache, "get", lambda _self, _file, _position, start, end, fetch: fetch(start, end))
    shown = Shown()
    with http_server(tmp_path / "text") as server, fault_proxy(server.url) as proxy:
        away = Fault("answer", 503, {"Retry-After": "1"})
        at_step(monkeypatch, 5, lambda: proxy.script(away))
        config = configuration(tmp_path / "away", [f"data.sources.0.paths=[{proxy.url}/]", *STREAMED])
        outcome = run(config, display=shown)
        assert proxy.faults == {"answer": 1}

    texts = [text for text in shown.waits if text is not None]
    assert any("because HTTP 503 [" in text and "/text.jsonl]" in text for text in texts), texts[:3]
    assert shown.waits[-1] is None, "it is taken off the display when data flows again"
    events = list(read_lines(outcome.run_directory / "events.jsonl"))
    told = [event for event in events if event["kind"] == "waiting_for_data"]
    over = [event for event in events if event["kind"] == "data_flows_again"]
    assert len(told) == len(over) == 1, "one matter, told once at its start and once at its end"
    assert told[0]["level"] == "warning"
    assert over[0]["fields"]["failed_tries"] == 1
    assert over[0]["fields"]["waited_seconds"] >= 0.3
    assert [message.partition(" since ")[0] for message in shown.messages if "waiting for data" in message] == [
        "warning: waiting for data"
    ]
    batches = [[entry.batch for entry in read_chain(done.run_directory).values()] for done in (outcome, straight)]
    assert batches[0] == batches[1], "the wait delayed steps and changed none"


def test_without_a_network_a_run_ends_before_step_1_and_says_when(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_numpy_engine(monkeypatch)
    monkeypatch.setattr(RetryPolicy, "from_source", lambda config: RetryPolicy(first_connection_seconds=0.5))
    with socket.socket() as nobody:  # a port where nobody listens
        nobody.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{nobody.getsockname()[1]}/text.jsonl"
        config = configuration(tmp_path, [f"data.sources.0.paths=[{uri}]"])
        with pytest.raises(DataError) as caught:
            run(config)
    assert caught.value.exit_code == 4
    assert "not reached in 0.5 s" in caught.value.what
    assert caught.value.where == uri
    assert list((tmp_path / "runs").iterdir()) == []
