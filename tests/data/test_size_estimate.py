"""Size estimates from the first units: exact if all are built, with a correct error otherwise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from cache_corpus import ByteTokenizer, build_corpus, corpus_of, recipe_for
from vorox.core.errors import DataError
from vorox.data.cache.files.manifest import Manifest
from vorox.data.cache.reader import CacheReader
from vorox.data.order.size_estimate import estimate


@dataclass(frozen=True)
class Consonants(ByteTokenizer):
    """Gives no token for the first letters of the alphabet, so that tokens are no fixed share of bytes."""

    def encode(self, text: str) -> np.ndarray:
        ids = super().encode(text)
        return ids[ids >= ord("h")]


def texts(count: int) -> list[str]:
    generator = np.random.Generator(np.random.Philox(9))
    return [
        "".join(map(chr, generator.integers(97, int(generator.integers(105, 123)), int(length))))
        for length in generator.integers(20, 200, count)
    ]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> CacheReader:
    directory, tokenizer = tmp_path_factory.mktemp("cache"), Consonants()
    build_corpus(directory, corpus_of([texts(200)], 5), tokenizer=tokenizer, recipe=recipe_for(tokenizer))
    return CacheReader.open(directory)


def with_units(cache: CacheReader, units: list[int]) -> CacheReader:
    """A reader that sees only some of the units."""
    full = cache.manifest
    chosen = [np.isin(records["unit"], units) for records in (full.chunks, full.units)]
    part = Manifest(full.planned_units, full.chunks[chosen[0]], full.units[chosen[1]], full.position)
    return CacheReader(cache.directory, cache.recipe, part, 16)


def test_a_complete_cache_is_exact(cache: CacheReader) -> None:
    found = estimate([cache, cache])
    assert found.tokens == 2 * sum(sum(letter >= "h" for letter in text) + 1 for text in texts(200))
    assert (found.rows, found.error_fraction, found.is_exact) == (2 * cache.num_rows, 0.0, True)


def test_the_estimate_is_as_wrong_as_it_says(cache: CacheReader) -> None:
    """Of many choices of units, two in three lie within one standard error, nearly all within three."""
    truth, generator = estimate([cache]).tokens, np.random.Generator(np.random.Philox(5))
    off: list[float] = []
    for _ in range(200):
        found = estimate([with_units(cache, generator.choice(40, 15, replace=False).tolist())])
        assert found.error_fraction is not None
        assert 0.01 < found.error_fraction < 0.2
        assert not found.is_exact
        off.append(abs(found.tokens - truth) / (found.error_fraction * found.tokens))
    assert 0.5 < float(np.mean(np.array(off) < 1)) < 0.85
    assert float(np.mean(np.array(off) < 3)) > 0.95


def test_one_unit_says_nothing_about_its_error(cache: CacheReader) -> None:
    found = estimate([with_units(cache, [2])])
    assert found.error_fraction is None
    assert "error unknown: one unit measured" in str(found)


def test_the_first_units_alone_give_the_same_whatever_is_built(cache: CacheReader) -> None:
    first = estimate([with_units(cache, [0, 1])], 2)
    assert first == estimate([cache], 2) == estimate([with_units(cache, [0, 1, 5])], 2)
    assert first.tokens != estimate([cache]).tokens


def test_nothing_built_is_refused(cache: CacheReader) -> None:
    with pytest.raises(DataError, match="No unit of the cache is built yet"):
        estimate([with_units(cache, [])])
