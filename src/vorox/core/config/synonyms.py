"""Second names of settings: what other codebases call them, accepted wherever a key is: command line and YAML.

A synonym is translated before anything else is done with it, so the resolved configuration, the record of a run and
every message have one name only. ``vorox config explain`` knows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from vorox.core.config.overrides import Assignment

SYNONYMS: Final[Mapping[str, str]] = {
    "train.target_epochs": "train.num_epochs",
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
"""Synonym to the key that it means. ``data_dir`` means one source: a folder of ``.bin`` shards."""


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
