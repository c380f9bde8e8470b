"""User functions of a run, from model parts to taps, and their versions.

The configuration names functions by import path only, so checkpoints record the identity of their code; a resumed run
logs functions that have changed, and a replay names them. Taps are attached from Python and are in no configuration:
each attempt records its taps in ``run.json``. Functions of the data are part of the caches' recipes instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from vorox.core.engine import Engine, Tap
from vorox.core.errors import CheckpointError
from vorox.core.files.staged_directory import read_manifest
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.core.user_code.extensions import identity_text, is_extension
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.experiments.metrics import MetricFunctions
from vorox.models.spec import ModelSpec
from vorox.records.log import RunLog
from vorox.records.run_context import RunContext
from vorox.records.run_lookup import attempt_notes
from vorox.training.inference.language_model import LanguageModel

MANIFEST_KEY = "functions"
_TAPS_NOTE = "taps"


def identities(config: RunConfig) -> dict[str, str]:
    """Return the identity of every user function outside the caches' recipes, by setting.

    Raises:
        ConfigError: A function cannot be imported, or has neither a version nor a source file.
    """
    named = {
        "model.activation": config.model.activation,
        "model.attention_kernel": config.model.attention_kernel,
        "model.kind": config.model.kind,
        "model.block": config.model.block,
        "model.mlp": config.model.mlp,
        "optimizer.name": config.optimizer.name,
        "loss.name": config.loss.name,
        "train.forward_backward": config.train.forward_backward,
        "schedule.name": config.schedule.name,
        "schedule.weight_decay": config.schedule.weight_decay,
        **{f"eval.functions.{number}": path for number, path in enumerate(config.eval.functions)},
        **{f"log.metrics.{number}": path for number, path in enumerate(config.log.metrics)},
        **{f"log.sinks.{number}": path for number, path in enumerate(config.log.sinks)},
    }
    return {
        key: identity_text(path, key, kind=_kind(key))
        for key, path in named.items()
        if path is not None and is_extension(path)
    }


def _kind(key: str) -> str:
    kinds = {
        "model.activation": "activation",
        "model.attention_kernel": "attention",
        "model.kind": "model",
        "model.block": "block",
        "model.mlp": "MLP",
        "optimizer": "optimizer",
        "loss": "loss",
        "train": "forward and backward pass",
        "schedule": "schedule",
        "eval.functions": "evaluation",
        "log.metrics": "metric",
        "log.sinks": "sink",
    }
    return next(kind for prefix, kind in kinds.items() if key.startswith(prefix))


def changed_functions(recorded: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Describe the functions whose code differs from the one that a checkpoint's manifest records."""
    before = cast("Mapping[str, str]", recorded.get(MANIFEST_KEY, {}))
    now = identities(config) if before else {}
    by_name = {text.rpartition(" ")[0].removesuffix(" version"): text for text in before.values()}
    return [
        f"{key} ({name}) was {before_text.removeprefix(name).strip()}, is {text.removeprefix(name).strip()}"
        for key, text in now.items()
        for name in [text.rpartition(" ")[0].removesuffix(" version")]
        for before_text in [by_name.get(name, text)]
        if before_text != text
    ]


def report_changed_functions(run_directory: Path, step: int, config: RunConfig, log: RunLog) -> None:
    """Log the functions that have changed since the checkpoint that a run resumes from."""
    manifest: Mapping[str, Any] = {}
    with contextlib.suppress(CheckpointError):
        manifest = read_manifest(RunLayout(run_directory).checkpoint(step))["metadata"]
    changes = changed_functions(manifest, config)
    if changes:
        text = f"Functions changed since step {step:,}, later numbers use the new code: {'; '.join(changes)}"
        log.event("functions_changed", text, level="warning", changes=changes)


@dataclass(frozen=True, slots=True)
class EvaluationFunctions:
    """The functions of ``eval.functions``, and what makes the model that they get at a step."""

    functions: MetricFunctions
    model_at: Callable[[int], LanguageModel]

    def __call__(self, step: int) -> Mapping[str, float]:
        """Return their values; a function that fails is reported once and has none."""
        return self.functions(self.model_at(step))

    def rehearse(self) -> None:
        """Call all functions.

        Raises:
            ConfigError: One fails.
        """
        self.functions.rehearse(self.model_at(0))


def open_evaluations(
    engine: Engine, tokenizer: Tokenizer, config: RunConfig, spec: ModelSpec, log: RunLog
) -> EvaluationFunctions | None:
    """Return the functions of ``eval.functions``; ``None`` without any.

    Raises:
        ConfigError: A function cannot be imported, or two have the same name.
    """
    if not config.eval.functions:
        return None
    functions = MetricFunctions(
        config.eval.functions, kind="evaluation", key="eval.functions", prefix="eval/custom/", log=log
    )
    return EvaluationFunctions(functions, lambda step: LanguageModel(engine, tokenizer, config, spec, step))


def record_taps(taps: Sequence[Tap], run: RunContext, log: RunLog) -> None:
    """Record the taps of this attempt in ``run.json``, and log a change since the previous one."""
    now = [describe_tap(tap) for tap in taps]
    before = (recorded_taps(run.directory) or [[]])[-1]
    if run.attempt > 1 and before != now:
        text = f"Taps changed since the previous attempt: {_listed(before)} -> {_listed(now)}"
        log.event("taps_changed", text, level="warning", before=before, now=now)
    elif now:
        log.event("taps", f"Taps attached: {_listed(now)}", taps=now)
    run.note_later(taps=now)


def recorded_taps(run_directory: Path) -> list[list[str]]:
    """Return the taps of every attempt that recorded them, oldest first."""
    return cast("list[list[str]]", attempt_notes(run_directory, _TAPS_NOTE)[::-1])


def describe_tap(tap: Tap) -> str:
    """Return the point of a tap, its function, and the first digits of its source's SHA-256, if it has a source."""
    function = tap.function
    name = getattr(function, "__qualname__", type(function).__qualname__)
    text = f"{tap.point} of layer {tap.layer}: {getattr(function, '__module__', '?')}.{name}"
    try:
        source = inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):  # defined in an interpreter, or a callable object
        return text
    return f"{text} {hashlib.sha256(source.encode()).hexdigest()[:12]}"


def _listed(taps: Sequence[str]) -> str:
    return "; ".join(taps) or "none"
