"""The tokenizer of a configuration, and the store of trained tokenizers beside the caches.

A configuration and sources go in; a tokenizer comes out: loaded, trained, or found in the store under the digest of
everything that its training depends on. Invariant: a stored tokenizer is valid if its ``IDENTITY.json``, written last,
matches its files; a corrupt one is an error, never a silently different tokenizer.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from vorox.core.config.config_for_text import CHATML_TOKENS
from vorox.core.errors import ConfigError, DataError
from vorox.core.files.atomic import canonical_json, make_directory, pretty_json, write_file
from vorox.core.files.file_holder import FileLock
from vorox.core.files.json_reader import read_json
from vorox.core.schema.data import DataConfig
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.core.user_code.extensions import is_extension
from vorox.data.chat.template import configured_source
from vorox.data.documents import Document, UnreadableRecord
from vorox.data.text.holdout import SPLITS
from vorox.data.text.sources import Source
from vorox.data.text.unit_reader import read_units
from vorox.data.text.unit_splitter import split_into_units
from vorox.data.tokenizers.huggingface import load_huggingface
from vorox.data.tokenizers.loading import load, load_from_function, train
from vorox.data.tokenizers.tiktoken_conversion import load_tiktoken
from vorox.data.tokenizers.token_ids import token_ids
from vorox.data.tokenizers.tokenizer import END_OF_TEXT, TOKENIZER_NAME, Tokenizer
from vorox.data.tokenizers.training_sample import training_sample

IDENTITY_NAME = "IDENTITY.json"
_RECORDED_KINDS = ("bpe", "char", "file", "huggingface", "tiktoken")
"""Kinds whose tokenizer depends on files that may change."""
TrainingProgress = Callable[[int, int], None]
"""Called with (bytes of text read, bytes to read)."""


def resolve_tokenizer(
    config: TokenizerConfig,
    data: DataConfig,
    sources: Sequence[Source],
    weights: Sequence[Fraction],
    *,
    validation: Sequence[Source] = (),
    root: Path,
    build: bool,
    on_progress: TrainingProgress,
) -> Tokenizer:
    """Return the tokenizer of a configuration; one that is trained on text comes from the store.

    Args:
        config: The section ``tokenizer``.
        data: The section ``data``, for the size of units.
        sources: The listed sources with their holdout rules.
        weights: Their mixture weights.
        validation: Sources for validation only; a character vocabulary covers them too.
        root: Root of the caches.
        build: Train the tokenizer if the store lacks it.
        on_progress: Called while text is read.

    Raises:
        ConfigError: The settings conflict, or there is too little text to train on.
        DataError: The store lacks the tokenizer and ``build`` is false, or the stored one is corrupt.
    """
    return configured_untrained(config) or _configured(
        _load_or_train(config, data, sources, weights, validation, root, build, on_progress), config
    )


def stored_with_same_settings(
    config: TokenizerConfig, data: DataConfig, sources: Sequence[Source], weights: Sequence[Fraction], root: Path
) -> Iterator[tuple[Tokenizer, bool]]:
    """Yield the stored tokenizers that were trained with the same settings, and whether on exactly these files.

    Arguments as above. A damaged entry is skipped; that of exactly these files is reported when it is loaded.
    """

    def without_files(trained_on: dict[str, Any]) -> dict[str, Any]:
        return {**trained_on, "sources": [{**source, "files": ""} for source in trained_on["sources"]]}

    exact = _identity(config, data, sources, weights)
    wanted = without_files(exact["trained_on"])
    for path in sorted((root / "tokenizers").glob(f"*/{IDENTITY_NAME}")):
        try:
            if without_files(read_json(path)["trained_on"]) != wanted:
                continue
            tokenizer = _load(path.parent, config)
        except (DataError, OSError, ValueError, KeyError, TypeError):
            continue
        yield _configured(tokenizer, config), path.parent.name == exact["key"]


def load_run_tokenizer(directory: Path, config: TokenizerConfig) -> Tokenizer | None:
    """Return the tokenizer that a run has recorded; ``None`` if it has none, or makes it from its settings alone.

    A run keeps its own when the sources change that it was trained on, or when the directory or repository changes
    that it came from, because its rows are tokenized with it.

    Args:
        directory: The run's tokenizer directory.
        config: The section ``tokenizer``.

    Raises:
        DataError: The tokenizer is corrupt.
    """
    if config.kind not in _RECORDED_KINDS or not (directory / TOKENIZER_NAME).exists():
        return None
    return _configured(load(directory, end_of_text=config.end_of_text), config)


def configured_untrained(config: TokenizerConfig) -> Tokenizer | None:
    """Return the tokenizer of a configuration if it needs no training. Errors as of ``load_untrained``."""
    tokenizer = load_untrained(config)
    return None if tokenizer is None else _configured(tokenizer, config)


def _configured(tokenizer: Tokenizer, config: TokenizerConfig) -> Tokenizer:
    tokenizer = tokenizer.with_special_tokens(config.special_tokens)
    return tokenizer.with_fast_path() if config.fast_path == "auto" else tokenizer


def with_chat_template(tokenizer: Tokenizer, config: TokenizerConfig) -> Tokenizer:
    """Return a tokenizer with the configured chat template: by default its own, else chatml.

    Raises:
        ConfigError: The template does not exist or has an error.
    """
    if config.chat_template is not None or tokenizer.chat_template is None:
        source = configured_source(
            config.chat_template or "chatml", tokenizer.start_of_chat,
            has_turn_end=tokenizer.special_id(CHATML_TOKENS[1]) is not None,
        )  # fmt: skip
        tokenizer = tokenizer.with_chat_template(source)
    assert tokenizer.chat_template is not None
    try:
        tokenizer.chat_template.check_syntax()
    except UnreadableRecord as error:
        raise ConfigError(
            f"The chat template cannot be compiled: {error}", where="tokenizer.chat_template",
            hint="set another template",
        ) from error  # fmt: skip
    return tokenizer


def load_untrained(config: TokenizerConfig) -> Tokenizer | None:
    """Load a tokenizer that needs no training; ``None`` for ``bpe`` and ``char``.

    Raises:
        ConfigError: The settings conflict, or a package is missing.
        DataError: The tokenizer is missing, corrupt, or cannot be downloaded.
    """
    if config.kind in {"huggingface", "tiktoken"} and config.path is None:
        raise ConfigError(
            f"Tokenizer kind {config.kind} needs a path", where="tokenizer.path",
            hint="set a directory or OWNER/NAME for huggingface; an encoding, .tiktoken file or vocab.bpe for tiktoken",
        )  # fmt: skip
    if config.kind == "huggingface":
        return load_huggingface(config)
    if config.kind == "tiktoken":
        return load_tiktoken(config)
    if config.kind == "none":
        return token_ids(config)
    if is_extension(config.kind):
        return load_from_function(config)
    return train(config, ()) if config.kind in {"byte", "file"} else None


def _load_or_train(
    config: TokenizerConfig,
    data: DataConfig,
    sources: Sequence[Source],
    weights: Sequence[Fraction],
    validation: Sequence[Source],
    root: Path,
    build: bool,
    on_progress: TrainingProgress,
) -> Tokenizer:
    read = [*sources, *validation] if config.kind == "char" else sources
    identity = _identity(config, data, read, weights)
    directory = root / "tokenizers" / identity["key"]
    if not (directory / IDENTITY_NAME).exists():
        if not build:
            raise DataError(
                "The tokenizer has not been trained yet", where=str(directory), hint="run `vorox data build` first"
            )
        try:
            make_directory(root / "locks")
            with FileLock(root / "locks" / f"tokenizer-{identity['key']}.lock", purpose="the tokenizer"):
                if not (directory / IDENTITY_NAME).exists():
                    _train(config, data, read, weights, directory, identity, on_progress)
        except OSError as error:
            raise DataError(
                f"The tokenizer cannot be stored: {error.strerror or error}", where=str(error.filename or directory),
                hint="free disk space and allow writing, or set data.cache.directory to another directory",
            ) from error  # fmt: skip
    return _load(directory, config)


def _identity(
    config: TokenizerConfig, data: DataConfig, sources: Sequence[Source], weights: Sequence[Fraction]
) -> dict[str, Any]:
    """Return everything that the training depends on, and its digest, which names the directory."""
    body: dict[str, Any] = {
        "format": "tokenizer-store/1",
        "kind": config.kind,
        "end_of_text": config.end_of_text or END_OF_TEXT,
        "sources": [{**source.definition, "files": source.digest} for source in sources],
    }
    if config.kind == "bpe":
        body |= {
            "vocab_size": config.vocab_size,
            "train_bytes": config.train_bytes,
            "weights": [str(weight) for weight in weights],
            "held_out": [[source.holdout.split, source.holdout.held_out_fraction] for source in sources],
            "unit_bytes": data.cache.unit_bytes,
        }
    return {"key": hashlib.sha256(canonical_json(body)).hexdigest()[:16], "trained_on": body}


def _train(
    config: TokenizerConfig,
    data: DataConfig,
    sources: Sequence[Source],
    weights: Sequence[Fraction],
    directory: Path,
    identity: dict[str, Any],
    on_progress: TrainingProgress,
) -> None:
    if config.kind == "char":
        texts = _all_texts(sources, data, on_progress)
    else:
        texts = training_sample(
            sources, weights,
            unit_bytes=data.cache.unit_bytes, budget_bytes=config.train_bytes, on_progress=on_progress,
        )  # fmt: skip
    tokenizer = train(config, texts)
    shutil.rmtree(directory, ignore_errors=True)  # remains of a killed process
    tokenizer.save(directory)
    write_file(directory / IDENTITY_NAME, pretty_json({**identity, "fingerprint": tokenizer.fingerprint}))


def _all_texts(sources: Sequence[Source], data: DataConfig, on_progress: TrainingProgress) -> Iterator[str]:
    """Yield every document of both splits: a character vocabulary must cover all of them."""
    done, total = 0, sum(source.size_bytes for source in sources)
    for source in sources:
        for split in SPLITS:
            units = split_into_units(source, split, source.holdout, data.cache.unit_bytes)
            for record in read_units(source, units, split, source.holdout):
                done += record.byte_length
                if isinstance(record, Document):
                    yield record.text
                on_progress(done, total)


def _load(directory: Path, config: TokenizerConfig) -> Tokenizer:
    tokenizer = load(directory, end_of_text=config.end_of_text or END_OF_TEXT)
    try:
        recorded = read_json(directory / IDENTITY_NAME)["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        recorded = ""
    if recorded != tokenizer.fingerprint:
        raise DataError(
            "The stored tokenizer does not match its fingerprint", where=str(directory),
            hint="remove that directory, and the next build trains the same tokenizer again",
        )  # fmt: skip
    return tokenizer
