"""Vorox: language model training whose every run is replayable and auditable.

The public Python API, documented in ``docs/python.md``. Importing it is cheap: each name is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vorox.api.compression import load_quantized
    from vorox.api.configuration import load_config
    from vorox.api.dataset import dataset
    from vorox.api.model import Model, create_model, load_model
    from vorox.api.runs import Run, open_run
    from vorox.api.training import Tap, train
    from vorox.core.errors import VoroxError
    from vorox.core.version import __version__

__all__ = [
    "Model", "Run", "Tap", "VoroxError", "__version__", "create_model", "dataset", "load_config", "load_model",
    "load_quantized", "open_run", "train",
]  # fmt: skip

_MODULES = {
    "Model": "vorox.api.model",
    "Run": "vorox.api.runs",
    "Tap": "vorox.api.training",
    "VoroxError": "vorox.core.errors",
    "__version__": "vorox.core.version",
    "create_model": "vorox.api.model",
    "dataset": "vorox.api.dataset",
    "load_config": "vorox.api.configuration",
    "load_model": "vorox.api.model",
    "load_quantized": "vorox.api.compression",
    "open_run": "vorox.api.runs",
    "train": "vorox.api.training",
}
"""The module that defines each name of the API."""


def __getattr__(name: str) -> object:
    """Import a name of the API on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    """List the names of the API, loaded or not."""
    return sorted(__all__)
