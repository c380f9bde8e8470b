"""Report of the installed JAX for ``vorox doctor``: run as a program, it prints one line of JSON."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import Any

import flax  # noqa: F401 - a broken installation fails here
import jax
import jax.numpy as jnp
import optax  # noqa: F401


def report() -> dict[str, Any]:
    """Return version and devices of this installation as plain JSON values."""
    return {
        "version": jax.__version__,
        "built_for": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jaxlib", "flax", "optax")),
        "devices": [_device(device) for device in jax.local_devices()],
        "cuda_build": "jax[cuda13]",
    }


def _device(device: Any) -> dict[str, Any]:
    kind = "cuda" if device.platform == "gpu" else device.platform
    found: dict[str, Any] = {"kind": kind, "name": device.device_kind, "problem": ""}
    try:
        ones_MM = jax.device_put(jnp.ones((64, 64)), device)  # shapes: M rows and columns
        if float((ones_MM @ ones_MM)[0, 0]) != 64.0:
            found["problem"] = "a product of matrices is wrong"
    except RuntimeError as error:
        found["problem"] = str(error).strip().split("\n")[0]
    statistics = device.memory_stats() or {}
    found |= {"memory_bytes": statistics["bytes_limit"]} if "bytes_limit" in statistics else {}
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(report()) + "\n")
