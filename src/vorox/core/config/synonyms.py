"""Synonyms of settings: names in other codebases, and names and values of earlier versions.

A key or value of a command line, a file or a record goes in, the current one comes out. Synonyms are translated before
anything else, so the resolved configuration, the record of a run and every message use the current name only.
``vorox config explain`` lists them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from vorox.core.config.overrides import Assignment
from vorox.core.config.yaml_reader import Json

GPT_SYNONYMS: Final[Mapping[str, str]] = {
    "model.n_layer": "model.num_layers",
    "model.n_head": "model.num_heads",
    "model.n_embd": "model.hidden_size",
    "model.dropout": "model.dropout_fraction",
    "batch_size": "train.global_batch_sequences",
    "per_device_batch_size": "train.micro_batch_sequences",
    "seq_len": "data.sequence_length_tokens",
    "num_tokens": "train.num_tokens",
    "save_dir": "run.directory",
    "save_interval": "checkpoint.every_steps",
    "from_pretrained": "train.from_weights",
    "data_dir": "data.sources",
}
"""Options of a GPT trainer on token shards. ``data_dir`` is one source: a folder of ``.bin`` shards.

Without a configuration, they select the preset ``gpt2-shards``, which has that trainer's defaults.
"""

EARLIER_NAMES: Final[Mapping[str, str]] = {
    "checkpoint.arrays": "checkpoint.format",
    "log.matmul_ceiling": "log.matmul_peak",
}
"""Settings that earlier versions recorded under another name. None of them is part of a configuration's digest."""

EARLIER_VALUES: Final[Mapping[str, Mapping[str, str]]] = {
    "runtime.determinism": {"D0": "none", "D1": "data", "D2": "bitwise"},
}
"""Key to its values in earlier versions, each with the current one. Digests are computed over the earlier spelling."""

SYNONYMS: Final[Mapping[str, str]] = {
    **GPT_SYNONYMS,
    **EARLIER_NAMES,
    "train.target_epochs": "train.num_epochs",
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "beta1": "optimizer.beta1",
    "beta2": "optimizer.beta2",
    "grad_clip": "optimizer.clip_norm",
    "max_grad_norm": "optimizer.clip_norm",
    "warmup_steps": "schedule.warmup_steps",
    "warmup_iters": "schedule.warmup_steps",
    "steps": "train.num_steps",
    "num_steps": "train.num_steps",
    "max_steps": "train.num_steps",
    "max_iters": "train.num_steps",
    "epochs": "train.num_epochs",
    "num_epochs": "train.num_epochs",
    "num_train_epochs": "train.num_epochs",
    "target_epochs": "train.num_epochs",
    "bs": "train.global_batch_sequences",
    "global_batch_size": "train.global_batch_sequences",
    "micro_batch_size": "train.micro_batch_sequences",
    "per_device_train_batch_size": "train.micro_batch_sequences",
    "seq_length": "data.sequence_length_tokens",
    "sequence_length": "data.sequence_length_tokens",
    "block_size": "data.sequence_length_tokens",
    "context_length": "data.sequence_length_tokens",
    "n_layer": "model.num_layers",
    "num_layers": "model.num_layers",
    "n_head": "model.num_heads",
    "num_heads": "model.num_heads",
    "n_embd": "model.hidden_size",
    "d_model": "model.hidden_size",
    "hidden_size": "model.hidden_size",
    "dropout": "model.dropout_fraction",
    "device": "runtime.device",
    "compile": "runtime.compile",
    "dtype": "precision.dtype",
    "seed": "run.seed",
    "out_dir": "run.directory",
    "output_dir": "run.directory",
    "eval_interval": "eval.every_steps",
    "eval_steps": "eval.every_steps",
    "save_steps": "checkpoint.every_steps",
    "log_interval": "log.every_steps",
    "logging_steps": "log.every_steps",
}
"""Synonym to key."""


def key_of(name: str) -> str:
    """Resolve a synonym to its key; other names are returned unchanged."""
    return SYNONYMS.get(name, name)


def synonyms_of(key: str) -> tuple[str, ...]:
    """Return the synonyms of a key."""
    return tuple(sorted(name for name, target in SYNONYMS.items() if target == key))


def current_value(key: str, value: Any) -> Any:
    """Return the current spelling of a key's value."""
    return EARLIER_VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value


def value_in_digest(key: str, value: Json) -> Json:
    """Return the spelling of a key's value that digests are computed over: that of the first version."""
    if key == "parallel.data_parallel_size" and value == "auto":
        return 1  # the default before there was auto
    return next((first for first, now in EARLIER_VALUES.get(key, {}).items() if now == value), value)


def update_record(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded values, sections as mappings, under current names and in current spellings.

    Args:
        values: A whole configuration as a checkpoint of this or an earlier version records it.
    """
    updated = copy.deepcopy(dict(values))
    for old, new in EARLIER_NAMES.items():
        (section, old_name), (_, new_name) = old.split("."), new.split(".")
        if isinstance(updated.get(section), dict) and old_name in updated[section]:
            updated[section].setdefault(new_name, updated[section].pop(old_name))
    for key in EARLIER_VALUES:
        section, name = key.split(".")
        if isinstance(updated.get(section), dict) and name in updated[section]:
            updated[section][name] = current_value(key, updated[section][name])
    return updated


def translate(assignment: Assignment) -> Assignment:
    """Return the assignment to the key of a synonym."""
    name = ".".join(map(str, assignment.path))
    if name not in SYNONYMS:
        return assignment
    path = tuple(SYNONYMS[name].split("."))
    if name == "data_dir":
        shards = {"name": "data", "format": "bin", "paths": [assignment.value]}
        return replace(assignment, path=path, value=[shards])
    return replace(assignment, path=path)
