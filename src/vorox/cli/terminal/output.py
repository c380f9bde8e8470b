"""Output of commands: tables, wrapped lines, JSON, confirmation prompts."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Generator, Iterable, Sequence
from typing import Any, TextIO

import typer

from vorox.cli.terminal import humanize
from vorox.core.errors import ConfigError
from vorox.core.files.json_lines import encode
from vorox.records.log import Level

_MIN_COLUMNS = 3


def echo(text: str, level: Level = "info") -> None:
    """Print a message: ``info`` to standard output, warnings and errors to standard error."""
    typer.echo(text, err=level != "info")


@contextlib.contextmanager
def printing_to_stderr(*, is_active: bool) -> Generator[None]:
    """Print to standard error what commands and ranks print to standard output, so that it has JSON alone."""
    with contextlib.redirect_stdout(sys.stderr) if is_active else contextlib.nullcontext():
        yield


def print_json(value: Any) -> None:
    """Print a value as strict JSON: no NaN, ASCII only."""
    typer.echo(json.dumps(json.loads(encode({"value": value}))["value"], indent=2).replace("\x7f", "\\u007f"))


def print_unicode_json(value: object) -> None:
    """Print a value as JSON, with its characters as they are."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def has_terminal() -> bool:
    """Whether a person can answer: standard input and output are terminals."""
    streams = (sys.stdin, sys.stdout)
    return all(stream is not None and stream.isatty() for stream in streams)


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Return the columns of the terminal, or ``None`` if the stream (default: standard output) is not a terminal."""
    return shutil.get_terminal_size().columns if (stream or sys.stdout).isatty() else None


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "", optional: str = "") -> None:
    """Print a table, on a terminal no wider than the terminal.

    Args:
        titles: Column titles.
        rows: Cells.
        right: Titles of right-aligned columns, separated by blanks.
        optional: Titles of columns that are dropped on a narrow terminal, in this order. Columns that still do not
            fit follow in a second table below; finally the first column is truncated in the middle.
    """
    width = terminal_width()
    shown_rows = [[humanize.printable_line(cell) for cell in row] for row in rows]
    columns = [[title, *cells] for title, *cells in zip(titles, *shown_rows, strict=True)]
    for title in optional.split():
        if width is not None and _table_width(columns) > width:
            columns = [column for column in columns if column[0] != title]
    if width is None:
        _print_columns(columns, right.split())
        return
    first, rest, is_below = columns[0], columns[1:], False
    while rest or not is_below:
        num_shown = next((n for n in range(len(rest), 0, -1) if _table_width([first, *rest[:n]]) <= width), 0)
        if num_shown < min(_MIN_COLUMNS, len(rest)):
            num_shown = len(rest)  # a table of one or two columns is not worth it
        shown, rest = [first, *rest[:num_shown]], rest[num_shown:]
        if (excess := _table_width(shown) - width) > 0:
            longest = max(8, max(map(len, first)) - excess)
            shown[0] = [_truncate_middle(cell, longest) for cell in first]
        if is_below:
            typer.echo("")
        _print_columns(shown, right.split())
        is_below = True


def _print_columns(columns: Sequence[Sequence[str]], right: Sequence[str]) -> None:
    padded = [
        [cell.rjust(size) if column[0] in right else cell.ljust(size) for cell in column]
        for column in columns
        for size in [max(map(len, column))]
    ]
    for row in zip(*padded, strict=True):
        typer.echo("  ".join(row).rstrip())


def _table_width(columns: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) for column in columns) + 2 * (len(columns) - 1)


def _truncate_middle(text: str, size: int) -> str:
    if len(text) <= size:
        return text
    end = (size - 1) // 2
    return f"{text[: size - 1 - end]}\N{HORIZONTAL ELLIPSIS}{text[len(text) - end :]}"


def print_wrapped(
    lines: Iterable[str], *, plain_columns: int | None = None, indent_columns: int | None = None, err: bool = False
) -> None:
    """Print lines; long ones are wrapped between words and indented.

    Args:
        lines: What to print.
        plain_columns: Width without a terminal; ``None``: do not wrap.
        indent_columns: Indentation of continuation lines; ``None``: four columns more than the first line.
        err: Print to standard error.
    """
    width = (terminal_width(sys.stderr) if err else terminal_width()) or plain_columns
    for line in map(humanize.printable, lines):
        if width is None or len(line) <= width:
            typer.echo(line, err=err)
            continue
        indent = len(line) - len(line.lstrip()) + 4 if indent_columns is None else indent_columns
        typer.echo(humanize.wrap(line, width, indent), err=err)


def print_text(text: str) -> None:
    """Print the text of a document behind a bar; on a terminal, long lines continue on the next."""
    indent = "    \N{BOX DRAWINGS LIGHT VERTICAL} "
    width = terminal_width()
    for line in humanize.printable(text).split("\n"):
        size = len(line) if width is None else max(1, width - len(indent))
        for start in range(0, len(line), size) if line else [0]:
            typer.echo(indent + line[start : start + size])


def confirm(question: str, *, yes: bool) -> None:
    """Ask for confirmation on a terminal.

    Raises:
        ConfigError: Standard input is not a terminal.
        typer.Exit: The answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(
            f"Confirmation needs a terminal: {question}", hint="add --yes to confirm", saved="nothing was removed"
        )
    if not typer.confirm(humanize.printable(question)):
        typer.echo("Nothing was removed.")
        raise typer.Exit(0)
