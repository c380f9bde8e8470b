"""Initialise weights from a run, a checkpoint, a transformers model or a store (``train.from_weights``).

In: a configuration and a fresh engine. Out: the engine with those weights, and their origin for the run's record.
Files use canonical or Hugging Face names, so either engine reads what the other wrote. A model of other dimensions is
refused, with the differences, before anything is replaced.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

from vorox.core import atomic
from vorox.core.atomic import MANIFEST_NAME
from vorox.core.engine import Engine
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.schema import RunConfig
from vorox.data.cache_location import cache_root
from vorox.data.storage import scheme_of
from vorox.models.engine_state import read_weights
from vorox.models.huggingface_config import CONFIG_NAME, spec_from_huggingface
from vorox.models.huggingface_weights import from_huggingface
from vorox.models.spec import ModelSpec, model_spec
from vorox.models.weights_file import open_directory
from vorox.training.checkpoint_store import Checkpoint, latest_valid, verify
from vorox.training.mirror import download
from vorox.training.weights_source import download_weights, find_weights, require_equal_models


def init_from_weights(config: RunConfig, spec: ModelSpec, engine: Engine) -> dict[str, Any] | None:
    """Give a fresh engine the weights that the configuration names, if it names any.

    Returns:
        For the run's record: where they came from and the engine's fingerprint with them.

    Raises:
        ConfigError: There is nothing at that place, or it is another model.
        CheckpointError: What is there is damaged, or has no optimizer state that this engine can take over.
    """
    if config.train.from_weights is None:
        return None
    with _here(config) as place:
        return _init_from(place, config, spec, engine)


def _init_from(place: Path, config: RunConfig, spec: ModelSpec, engine: Engine) -> dict[str, Any]:
    found = _checkpoint(place)
    if found is None:
        if config.train.from_optimizer:
            raise ConfigError(
                f"{place} holds weights of transformers and no optimizer state", where="train.from_optimizer",
                hint="leave it away, or start from a run or checkpoint",
            )  # fmt: skip
        _take_huggingface(place, spec, engine)
    else:
        if config.train.from_optimizer:
            engine.load(found.path)
        else:
            engine.import_weights(read_weights(found.path, spec))
    name = str(config.train.from_weights)
    if scheme_of(name) is None:
        name = str(place if found is None else found.path)
    elif found is not None:
        name = f"{name} (step {found.step:,})"
    return {"from_weights": name, "fingerprint": engine.fingerprint()}


@contextlib.contextmanager
def _here(config: RunConfig) -> Generator[Path]:
    """The place on this machine; what is in a store is brought to the disk of the caches for as long as it is read."""
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
    """The checkpoint that a place is, or the newest of a run; ``None`` for a transformers directory."""
    if (place / MANIFEST_NAME).exists():
        checkpoint = verify(place)
        return checkpoint if "spec" in checkpoint.metadata else None  # an export has a manifest as well
    if (place / CONFIG_NAME).exists():
        return None
    checkpoint = latest_valid(place)
    if checkpoint is None:
        raise ConfigError(
            "neither a run with a checkpoint, a checkpoint, nor a directory of transformers",
            where=str(place), hint="the run must have saved once; see `vorox checkpoints list`",
        )  # fmt: skip
    return checkpoint


def _take_huggingface(place: Path, spec: ModelSpec, engine: Engine) -> None:
    try:
        values = json.loads((place / CONFIG_NAME).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"its {CONFIG_NAME} cannot be read: {error}", where=str(place)) from error
    theirs = model_spec(spec_from_huggingface(values), tokenizer_vocab_size=1, sequence_length_tokens=1).to_json()
    require_equal_models(theirs, spec.to_json(), str(place))
    engine.import_weights(from_huggingface(spec, (pair for file in open_directory(place) for pair in file)))
