"""Locate a transformers model (``model.name_or_path``): its ``config.json``, tokenizer and weights.

A configuration adopts the commit and the tokenizer before anything is built. A resumed run takes the model from its own
checkpoint, so the source may move or change after step 1.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from vorox.core.config import ConfigSource, ResolvedConfig, resolve_config
from vorox.core.config.yaml_writer import write_inline
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.schema import RunConfig
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.core.staged_directory import read_manifest
from vorox.data.tokenizers.huggingface import download_repository, hub_place
from vorox.models.huggingface_config import CONFIG_NAME, PREPROCESSOR_NAME
from vorox.models.huggingface_spec import HuggingFaceSpec
from vorox.models.stored_spec import spec_from_json
from vorox.models.weights_file import WEIGHTS_INDEX_FILE, open_directory
from vorox.training.checkpoints.store import step_directories
from vorox.training.inference.image_processor_source import (
    FREE_KEYS,
    PROCESSOR_NAME,
    has_images,
    read_image_processor,
)

_KEY = "model.name_or_path"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_WEIGHTS = (CONFIG_NAME, "model*.safetensors", WEIGHTS_INDEX_FILE)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A transformers model, described without reading its weights.

    Attributes:
        name: Directory, or ``OWNER/NAME``.
        commit: Commit on the hub; ``None`` for a directory.
        values: Content of ``config.json``.
        tokenizer: Settings of the section ``tokenizer`` that load its tokenizer; empty if it has none.
        image_processor: Settings of ``model.image_processor``; empty if no source of the run has images.
    """

    name: str
    commit: str | None
    values: dict[str, Any]
    tokenizer: dict[str, str]
    image_processor: dict[str, Any]

    @property
    def location(self) -> str:
        return self.name if self.commit is None else f"hf://{self.name}@{self.commit}"

    @property
    def max_positions_tokens(self) -> int | None:
        """Maximum sequence length; ``None`` without one."""
        text = self.values.get("text_config") or self.values
        found = text.get("max_position_embeddings", text.get("n_positions"))
        return found if isinstance(found, int) else None


def find_model(config: RunConfig) -> ModelSource:
    """Describe the model of a configuration.

    Raises:
        ConfigError: There is no model at that location.
        CheckpointError: Its weights or its ``config.json`` are damaged.
        DataError: The repository or revision does not exist, or cannot be reached.
    """
    name, revision = _place(config)
    folder, commit = _folder(name, revision, (CONFIG_NAME, "tokenizer_config.json", PREPROCESSOR_NAME, PROCESSOR_NAME))
    try:
        values: Any = json.loads((folder / CONFIG_NAME).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{CONFIG_NAME} cannot be read: {error}", where=str(folder)) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{CONFIG_NAME} is not a mapping", where=str(folder))
    if commit is None and config.model.pretrained:
        open_directory(folder)  # checks headers and lengths of all files
    tokenizer: dict[str, str] = {}
    if commit is not None:
        tokenizer = {"kind": "huggingface", "path": name, "revision": commit}
    elif any((folder / file).is_file() for file in _TOKENIZER_FILES):
        tokenizer = {"kind": "huggingface", "path": name}
    values = cast("dict[str, Any]", values)
    images = read_image_processor(folder, values) if has_images(config) else {}
    return ModelSource(name, commit, values, tokenizer, images)


def load_model_config(resolved: ResolvedConfig, source: ConfigSource | None, overrides: Sequence[str]) -> RunConfig:
    """Return a configuration with the commit, tokenizer and, unless set, the row length of its model.

    Raises:
        ConfigError: As ``find_model``; or pretrained weights have no tokenizer and the configuration sets none.
    """
    found = find_model(resolved.config)
    adopted: list[str] = []
    if not _is_explicit(resolved, *(f"tokenizer.{name}" for name in TokenizerConfig.model_fields)):
        if not found.tokenizer and resolved.config.model.pretrained:
            raise ConfigError(
                "The model has no tokenizer", where=found.location,
                hint="set the section tokenizer to the one that it was trained with",
            )  # fmt: skip
        adopted += [f"tokenizer.{key}={write_inline(value)}" for key, value in found.tokenizer.items()]
    longest, length = found.max_positions_tokens, "data.sequence_length_tokens"
    if longest is not None and resolved.config.data.sequence_length_tokens > longest:
        if _is_explicit(resolved, length):
            raise ConfigError(
                f"{length}={resolved.config.data.sequence_length_tokens:,} is more than the {longest:,} positions of "
                f"{found.location}",
                where=resolved.origin(length), hint=f"set it to at most {longest}",
            )  # fmt: skip
        adopted.append(f"{length}={longest}")
    adopted += _image_settings(resolved, found)
    pinned = [f"{_KEY}={write_inline(found.name)}"]
    if found.commit is not None:
        pinned.append(f"model.revision={found.commit}")
    return resolve_config(source, [*adopted, *overrides, *pinned]).config


def _image_settings(resolved: ResolvedConfig, found: ModelSource) -> list[str]:
    """Return the settings of the image processor that the configuration adopts.

    Raises:
        ConfigError: The configuration sets one that contradicts the model.
    """
    adopted: list[str] = []
    for name, value in found.image_processor.items():
        key = f"model.image_processor.{name}"
        if not _is_explicit(resolved, key):
            adopted.append(f"{key}={write_inline(value)}")
            continue
        here = resolved.config.model.image_processor.model_dump(mode="json")[name]
        if name not in FREE_KEYS and here != value:
            raise ConfigError(
                f"{key}={here} differs from the model's {value}", where=resolved.origin(key), hint="remove the setting"
            )
    return adopted


def weights_directory(config: RunConfig) -> Path:
    """Return the directory of the weights, downloaded if they are on the hub."""
    return _folder(*_place(config), _WEIGHTS)[0]


def recorded_model(run_directory: Path | None) -> HuggingFaceSpec | None:
    """Return the model of the newest readable checkpoint of a run; ``None`` without one."""
    steps = {} if run_directory is None else step_directories(run_directory)
    for step in sorted(steps, reverse=True):
        try:
            spec = spec_from_json(read_manifest(steps[step])["metadata"]["spec"])
        except (CheckpointError, KeyError, TypeError):
            continue
        return spec if isinstance(spec, HuggingFaceSpec) else None
    return None


def _place(config: RunConfig) -> tuple[str, str | None]:
    """Return name and revision.

    Raises:
        ConfigError: The name is not valid, or has two revisions.
    """
    name, revision = str(config.model.name_or_path), config.model.revision
    if Path(name).expanduser().is_dir():
        if revision is not None:
            raise ConfigError("A directory has no revisions", where="model.revision", hint="remove the setting")
        return name, None
    found = hub_place(name if name.startswith("hf://") else f"hf://{name}")
    if found is None:
        raise ConfigError(
            f"There is no model at {name!r}", where=_KEY,
            hint="set it to a directory with config.json and safetensors, OWNER/NAME or hf://OWNER/NAME@REVISION",
        )  # fmt: skip
    if found[1] is not None and revision not in (None, found[1]):
        raise ConfigError(
            f"{name} and model.revision={revision} name different revisions", where=_KEY, hint="set one of them"
        )
    return found[0], found[1] or revision


def _folder(name: str, revision: str | None, patterns: Sequence[str]) -> tuple[Path, str | None]:
    path = Path(name).expanduser()
    return (path, None) if path.is_dir() else download_repository(name, revision, patterns, key=_KEY)


def _is_explicit(resolved: ResolvedConfig, *keys: str) -> bool:
    """Whether the user's file or command line sets one of some keys."""
    return any(not resolved.origin(key).startswith(("default", "preset ")) for key in keys)
