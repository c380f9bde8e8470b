"""The options and the help of ``vorox config``."""

from __future__ import annotations

from typing import Annotated

import typer

from vorox.cli.commands.lazy import implemented_in
from vorox.cli.commands.options import OVERRIDES_CONTEXT, AsJson

app = typer.Typer(
    name="config", help="Show, explain and compare configurations.", no_args_is_help=True, add_completion=False
)

ConfigArguments = Annotated[list[str] | None, typer.Argument(metavar="[CONFIG] [a.b=v ...]", show_default=False)]


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.settings.config")
def show(
    arguments: ConfigArguments = None,
    origins: Annotated[bool, typer.Option("--origins", help="Print the origin of every value.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the resolved configuration of a preset, file or run."""


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.settings.pages")
def explain(
    key: Annotated[
        str | None,
        typer.Argument(help="For example optimizer.lr, schedule or data.sources.0.weight. Default: list the sections."),
    ] = None,
    arguments: ConfigArguments = None,
    as_json: AsJson = False,
) -> None:
    """Explain a setting: description, type, default, accepted values, and its value in a configuration."""


@app.command()
@implemented_in("vorox.cli.settings.pages")
def reference() -> None:
    """Print a page of all settings, as Markdown."""


@app.command()
@implemented_in("vorox.cli.settings.pages")
def support() -> None:
    """Print a page of the features that exclude each other, as Markdown."""


@app.command()
@implemented_in("vorox.cli.settings.pages")
def schema() -> None:
    """Print the JSON schema of configuration files, for editors."""


@app.command(context_settings=OVERRIDES_CONTEXT)
@implemented_in("vorox.cli.settings.config")
def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A preset, file or run.")],
    after: Annotated[str, typer.Argument(metavar="B", help="Another preset, file or run; overrides apply to it.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[a.b=v ...]", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """List all differing settings. * marks those that make it a different run."""
