"""The summary of a finished run: results, paths, and the exact commands to continue with."""

from __future__ import annotations

import importlib.util
import math
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from vorox.cli.launch.rank_launcher import nproc_option
from vorox.cli.terminal import humanize
from vorox.core.errors import DataError, VoroxError
from vorox.core.files.json_lines import read_lines
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import RunLayout, step_directories
from vorox.core.schema import RunConfig
from vorox.dashboard.metrics.series import MetricSeries
from vorox.dashboard.pages.resource_page import plan_and_actual
from vorox.data.corpus.corpus import prepare_recorded
from vorox.data.provenance.inspection import xz_bits_per_byte
from vorox.experiments.tracking import last_values
from vorox.records.run_context import recorded_config
from vorox.records.run_lookup import run_argument, short_path
from vorox.run import Outcome
from vorox.training.steps.schedule import holding_overrides


def summary_lines(outcome: Outcome) -> list[str]:
    """Return the summary of a finished run."""
    directory = outcome.run_directory
    config = recorded_config(directory)
    run = run_argument(directory)
    step = outcome.progress.step
    measured = outcome.speed
    if step == outcome.start_step:
        head = f"{directory.name} is already finished ({pluralize(step, 'step')}); to extend it, see below"
    else:
        seconds = sum(measured.seconds.values())
        resumed = f" for steps {outcome.start_step + 1:,} to {step:,}" if outcome.start_step else ""
        head = (
            f"{directory.name}: {pluralize(step, 'step')}, {humanize.count(outcome.progress.num_tokens)} tokens; "
            f"{humanize.duration(seconds)}{resumed}{_at_speed(measured.tokens_per_second)}"
        )
    lines = ["", head, *_results(outcome, config)]
    first, last = _replayable_steps(directory, step)
    fallback = "The" if config.tokenizer.kind != "none" else "0"
    prompt = shlex.quote(next((text for text in config.eval.prompts if text.isprintable()), fallback))
    positions = config.model.max_positions_tokens or config.data.sequence_length_tokens
    if config.eval.sample_tokens > positions // 2:
        prompt += f" --tokens {positions // 2}"
    several = nproc_option()
    form = "peft" if config.adapter.kind != "none" else "hf" if _has_huggingface_form(directory) else None
    root = short_path(directory.parent)
    is_chat = any(source.chat_fields and not source.preference_pairs for source in config.data.sources)
    hold = holding_overrides(config.schedule, outcome.horizon)
    lines += [
        *_activation(),
        f"  resume    vorox train --resume {run} train.num_steps={2 * step}{hold and f' {hold}'}{several}",
        f"  chat      vorox chat {run}" if is_chat else f"  generate  vorox generate {run} -p {prompt}",
        *([f"  export    vorox export {run} --to {form}{_check_option(form)}"] if form is not None else []),
        f"  replay    vorox replay {run} --from {first} --to {last}{several}",
        f"  dash      vorox dash{'' if root == 'runs' else f' {shlex.quote(root)}'}",
    ]
    return lines


def _check_option(form: str) -> str:
    """Return the option that compares an export with its checkpoint, if the library that it needs is installed."""
    library = "peft" if form == "peft" else "transformers"
    return " --check" if importlib.util.find_spec(library) is not None else ""


def _at_speed(tokens_per_second: float | None) -> str:
    """Return the mean speed; nothing where it is unknown, as after a single step."""
    return "" if tokens_per_second is None else f" at {humanize.speed(tokens_per_second)}"


def _activation() -> list[str]:
    """Return the command that makes ``vorox`` known to the shell; empty if it is known, or has no environment."""
    script = Path(sys.prefix, "Scripts" if os.name == "nt" else "bin", "activate")
    if shutil.which("vorox") is not None or not script.is_file():
        return []
    command = "" if os.name == "nt" else "source "
    return [f"  activate  {command}{shlex.quote(short_path(script))}"]


def _has_huggingface_form(directory: Path) -> bool:
    """Whether the newest checkpoint is a model that transformers supports."""
    checkpoints = step_directories(directory)
    return bool(checkpoints) and (checkpoints[max(checkpoints)] / "config.json").is_file()


def _results(outcome: Outcome, config: RunConfig) -> list[str]:
    """Return the validation loss and the path of the last checkpoint."""
    lines = list(_measured(outcome.run_directory))
    if outcome.eval_losses:
        at = max(outcome.eval_losses)
        unit = "pair" if config.loss.name == "dpo" else "token"
        text = f"  eval      {outcome.eval_losses[at]:.4f} nats/{unit} after step {at:,}"
        values = last_values(outcome.run_directory, ["eval/bits_per_byte"])
        if "eval/bits_per_byte" in values:
            text += f", {values['eval/bits_per_byte'][1]:.3f} bits/byte"
            baseline = _xz_bits_per_byte(outcome.run_directory, config)
            text += f"\n            (xz: {baseline:.3f} bits/byte on the same text)" if baseline is not None else ""
        lines += text.split("\n")
    checkpoints = step_directories(outcome.run_directory)
    if checkpoints:
        lines.append(f"  saved     {short_path(checkpoints[max(checkpoints)])}")
    return [*lines, *_quarantined(outcome.run_directory)]


def _measured(directory: Path) -> Iterator[str]:
    """Yield the last and the best training loss, and the peak memory beside its estimate."""
    series = MetricSeries(directory)
    series.refresh()
    steps, losses = series.points("loss")
    finite = [(loss, step) for step, loss in zip(steps.tolist(), losses.tolist(), strict=True) if math.isfinite(loss)]
    if finite:
        (last, _), (best, at) = finite[-1], min(finite)
        yield f"  loss      final {last:.4f}, best {best:.4f} (step {at:,})"
    try:
        memory = plan_and_actual(directory, series)["rows"][0]
    except VoroxError:
        return
    if memory["actual"] is not None:
        estimated = "" if memory["planned"] is None else f"; estimated {humanize.size(memory['planned'])}"
        of_tensors = " of tensors" if estimated and memory["note"] else ""
        yield f"  memory    peak {humanize.size(memory['actual'])}{estimated}{of_tensors}"


def _quarantined(directory: Path) -> list[str]:
    """Return the number of quarantined records per cache, and the files that list them."""
    events = (event["fields"] for event in read_lines(RunLayout(directory).events) if event.get("kind") == "quarantine")
    latest = {str(fields["list"]): int(fields["count"]) for fields in events}
    return [f"  skipped   {pluralize(count, 'unreadable record')}, listed in {path}" for path, count in latest.items()]


def _xz_bits_per_byte(directory: Path, config: RunConfig) -> float | None:
    """Return the bits per byte of xz on the validation text; ``None`` if the caches no longer exist."""
    try:
        return xz_bits_per_byte(prepare_recorded(directory, config))
    except DataError:
        return None


def _replayable_steps(directory: Path, step: int) -> tuple[int, int]:
    """Return the newest checkpoint before the last step, or 0, and the last step."""
    before = [known for known in step_directories(directory) if known < step]
    return (max(before) if before else 0), step
