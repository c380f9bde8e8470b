"""Checks of the settings that the parts of the training loop would refuse, before an attempt begins.

A run's workload, its directory and its length go in; a ``ConfigError`` comes out, or nothing. A refusal must leave the
run as it was, so these checks run before anything of it is written. ``session.open_session`` opens the same parts.
"""

from __future__ import annotations

from pathlib import Path

from vorox.experiments.tracking import check_sinks
from vorox.training import user_functions
from vorox.training.evaluation.sampling import PromptSampler
from vorox.training.provenance_recorder import metadata_target
from vorox.training.recomputation import check_recomputation
from vorox.training.schedule import Horizon, Schedule
from vorox.training.workload import Workload


def check_session(workload: Workload, run_directory: Path, length: Horizon) -> None:
    """Check what ``open_session`` would refuse; nothing is written.

    Raises:
        ConfigError: A package or a user function is missing, or a setting cannot be used with this engine or text.
    """
    config, engine, tokenizer, spec = workload.config, workload.engine, workload.corpus.tokenizer, workload.spec
    user_functions.identities(config)
    user_functions.open_evaluations(engine, tokenizer, config, spec, workload.log)
    PromptSampler(config, tokenizer, spec)
    Schedule.from_config(config.schedule, config.optimizer, length)
    check_recomputation(config.runtime, engine)
    check_sinks(config.log)
    metadata_target(run_directory, config.log)
