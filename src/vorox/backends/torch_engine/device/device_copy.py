"""Copies of arrays to the device that do not make the host wait.

On CUDA, an array is copied to pinned memory first, from which the device reads while the host continues. PyTorch's host
allocator gives pinned memory out again once the device has read it, so each array of a step has a buffer of its own,
and none is allocated after the first steps. A copy from other memory makes the host wait for the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device, asynchronously on CUDA."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
