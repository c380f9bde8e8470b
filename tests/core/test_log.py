"""Both files and the terminal say the same, without secrets, and never stop a run."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path

import pytest

from vorox.core.errors import DataError
from vorox.core.files import atomic
from vorox.core.files.json_lines import read_lines
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.records.log import Level, RunLog

CANARY = "CANARYhunter2"
SECRETS = [
    f"postgresql://alice:{CANARY}@db.example.org/meta",
    f"https://alice:{CANARY}@example.org/x.git",
    f"hf_{CANARY}abcdefgh",
    f"sk-{CANARY}",
    f"Bearer {CANARY}",
    f"api_key={CANARY}",
    f"PASSWORD: '{CANARY} x'",
    "AKIACANARYCANARY1234",
]


def open_log(directory: Path, **arguments: object) -> tuple[RunLog, list[tuple[str, Level]]]:
    shown: list[tuple[str, Level]] = []
    log = RunLog(directory, echo=lambda text, level: shown.append((text, level)), **arguments)  # type: ignore[arg-type]
    return log, shown


def test_an_event_is_in_both_files_and_on_the_terminal(tmp_path: Path) -> None:
    log, shown = open_log(tmp_path, attempt=3)
    log.event("checkpoint_saved", "saved step 100", step=100, seconds=float("nan"))
    log.info("hello")
    log.quiet("only in the file")
    log.close()
    (event,) = read_lines(tmp_path / "events.jsonl")
    time = event.pop("time")
    assert event == {
        "attempt": 3,
        "kind": "checkpoint_saved",
        "level": "info",
        "message": "saved step 100",
        "fields": {"step": 100, "seconds": "NaN"},
    }
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert lines[0].startswith(time[:16])
    assert [line.split(" ", 1)[1] for line in lines] == [
        "info    saved step 100",
        "info    hello",
        "info    only in the file",
    ]
    assert shown == [("saved step 100", "info"), ("hello", "info")]


def failing_function(dsn: str) -> None:
    password = "CANARYhunter2-in-source"
    assert password
    try:
        raise OSError(f"cannot reach {dsn}")
    except OSError as error:
        raise DataError(f"lost {dsn}", where=dsn, hint=f"check {dsn}") from error


@pytest.mark.parametrize("secret", SECRETS)
def test_no_secret_in_any_written_byte(tmp_path: Path, secret: str) -> None:
    log, shown = open_log(tmp_path)
    log.event("started", f"with {secret}", level="warning", argument=secret, nested={"list": [secret]}, password=secret)
    log.info(secret)
    log.quiet(secret)
    with log.capture():
        logging.getLogger("some.library").warning("calling %s", secret)
        try:
            failing_function(secret)
        except DataError as error:
            log.exception(error)
            logging.getLogger("other").exception("it failed")
    log.close()
    written = b"".join(path.read_bytes() for path in sorted(tmp_path.rglob("*")))
    assert written.count(b"redacted") > 10
    assert b"CANARY" not in written
    assert "CANARY" not in repr(shown)
    assert b"failing_function" in written, "the traceback is there"
    assert all(json.loads(line) for line in (tmp_path / "events.jsonl").read_bytes().splitlines())


def test_other_processes_write_their_own_files_and_speak_only_of_trouble(tmp_path: Path) -> None:
    log, shown = open_log(tmp_path, distributed=DistributedContext(3, 8))
    log.event("started", "hello")
    log.warning("careful")
    log.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events-00003.jsonl", "log-00003.txt"]
    assert next(read_lines(tmp_path / "events-00003.jsonl"))["process"] == 3
    assert shown == [("rank 3: careful", "warning")]


def test_a_full_disk_is_reported_once_and_loses_nothing(tmp_path: Path) -> None:
    log, shown = open_log(tmp_path)

    def full(operation: atomic.FileOperation) -> None:
        raise OSError(28, "No space left on device")

    with atomic.observe(full):
        for number in range(5):
            log.event("tick", f"event {number}")
    complaints = [text for text, level in shown if level == "warning"]
    assert len(complaints) == 1
    assert "No space left" in complaints[0]
    log.close()
    assert [event["message"] for event in read_lines(tmp_path / "events.jsonl")] == [f"event {n}" for n in range(5)]
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 5


def test_captured_warnings_go_to_the_log_and_nowhere_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, shown = open_log(tmp_path)
    before = logging.getLogger().handlers[:]
    with warnings.catch_warnings(), log.capture():
        warnings.simplefilter("always")
        warnings.warn("old thing", DeprecationWarning, stacklevel=1)
        logging.getLogger("library").info("not this")
        logging.getLogger("library").error("broken %d %d", 1)  # a library's own mistake
    assert logging.getLogger().handlers == before
    events = list(read_lines(tmp_path / "events.jsonl"))
    assert [event["fields"]["logger"] for event in events] == ["py.warnings"]
    assert "old thing" in events[0]["message"]
    assert len(shown) == 1


def test_a_message_of_many_lines_stays_one_entry(tmp_path: Path) -> None:
    log, _ = open_log(tmp_path)
    log.info("first\nsecond")
    log.info("ü \udcff")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert lines[1] == "    second"
    assert len(lines) == 3


def test_without_a_directory_only_the_terminal_hears(capsys: pytest.CaptureFixture[str]) -> None:
    RunLog(None).event("x", "password=abc")
    assert capsys.readouterr().err == "password=[redacted]\n"


def test_rooms_that_know_of_no_run_name_their_event(tmp_path: Path) -> None:
    log, shown = open_log(tmp_path)
    with log.capture():
        extra = {"event_kind": "waiting_for_data", "event_fields": {"uri": "s3://b/x", "failed_tries": 3}}
        logging.getLogger("vorox.data.storage").warning("waiting for data", extra=extra)
    log.close()
    (event,) = read_lines(tmp_path / "events.jsonl")
    assert (event["kind"], event["fields"]) == ("waiting_for_data", {"uri": "s3://b/x", "failed_tries": 3})
    assert shown == [("waiting for data", "warning")]


def test_messages_of_vorox_are_shown_and_those_of_libraries_only_from_warnings_on(tmp_path: Path) -> None:
    log, shown = open_log(tmp_path)
    level = logging.getLogger("vorox").level
    with log.capture():
        extra = {"event_kind": "compiled", "event_fields": {"seconds": 9.5}}
        logging.getLogger("vorox.torch_engine").info("Compiled in 9.5 s", extra=extra)
        library = logging.getLogger("a_library")
        library.setLevel(logging.DEBUG)
        library.info("of no interest")
        library.warning("of interest")
    log.close()
    assert shown == [("Compiled in 9.5 s", "info"), ("of interest", "warning")]
    event, _ = read_lines(tmp_path / "events.jsonl")
    assert (event["kind"], event["level"], event["fields"]) == ("compiled", "info", {"seconds": 9.5})
    assert logging.getLogger("vorox").level == level
