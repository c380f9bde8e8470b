"""``vorox tune``: search settings over many runs, with Ray Tune and Optuna."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer

from vorox.backends import check_installed
from vorox.cli.settings.arguments import ParsedArguments, parse_arguments
from vorox.cli.settings.config import source_and_overrides
from vorox.cli.terminal import humanize
from vorox.cli.terminal.build_display import BuildDisplay
from vorox.cli.terminal.output import print_json, print_table, print_wrapped
from vorox.core.config.layers.overrides import parse_override
from vorox.core.config.layers.synonyms import key_of
from vorox.core.config.yaml.writer import write_inline
from vorox.core.errors import ConfigError, VoroxError
from vorox.core.files import atomic
from vorox.core.platform.installation import install_command
from vorox.core.pluralize import pluralize
from vorox.core.schema import RunConfig
from vorox.data.corpus.corpus import prepare
from vorox.experiments.artifacts import eval_losses
from vorox.records.run_lookup import run_argument, short_path
from vorox.sweeps.search_space import Parameter, is_distribution, overrides_of, parse_parameter, read_space
from vorox.sweeps.sweep import Asha, Resources, Sweep
from vorox.training.origin.configuration import load_config

_PACKAGES = ("ray", "optuna", "pandas", "matplotlib")
"""What the extra ``tune`` installs; Ray Tune needs pandas."""
_OPTIONS = (
    "--space", "--trials", "--concurrent", "--seed", "--asha", "--no-asha", "--grace-percent", "--reduction-factor",
    "--nproc", "--cpus", "--name", "--json", "--help",
)  # fmt: skip


def tune(
    arguments: list[str],
    space: Path | None,
    trials: int,
    concurrent: int,
    seed: int,
    asha: bool,
    grace_percent: float,
    reduction_factor: float,
    nproc: int,
    cpus: int,
    name: str | None,
    as_json: bool,
) -> None:
    parsed, searched = _parse(arguments, space)
    early_stopping = Asha(grace_percent, reduction_factor) if asha else None
    sweep = Sweep(searched, _loader(parsed), seed=seed, asha=early_stopping, name=name)
    _require_packages()
    failure: VoroxError | None = None
    with sweep.opened(["vorox", *sys.argv[1:]]):
        if not sweep.is_complete(trials):
            has_own_data = any(parameter.key.startswith("data.") for parameter in searched)
            resources = Resources(trials, concurrent, nproc, cpus)
            try:
                _run(sweep, resources, has_own_data=has_own_data, is_quiet=as_json)
            except VoroxError as error:
                failure = error
        path = _write_plot(sweep, searched)
    if as_json:
        print_json(_as_json(sweep))
    elif sweep.ranked():
        _print_results(sweep, parsed, searched)
        if path is not None:
            typer.echo(f"  plot      {short_path(path)}")
    if failure is not None:
        raise failure


def _parse(arguments: Sequence[str], file: Path | None) -> tuple[ParsedArguments, list[Parameter]]:
    """Separate settings from distributions.

    Raises:
        ConfigError: There is no configuration, or a parameter is invalid.
    """
    parsed = parse_arguments(arguments, options=_OPTIONS, max_positional=1)
    if not parsed.positional and not parsed.data:
        raise ConfigError(
            "No configuration is named", where="vorox tune",
            hint="for example `vorox tune my.yaml 'optimizer.lr=loguniform(1e-4, 1e-2)'`",
        )  # fmt: skip
    searched = [] if file is None else read_space(file)
    fixed: list[str] = []
    for word in parsed.overrides:
        key, _, value = word.removeprefix("--").partition("=")
        if is_distribution(value):
            searched.append(parse_parameter(key, value, where=word))
        else:
            fixed.append(word)
    keys = {parameter.key for parameter in searched}
    for word in fixed:
        key = key_of(".".join(map(str, parse_override(word).path)))
        if key in keys:
            raise ConfigError(f"{key} is set and searched", where=word, hint="remove one of them")
    return replace(parsed, overrides=tuple(fixed)), searched


def _loader(parsed: ParsedArguments) -> Callable[[Sequence[str]], RunConfig]:
    source, overrides = source_and_overrides(parsed)

    def load(more: Sequence[str]) -> RunConfig:
        return load_config(source, [*overrides, *more])

    return load


def _run(sweep: Sweep, resources: Resources, *, has_own_data: bool, is_quiet: bool) -> None:
    """Build the caches that the trials share, then run the trials."""

    def report(text: str) -> None:
        print_wrapped([humanize.printable(text)], err=is_quiet)

    check_installed(sweep.config.backend)
    if not has_own_data:
        _prepare_data(sweep.config)
    from vorox.sweeps.ray_trials import run_trials  # ray and optuna are optional

    report(f"Sweep {short_path(sweep.directory)}: {pluralize(resources.num_trials, 'trial')}")
    run_trials(sweep, resources, report)


def _prepare_data(config: RunConfig) -> None:
    """Build the caches of a configuration.

    Raises:
        ConfigError: No text is held out, so there is no validation loss.
    """
    display = BuildDisplay()
    try:
        corpus = prepare(config, on_progress=display)
    finally:
        display.close()
    corpus.close()
    if not any(cache.num_rows for cache in corpus.validation):
        raise ConfigError(
            "No text is held out, so trials have no validation loss", where="data.validation.held_out_fraction",
            hint="hold out more text, or set data.validation.sources",
        )  # fmt: skip


def _require_packages() -> None:
    """Check that the packages of a sweep are installed, before anything starts.

    Raises:
        ConfigError: One is missing.
    """
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"Sweeps need the package {package}", where="vorox tune", hint=install_command("tune")
            )  # fmt: skip


def _print_results(sweep: Sweep, parsed: ParsedArguments, space: Sequence[Parameter]) -> None:
    """Print the table of trials, the best one, and commands to continue with."""
    ranked = sweep.ranked()
    keys = [parameter.key for parameter in space]
    names = [key.rpartition(".")[2] for key in keys]
    titles = [name if names.count(name) == 1 else key for name, key in zip(names, keys, strict=True)]
    rows = [
        [
            Path(trial.run).name if trial.run else f"(trial {trial.number})",
            trial.outcome or "",
            humanize.UNKNOWN if trial.step is None else f"{trial.step:,}",
            humanize.UNKNOWN if trial.loss is None else f"{trial.loss:.4f}",
            *(humanize.printable(write_inline(trial.settings[key])) for key in keys),
        ]
        for trial in ranked
    ]
    typer.echo("")
    print_table(["RUN", "STATE", "STEP", "EVAL", *titles], rows, right=" ".join(["STEP", "EVAL", *titles]))
    for trial in ranked:
        if trial.reason:
            print_wrapped([f"Trial {trial.number} was refused: {humanize.printable(trial.reason)}"])
    best = ranked[0] if ranked and ranked[0].outcome == "finished" else None
    if best is None:
        typer.echo("\nNo trial has finished with a validation loss.")
        return
    words = ["vorox", "train", *parsed.positional, *(word for path in parsed.data for word in ("--data", path))]
    runs = [run_argument(Path(trial.run)) for trial in ranked[:2] if trial.loss is not None]
    lines = [
        "",
        f"Best: trial {best.number} of {len(sweep.trials)}, validation loss {best.loss:.4f}",
        f"  train     {shlex.join([*words, *parsed.overrides, *overrides_of(best.settings)])}",
        f"  show      vorox runs show {runs[0]}",
        *([f"  compare   vorox runs compare {' '.join(runs)}"] if len(runs) > 1 else []),
    ]
    print_wrapped(lines)


def _write_plot(sweep: Sweep, space: Sequence[Parameter]) -> Path | None:
    """Write the plot of the ended trials; return its path, or ``None`` if none has a loss."""
    from vorox.dashboard.exports.sweep_plot import TrialResult, draw_sweep  # matplotlib is optional

    found: list[TrialResult] = []
    for trial in sweep.ranked():
        if trial.loss is None or trial.step is None:
            continue
        losses = {step: loss for step, loss in eval_losses(Path(trial.run)).items() if step < trial.step}
        found.append(TrialResult(trial.settings, trial.outcome == "finished", {**losses, trial.step: trial.loss}))
    if not found:
        return None
    path = sweep.directory / "results.png"
    atomic.write_file(path, draw_sweep(found, {parameter.key: parameter.is_log for parameter in space}))
    return path


def _as_json(sweep: Sweep) -> dict[str, Any]:
    ranked = sweep.ranked()
    return {"sweep": str(sweep.directory), "trials": [asdict(trial) for trial in ranked]}
