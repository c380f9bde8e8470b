"""Lines survive crashes, full disks and numbers that JSON does not have."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest

from vorox.core.files import atomic
from vorox.core.files.json_lines import LineFile, as_number, encode, read_lines


def test_every_line_is_json_for_every_parser() -> None:
    record = {"a": math.nan, "b": [math.inf, -math.inf, 1.5], "c": {"d": "ü"}, "e": None}
    line = encode(record)

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    value = json.loads(line, parse_constant=refuse)
    assert value == {"a": "NaN", "b": ["Infinity", "-Infinity", 1.5], "c": {"d": "ü"}, "e": None}
    assert math.isnan(as_number(value["a"]) or 0)
    assert [as_number(item) for item in value["b"]] == [math.inf, -math.inf, 1.5]
    assert as_number("text") is None
    assert as_number(True) is None


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_torn_last_line_is_skipped_by_readers_and_cut_by_the_next_writer(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "log.jsonl"
    file = LineFile(path)
    assert file.append(b'{"n":1}') is None
    assert file.append(b'{"n":2}') is None
    path.write_bytes(path.read_bytes()[:-cut])
    expected = [{"n": 1}]
    assert list(read_lines(path)) == expected
    LineFile(path).append(b'{"n":3}')
    assert list(read_lines(path)) == [*expected, {"n": 3}]
    assert b"\n\n" not in path.read_bytes()
    assert len(path.read_bytes().splitlines()) == 2


def test_no_file_is_no_records(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "none.jsonl")) == []


def test_what_cannot_be_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    file = LineFile(path)
    file.append(b'{"n":1}')
    full = True

    def disk(operation: atomic.FileOperation) -> None:
        if full and operation.kind == "write":
            with path.open("ab") as torn:  # half of the line arrives
                torn.write(operation.data[: len(operation.data) // 2])
            raise OSError(28, "No space left on device")

    with atomic.observe(disk):
        assert file.append(b'{"n":2}') is not None
        assert file.append(b'{"n":3}') is not None
        full = False
        assert file.append(b'{"n":4}') is None
    assert [record["n"] for record in read_lines(path)] == [1, 2, 3, 4]
    assert file.dropped_lines == 0


def test_a_directory_that_cannot_be_made_does_not_raise(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    file = LineFile(blocker / "log.jsonl")
    assert isinstance(file.append(b"{}"), OSError)


def test_flush_makes_durable(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    file = LineFile(path)
    file.append(b"{}")
    seen: list[str] = []
    with atomic.observe(lambda operation: seen.append(operation.kind)):
        assert file.flush(sync=True) is None
    assert "fsync" in seen


@pytest.mark.parametrize("last_bytes", range(0, 45))
def test_the_end_of_a_file(tmp_path: Path, last_bytes: int) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":2}\n{"n":3}\n{"n":4}\n')  # lines of 8 bytes
    assert [record["n"] for record in read_lines(path, last_bytes=last_bytes)] == [1, 2, 3, 4][
        max(0, 4 - last_bytes // 8) :
    ]


def test_lines_of_several_threads_stay_whole(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "log.jsonl")

    def work(number: int) -> None:
        for index in range(200):
            assert file.append(b'{"thread":%d,"index":%d}' % (number, index)) is None

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [(line["thread"], line["index"]) for line in read_lines(tmp_path / "log.jsonl")]
    assert sorted(found) == [(number, index) for number in range(4) for index in range(200)]
