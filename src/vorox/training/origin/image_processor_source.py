"""Read the image processor of a transformers model.

In: its files. Out: settings of ``model.image_processor``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.files.json_reader import read_json
from vorox.core.schema.image_processor import ImageProcessorConfig
from vorox.models.huggingface.config import FIXED_IMAGE_VALUES, PREPROCESSOR_NAME
from vorox.models.huggingface.spec import IMAGE_MODELS

PROCESSOR_NAME = "processor_config.json"
"""Where transformers 5 keeps all processors of a model; ``preprocessor_config.json`` is its older form."""

FREE_KEYS = frozenset({"min_pixels", "max_pixels"})
"""Settings that may differ from those of the model."""


def read_image_processor(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model's image processor.

    Args:
        folder: Its directory.
        values: Content of its ``config.json``.

    Raises:
        ConfigError: The model reads text only, or has an image processor that is not supported.
        CheckpointError: A file is damaged.
    """
    if values.get("model_type") not in IMAGE_MODELS:
        raise ConfigError(
            f"A source has images, but a {values.get('model_type')} model reads text only",
            where="model.name_or_path, data.sources.images_field",
            hint=f"use a model of {', '.join(sorted(IMAGE_MODELS))}, or remove images_field",
        )
    found = _processor(folder)
    kind = str(found.get("image_processor_type", "Qwen2VLImageProcessor"))
    if not kind.startswith("Qwen2VLImageProcessor"):
        raise ConfigError(
            f"The image processor {kind} is not supported", where=str(folder),
            hint="use a model with a Qwen2VLImageProcessor",
        )  # fmt: skip
    for key, wanted in FIXED_IMAGE_VALUES.items():
        if found.get(key, wanted) != wanted:
            raise ConfigError(
                f"{key} = {found[key]} of the image processor is not supported", where=str(folder),
                hint=f"only {wanted} is",
            )  # fmt: skip
    return _settings(folder, found, values)


def _settings(folder: Path, found: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    fields = ImageProcessorConfig.model_fields
    vision: Mapping[str, Any] = values.get("vision_config") or {}
    size: Mapping[str, Any] = found.get("size") or {}
    pixels = {
        name: found.get(name) or size.get(edge) or size.get(name) or fields[name].default
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    }
    patches = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    patches = {key: int(found.get(key, default)) for key, default in patches.items()}
    for key, name in (("patch_size", "patch_size"), ("temporal_patch_size",) * 2, ("merge_size", "spatial_merge_size")):
        if vision.get(name, patches[key]) != patches[key]:
            raise ConfigError(
                f"{key} = {patches[key]} of the image processor differs from {name} = {vision[name]} of the model",
                where=str(folder), hint="use the files that belong to the model",
            )  # fmt: skip
    ids = {"image_token_id": "image_token_id", "start_token_id": "vision_start_token_id",
           "end_token_id": "vision_end_token_id"}  # fmt: skip
    return {
        "patch_size_pixels": patches["patch_size"],
        "temporal_patch_size": patches["temporal_patch_size"],
        "merge_size": patches["merge_size"],
        **{name: int(value) for name, value in pixels.items()},
        "mean": [float(value) for value in found.get("image_mean") or fields["mean"].default],
        "std": [float(value) for value in found.get("image_std") or fields["std"].default],
        **{name: int(values.get(key, fields[name].default)) for name, key in ids.items()},
    }


def _processor(folder: Path) -> Mapping[str, Any]:
    """Return the description of the image processor."""
    for name in (PROCESSOR_NAME, PREPROCESSOR_NAME):
        path = folder / name
        if not path.is_file():
            continue
        try:
            value: Any = read_json(path)
            found: Any = value.get("image_processor") if name == PROCESSOR_NAME else value
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{name} cannot be read: {error}", where=str(folder)) from error
        if isinstance(found, dict):
            return cast("dict[str, Any]", found)
    raise ConfigError(
        f"The model has no image processor: neither {PREPROCESSOR_NAME} nor {PROCESSOR_NAME}", where=str(folder),
        hint="copy the file from the model's repository",
    )  # fmt: skip
