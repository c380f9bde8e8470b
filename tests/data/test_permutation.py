"""The permutation: frozen vectors, a scalar oracle written from the specification, bijection, quality."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vorox.data.permutation import permutation_key, permute, unpermute

KEY = permutation_key(1234, "text", "0" * 64)
SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 257, 999, 4096, 4097, 65535, 65536, 65537, 262145]

# Never to be changed: plans name "perm/1", and runs are replayed from their plans.
FROZEN = {
    (1, 0): [0],
    (2, 0): [0, 1],
    (10, 0): [2, 5, 1, 6, 3, 9, 4, 8, 7, 0],
    (10, 1): [3, 6, 7, 8, 0, 4, 1, 5, 9, 2],
    (65537, 0): [35646, 11155, 44109, 51657, 4870],
    (100_000_000, 7): [48449621, 9909500, 52712551, 94963280, 15675914],
    (2**40 + 1, 0): [1070695391178, 4348711912, 620918800974, 410423744006, 133217064873],
    (2**63 - 1, 3): [
        1615481386303606660,
        7128078750662471031,
        2674589372722612506,
        4478779656191166539,
        1461699550791489571,
    ],
}


def splitmix64(state: int, output: int) -> int:
    """Output number ``output`` (from 0) of the generator seeded with ``state``, as published by Vigna."""
    ones = 2**64 - 1
    z = (state + (output + 1) * 0x9E3779B97F4A7C15) & ones
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & ones
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & ones
    return z ^ (z >> 31)


def fmix32(h: int) -> int:
    """As published by Appleby."""
    ones = 2**32 - 1
    h ^= h >> 16
    h = (h * 0x85EBCA6B) & ones
    h ^= h >> 13
    h = (h * 0xC2B2AE35) & ones
    return h ^ (h >> 16)


def oracle(index: int, num_rows: int, key: bytes, tweak: int) -> int:
    half_bits = -(-max(2, (num_rows - 1).bit_length()) // 2)
    seeds = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    while True:
        left, right = index >> half_bits, index % 2**half_bits
        for number in range(6):
            round_key = splitmix64(seeds[number % 2], 3 * tweak + number // 2) >> 32
            left, right = right, left ^ (fmix32(right ^ round_key) % 2**half_bits)
        index = left << half_bits | right
        if index < num_rows:
            return index


def test_published_values_of_the_building_blocks() -> None:
    """The oracle itself: SplitMix64 of seed 1234567 and the murmur3 finaliser, from their authors' test values."""
    assert [splitmix64(1234567, n) for n in range(3)] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
    ]  # fmt: skip
    assert fmix32(0) == 0
    assert fmix32(1) == 0x514E28B7


def test_key_is_blake2b_of_the_canonical_parts() -> None:
    assert permutation_key(7, "a") == hashlib.blake2b(b'["perm/1",7,"a"]', digest_size=16).digest()
    keys = {permutation_key(*parts) for parts in [(7, "a"), (8, "a"), (7, "b"), (7,), ("7", "a"), (7, "a", 0)]}
    assert len(keys) == 6


@pytest.mark.parametrize(("num_rows", "tweak"), FROZEN)
def test_frozen_vectors(num_rows: int, tweak: int) -> None:
    count = len(FROZEN[num_rows, tweak])
    assert permute(np.arange(count), num_rows, KEY, tweak).tolist() == FROZEN[num_rows, tweak]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equals_the_scalar_oracle(data: st.DataObject) -> None:
    num_rows = data.draw(st.one_of(st.integers(1, 70), st.integers(1, 2**63 - 1)))
    index = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=8))
    tweak = data.draw(st.integers(0, 2**40))
    key = data.draw(st.binary(min_size=16, max_size=16))
    image = permute(np.array(index, np.int64), num_rows, key, tweak)
    assert image.tolist() == [oracle(value, num_rows, key, tweak) for value in index]
    assert unpermute(image, num_rows, key, tweak).tolist() == index


@pytest.mark.parametrize("num_rows", [4**power + more for power in (1, 2, 3, 8, 20, 31) for more in (-1, 0, 1, 2)])
def test_powers_of_four_end_a_size_of_the_cipher(num_rows: int) -> None:
    """The halves have one more bit from 4^n + 1 rows on, not from 4^n."""
    index = [*range(min(num_rows, 8)), num_rows - 1]
    image = permute(np.array(index, np.int64), num_rows, KEY, 3)
    assert image.tolist() == [oracle(value, num_rows, KEY, 3) for value in index]


@pytest.mark.parametrize("num_rows", SIZES)
def test_bijection_and_inverse(num_rows: int) -> None:
    index = np.arange(num_rows)
    image = permute(index, num_rows, KEY)
    assert np.array_equal(np.bincount(image, minlength=num_rows), np.ones(num_rows, np.int64))
    assert np.array_equal(unpermute(image, num_rows, KEY), index)
    assert np.array_equal(permute(unpermute(index, num_rows, KEY), num_rows, KEY), index)


def test_a_tweak_per_index_equals_one_call_per_tweak() -> None:
    index, tweak = np.tile(np.arange(48), 5), np.repeat(np.array([0, 1, 2, 9, 2**35]), 48)
    together = permute(index, 48, KEY, tweak)
    one_by_one = np.concatenate([permute(np.arange(48), 48, KEY, int(value)) for value in np.unique(tweak)])
    assert np.array_equal(together, one_by_one)
    assert np.array_equal(unpermute(together, 48, KEY, tweak), index)


def test_tweaks_may_come_in_any_order_and_in_runs() -> None:
    random = np.random.default_rng(5)
    for tweak in (random.integers(3, size=200), np.repeat([4, 4, 1, 4, 0], 40), np.full(200, 2**40), np.arange(200)):
        index = random.integers(50, size=200)  # 50 of 64: many are encrypted again
        image = permute(index, 50, KEY, tweak)
        assert image.tolist() == [
            oracle(value, 50, KEY, number) for value, number in zip(index.tolist(), tweak.tolist(), strict=True)
        ]
        assert np.array_equal(unpermute(image, 50, KEY, tweak), index)
    assert permute(index[:0], 50, KEY, tweak[:0]).size == 0


def test_other_key_or_tweak_is_another_order() -> None:
    index = np.arange(5000)
    orders = [permute(index, 5000, permutation_key(seed, "text"), tweak) for seed in (1, 2) for tweak in (0, 1, 2)]
    for i, first in enumerate(orders):
        for second in orders[:i]:
            assert np.count_nonzero(first == second) < 12  # one expected


def test_input_is_left_alone_and_may_be_empty() -> None:
    index = np.arange(10)
    permute(index, 10, KEY)
    assert np.array_equal(index, np.arange(10))
    assert permute(np.empty(0, np.int64), 10, KEY).size == 0


@pytest.mark.parametrize("index", [-1, 10])
def test_index_outside_the_range_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match="not within"):
        permute(np.array([0, index]), 10, KEY)


@pytest.mark.parametrize("num_rows", [10**6, 2**20, 2**20 + 1])
@pytest.mark.parametrize("seed", [1, 2])
def test_bigrams_are_random(num_rows: int, seed: int) -> None:
    """Test A of the research: source ranges of neighbouring outputs, 64 x 64 cells. Random gives 1 +- 0.022."""
    cell = permute(np.arange(num_rows), num_rows, permutation_key(seed, "bigrams")) * 64 // num_rows
    counts = np.bincount(cell[:-1] * 64 + cell[1:], minlength=4096)
    expected = (num_rows - 1) / 4096
    assert 0.9 < ((counts - expected) ** 2 / expected).sum() / 4095 < 1.1


def test_source_neighbours_share_a_batch_as_often_as_others() -> None:
    """Test B: pairs at distance d in the source, in the same batch of 512; sigma is 4.5% of the expectation."""
    num_rows = 2**20
    batch = unpermute(np.arange(num_rows), num_rows, KEY) // 512
    for distance in (1, 2, 16, 64, 1024):
        together = np.count_nonzero(batch[:-distance] == batch[distance:])
        assert 0.8 < together / (num_rows * 511 / (num_rows - 1)) < 1.2


def test_epochs_are_independent() -> None:
    """Ranges of the same output under two tweaks, 32 x 32 cells. Random gives 1 +- 0.044."""
    num_rows = 200_000
    first, second = (permute(np.arange(num_rows), num_rows, KEY, epoch) * 32 // num_rows for epoch in (0, 1))
    counts = np.bincount(first * 32 + second, minlength=1024)
    expected = num_rows / 1024
    assert 0.8 < ((counts - expected) ** 2 / expected).sum() / 1023 < 1.2


@pytest.mark.parametrize("num_rows", [5, 12, 64])
def test_small_ranges_are_nearly_uniform(num_rows: int) -> None:
    """Every row at every place equally often, within 10% over 10,000 epochs (sampling alone gives 3 to 8%)."""
    epochs = 10_000 * max(1, num_rows // 12)
    index, tweak = np.tile(np.arange(num_rows), epochs), np.repeat(np.arange(epochs), num_rows)
    image = permute(index, num_rows, KEY, tweak)
    counts = np.bincount(index * num_rows + image, minlength=num_rows**2) / (epochs / num_rows)
    sigma = (num_rows / epochs) ** 0.5
    assert abs(counts - 1).max() < 0.08 + 4.5 * sigma
