"""Numbers with their nouns, in the singular where the number is one: 1 step, 2,000 steps, 0.5 epochs."""

from __future__ import annotations


def counted(number: float, noun: str, plural: str = "") -> str:
    """Return a number and what it counts.

    Args:
        number: How many.
        noun: In the singular.
        plural: Where it is not the noun with an s.
    """
    return f"{number:,.15g} {noun if number == 1 else plural or f'{noun}s'}"
