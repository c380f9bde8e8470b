"""Report of the installed PyTorch for ``vorox doctor``: run as a program, it prints one line of JSON.

Every device computes a small product, because a build without kernels for a GPU fails only there.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def report() -> dict[str, Any]:
    """Return version, devices and kernels of this installation as plain JSON values."""
    has_cuda = torch.cuda.is_available()
    kinds = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if has_cuda else []
    kinds += ["mps"] if torch.backends.mps.is_available() else []
    return {
        "version": torch.__version__,
        "built_for": f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "CPU",
        "devices": [_device(torch.device(kind)) for kind in kinds] or [_device(torch.device("cpu"))],
        "cuda_build": "a CUDA build (https://pytorch.org/get-started)",
        "has_triton": importlib.util.find_spec("triton") is not None,
    }


def _device(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": device.type, "name": device.type, "problem": ""}
    try:
        ones_MM = torch.ones(64, 64, device=device)  # shapes: M rows and columns
        if float((ones_MM @ ones_MM)[0, 0]) != 64.0:
            found["problem"] = "a product of matrices is wrong"
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            found["name"] = properties.name
            found["memory_bytes"] = properties.total_memory
            found["capability"] = f"{properties.major}.{properties.minor}"
            with torch.cuda.device(device):
                found["has_bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
            found["flash_attention"] = _flash_attention_problem(device)
    except RuntimeError as error:
        found["problem"] = str(error).strip().split("\n")[0]
    return found


def _flash_attention_problem(device: torch.device) -> str:
    """Return why the flash attention kernel does not run on a GPU; empty if it does."""
    query_BNTH = torch.ones(1, 1, 64, 64, device=device, dtype=torch.float16)  # batch, heads, positions, head width
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(query_BNTH, query_BNTH, query_BNTH, is_causal=True)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).strip().split("\n")[0]
    return ""


if __name__ == "__main__":
    sys.stdout.write(json.dumps(report()) + "\n")
