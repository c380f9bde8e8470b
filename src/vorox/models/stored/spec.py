"""Read the model specification of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vorox.core.errors import CheckpointError
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.huggingface.adapter_spec import AdapterSpec
from vorox.models.huggingface.spec import HuggingFaceSpec
from vorox.models.module_spec import UserSpec
from vorox.models.spec import ModelSpec


def spec_from_json(values: Mapping[str, Any]) -> ModelSpec:
    """Return the spec that ``ModelSpec.to_json`` described.

    Raises:
        CheckpointError: It has other fields than this version's specs.
    """
    try:
        if "adapter" in values:
            return AdapterSpec.from_json(values)
        for kind in (HuggingFaceSpec, UserSpec):
            if values.get("kind") == kind.kind:
                return kind.from_json(values)
        return DecoderSpec(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"The model's description is not one of this version: {error}", where="spec",
            hint="train the run again, or take the version that wrote it",
        ) from error  # fmt: skip


def spec_differences(recorded: Mapping[str, Any], configured: Mapping[str, Any]) -> list[str]:
    """Return what differs between two specs in JSON, one text per field or, for modules, per setting and parameter."""
    if recorded.get("kind") == configured.get("kind") is not None:
        return spec_from_json(configured).differences(recorded)
    return [
        f"{key} = {recorded.get(key)}, configured is {configured.get(key)}"
        for key in sorted({*recorded, *configured})
        if recorded.get(key) != configured.get(key)
    ]
