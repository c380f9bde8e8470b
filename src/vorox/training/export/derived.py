"""Write weights that were computed from checkpoints, such as averages, as a directory.

It has the files of a checkpoint that describe model and tokenizer, and is committed atomically. ``--from-weights``,
``vorox export`` and ``vorox.load_model`` read it. It has no optimizer state, so no run resumes from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vorox.core.engine import NamedArray
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.files.disk_errors import disk_error
from vorox.core.files.staged_directory import StagedDirectory, read_manifest
from vorox.core.run_layout import run_of_checkpoint
from vorox.core.user_code import trusted_code
from vorox.models.arrays.sharded_arrays import INDEX_FILE
from vorox.models.arrays.weights_file import WEIGHTS_INDEX_FILE, TensorEntry, write_weights
from vorox.models.spec import ModelSpec
from vorox.models.stored.engine_state import ENGINE_FILE, MODEL_FILE, OPTIMIZER_FILE, write_description
from vorox.records.run_lookup import is_run
from vorox.training.checkpoints.origins import CHECKPOINTS, RUN, origins_of
from vorox.training.checkpoints.store import STATE_NAME, Checkpoint, verify

AVERAGED = "averaged_steps"
"""Key of the manifest's metadata: the steps of the averaged checkpoints."""
PRUNED = "pruned"
"""Key of the manifest's metadata: how the weights were pruned."""
MATERIALIZED = "materialized"
"""Whether a re-execution wrote the whole state of the step (``training/materialize.py``)."""
ORIGIN_KEYS = frozenset({MATERIALIZED, RUN})
"""Keys that a materialised checkpoint has besides those of the run's own."""
_REPLACED = (MODEL_FILE, WEIGHTS_INDEX_FILE, OPTIMIZER_FILE, ENGINE_FILE, INDEX_FILE, STATE_NAME)


def is_derived(metadata: Mapping[str, Any]) -> bool:
    """Whether a manifest's metadata describes a directory written here."""
    return bool({AVERAGED, PRUNED, MATERIALIZED} & metadata.keys())


def materialized(run_directory: Path) -> dict[str, Any]:
    """Return the metadata by which a checkpoint outside its run is known to be one of it."""
    return {MATERIALIZED: True, RUN: str(run_directory.absolute())}


def recorded_run(derived: Checkpoint) -> Path | None:
    """Return the run whose checkpoints the weights were computed from; ``None`` if it is not where it was."""
    found = derived.metadata.get(RUN)
    return Path(found) if isinstance(found, str) and found and is_run(Path(found)) else None


def write_derived(
    source: Checkpoint,
    target: Path,
    spec: ModelSpec,
    tensors: tuple[Sequence[TensorEntry], Iterable[NamedArray]],
    metadata: Mapping[str, Any],
    files: Mapping[str, bytes] | None = None,
) -> Checkpoint:
    """Write weights with the description of a checkpoint.

    Args:
        source: The checkpoint of model, tokenizer, step and configuration.
        target: Directory to create. It may be empty.
        spec: The model.
        tensors: The tensors of its file, in fp32, after their entries.
        metadata: How the weights were computed.
        files: Further files by name.

    Raises:
        ConfigError: The target is not empty.
        CheckpointError: The target cannot be written.
    """
    remove_empty(target)
    kept = {key: source.metadata[key] for key in ("spec", "settings", "step", RUN) if key in source.metadata}
    run = run_of_checkpoint(source.path)
    kept |= {} if run is None else {RUN: str(run.absolute())}
    kept |= {CHECKPOINTS: [origin.to_json() for origin in origins_of(source.path, source.metadata)]}
    try:
        with StagedDirectory(target) as directory:
            companions = {name: (source.path / name).read_bytes() for name in _companions(source.path)}
            for name, content in {**companions, **(files or {})}.items():
                directory.write(name, content)
            with directory.open(MODEL_FILE) as sink:
                write_weights(sink, *tensors)
            write_description(directory, spec, [], {}, arrays="safetensors")
            directory.commit({**kept, **metadata})
    except OSError as error:
        raise disk_error(error, str(target)) or CheckpointError(
            f"Weights cannot be written: {error.strerror}", where=str(error.filename or target)
        ) from error
    trusted_code.trust(kept, target)
    return verify(target)


def remove_empty(target: Path) -> None:
    """Remove an empty target directory, so that a staged one can take its place.

    Raises:
        ConfigError: It is not empty.
    """
    if not target.exists():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise ConfigError("Target is not an empty directory", where=str(target), hint="choose another directory")
    target.rmdir()


def _companions(checkpoint: Path) -> Iterator[str]:
    """Yield the files of a checkpoint that describe model and tokenizer."""
    for name in read_manifest(checkpoint)["files"]:
        if name not in _REPLACED and "/" not in name and not name.startswith("shard-"):
            yield name
