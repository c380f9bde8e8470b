"""``vorox ladder``: choose the learning rate of a wide model by narrow ones."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict

import typer

from vorox.cli.settings.arguments import ParsedArguments, parse_arguments
from vorox.cli.settings.config import source_and_overrides
from vorox.cli.terminal.output import print_json, print_table, print_wrapped
from vorox.core.errors import ConfigError
from vorox.sweeps.ladder import Ladder, Rung
from vorox.training.origin.configuration import load_config

_OPTIONS = ("--widths", "--lr", "--target", "--json", "--help")


def ladder(arguments: list[str], widths: str, lr: str, target: int | None, as_json: bool) -> None:
    parsed = parse_arguments(arguments, options=_OPTIONS, max_positional=1)
    if not parsed.positional and not parsed.data:
        raise ConfigError(
            "No configuration is named", where="vorox ladder",
            hint="for example `vorox ladder my.yaml --widths 64,128 --lr 1e-3,2e-3,4e-3`",
        )  # fmt: skip
    source, overrides = source_and_overrides(parsed)
    steps = Ladder(
        lambda more: load_config(source, [*overrides, *more]),
        [int(number) for number in _numbers(widths, "--widths", whole=True)], _numbers(lr, "--lr"), target,
    )  # fmt: skip

    def report(rung: Rung) -> None:
        typer.echo(f"hidden_size {rung.hidden_size}, lr {rung.lr:g}: validation loss {rung.loss:.4f}", err=as_json)

    rungs = steps.climb(report, ["vorox", *sys.argv[1:]])
    if as_json:
        print_json({"base": steps.widths[0], "target": steps.target, "runs": [asdict(rung) for rung in rungs]})
    else:
        _print_results(steps, rungs, parsed)


def _numbers(text: str, option: str, *, whole: bool = False) -> list[float]:
    try:
        return [int(word) if whole else float(word) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a list of numbers", where=option, hint="separate them by commas") from error


def _print_results(steps: Ladder, rungs: Sequence[Rung], parsed: ParsedArguments) -> None:
    """Print losses by rate and width, the best rate, and the command for the wide model."""
    losses = {(rung.hidden_size, rung.lr): rung.loss for rung in rungs}
    rows = [[f"{lr:g}", *(f"{losses[width, lr]:.4f}" for width in steps.widths)] for lr in steps.rates]
    titles = [f"WIDTH-{width}" for width in steps.widths]
    typer.echo("")
    print_table(["LR", *titles], rows, right=" ".join(["LR", *titles]))
    best = steps.best(rungs)
    if not best:
        typer.echo("\nNo run has a finite validation loss. Use smaller learning rates.")
        return
    widest = best[max(best)]
    lines = ["", f"Best at hidden_size {widest.hidden_size}: lr {widest.lr:g}, validation loss {widest.loss:.4f}"]
    if len(steps.rates) > 1 and widest.lr in (steps.rates[0], steps.rates[-1]):
        end = "smallest" if widest.lr == steps.rates[0] else "largest"
        lines.append(f"It is the {end} rate of the ladder: extend --lr.")
    words = ["vorox", "train", *parsed.positional, *(word for path in parsed.data for word in ("--data", path))]
    command = shlex.join([*words, *parsed.overrides, *steps.settings(steps.target, widest.lr)])
    print_wrapped([*lines, f"  train     {command}"])
