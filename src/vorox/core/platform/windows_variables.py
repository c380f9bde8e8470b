"""Environment variables that PyTorch needs on Windows, set before its first import.

Triton compiles into a folder below the home directory by default, whose path often exceeds the length limit of Windows;
the caching allocator has no expandable segments there, so large blocks fragment it.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from pathlib import Path

TRITON_CACHE_NAME = ".triton_cache"


def windows_variables(folder: Path) -> dict[str, str]:
    """Return the variables of a process that starts in a folder."""
    cache = (folder / TRITON_CACHE_NAME).absolute()
    return {"TRITON_CACHE_DIR": str(cache), "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}


def set_windows_variables(
    environment: MutableMapping[str, str], folder: Path, platform: str = sys.platform
) -> dict[str, str]:
    """Set the variables that are not set yet, on Windows only, and return those that were set.

    ``PYTORCH_ALLOC_CONF``, the newer name, counts as set: PyTorch reads the older name first.
    """
    if platform != "win32":
        return {}
    missing = {name: value for name, value in windows_variables(folder).items() if name not in environment}
    if "PYTORCH_ALLOC_CONF" in environment:
        missing.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    environment.update(missing)
    return missing
