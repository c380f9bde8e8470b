"""What is shown while text becomes tokens."""

from __future__ import annotations

import io

import pytest

from vorox.cli.preparation import PreparationDisplay


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drive(stream: io.StringIO) -> None:
    clock = Clock()
    display = PreparationDisplay(stream, clock)
    display("list stdlib", 1, 1, {})
    for second in range(31):
        clock.now = float(second)
        display("build stdlib train", second, 30, {"text_mb_per_second": 3.21, "tokens_per_second": 1e6})
    display("build stdlib validation", 1, 1, {})
    display.close()
    display.close()


def test_plain_lines_are_few() -> None:
    stream = io.StringIO()
    drive(stream)
    assert stream.getvalue().splitlines() == [
        "packing stdlib train   3% (3.2 MB/s, 1.00M tokens/s)",
        "packing stdlib train  37% (3.2 MB/s, 1.00M tokens/s)",
        "packing stdlib train  70% (3.2 MB/s, 1.00M tokens/s)",
        "packing stdlib train 100% (3.2 MB/s, 1.00M tokens/s), 30 s",
    ]


def test_a_terminal_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    drive(stream)
    lines = stream.getvalue().split("\n")
    assert len(lines) == 2
    assert lines[0].count("\r") > 20
    assert lines[0].endswith("packing stdlib train 100% (3.2 MB/s, 1.00M tokens/s), 30 s\x1b[K")


def test_what_is_over_in_an_instant_shows_nothing() -> None:
    stream = io.StringIO()
    display = PreparationDisplay(stream, Clock())
    display.step("replaying", 1, 1)
    display.close()
    assert stream.getvalue() == ""


def test_a_closed_stream_stops_nothing() -> None:
    clock, stream = Clock(), io.StringIO()
    display = PreparationDisplay(stream, clock)
    stream.close()
    for second in range(3):
        clock.now = float(second)
        display("tokenizer", 0, 0, {})
    display.close()
