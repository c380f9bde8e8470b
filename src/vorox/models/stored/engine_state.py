"""On-disk format of an engine's training state, identical for every engine: no pickle, no framework.

``model.safetensors`` holds the parameters in fp32, under Hugging Face names if transformers has the architecture, else
under canonical names; ``optimizer.safetensors`` the optimizer moments of each canonical parameter (``exp_avg.<name>``);
``engine.json`` the counters, the model spec and the array format. With ``checkpoint.format=orbax`` the folder ``orbax``
(``models/arrays/orbax_arrays.py``) replaces the first two; a state that is sharded over ranks of PyTorch is written as
shards (``models/stored/sharded_snapshot.py``). Either engine reads all three forms, and can resume a run of the other
if its optimizer has the same moments. A moving average of the weights is stored as a moment. The caller hashes and
commits the files.

Invariant: a loaded state has the fingerprint of the saved one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from vorox.core.engine import NamedArray, PartReport
from vorox.core.errors import CheckpointError
from vorox.core.files.atomic import pretty_json
from vorox.core.files.json_reader import read_json
from vorox.core.files.staged_directory import StagedDirectory, StagedPart
from vorox.core.run_layout import RunLayout, run_of_checkpoint
from vorox.models.arrays.array_reader import WEIGHTS, ArrayReader, read_weights_of, weight_entries
from vorox.models.arrays.fingerprint import fingerprint
from vorox.models.arrays.orbax_arrays import OrbaxArrays
from vorox.models.arrays.sharded_arrays import ShardedArrays
from vorox.models.arrays.weights_file import WEIGHTS_INDEX_FILE, TensorEntry, WeightsFile, weights_index, write_weights
from vorox.models.spec import ModelSpec
from vorox.models.stored.weights import from_stored, stored_entries, to_stored

FORMAT = "vorox-engine/2"
_HINT = "it is damaged: verify it with `vorox checkpoints verify RUN`, or take an earlier step"
MODEL_FILE, OPTIMIZER_FILE, ENGINE_FILE = "model.safetensors", "optimizer.safetensors", "engine.json"
AVERAGE = "weights_ema"
"""Kind of the moving average of the weights (``train.ema_decay``) among the moments."""
_PIECE_ELEMENTS = 1 << 20

ArrayForm = Literal["safetensors", "orbax", "shards"]
"""How the arrays of a checkpoint are stored."""

Arrays = Callable[[], Iterable[NamedArray]]
"""Returns canonical fp32 arrays in table order, one at a time."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """The training state of an engine.

    Attributes:
        weights: All parameters.
        moments: Optimizer moments by kind; a kind may cover only some parameters.
        moment_names: The parameters of each kind, in table order.
        counters: Scalars of the optimizer.
    """

    weights: Arrays
    moments: Mapping[str, Arrays]
    moment_names: Mapping[str, tuple[str, ...]]
    counters: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot of the training state (``core.engine.EngineSnapshot``).

    Attributes:
        spec: The model.
        state: The state; its creator decides whether later steps can change it.
    """

    spec: ModelSpec
    state: EngineState

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays: a lower bound of the disk space needed."""
        entries = (*_canonical_entries(self.spec), *moment_entries(self.spec, self.state.moment_names))
        return sum(entry.size_bytes for entry in entries)

    def nonfinite_array(self) -> str:
        """Return the name of the first array with NaN or infinity, or an empty string."""
        return first_nonfinite(itertools.chain(self.state.weights(), _moment_arrays(self.state)))

    def write_part(self, directory: StagedPart) -> PartReport:
        """Do nothing: the main rank writes the state, which it holds."""
        del directory
        return {}

    def write_metadata(self, directory: StagedDirectory, parts: Sequence[PartReport] = ()) -> None:
        """Write the three files, and an index, so that vLLM does not load the optimizer's file as weights."""
        del parts
        spec, state = self.spec, self.state
        entries = stored_entries(spec)
        with directory.open(MODEL_FILE) as sink:
            write_weights(sink, entries, to_stored(spec, state.weights()))
        directory.write(WEIGHTS_INDEX_FILE, pretty_json(weights_index(MODEL_FILE, entries)))
        with directory.open(OPTIMIZER_FILE) as sink:
            write_weights(sink, moment_entries(spec, state.moment_names), _moment_arrays(state))
        write_description(directory, spec, sorted(state.moments), state.counters, arrays="safetensors")

    def fingerprint(self, parts: Sequence[PartReport] = ()) -> str:
        """Return ``state_fingerprint``."""
        del parts
        return state_fingerprint(self.state)


def state_fingerprint(state: EngineState) -> str:
    """Return the fingerprint of a whole state (``models/arrays/fingerprint.py``)."""
    weights = ((f"{WEIGHTS}.{name}", array) for name, array in state.weights())
    return fingerprint(itertools.chain(weights, _moment_arrays(state)), state.counters)


def first_nonfinite(arrays: Iterable[NamedArray]) -> str:
    """Return the name of the first array with NaN or infinity, or an empty string. Reads each array once, in pieces."""
    for name, array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1)
        pieces = range(0, flat.size, _PIECE_ELEMENTS)
        if not all(np.isfinite(flat[first : first + _PIECE_ELEMENTS]).all() for first in pieces):
            return name
    return ""


def write_description(
    directory: StagedDirectory,
    spec: ModelSpec,
    kinds: list[str],
    counters: Mapping[str, float],
    *,
    arrays: ArrayForm,
) -> None:
    """Write ``engine.json``: model spec, array format and counters."""
    body = {"format": FORMAT, "arrays": arrays, "spec": spec.to_json(), "kinds": kinds, "counters": dict(counters)}
    directory.write(ENGINE_FILE, pretty_json(body))


@dataclass(frozen=True, slots=True)
class StoredState:
    """A stored state whose headers were checked; arrays are read lazily.

    Attributes:
        weights: All parameters under canonical names.
        moments: (kind, canonical name, array).
        counters: Scalars of the optimizer.
        pieces: Reads slices of arrays; ``None`` if whole arrays are read.
    """

    weights: Iterable[NamedArray]
    moments: Iterable[tuple[str, str, np.ndarray[Any, np.dtype[np.float32]]]]
    counters: Mapping[str, float]
    pieces: ArrayReader | None = None


def load(directory: Path, spec: ModelSpec, like: EngineState) -> StoredState:
    """Open a stored state.

    Args:
        directory: A verified checkpoint.
        spec: The expected model.
        like: A state with the expected moments and counters.

    Raises:
        CheckpointError: The state has another architecture, optimizer or format.
    """
    body = _read_body(directory / ENGINE_FILE)
    _check_spec(spec, body["spec"], where=str(directory))
    if body["kinds"] != sorted(like.moments) or set(body["counters"]) != set(like.counters):
        raise CheckpointError(
            f"The optimizer state holds {', '.join(body['kinds'])} and {', '.join(body['counters'])}; expected "
            f"{', '.join(sorted(like.moments))} and {', '.join(like.counters)}",
            where=str(directory),
            hint="optimizer.name, precision.dtype and whether train.ema_decay is set must match the run",
        )
    wanted = moment_entries(spec, like.moment_names)
    pieces = _array_reader(directory, body)
    if pieces is not None:
        pieces.check_entries([*weight_entries(spec), *wanted])
        named = ((entry.name, pieces.read(entry.name)) for entry in wanted)
        return StoredState(read_weights_of(pieces, spec), _split_kinds(named), body["counters"], pieces)
    moments = WeightsFile(directory / OPTIMIZER_FILE)
    moments.check_entries(wanted)
    return StoredState(_open_weights(directory, spec, body), _split_kinds(moments), body["counters"])


def read_counters(directory: Path) -> Mapping[str, float]:
    """Return the scalars of a stored optimizer."""
    return _read_body(directory / ENGINE_FILE)["counters"]


def read_weights(directory: Path, spec: ModelSpec) -> Iterable[NamedArray]:
    """Read only the parameters, under canonical names; any optimizer is accepted.

    Raises:
        CheckpointError: The parameters have another architecture, or the files are not a valid state.
    """
    body = _read_body(directory / ENGINE_FILE)
    _check_spec(spec, body["spec"], where=str(directory))
    return _open_weights(directory, spec, body)


def read_average(directory: Path, spec: ModelSpec) -> Iterator[NamedArray]:
    """Read the moving average of the parameters; frozen ones have none and are read from the model.

    Raises:
        CheckpointError: The state has no average, or as ``read_weights``.
    """
    body = _read_body(directory / ENGINE_FILE)
    if AVERAGE not in body["kinds"]:
        raise CheckpointError(
            "Checkpoint has no moving average of the weights", where=str(directory),
            hint="only a run with train.ema_decay has one",
        )  # fmt: skip
    moments = _array_reader(directory, body) or WeightsFile(directory / OPTIMIZER_FILE)
    for name, array in read_weights(directory, spec):
        key = f"{AVERAGE}.{name}"
        yield name, moments.read(key) if key in moments.names else array


def _open_weights(directory: Path, spec: ModelSpec, body: Mapping[str, Any]) -> Iterable[NamedArray]:
    pieces = _array_reader(directory, body)
    if pieces is not None:
        pieces.check_entries(weight_entries(spec))
        return read_weights_of(pieces, spec)
    model = WeightsFile(directory / MODEL_FILE)
    model.check_entries(stored_entries(spec))
    return from_stored(spec, model)


def _array_reader(directory: Path, body: Mapping[str, Any]) -> ArrayReader | None:
    if body["arrays"] == "orbax":
        return OrbaxArrays(directory)
    return ShardedArrays(directory) if body["arrays"] == "shards" else None


def _split_kinds(moments: Iterable[NamedArray]) -> Iterator[tuple[str, str, Any]]:
    for full_name, array in moments:
        kind, _, name = full_name.partition(".")
        yield kind, name, array


def _canonical_entries(spec: ModelSpec) -> tuple[TensorEntry, ...]:
    return tuple(TensorEntry(parameter.name, "F32", parameter.shape) for parameter in spec.parameters)


def _moment_arrays(state: EngineState) -> Iterator[NamedArray]:
    for kind, arrays in sorted(state.moments.items()):
        for name, array in arrays():
            yield f"{kind}.{name}", array


def moment_entries(spec: ModelSpec, names: Mapping[str, Sequence[str]]) -> tuple[TensorEntry, ...]:
    """Return the expected entries of optimizer moments, given the parameters of each kind."""
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters}
    return tuple(TensorEntry(f"{kind}.{name}", "F32", shapes[name]) for kind in sorted(names) for name in names[kind])


def _read_body(path: Path) -> dict[str, Any]:
    try:
        body = read_json(path, dict)
        version = body["format"]
        known = all(isinstance(body[key], kind) for key, kind in (("spec", dict), ("kinds", list), ("counters", dict)))
    except OSError as error:
        raise CheckpointError(f"Cannot read the engine's state: {error.strerror}", where=str(path)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError("The engine's state is not valid", where=str(path), hint=_HINT) from error
    if version != FORMAT:
        run = run_of_checkpoint(path.parent)
        again = "make these weights again" if run is None else f"train the run again: {RunLayout(run).training_command}"
        what = f"The engine's state has format {version!r}, but this version reads {FORMAT!r}"
        raise CheckpointError(what, where=str(path), hint=again)
    if not known:
        raise CheckpointError("The engine's state is not valid", where=str(path), hint=_HINT)
    arrays = body.get("arrays")
    if arrays not in get_args(ArrayForm):
        raise CheckpointError(
            f"The arrays are stored as {arrays}; this version reads {' and '.join(get_args(ArrayForm))}",
            where=str(path),
            hint="export the run with the version that wrote it (vorox export) and start from that (--from-weights)",
        )
    return body


def _check_spec(spec: ModelSpec, stored: Mapping[str, Any], *, where: str) -> None:
    differing = spec.differences(stored)
    if differing:
        raise CheckpointError(f"Checkpoint belongs to a different model: {', '.join(differing)}", where=where)
