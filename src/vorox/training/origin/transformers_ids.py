"""The ids that transformers gives texts with the files of a directory, compared with those of its tokenizer.json.

transformers 5 builds the normaliser and the pre-tokenizer of many classes itself (``tokenizer_class``, or what it
chooses for a ``model_type``) and ignores those of the file. transformers 4, Vorox and llama.cpp use the file.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vorox.core.errors import ConfigError, DataError
from vorox.core.schema import RunConfig
from vorox.data.tokenizers.huggingface import find_files, load_huggingface
from vorox.data.tokenizers.library_guard import call_library
from vorox.data.tokenizers.tokenizer import TOKENIZER_NAME, Tokenizer
from vorox.models.huggingface.config import CONFIG_NAME
from vorox.training.origin.model_origin import find_origin

TEXTS = (
    "The order of the data is arithmetic, and a resumed run is bit for bit the run it would have been.\n",
    "def total(values):\n    return sum(value for value in values if value > 0)\n",
    "Größe, naïveté, Ελλάδα, 日本語; 3.14159 < 2**10 — tabs\tand  double  spaces.\n",
    "It's 1984: 12345678 isn't I'LL…\r\n\r\n\n  \n snake_case CamelCase !!! 100%",
)
"""Words, code, other scripts, and what pre-tokenizers split differently: numbers, contractions, white space."""


@dataclass(frozen=True, slots=True)
class OtherIds:
    """Texts whose ids differ.

    Attributes:
        class_name: The class that transformers chose.
        texts: The texts.
    """

    class_name: str
    texts: tuple[str, ...]


def find_other_ids(directory: Path, tokenizer: Tokenizer, texts: Sequence[str] = TEXTS) -> OtherIds | None:
    """Return the texts to which transformers gives other ids than a tokenizer, with the files of its directory.

    ``None`` if there are none, or if transformers is not installed or cannot load them.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    transformers: Any = importlib.import_module("transformers")
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )

        def differ(text: str) -> bool:
            return list(theirs(text, add_special_tokens=False)["input_ids"]) != tokenizer.encode(text).tolist()

        found = call_library(lambda: tuple(filter(differ, texts)), sum(map(len, texts)), is_bounded=True)
    except Exception:  # transformers' loaders raise many types, also for files that the model does not need
        return None
    finally:
        transformers.logging.set_verbosity(verbosity)
    return OtherIds(type(theirs).__name__, found) if found else None


def warn_of_other_ids(config: RunConfig) -> str | None:
    """Return what to know about pretrained weights whose tokenizer transformers reads otherwise; ``None`` if nothing.

    Raises:
        ConfigError, CheckpointError, DataError: As ``find_origin``.
    """
    settings = config.tokenizer
    origin = find_origin(config) if settings.kind == "huggingface" else None
    if origin is None or not origin.is_transformers or settings.path is None:
        return None
    try:
        directory = find_files(settings)
        if not (directory / TOKENIZER_NAME).is_file():  # transformers converts it, with its class
            return None
        tokenizer = load_huggingface(settings)
    except (ConfigError, DataError):
        return None  # reported where the run needs it
    found = find_other_ids(directory, tokenizer)
    if found is None:
        return None
    save = f"T.from_pretrained({settings.path!r}).save_pretrained('tok')"
    text = (
        f"transformers loads the tokenizer of {settings.path} as {found.class_name}, which gives {len(found.texts)} of "
        f"{len(TEXTS)} sample texts other ids than its tokenizer.json. This run uses tokenizer.json, as transformers 4 "
        f"and llama.cpp do. If the weights were trained with the ids of {found.class_name}: "
        f'python -c "from transformers import AutoTokenizer as T; {save}" and add tokenizer.path=tok'
    )
    with tempfile.TemporaryDirectory() as temporary:
        export = Path(temporary)
        for file, content in {**tokenizer.files(), CONFIG_NAME: json.dumps(origin.values).encode()}.items():
            (export / file).write_bytes(content)
        if find_other_ids(export, tokenizer) is None:
            return text
    return f"{text}. {how_to_load(found.class_name)}"


def how_to_load(class_name: str) -> str:
    """Return how to load an export for whose ``model_type`` transformers chooses a class that gives other ids."""
    return (
        f"AutoTokenizer of transformers 5 chooses {class_name} for this model_type: load exports with "
        "transformers.PreTrainedTokenizerFast.from_pretrained(DIRECTORY)"
    )
