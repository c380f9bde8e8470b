"""The teacher of a distillation: find it or its stored logits, load it and identify it by its weights.

Checkpoints hold the fingerprint of its weights, not the weights. So every start reads the teacher again, and a resume
or replay with a different teacher is refused. Stored logits are identified by what they were computed with.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vorox.core.engine import Engine
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.schema import RunConfig
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.spec import ModelSpec
from vorox.training.origin.model_origin import find_origin
from vorox.training.origin.origin_checks import check_tokenizer, native_spec
from vorox.training.steps.teacher_logits import LogitsHeader, read_header
from vorox.training.weights.init_from import open_weights

MANIFEST_KEY = "teacher"
"""Key of a checkpoint's metadata: the fingerprint of the teacher's weights."""
_KEY = "train.distillation.teacher"
_LOGITS_KEY = "train.distillation.logits"


def load_teacher(config: RunConfig, spec: ModelSpec, tokenizer: Tokenizer, engine: Engine) -> None:
    """Load the teacher into a new engine, if the run has one.

    Raises:
        ConfigError: The teacher or its logits do not exist, or cannot teach this model.
        CheckpointError: Its weights are damaged.
    """
    header = find_stored_logits(config, spec, tokenizer)
    if header is not None:
        engine.set_stored_teacher(header.identity)
    found = find_teacher(config, spec, tokenizer)
    if found is not None:
        with open_weights(as_initial(config), found) as weights:
            engine.set_teacher(found, weights)


def find_teacher(
    config: RunConfig, spec: ModelSpec | None = None, tokenizer: Tokenizer | None = None
) -> DecoderSpec | None:
    """Find the teacher of a run, and check that it can teach, without reading its weights; ``None`` without one.

    Args:
        config: The run.
        spec: Its model; ``None`` if the vocabulary is not known yet.
        tokenizer: Its tokenizer; ``None`` if it is not known yet.

    Raises:
        ConfigError: The teacher does not exist, or has another vocabulary or too few positions.
        CheckpointError: It is damaged.
    """
    name = config.train.distillation.teacher
    if name is None:
        return None
    source = as_initial(config)
    try:
        described = find_origin(source)
        if described is not None and described.directory is not None:
            native_spec(described)
            if tokenizer is not None:
                check_tokenizer(source, tokenizer)
    except ConfigError as error:
        raise ConfigError(f"Teacher cannot be used: {error.what}", where=_KEY, hint=error.hint) from error
    if described is None or described.directory is None:
        raise ConfigError(f"Teacher {name} is in a store", where=_KEY, hint="copy it to a local directory")
    teacher = native_spec(described)
    if spec is not None and teacher.vocab_size != spec.vocab_size:
        raise ConfigError(
            f"Teacher has a vocabulary of {teacher.vocab_size:,}, the model one of {spec.vocab_size:,}",
            where=_KEY, hint=f"set model.vocab_size={teacher.vocab_size} and use the tokenizer of the teacher",
        )  # fmt: skip
    top_k = config.train.distillation.top_k
    if top_k is not None and top_k > teacher.vocab_size:
        raise ConfigError(
            f"Teacher has a vocabulary of {teacher.vocab_size:,}, fewer tokens than top_k={top_k:,}",
            where="train.distillation.top_k", hint="set train.distillation.top_k=null for all tokens",
        )  # fmt: skip
    if teacher.max_positions_tokens < config.data.sequence_length_tokens:
        raise ConfigError(
            f"Teacher has {teacher.max_positions_tokens:,} positions, rows have {config.data.sequence_length_tokens:,}",
            where=_KEY, hint=f"set data.sequence_length_tokens={teacher.max_positions_tokens}",
        )  # fmt: skip
    return teacher


def find_stored_logits(
    config: RunConfig, spec: ModelSpec | None = None, tokenizer: Tokenizer | None = None
) -> LogitsHeader | None:
    """Read what the stored logits of a run were computed with, and check that they fit; ``None`` without any.

    Args:
        config: The run.
        spec: Its model; ``None`` if the vocabulary is not known yet.
        tokenizer: Its tokenizer; ``None`` if it is not known yet.

    Raises:
        ConfigError: There are none, or vocabulary, tokenizer, row length or document mask differ.
    """
    directory, data = config.train.distillation.logits, config.data
    if directory is None:
        return None
    header = read_header(Path(directory))
    compared = [
        ("rows of {} positions", header.row_tokens, data.sequence_length_tokens),
        ("data.document_mask={}", str(header.document_mask).lower(), str(data.document_mask).lower()),
    ]
    if spec is not None:
        compared.append(("a vocabulary of {}", header.vocab_size, spec.vocab_size))
    if tokenizer is not None:
        compared.append(("tokenizer {}", header.tokenizer[:16], tokenizer.fingerprint[:16]))
    for what, stored, here in compared:
        if stored != here:
            raise ConfigError(
                f"Stored logits have {what.format(stored)}, the run has {what.format(here)}", where=_LOGITS_KEY,
                hint="write logits for this run: vorox data teacher-logits CONFIG --to NEW_DIRECTORY",
            )  # fmt: skip
    return header


def as_initial(config: RunConfig) -> RunConfig:
    """Return the configuration with the teacher as initial weights, as readers of weights expect."""
    train = config.train.model_copy(update={"from_weights": config.train.distillation.teacher})
    return config.model_copy(update={"train": train})


def describe_teacher(engine: Engine) -> dict[str, str]:
    """Return what a checkpoint records of the teacher; nothing without one."""
    fingerprint = engine.teacher_fingerprint
    return {MANIFEST_KEY: fingerprint} if fingerprint else {}


def check_teacher(engine: Engine, metadata: Mapping[str, Any]) -> None:
    """Check that the teacher is the one that a checkpoint was trained with.

    Raises:
        CheckpointError: It is not.
    """
    recorded, found = metadata.get(MANIFEST_KEY), describe_teacher(engine).get(MANIFEST_KEY)
    if recorded is not None and found is not None and recorded != found:
        raise CheckpointError(
            f"Teacher has changed: the run learned from weights {recorded[:16]}, but these are {found[:16]}",
            where=_KEY, hint="restore the teacher; name a checkpoint, not a run that still trains",
        )  # fmt: skip
