"""The time that a command gives a run (``--minutes``)."""

from __future__ import annotations

import re

from vorox.core.errors import ConfigError


def parse_minutes(text: str, option: str = "--minutes") -> float:
    """Parse a duration in minutes, or with units: 2, 0.5, 90s, 2m, 1h30m.

    Raises:
        ConfigError: The text is not a duration.
    """
    bare = text.strip().lower()
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", bare):
        return float(bare)
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(h|m|s)[a-z]*\s*", bare)
    if not parts or "".join(re.findall(r"\d+(?:\.\d+)?\s*[hms][a-z]*\s*", bare)) != bare:
        raise ConfigError(
            f"{option} {text} is not a duration", where=option, hint=f"write {option}=2, 0.5, 90s or 1h30m"
        )
    return sum(float(number) * {"h": 60.0, "m": 1.0, "s": 1 / 60}[unit] for number, unit in parts)


def check_minutes(minutes: float, option: str = "--minutes") -> float:
    """Check a time budget; return it in seconds.

    Raises:
        ConfigError: It is not a positive number.
    """
    if not 0 < minutes < 1e6:
        raise ConfigError(f"{minutes} minutes is not a valid training time", where=option, hint="give 0.5, 3, 60, ...")
    return minutes * 60.0
