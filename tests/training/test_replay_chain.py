"""The replay chain: its definition worked out by hand, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vorox.core.batch import Batch, DataCursor, Progress
from vorox.core.engine import StepValues
from vorox.core.errors import DataError
from vorox.core.run_layout import RunLayout
from vorox.records.replay_chain import ReplayChain, bits, check_chain, examine_chain, number, read_chain

CURSOR = DataCursor("d", 1, 0, 0, 7)
START = Progress(0, 0, CURSOR)


def batch(step: int) -> Batch:
    return rows_of(step, [[step] * 4, [step] * 4])


def rows_of(step: int, tokens: list[list[int]]) -> Batch:
    rows = np.array([tokens], np.int32)
    found = Batch(step, rows, rows, None, None, np.ones((1, 2), np.uint64), 8, CURSOR)
    return found.with_lanes(np.arange(2))


def values(loss: float, grad_norm: float = 1.0) -> StepValues:
    return StepValues(loss, grad_norm, math.isfinite(loss), {})


def run(directory: Path, progress: Progress, steps: range, *, scale: float = 1.0) -> Progress:
    chain = ReplayChain(directory, progress)
    for step in steps:
        chain.record(step + 1, batch(step).digest(), values(scale / (step + 1)))
    chain.flush()
    return replace(progress, step=steps.stop, chain=chain.head)


def test_the_definition(tmp_path: Path) -> None:
    run(tmp_path, START, range(2))
    first = json.loads((RunLayout(tmp_path).chain).read_text().splitlines()[0])
    assert first["loss"] == struct.pack(">d", 1.0).hex() == "3ff0000000000000"
    text = f'["",1,"{batch(0).digest()}","3ff0000000000000","3ff0000000000000"]'
    assert first["chain"] == hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
    assert read_chain(tmp_path)[2].batch == batch(1).digest()


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, 5e-324, math.inf, -math.inf, 0.1])
def test_bits_are_exact(value: float) -> None:
    assert struct.pack(">d", number(bits(value))) == struct.pack(">d", value)


def test_not_a_number_has_one_form() -> None:
    payload = struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0]
    assert bits(payload) == bits(math.nan)
    assert math.isnan(number(bits(math.nan)))


def test_every_quantity_changes_the_head(tmp_path: Path) -> None:
    def head(name: str, changed: Batch, result: StepValues) -> str:
        (tmp_path / name).mkdir()
        chain = ReplayChain(tmp_path / name, START)
        chain.record(changed.step + 1, changed.digest(), result)
        return chain.head

    one_ulp = math.nextafter(1.0, 2.0)
    heads = [
        head("same", batch(0), values(1.0)),
        head("loss", batch(0), values(one_ulp)),
        head("norm", batch(0), values(1.0, one_ulp)),
        head("rows", rows_of(0, [[0] * 4, [1] * 4]), values(1.0)),
        head("order", rows_of(0, [[1] * 4, [0] * 4]), values(1.0)),
        head("step", rows_of(1, [[0] * 4, [0] * 4]), values(1.0)),
    ]
    assert len(set(heads)) == len(heads)


def test_interrupted_equals_straight(tmp_path: Path) -> None:
    (tmp_path / "straight").mkdir()
    (tmp_path / "broken").mkdir()
    straight = run(tmp_path / "straight", START, range(10))
    saved = run(tmp_path / "broken", START, range(4))
    run(tmp_path / "broken", saved, range(4, 9), scale=2.0)  # lost
    assert run(tmp_path / "broken", saved, range(4, 10)).chain == straight.chain
    assert read_chain(tmp_path / "broken") == read_chain(tmp_path / "straight")


def test_a_changed_entry_is_named(tmp_path: Path) -> None:
    run(tmp_path, START, range(5))
    path = RunLayout(tmp_path).chain
    path.write_text(path.read_text().replace(bits(1 / 3), bits(1 / 3.5)))
    with pytest.raises(DataError, match="step 3 does not follow"):
        read_chain(tmp_path)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_every_entry_is_checked_the_first_and_the_last_too(tmp_path: Path, step: int) -> None:
    run(tmp_path, START, range(5))
    path = RunLayout(tmp_path).chain
    path.write_text(path.read_text().replace(f'"loss":"{bits(1 / step)}"', f'"loss":"{bits(1 / (step + 0.5))}"'))
    with pytest.raises(DataError, match=f"step {step} does not follow"):
        read_chain(tmp_path)


def test_refuses_a_chain_of_another_history(tmp_path: Path) -> None:
    progress = run(tmp_path, START, range(5))
    assert check_chain(tmp_path, progress).damage(5) == ""
    with pytest.raises(DataError, match="at step 5"):
        check_chain(tmp_path, replace(progress, chain="0" * 64))


def edit(change: str, lines: list[bytes]) -> bytes:
    match change:
        case "line 3 deleted":
            lines = lines[:2] + lines[3:]
        case "line 3 is garbage":
            lines[2] = b"\xff\x00{" * 30 + b"\n"
        case "line 3 is nested":
            lines[2] = b"[" * 200_000 + b"\n"
        case "a digit of the loss of step 3":
            lines[2] = lines[2].replace(bits(1 / 3).encode(), bits(1 / 3.5).encode())
        case "the head of step 3":
            lines[2] = lines[2].replace(b'"chain":"', b'"chain":"0')[: -len(b'"}\n')] + b'"}\n'
        case "the number of step 3":
            lines[2] = lines[2].replace(b'"step":3', b'"step":3000000000000000')
        case "a negative number of step 3":
            lines[2] = lines[2].replace(b'"step":3', b'"step":-3')
        case "cut after step 3":
            lines = lines[:3]
        case "cut in step 4":
            lines = [*lines[:3], lines[3][:40]]
        case "all of it is garbage":
            return b"\x00" * 5_000
        case _:
            return b""
    return b"".join(lines)


@pytest.mark.parametrize(
    ("change", "first_bad", "said"),
    [
        ("line 3 deleted", 3, "step 3 is not recorded"),
        ("line 3 is garbage", 3, "step 3 is not recorded"),
        ("line 3 is nested", 3, "step 3 is not recorded"),
        ("a digit of the loss of step 3", 3, "step 3 is changed"),
        ("the head of step 3", 3, "step 3 is not recorded"),
        ("the number of step 3", 3, "step 3 is not recorded"),
        ("a negative number of step 3", 3, "step 3 is not recorded"),
        ("cut after step 3", 4, "steps 4 to 6 are not recorded"),
        ("cut in step 4", 4, "steps 4 to 6 are not recorded"),
        ("all of it is garbage", 1, "steps 1 to 6 are not recorded"),
        ("empty", 1, "steps 1 to 6 are not recorded"),
    ],
)
def test_damage_is_said_and_does_not_stop_a_run(tmp_path: Path, change: str, first_bad: int, said: str) -> None:
    progress = run(tmp_path, START, range(6))
    path = RunLayout(tmp_path).chain
    path.write_bytes(edit(change, path.read_bytes().splitlines(keepends=True)))
    found = check_chain(tmp_path, progress)
    assert found.damage(6) == said
    assert found.first_damage(1, 6) is not None
    assert found.first_damage(1, 6)[0] == first_bad
    assert found.first_damage(1, first_bad - 1) is None
    later = run(tmp_path, progress, range(6, 9))
    again = check_chain(tmp_path, later)
    assert again.damage(9) == said, "the steps that follow are proven again"
    assert again.last_step == 9


def test_a_chain_that_cannot_be_read_names_the_remedy(tmp_path: Path) -> None:
    (RunLayout(tmp_path).chain).mkdir()
    with pytest.raises(DataError, match="cannot be read") as caught:
        check_chain(tmp_path, START)
    assert "move it away" in caught.value.hint


def test_goes_on_without_the_file(tmp_path: Path) -> None:
    progress = run(tmp_path, START, range(5))
    (RunLayout(tmp_path).chain).rename(tmp_path / "away")
    run(tmp_path, progress, range(5, 7))
    assert list(read_chain(tmp_path)) == [6, 7]
    (RunLayout(tmp_path).chain).unlink()
    with pytest.raises(DataError, match="No step is recorded"):
        read_chain(tmp_path)


def test_damage_is_confined_to_the_damaged_steps(tmp_path: Path) -> None:
    """Steps 4 and 5 are missing and the link of step 8 is changed; every other step can be verified."""
    run(tmp_path, START, range(10))
    path = RunLayout(tmp_path).chain
    lines = path.read_text().splitlines()
    changed = json.loads(lines[7])
    changed["chain"] = changed["chain"][::-1]
    lines[7] = json.dumps(changed)
    path.write_text("\n".join([*lines[:3], *lines[5:], ""]))
    found = examine_chain(tmp_path, 10)
    assert found.missing == (range(4, 6),)
    assert found.changed == (8,)
    assert [found.first_damage(first, 10) for first in (1, 6, 9)] == [
        (4, "is not recorded"), (8, "does not follow from the previous one"), None,
    ]  # fmt: skip
    assert found.first_damage(5, 5) == (5, "is not recorded")
