"""Second names of settings: what other codebases call them, accepted wherever a key is: command line and YAML.

A synonym is translated before anything else is done with it, so the resolved configuration, the record of a run and
every message have one name only. ``vorox config explain`` knows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from vorox.core.config.overrides import Assignment

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
"""Options of a GPT trainer on token shards. ``data_dir`` means one source: a folder of ``.bin`` shards.

Where no configuration is named, one of these starts from the preset ``gpt2-shards``, which has that trainer's defaults.
"""

SYNONYMS: Final[Mapping[str, str]] = {
    **GPT_SYNONYMS,
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
"""Synonym to the key that it means."""


def key_of(name: str) -> str:
    """The key that a dotted name means: itself, unless it is a synonym."""
    return SYNONYMS.get(name, name)


def synonyms_of(key: str) -> tuple[str, ...]:
    """The other names of a key."""
    return tuple(sorted(name for name, meant in SYNONYMS.items() if meant == key))


def translated(assignment: Assignment) -> Assignment:
    """The same assignment to the key that is meant."""
    name = ".".join(map(str, assignment.path))
    if name not in SYNONYMS:
        return assignment
    path = tuple(SYNONYMS[name].split("."))
    if name == "data_dir":
        shards = {"name": "data", "format": "bin", "paths": [assignment.value]}
        return replace(assignment, path=path, value=[shards])
    return replace(assignment, path=path)
