"""Read the model specification of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vorox.models.decoder_spec import DecoderSpec
from vorox.models.huggingface_spec import KIND, HuggingFaceSpec
from vorox.models.spec import ModelSpec


def spec_from_json(values: Mapping[str, Any]) -> ModelSpec:
    """Return the spec that ``ModelSpec.to_json`` described."""
    return HuggingFaceSpec.from_json(values) if values.get("kind") == KIND else DecoderSpec(**values)
