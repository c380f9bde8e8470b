"""Synonyms of settings: their names in other codebases, declared with each setting.

A key of a command line or a file goes in, the setting's comes out. Synonyms are translated before anything else, so the
resolved configuration, the record of a run and every message use one name only. ``vorox config explain`` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from vorox.core.config.layers.overrides import Assignment
from vorox.core.config.schema_fields import synonyms
from vorox.core.schema.setting import ENGINES

_BATCH_PER_DEVICE: Final[Mapping[str, str]] = {"training_config.batch_size": "train.micro_batch_sequences"}
"""Names whose last part means another setting elsewhere: this trainer counts the rows of a device."""

OTHER_OPTIONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("lora", "use_lora", "peft", "use_peft"), "adapter.kind=lora"),
    **dict.fromkeys(("qlora", "load_in_4bit"), "adapter.kind=qlora"),
    **dict.fromkeys(("bf16", "amp", "mixed_precision", "use_mixed_precision"), "precision.dtype=bf16"),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum"), "train.global_batch_sequences=ROWS (of a step)"),
    **dict.fromkeys(("model_name_or_path", "checkpoint", "pretrained"), "train.from_weights=DIRECTORY"),
    **dict.fromkeys(
        ("warmup_ratio", "lr_warmup_fraction"),
        "schedule.warmup_steps=STEPS (the ratio times the steps of the run); schedule.warmup_fraction is of one epoch",
    ),
    **dict.fromkeys(("gpu", "cuda"), "runtime.device=cuda"),
    **dict.fromkeys(
        ("extends", "defaults", "base", "inherit", "inherits", "_base_"),
        "preset: NAME or preset: FILE.yaml; the keys of the file override those of its preset",
    ),
    **dict.fromkeys(
        ("report_to", "logger", "loggers"),
        "log.wandb=true, log.tensorboard=true, log.mlflow=true or log.trackio=true",
    ),
    "fp16": "precision.dtype=fp16",
    "neftune_noise_alpha": "train.embedding_noise=5.0",
    "load_best_model_at_end": "checkpoint.keep_best=1",
    "lr_scheduler_type": "schedule.name=cosine",
    "cpu": "runtime.device=cpu",
    "vocab_size": "tokenizer.vocab_size=TOKENS",
    "optimizer": "optimizer.name=adamw",
    "scheduler": "schedule.name=cosine",
    "wandb": "log.wandb=true",
    "mlflow": "log.mlflow=true",
    "trackio": "log.trackio=true",
    "tensorboard": "log.tensorboard=true",
    **{name: f"backend={name}" for name in ENGINES},
}
"""Names in other trainers, on the command line or at the top of a file, and what to write instead: none is a synonym,
because its values differ."""


def key_of(name: str) -> str:
    """Resolve a synonym to its key; other names are returned unchanged.

    A synonym is valid at the top and in the section of its key: ``learning_rate`` and ``optimizer.learning_rate``.
    ``model_config.NAME`` and ``training_config.NAME`` are the settings of a trainer in Python.
    """
    found = synonyms().get(name) or _BATCH_PER_DEVICE.get(name)
    if found is not None:
        return found
    section, _, rest = name.partition(".")
    if section == "training_config":
        return synonyms().get(rest, f"train.{rest}" if rest == "epoch_dataset_fraction" else name)
    target = synonyms().get(rest, "")
    if section == "model_config" and rest:
        return target if target.startswith("model.") else f"model.{rest}"
    return target if target.startswith(f"{section}.") else name


def synonyms_of(key: str) -> tuple[str, ...]:
    """Return the synonyms of a key."""
    return tuple(sorted(name for name, target in synonyms().items() if target == key))


def translate(assignment: Assignment) -> Assignment:
    """Return the assignment to the key of a synonym."""
    name = ".".join(map(str, assignment.path))
    key = key_of(name)
    if key == name or name in _BATCH_PER_DEVICE:  # section_synonyms translates it, with accumulation
        return assignment
    path = tuple(key.split("."))
    if name.rpartition(".")[2] == "data_dir":
        shards = {"name": "data", "format": "bin", "paths": [assignment.value]}
        return replace(assignment, path=path, value=[shards])
    return replace(assignment, path=path)
