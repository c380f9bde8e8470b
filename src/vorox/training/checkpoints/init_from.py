"""Initialise weights from a run, a checkpoint, a transformers model or a store (``train.from_weights``).

In: a configuration and a new engine. Out: the engine with these weights, and their origin for the run's record. Files
use canonical or Hugging Face names, so each engine reads the files of the other. A model of other dimensions is refused
with the differences before anything is replaced.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from vorox.core import atomic
from vorox.core.atomic import MANIFEST_NAME
from vorox.core.engine import Engine, NamedArray
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.schema import RunConfig
from vorox.data.cache_location import cache_root
from vorox.data.storage import scheme_of
from vorox.models.adapter_spec import AdapterSpec
from vorox.models.decoder_spec import DecoderSpec, decoder_spec
from vorox.models.engine_state import read_weights
from vorox.models.huggingface_config import CONFIG_NAME, spec_from_huggingface
from vorox.models.huggingface_spec import KIND
from vorox.models.huggingface_weights import from_huggingface
from vorox.models.pruning import zero_fraction
from vorox.models.spec import ModelSpec
from vorox.models.weights_file import open_directory
from vorox.training.checkpoints.adapter_base import ImportsPretrained
from vorox.training.checkpoints.store import Checkpoint, latest_valid, verify
from vorox.training.checkpoints.weights_source import download_weights, find_weights, require_equal_models
from vorox.training.dpo_reference import freeze_reference
from vorox.training.inference.model_source import weights_directory
from vorox.training.mirror import download


def init_from_weights(config: RunConfig, spec: ModelSpec, engine: Engine) -> dict[str, Any] | None:
    """Load the weights of ``train.from_weights`` into a new engine, if set.

    Returns:
        Origin and fingerprint for the run's record; ``None`` if the setting is not set.

    Raises:
        ConfigError: There are no weights at that location, or they belong to a different model.
        CheckpointError: The weights are damaged, or have no optimizer state that this engine can load.
    """
    if config.model.kind == "huggingface":
        origin = _import_pretrained(config, spec, engine)
    elif config.train.from_weights is None:
        origin = None
    else:
        with _local_directory(config) as place:
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


def _import_pretrained(config: RunConfig, spec: ModelSpec, engine: Engine) -> dict[str, Any] | None:
    if not config.model.pretrained:
        return None
    if not isinstance(spec, AdapterSpec):  # the base of an adapter is loaded with every engine
        cast(ImportsPretrained, engine).import_pretrained(weights_directory(config))
    name, revision = config.model.name_or_path, config.model.revision
    location = str(Path(str(name)).expanduser().absolute()) if revision is None else f"hf://{name}@{revision}"
    return {"from_weights": location, "fingerprint": engine.fingerprint()}


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
        name = str(place if found is None else found.path)
    elif found is not None:
        name = f"{name} (step {found.step:,})"
    return {"from_weights": name, "fingerprint": engine.fingerprint()}


def _read_checkpoint(checkpoint: Checkpoint, spec: ModelSpec, engine: Engine) -> Iterator[NamedArray]:
    """Yield the weights of a checkpoint; the image encoder keeps its initial ones where the checkpoint has none."""
    if isinstance(spec, DecoderSpec) and spec.vision is not None and "vision" not in checkpoint.metadata["spec"]:
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
        yield find_weights(name, config.run.directory)
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
        checkpoint = verify(place)
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
        values = json.loads((place / CONFIG_NAME).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{CONFIG_NAME} cannot be read: {error}", where=str(place)) from error
    assert isinstance(spec, DecoderSpec)
    theirs = decoder_spec(spec_from_huggingface(values), tokenizer_vocab_size=1, sequence_length_tokens=1)
    require_equal_models(theirs, spec, str(place))
    encoder = [] if spec.vision is None else encoder_weights(engine)
    engine.import_weights([*_huggingface_weights(place, replace(spec, vision=None)), *encoder])


def _huggingface_weights(place: Path, spec: DecoderSpec) -> Iterable[NamedArray]:
    return from_huggingface(spec, (pair for file in open_directory(place) for pair in file))
