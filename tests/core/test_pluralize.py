"""Numbers and their nouns agree."""

from __future__ import annotations

import pytest

from vorox.core.pluralize import pluralize


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, "0 steps"),
        (1, "1 step"),
        (1.0, "1 step"),
        (2, "2 steps"),
        (0.5, "0.5 steps"),
        (12345678901, "12,345,678,901 steps"),
    ],
)
def test_pluralize(number: float, expected: str) -> None:
    assert pluralize(number, "step") == expected


def test_an_irregular_plural() -> None:
    assert [pluralize(number, "process", "processes") for number in (1, 2)] == ["1 process", "2 processes"]
