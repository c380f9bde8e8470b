"""The spool: every row comes back whole, torn and damaged lines are left out, and it does not grow without end."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from vorox.experiments.metadata import Row
from vorox.experiments.metadata import spool as spool_module
from vorox.experiments.metadata.spool import Spool


def row(attempt: int, last_step: int) -> Row:
    return Row("attempt", {"run_id": "r", "attempt": attempt, "last_step": last_step})


def test_an_empty_spool_makes_no_file(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append([], sync=True)
    assert spool.read().rows == ()
    assert not spool.path.exists()
    spool.clear()


def test_the_newest_row_of_every_key_comes_back_in_order(tmp_path: Path) -> None:
    numbered = [(number, row(number % 7, number)) for number in range(1, 100)]
    random.Random(1).shuffle(numbered)
    for entry in numbered:
        Spool(tmp_path).append([entry], sync=False)
    found = Spool(tmp_path).read()
    assert [entry.values["last_step"] for entry in found.rows] == list(range(93, 100))
    assert (found.last_number, found.damaged_lines) == (99, 0)
    spool = Spool(tmp_path)
    assert spool.size_bytes > 0
    spool.clear()
    assert (Spool(tmp_path).size_bytes, Spool(tmp_path).read().rows) == (0, ())


def test_every_cut_of_the_file_leaves_whole_rows(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for number in range(1, 6):
        spool.append([(number, row(number, number))], sync=False)
    whole = spool.path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == 10]
    for cut in range(len(whole)):
        spool.path.write_bytes(whole[:cut])
        found = Spool(tmp_path).read()
        complete = sum(end - 1 <= cut for end in ends)  # the line end itself may be missing
        assert [entry.values["attempt"] for entry in found.rows] == list(range(1, complete + 1))
        Spool(tmp_path).append([(9, row(9, 9))], sync=False)
        assert Spool(tmp_path).read().rows[-1] == row(9, 9), "what follows a torn line is whole"
        spool.path.unlink()


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append([(1, row(1, 10)), (2, row(2, 20)), (3, row(3, 30))], sync=False)
    whole = spool.path.read_bytes()
    true = {entry.values["attempt"]: entry for entry in spool.read().rows}
    for at in range(len(whole)):
        spool.path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        found = spool.read()
        assert all(entry == true[entry.values["attempt"]] for entry in found.rows)
        assert len(found.rows) < 3 or at in _blanks_and_cases(whole)
        assert found.damaged_lines > 0 or len(found.rows) == 3


def _blanks_and_cases(whole: bytes) -> set[int]:
    """Places where a flip need not change the meaning: hex digits may be written in capitals."""
    return {at for at, byte in enumerate(whole) if chr(byte) in "abcdef"}


def test_lines_of_unknown_tables_are_left_out(tmp_path: Path) -> None:
    import zlib

    body = b'[1,"no_such_table",{"run_id":"r"}]'
    (tmp_path / "metadata.spool").write_bytes(b"%08x %s\n" % (zlib.crc32(body), body))
    assert Spool(tmp_path).read().damaged_lines == 1


def test_a_database_that_is_away_for_long_does_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "_COMPACT_BYTES", 4096)
    spool, largest = Spool(tmp_path), 0
    for number in range(1, 5000):
        spool.append([(number, row(number % 5, number))], sync=False)
        largest = max(largest, spool.path.stat().st_size)
    assert largest < 3 * 4096
    found = Spool(tmp_path).read()
    assert [entry.values["last_step"] for entry in found.rows] == list(range(4995, 5000))
    assert found.last_number == 4999
