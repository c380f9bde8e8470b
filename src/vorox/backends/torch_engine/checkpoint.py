"""The engine's state on disk: weights, optimizer state and counters, without pickle.

``model.safetensors`` holds the parameters in fp32, under Hugging Face names when transformers knows the architecture,
else under canonical ones; ``optimizer.safetensors`` each moment of each canonical parameter (``exp_avg.<name>``);
``engine.json`` the counters and what the arrays belong to. Hashing and committing is the caller's.

Invariant: what was loaded has the fingerprint of what was saved.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from vorox.backends.torch_engine.optim import Optimizer
from vorox.backends.torch_engine.parameters import ParameterStore
from vorox.core.atomic import StagedDirectory, pretty_json
from vorox.core.engine import NamedArray
from vorox.core.errors import CheckpointError
from vorox.models.names import from_huggingface, huggingface_entries, huggingface_family, to_huggingface
from vorox.models.spec import ModelSpec
from vorox.models.weights_file import TensorEntry, WeightsFile, write_weights

FORMAT = "vorox-torch-engine/1"
MODEL_FILE, OPTIMIZER_FILE, ENGINE_FILE = "model.safetensors", "optimizer.safetensors", "engine.json"
_FREE_TO_CHANGE = frozenset({"dropout_fraction", "init_std", "scale_residual_init"})
"""Fields of the spec that do not say what the stored numbers mean."""


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


def save(directory: StagedDirectory, spec: ModelSpec, store: ParameterStore, optimizer: Optimizer) -> None:
    """Write the three files."""
    weights = arrays(store, store.values)
    with directory.open(MODEL_FILE) as sink:
        if huggingface_family(spec) is not None:
            write_weights(sink, huggingface_entries(spec), to_huggingface(spec, weights))
        else:
            write_weights(sink, _canonical_entries(spec), weights)
    with directory.open(OPTIMIZER_FILE) as sink:
        write_weights(sink, _optimizer_entries(store, optimizer), _optimizer_arrays(store, optimizer))
    state = {
        "format": FORMAT,
        "spec": spec.to_json(),
        "kinds": sorted(optimizer.buffers),
        "counters": {name: float(value) for name, value in optimizer.counters.items()},
    }
    directory.write(ENGINE_FILE, pretty_json(state))


def load(directory: Path, spec: ModelSpec, store: ParameterStore, optimizer: Optimizer) -> None:
    """Replace parameters and optimizer state by what ``save`` wrote.

    Raises:
        CheckpointError: It belongs to another architecture, optimizer or format. Found before anything is replaced,
            as far as headers tell.
    """
    state = _read_state(directory / ENGINE_FILE)
    _check_spec(spec, state["spec"], where=str(directory))
    if state["kinds"] != sorted(optimizer.buffers) or set(state["counters"]) != set(optimizer.counters):
        raise CheckpointError(
            f"the optimizer state holds {', '.join(state['kinds'])} and {', '.join(state['counters'])}; needed are "
            f"{', '.join(sorted(optimizer.buffers))} and {', '.join(optimizer.counters)}",
            where=str(directory),
            hint="optimizer.name and precision.dtype must be those of the run",
        )
    model, moments = WeightsFile(directory / MODEL_FILE), WeightsFile(directory / OPTIMIZER_FILE)
    is_huggingface = huggingface_family(spec) is not None
    model.check_entries(huggingface_entries(spec) if is_huggingface else _canonical_entries(spec))
    moments.check_entries(_optimizer_entries(store, optimizer))
    set_parameters(store, from_huggingface(spec, model) if is_huggingface else model)
    targets = {f"{kind}.{name}": view for kind, group in optimizer.buffers.items() for name, view in store.views(group)}
    for name, array in moments:
        _copy(targets[name], array)
    for name, value in optimizer.counters.items():
        value.fill_(state["counters"][name])


def fingerprint(store: ParameterStore, optimizer: Optimizer) -> str:
    """xxh3-128 over name, type, shape and bytes of parameters and optimizer state, in name order."""
    views = dict(store.views(store.values)) | dict(optimizer.counters)
    for kind, buffers in optimizer.buffers.items():
        views |= {f"{kind}.{name}": view for name, view in store.views(buffers)}
    digest = xxhash.xxh3_128()
    for name, view in sorted(views.items()):
        array = view.detach().cpu().numpy()
        digest.update(f"{name}|{array.dtype}|{array.shape}|".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _canonical_entries(spec: ModelSpec) -> tuple[TensorEntry, ...]:
    return tuple(TensorEntry(parameter.name, "F32", parameter.shape) for parameter in spec.parameters)


def _optimizer_arrays(store: ParameterStore, optimizer: Optimizer) -> Iterator[NamedArray]:
    for kind, buffers in sorted(optimizer.buffers.items()):
        for name, array in arrays(store, buffers):
            yield f"{kind}.{name}", array


def _optimizer_entries(store: ParameterStore, optimizer: Optimizer) -> tuple[TensorEntry, ...]:
    return tuple(
        TensorEntry(f"{kind}.{name}", "F32", tuple(view.shape))
        for kind, buffers in sorted(optimizer.buffers.items())
        for name, view in store.views(buffers)
    )


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_bytes())
        version = state["format"]
        known = all(isinstance(state[key], kind) for key, kind in (("spec", dict), ("kinds", list), ("counters", dict)))
    except OSError as error:
        raise CheckpointError(f"cannot read the engine's state: {error.strerror}", where=str(path)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError("the engine's state is not valid", where=str(path)) from error
    if version != FORMAT or not known:
        raise CheckpointError(f"the engine's state has format {version}, needed is {FORMAT}", where=str(path))
    return state


def _check_spec(spec: ModelSpec, stored: Mapping[str, Any], *, where: str) -> None:
    wanted = spec.to_json()
    differing = [
        f"{name} = {stored.get(name)} (here {value})"
        for name, value in sorted(wanted.items())
        if name not in _FREE_TO_CHANGE and stored.get(name) != value
    ]
    if differing:
        raise CheckpointError(f"the checkpoint is of another model: {', '.join(differing)}", where=where)
