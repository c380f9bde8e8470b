"""The table of peaks against the makers' data sheets, and names that must select no row."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from vorox.runtime.device_peaks import PEAKS, peak_flops_per_second


class Sheet(NamedTuple):
    """Figures as printed, TFLOP/s: bf16, fp16, tf32, fp32. NVIDIA prints most tensor figures with 2:4 sparsity, which
    doubles them; ``sparse`` says that these are."""

    source: str
    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float
    sparse: bool = False


GB200 = Sheet("NVIDIA GB200 NVL72 data sheet, per GPU", 5000, 5000, 2500, 80, sparse=True)
B200 = Sheet("NVIDIA HGX B200 data sheet, an eighth: 36 and 18 PFLOPS", 4500, 4500, 2250, 75, sparse=True)
GH200 = Sheet("NVIDIA GH200 Grace Hopper Superchip data sheet", 1979, 1979, 989, 67, sparse=True)
H200_SXM = Sheet("NVIDIA H200 data sheet, H200 SXM", 1979, 1979, 989, 67, sparse=True)
H200_NVL = Sheet("NVIDIA H200 data sheet, H200 NVL", 1671, 1671, 835, 60, sparse=True)
H100_SXM = Sheet("NVIDIA H100 data sheet, H100 SXM", 1979, 1979, 989, 67, sparse=True)
H100_NVL = Sheet("NVIDIA H100 data sheet, H100 NVL", 1671, 1671, 835, 60, sparse=True)
H100_PCIE = Sheet("NVIDIA H100 data sheet of 2022, H100 PCIe", 1513, 1513, 756, 51, sparse=True)
H800_SXM = Sheet("NVIDIA H800 data sheet, H800 SXM", 1979, 1979, 989, 67, sparse=True)
H800_PCIE = Sheet("NVIDIA H800 data sheet, H800 PCIe", 1513, 1513, 756, 51, sparse=True)
A100 = Sheet("NVIDIA A100 data sheet, all forms", 312, 312, 156, 19.5)
A800 = Sheet("NVIDIA A800 data sheet, all forms", 312, 312, 156, 19.5)
L40S = Sheet("NVIDIA L40S data sheet", 362.05, 362.05, 183, 91.6)
L4 = Sheet("NVIDIA L4 data sheet", 242, 242, 120, 30.3, sparse=True)
A10 = Sheet("NVIDIA A10 data sheet", 125, 125, 62.5, 31.2)
RTX_A6000 = Sheet("NVIDIA GA102 white paper, RTX A6000", 154.8, 154.8, 77.4, 38.7)
RTX_5090 = Sheet("NVIDIA RTX Blackwell white paper, fp32 accumulation", 209.5, 209.5, 104.8, 104.8)
RTX_4090 = Sheet("NVIDIA Ada white paper, fp32 accumulation", 165.2, 165.2, 82.6, 82.6)
RTX_3090 = Sheet("NVIDIA GA102 white paper, fp32 accumulation", 71, 71, 35.6, 35.6)
RTX_3070 = Sheet("NVIDIA GA102 white paper, fp32 accumulation", 40.6, 40.6, 20.3, 20.3)
V100_SXM2 = Sheet("NVIDIA V100 data sheet, SXM2", None, 125, None, 15.7)
V100_PCIE = Sheet("NVIDIA V100 data sheet, PCIe", None, 112, None, 14)
V100S = Sheet("NVIDIA V100 data sheet, V100S PCIe", None, 130, None, 16.4)
T4 = Sheet("NVIDIA T4 data sheet", None, 65, None, 8.1)

SHEETS = {
    "NVIDIA GB200": GB200,
    "NVIDIA B200": B200,
    "NVIDIA GH200 120GB": GH200,
    "NVIDIA GH200 480GB": GH200,
    "NVIDIA GH200 144G HBM3e": GH200,
    "NVIDIA H200": H200_SXM,
    "NVIDIA H200 NVL": H200_NVL,
    "NVIDIA H100 80GB HBM3": H100_SXM,
    "NVIDIA H100 NVL": H100_NVL,
    "NVIDIA H100 PCIe": H100_PCIE,
    "NVIDIA H800": H800_SXM,
    "NVIDIA H800 PCIe": H800_PCIE,
    "NVIDIA A100-SXM4-40GB": A100,
    "NVIDIA A100-SXM4-80GB": A100,
    "A100-SXM4-40GB": A100,
    "NVIDIA A100-PCIE-40GB": A100,
    "NVIDIA A100 80GB PCIe": A100,
    "NVIDIA A800-SXM4-80GB": A800,
    "NVIDIA A800 80GB PCIe": A800,
    "NVIDIA L40S": L40S,
    "NVIDIA L4": L4,
    "NVIDIA A10": A10,
    "NVIDIA RTX A6000": RTX_A6000,
    "NVIDIA GeForce RTX 5090": RTX_5090,
    "NVIDIA GeForce RTX 4090": RTX_4090,
    "NVIDIA GeForce RTX 3090": RTX_3090,
    "NVIDIA GeForce RTX 3070": RTX_3070,
    "Tesla V100-SXM2-16GB": V100_SXM2,
    "Tesla V100-SXM2-32GB": V100_SXM2,
    "Tesla V100-PCIE-16GB": V100_PCIE,
    "Tesla V100-PCIE-32GB": V100_PCIE,
    "Tesla V100S-PCIE-32GB": V100S,
    "Tesla T4": T4,
}


@pytest.mark.parametrize("name", SHEETS)
def test_a_peak_is_the_dense_figure_of_the_data_sheet(name: str) -> None:
    sheet = SHEETS[name]
    for arithmetic in ("bf16", "fp16", "tf32"):
        printed = getattr(sheet, arithmetic)
        dense = None if printed is None else pytest.approx(1e12 * printed / (2 if sheet.sparse else 1), rel=2e-3)
        assert peak_flops_per_second(name, arithmetic) == dense, (sheet.source, arithmetic)
    assert peak_flops_per_second(name, "fp32") == pytest.approx(1e12 * sheet.fp32, rel=5e-3), sheet.source


def test_every_row_of_the_table_has_its_data_sheet() -> None:
    products = [name.removeprefix("NVIDIA ").removeprefix("Tesla ") for name in SHEETS]
    for pattern, _ in PEAKS:
        assert any(re.fullmatch(pattern, product) for product in products), pattern


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100",  # SXM, PCIe or NVL
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A100-SXM-64GB",  # a part of its own, with more cores
        "GRID A100-10C",
        "NVIDIA H20",
        "NVIDIA B300 SXM6 AC",
        "NVIDIA A10G",
        "NVIDIA L40",
        "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA GeForce RTX 3080",  # 8,704 or 8,960 cores
        "NVIDIA GeForce RTX 3070 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "NVIDIA T400",
        "Intel(R) Xeon(R) CPU",
        "AMD Instinct MI300X",
        "",
    ],
)
def test_a_name_that_determines_no_product_has_no_peak(name: str) -> None:
    assert peak_flops_per_second(name, "fp32") is None
