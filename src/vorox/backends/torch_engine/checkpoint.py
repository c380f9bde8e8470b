"""The engine's buffers as canonical arrays: what ``models/engine_state.py`` writes, reads and hashes.

Invariant: what was loaded has the fingerprint of what was saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vorox.backends.torch_engine.optim import Optimizer
from vorox.backends.torch_engine.parameters import ParameterStore
from vorox.core.engine import NamedArray
from vorox.core.errors import CheckpointError
from vorox.models import engine_state
from vorox.models.engine_state import EngineState
from vorox.models.spec import ModelSpec


def arrays(store: ParameterStore, buffers: Mapping[str, Tensor]) -> Iterator[NamedArray]:
    """Canonical fp32 arrays of buffers, one at a time; on the CPU they share the engine's memory."""
    for name, view in store.views(buffers):
        yield name, view.detach().cpu().numpy()


def set_parameters(store: ParameterStore, weights: Iterable[NamedArray]) -> None:
    """Copy weights over the parameters.

    Raises:
        CheckpointError: One is missing, unknown, doubled or of another shape. The parameters are then undefined.
    """
    waiting = dict(store.views(store.values))
    for name, array in weights:
        target = waiting.pop(name, None)
        if target is None:
            raise CheckpointError(f"parameter {name} is unknown or appears twice")
        if target.shape != array.shape:
            raise CheckpointError(f"parameter {name} has shape {array.shape}, the model needs {tuple(target.shape)}")
        _copy(target, array)
    if waiting:
        raise CheckpointError(f"parameter {next(iter(waiting))} is missing ({len(waiting)} are)")


def _copy(target: Tensor, array: np.ndarray[Any, Any]) -> None:
    with torch.no_grad():
        target.copy_(torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)))


def state(store: ParameterStore, optimizer: Optimizer, *, detached: bool = False) -> EngineState:
    """The whole training state, read when it is asked for; a detached one is copied into host memory first."""
    take = _copied if detached else dict[str, Tensor]
    return EngineState(
        weights=partial(arrays, store, take(store.values)),
        moments={kind: partial(arrays, store, take(buffers)) for kind, buffers in optimizer.buffers.items()},
        moment_names={
            kind: tuple(name for name, _ in store.views(buffers)) for kind, buffers in optimizer.buffers.items()
        },
        counters={name: float(value) for name, value in optimizer.counters.items()},
    )


def _copied(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {group: buffer.detach().to("cpu", copy=True) for group, buffer in buffers.items()}


def load(directory: Path, spec: ModelSpec, store: ParameterStore, optimizer: Optimizer) -> None:
    """Replace parameters and optimizer state by what was saved.

    Raises:
        CheckpointError: It belongs to another architecture, optimizer or format. Found before anything is replaced,
            as far as headers tell.
    """
    stored = engine_state.load(directory, spec, state(store, optimizer))
    set_parameters(store, stored.weights)
    targets = {(kind, name): view for kind, group in optimizer.buffers.items() for name, view in store.views(group)}
    for kind, name, array in stored.moments:
        _copy(targets[kind, name], array)
    for name, value in optimizer.counters.items():
        value.fill_(stored.counters[name])
