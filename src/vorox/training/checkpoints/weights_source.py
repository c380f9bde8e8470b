"""Describe initial weights: location, architecture and tokenizer, read before anything is built.

In: ``train.from_weights``: a run, a checkpoint, a transformers directory or ``hf://OWNER/NAME@REVISION``. Out: the
architecture and tokenizer, read from manifests, ``config.json`` and headers of safetensors files only. A configuration
adopts both where it does not set them, and is compared with them where it does. Weights at ``gs://`` or ``s3://`` are
described only after their download, when the run starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from vorox.core.atomic import MANIFEST_NAME
from vorox.core.config import ConfigSource, ResolvedConfig, resolve_config
from vorox.core.config.presets import model_presets
from vorox.core.config.yaml_writer import write_inline
from vorox.core.errors import CheckpointError, ConfigError, DataError
from vorox.core.run_layout import RunLayout
from vorox.core.run_lookup import find_run
from vorox.core.schema import RunConfig
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.core.staged_directory import read_manifest
from vorox.data.storage import scheme_of
from vorox.data.tokenizers.huggingface import download_repository, hub_place, load_huggingface
from vorox.data.tokenizers.loading import load as load_tokenizer
from vorox.data.tokenizers.loading import train as train_tokenizer
from vorox.data.tokenizers.store import load_untrained
from vorox.data.tokenizers.tokenizer import TOKENIZER_NAME, Tokenizer
from vorox.models.decoder_spec import FREE_TO_CHANGE, DecoderSpec, decoder_spec
from vorox.models.huggingface_config import CONFIG_NAME, spec_from_huggingface
from vorox.models.huggingface_families import huggingface_family
from vorox.models.huggingface_spec import KIND
from vorox.models.stored_spec import spec_from_json
from vorox.models.weights_file import WEIGHTS_INDEX_FILE, open_directory
from vorox.training.checkpoints.store import step_directories
from vorox.training.inference.model_source import find_model, load_model_config

_KEY = "train.from_weights"


@dataclass(frozen=True, slots=True)
class WeightsDescription:
    """Weights, described without reading them.

    Attributes:
        location: Their location; a hub repository includes its commit.
        spec: The model.
        tokenizer: Settings of the section ``tokenizer`` that load their tokenizer; empty if they have none.
    """

    location: str
    spec: DecoderSpec
    tokenizer: dict[str, str]


def load_config_with_weights(source: ConfigSource | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a configuration; it adopts architecture and tokenizer from its initial weights.

    Args:
        source: As for ``load_config``.
        overrides: As for ``load_config``.

    Raises:
        ConfigError: A key set by the file or the overrides conflicts with the weights, or there are no weights.
        CheckpointError: The weights are damaged.
    """
    resolved = resolve_config(source, overrides)
    if resolved.config.model.kind == "huggingface":
        return load_model_config(resolved, source, overrides)
    weights = describe_weights(resolved.config)
    if weights is None:
        return resolved.config
    adopted = [f"{key}={write_inline(value)}" for key, value in _adopted_settings(resolved, weights).items()]
    return resolve_config(source, [*adopted, *overrides, f"{_KEY}={write_inline(weights.location)}"]).config


def check_weights(config: RunConfig, *, tokenizer: Tokenizer | None = None) -> None:
    """Check that model and tokenizer of a configuration match its initial weights.

    Args:
        config: The run.
        tokenizer: Its tokenizer; ``None`` loads it, unless it must be trained.

    Raises:
        ConfigError: The models or the tokenizers differ, or there are no weights at that location.
        CheckpointError: The weights are damaged.
        DataError: A tokenizer cannot be read or downloaded.
    """
    if config.model.kind == "huggingface":
        find_model(config)
    weights = describe_weights(config)
    if weights is None:
        if config.loss.name == "dpo" and config.model.kind == "decoder":
            raise ConfigError(
                "DPO needs trained weights to start from, which are its reference", where="train.from_weights",
                hint="add --from-weights with a run, a checkpoint or a transformers directory",
            )  # fmt: skip
        return
    _check_model(config, weights, None)
    if tokenizer is None and (loaded := load_untrained(config.tokenizer)) is not None:
        tokenizer = loaded.with_special_tokens(config.tokenizer.special_tokens)
    if tokenizer is not None:
        _check_model(config, weights, tokenizer.vocab_size)
        check_tokenizer(config, tokenizer)
    elif config.tokenizer.kind == "bpe":
        check_tokenizer(config, train_tokenizer(config.tokenizer, ()))  # training text does not change its ids
        if config.model.vocab_size is None:
            _check_trained_size(config.tokenizer.vocab_size, weights)


def _check_model(config: RunConfig, weights: WeightsDescription, tokenizer_vocab_size: int | None) -> None:
    theirs = weights.spec
    ours = decoder_spec(
        config.model,
        tokenizer_vocab_size=tokenizer_vocab_size or 1,
        sequence_length_tokens=config.data.sequence_length_tokens,
    )
    unknown = {"vocab_size"} if config.model.vocab_size is None and tokenizer_vocab_size is None else set[str]()
    if theirs.positions == "rope" and config.model.max_positions_tokens is None:
        unknown.add("max_positions_tokens")  # with rotary positions, no parameter depends on it
    require_equal_models(theirs, ours, weights.location, ignored=unknown)


def _check_trained_size(largest: int, weights: WeightsDescription) -> None:
    """Refuse a tokenizer whose vocabulary would stay smaller than that of the weights."""
    if largest < weights.spec.vocab_size:
        raise ConfigError(
            f"Weights at {weights.location} have a vocabulary of {weights.spec.vocab_size:,}, "
            f"tokenizer.vocab_size={largest:,} is smaller",
            where="tokenizer.vocab_size",
            hint="leave the section tokenizer out: it is taken from the weights",
        )


def check_tokenizer(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Check that a tokenizer gives ids the same tokens as the tokenizer of the initial weights.

    Raises:
        ConfigError: The tokenizers differ.
        CheckpointError: The weights are damaged.
        DataError: Their tokenizer cannot be read.
    """
    weights = describe_weights(config)
    settings = {} if weights is None else weights.tokenizer
    if weights is None or all(getattr(config.tokenizer, key) == value for key, value in settings.items()):
        return
    theirs = _tokenizer_of(weights)
    conflict = None if theirs is None else theirs.first_conflict(tokenizer)
    if conflict is not None:
        raise ConfigError(
            f"Weights at {weights.location} were trained with another tokenizer: id {conflict} differs",
            where="tokenizer",
            hint="leave the section tokenizer out: it is taken from the weights; or set "
            + " ".join(f"tokenizer.{key}={value}" for key, value in settings.items()),
        )


def _tokenizer_of(weights: WeightsDescription) -> Tokenizer | None:
    """Load the tokenizer of weights; ``None`` for a repository without a comparable one."""
    if "revision" not in weights.tokenizer:
        return load_tokenizer(weights.tokenizer["path"])
    try:
        return load_huggingface(TokenizerConfig.model_validate(weights.tokenizer))
    except (ConfigError, DataError):
        return None


def require_equal_models(
    theirs: DecoderSpec, ours: DecoderSpec, location: str, *, ignored: set[str] | None = None
) -> None:
    """Check that weights are of the configured model.

    Raises:
        ConfigError: Some keys differ; the message lists all.
    """
    free = FREE_TO_CHANGE | (ignored or set[str]())
    stored, here = theirs.settings(), ours.settings()
    if theirs.vision is None:  # an image encoder may be added
        here = {key: value for key, value in here.items() if not key.startswith("vision.")}
        stored.pop("vision.num_layers")
    keys = [key for key in {**here, **stored} if key not in free and stored.get(key) != here.get(key)]
    if keys:
        listed = ", ".join(f"{key} = {stored.get(key)} (here {here.get(key)})" for key in keys)
        wanted = " ".join(f"model.{key}={write_inline(stored.get(key))}" for key in keys)
        raise ConfigError(
            f"Weights at {location} belong to a different model: {listed}", where=_KEY, hint=f"set {wanted}"
        )


def describe_weights(config: RunConfig) -> WeightsDescription | None:
    """Describe the initial weights of a configuration; ``None`` without any, or if they are in a store.

    Raises:
        ConfigError: There are no weights at that location.
        CheckpointError: The weights are damaged.
    """
    name = config.train.from_weights
    if name is None:
        return None
    if scheme_of(name) == "hf":
        repository, revision = _hub_place(name)
        folder, commit = download_repository(repository, revision, (CONFIG_NAME,), key=_KEY)
        tokenizer = {"kind": "huggingface", "path": repository, "revision": commit}
        return WeightsDescription(f"hf://{repository}@{commit}", _huggingface_spec(folder), tokenizer)
    if scheme_of(name) is not None:
        return None
    place = find_weights(name, config.run.directory)
    return _describe_directory(place, name)


def download_weights(location: str) -> Path:
    """Download a model from the hub; a cached download of the same commit is reused."""
    repository, revision = _hub_place(location)
    patterns = (CONFIG_NAME, "model*.safetensors", WEIGHTS_INDEX_FILE)
    return download_repository(repository, revision, patterns, key=_KEY)[0]


def find_weights(name: str, runs_directory: str) -> Path:
    """Return the local directory of a name: a path, or a run in ``runs_directory``.

    Raises:
        ConfigError: It does not exist.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path.absolute()
    try:
        return find_run(runs_directory, name).absolute()
    except ConfigError as error:
        raise ConfigError(
            f"No weights at {name!r}: {error.what}", where=_KEY,
            hint="give a run, a checkpoint directory, a directory with config.json and model.safetensors, or "
            "hf://OWNER/NAME",
        ) from error  # fmt: skip


def _hub_place(location: str) -> tuple[str, str | None]:
    place = hub_place(location)
    if place is None:
        raise ConfigError(
            f"{location} does not name a model of the hub", where=_KEY, hint="write hf://OWNER/NAME@REVISION"
        )
    return place


def _describe_directory(place: Path, name: str) -> WeightsDescription:
    if not (place / MANIFEST_NAME).exists() and not (place / CONFIG_NAME).exists():
        steps = step_directories(place)
        if not steps:
            raise ConfigError(
                "Directory is not a checkpoint, a run with a checkpoint, or a transformers model",
                where=str(place), hint="a run must have saved once",
            )  # fmt: skip
        # The run directory keeps its tokenizer even if all checkpoints are removed.
        kept = RunLayout(place).tokenizer
        return WeightsDescription(name, _checkpoint_spec(steps[max(steps)]), _tokenizer_settings(kept))
    spec = _checkpoint_spec(place) if (place / MANIFEST_NAME).exists() else None
    return WeightsDescription(name, spec or _huggingface_spec(place, with_weights=True), _tokenizer_settings(place))


def _checkpoint_spec(checkpoint: Path) -> DecoderSpec:
    """Return the model of a checkpoint, or of an export, which also has a manifest."""
    stored = read_manifest(checkpoint)["metadata"].get("spec")
    if stored is not None and "adapter" in stored:
        raise ConfigError(
            "Weights are an adapter without its base", where=str(checkpoint),
            hint="merge them with vorox export --to hf, and start from that directory",
        )  # fmt: skip
    if stored is None or stored.get("kind") == KIND:
        return _huggingface_spec(checkpoint, with_weights=True)
    spec = spec_from_json(stored)
    if not isinstance(spec, DecoderSpec):
        raise ConfigError(
            f"The weights are of {spec.summary()}, not of the native decoder", where=str(checkpoint),
            hint="continue that run with --resume",
        )  # fmt: skip
    return spec


def _huggingface_spec(place: Path, *, with_weights: bool = False) -> DecoderSpec:
    try:
        values = json.loads((place / CONFIG_NAME).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{CONFIG_NAME} cannot be read: {error}", where=str(place)) from error
    if with_weights:
        open_directory(place)  # checks headers and lengths of all files
    return decoder_spec(spec_from_huggingface(values), tokenizer_vocab_size=1, sequence_length_tokens=1)


def _tokenizer_settings(directory: Path) -> dict[str, str]:
    if not (directory / TOKENIZER_NAME).is_file():
        return {}
    return {"kind": "huggingface", "path": str(directory)}


def _adopted_settings(resolved: ResolvedConfig, weights: WeightsDescription) -> dict[str, Any]:
    """Return the settings of the weights that the configuration does not set.

    Raises:
        ConfigError: It sets conflicting ones.
    """
    family = None if _is_explicit(resolved, "model.family") else huggingface_family(weights.spec)
    filled: Mapping[str, Any] = {} if family is None else model_presets().families[family]
    adopted: dict[str, Any] = {}
    for key, value in weights.spec.settings().items():
        given = attrgetter(key)(resolved.config.model)
        if given == value and filled.get(key, value) == value:
            continue
        if key == "vision.num_layers" and not value:
            continue  # an image encoder may be added
        if key == "dropout_fraction" and resolved.config.loss.name == "dpo":
            continue  # it is off unless configured, so that model and reference differ by training only
        if not _is_explicit(resolved, f"model.{key}"):
            adopted[f"model.{key}"] = value
        elif given not in (None, value) and key not in FREE_TO_CHANGE:
            raise ConfigError(
                f"Weights at {weights.location} have model.{key}={write_inline(value)}, not {write_inline(given)}",
                where=resolved.origin(f"model.{key}"),
                hint=f"leave model.{key} out: architecture and tokenizer are taken from the weights",
            )
    if adopted and resolved.config.model.preset is not None:
        adopted["model.preset"] = None
    if family is not None:
        adopted["model.family"] = family
    section = [
        key for key in type(resolved.config.tokenizer).model_fields if _is_explicit(resolved, f"tokenizer.{key}")
    ]
    if not section:
        adopted |= {f"tokenizer.{key}": value for key, value in weights.tokenizer.items()}
        if weights.tokenizer and resolved.config.tokenizer.special_tokens:  # those for a newly trained tokenizer
            adopted["tokenizer.special_tokens"] = []
    longest, length = weights.spec.max_positions_tokens, "data.sequence_length_tokens"
    if resolved.config.data.sequence_length_tokens > longest and not _is_explicit(resolved, length):
        adopted[length] = longest
    return adopted


def _is_explicit(resolved: ResolvedConfig, key: str) -> bool:
    """Whether the user's file or command line sets a key, not a preset or default."""
    origin = resolved.origin(key)
    for filler in ("model.preset", "model.family"):
        if origin.startswith(f"{filler}="):
            return _is_explicit(resolved, filler)
    return not origin.startswith(("default", "preset "))
