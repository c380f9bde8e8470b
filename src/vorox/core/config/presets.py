"""What ships with Vorox: run presets (``presets/runs/*.yaml``) and architectures and sizes (``presets/models.yaml``).

Pure data, read with the same reader as a user's file. A preset is an ordinary configuration that has a name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vorox.core.config.yaml_reader import Json, read_mapping

PRESETS_DIRECTORY = Path(__file__).resolve().parents[2] / "presets"


@dataclass(frozen=True, slots=True)
class ModelPresets:
    """Architecture defaults by family, and sizes by name; every value is a key of ``model``."""

    families: Mapping[str, Mapping[str, Json]]
    sizes: Mapping[str, Mapping[str, Json]]


@functools.cache
def model_presets() -> ModelPresets:
    path = PRESETS_DIRECTORY / "models.yaml"
    document = read_mapping(path.read_text(encoding="utf-8"), path.name)
    assert not document.problems, document.problems
    return ModelPresets(_mappings(document.value["families"]), _mappings(document.value["sizes"]))


def _mappings(value: Json) -> dict[str, Mapping[str, Json]]:
    assert isinstance(value, dict)
    result: dict[str, Mapping[str, Json]] = {}
    for name, entry in value.items():
        assert isinstance(entry, dict)
        result[name] = entry
    return result


def run_presets() -> dict[str, Path]:
    """Name and file of every run preset, sorted by name."""
    return {path.stem: path for path in sorted((PRESETS_DIRECTORY / "runs").glob("*.yaml"))}
