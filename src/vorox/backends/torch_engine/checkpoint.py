"""Saving and loading the training state as canonical arrays (``models/stored/engine_state.py``).

Invariant: a loaded state has the fingerprint of the saved one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vorox.backends.torch_engine.device.host_copy import host_copy
from vorox.backends.torch_engine.layouts.parameters import Buffers, ParameterPart, Parameters
from vorox.backends.torch_engine.layouts.zero_parameters import ZeroParameters
from vorox.backends.torch_engine.optimizers.optimizer import Optimizer
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.core.engine import NamedArray
from vorox.core.errors import CheckpointError
from vorox.models.arrays.array_reader import WEIGHTS, ArrayReader
from vorox.models.arrays.fingerprint import StateHash
from vorox.models.optimizer_groups import Group
from vorox.models.spec import ModelSpec
from vorox.models.stored import engine_state
from vorox.models.stored.engine_state import EngineState, Snapshot
from vorox.models.stored.sharded_snapshot import ShardedSnapshot, ShardRows

_NOTHING = EngineState(weights=lambda: (), moments={}, moment_names={}, counters={})


def arrays(parameters: Parameters, buffers: Buffers) -> Iterator[NamedArray]:
    """Yield canonical fp32 arrays of buffers; on the CPU they may share the engine's memory. A collective."""
    for name, tensor in parameters.whole(buffers):
        yield name, _on_host(tensor)


def set_parameters(parameters: Parameters, weights: Iterable[NamedArray], spec: ModelSpec) -> None:
    """Replace this rank's part of all parameters.

    Raises:
        CheckpointError: A parameter is missing, unknown, duplicated or has the wrong shape. The parameters are then
            undefined.
    """
    values = parameters.values
    missing = {part.name: part for part in parameters.local_parts(values)}
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters}
    for name, array in weights:
        part = missing.pop(name, None)
        if part is None:
            raise CheckpointError(f"Parameter {name} is unknown or duplicated")
        if shapes[name] != array.shape:
            raise CheckpointError(f"Parameter {name} has shape {array.shape}; the model needs {shapes[name]}")
        _copy(part, array)
    if missing:
        raise CheckpointError(f"Parameter {next(iter(missing))} is missing ({len(missing)} in total)")
    parameters.store(values)


def _copy(part: ParameterPart, array: np.ndarray[Any, Any]) -> None:
    with torch.no_grad():
        part.view.copy_(torch.from_numpy(np.require(array[part.place], np.float32, "C")))


def state(parameters: Parameters, optimizer: Optimizer, *, detached: bool = False) -> EngineState:
    """Return the training state, read lazily; a detached one is first copied into host memory.

    If the parameters are sharded, reading an array is a collective.
    """
    copies = detached and not isinstance(parameters, ZeroParameters)  # whose buffers are copies in host memory
    capture, moments = _to_host if copies else dict[Group, Sequence[Tensor]], optimizer.buffers
    return EngineState(
        weights=partial(arrays, parameters, capture(parameters.values)),
        moments={kind: partial(arrays, parameters, capture(buffers)) for kind, buffers in moments.items()},
        moment_names=_moment_names(parameters, moments),
        counters=_counters(optimizer),
    )


def _to_host(buffers: Buffers) -> Buffers:
    return {group: [host_copy(tensor) for tensor in tensors] for group, tensors in buffers.items()}


def snapshot(
    spec: ModelSpec, parameters: Parameters, optimizer: Optimizer, ranks: Ranks, *, detached: bool
) -> Snapshot | ShardedSnapshot:
    """Return what this rank writes: the state, its rows of a sharded state, or nothing that another replica writes."""
    if ranks.num_shards == 1:
        return Snapshot(spec, state(parameters, optimizer, detached=detached) if ranks.replica == 0 else _NOTHING)
    moments, shard = optimizer.buffers, (ranks.shard_index, ranks.num_shards)
    kinds = {WEIGHTS: parameters.values, **moments} if ranks.replica == 0 else {}
    # Rows that were put together from columns of several ranks are copies on the device already, those of DeepSpeed in
    # host memory.
    copies = (detached or ranks.tensor_parallel_size > 1) and not isinstance(parameters, ZeroParameters)
    rows: list[ShardRows] = []
    for kind, buffers in kinds.items():
        for part in parameters.whole_rows(buffers):
            if len(part.view):
                view = host_copy(part.view) if copies else part.view
                rows.append(
                    ShardRows(f"{kind}.{part.name}", part.first_row, tuple(view.shape), partial(_on_host, view))
                )
    return ShardedSnapshot(spec, shard, rows, _moment_names(parameters, moments), _counters(optimizer))


def fingerprint(spec: ModelSpec, parameters: Parameters, optimizer: Optimizer, ranks: Ranks) -> str:
    """Return ``Engine.fingerprint``; of a sharded state, from what each rank has hashed of its rows."""
    if ranks.num_shards == 1:
        return engine_state.state_fingerprint(state(parameters, optimizer))
    here, moments = StateHash(), optimizer.buffers
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters}
    for kind, buffers in {WEIGHTS: parameters.values, **moments}.items():
        for part in parameters.whole_rows(buffers):
            here.add(f"{kind}.{part.name}", _on_host(part.view), part.first_row, shapes[part.name])
    whole = StateHash()
    for report in ranks.gather_from_shards(here.report()):
        whole.merge(StateHash.from_report(report))
    return whole.fingerprint(_counters(optimizer))


def _on_host(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    return tensor.detach().cpu().numpy()


def _moment_names(parameters: Parameters, moments: Mapping[str, Buffers]) -> dict[str, tuple[str, ...]]:
    return {kind: tuple(part.name for part in parameters.local_parts(buffers)) for kind, buffers in moments.items()}


def _counters(optimizer: Optimizer) -> dict[str, float]:
    return {name: float(value) for name, value in optimizer.counters.items()}


def load(directory: Path, spec: ModelSpec, parameters: Parameters, optimizer: Optimizer) -> None:
    """Load this rank's part of parameters and optimizer state.

    Raises:
        CheckpointError: The state has another architecture, optimizer or format. Headers are checked before anything
            is replaced.
    """
    optimizer.expect(engine_state.read_counters(directory))
    stored = engine_state.load(directory, spec, state(parameters, optimizer))
    moments = optimizer.buffers
    if stored.pieces is None:
        set_parameters(parameters, stored.weights, spec)
        parts = {
            (kind, part.name): part for kind, buffers in moments.items() for part in parameters.local_parts(buffers)
        }
        for kind, name, array in stored.moments:
            _copy(parts[kind, name], array)
    else:
        values = parameters.values
        _read_rows(stored.pieces, parameters, {WEIGHTS: values, **moments})
        parameters.store(values)
    optimizer.restore(moments, stored.counters)


def _read_rows(stored: ArrayReader, parameters: Parameters, kinds: Mapping[str, Buffers]) -> None:
    """Read only the rows of this rank."""
    for kind, buffers in kinds.items():
        for part in parameters.local_parts(buffers):
            if len(part.view):
                read = stored.read(f"{kind}.{part.name}", part.place)
                _copy(part._replace(first_row=0, first_column=0), read)
