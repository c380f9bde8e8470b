"""Initialise weights from a run, a checkpoint, a transformers model or a store (``train.from_weights``).

In: a configuration and a new engine. Out: the engine with these weights, and their origin for the run's record. Files
use canonical or Hugging Face names, so each engine reads the files of the other. A model of other dimensions is refused
with the differences before anything is replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import shutil
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from vorox.core.engine import Engine, NamedArray
from vorox.core.errors import CheckpointError, ConfigError, OtherWeightsError, UnreadableCheckpointError
from vorox.core.files import atomic
from vorox.core.files.atomic import MANIFEST_NAME
from vorox.core.files.json_reader import read_json
from vorox.core.run_layout import run_of_checkpoint
from vorox.core.schema import RunConfig
from vorox.data.corpus.cache_location import cache_root
from vorox.data.storage import scheme_of
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.models.arrays.weights_file import open_directory
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.models.huggingface.adapter_spec import AdapterSpec
from vorox.models.huggingface.config import CONFIG_NAME, spec_from_huggingface
from vorox.models.huggingface.spec import KIND
from vorox.models.huggingface.weights import from_huggingface
from vorox.models.pruning import zero_fraction
from vorox.models.spec import ModelSpec
from vorox.models.stored.engine_state import ENGINE_FILE, read_weights
from vorox.records.run_lookup import attempt_notes, split_step
from vorox.training.checkpoints.materialized_cache import named_state
from vorox.training.checkpoints.origins import WEIGHTS_NOTE, origins
from vorox.training.checkpoints.store import Checkpoint, latest_valid, verify
from vorox.training.mirror import download
from vorox.training.origin.model_origin import (
    FROM_WEIGHTS,
    NAME_OR_PATH,
    describe_directory,
    download_weights,
    explaining_moved_model,
    find_directory,
    find_origin,
    weights_directory,
)
from vorox.training.origin.origin_checks import check_ids, require_equal_models
from vorox.training.weights.dpo_reference import freeze_reference

_WEIGHT_FILES = ("*.safetensors", "*.bin", CONFIG_NAME, ENGINE_FILE)
"""What an engine reads of a directory of weights; its manifest and ``state.json`` also name places and the plan."""


def init_from_weights(
    config: RunConfig, spec: ModelSpec, engine: Engine, tokenizer: Tokenizer | None = None
) -> dict[str, Any] | None:
    """Load the weights of ``train.from_weights`` into a new engine, if set.

    Args:
        config: The run.
        spec: Its model.
        engine: The engine.
        tokenizer: Its tokenizer, to compare with that of weights in a store, which is read only now.

    Returns:
        Origin and fingerprint for the run's record; ``None`` if the setting is not set.

    Raises:
        ConfigError: There are no weights at that location, or they belong to a different model.
        StateNotOnDiskError: They are the state after a step that has to be computed first.
        CheckpointError: The weights are damaged, or have no optimizer state that this engine can load.
    """
    if config.model.kind == "huggingface":
        origin = _import_pretrained(config, spec, engine)
    elif config.train.from_weights is None:
        origin = None
    else:
        with _local_directory(config) as place:
            if tokenizer is not None and scheme_of(config.train.from_weights) not in (None, "hf"):
                check_ids(config, describe_directory(place, config.train.from_weights), tokenizer)
            origin = _init_from(place, config, spec, engine)
    freeze_reference(config, engine)
    if origin is None or not config.train.keep_zeros:
        return origin
    fraction = zero_fraction(spec, engine.export_weights())
    if not fraction:
        raise ConfigError(
            "Initial weights have no zeros to keep", where="train.keep_zeros",
            hint="prune them with `vorox compress --prune`, or leave the setting out",
        )  # fmt: skip
    return {**origin, "zero_fraction": fraction}


def with_recorded_weights(config: RunConfig, run_directory: Path | None) -> RunConfig:
    """Return a configuration whose initial weights are the checkpoint that a run started from, not the newest.

    A configuration may name the run that it is from, which has trained on since.
    """
    recorded = [] if run_directory is None else attempt_notes(run_directory, "from_weights")
    checkpoint, named = Path(str(recorded[0] if recorded else "")), config.train.from_weights
    base = run_of_checkpoint(checkpoint)
    if named is None or base is None or not checkpoint.is_dir() or not _is_at(named, config, base):
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"from_weights": str(checkpoint)})})


def _is_at(named: str, config: RunConfig, run_directory: Path) -> bool:
    """Whether a setting names a run, by its path or its name."""
    try:
        return find_directory(named, config.run.directory, key=FROM_WEIGHTS) == run_directory.absolute()
    except ConfigError:
        return False


def weights_digest(config: RunConfig) -> str | None:
    """Return the SHA-256 of the files that initial weights are read from; ``None`` for weights drawn from the seed.

    Raises:
        ConfigError: There are no weights at that location.
        StateNotOnDiskError: They are the state after a step that has to be computed first.
        CheckpointError: A checkpoint is damaged.
    """
    if config.model.kind == KIND and config.model.pretrained:
        return files_digest(weights_directory(config), _WEIGHT_FILES)
    if config.model.kind == KIND:
        origin = find_origin(config)
        place = None if origin is None else origin.directory
        return None if place is None else files_digest(place, (CONFIG_NAME,))
    if config.train.from_weights is None:
        return None
    with _local_directory(config) as place:
        found = _checkpoint(place)
        return files_digest(place if found is None else found.path, _WEIGHT_FILES)


def files_digest(directory: Path, patterns: Iterable[str]) -> str:
    """Return the SHA-256 over the names and contents of files of a directory, without what depends on its place."""
    paths = sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})
    found: dict[str, str] = {}
    for path in paths:
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(atomic.canonical_json(found)).hexdigest()


def initialize_again(config: RunConfig, spec: ModelSpec, engine: Engine, run_directory: Path) -> None:
    """Initialise weights as a run did at its start, and check that they are still the same.

    Raises:
        ConfigError: There are no weights at that location.
        OtherWeightsError: They are not those that the run started from.
    """
    with explaining_moved_model(run_directory):
        found = init_from_weights(with_recorded_weights(config, run_directory), spec, engine)
        recorded = next(map(str, attempt_notes(run_directory, "fingerprint")), None)
        if found is None or recorded is None:
            return
        fingerprint = engine.fingerprint()
        if fingerprint != recorded:
            raise OtherWeightsError(
                f"Initial weights have changed: the run started from {recorded[:16]}, those at "
                f"{found['from_weights']} are {fingerprint[:16]}",
                where=NAME_OR_PATH if config.model.kind == KIND else FROM_WEIGHTS, saved="the run was not changed",
            )  # fmt: skip


def _import_pretrained(config: RunConfig, spec: ModelSpec, engine: Engine) -> dict[str, Any] | None:
    if not config.model.pretrained:
        return None
    if not isinstance(spec, AdapterSpec):  # the base of an adapter is loaded with every engine
        engine.import_pretrained(weights_directory(config))
    name, revision = config.model.name_or_path, config.model.revision
    location = str(Path(str(name)).expanduser().absolute()) if revision is None else f"hf://{name}@{revision}"
    of = _origins(weights_directory(config)) if revision is None else []
    return {"from_weights": location, "fingerprint": engine.fingerprint(), WEIGHTS_NOTE: of}


def _init_from(place: Path, config: RunConfig, spec: ModelSpec, engine: Engine) -> dict[str, Any]:
    found = _checkpoint(place)
    if found is None:
        if config.train.from_optimizer:
            raise ConfigError(
                f"Weights in {place} are of transformers and have no optimizer state", where="train.from_optimizer",
                hint="leave it out, or start from a run or checkpoint",
            )  # fmt: skip
        _import_huggingface(place, spec, engine)
    else:
        if config.train.from_optimizer:
            engine.load(found.path)
        else:
            engine.import_weights(_read_checkpoint(found, spec, engine))
    name = str(config.train.from_weights)
    if scheme_of(name) is None:
        path = place if found is None else found.path
        is_kept = run_of_checkpoint(path) is not None
        if is_kept or split_step(config.run.directory, name)[1] is None:  # else a cached state, which may go again
            name = str(path)
    elif found is not None:
        name = f"{name} (step {found.step:,})"
    of = _origins(place if found is None else found.path)
    return {"from_weights": name, "fingerprint": engine.fingerprint(), WEIGHTS_NOTE: of}


def _origins(place: Path) -> list[dict[str, str | int]]:
    return [origin.to_json() for origin in origins(place)]


def _read_checkpoint(checkpoint: Checkpoint, spec: ModelSpec, engine: Engine) -> Iterator[NamedArray]:
    """Yield the weights of a checkpoint; the image encoder keeps its initial ones where the checkpoint has none."""
    if isinstance(spec, DecoderSpec) and spec.vision is not None and checkpoint.metadata["spec"].get("vision") is None:
        yield from read_weights(checkpoint.path, replace(spec, vision=None))
        yield from encoder_weights(engine)
    else:
        yield from read_weights(checkpoint.path, spec)


def encoder_weights(engine: Engine) -> list[NamedArray]:
    """Return the weights of the image encoder of an engine."""
    return [(name, array) for name, array in engine.export_weights() if name.startswith("vision.")]


@contextlib.contextmanager
def open_weights(config: RunConfig, spec: DecoderSpec) -> Generator[Iterable[NamedArray]]:
    """Yield the weights of ``train.from_weights`` under canonical names.

    Raises:
        ConfigError: There are no weights at that location.
        CheckpointError: The weights are damaged.
    """
    with _local_directory(config) as place:
        found = _checkpoint(place)
        yield _huggingface_weights(place, spec) if found is None else read_weights(found.path, spec)


@contextlib.contextmanager
def _local_directory(config: RunConfig) -> Generator[Path]:
    """Yield the local directory of the weights; weights in a store are downloaded temporarily, next to the caches."""
    name = str(config.train.from_weights)
    if scheme_of(name) is None:
        state = named_state(name, config.run.directory)
        yield state or find_directory(name, config.run.directory, key=FROM_WEIGHTS)
        return
    if scheme_of(name) == "hf":
        yield download_weights(name)
        return
    root = cache_root(config.data)
    root.mkdir(parents=True, exist_ok=True)
    atomic.sweep_temporary(root)
    folder = atomic.temporary_name(root / "weights")
    try:
        download(name, folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _checkpoint(place: Path) -> Checkpoint | None:
    """Return the checkpoint in a directory, or the newest of a run; ``None`` for a transformers directory."""
    if (place / MANIFEST_NAME).exists():
        try:
            checkpoint = verify(place)
        except CheckpointError as error:
            is_export = (place / CONFIG_NAME).exists() and run_of_checkpoint(place) is None
            if is_export and not isinstance(error, UnreadableCheckpointError):
                error.hint = (
                    f"if you changed it, `rm {shlex.quote(str(place / MANIFEST_NAME))}`, which has the hashes of the "
                    "files as they were exported; otherwise export again"
                )
            raise
        is_native = checkpoint.metadata.get("spec", {"kind": KIND}).get("kind") != KIND
        return checkpoint if is_native else None  # exports, and checkpoints of transformers models
    if (place / CONFIG_NAME).exists():
        return None
    checkpoint = latest_valid(place)
    if checkpoint is None:
        raise ConfigError(
            "Directory is not a checkpoint, a run with a checkpoint, or a transformers model",
            where=str(place), hint="a run must have saved once",
        )  # fmt: skip
    return checkpoint


def _import_huggingface(place: Path, spec: ModelSpec, engine: Engine) -> None:
    try:
        values = read_json(place / CONFIG_NAME, dict)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{CONFIG_NAME} cannot be read: {error}", where=str(place)) from error
    assert isinstance(spec, DecoderSpec)
    theirs = decoder_spec(spec_from_huggingface(values), tokenizer_vocab_size=1, sequence_length_tokens=1)
    require_equal_models(theirs, spec, str(place))
    encoder = [] if spec.vision is None else encoder_weights(engine)
    engine.import_weights([*_huggingface_weights(place, replace(spec, vision=None)), *encoder])


def _huggingface_weights(place: Path, spec: DecoderSpec) -> Iterator[NamedArray]:
    """Yield the weights in a directory of transformers.

    Raises:
        CheckpointError: They are damaged, or not those that ``config.json`` describes.
    """
    try:
        yield from from_huggingface(spec, (pair for file in open_directory(place) for pair in file))
    except CheckpointError as error:
        if error.where:
            raise
        hint = error.hint or f"{CONFIG_NAME} describes another model: save both with transformers' save_pretrained"
        raise CheckpointError(error.what, where=str(place), hint=hint) from error
