"""Find the calls of a training step that would make the host wait for a GPU, on a CPU.

On a CPU nothing waits, but the same calls are made. A dispatch mode sees operations whose result or shape the host
reads, also within PyTorch and in backward passes; a function mode sees methods that never reach an operation there
(``tolist``, ``numpy``, ``cpu``), and copies of host memory to the device other than those of ``device_copy.to_device``,
which pins its memory: a copy of other memory makes the host wait.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import vorox

_ROOT = Path(vorox.__file__).parent
_aten = torch.ops.aten
_READING_OPERATIONS = {
    _aten._local_scalar_dense, _aten.is_nonzero, _aten.nonzero, _aten.equal, _aten.masked_select, _aten.bincount,
    _aten._unique2, _aten.unique_dim, _aten.unique_consecutive, _aten.argwhere, _aten._linalg_check_errors,
}  # fmt: skip
_READING_METHODS = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__, Tensor.cuda}
_COPIES = {Tensor.to, torch.tensor, torch.as_tensor}


def _place() -> str:
    """The innermost function of Vorox, as ``file: function``."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if _ROOT in path.parents:
            return f"{path.relative_to(_ROOT / 'backends/torch_engine')}: {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside"


def _has_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in {torch.bool, torch.uint8} for index in indices)


def _reads(operation: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    packet = operation.overloadpacket
    if packet in {_aten.index, _aten.index_put, _aten.index_put_}:  # a mask has as many indices as it has ones
        return _has_mask(arguments[1])
    if packet is _aten.repeat_interleave:
        return isinstance(arguments[-1], Tensor) and keywords.get("output_size") is None
    return packet in _READING_OPERATIONS


class _Operations(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _reads(func, args, kwargs or {}):
            self._found.append(f"{func.overloadpacket.__name__} in {_place()}")
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func in _READING_METHODS or (func in _COPIES and self._copies(func, args, keywords)):
            place = _place()
            if place != "device/device_copy.py: to_device":
                self._found.append(f"{func.__name__} in {place}")
        return func(*args, **keywords)

    def _copies(self, func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
        devices = [one for one in (*args[1:], *keywords.values()) if isinstance(one, torch.device)]
        return bool(devices)


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """Record the calls within the block, each as ``call in file: function``."""
    found: list[str] = []
    with _Methods(found), _Operations(found):
        yield found
