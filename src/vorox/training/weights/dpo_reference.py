"""The reference model of DPO: read again at a resume, and identified by the hash of its weights

It is the weights that a run starts from. Checkpoints hold the hash, not the weights. With an adapter the reference is
its base (``adapter_base.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vorox.core.engine import Engine
from vorox.core.errors import CheckpointError
from vorox.core.schema import RunConfig

MANIFEST_KEY = "reference"


def freeze_reference(config: RunConfig, engine: Engine) -> None:
    """Make the weights of a new engine the reference, if the loss needs one."""
    if config.loss.name == "dpo":
        engine.freeze_reference()


def describe_reference(config: RunConfig, engine: Engine) -> dict[str, str]:
    """Return what a checkpoint records of the reference: its hash; nothing for other losses."""
    if config.loss.name != "dpo":
        return {}
    return {MANIFEST_KEY: engine.reference_fingerprint()}


def check_reference(config: RunConfig, engine: Engine, metadata: Mapping[str, Any]) -> None:
    """Check that the reference that was read again is the one in a checkpoint.

    Raises:
        CheckpointError: It is not.
    """
    recorded = str(metadata.get(MANIFEST_KEY, ""))
    found = describe_reference(config, engine).get(MANIFEST_KEY, "")
    if recorded and found != recorded:
        is_native = config.model.kind == "decoder"
        raise CheckpointError(
            f"Reference model has changed: the run started from weights {recorded[:16]}, but these are {found[:16]}",
            where="train.from_weights" if is_native else "model.name_or_path",
            hint="restore the weights that the run started from at this location; name a checkpoint, not a run that "
            "still trains" if is_native else "restore the model that the run started from at this location",
        )  # fmt: skip
