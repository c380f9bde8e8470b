"""Synonyms of sections: ``data.settings`` and ``data.source`` of streaming trainers, ``training_config``.

```yaml
data:
  settings: {prefetch_size: 1000, shuffle_buffer: true, cache_dsn: "postgresql://USER:PASSWORD@HOST:5432/DATABASE"}
  source: {name: dolma, urls: ["s3://bucket/part1.txt"]}
```

These sections are removed from the tree, and the equivalent keys are set. Most of ``training_config`` are synonyms of
single settings; batch size, accumulation and switches are translated here. The connection string is held in memory only
(``core/redaction.py``): the resolved configuration has just ``log.metadata: postgres``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, cast
from urllib.parse import unquote, urlsplit

from vorox.core.config.layers.presets import source_presets
from vorox.core.config.layers.tree import ConfigTree, Origin
from vorox.core.config.schema_fields import alternatives_of
from vorox.core.config.yaml.reader import Json
from vorox.core.redaction import hold_secret, redact
from vorox.core.schema.source_formats import format_of_path

_SETTINGS: Final = ("prefetch_size", "shuffle_buffer", "cache_dsn")
_SOURCE: Final = ("name", "urls")
_TRAINING: Final = "training_config"
_BATCH: Final = "batch_size"
_ACCUMULATION: Final = "gradient_accumulation_steps"
_SWITCHES: Final[Mapping[str, tuple[str, Json, Json]]] = {
    "use_packed_cache": ("data.mode", "cached", "streaming"),
    "use_mixed_precision": ("precision.dtype", "fp16", "fp32"),
    "use_torch_compile": ("runtime.compile", True, False),
    "use_flash_attention": ("model.attention_kernel", "sdpa", "reference"),
}
"""Switch of ``training_config`` to a setting, with its values when on and off."""
_TRAINING_KEYS: Final = (_BATCH, _ACCUMULATION, *_SWITCHES)
_WEBHOOK_VARIABLE: Final = "VOROX_WEBHOOK"
_SHORTEST_PASSWORD = 8  # a shorter one may be an ordinary word, and would be redacted everywhere


def translate_sections(tree: ConfigTree) -> None:
    """Translate these sections, if present."""
    _translate_training(tree)
    settings, source = _take(tree, "data.settings", _SETTINGS), _take(tree, "data.source", _SOURCE)
    if source:
        _translate_source(tree, source)
    if "shuffle_buffer" in settings:
        _fill(tree, "data.shuffle", settings["shuffle_buffer"], "data.settings.shuffle_buffer")
    if "prefetch_size" in settings:
        _translate_prefetch(tree, settings["prefetch_size"])
    if "cache_dsn" in settings:
        _translate_dsn(tree, settings["cache_dsn"])
    _hold_webhook(tree)


def _translate_training(tree: ConfigTree) -> None:
    """Translate what ``training_config`` has beside synonyms of single settings."""
    origins = {name: tree.origin(f"{_TRAINING}.{name}") for name in _TRAINING_KEYS}
    found = _take(tree, _TRAINING, _TRAINING_KEYS)
    for name in found.keys() & _SWITCHES.keys():
        setting, on, off = _SWITCHES[name]
        if isinstance(found[name], bool):
            _set_unless_later(tree, setting, on if found[name] else off, origins[name])
        else:
            key = f"{_TRAINING}.{name}"
            tree.add_problem(f"{key} must be true or false", origins[name], (key,))
    sizes = {name: found[name] for name in (_BATCH, _ACCUMULATION) if name in found}
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            key = f"{_TRAINING}.{name}"
            tree.add_problem(f"{key} must be an integer, at least 1", origins[name], (key,))
            return
    if _BATCH in sizes:
        _set_unless_later(tree, "train.micro_batch_sequences", sizes[_BATCH], origins[_BATCH])
    rows = tree.get("train.micro_batch_sequences")
    if sizes and isinstance(rows, int):
        times = cast("int", sizes.get(_ACCUMULATION, 1))
        _set_unless_later(
            tree,
            "train.global_batch_sequences",
            rows * times,
            max((origins[name] for name in sizes), key=lambda origin: origin.layer),
        )


def _set_unless_later(tree: ConfigTree, key: str, value: Json, origin: Origin) -> None:
    if tree.origin(key).layer < origin.layer:
        tree.set_at(key, value, origin)


def _take(tree: ConfigTree, key: str, known: tuple[str, ...]) -> dict[str, Json]:
    """Remove and return a section; unknown keys in it are problems."""
    value = tree.get(key)
    if value is None:
        return {}
    origin = tree.origin(key)
    tree.reset(key)
    if not isinstance(value, dict):
        tree.add_problem(f"{key} must be a section with the keys {', '.join(known)}", origin, (key,))
        return {}
    for name in value.keys() - set(known):
        tree.add_problem(f"Unknown key {key}.{name}; known are {', '.join(known)}", origin, (f"{key}.{name}",))
    return {name: item for name, item in value.items() if name in known}


def _fill(tree: ConfigTree, key: str, value: Json, origin: str) -> None:
    if not tree.is_explicit(key):
        tree.set_default(key, value, origin)


def _translate_prefetch(tree: ConfigTree, samples: Json) -> None:
    """Convert the number of prefetched samples to whole batches."""
    batch = tree.get("train.global_batch_sequences")
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
        key = "data.settings.prefetch_size"
        tree.add_problem(f"{key} must be a number of samples, at least 1", tree.origin(key), (key,))
    elif isinstance(batch, int) and batch > 0:
        _fill(tree, "data.loader.prefetch_batches", -(-samples // batch), f"data.settings.prefetch_size={samples}")


def _translate_dsn(tree: ConfigTree, dsn: Json) -> None:
    key = "data.settings.cache_dsn"
    if not isinstance(dsn, str) or not dsn.startswith(("postgresql://", "postgres://")):
        what = f"{key} must be a connection string, postgresql://USER:PASSWORD@HOST:5432/DATABASE"
        tree.add_problem(what, tree.origin(key), (key,))
        return
    variable = str(tree.get("log.metadata_dsn_variable"))
    hold_secret(variable, dsn)
    password = unquote(urlsplit(dsn).password or "")
    if len(password) >= _SHORTEST_PASSWORD:
        hold_secret(f"password in {variable}", password)
    _fill(tree, "log.metadata", "postgres", key)


def _hold_webhook(tree: ConfigTree) -> None:
    """Keep the URL of ``log.webhook`` in memory, and name the variable that has to hold it when the run resumes."""
    key = "log.webhook"
    url, origin = tree.get(key), tree.origin(key)
    if url is None or (isinstance(url, str) and url.startswith("env:")):
        return
    if isinstance(url, str) and urlsplit(url).scheme in {"http", "https"} and urlsplit(url).hostname:
        hold_secret(_WEBHOOK_VARIABLE, url)
        tree.set_below(key, f"env:{_WEBHOOK_VARIABLE}", Origin(origin.layer, redact(origin.text)))
        return
    tree.reset(key)
    tree.add_problem(f"{key} must be an http(s) URL, or env:VARIABLE", origin, (key,))


def _translate_source(tree: ConfigTree, source: dict[str, Json]) -> None:
    key = "data.source"
    if tree.get("data.sources") is not None:
        tree.add_problem("data.source and data.sources both set the sources; keep one", tree.origin(key), (key,))
        return
    urls = source.get("urls")
    paths = [urls] if isinstance(urls, str) else urls if isinstance(urls, list) else []
    name = source.get("name")
    if not isinstance(name, str):
        name = "text"
    entry: dict[str, Json] = {"name": name}
    formats = {format_of_path(path) for path in paths if isinstance(path, str)}
    if len(formats) == 1 and None not in formats:
        entry |= {"format": cast("str", formats.pop()), "paths": list(paths)}
    elif name in source_presets():
        entry |= {"preset": name} | ({"paths": list(paths)} if paths else {})
    else:
        what = (
            "the files of data.source.urls are of different or unknown formats; write data.sources with the format "
            "of each" if paths else f"data.source.name={name} is not a named source; set data.source.urls"
        )  # fmt: skip
        tree.add_problem(what, tree.origin(key), (key,))
        entry["format"] = "python_stdlib"  # so that consequences are not reported as well
    tree.set_default("data.sources", [entry], key)
    if all(tree.get(length) is None for length in alternatives_of("train.num_steps")):
        tree.set_default("train.num_epochs", 1.0, "one epoch over data.source")
