"""The command line ``vorox``: one module per noun; parsing and printing only.

Arguments go in, an exit code comes out. Modules of commands import only typer until a command runs, so that
``vorox --help`` is fast and loads no framework.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import vorox
from vorox.cli import checkpoints, config, data, launch, runs
from vorox.cli.arguments import OVERRIDES_CONTEXT
from vorox.cli.chat import chat
from vorox.cli.compress import compress
from vorox.cli.dash import dash
from vorox.cli.doctor import doctor
from vorox.cli.environment_variables import unknown_variables
from vorox.cli.evaluate import evaluate
from vorox.cli.export import export
from vorox.cli.generate import generate
from vorox.cli.ladder import ladder
from vorox.cli.parity import parity
from vorox.cli.plan import plan
from vorox.cli.replay import replay
from vorox.cli.serve import serve
from vorox.cli.standard_streams import resilient_streams
from vorox.cli.train import train
from vorox.cli.tune import tune
from vorox.core.windows_variables import set_windows_variables

app = typer.Typer(
    name="vorox",
    help="Train language models; every run can be replayed and audited.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


app.command(context_settings=OVERRIDES_CONTEXT)(train)
app.command(context_settings=OVERRIDES_CONTEXT)(plan)
app.command(context_settings=OVERRIDES_CONTEXT)(tune)
app.command(context_settings=OVERRIDES_CONTEXT)(ladder)
app.add_typer(launch.app)
app.command()(doctor)
app.add_typer(data.app)
app.add_typer(runs.app)
app.add_typer(checkpoints.app)
app.command()(replay)
app.command(context_settings=OVERRIDES_CONTEXT)(parity)
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command("eval")(evaluate)
app.command()(export)
app.command()(compress)
app.command()(dash)
app.add_typer(config.app)


@app.command("help")
def show_help(
    command: Annotated[list[str] | None, typer.Argument(metavar="[COMMAND]", show_default=False)] = None,
) -> None:
    """Show the help of a command."""
    app(args=[*(command or []), "--help"], prog_name="vorox", standalone_mode=False)


_MOST_OPEN_FILES = 65_536


def _allow_open_files() -> None:
    """Raise this process's soft limit of open files: every chunk of a cache that is being read is one."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run() -> NoReturn:
    """Run the command line of this process and end it."""
    code = main()
    gc.collect()
    gc.freeze()  # otherwise the interpreter searches all objects of PyTorch for cycles again, which takes 0.3 s
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    _allow_open_files()
    set_windows_variables(os.environ, Path())
    argv = list(sys.argv[1:] if arguments is None else arguments)
    with resilient_streams(survives_reader=argv[:1] == ["train"]):
        for line in unknown_variables(os.environ):
            sys.stderr.write(f"warning: {line}\n")
        try:
            code = app(args=argv, prog_name="vorox", standalone_mode=False)
            return code if isinstance(code, int) else 0
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        except typer.Abort:  # a question at the end of the input
            sys.stderr.write("Aborted.\n")
            return 1
        except KeyboardInterrupt:
            return 130
        except Exception as error:
            from vorox.cli.failure import report_failure

            return report_failure(error, argv)
