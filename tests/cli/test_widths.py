"""What the commands print at 80, 120 and 200 columns: no line is wider than the terminal."""

from __future__ import annotations

import io
import sys

import pytest

from vorox.cli import main
from vorox.cli.failure import report_failure
from vorox.cli.runs import comparison
from vorox.cli.terminal import output
from vorox.core.errors import ConfigError

TITLES = [
    "CACHE",
    "DOCUMENTS",
    "TOKENS",
    "ROWS",
    "FULL",
    "BYTES/TOKEN",
    "BITS/TOKEN",
    "MAX-ID",
    "VOCABULARY",
    "UNKNOWN",
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("width", "num_tables"), [(80, 2), (120, 1), (200, 1)])
def test_a_table_that_is_too_wide_goes_on_below(
    width: int, num_tables: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "terminal_width", lambda: width)
    rows = [[name, *("1,234.567" for _ in TITLES[1:])] for name in ("web train", "web validation")]
    output.print_table(TITLES, rows, right=" ".join(TITLES[1:]))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    assert all(words.count(title) == 1 for title in TITLES[1:]), "every column is there once"
    assert sum(line.startswith("CACHE") for line in lines) == num_tables
    assert sum(line.startswith("web validation") for line in lines) == num_tables


@pytest.mark.parametrize("width", [80, 120, 200])
def test_what_went_wrong_breaks_between_words_and_commands_stay_whole(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    command = "vorox train quickstart " + " ".join(f"data.sources.{index}.weight=1" for index in range(9))
    what = " ".join(f"word{index}" for index in range(50))
    assert report_failure(ConfigError(what, hint=command), []) == 2
    lines = terminal.getvalue().splitlines()
    assert " ".join(" ".join(lines[:-3]).split()) == f"x configuration: {what} [exit 2]"
    assert max(map(len, lines[:-3])) <= width
    assert lines[-1] == f"  do      {command}"


@pytest.mark.parametrize("width", [80, 120])
def test_a_document_goes_on_behind_its_bar(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "terminal_width", lambda: width)
    document = ["word " * 60, "", "x" * 500]
    output.print_text("\n".join(document))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert all(line.startswith("    \N{BOX DRAWINGS LIGHT VERTICAL} ") for line in lines)
    assert "".join(line[6:] for line in lines) == "".join(document), "nothing is left out"
    monkeypatch.setattr(output, "terminal_width", lambda: None)
    output.print_text("\n".join(document))
    assert [line[6:] for line in capsys.readouterr().out.splitlines()] == document, "a pipe gets the lines as they are"


@pytest.mark.torch
def test_a_plan_is_no_wider_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "terminal_width", lambda: 80)
    assert main(["plan", "quickstart", "--hardware", "h100x8", "train.global_batch_sequences=64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "in micro-batches of" in " ".join(" ".join(lines).split())


def test_compared_values_have_the_units_of_the_other_screens() -> None:
    assert comparison._last("memory/host_peak_bytes", (1, 332.8e6)) == "317 MiB"
    assert comparison._last("tokens_per_second", (1, 69510.0)) == "69.5k"
    assert comparison._best("loss", (710, 0.5528)) == "0.5528 @710"
