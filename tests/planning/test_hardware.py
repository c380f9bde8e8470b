"""Names of hardware, their memory and peaks."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from vorox.core.errors import ConfigError
from vorox.planning import hardware
from vorox.planning.hardware import RESERVED_BYTES, named_hardware, this_machine


@pytest.mark.parametrize(
    ("name", "num_devices", "gib", "bf16_teraflops"),
    [  # the names of the data sheets, and numbers from them
        ("rtx4090", 1, 24, 165.2),
        ("RTX4090x1", 1, 24, 165.2),
        ("rtx3080x1", 1, 10, 59.5),
        ("rtx3070x2", 2, 8, 40.6),
        ("a100-80x4", 4, 80, 312.0),
        ("h100x16", 16, 80, 989.4),
        ("h200x8", 8, 140, 989.4),
    ],
)
def test_a_name_is_devices_of_one_kind(name: str, num_devices: int, gib: float, bf16_teraflops: float) -> None:
    found = named_hardware(name)
    assert found.num_devices == num_devices
    assert found.memory_bytes == gib * 2**30 - RESERVED_BYTES
    assert found.peak_flops_per_second("bf16") == pytest.approx(bf16_teraflops * 1e12 * num_devices)


def test_every_kind_has_a_peak() -> None:
    for kind in hardware._KINDS:
        assert (named_hardware(kind).peak_flops_per_second("fp16") or 0) > 1e13


@pytest.mark.parametrize("name", ["h300", "rtx4090x0", "rtx4090x", "x4", "", "a100x4", "h200x-1", "h200x1.5"])
def test_an_unknown_name_is_refused_with_the_kinds(name: str) -> None:
    with pytest.raises(ConfigError, match="a100-80") as refused:
        named_hardware(name)
    assert refused.value.where == "--hardware"
    assert "x4" in refused.value.hint


@pytest.mark.parametrize(("name", "near"), [("rtx4091", "rtx4090"), ("RTX-4090x2", "rtx4090"), ("h300x8", "h200")])
def test_the_nearest_kind_is_named(name: str, near: str) -> None:
    with pytest.raises(ConfigError) as refused:
        named_hardware(name)
    assert f"for example {near}x4" in refused.value.hint


def test_gpus_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'NVIDIA H200, 143771\\nNVIDIA H200, 143771\\nNVIDIA T4, 15360\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = this_machine()
    assert (found.num_devices, found.memory_bytes) == (2, (143771 << 20) - RESERVED_BYTES)
    assert found.peak_flops_per_second("bf16") == pytest.approx(2 * 989.4e12)
    assert this_machine(use_gpus=False).is_cpu
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert this_machine().memory_bytes == psutil.virtual_memory().total
