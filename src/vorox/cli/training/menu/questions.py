"""Questions of the menu: a prompt goes in, a line comes out. No control of the terminal."""

from __future__ import annotations

from collections.abc import Callable

import typer

from vorox.cli.terminal.output import print_wrapped
from vorox.core.errors import VoroxError

Ask = Callable[[str], str]
"""Prints a prompt and returns the line that was typed; raises ``EOFError`` at the end of the input."""


class Leave(Exception):
    """The user leaves the menu."""


class Back(Exception):
    """The user returns to the list of checkpoints."""


BACK = "B"
"""The answer to a free question that returns to the list."""


def title(text: str) -> None:
    """Print the title of a screen."""
    typer.echo(f"\n{typer.style(text, bold=True)}\n")


def print_error(error: VoroxError) -> None:
    """Print what is wrong and what to do about it."""
    print_wrapped(["", f"  {error.what}", *([f"  -> {error.hint}"] if error.hint else [])], indent_columns=5)


def ask_choice(prompt: str, ask: Ask, *, number: int, letters: str = "", default: str = "") -> str:
    """Ask until the answer is a number from 1 or one of the letters, and return it in upper case.

    Args:
        prompt: The question, without the accepted answers.
        ask: Asks it.
        number: The largest number; 0 for none.
        letters: Accepted letters; Q leaves the menu.
        default: The meaning of an empty line.
    """
    accepted = [f"1-{number}" if number > 1 else "1"] if number else []
    accepted += list(letters)
    listed = f"{', '.join(accepted[:-1])} or {accepted[-1]}" if len(accepted) > 1 else accepted[0]
    while True:
        answer = ask(f"{prompt} {listed}" + (f" [{default}]: " if default else ": ")).strip().upper() or default
        if answer == "Q" and "Q" in letters:
            raise Leave
        if answer and answer in letters:
            return answer
        if answer.isdecimal() and 1 <= int(answer) <= number:
            return answer
        typer.echo(f"  Please type {listed}.")


def ask_number(prompt: str, ask: Ask, *, default: int, smallest: int) -> int:
    """Ask until the answer is a whole number that is large enough."""
    while True:
        answer = ask(f"{prompt} [{default:,}]: ").strip().replace(",", "") or str(default)
        if answer.isdecimal() and int(answer) >= smallest:
            return int(answer)
        typer.echo(f"  Please type a number of at least {smallest:,}.")


def ask_yes_or_no(prompt: str, ask: Ask, *, default: bool = True) -> bool:
    """Ask until the answer is yes or no."""
    while True:
        answer = ask(f"{prompt} [{'Y/n' if default else 'y/N'}]: ").strip().lower()
        if not answer:
            return default
        if answer in {"y", "yes", "n", "no"}:
            return answer.startswith("y")
        typer.echo("  Please type y or n.")
