"""What is known of a run before it is opened: its model, its micro-batch, and whether it starts at step 1.

In: a configuration. Nothing is built; of a transformers model, ``config.json`` is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vorox import backends
from vorox.core.errors import ConfigError
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import ResumeFrom, step_directories
from vorox.core.schema import RunConfig
from vorox.data.tokenizers.loading import planned_vocab_size
from vorox.models.spec import ModelSpec
from vorox.planning import auto_micro_batch
from vorox.planning.auto_micro_batch import MicroBatch
from vorox.records.run_context import expected_directory
from vorox.training.origin.model_origin import find_origin, recorded_model
from vorox.training.weights.adapter_base import identify_base


def resolve_model(config: RunConfig, tokenizer_vocab_size: int, run_directory: Path | None = None) -> ModelSpec:
    """Return the model of a configuration; a run with checkpoints keeps its transformers model.

    Raises:
        ConfigError: The model contradicts the tokenizer or the data, or the engine does not support a setting with it.
        CheckpointError: The run's adapter belongs to another base.
    """
    if config.model.kind != "huggingface":
        return backends.model_spec(config, None, revision=None, tokenizer_vocab_size=tokenizer_vocab_size)
    kept = recorded_model(run_directory)
    values, revision = (kept.config, kept.revision) if kept else _huggingface_values(config)
    spec = backends.model_spec(config, values, revision=revision, tokenizer_vocab_size=tokenizer_vocab_size)
    return identify_base(config, spec, kept)


def _huggingface_values(config: RunConfig) -> tuple[dict[str, Any], str | None]:
    """Return the ``config.json`` of a transformers model, and its commit on the hub."""
    found = find_origin(config)
    assert found is not None
    return found.values, found.commit


def planned_model(config: RunConfig) -> ModelSpec:
    """Return the model of a configuration, from its settings and the ``config.json`` that they name.

    Raises:
        ConfigError: Its size depends on the text, or its activations are not known in advance.
    """
    if auto_micro_batch.is_auto(config):
        backends.check_memory_estimate(config)
    values = revision = None
    if config.model.kind == "huggingface":
        values, revision = _huggingface_values(config)
    # The embedding of a transformers model has its own rows.
    vocab_size = 1 if config.model.kind == "huggingface" else planned_vocab_size(config.tokenizer, config.model)
    spec = backends.model_spec(config, values, revision=revision, tokenizer_vocab_size=vocab_size)
    return backends.measured_spec(config, spec)


def choose_micro_batch(config: RunConfig, resume_from: ResumeFrom, dist: DistributedContext) -> MicroBatch | None:
    """Return the micro-batch of a run under ``auto``: rank 0 reads it from the run, or decides it. A collective.

    Raises:
        ConfigError: The memory of a step cannot be estimated.
        DoesNotFitError: No micro-batch fits.
    """
    if not auto_micro_batch.is_auto(config):
        return None

    def decide(facts: list[Any]) -> dict[str, Any]:
        found = auto_micro_batch.recorded(config, resume_from)
        return asdict(found or _estimate_micro_batch(config, facts))

    facts = auto_micro_batch.facts_of(backends.training_devices(config, dist))
    return MicroBatch(**dist.agree("micro_batch", facts, decide))


def _estimate_micro_batch(config: RunConfig, facts: Sequence[Mapping[str, Any]]) -> MicroBatch:
    """Return the most rows that the memory estimate of a new run fits into the devices of all ranks."""
    auto_micro_batch.check_estimable(config)
    try:
        spec = planned_model(config)
    except ConfigError as error:
        raise auto_micro_batch.explained(error) from error
    return auto_micro_batch.decide(config, spec, auto_micro_batch.combined(facts))


def is_fresh(config: RunConfig, resume_from: str | Path) -> bool:
    """Whether the run starts at step 1: it has no checkpoint on this machine and no mirror."""
    directory, exists = expected_directory(config, resume_from)
    return config.checkpoint.mirror is None and not (exists and step_directories(directory))
