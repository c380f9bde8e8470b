"""Saving and loading the engine's flat buffers as canonical arrays (``models/engine_state.py``).

Invariant: a loaded state has the fingerprint of the saved one.
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
    """Yield canonical fp32 arrays of buffers; on the CPU they share the engine's memory."""
    for name, view in store.views(buffers):
        yield name, view.detach().cpu().numpy()


def set_parameters(store: ParameterStore, weights: Iterable[NamedArray]) -> None:
    """Replace all parameters.

    Raises:
        CheckpointError: A parameter is missing, unknown, duplicated or has the wrong shape. The parameters are then
            undefined.
    """
    missing = dict(store.views(store.values))
    for name, array in weights:
        target = missing.pop(name, None)
        if target is None:
            raise CheckpointError(f"Parameter {name} is unknown or duplicated")
        if target.shape != array.shape:
            raise CheckpointError(f"Parameter {name} has shape {array.shape}; the model needs {tuple(target.shape)}")
        _copy(target, array)
    if missing:
        raise CheckpointError(f"Parameter {next(iter(missing))} is missing ({len(missing)} in total)")


def _copy(target: Tensor, array: np.ndarray[Any, Any]) -> None:
    with torch.no_grad():
        target.copy_(torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)))


def state(store: ParameterStore, optimizer: Optimizer, *, detached: bool = False) -> EngineState:
    """Return the training state, read lazily; a detached one is first copied into host memory."""
    capture = _copy_to_host if detached else dict[str, Tensor]
    return EngineState(
        weights=partial(arrays, store, capture(store.values)),
        moments={kind: partial(arrays, store, capture(buffers)) for kind, buffers in optimizer.buffers.items()},
        moment_names={
            kind: tuple(name for name, _ in store.views(buffers)) for kind, buffers in optimizer.buffers.items()
        },
        counters={name: float(value) for name, value in optimizer.counters.items()},
    )


def _copy_to_host(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {group: buffer.detach().to("cpu", copy=True) for group, buffer in buffers.items()}


def load(directory: Path, spec: ModelSpec, store: ParameterStore, optimizer: Optimizer) -> None:
    """Load parameters and optimizer state.

    Raises:
        CheckpointError: The state has another architecture, optimizer or format. Headers are checked before anything
            is replaced.
    """
    stored = engine_state.load(directory, spec, state(store, optimizer))
    set_parameters(store, stored.weights)
    targets = {(kind, name): view for kind, group in optimizer.buffers.items() for name, view in store.views(group)}
    for kind, name, array in stored.moments:
        _copy(targets[kind, name], array)
    for name, value in optimizer.counters.items():
        value.fill_(stored.counters[name])
