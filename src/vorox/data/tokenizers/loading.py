"""Loading tokenizers from disk, from user functions, and training them from text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from vorox.core.errors import ConfigError, DataError, VoroxError
from vorox.core.schema.model import ModelConfig
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.core.user_code.extensions import load_function
from vorox.data.tokenizers.base_settings import CONFIG_NAME, conversion_hint, read_base_settings
from vorox.data.tokenizers.token_ids import IDS_NAME, load_token_ids
from vorox.data.tokenizers.tokenizer import END_OF_TEXT, TOKENIZER_NAME, Tokenizer, special_token
from vorox.data.tokenizers.tokenizer_json import byte_alphabet


def load(path: Path | str, *, end_of_text: str | None = None) -> Tokenizer:
    """Read a ``tokenizer.json``, or the directory that holds one.

    Args:
        path: File or directory.
        end_of_text: Token after every document; added if the vocabulary lacks it. ``None`` for the ``eos_token`` of
            the ``tokenizer_config.json`` beside it.

    Raises:
        DataError: The tokenizer is missing or unreadable.
    """
    path = Path(path).expanduser()
    if (path / IDS_NAME).is_file():
        return load_token_ids(path / IDS_NAME)
    file = path / TOKENIZER_NAME if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"Cannot read the tokenizer: {error.strerror}", where=str(error.filename or file),
            hint="use a tokenizer.json or a directory with one",
        ) from error  # fmt: skip
    except ValueError as error:
        raise DataError("The tokenizer's files are not valid", where=str(file), hint=conversion_hint(file)) from error
    settings = read_base_settings(file.parent)
    end_of_text = end_of_text or settings.token("eos_token")
    if end_of_text is None:
        raise DataError(
            "Cannot read the tokenizer: it names no end-of-text token", where=str(file.parent / CONFIG_NAME),
            hint=f"add eos_token to {CONFIG_NAME}, or set tokenizer.end_of_text",
        )  # fmt: skip
    return Tokenizer(text, end_of_text, where=str(file), settings=settings)


def load_from_function(config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer of a user function: a ``tokenizers.Tokenizer``, or the text of a ``tokenizer.json``.

    The fingerprint covers the resulting tokenizer.json, so a changed function is noticed.

    Raises:
        ConfigError: The function cannot be imported, fails, or returns something else.
    """
    function = load_function(config.kind, kind="tokenizer", where="tokenizer.kind")
    try:
        library = function(config.path)
    except VoroxError:
        raise
    except Exception as error:
        raise ConfigError(
            f"Tokenizer function {config.kind} failed: {type(error).__name__}: {error}", where="tokenizer.kind",
            hint="it is called with tokenizer.path, which is None unless set",
        ) from error  # fmt: skip
    text = library if isinstance(library, str) else library.to_str() if hasattr(library, "to_str") else None
    if text is None:
        raise ConfigError(
            f"Tokenizer function {config.kind} returned a {type(library).__name__}", where="tokenizer.kind",
            hint="return a tokenizers.Tokenizer, or the text of a tokenizer.json",
        )  # fmt: skip
    return Tokenizer(text, config.end_of_text or END_OF_TEXT, where="tokenizer.kind")


def train(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Make the tokenizer of a configuration; only ``bpe`` and ``char`` read the texts.

    Raises:
        ConfigError: The settings conflict.
        DataError: The file of ``kind: file`` is missing or corrupt.
    """
    if (config.path is not None) != (config.kind == "file"):
        raise ConfigError(
            f"Tokenizer kind {config.kind} {'needs a path' if config.kind == 'file' else 'takes no path'}",
            where="tokenizer.path", hint="kind: file reads a tokenizer.json; the other kinds make one",
        )  # fmt: skip
    end_of_text = config.end_of_text or END_OF_TEXT
    if config.kind == "file":
        assert config.path is not None
        return load(config.path, end_of_text=end_of_text)
    if config.kind == "char":
        library = _character_level(sorted(set[str]().union(*texts)), end_of_text)
    else:
        library = _byte_level(end_of_text, words=config.kind == "bpe")
        if config.kind == "bpe":
            _train_merges(library, config, end_of_text, texts)
    return Tokenizer(library.to_str(), end_of_text, where="tokenizer.end_of_text")


def _byte_level(end_of_text: str, *, words: bool) -> Any:
    vocabulary = {} if words else byte_alphabet()
    library: Any = LibraryTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    library.decoder = decoders.ByteLevel()
    if not words:
        library.add_special_tokens([special_token(end_of_text)])
    return library


def _character_level(characters: list[str], end_of_text: str) -> Any:
    if not characters:
        raise DataError("A character vocabulary needs text, but the sources have none", where="tokenizer.kind")
    library: Any = LibraryTokenizer(models.BPE(vocab={text: index for index, text in enumerate(characters)}, merges=[]))
    library.decoder = decoders.Fuse()
    library.add_special_tokens([special_token(end_of_text)])
    return library


def _train_merges(library: Any, config: TokenizerConfig, end_of_text: str, texts: Iterable[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=2,
        special_tokens=[special_token(end_of_text)],
        initial_alphabet=sorted(byte_alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)


def planned_vocab_size(tokenizer: TokenizerConfig, model: ModelConfig) -> int:
    """Return the vocabulary of the tokenizer, or of the model if the tokenizer's needs the text or a network.

    Raises:
        ConfigError: It is not known in advance.
    """
    if tokenizer.kind in {"bpe", "none"}:
        return tokenizer.vocab_size
    if tokenizer.kind == "byte":
        return 257
    if tokenizer.kind == "file" and tokenizer.path is not None and Path(tokenizer.path).exists():
        return load(tokenizer.path, end_of_text=tokenizer.end_of_text).vocab_size
    if model.vocab_size is None:
        raise ConfigError(
            "The vocabulary of the tokenizer is not known in advance", where="model.vocab_size",
            hint="add model.vocab_size=N",
        )  # fmt: skip
    return model.vocab_size
