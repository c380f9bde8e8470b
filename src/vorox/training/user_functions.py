"""Functions of the user that a run calls: those that measure at a validation, and the record of which they were.

A schedule decides bits and an evaluation decides what its numbers mean, and the configuration names both by import path
only. So checkpoints record their identities; a resumed run reports a function that has changed, and a replay names it.
Functions of the data are part of the caches' recipes instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from vorox.core.engine import Engine
from vorox.core.errors import CheckpointError
from vorox.core.extensions import identity_text, is_extension
from vorox.core.log import RunLog
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.core.staged_directory import read_manifest
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.experiments.metrics import MetricFunctions
from vorox.models.spec import ModelSpec
from vorox.training.language_model import LanguageModel

MANIFEST_KEY = "functions"


def identities(config: RunConfig) -> dict[str, str]:
    """Return the identity of every function of the user that is not part of a cache's recipe, by setting.

    Raises:
        ConfigError: One cannot be imported, or has neither a version nor a source file.
    """
    named = {
        "schedule.name": config.schedule.name,
        "schedule.weight_decay": config.schedule.weight_decay,
        **{f"eval.functions.{number}": path for number, path in enumerate(config.eval.functions)},
        **{f"log.metrics.{number}": path for number, path in enumerate(config.log.metrics)},
        **{f"log.sinks.{number}": path for number, path in enumerate(config.log.sinks)},
    }
    return {key: identity_text(path, key, kind=_kind(key)) for key, path in named.items() if is_extension(path)}


def _kind(key: str) -> str:
    kinds = {"schedule": "schedule", "eval.functions": "evaluation", "log.metrics": "metric", "log.sinks": "sink"}
    return next(kind for prefix, kind in kinds.items() if key.startswith(prefix))


def changed_functions(recorded: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Return the functions whose code differs from what a checkpoint's manifest records, for people."""
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
    """Log the functions that have changed since the checkpoint that a run goes on from."""
    manifest: Mapping[str, Any] = {}
    with contextlib.suppress(CheckpointError):
        manifest = read_manifest(RunLayout(run_directory).checkpoint(step))["metadata"]
    changes = changed_functions(manifest, config)
    if changes:
        text = f"Functions have changed since step {step:,}; numbers from here on are theirs: {'; '.join(changes)}"
        log.event("functions_changed", text, level="warning", changes=changes)


def open_evaluations(
    engine: Engine, tokenizer: Tokenizer, config: RunConfig, spec: ModelSpec, log: RunLog
) -> Callable[[int], Mapping[str, float]] | None:
    """Return what calls the functions of ``eval.functions`` at a step; ``None`` if there are none.

    Raises:
        ConfigError: One cannot be imported, or two have the same name.
    """
    if not config.eval.functions:
        return None
    functions = MetricFunctions(
        config.eval.functions, kind="evaluation", key="eval.functions", prefix="eval/custom/", log=log
    )
    return lambda step: functions(LanguageModel(engine, tokenizer, config, spec, step))
