"""What doctor concludes from reports of frameworks and of the driver."""

from __future__ import annotations

from typing import Any

import pytest

from vorox.runtime.framework_checks import DriverGpu, check_driver, check_frameworks, parse_driver_gpus

GPU = DriverGpu("NVIDIA A100-SXM4-80GB", "550.54", 81920, 4)
CUDA = {
    "kind": "cuda", "name": "NVIDIA A100-SXM4-80GB", "problem": "", "memory_bytes": 80 << 30, "capability": "8.0",
    "has_bf16": True, "flash_attention": "",
}  # fmt: skip
CPU = {"kind": "cpu", "name": "cpu", "problem": ""}
INSTALLS = {"torch": "pip install vorox[torch]", "jax": "pip install vorox[jax]"}


def report(*devices: dict[str, Any], has_triton: bool = True) -> dict[str, Any]:
    return {
        "version": "2.13", "built_for": "CUDA 13.0", "devices": list(devices), "cuda_build": "a CUDA build",
        "has_triton": has_triton,
    }  # fmt: skip


def findings(
    *, torch: dict[str, Any] | None = None, broken: str = "", gpus: list[DriverGpu] | None = None
) -> dict[str, tuple[str, str, str]]:
    """(status, text, remedy) by name."""
    found = check_frameworks(
        {} if torch is None else {"torch": torch}, {"torch": broken} if broken else {}, INSTALLS, gpus or []
    )
    return {one.name: (one.status, one.text, one.remedy) for one in found}


def test_a_whole_installation() -> None:
    found = findings(torch=report(CUDA, CUDA), gpus=[GPU, GPU])
    assert found["torch"][:2] == (
        "ok", "2.13 (CUDA 13.0); 2 x NVIDIA A100-SXM4-80GB (80.0 GiB, capability 8.0)",
    )  # fmt: skip
    assert found["flash attention"][0] == "ok"
    assert found["jax"] == ("ok", "not installed; only backend=jax needs it", "")
    assert "triton" not in found


@pytest.mark.parametrize(
    ("arguments", "name", "status", "text"),
    [
        ({"torch": report(CPU), "gpus": [GPU]}, "torch", "warn", "does not use the 1 GPU of the driver"),
        ({"torch": report(CUDA | {"problem": "no kernel image"})}, "torch", "fail", "fails: no kernel image"),
        (
            {"torch": report(CUDA | {"flash_attention": "Flash attention needs sm80"})},
            "flash attention",
            "warn",
            "sm80",
        ),
        ({"torch": report(CUDA, has_triton=False)}, "triton", "warn", "runtime.compile=true"),
        ({"broken": "the import ended with SIGSEGV"}, "torch", "fail", "SIGSEGV"),
        ({}, "torch", "fail", "no other engine is"),
        ({}, "jax", "fail", "no other engine is"),
    ],
)
def test_faults(arguments: dict[str, Any], name: str, status: str, text: str) -> None:
    found = findings(**arguments)[name]
    assert found[0] == status
    assert text in found[1]
    assert found[2]


def test_the_driver() -> None:
    table = "NVIDIA A100-SXM4-80GB, 550.54, 81920, 4\nOdd, name, 550.54, [N/A], 12\n"
    gpus = parse_driver_gpus(table)
    assert gpus == [GPU, DriverGpu("Odd, name", "550.54", 0, 12)]
    assert check_driver(gpus[:1]).status == "ok"
    assert check_driver([]).status == "ok"
    assert "50% of the memory" in check_driver([GPU, DriverGpu("A", "550.54", 1000, 500)]).text
    failed = check_driver("Failed to initialize NVML: Driver/library version mismatch")
    assert failed.status == "fail"
    assert "restart" in failed.remedy
