"""What is shown while text becomes tokens."""

from __future__ import annotations

import io

import pytest

from vorox.cli.terminal.build_display import BuildDisplay

RATES = {
    "text_mb_per_second": 3.21,
    "tokens_per_second": 1e6,
    "documents_per_second": 1234,
    "chunks": 12,
    "utilisation_fraction": 0.99876,
    "ratio_to_uint32": 0.3555,
    "ratio_to_uint16": 0.711,
}
FIGURES = "1.23k documents/s, 3.2 MB/s, 1.00M tokens/s, 12 chunks, 99.88% full"


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
    display = BuildDisplay(stream, clock)
    display("list stdlib", 1, 1, {})
    for second in range(31):
        clock.now = float(second)
        display("build stdlib train", second, 30, RATES)
    display("build stdlib validation", 1, 1, {})
    display.close()
    display.close()


def test_plain_lines_are_few() -> None:
    stream = io.StringIO()
    drive(stream)
    assert stream.getvalue().splitlines() == [
        f"packing stdlib train   3% ({FIGURES}, 29 s left)",
        f"packing stdlib train  37% ({FIGURES}, 19 s left)",
        f"packing stdlib train  70% ({FIGURES}, 9 s left)",
        f"packing stdlib train 100% ({FIGURES}), 30 s",
    ]


def test_a_terminal_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "130")
    stream = Terminal()
    drive(stream)
    lines = stream.getvalue().split("\n")
    assert len(lines) == 2
    assert lines[0].count("\r") > 20
    assert lines[0].endswith(f"packing stdlib train 100% ({FIGURES}), 30 s\x1b[K")


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize("name", ["stdlib", "a-corpus-with-a-name-that-is-longer-than-most-others-are-by-far"])
def test_no_line_is_wider_than_the_terminal(columns: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    stream, clock = Terminal(), Clock()
    display = BuildDisplay(stream, clock)
    for second in range(31):
        clock.now = float(second)
        display(f"build {name} train", second, 30, RATES)
    clock.now = 3599.0
    display.close()
    lines = [line.replace("\x1b[K", "") for line in stream.getvalue().replace("\n", "\r").split("\r")]
    assert max(map(len, lines)) < columns
    assert any("left" in line for line in lines)


def test_only_what_is_known_is_shown() -> None:
    stream, clock = io.StringIO(), Clock()
    display = BuildDisplay(stream, clock)
    for second in range(3):
        clock.now = float(second)
        display("wait stdlib train", 5, 30, {"text_mb_per_second": 0.0})
    display.close()
    assert stream.getvalue().splitlines()[0] == "waiting for stdlib train  17%"


def test_what_is_over_in_an_instant_shows_nothing() -> None:
    stream = io.StringIO()
    display = BuildDisplay(stream, Clock())
    display.step("replaying", 1, 1)
    display.close()
    assert stream.getvalue() == ""


def test_a_closed_stream_stops_nothing() -> None:
    clock, stream = Clock(), io.StringIO()
    display = BuildDisplay(stream, clock)
    stream.close()
    for second in range(3):
        clock.now = float(second)
        display("tokenizer", 0, 0, {})
    display.close()


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_what_is_said_meanwhile_has_a_line_of_its_own(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    clock = Clock()
    display = BuildDisplay(stream, clock)
    display("build code train", 0, 10, {})
    clock.now = 1.0
    display("build code train", 1, 10, {})
    display.message("waiting for data\x1b[2J")
    clock.now = 20.0
    display("build code train", 9, 10, {})
    display.close()
    lines = [line.rpartition("\r")[2].removesuffix("\x1b[K") for line in stream.getvalue().splitlines()]
    assert "waiting for data\ufffd[2J" in lines
    assert lines[-1] == "packing code train  90%, 20 s"


def test_what_is_checked_is_shown_with_its_speed() -> None:
    stream, clock = io.StringIO(), Clock()
    display = BuildDisplay(stream, clock)
    for second in range(0, 21, 5):
        clock.now = float(second)
        display.step("check code train", second * 40_000_000, 1_600_000_000)
    display.close()
    assert stream.getvalue().splitlines() == [
        "checking code train  12% (40.0 MB/s, 35 s left)",
        "checking code train  38% (40.0 MB/s, 25 s left)",
        "checking code train  50% (40.0 MB/s, 20 s left), 20 s",
    ]
