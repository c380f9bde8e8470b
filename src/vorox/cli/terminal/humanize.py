"""Formatting of counts, sizes, durations, fractions and lines; an unknown quantity is a dash."""

from __future__ import annotations

import math
import re
import textwrap

UNKNOWN = "-"

_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def count(value: float | None) -> str:
    """Format a count with at least three digits: 403.7M, 1.00B, 81.9k, 512."""
    if value is None:
        return UNKNOWN
    for unit, suffix in _COUNTS:
        if abs(value) >= unit * (0.9995 if unit > 1e3 else 1):
            scaled = value / unit
            return f"{scaled:.2f}{suffix}" if abs(scaled) < 9.995 else f"{scaled:.1f}{suffix}"
    return f"{value:,.0f}"


def size(value: float | None) -> str:
    """Format bytes: 58.9 GiB, 12 KiB, 512 B."""
    if value is None:
        return UNKNOWN
    for unit, suffix in _SIZES:
        if abs(value) >= unit:
            scaled = value / unit
            return f"{scaled:,.0f} {suffix}" if abs(scaled) >= 99.95 else f"{scaled:.1f} {suffix}"
    return f"{value:,.0f} B"


def duration(seconds: float | None) -> str:
    """Format seconds: 1d 4h, 2h 05m, 1m 34s, 34 s, 0.4 s."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"


def eta(seconds: float | None) -> str:
    """Format a remaining time: 04:23h (hours and minutes), 11 min, 35 s."""
    if seconds is None or not math.isfinite(seconds):
        return "--:--"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60:02d}:{minutes % 60:02d}h"


def number(value: float | None, digits: int = 3) -> str:
    """Format a number such as a loss with a fixed number of decimals."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def small(value: float | None) -> str:
    """Format a learning rate or a norm with two or three significant digits."""
    if value is None:
        return UNKNOWN
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.1e}" if abs(value) < 0.01 or abs(value) >= 1000 else f"{value:.3g}"


def speed(value: float | None) -> str:
    """Format tokens per second: 106,212 tok/s."""
    if value is None:
        return f"{UNKNOWN} tok/s"
    return f"{value:,.0f} tok/s" if value >= 100 else f"{value:.1f} tok/s"


def percent(fraction: float | None, digits: int = 0) -> str:
    return UNKNOWN if fraction is None else f"{100 * fraction:.{digits}f}%"


def wrap(text: str, columns: int, indent_columns: int) -> str:
    """Wrap lines between words only, so that paths and commands stay whole; continuation lines are indented."""
    wrapper = textwrap.TextWrapper(
        max(20, columns), subsequent_indent=" " * indent_columns, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(line) for line in text.split("\n"))


def printable(text: str) -> str:
    """Replace control characters of terminals and of the direction of text; tabs and newlines stay."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text.encode(errors="replace").decode())


def printable_line(text: str) -> str:
    """Return a text as one line: a name with a line end cannot pass for further lines."""
    return printable(text).replace("\n", "\N{REPLACEMENT CHARACTER}").replace("\t", " ")
