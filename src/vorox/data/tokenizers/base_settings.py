"""What the directory of a tokenizer says besides ``tokenizer.json``: special tokens, template, generation settings.

A directory of transformers, or of a checkpoint, goes in; ``BaseSettings`` come out. They travel with the tokenizer, so
that checkpoints and exports keep what the base model had.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from vorox.core.errors import DataError
from vorox.core.files.json_reader import read_json

CONFIG_NAME = "tokenizer_config.json"
SPECIAL_NAME = "special_tokens_map.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"
_NAMED_TEMPLATES, _DEFAULT = "additional_chat_templates", "default"
GENERATION_NAME = "generation_config.json"
MODEL_NAME = "config.json"
_NOT_KEPT = {"tokenizer_class", "auto_map", "chat_template", "add_bos_token", "add_eos_token"}
_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, slots=True)
class BaseSettings:
    """The settings of a directory.

    Attributes:
        tokenizer: ``tokenizer_config.json``, without the class, whose place a tokenizer.json takes, and without the
            chat template; empty for a tokenizer that Vorox makes.
        generation: ``generation_config.json``; without one, the ids of special tokens in ``config.json``.
        model_ids: The ids of special tokens in ``config.json``.
        chat_template: The chat template; ``None`` without one.
        named_templates: Further chat templates by name, such as ``tool_use``, which transformers takes with tools.
    """

    tokenizer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    generation: Mapping[str, Any] = field(default_factory=dict[str, Any])
    model_ids: Mapping[str, Any] = field(default_factory=dict[str, Any])
    chat_template: str | None = None
    named_templates: Mapping[str, str] = field(default_factory=dict[str, str])

    def token(self, name: str) -> str | None:
        """Return a special token by its role, such as ``bos_token``; ``None`` without one."""
        value: Any = self.tokenizer.get(name)
        text: Any = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
        return text if isinstance(text, str) and text else None


def read_base_settings(directory: Path) -> BaseSettings:
    """Read the settings of a directory; missing files are empty.

    Raises:
        DataError: A file is not valid.
    """
    config, named = _read(directory / CONFIG_NAME), _read(directory / SPECIAL_NAME)
    settings = {**{key: value for key, value in named.items() if key.endswith("_token")}, **config}
    generation = _read(directory / GENERATION_NAME)
    try:
        model = _read(directory / MODEL_NAME)
    except DataError:  # not the config.json of a model
        model = {}
    nested: Any = model.get("text_config")  # a model of images and text
    values = {**(cast("dict[str, Any]", nested) if isinstance(nested, dict) else {}), **model}
    ids = {key: values[key] for key in _ID_KEYS if _is_ids(values.get(key))}
    wrong = [key for key in _ID_KEYS if generation.get(key) is not None and not _is_ids(generation[key])]
    if wrong:
        raise DataError(f"{wrong[0]} is neither an id nor a list of ids", where=str(directory / GENERATION_NAME))
    templates = _chat_templates(directory, config.get("chat_template"))
    return BaseSettings(
        tokenizer={key: value for key, value in settings.items() if key not in _NOT_KEPT},
        generation=generation or ids,
        model_ids=ids,
        chat_template=templates.pop(_DEFAULT, None),
        named_templates=templates,
    )


def conversion_hint(file: Path) -> str:
    """Return how a file that is no tokenizer.json becomes one."""
    if file.suffix not in {".model", ".spm"}:
        return "use a tokenizer.json: save the tokenizer with transformers' save_pretrained"
    convert = "from transformers import LlamaTokenizer as T; T.from_pretrained('tok').save_pretrained('tok')"
    return (
        f"it is a model of sentencepiece; convert it: mkdir tok && cp {shlex.quote(str(file))} tok/tokenizer.model && "
        f'pip install sentencepiece transformers && python -c "{convert}" and set tokenizer.kind=huggingface '
        "tokenizer.path=tok"
    )


def ids_of(value: Any) -> tuple[int, ...]:
    """Return the ids of a key of ``config.json`` or ``generation_config.json``: none, one or a list of them."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def chat_template_value(settings: BaseSettings) -> Any:
    """Return ``chat_template`` of ``tokenizer_config.json``: the template, or a list of several by name."""
    if not settings.named_templates:
        return settings.chat_template
    own = {} if settings.chat_template is None else {_DEFAULT: settings.chat_template}
    return [{"name": name, "template": text} for name, text in {**own, **settings.named_templates}.items()]


def _chat_templates(directory: Path, source: Any) -> dict[str, str]:
    file = directory / CHAT_TEMPLATE_NAME
    try:
        named = cast("list[dict[str, Any]]", source) if isinstance(source, list) else []
        found: dict[str, Any] = {entry["name"]: entry["template"] for entry in named} or {_DEFAULT: source}
        if file.is_file():
            found[_DEFAULT] = file.read_text(encoding="utf-8")
        for path in sorted((directory / _NAMED_TEMPLATES).glob("*.jinja")):
            found[path.stem] = path.read_text(encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError("The chat template of the tokenizer cannot be read", where=str(directory)) from error
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value: Any = read_json(file)
    except (OSError, ValueError) as error:
        raise DataError("The file is not valid JSON", where=str(file)) from error
    if not isinstance(value, dict):
        raise DataError("The file is not a JSON object", where=str(file))
    return cast("dict[str, Any]", value)


def _is_ids(value: Any) -> bool:
    values: list[Any] = list(cast("list[Any]", value)) if isinstance(value, list) else [value]
    return bool(values) and all(type(one) is int and one >= 0 for one in values)
