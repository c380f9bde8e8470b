"""Copies for checkpoints: exact, independent of the state, and given back to the system when they are freed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from vorox.backends.torch_engine.device.host_copy import MAPPED_BYTES, host_copy

pytestmark = pytest.mark.torch

GROWTH = """
import pathlib, torch
from vorox.backends.torch_engine.device import devices
from vorox.backends.torch_engine.device.host_copy import host_copy
def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096
devices._keep_freed_memory()
state = [torch.ones(4 << 20) for _ in range(4)]
before = resident()
copies = [host_copy(tensor) for tensor in state]
held = resident()
del copies
print(held - before, resident() - before)
"""


@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (MAPPED_BYTES // 4, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16])
def test_a_copy_is_exact_and_independent(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    state = torch.randint(0, 100, shape).to(dtype)
    kept, copy = state.clone(), host_copy(state)
    state += 1
    assert (copy.dtype, copy.shape) == (dtype, kept.shape)
    assert torch.equal(copy, kept)


def test_a_transposed_tensor_keeps_its_elements() -> None:
    state = torch.arange(2 * MAPPED_BYTES).view(2, -1).t()
    assert torch.equal(host_copy(state), state)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_a_freed_copy_is_given_back() -> None:
    """Also where glibc keeps freed memory, as the engine has it on a CPU."""
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    held, left = map(int, done.stdout.split())
    assert held >= 64 << 20
    assert left < 4 << 20
