"""Saving and loading the training state as canonical arrays (``models/engine_state.py``).

Invariant: a loaded state has the fingerprint of the saved one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vorox.backends.torch_engine.optim import Optimizer
from vorox.backends.torch_engine.parameters import Buffers, Parameters, Piece
from vorox.core.engine import NamedArray
from vorox.core.errors import CheckpointError
from vorox.models import engine_state
from vorox.models.engine_state import Arrays, EngineState
from vorox.models.spec import ModelSpec


def arrays(parameters: Parameters, buffers: Buffers) -> Iterator[NamedArray]:
    """Yield canonical fp32 arrays of buffers; on the CPU they may share the engine's memory. A collective."""
    for name, tensor in parameters.whole(buffers):
        yield name, tensor.detach().cpu().numpy()


def set_parameters(parameters: Parameters, weights: Iterable[NamedArray], spec: ModelSpec) -> None:
    """Replace this rank's part of all parameters.

    Raises:
        CheckpointError: A parameter is missing, unknown, duplicated or has the wrong shape. The parameters are then
            undefined.
    """
    missing = {piece.name: piece for piece in parameters.pieces(parameters.values)}
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters}
    for name, array in weights:
        piece = missing.pop(name, None)
        if piece is None:
            raise CheckpointError(f"Parameter {name} is unknown or duplicated")
        if shapes[name] != array.shape:
            raise CheckpointError(f"Parameter {name} has shape {array.shape}; the model needs {shapes[name]}")
        _copy(piece, array)
    if missing:
        raise CheckpointError(f"Parameter {next(iter(missing))} is missing ({len(missing)} in total)")


def _copy(piece: Piece, array: np.ndarray[Any, Any]) -> None:
    rows = array[piece.first_row : piece.first_row + len(piece.view)]
    with torch.no_grad():
        piece.view.copy_(torch.from_numpy(np.ascontiguousarray(rows, dtype=np.float32)))


def state(parameters: Parameters, optimizer: Optimizer, *, detached: bool = False) -> EngineState:
    """Return the training state, read lazily; a detached one is first copied into host memory.

    If the parameters are sharded, reading an array is a collective.
    """
    capture = _to_host if detached else dict[str, Sequence[Tensor]]
    return EngineState(
        weights=partial(arrays, parameters, capture(parameters.values)),
        moments={kind: partial(arrays, parameters, capture(buffers)) for kind, buffers in optimizer.buffers.items()},
        moment_names=_moment_names(parameters, optimizer),
        counters={name: float(value) for name, value in optimizer.counters.items()},
    )


def _to_host(buffers: Buffers) -> Buffers:
    return {group: [tensor.detach().to("cpu", copy=True) for tensor in tensors] for group, tensors in buffers.items()}


def gathered_state(parameters: Parameters, optimizer: Optimizer, *, is_main: bool) -> EngineState:
    """Return the training state in the host memory of the main rank; the others get an empty one. A collective."""
    whole = state(parameters, optimizer)

    def gather(read: Arrays) -> Arrays:
        kept = [(name, array.copy()) for name, array in read() if is_main]
        return lambda: kept

    moments = {kind: gather(read) for kind, read in whole.moments.items()}
    return EngineState(gather(whole.weights), moments, whole.moment_names, whole.counters)


def _moment_names(parameters: Parameters, optimizer: Optimizer) -> dict[str, tuple[str, ...]]:
    return {
        kind: tuple(piece.name for piece in parameters.pieces(buffers)) for kind, buffers in optimizer.buffers.items()
    }


def load(directory: Path, spec: ModelSpec, parameters: Parameters, optimizer: Optimizer) -> None:
    """Load this rank's part of parameters and optimizer state.

    Raises:
        CheckpointError: The state has another architecture, optimizer or format. Headers are checked before anything
            is replaced.
    """
    optimizer.expect(engine_state.read_counters(directory))
    stored = engine_state.load(directory, spec, state(parameters, optimizer))
    set_parameters(parameters, stored.weights, spec)
    moments = optimizer.buffers
    targets = {(kind, piece.name): piece for kind, buffers in moments.items() for piece in parameters.pieces(buffers)}
    for kind, name, array in stored.moments:
        _copy(targets[kind, name], array)
    optimizer.restore(moments, stored.counters)
