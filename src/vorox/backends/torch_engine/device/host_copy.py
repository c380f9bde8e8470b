"""Copies of tensors in host memory that the system gets back when they are freed.

On a CPU, glibc keeps freed memory for the next step (``devices.prepare``). The copy for a checkpoint is as large as the
state, and the next one seldom fits into the holes that it leaves, so the process would grow by another copy.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

MAPPED_BYTES = 1 << 20
"""Smaller tensors are copied to the heap."""


def host_copy(tensor: Tensor) -> Tensor:
    """Return a copy in host memory; a large one has a memory mapping of its own."""
    tensor = tensor.detach()
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes < MAPPED_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return tensor.to("cpu", copy=True)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # faults in 2 MiB at a time, where the system has such pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
