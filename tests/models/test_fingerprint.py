"""Fingerprints: the sum over elements is that of a slow computation in plain integers, however arrays are divided."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from vorox.models.arrays.fingerprint import ElementSum, array_fingerprint, element_fingerprint, is_elementwise

MASK = (1 << 64) - 1
BLOCK = 8192


def random_array(seed: int, *shape: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=seed)).normal(size=shape).astype(np.float32)


def summed(name: str, array: np.ndarray) -> ElementSum:
    total = ElementSum()
    total.add(name, array)
    return total


def factor(lane: int, place: int) -> int:
    """Output ``lane * BLOCK + place`` of the SplitMix64 generator with seed 0, made odd."""
    word = (0x9E3779B97F4A7C15 * (lane * BLOCK + place + 1)) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return (word ^ (word >> 31)) | 1


def slowly(name: str, array: np.ndarray) -> tuple[int, int]:
    """The definition in the module's docstring, element by element."""
    sums = [0, 0]
    for index, bits in enumerate(array.reshape(-1).view(np.uint32).tolist()):
        product = (bits * 0x9E3779B97F4A7C15) & MASK
        mixed = product ^ (product >> 32)
        digest = xxhash.xxh3_128_intdigest(f"{name}|{index // BLOCK}".encode())
        for lane, key in enumerate(((digest >> 64) | 1, (digest & MASK) | 1)):
            sums[lane] += key * factor(lane, index % BLOCK) * mixed
    return sums[0] & MASK, sums[1] & MASK


def test_the_sum_is_the_definition() -> None:
    array = random_array(1, 3, 5000)
    total = summed("weights.x", array)
    assert (total.first, total.second) == slowly("weights.x", array)
    assert ElementSum.from_hex(total.hex()) == total


def test_any_division_in_any_order_gives_the_same_sum() -> None:
    array = random_array(2, 40, 1025)
    whole = summed("x", array)
    bounds = np.sort(np.random.Generator(np.random.Philox(key=3)).integers(0, 41, 7)).tolist()
    total = ElementSum()
    for first, end in reversed(list(zip([0, *bounds], [*bounds, 40], strict=True))):
        part = ElementSum()
        part.add("x", array[first:end], first * 1025)
        total.merge(part)
    assert total == whole


@pytest.mark.parametrize("change", ["bit", "sign of zero", "exchange", "blocks", "rows", "name"])
def test_every_change_shows(change: str) -> None:
    array, name = random_array(4, 4, BLOCK), "x"
    array[0, 7] = 0.0
    before = summed(name, array)
    changed = array.copy()
    if change == "bit":
        seen = {before.hex()}
        for bit in range(32):
            flipped = array.copy()
            flipped.view(np.uint32)[2, 11] ^= np.uint32(1 << bit)
            seen.add(summed(name, flipped).hex())
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
    else:
        name = "y"
    after = summed(name, changed)
    assert after.first != before.first
    assert after.second != before.second


def test_names_shapes_and_counters_are_part_of_it() -> None:
    def found(shape: tuple[int, ...] = (2, 3), updates: float = 1.0, total: int = 5) -> str:
        return element_fingerprint({"x": shape}, {"updates": updates}, ElementSum(total, 7))

    assert len({found(), found((3, 2)), found(updates=2.0), found(total=6)}) == 4
    assert is_elementwise(found())


def test_fingerprints_over_arrays_are_those_of_earlier_versions() -> None:
    """Recorded in checkpoints since the first version: hashes of name, dtype, shape and content, sorted."""
    x, y = random_array(5, 3, 4), random_array(6, 9)
    lines = [f"{name}|float32|{array.shape}|{xxhash.xxh3_128_hexdigest(array.data)}\n" for name, array in
             (("b", x), ("exp_avg.b", y), ("updates", np.asarray(3, np.float32)))]  # fmt: skip
    found = array_fingerprint([("exp_avg.b", y), ("b", x)], {"updates": 3})
    assert found == xxhash.xxh3_128_hexdigest("".join(lines).encode())
    assert not is_elementwise(found)
