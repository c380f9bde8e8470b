"""``vorox parity``: train both engines side by side and report the first divergence."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import typer

from vorox import backends
from vorox.backends import check_installed
from vorox.cli.settings.arguments import ParsedArguments, parse_arguments
from vorox.cli.settings.config import load, source_and_overrides
from vorox.cli.terminal.build_display import BuildDisplay
from vorox.cli.terminal.output import print_json
from vorox.cli.terminal.state_notices import PrintedNotices
from vorox.core.config.yaml.writer import write_scalar
from vorox.core.engine import Engine
from vorox.core.errors import ConfigError, NumericalError
from vorox.core.pluralize import pluralize
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.data.corpus.corpus import Corpus, prepare
from vorox.data.order.size_estimate import estimate
from vorox.experiments.verdicts import record_verdict
from vorox.planned_run import resolve_model
from vorox.records.run_lookup import split_step
from vorox.run import with_states
from vorox.training.origin.configuration import load_config
from vorox.training.reports.engine_parity import StepParity, Tolerances, compare
from vorox.training.steps.dataloading import preview_batches
from vorox.training.steps.schedule import Schedule, horizon
from vorox.training.weights.init_from import init_from_weights

FIRST, SECOND = backends.BACKENDS[:2]


def parity(arguments: list[str], steps: int, as_json: bool) -> None:
    parsed = parse_arguments(arguments, options=("--steps", "--json"), max_positional=1)
    if not parsed.positional and not parsed.data:
        raise ConfigError("No configuration is named", where="parity", hint="for example `vorox parity quickstart`")
    parsed = _from_weights_of_step(parsed)
    source, overrides = source_and_overrides(parsed)
    dropout_fraction = load(source, overrides).model.dropout_fraction
    overrides.append("model.dropout_fraction=0")
    configs = [load_config(source, [*overrides, f"backend={name}"]) for name in (FIRST, SECOND)]
    for name in (FIRST, SECOND):
        check_installed(name)
    config = configs[0]
    if dropout_fraction:
        text = f"Dropout {dropout_fraction:g} is set to 0: each engine draws its own, so their losses differ by it"
        typer.echo(text, err=as_json)
    corpus = _corpus(config)
    first, second = (_engine(one, corpus) for one in configs)
    spec = resolve_model(config, corpus.tokenizer.vocab_size)
    with_states(lambda: init_from_weights(config, spec, first), PrintedNotices())
    size = estimate(corpus.train)
    length = horizon(config, num_train_rows=size.rows, full_dataset_tokens=size.tokens)
    schedule = Schedule.from_config(config.schedule, config.optimizer, length)
    tolerances = Tolerances()
    if not as_json:
        typer.echo(f"{FIRST}: {_facts(first)}\n{SECOND}: {_facts(second)}\n\n{_row(TITLES)}")
    with preview_batches(config, corpus, first.data_shard, steps) as batches:
        found = compare(
            first, second, batches, steps, lr=schedule.lr, weight_decay=schedule.weight_decay,
            on_step=None if as_json else lambda step: _print_step(step, steps, tolerances),
        )  # fmt: skip
    _report(found, tolerances, run=source.parent if isinstance(source, Path) else None, parsed=parsed, as_json=as_json)


def _from_weights_of_step(parsed: ParsedArguments) -> ParsedArguments:
    """Replace ``RUN@STEP`` by the run, and by the weights of the step to start from."""
    for name in parsed.positional:
        run, step = split_step("runs", name)
        if step is not None:
            weights = f"train.from_weights={write_scalar(name)}"
            return replace(parsed, positional=(run,), overrides=(*parsed.overrides, weights))
    return parsed


TITLES = ("STEP", f"LOSS {FIRST}", f"LOSS {SECOND}", "LOGITS", "LOSS", "GRAD-NORM", "PARAMETERS", "UPDATE")


def _row(cells: tuple[str, ...]) -> str:
    return f"{cells[0]:>6}  {cells[1]:>12}  {cells[2]:>12}" + "".join(f"  {cell:>10}" for cell in cells[3:])


def _print_step(step: StepParity, num_steps: int, tolerances: Tolerances) -> None:
    if step.step % max(1, num_steps // 10) and step.step != num_steps - 1 and not step.exceeded(tolerances):
        return
    differences = (f"{value:.1e}" for value in step.differences.values())
    typer.echo(_row((str(step.step + 1), *(f"{loss:.7f}" for loss in step.losses), *differences)))


def _report(
    found: list[StepParity], tolerances: Tolerances, *, run: Path | None, parsed: ParsedArguments, as_json: bool
) -> None:
    """Print the verdict, and record it in the run whose configuration was compared, if it was that of a run.

    Raises:
        NumericalError: The engines diverge.
    """
    wrong = next((step for step in found if step.exceeded(tolerances)), None)
    if as_json:
        print_json(
            {"equal": wrong is None, "tolerances": asdict(tolerances), "steps": [asdict(step) for step in found]}
        )
    verdict = _verdict(wrong, found, tolerances)
    if run is not None:
        settings = f"; with {' '.join(parsed.overrides)}" if parsed.overrides else ""
        record_verdict(run, "parity", passed=wrong is None, text=verdict + settings)
    if wrong is not None:
        raise NumericalError(
            verdict, hint="compare with precision.dtype=fp32; if it is set, one of the engines has a bug",
            saved="nothing was changed",
        )  # fmt: skip
    if not as_json:
        typer.echo(f"\n{verdict}")


def _verdict(wrong: StepParity | None, found: list[StepParity], tolerances: Tolerances) -> str:
    if wrong is not None:
        quantity = wrong.exceeded(tolerances) or ""
        about = f" of {wrong.worst_parameter}" if quantity == "parameters" else ""
        return (
            f"Engines diverge at step {wrong.step + 1}: the difference of {quantity}{about} is "
            f"{wrong.differences[quantity]:.2e}, the tolerance {getattr(tolerances, quantity):.0e}"
        )
    largest = {name: max(step.differences[name] for step in found) for name in found[0].differences}
    differences = ", ".join(
        f"{name} {value:.1e} (tolerance {getattr(tolerances, name):.0e})" for name, value in largest.items()
    )
    return f"Equal over {pluralize(len(found), 'step')}; largest differences: {differences}"


def _corpus(config: RunConfig) -> Corpus:
    display = BuildDisplay()
    try:
        return prepare(config, on_progress=display)
    finally:
        display.close()


def _engine(config: RunConfig, corpus: Corpus) -> Engine:
    spec = resolve_model(config, corpus.tokenizer.vocab_size)
    return backends.load(config.backend).create(config, spec, DistributedContext())


def _facts(engine: Engine) -> str:
    return ", ".join(f"{key} {value}" for key, value in engine.environment().items() if key != "engine")
