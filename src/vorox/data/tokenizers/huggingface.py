"""Hugging Face tokenizers, from a directory or from a hub repository at a pinned revision.

A path or name goes in; a ``Tokenizer`` comes out. A ``tokenizer.json`` is used unchanged; without one, transformers
converts the tokenizer's files. Repository code is never run. Invariant: a revision is resolved to a commit first, and
all files are read at that commit, so that a concurrent push cannot mix two tokenizers.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vorox.core.errors import ConfigError, DataError
from vorox.core.platform.installation import install_command
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.data.tokenizers.base_settings import conversion_hint, read_base_settings
from vorox.data.tokenizers.tokenizer import END_OF_TEXT, TOKENIZER_NAME, Tokenizer

TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Globs of the files of a repository without its weights."""
_HUB = re.compile(r"hf://(?:models/)?(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^@]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def load_huggingface(config: TokenizerConfig) -> Tokenizer:
    """Load the tokenizer of ``tokenizer.kind: huggingface``.

    Raises:
        ConfigError: The path is neither a directory nor a repository name, a revision is set for a directory, or a
            package is missing.
        DataError: The repository or revision does not exist, has no tokenizer, or cannot be reached.
    """
    directory, name = find_files(config), str(config.path)
    file = directory / TOKENIZER_NAME
    text = file.read_text(encoding="utf-8") if file.is_file() else _convert(directory, name)
    settings = read_base_settings(directory)
    end_of_text = config.end_of_text or settings.token("eos_token") or END_OF_TEXT
    return Tokenizer(text, end_of_text, where=name, settings=settings)


def find_files(config: TokenizerConfig) -> Path:
    """Return the local directory of ``tokenizer.path``, downloaded if it is a repository. Errors as above."""
    assert config.path is not None
    directory = Path(config.path).expanduser()
    if directory.is_dir():
        if config.revision is not None:
            raise ConfigError(
                "A directory has no revisions",
                where="tokenizer.revision",
                hint="remove the setting, or name a repository",
            )
    elif directory.is_file():
        raise ConfigError(
            f"{config.path} is a file, not a directory", where="tokenizer.path",
            hint="set tokenizer.kind=file" if directory.suffix == ".json" else conversion_hint(directory),
        )  # fmt: skip
    elif re.fullmatch(r"[\w.-]+(/[\w.-]+)?", config.path):
        directory, _ = download_repository(config.path, config.revision, TOKENIZER_FILES, key="tokenizer.path")
    else:
        raise ConfigError(
            f"{config.path!r} is neither a directory nor the name of a repository", where="tokenizer.path",
            hint="set it to a directory with a tokenizer.json, or to OWNER/NAME",
        )  # fmt: skip
    return directory


def download_repository(name: str, revision: str | None, patterns: Sequence[str], *, key: str) -> tuple[Path, str]:
    """Download files of a hub model at one commit; files in the hub's cache are not downloaded again.

    Args:
        name: ``OWNER/NAME``.
        revision: Commit, tag or branch; ``None`` for the newest commit.
        patterns: Globs of file names.
        key: The setting that names the repository.

    Returns:
        The directory and the commit.

    Raises:
        ConfigError: ``huggingface_hub`` is not installed.
        DataError: The repository or revision does not exist or cannot be reached.
    """
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        errors: Any = importlib.import_module("huggingface_hub.errors")
    except ImportError as error:
        raise ConfigError(
            f"The repository {name} needs huggingface_hub, which is not installed", where=key,
            hint=f"{install_command('hf')}; no directory has this name",
        ) from error  # fmt: skip
    endpoint = os.environ.get("HF_ENDPOINT")
    location = f"{name}{f' at {revision}' if revision else ''}"
    try:
        if revision is None or not _COMMIT.fullmatch(revision):
            commit = str(hub.HfApi(endpoint=endpoint).model_info(name, revision=revision).sha)
        else:
            commit = revision
        folder = hub.snapshot_download(name, revision=commit, allow_patterns=list(patterns), endpoint=endpoint)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise DataError(
            f"The repository or revision does not exist on the hub, or access is denied: {_line(error)}",
            where=location,
            hint=f"check {key} and the revision; a private or gated one needs the HF_TOKEN of an account with access",
        ) from error  # fmt: skip
    except (
        Exception
    ) as error:  # the HTTP library, and so the exception type, differs between versions of huggingface_hub
        raise DataError(
            f"{key} cannot be downloaded from the hub: {_line(error)}", where=location,
            hint="check the network and HF_ENDPOINT; with a commit as tokenizer.revision or @REVISION, a cached "
            "copy is used offline",
        ) from error  # fmt: skip
    return Path(folder), commit


def hub_place(location: str) -> tuple[str, str | None] | None:
    """Return name and revision of ``hf://OWNER/NAME@REVISION``; ``None`` for anything else."""
    match = _HUB.fullmatch(location)
    return None if match is None else (match["name"], match["revision"])


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _convert(directory: Path, name: str) -> str:
    """Convert the files of a tokenizer to tokenizer.json with transformers."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            "No tokenizer.json was found, and converting the other files needs transformers, which is not installed",
            where=name, hint=f"{install_command('hf')}, or save the tokenizer with a tokenizer.json",
        ) from error  # fmt: skip
    try:
        loaded: Any = transformers.AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers' converters raise many types
        raise DataError(
            f"No tokenizer.json was found, and transformers cannot convert the other files: {_line(error)}",
            where=name, hint="use a repository or directory with a tokenizer.json",
        ) from error  # fmt: skip
    backend: Any = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise DataError(
            f"The tokenizer ({type(loaded).__name__}) is Python code that tokenizer.json cannot express",
            where=name, hint="for byte-level models use tokenizer.kind=byte, otherwise a model with a tokenizer.json",
        )  # fmt: skip
    return backend.to_str()
