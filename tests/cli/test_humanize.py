"""How numbers look."""

from __future__ import annotations

import math

import pytest

from vorox.cli.terminal import humanize as q


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (0, "0"), (512, "512"), (1000, "1.00k"), (81_920, "81.9k"), (999_600, "1.00M"),
        (403_700_000, "403.7M"), (1e9, "1.00B"), (15e12, "15.0T"), (9_996, "10.0k"),
    ],
)  # fmt: skip
def test_count(value: float | None, text: str) -> None:
    assert q.count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0, "0 B"), (512, "512 B"), (2048, "2.0 KiB"), (58.9 * 2**30, "58.9 GiB")]
)
def test_size(value: float | None, text: str) -> None:
    assert q.size(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"), (math.nan, "-"), (0.41, "0.4 s"), (9.96, "10 s"), (59.6, "1m 00s"), (94, "1m 34s"),
        (7500, "2h 05m"), (100_800, "1d 4h"),
    ],
)  # fmt: skip
def test_duration(seconds: float | None, text: str) -> None:
    assert q.duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "--:--"), (math.inf, "--:--"), (-5, "0 s"), (35.4, "35 s"), (263, "4 min"), (657, "11 min"),
        (3599.6, "01:00h"),
        (4 * 3600 + 23 * 60, "04:23h"), (100 * 3600, "100:00h"),
    ],
)  # fmt: skip
def test_eta(seconds: float | None, text: str) -> None:
    assert q.eta(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (5.3e-4, "5.3e-04"),
        (0.42, "0.42"),
        (12.345, "12.3"),
        (math.nan, "nan"),
        (1e5, "1.0e+05"),
    ],
)
def test_small(value: float | None, text: str) -> None:
    assert q.small(value) == text


def test_speed_and_percent() -> None:
    assert q.speed(106_212.4) == "106,212 tok/s"
    assert q.speed(12.34) == "12.3 tok/s"
    assert q.speed(None) == "- tok/s"
    assert q.percent(0.412, 1) == "41.2%"
    assert q.percent(None) == "-"


def test_printable_takes_the_terminal_out_of_a_text() -> None:
    assert q.printable("a\x1b[2Jb\tc\nd\r\x07\x9b") == "a\ufffd[2Jb\tc\nd\ufffd\ufffd\ufffd"
    assert q.printable("naïve \N{SNOWMAN}") == "naïve \N{SNOWMAN}"
    assert q.printable("\udcff") == "?"
