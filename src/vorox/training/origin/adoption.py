"""Adopt what initial weights decide of a configuration: architecture, tokenizer, positions, losses, measured text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from vorox.core.config.layers.pretrained import Pretrained
from vorox.core.config.layers.setting_dependencies import SOURCE_LISTS, dependencies
from vorox.core.config.layers.tree import ConfigTree
from vorox.core.config.yaml.writer import write_inline, write_overrides
from vorox.core.errors import ConfigError
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.models.decoder.spec import FREE_TO_CHANGE, DecoderSpec
from vorox.models.huggingface.families import huggingface_family
from vorox.models.huggingface.spec import KIND
from vorox.records.run_lookup import is_run
from vorox.training.checkpoints.materialized_cache import lasting_state
from vorox.training.origin.image_processor_source import FREE_KEYS, read_image_processor
from vorox.training.origin.model_origin import ModelOrigin, describe
from vorox.training.origin.naming import FROM_WEIGHTS, NAME_OR_PATH
from vorox.training.origin.text_measurement import measure_text, row_length

_LENGTH = "data.sequence_length_tokens"
_TRAINED_KINDS = ("bpe", "char")
_VOCABULARY = ("kind", "path", "vocab_size", "train_bytes", "end_of_text", "special_tokens")
"""Keys of ``tokenizer`` that decide a vocabulary which is trained on text."""


def adopt_origin(tree: ConfigTree, setting: str) -> Pretrained | None:
    """Set what the initial weights of a configuration decide, and measure the text that they are trained on.

    Args:
        tree: The configuration.
        setting: The one that names the weights.

    Raises:
        ConfigError: The user sets something else, or there are no weights.
        CheckpointError, DataError: As ``load_config``.
    """
    kind = tree.get("model.kind")
    if kind not in ("decoder", KIND):
        return None
    name, runs_directory = str(tree.get(setting)), str(tree.get("run.directory"))
    if setting == NAME_OR_PATH and is_run(Path(name.rpartition("@")[0])):  # else a repository at a revision
        name = str(lasting_state(name, runs_directory, setting) or name)
        tree.adopt(setting, name, tree.origin(setting).text)
    is_trained = setting == FROM_WEIGHTS or tree.get("model.pretrained") is True
    revision = tree.get("model.revision") if setting == NAME_OR_PATH else None
    origin = describe(
        name, revision if isinstance(revision, str) else None,
        key=setting, runs_directory=runs_directory, with_weights=is_trained,
    )  # fmt: skip
    label, notes = f"{setting}={name}", ()
    if setting == FROM_WEIGHTS and (kind == KIND or _needs_transformers(tree, origin)):
        if kind != KIND:
            notes = (_note(tree, origin),)
        _use_transformers(tree, origin, label)
        kind = KIND
    if kind == KIND:
        _adopt_transformers(tree, origin, label)
    elif origin.spec is not None:
        if origin.commit is not None:
            tree.adopt(FROM_WEIGHTS, origin.location, tree.origin(FROM_WEIGHTS).text)
        _adopt_architecture(tree, origin.spec, origin, label)
    if is_trained:
        notes = (*notes, *_adopt_losses(tree, origin, label))
    if origin.directory is not None:
        _adopt_tokenizer(tree, origin, label, is_trained=is_trained)
        _adopt_length(tree, origin, label)
    found = origin.pretrained(label=label, is_adapter=tree.get("adapter.kind") != "none", notes=notes)
    if not is_trained:
        return replace(found, is_trained=False)
    measured = measure_text(tree)
    is_known = origin.directory is not None  # in a store, the positions are not known before the download
    row_tokens = row_length(measured, found.max_positions_tokens) if is_known else None
    notes = (*found.notes, *measured.notes)
    return replace(found, row_tokens=row_tokens, train_tokens=measured.train_tokens, notes=notes)


def _needs_transformers(tree: ConfigTree, origin: ModelOrigin) -> bool:
    """Whether weights that ``train.from_weights`` names are trained with transformers.

    Raises:
        ConfigError: The user sets ``model.kind=decoder``, which does not compute them.
    """
    if origin.directory is None:
        return False
    is_native = origin.spec is not None and tree.get("adapter.kind") == "none"
    if is_native or not tree.is_set_by_user("model.kind"):
        return not is_native
    if origin.refusal is not None:
        raise ConfigError(
            origin.refusal.what, where=tree.origin("model.kind").text, hint=f"add model.kind={KIND}"
        ) from origin.refusal
    return False


def _note(tree: ConfigTree, origin: ModelOrigin) -> str:
    kind = tree.get("adapter.kind")
    if kind != "none":
        return f"Training {origin.location} with transformers (model.kind={KIND}), as adapter.kind={kind} needs"
    model_type = origin.values.get("model_type")
    return (
        f"Training {origin.location} ({model_type}) with transformers (model.kind={KIND}): "
        "the native decoder does not compute it"
    )


def _use_transformers(tree: ConfigTree, origin: ModelOrigin, label: str) -> None:
    """Make weights that ``train.from_weights`` names those of a transformers model."""
    assert origin.directory is not None
    if not origin.is_transformers:
        raise origin.refusal or ConfigError(
            "transformers has no architecture for these weights", where=origin.location,
            hint="train them without adapter, as the native decoder: adapter.kind=none model.kind=decoder",
        )  # fmt: skip
    pretrained = tree.origin("model.pretrained")
    if tree.get("model.pretrained") is False and pretrained.layer >= tree.origin(FROM_WEIGHTS).layer:
        raise ConfigError(
            f"model.pretrained=false contradicts {label}", where=pretrained.text, hint="remove one of them"
        )
    _drop_decoder_settings(tree, origin)
    tree.reset("model.pretrained")
    tree.reset(FROM_WEIGHTS)
    is_named = Path(origin.name).expanduser().absolute() == origin.directory
    place = lasting_state(origin.name, str(tree.get("run.directory")), FROM_WEIGHTS) or origin.directory
    tree.adopt("model.kind", KIND, label)
    tree.adopt(NAME_OR_PATH, origin.name if is_named or origin.commit else str(place), label)
    if not tree.is_set_by_user("backend"):
        tree.adopt("backend", "torch", label)


def _drop_decoder_settings(tree: ConfigTree, origin: ModelOrigin) -> None:
    """Remove what describes the native decoder, where the weights say the same or are named by a later layer.

    Raises:
        ConfigError: The user sets another architecture than that of the weights.
    """
    theirs = {} if origin.spec is None else origin.spec.settings()
    theirs.pop("vocab_size", None)  # transformers adds rows to an embedding
    _refuse_conflicts(tree, theirs, origin)
    layer = tree.origin(FROM_WEIGHTS).layer
    for dependency in dependencies():
        key = dependency.key
        if dependency.switch != "model.kind" or not key.startswith("model.") or dependency.holds(KIND):
            continue
        is_implied = key.removeprefix("model.") in theirs.keys() - FREE_TO_CHANGE
        is_implied = is_implied or (bool(theirs) and key in ("model.family", "model.preset"))
        if tree.is_set_by_user(key) and (is_implied or tree.origin(key).layer < layer):
            tree.reset(key)


def _adopt_transformers(tree: ConfigTree, origin: ModelOrigin, label: str) -> None:
    """Pin the commit of a transformers model, and adopt its image processor if a source has images."""
    if origin.commit is not None:
        tree.adopt(NAME_OR_PATH, origin.name, label)
        tree.adopt("model.revision", origin.commit, label)
    if origin.directory is None or not _has_images(tree):
        return
    for name, value in read_image_processor(origin.directory, origin.values).items():
        key = f"model.image_processor.{name}"
        if not tree.is_set_by_user(key):
            tree.adopt(key, value, label)
        elif name not in FREE_KEYS and not _same(tree.get(key), value):
            raise ConfigError(
                f"{key}={write_inline(tree.get(key))} differs from the model's {write_inline(value)}",
                where=tree.origin(key).text, hint="remove the setting",
            )  # fmt: skip


def _adopt_architecture(tree: ConfigTree, spec: DecoderSpec, origin: ModelOrigin, label: str) -> None:
    """Adopt the architecture of the native decoder.

    Raises:
        ConfigError: The user sets another one; the error lists all keys.
    """
    theirs = spec.settings()
    _refuse_conflicts(tree, theirs, origin)
    for name, value in theirs.items():
        key = f"model.{name}"
        if name == "vision.num_layers" and not value:
            continue  # an image encoder may be added
        if name == "dropout_fraction" and tree.get("loss.name") == "dpo":
            continue  # it is off unless configured, so that model and reference differ by training only
        if not tree.is_set_by_user(key):
            tree.adopt(key, value, label)
    family = huggingface_family(spec)
    if family is not None and not tree.is_set_by_user("model.family"):
        tree.adopt("model.family", family, label)
    if tree.get("model.preset") is not None and not tree.is_set_by_user("model.preset"):
        tree.adopt("model.preset", None, label)


def _adopt_losses(tree: ConfigTree, origin: ModelOrigin, label: str) -> Iterator[str]:
    """Adopt the losses beside the cross entropy that the model is trained with; of those of transformers, yield notes.

    A router without its own loss in ``config.json`` gets none, as in transformers.
    """
    is_transformers = tree.get("model.kind") == KIND
    values, place = origin.losses()
    for name, value in values.items():
        key = f"loss.{name}"
        if is_transformers and name != "z_loss_weight":
            continue  # transformers computes them
        if not tree.is_set_by_user(key):
            tree.adopt(key, value, f"{label}: {place}")
    note = origin.router_note() if is_transformers else None
    if note is not None:
        yield note


def _refuse_conflicts(tree: ConfigTree, theirs: Mapping[str, Any], origin: ModelOrigin) -> None:
    """Refuse keys of the section ``model`` that the user sets to something else than the weights have.

    Raises:
        ConfigError: There are such keys; the error lists all.
    """
    conflicts: dict[str, Any] = {}
    for name, value in theirs.items():
        key = f"model.{name}"
        is_added = name == "vision.num_layers" and not value  # an image encoder may be added
        if not tree.is_set_by_user(key) or name in FREE_TO_CHANGE or is_added:
            continue
        if tree.get(key) is not None and not _same(tree.get(key), value):
            conflicts[key] = value
    if conflicts:
        wanted = ", ".join(f"{key}={write_inline(value)}" for key, value in conflicts.items())
        ours = ", ".join(f"{key}={write_inline(tree.get(key))}" for key in conflicts)
        places = dict.fromkeys(tree.origin(key).text for key in conflicts)
        raise ConfigError(
            f"Weights at {origin.location} have {wanted}, not {ours}", where=", ".join(places),
            hint=f"remove what contradicts the weights, or add {write_overrides(conflicts)}",
        )  # fmt: skip


def _adopt_tokenizer(tree: ConfigTree, origin: ModelOrigin, label: str, *, is_trained: bool) -> None:
    """Adopt the tokenizer key by key, unless the user names another one.

    Raises:
        ConfigError: Trained weights have no tokenizer, and the user names none.
    """
    section = [f"tokenizer.{name}" for name in TokenizerConfig.model_fields]
    by_user = {key for key in section if tree.is_set_by_user(key)}
    theirs = {f"tokenizer.{name}": value for name, value in origin.tokenizer.items()}
    is_how_it_was_made = tree.get("tokenizer.kind") in _TRAINED_KINDS and all(
        _same(tree.get(f"tokenizer.{name}"), origin.trained_tokenizer.get(name))
        for name in _VOCABULARY
        if f"tokenizer.{name}" in by_user
    )
    if "tokenizer.kind" in by_user and theirs and is_how_it_was_made:  # the file that trained the weights
        by_user -= {f"tokenizer.{name}" for name in _VOCABULARY}
    if not by_user & {"tokenizer.kind", "tokenizer.path"}:
        if not theirs:
            if not is_trained:
                return
            raise ConfigError(
                "The model has no tokenizer", where=origin.location,
                hint="add tokenizer.kind=huggingface tokenizer.path=DIR, with the one that it was trained with",
            )  # fmt: skip
        for key in section:
            if key not in by_user:
                tree.reset(key)
        for key, value in theirs.items():
            if key not in by_user:
                tree.adopt(key, value, label)
        return
    if tree.get("tokenizer.kind") == origin.tokenizer.get("kind") and "tokenizer.path" not in by_user:
        for key, value in theirs.items():
            if key not in by_user:
                tree.adopt(key, value, label)
    elif "tokenizer.kind" not in by_user and origin.tokenizer.get("kind") == "huggingface":
        tree.adopt("tokenizer.kind", "huggingface", label)


def _adopt_length(tree: ConfigTree, origin: ModelOrigin, label: str) -> None:
    """Shorten rows to the positions of the model, unless the user sets their length.

    Raises:
        ConfigError: The user's rows are longer than a transformers model reads.
    """
    longest, length = origin.max_positions_tokens, tree.get(_LENGTH)
    if longest is None or not isinstance(length, int) or length <= longest:
        return
    if not tree.is_set_by_user(_LENGTH):
        tree.adopt(_LENGTH, longest, label)
    elif tree.get("model.kind") == KIND:
        raise ConfigError(
            f"{_LENGTH}={length:,} is more than the {longest:,} positions of {origin.location}",
            where=tree.origin(_LENGTH).text, hint=f"set {_LENGTH}={longest}",
        )  # fmt: skip


def _has_images(tree: ConfigTree) -> bool:
    """Whether a source of a run has images."""
    for key in SOURCE_LISTS:
        sources = tree.get(key)
        for source in sources if isinstance(sources, list) else ():
            if isinstance(source, dict) and source.get("images_field") is not None:
                return True
    return False


def _same(here: Any, theirs: Any) -> bool:
    """Compare values of a tree with values of a schema: lists are tuples there."""
    if isinstance(theirs, tuple):
        theirs = list(cast("tuple[Any, ...]", theirs))
    if theirs == [] or here == []:
        return not theirs and not here
    return here == theirs and isinstance(here, bool) == isinstance(theirs, bool)
