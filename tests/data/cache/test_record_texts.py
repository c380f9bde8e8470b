"""Texts of one record and size are identified in the chunks of a unit; every token of a text is the text's index."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from vorox.data.cache.files.format import DOCUMENT
from vorox.data.cache.units.packing import chunk_contents
from vorox.data.cache.units.record_texts import copies_of_segments, documents_of_unit
from vorox.data.recipe import Recipe


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
@pytest.mark.parametrize("seed", range(6))
def test_the_texts_of_a_record_are_told_apart(packing: Any, seed: int) -> None:
    chooser = random.Random(seed)
    rows: list[tuple[int, ...]] = []
    for ordinal in range(40):
        size = chooser.choice([2, 5, 9, 30, 70])
        text = chooser.randrange(1 << 60)
        sizes = [size] * chooser.randint(1, 3) + [size + 1] * (ordinal % 5 == 0)
        rows += [(0, ordinal, 10 * ordinal, 9, one, one, text) for one in sizes]
    documents_D = np.array(rows, DOCUMENT)
    tokens = np.repeat(np.arange(len(rows), dtype=np.uint16), documents_D["num_tokens"])
    recipe = Recipe("fake", 60_000, 59_999, 17, {}, {}, packing, chooser.choice([3, 8, 1000]))
    contents = chunk_contents(tokens, documents_D, recipe)
    tables, segments = [one.documents_D for one in contents], [(one.row_ptr, one.segments_S3) for one in contents]
    found = copies_of_segments(tables, segments, recipe)
    texts: dict[tuple[int, int], set[int]] = {}
    for content, copies in zip(contents, found, strict=True):
        for row in range(len(content.tokens_RC)):
            begin = 0
            for segment in range(content.row_ptr[row], content.row_ptr[row + 1]):
                document, _, length = content.segments_S3[segment].tolist()
                key = int(content.documents_D[document]["ordinal"]), int(copies[segment])
                texts.setdefault(key, set()).update(content.tokens_RC[row, begin : begin + length].tolist())
                begin += length
    assert sorted(number for numbers in texts.values() for number in numbers) == list(range(len(rows)))
    assert all(len(numbers) == 1 for numbers in texts.values())
    assert sorted(documents_of_unit(tables, segments).tolist()) == sorted(documents_D.tolist())
