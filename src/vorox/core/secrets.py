"""Secrets that a configuration names: used by this process, known to ``redact``, and written nowhere.

A connection string in a configuration file goes in under the name of the environment variable that would hold it;
whoever opens the connection takes it out. No configuration, log or record ever holds it.
"""

from __future__ import annotations

_held: dict[str, str] = {}


def hold(name: str, value: str) -> None:
    """Keep a secret for this process."""
    _held[name] = value


def held(name: str) -> str | None:
    """The secret that is kept under a name."""
    return _held.get(name)


def held_values() -> list[str]:
    """All secrets that are kept."""
    return list(_held.values())
