"""Fingerprints: those of a slow computation in plain integers, however ranks divide the rows."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from math import prod

import numpy as np
import pytest

from vorox.core.errors import CheckpointError
from vorox.models.arrays.fingerprint import StateHash, fingerprint

SHAPES = [(), (5,), (40_000,), (40, 1025), (3, 9000), (130, 64), (2, 3, 5000), (0, 4), (7, 0), (2100, 1024)]
"""Scalars and vectors; blocks of many rows, of one, of part of an array; rows above a block; more blocks than a thread
takes at a time."""
COUNTERS = {"updates": 3.0, "scale": 0.1}


def random_array(seed: int, *shape: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=seed)).normal(size=shape).astype(np.float32)


def random_state() -> dict[str, np.ndarray]:
    return {f"weights.{index}": random_array(index, *shape) for index, shape in enumerate(SHAPES)}


def text(given: str) -> bytes:
    return struct.pack("<I", len(given)) + given.encode()


def slowly(state: dict[str, np.ndarray], counters: dict[str, float]) -> str:
    """The definition in docs/reliability.md."""
    lanes = [0] * 1024
    for name, array in state.items():
        row_bytes = 4 * prod(array.shape[1:])
        rows, block_rows = array.shape[0] if array.shape else 1, 1
        while 2 * block_rows * row_bytes <= 32768 and block_rows < 32768:
            block_rows *= 2
        for block in range(-(-rows // block_rows) if row_bytes else 0):
            data = array.tobytes()[block * block_rows * row_bytes : (block + 1) * block_rows * row_bytes]
            head = text(name) + text("float32") + struct.pack("<I", array.ndim)
            head += b"".join(struct.pack("<Q", size) for size in (*array.shape, block))
            expanded = hashlib.shake_256(b"vorox block/1" + head + hashlib.sha256(data).digest()).digest(2048)
            for lane, value in enumerate(struct.unpack("<1024H", expanded)):
                lanes[lane] = (lanes[lane] + value) % 65536
    found = hashlib.blake2b(digest_size=32, person=b"vorox state/1")
    for name in sorted(counters):
        found.update(text(name) + struct.pack("<d", counters[name]))
    return (found.update(struct.pack("<1024H", *lanes)), found.hexdigest())[1]


def test_it_is_the_definition_in_any_order_of_arrays() -> None:
    state = random_state()
    expected = slowly(state, COUNTERS)
    assert fingerprint(state.items(), COUNTERS) == expected
    assert fingerprint(reversed(state.items()), dict(reversed(COUNTERS.items()))) == expected


@pytest.mark.parametrize("seed", range(4))
def test_any_division_among_ranks_gives_the_same(seed: int) -> None:
    state, drawn = random_state(), np.random.Generator(np.random.Philox(key=seed))
    ranks = [StateHash() for _ in range(3)]
    for name, array in state.items():
        if array.ndim == 0:
            ranks[1].add(name, array)
            continue
        bounds = np.sort(drawn.integers(0, len(array) + 1, 6)).tolist()
        parts = list(itertools.pairwise([0, *bounds, len(array)]))
        for place in drawn.permutation(len(parts)):
            first, end = parts[place]
            ranks[drawn.integers(3)].add(name, array[first:end], first, array.shape)
    total = StateHash()
    for rank in drawn.permutation(3):
        total.merge(StateHash.from_report(json.loads(json.dumps(ranks[rank].report()))))
    assert total.fingerprint(COUNTERS) == fingerprint(state.items(), COUNTERS)


def test_rows_of_a_block_travel_only_if_ranks_divide_it() -> None:
    array = random_array(8, 64, 4096)  # blocks of two rows
    even, uneven = StateHash(), StateHash()
    even.add("x", array[:32], 0, array.shape)
    uneven.add("x", array[:33], 0, array.shape)
    assert not even.report()["rows"]
    ((*_, first_row, _),) = uneven.report()["rows"]
    assert first_row == 32


def test_rows_that_no_rank_holds_are_refused() -> None:
    array, total = random_array(9, 50, 30), StateHash()
    total.add("weights.x", array[:20], 0, array.shape)
    with pytest.raises(CheckpointError, match=r"Rows of weights\.x are on no rank"):
        total.fingerprint({})


@pytest.mark.parametrize(
    ("spans", "where"),
    [
        ([(0, 32)], "no rank"), ([(32, 64)], "no rank"), ([(0, 16), (32, 64)], "no rank"),
        ([(0, 64), (0, 32)], "several ranks"), ([(0, 32), (0, 32)], "several ranks"),
        ([(0, 33), (31, 64)], "several ranks"),
    ],
)  # fmt: skip
def test_whole_blocks_that_are_missing_or_doubled_are_refused(spans: list[tuple[int, int]], where: str) -> None:
    array, total = random_array(10, 64, 1024), StateHash()
    for first, end in spans:
        part = StateHash()
        part.add("weights.x", array[first:end], first, array.shape)
        total.merge(StateHash.from_report(json.loads(json.dumps(part.report()))))
    with pytest.raises(CheckpointError, match=f"Rows of weights.x are on {where}"):
        total.fingerprint({})


@pytest.mark.parametrize("change", ["bit", "sign of zero", "exchange", "blocks", "rows", "name", "shape", "counter"])
def test_every_change_shows(change: str) -> None:
    array, name, counters = random_array(4, 4, 8192), "x", dict(COUNTERS)
    array[0, 7] = 0.0
    before = fingerprint([(name, array)], counters)
    changed = array.copy()
    if change == "bit":
        seen = {before}
        for bit in range(32):
            flipped = array.copy()
            flipped.view(np.uint32)[2, 11] ^= np.uint32(1 << bit)
            seen.add(fingerprint([(name, flipped)], counters))
        assert len(seen) == 33
        return
    if change == "sign of zero":
        changed[0, 7] = -0.0
    elif change == "exchange":
        changed[1, 5], changed[1, 6] = array[1, 6], array[1, 5]
    elif change == "blocks":
        changed[[0, 3]] = array[[3, 0]]
    elif change == "rows":
        changed = np.roll(array, 1, axis=0)
    elif change == "shape":
        changed = array.reshape(4, 8, 1024)
    elif change == "counter":
        counters["updates"] += 1
    else:
        name = "y"
    assert fingerprint([(name, changed)], counters) != before


def test_arrays_in_any_memory_order_are_alike() -> None:
    array = random_array(6, 90, 70)
    assert fingerprint([("x", np.asfortranarray(array))]) == fingerprint([("x", array)])
    assert fingerprint([("x", array[::2])]) == fingerprint([("x", array[::2].copy())])
