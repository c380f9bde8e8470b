"""Records by step: what a reader sees after kills, resumes, torn lines and full disks."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path

import pytest

from vorox.core.errors import DataError
from vorox.core.files import atomic
from vorox.core.files.atomic import FileOperation
from vorox.core.files.json_lines import BUFFERED_LINES, StepHistory, last_record, read_history


def write(path: Path, resume_step: int, steps: range, note: str) -> None:
    history = StepHistory(path, resume_step)
    for step in steps:
        history.append({"step": step, "note": note})
    history.flush()


def notes(path: Path) -> dict[int, str]:
    return {step: record["note"] for step, record in read_history(path).items()}


def test_later_lines_supersede_and_lost_work_is_void(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    assert read_history(path) == {}
    write(path, 0, range(1, 8), "a")
    write(path, 4, range(5, 7), "b")
    assert notes(path) == {1: "a", 2: "a", 3: "a", 4: "a", 5: "b", 6: "b"}, "step 7 was lost and not done again"
    write(path, 0, range(1, 3), "c")
    assert notes(path) == {1: "c", 2: "c"}


@pytest.mark.parametrize("cut_bytes", range(1, 23))
def test_a_torn_last_line_is_ignored_and_then_cut(tmp_path: Path, cut_bytes: int) -> None:
    path = tmp_path / "history.jsonl"
    write(path, 0, range(1, 4), "a")
    path.write_bytes(path.read_bytes()[:-cut_bytes])
    assert notes(path) == {1: "a", 2: "a"}
    write(path, 2, range(3, 5), "b")
    assert notes(path) == {1: "a", 2: "a", 3: "b", 4: "b"}
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_file_that_is_one_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(b'{"step":')
    write(path, 0, range(1, 2), "b")
    assert notes(path) == {1: "b"}


def test_damage_counts_only_where_it_was_not_superseded(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    write(path, 0, range(1, 6), "a")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"\0" * 20 + b"\n", lines[4]]))  # step 4, beyond the last flush
    with pytest.raises(DataError, match=r"history\.jsonl:4"):
        read_history(path)
    write(path, 3, range(4, 6), "b")
    assert notes(path) == {1: "a", 2: "a", 3: "a", 4: "b", 5: "b"}
    write(path, 5, range(6, 7), "c")
    path.write_bytes(path.read_bytes().replace(b'{"note":"a","step":2}', b'{"note":"a","ste":2}'))
    with pytest.raises(DataError, match=r"history\.jsonl:2"):
        read_history(path)


def test_last_record_agrees_with_reading_everything(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    assert last_record(path, 5) is None
    write(path, 0, range(1, 20_000), "a" * 50)  # several windows
    write(path, 7_000, range(7_001, 7_500), "b" * 50)
    write(path, 7_200, range(7_201, 7_201), "")
    everything = read_history(path)
    for step in (0, 1, 2, 6_999, 7_000, 7_001, 7_200, 7_201, 19_999):
        below = [known for known in everything if known <= step]
        assert last_record(path, step) == (everything[below[-1]] if below else None), step


def test_a_thousand_resumes_cost_no_more_than_their_lines(tmp_path: Path) -> None:
    """Counted in the work done, not in seconds: every step is recorded and voided a bounded number of times."""
    path, lines = tmp_path / "history.jsonl", list[str]()
    for attempt in range(1_000):
        lines += [json.dumps({"resume_step": 50 * attempt})] if attempt else []
        lines += [
            json.dumps({"step": step, "note": str(attempt)}) for step in range(50 * attempt + 1, 50 * attempt + 61)
        ]
    path.write_text("\n".join(lines) + "\n")
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        found = read_history(path)
    finally:
        sys.setprofile(None)
    assert list(found) == list(range(1, 50_011))
    assert found[50]["note"] == "0"
    assert found[51]["note"] == "1"
    assert calls < 40 * len(lines)


def test_steps_whose_marker_is_lost_are_superseded_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    steps = [1, 2, 5, 6, 3, 4]
    path.write_text("".join(json.dumps({"step": step, "note": "a"}) + "\n" for step in steps) + '{"resume_step": 4}\n')
    assert list(read_history(path)) == [1, 2, 3, 4]


def test_a_full_disk_loses_no_line(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = StepHistory(path, 0)
    history.append({"step": 1})
    history.flush()

    def no_room(operation: FileOperation) -> None:
        if operation.kind == "write":
            with operation.path.open("ab") as file:
                file.write(operation.data[: len(operation.data) // 2])  # what fits
            raise OSError(errno.ENOSPC, "no space left on device")

    with atomic.observe(no_room):
        for step in range(2, BUFFERED_LINES + 10):
            history.append({"step": step})
        with pytest.raises(OSError, match="no space"):
            history.flush()
    history.flush()
    assert list(read_history(path)) == list(range(1, BUFFERED_LINES + 10))
