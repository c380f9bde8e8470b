"""The batch digest: its definition in plain Python, what changes it, and attacks on weaker sums."""

from __future__ import annotations

import functools
import hashlib
import itertools
import struct
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from fake_rows import FakeRows
from vorox.core.batch import Batch, BatchImages, BatchPatches, DataCursor, DataShard, TeacherLogits
from vorox.core.row_set_hash import (
    add_encoded,
    decode_lanes,
    encode_lanes,
    finish,
    no_lanes,
    row_digest,
    row_stream,
    sum_elements,
)
from vorox.data.order.loader import first_cursor, open_batches
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_events import MixtureStageEvent, PlanSource, PlanStart
from vorox.data.rows import RowBlock, row_digests

ROWS = 6
Words = npt.NDArray[np.uint64]
Partial = tuple[Words, npt.NDArray[np.int64]]
"""Sums, and the candidates that each consists of."""


def array_bytes(name: str, kind: str, shape: list[int], numbers: list[Any]) -> bytes:
    """One array of a row, byte by byte: name, dimensions, numbers."""
    head = name.encode().ljust(8, b"\0") + b"".join(struct.pack("<I", number) for number in [len(shape), *shape])
    return head + b"".join(struct.pack(f"<{kind}", number) for number in numbers)


def plain_digest(step: int, rows: list[tuple[int, bytes]]) -> str:
    """The digest of rows by slot, from the bytes of their arrays: one number at a time."""
    lanes = [0] * 1024
    for slot, arrays in rows:
        digest = hashlib.blake2b(arrays, digest_size=32, person=b"vorox row/1").digest()
        seed = b"vorox element/1" + step.to_bytes(8, "little") + slot.to_bytes(8, "little") + digest
        stream = hashlib.shake_256(seed).digest(2048)
        for lane in range(1024):
            lanes[lane] = (lanes[lane] + int.from_bytes(stream[2 * lane : 2 * lane + 2], "little")) % 65536
    total = b"".join(lane.to_bytes(2, "little") for lane in lanes)
    return hashlib.blake2b(total, digest_size=32, person=b"vorox batch/1").hexdigest()


def text_arrays(tokens: list[int], segments: list[int], *, document_mask: bool) -> bytes:
    """The arrays of a stored row of text; segments are their lengths, and the rest is padding."""
    length, labels, ids, positions = len(tokens) - 1, list[int](), list[int](), list[int]()
    place = [(number, offset) for number, size in enumerate(segments, 1) for offset in range(size)]
    place += [(0, index) for index in range(len(tokens) - len(place))]
    for at in range(length):
        (number, offset), (next_number, _) = place[at], place[at + 1]
        is_target = next_number != 0 and (number == next_number or not document_mask)
        labels.append(tokens[at + 1] if is_target else -100)
        ids.append(number)
        positions.append(offset)
    found = array_bytes("tokens", "i", [length], tokens[:-1]) + array_bytes("labels", "i", [length], labels)
    if document_mask:
        found += array_bytes("segments", "i", [length], ids) + array_bytes("position", "i", [length], positions)
    return found


def make_plan(directory: Path, readers: list[FakeRows], *events: Any) -> DataPlan:
    sources = tuple(PlanSource(reader.name, Fraction(1), reader.recipe.digest, reader.row_tokens) for reader in readers)
    plan = DataPlan.create(directory / "plan.jsonl", PlanStart(11, True, ROWS, sources), readers)
    plan.add(events)
    plan.extend_to(3 * ROWS, readers)
    return plan


def batches(
    plan: DataPlan,
    readers: list[FakeRows],
    *,
    rank: int = 0,
    ranks: int = 1,
    micro: int = 1,
    document_mask: bool = True,
) -> list[Batch]:
    options: dict[str, Any] = {"global_batch_sequences": ROWS, "micro_batch_sequences": micro, "num_threads": 0}
    with open_batches(
        plan,
        readers,
        shard=DataShard(rank, ranks),
        cursor=first_cursor(plan, 11),
        document_mask=document_mask,
        **options,
    ) as stream:
        return [next(stream) for _ in range(3)]


@pytest.mark.parametrize("document_mask", [True, False])
@pytest.mark.parametrize("token_bytes", [2, 4])
def test_the_definition_for_any_world(tmp_path: Path, document_mask: bool, token_bytes: int) -> None:
    """1, 2, 3, 4 and 6 ranks with any micro-batch: the digest of the rows of the plan, in plain Python."""
    readers = [FakeRows("a", [30], token_bytes=token_bytes), FakeRows("b", [20], token_bytes=token_bytes)]
    plan = make_plan(tmp_path, readers)
    expected = list[str]()
    for step in range(3):
        found = plan.locate(np.arange(step * ROWS, (step + 1) * ROWS))
        places = list(zip(found.source_index.tolist(), found.row.tolist(), strict=True))
        rows = [
            text_arrays(readers[source].tokens(row), readers[source].segments(row), document_mask=document_mask)
            for source, row in places
        ]
        expected.append(plain_digest(step + 1, list(enumerate(rows))))
    assert len(set(expected)) == 3
    for ranks, micro in [(1, 1), (1, 2), (1, 6), (2, 1), (2, 3), (3, 2), (4, 1), (4, 2), (6, 1)]:
        parts = [
            batches(plan, readers, rank=rank, ranks=ranks, micro=micro, document_mask=document_mask)
            for rank in range(ranks)
        ]
        for step in range(3):
            total = encode_lanes(no_lanes())
            for part in parts:
                lanes = part[step].lanes
                assert lanes is not None
                total = add_encoded(total, encode_lanes(lanes))
            assert finish(decode_lanes(total)) == expected[step], (ranks, micro)


def test_pieces_of_a_row_are_rows_of_their_own(tmp_path: Path) -> None:
    readers = [FakeRows("a", [30], max_segments=1)]
    plan = make_plan(tmp_path, readers, MixtureStageEvent(0, {"a": Fraction(1)}, row_pieces=2, draw_counts={"a": 0}))
    rows = list[bytes]()
    for row in plan.locate(np.arange(ROWS)).row.tolist():
        tokens = readers[0].tokens(row)
        rows += [text_arrays(tokens[start : start + 5], [5], document_mask=True) for start in (0, 4)]
    expected = plain_digest(1, list(enumerate(rows)))
    assert batches(plan, readers)[0].digest() == batches(plan, readers, micro=3)[0].digest() == expected


def test_known_digests_never_change() -> None:
    """From 0.2 on, a change of the format is another format."""
    tokens = np.arange(4, dtype=np.int32)
    digest = row_digest([row_stream("tokens", tokens[None]).of(0), row_stream("labels", tokens[None] + 1).of(0)])
    assert digest.hex() == "7a8c5f8d47c8d3fe76c01c5a6e3b74da4f972989ac80d4a42654e7e21383709b"
    assert sum_elements(3, [7], [digest])[:4].tolist() == [7404, 47721, 40850, 5193]
    assert finish(sum_elements(3, [7], [digest])) == "af03af7deb5d12c266065e373c17c2f5bb8437b222e0e9c21f707df5779bac6f"
    assert finish(no_lanes()) == "9ddcb5c7f086ced587e9bfed8dd06b58c5db55addba28f3e91bf9be1a13022f3"


def a_batch() -> Batch:
    """Two micro-batches of two rows with everything that rows can carry."""
    shape = (2, 2, 3)
    tokens, labels, segments, positions = (
        np.arange(12, dtype=np.int32).reshape(shape) + 100 * number for number in range(4)
    )
    images = tuple(
        BatchImages(np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3) + start, np.array([0, 1]), 7)
        for start in (0, 100)
    )
    teacher = TeacherLogits(
        np.arange(24, dtype=np.int32).reshape(*shape, 2), -1 - np.arange(24, dtype=np.float32).reshape(*shape, 2)
    )
    cursor = DataCursor("", 0, 5, 0, 0)
    return Batch(4, tokens, labels, segments, positions, np.ones((2, 2), np.uint64), 12, cursor, images, teacher)


def digest(batch: Batch, slots: list[int] | None = None) -> str:
    return batch.with_lanes(np.array([0, 1, 2, 3] if slots is None else slots)).digest()


def changed(name: str) -> Callable[[Batch], Batch]:
    def change(batch: Batch) -> Batch:
        array = getattr(batch, name).copy()
        array[1, 0, 2] += 1
        return replace(batch, **{name: array})

    return change


def with_image(batch: Batch) -> Batch:
    assert batch.images_A is not None
    first, second = batch.images_A
    assert isinstance(second, BatchImages)
    pixels = second.pixels_ISSC.copy()
    pixels[1, 1, 1, 2] ^= 1
    return replace(batch, images_A=(first, replace(second, pixels_ISSC=pixels)))


def with_image_in_other_row(batch: Batch) -> Batch:
    assert batch.images_A is not None
    first, second = batch.images_A
    return replace(batch, images_A=(first, replace(second, rows_I=np.array([0, 0]))))


def with_teacher(name: str) -> Callable[[Batch], Batch]:
    def change(batch: Batch) -> Batch:
        array = getattr(batch.teacher, name).copy()
        array[0, 1, 2, 1] += 1
        assert batch.teacher is not None
        return replace(batch, teacher=replace(batch.teacher, **{name: array}))

    return change


@pytest.mark.parametrize(
    "change",
    [
        *map(changed, ("tokens_ABT", "labels_ABT", "segment_ids_ABT", "position_ids_ABT")),
        lambda batch: replace(batch, segment_ids_ABT=None),
        lambda batch: replace(batch, position_ids_ABT=None),
        lambda batch: replace(batch, step=5),
        lambda batch: replace(batch, images_A=None),
        lambda batch: replace(batch, teacher=None),
        with_image,
        with_image_in_other_row,
        with_teacher("ids_ABTK"),
        with_teacher("logits_ABTK"),
    ],
)  # fmt: skip
def test_every_number_that_the_model_gets_counts(change: Callable[[Batch], Batch]) -> None:
    batch = a_batch()
    assert digest(batch) == digest(a_batch())
    assert digest(change(batch)) != digest(batch)


def test_images_and_logits_byte_by_byte() -> None:
    batch, rows = a_batch(), list[tuple[int, bytes]]()
    for slot, (a, b) in enumerate(itertools.product((0, 1), (0, 1))):
        start = 6 * a + 3 * b
        names = enumerate(("tokens", "labels", "segments", "position"))
        arrays = [array_bytes(name, "i", [3], [start + at + 100 * index for at in range(3)]) for index, name in names]
        pixels = [100 * a + 12 * b + number for number in range(12)]
        numbers = list(range(12 * a + 6 * b, 12 * a + 6 * b + 6))
        arrays += [
            array_bytes("image", "B", [2, 2, 3], pixels),
            array_bytes("topids", "i", [3, 2], numbers),
            array_bytes("logits", "f", [3, 2], [-1 - number for number in numbers]),
        ]
        rows.append((slot, b"".join(arrays)))
    assert digest(batch) == plain_digest(5, rows)
    patches = BatchPatches(
        np.arange(36, dtype=np.uint8).reshape(3, 3, 2, 2), np.array([[1, 2], [1, 1]]), np.array([0, 1]), 7
    )
    with_patches = replace(batch, images_A=(patches, patches), teacher=None)
    lines = list[tuple[int, bytes]]()
    for slot, arrays in rows:
        first, count = ((0, 2), (2, 1))[slot % 2]
        text = arrays[: 4 * (16 + 12)]
        text += array_bytes("grids", "q", [1, 2], [1, count])
        text += array_bytes("patches", "B", [count, 3, 2, 2], list(range(12 * first, 12 * (first + count))))
        lines.append((slot, text))
    assert digest(with_patches) == plain_digest(5, lines)


def test_a_swapped_a_repeated_and_a_missing_row() -> None:
    batch, number = a_batch(), 4
    found = [digest(batch, list(slots)) for slots in itertools.permutations(range(number))]  # rows in every other order
    repeated = batch.tokens_ABT.copy()
    repeated[0, 1] = repeated[0, 0]
    found += [digest(batch, [0, 1, 2]), digest(batch, [0, 1, 2, 4]), digest(replace(batch, tokens_ABT=repeated))]
    assert len(set(found)) == len(found)


# -- attacks -----------------------------------------------------------------------------------------------------------


class Sum:
    """Addition of 64-bit words, by lanes of a type."""

    def __init__(self, lane: type[np.unsignedinteger[Any]]) -> None:
        self._lane = lane

    def add(self, first: Words, second: Words) -> Words:
        return (first.view(self._lane) + second.view(self._lane)).view(np.uint64)

    def subtract(self, first: Words, second: Words) -> Words:
        return (first.view(self._lane) - second.view(self._lane)).view(np.uint64)

    def total(self, words: list[int]) -> Words:
        """The sum of some words, as an array of one."""
        return functools.reduce(self.add, (np.array([word], np.uint64) for word in words))


def forge(elements: Words, target: Words, group: Sum) -> list[int] | None:
    """Wagner's attack with eight lists: choose one candidate per list so that their sum is the target.

    Sums of two agree with the target in 16 bits, sums of four in 32, those of eight in all: 2^16 candidates per list
    do, where a search would take 2^64 tries.

    Args:
        elements: ``[8, candidates]``: what each candidate adds.
        target: The sum.
        group: How candidates are added.
    """

    def join(first: Partial, second: Partial, bits: int, wanted: Words) -> Partial:
        """All pairs whose sum has these low bits."""
        mask = np.uint64((1 << bits) - 1)
        keys = second[0] & mask
        order = np.argsort(keys)
        missing = group.subtract(np.broadcast_to(wanted, first[0].shape).copy(), first[0]) & mask
        low, high = (np.searchsorted(keys[order], missing, side) for side in ("left", "right"))
        counts = high - low
        left = np.repeat(np.arange(len(missing)), counts)
        ends = np.cumsum(counts)
        right = order[np.arange(int(ends[-1])) - np.repeat(ends - counts - low, counts)]
        return group.add(first[0][left], second[0][right]), np.concatenate([first[1][left], second[1][right]], axis=1)

    number = np.arange(elements.shape[1])[:, None]
    lists = [(np.ascontiguousarray(values), number) for values in elements]
    zero = np.zeros(1, np.uint64)
    for attempt in range(64):  # other intermediate sums give other solutions
        offset = np.array([attempt * 0x9E37], np.uint64)
        less = group.subtract(zero, offset)
        wanted = [offset, less, offset, group.add(target, less)]
        pairs = [join(lists[2 * at], lists[2 * at + 1], 16, wanted[at]) for at in range(4)]
        fours = [join(pairs[0], pairs[1], 32, zero), join(pairs[2], pairs[3], 32, target)]
        _, found = join(fours[0], fours[1], 64, target)
        if len(found):
            return found[0].tolist()
    return None


def candidate(slot: int, number: int) -> bytes:
    """A row that an attacker may train on in place of the real one."""
    return struct.pack("<4I", 1000 + slot, number, 7, 7)


def toy_element(slot: int, row: bytes) -> int:
    """An element of 8 lanes of 8 bits."""
    digest = hashlib.blake2b(row, digest_size=32, person=b"vorox row/1").digest()
    seed = b"vorox element/1" + struct.pack("<QQ", 1, slot) + digest
    return int.from_bytes(hashlib.shake_256(seed).digest(8), "little")


def xxh3_element(slot: int, row: bytes) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<Q", slot) + row)


def full_digest(rows: list[bytes]) -> str:
    arrays = [np.frombuffer(row, "<i4") for row in rows]
    return finish(
        sum_elements(1, range(len(arrays)), (row_digest([row_stream("tokens", row[None]).of(0)]) for row in arrays))
    )


@pytest.mark.parametrize(("weak", "lane"), [(xxh3_element, np.uint64), (toy_element, np.uint8)])
def test_a_short_sum_is_forged_in_seconds(weak: Callable[[int, bytes], int], lane: Any) -> None:
    """A sum of xxh3 and one of 8 small lanes: other rows with the sum of the recorded ones. 1,024 lanes see them."""
    group, honest = Sum(lane), [candidate(slot, 1 << 30) for slot in range(8)]
    target = group.total([weak(slot, row) for slot, row in enumerate(honest)])
    candidates = [[weak(slot, candidate(slot, number)) for number in range(1 << 16)] for slot in range(8)]
    chosen = forge(np.array(candidates, np.uint64), target, group)
    assert chosen is not None
    forged = [candidate(slot, number) for slot, number in enumerate(chosen)]
    assert not set(forged) & set(honest)
    assert group.total([weak(slot, row) for slot, row in enumerate(forged)]) == target
    assert full_digest(forged) != full_digest(honest)


def test_rows_with_equal_xxh3_are_told_apart(tmp_path: Path) -> None:
    """xxh3 multiplies the halves of (data ^ secret): where one is zero, the data are only added.

    So the same number is added to one word and subtracted from another: two rows of a cache with equal hashes.
    """
    secret = bytes.fromhex("b8fe6c3923a44bbe7c01812cf721ad1c")  # the first 16 bytes of the published default secret
    twins = list[npt.NDArray[np.uint16]]()
    for shift in (0, 1):
        row = np.arange(401, dtype="<u2").tobytes()
        parts = bytearray(row)
        for stripe, value in ((0, 1000 + shift), (1, 2000 - shift)):
            parts[64 * stripe : 64 * stripe + 8] = secret[8 * stripe : 8 * stripe + 4] + struct.pack("<I", value)
        twins.append(np.frombuffer(bytes(parts), "<u2").copy())
    blocks = [RowBlock(row[None], np.array([0, 1]), np.array([401], np.int32), np.zeros(1, np.int32)) for row in twins]
    assert (twins[0] != twins[1]).any()
    assert row_digests(blocks[0]).tolist() == row_digests(blocks[1]).tolist()

    class Twin(FakeRows):
        def __init__(self, row: npt.NDArray[np.uint16]) -> None:
            super().__init__("a", [30], row_tokens=401)
            self._row = row

        def read_rows(self, rows: npt.NDArray[np.int64]) -> RowBlock:
            return RowBlock(
                np.repeat(self._row[None], len(rows), axis=0), np.arange(len(rows) + 1),
                np.full(len(rows), 401, np.int32), np.zeros(len(rows), np.int32),
            )  # fmt: skip

    readers: list[FakeRows] = [Twin(row) for row in twins]
    plan = make_plan(tmp_path, readers[:1])
    first, second = (batches(plan, [reader])[0] for reader in readers)
    assert first.row_digests_AB.tolist() == second.row_digests_AB.tolist()
    assert first.digest() != second.digest()
