"""Copies to a device, with the calls that CUDA would get."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vorox.backends.torch_engine.device.device_copy import to_device

pytestmark = pytest.mark.torch


class NoCuda(TorchFunctionMode):
    """Records what is copied where; pinned memory is plain memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.pin_memory:
            self.calls.append(("pin", args[0].data_ptr()))
            return args[0].clone()
        if func is Tensor.to:
            self.calls.append(("copy", args[0].data_ptr(), *args[1:], kwargs))
            return args[0]
        return func(*args, **(kwargs or {}))


def test_cuda_reads_from_pinned_memory_while_the_host_goes_on() -> None:
    source = np.arange(12, dtype=np.int32).reshape(3, 4)
    with NoCuda() as recorded:
        copy = to_device(source, torch.device("cuda"))
    pin, copied = recorded.calls
    assert pin == ("pin", source.ctypes.data), "without a copy in between"
    assert copied == ("copy", copy.data_ptr(), torch.device("cuda"), {"non_blocking": True})
    source[:] = 0  # the loader may use the memory of a batch again
    assert copy.tolist() == np.arange(12).reshape(3, 4).tolist()


def test_columns_are_copied_as_they_read() -> None:
    source = np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2]
    with NoCuda():
        assert to_device(source, torch.device("cuda")).tolist() == source.tolist()
    assert to_device(source, torch.device("cpu")).tolist() == source.tolist()
