"""Presets that ship with Vorox: runs, models (``models.yaml``) and named sources (``sources.yaml``).

Data only, read with the reader of users' files. A run preset is an ordinary configuration with a name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vorox.core.config.yaml.reader import Json, read_mapping
from vorox.core.schema.model import ModelConfig

PRESETS_DIRECTORY = Path(__file__).resolve().parents[3] / "presets"


@dataclass(frozen=True, slots=True)
class ModelPresets:
    """Architecture defaults by family and sizes by name; every value is a key of ``model``.

    Each family sets every key that any family sets: those that its entry leaves out to the default of the schema.
    """

    families: Mapping[str, Mapping[str, Json]]
    sizes: Mapping[str, Mapping[str, Json]]


@functools.cache
def model_presets() -> ModelPresets:
    values = read_preset_file("models.yaml")
    families = _mappings(values["families"])
    keys = {key for entry in families.values() for key in entry}
    defaults = {key: ModelConfig.model_fields[key].default for key in ModelConfig.model_fields if key in keys}
    complete = {name: defaults | dict(entry) for name, entry in families.items()}
    return ModelPresets(complete, _mappings(values["sizes"]))


@functools.cache
def source_presets() -> Mapping[str, Mapping[str, Json]]:
    """Return the named sources; every value is a key of an entry of ``data.sources``."""
    return {name: entry for name, entry in read_preset_file("sources.yaml").items() if isinstance(entry, dict)}


def read_preset_file(name: str) -> dict[str, Json]:
    """Return the mapping in a file of the presets' directory."""
    document = read_mapping((PRESETS_DIRECTORY / name).read_text(encoding="utf-8"), name)
    assert not document.problems, document.problems
    return document.value


def _mappings(value: Json) -> dict[str, Mapping[str, Json]]:
    assert isinstance(value, dict)
    result: dict[str, Mapping[str, Json]] = {}
    for name, entry in value.items():
        assert isinstance(entry, dict)
        result[name] = entry
    return result


def run_presets() -> dict[str, Path]:
    """Return name and file of every run preset, sorted by name."""
    return {path.stem: path for path in sorted((PRESETS_DIRECTORY / "runs").glob("*.yaml"))}
