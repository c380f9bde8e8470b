"""Average the weights of several checkpoints of a run, one tensor at a time.

In: checkpoints of one model. Out: a directory with the mean of their weights, and the tokenizer of the newest one (see
``derived.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from vorox.core.engine import NamedArray
from vorox.core.errors import CheckpointError, ConfigError
from vorox.models.huggingface.adapter_spec import AdapterSpec
from vorox.models.stored.spec import spec_from_json
from vorox.training.checkpoints.origins import CHECKPOINTS, origins_of
from vorox.training.checkpoints.store import Checkpoint, verify
from vorox.training.export.comparison import checkpoint_weights
from vorox.training.export.derived import AVERAGED, remove_empty, write_derived


def average_checkpoints(paths: Sequence[Path], target: Path) -> Checkpoint:
    """Write the mean of the weights of several checkpoints, in fp32; sums are fp64.

    Args:
        paths: At least two checkpoints of one model.
        target: Directory to create. It may be empty.

    Raises:
        ConfigError: There are fewer than two checkpoints, they are of adapters, or the target is not empty.
        CheckpointError: A checkpoint is corrupt or belongs to another model, or the target cannot be written.
    """
    if len({*paths}) < 2:
        raise ConfigError("An average needs at least two checkpoints", where="checkpoints average")
    remove_empty(target)
    checkpoints = sorted((verify(path) for path in paths), key=lambda found: found.step)
    newest = checkpoints[-1]
    spec = spec_from_json(newest.metadata["spec"])
    if isinstance(spec, AdapterSpec):
        raise ConfigError("Adapters cannot be averaged", where=str(newest.path), hint="average runs of whole models")
    for checkpoint in checkpoints:
        differing = spec.differences(checkpoint.metadata["spec"])
        if differing:
            what = f"Checkpoint belongs to a different model: {', '.join(differing)}"
            raise CheckpointError(what, where=str(checkpoint.path))
    streams = [checkpoint_weights(checkpoint.path, spec) for checkpoint in checkpoints]
    mean = streams[0][0], _mean([iter(arrays) for _, arrays in streams])
    of = [one.to_json() for checkpoint in checkpoints for one in origins_of(checkpoint.path, checkpoint.metadata)]
    averaged = {AVERAGED: [checkpoint.step for checkpoint in checkpoints], CHECKPOINTS: of}
    return write_derived(newest, target, spec, mean, averaged)


def _mean(streams: Sequence[Iterator[NamedArray]]) -> Iterator[NamedArray]:
    """Average arrays of the same names in the same order; the arrays of one name are in memory together."""
    for named in zip(*streams, strict=True):
        names = {name for name, _ in named}
        if len(names) != 1:
            raise CheckpointError(f"Checkpoints have different tensors: {' and '.join(sorted(names))}")
        total = named[0][1].astype(np.float64)
        for _, array in named[1:]:
            total += array
        yield named[0][0], (total / len(streams)).astype(np.float32)
