"""What can be typed: one module per noun declares its commands, their options and their help, and imports only typer.

The rooms beside this folder do the work; a module of theirs is imported when its command runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

import vorox
from vorox.cli.commands.lazy import lazy_group

_NAMES = (
    "train", "plan", "tune", "ladder", "claim", "claims", "doctor", "replay", "fork", "explain", "unlearn", "audit",
    "parity", "generate", "chat", "serve", "eval", "export", "compress", "dash", "help", "launch", "data", "runs",
    "checkpoints", "config",
)  # fmt: skip
"""In the order of the help; each is the name of a module here."""

app = typer.Typer(
    name="vorox",
    cls=lazy_group({name: f"vorox.cli.commands.{name}" for name in _NAMES}),
    help="Train language models; every run can be replayed and audited.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def declares_option(words: Sequence[str], option: str) -> bool:
    """Return whether the command that a command line names declares an option; imports its module alone."""
    command: Any = typer.main.get_command(app)
    for word in words:
        found = getattr(command, "commands", {}).get(word)
        if found is None:
            break
        command = found
    return any(option in parameter.opts for parameter in command.params)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vorox {vorox.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version
