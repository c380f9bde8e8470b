"""Data-sheet peak FLOP/s of accelerators, by the product name that the driver reports.

A row matches full names only: an ``H200 NVL``, a MIG slice, a vGPU or a laptop part is not an ``H200``. Names shared by
different products (two variants of the RTX 3080) have no row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from vorox.core.schema import PrecisionConfig

Arithmetic = Literal["bf16", "fp16", "tf32", "fp32"]
"""Precision of matrix products; accumulation is fp32."""

PEAKS: tuple[tuple[str, tuple[float | None, float | None, float | None, float]], ...] = (
    # Product name                               bf16    fp16    tf32   fp32, dense TFLOP/s with fp32 sums
    (r"GB200",                                  (2500.0, 2500.0, 1250.0, 80.0)),
    (r"B200",                                   (2250.0, 2250.0, 1125.0, 75.0)),
    (r"GH200 (?:120GB|480GB|144G HBM3e)",       (989.4,  989.4,  494.7,  66.9)),
    (r"H200",                                   (989.4,  989.4,  494.7,  66.9)),
    (r"H200 NVL",                               (835.5,  835.5,  417.5,  60.0)),
    (r"H100 80GB HBM3",                         (989.4,  989.4,  494.7,  66.9)),
    (r"H100 NVL",                               (835.5,  835.5,  417.5,  60.0)),
    (r"H100 PCIe",                              (756.0,  756.0,  378.0,  51.2)),
    (r"H800",                                   (989.4,  989.4,  494.7,  66.9)),
    (r"H800 PCIe",                              (756.0,  756.0,  378.0,  51.2)),
    (r"A[18]00(?:-SXM4-[48]0GB|-PCIE-40GB| 80GB PCIe)", (312.0, 312.0, 156.0, 19.5)),
    (r"L40S",                                   (362.0,  362.0,  183.0,  91.6)),
    (r"L4",                                     (121.0,  121.0,  60.0,   30.3)),
    (r"A10",                                    (125.0,  125.0,  62.5,   31.2)),
    (r"RTX A6000",                              (154.8,  154.8,  77.4,   38.7)),
    (r"GeForce RTX 5090",                       (209.5,  209.5,  104.8,  104.8)),
    (r"GeForce RTX 4090",                       (165.2,  165.2,  82.6,   82.6)),
    (r"GeForce RTX 3090",                       (71.0,   71.0,   35.6,   35.6)),
    (r"GeForce RTX 3070",                       (40.6,   40.6,   20.3,   20.3)),
    (r"V100-SXM2-(?:16|32)GB",                  (None,   125.0,  None,   15.7)),
    (r"V100-PCIE-(?:16|32)GB",                  (None,   112.0,  None,   14.0)),
    (r"V100S-PCIE-32GB",                        (None,   130.0,  None,   16.4)),
    (r"T4",                                     (None,   65.0,   None,   8.1)),
)  # fmt: skip
"""``tests/runtime/test_device_peaks.py`` cites the data sheet of every row."""


def arithmetic_of(precision: PrecisionConfig) -> Arithmetic:
    """Return the precision of a run's matrix products."""
    return "tf32" if precision.dtype == "fp32" and precision.matmul == "tf32" else precision.dtype


def peak_of_environment(environment: Mapping[str, Any], precision: PrecisionConfig) -> float | None:
    """Return the data-sheet peak of all devices that an engine reports, in the precision of a run."""
    peak = peak_flops_per_second(str(environment.get("device", "")), arithmetic_of(precision))
    return None if peak is None else peak * int(environment.get("num_devices", 1))


def peak_flops_per_second(device_name: str, arithmetic: Arithmetic) -> float | None:
    """Return the data-sheet peak of a device, or ``None`` for an unknown device.

    Args:
        device_name: Name from the driver, for example ``NVIDIA H200``.
        arithmetic: Precision of matrix products.
    """
    product = re.sub(r"^(?:NVIDIA )?(?:Tesla )?", "", device_name.strip())
    for pattern, (bf16, fp16, tf32, fp32) in PEAKS:
        if re.fullmatch(pattern, product):
            teraflops = {"bf16": bf16, "fp16": fp16, "tf32": tf32, "fp32": fp32}[arithmetic]
            return None if teraflops is None else teraflops * 1e12
    return None
