"""Numbers with their nouns: 1 step, 2,000 steps, 0.5 epochs."""

from __future__ import annotations


def pluralize(number: float, noun: str, plural: str = "") -> str:
    """Return a number and its noun, singular or plural.

    Args:
        number: Printed with thousands separators.
        noun: The singular.
        plural: The plural, where it is not the noun with an s.
    """
    return f"{number:,.15g} {noun if number == 1 else plural or f'{noun}s'}"
