"""Warnings about unknown ``VOROX_`` environment variables, which would otherwise be ignored silently."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

VARIABLES = (
    "VOROX_CACHE",
    "VOROX_COORDINATOR",
    "VOROX_METADATA_DSN",
    "VOROX_NODE_COUNT",
    "VOROX_NODE_INDEX",
    "VOROX_PROCESS_COUNT",
    "VOROX_PROCESS_INDEX",
    "VOROX_RANK_SECRET",
    "VOROX_TOKEN",
)
"""The variables that Vorox reads."""


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a warning for each ``VOROX_`` variable that is not read.

    Names that end in ``_DSN`` are left out: ``log.metadata_dsn_variable`` may name any.
    """
    names = sorted(
        name
        for name in environment
        if name.startswith("VOROX_") and name not in VARIABLES and not name.endswith("_DSN")
    )
    return [f"Unknown environment variable {name} has no effect; {_advice(name)}" for name in names]


def _advice(name: str) -> str:
    near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.8)
    if near:
        return f"did you mean {near[0]}?"
    from vorox.core.config.schema_fields import leaf_keys  # too slow for the start of every command

    key_name = name.removeprefix("VOROX_").replace("__", "_").lower()
    key = next((key for key in leaf_keys() if key.replace(".", "_") == key_name), "section.key")
    return f"write settings as {key}=VALUE"
