"""The frozen base of an adapter: identify it by its weights, and load it into an engine.

A checkpoint of an adapter holds no weights of the base, only their fingerprint. So everything that opens one reads the
base at ``model.name_or_path`` again, and refuses a different base before an engine is built.
"""

from __future__ import annotations

from dataclasses import replace

from vorox.core.engine import Engine
from vorox.core.errors import OtherWeightsError
from vorox.core.schema import RunConfig
from vorox.models.huggingface.adapter_spec import AdapterSpec, base_fingerprint
from vorox.models.huggingface.spec import HuggingFaceSpec
from vorox.models.spec import ModelSpec
from vorox.training.origin.model_origin import weights_directory


def identify_base(config: RunConfig, spec: ModelSpec, recorded: HuggingFaceSpec | None) -> ModelSpec:
    """Return the spec of an adapter with the fingerprint of its base; any other spec is returned as it is.

    Args:
        config: The run.
        spec: Its model.
        recorded: The model in its newest checkpoint, if any.

    Raises:
        OtherWeightsError: The recorded adapter belongs to another base.
    """
    if not isinstance(spec, AdapterSpec):
        return spec
    found = replace(spec.adapter, base_fingerprint=base_fingerprint(weights_directory(config)))
    if isinstance(recorded, AdapterSpec):
        check_base(config, recorded, found.base_fingerprint)
    return replace(spec, adapter=found)


def check_base(config: RunConfig, spec: AdapterSpec, fingerprint: str) -> None:
    """Check that weights are those that an adapter was trained on.

    Raises:
        OtherWeightsError: They are not.
    """
    wanted = spec.adapter.base_fingerprint
    if fingerprint != wanted:
        raise OtherWeightsError(
            f"Adapter for another base: it was trained on weights {wanted[:16]}, but {config.model.name_or_path} has "
            f"{fingerprint[:16]}",
            where="model.name_or_path", hint="restore the base that the run started from at this location",
        )  # fmt: skip


def load_base(config: RunConfig, spec: ModelSpec, engine: Engine) -> None:
    """Load the frozen base of an adapter into a new engine, and initialise the adapter; nothing for other models."""
    if isinstance(spec, AdapterSpec):
        engine.import_pretrained(weights_directory(config))
