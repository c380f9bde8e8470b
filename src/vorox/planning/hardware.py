"""Named hardware for ``vorox plan``: devices of one kind, with their memory and data-sheet peak."""

from __future__ import annotations

import difflib
import subprocess
from dataclasses import dataclass

from vorox.core.errors import ConfigError
from vorox.core.platform.environment import host_memory_bytes
from vorox.planning.memory_advice import Devices
from vorox.runtime.device_peaks import Arithmetic, peak_flops_per_second

RESERVED_BYTES = 1 << 30
"""Memory of a GPU that training cannot use: the driver's context, workspaces of libraries, fragmentation."""

_KINDS: dict[str, tuple[str, float]] = {
    # name        product (as in device_peaks.py), memory in GiB
    "rtx3070": ("GeForce RTX 3070", 8),
    "rtx3080": ("GeForce RTX 3080 10GB", 10),
    "rtx3090": ("GeForce RTX 3090", 24),
    "rtx4090": ("GeForce RTX 4090", 24),
    "rtx5090": ("GeForce RTX 5090", 32),
    "a6000": ("RTX A6000", 48),
    "t4": ("T4", 15),
    "v100-16": ("V100-SXM2-16GB", 16),
    "v100-32": ("V100-SXM2-32GB", 32),
    "a10": ("A10", 22.5),
    "l4": ("L4", 22.5),
    "l40s": ("L40S", 44.5),
    "a100-40": ("A100-SXM4-40GB", 40),
    "a100-80": ("A100-SXM4-80GB", 80),
    "h100": ("H100 80GB HBM3", 80),
    "h200": ("H200", 140),
    "b200": ("B200", 178),
}
_PEAKS_WITHOUT_A_PRODUCT_NAME: dict[str, dict[Arithmetic, float]] = {
    # The driver calls both variants RTX 3080. NVIDIA Ampere GA102 whitepaper 2.1, table 2 (10 GB), sums in fp32.
    "rtx3080": {"bf16": 59.5e12, "fp16": 59.5e12, "tf32": 29.8e12, "fp32": 29.8e12},
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """Devices of one kind.

    Attributes:
        name: As the user gives it, for example ``a100-80x4``; ``this machine``.
        num_devices: Number of devices.
        memory_bytes: Memory of one that training can use.
        product: Name of the product; empty for a CPU.
    """

    name: str
    num_devices: int
    memory_bytes: int
    product: str = ""

    @property
    def is_cpu(self) -> bool:
        return not self.product

    @property
    def devices(self) -> Devices:
        """The devices, as far as memory is concerned."""
        has_bf16 = self.peak_flops_per_second("bf16") is not None
        return Devices(self.num_devices, self.memory_bytes, self.is_cpu, has_bf16)

    def peak_flops_per_second(self, arithmetic: Arithmetic) -> float | None:
        """Return the data-sheet peak of all devices, or ``None`` if it is unknown."""
        kind = self.name.rpartition("x")[0] or self.name
        peak = _PEAKS_WITHOUT_A_PRODUCT_NAME.get(kind, {}).get(arithmetic)
        if peak is None and self.product:
            peak = peak_flops_per_second(self.product, arithmetic)
        return None if peak is None else peak * self.num_devices


def named_hardware(name: str) -> Hardware:
    """Return the hardware of a name: a kind, or a kind, ``x`` and a number, for example ``h200x8``.

    Raises:
        ConfigError: The kind is unknown, or the number is not at least 1.
    """
    kind, number = name.strip().lower(), "1"
    if kind not in _KINDS:
        kind, _, number = kind.rpartition("x")
    if kind not in _KINDS or not number.isdecimal() or int(number) < 1:
        names = (name.strip().lower(), kind)
        near = [near for word in names for near in difflib.get_close_matches(word, _KINDS, n=1, cutoff=0.6)]
        raise ConfigError(
            f"Hardware {name!r} is unknown; the kinds are {', '.join(_KINDS)}", where="--hardware",
            hint=f"for example {near[0] if near else 'a100-80'}x4 for four devices",
        )  # fmt: skip
    product, memory_gib = _KINDS[kind]
    return Hardware(f"{kind}x{number}", int(number), round(memory_gib * 2**30) - RESERVED_BYTES, product)


def this_machine(*, use_gpus: bool = True) -> Hardware:
    """Return the NVIDIA GPUs of this machine, of the kind of the first; without any, its memory."""
    gpus = _nvidia_gpus() if use_gpus else []
    if not gpus:
        return Hardware("this machine", 1, host_memory_bytes())
    product, memory_bytes = gpus[0]
    return Hardware("this machine", gpus.count(gpus[0]), memory_bytes - RESERVED_BYTES, product)


def _nvidia_gpus() -> list[tuple[str, int]]:
    """Return product name and memory of each GPU, as ``nvidia-smi`` reports them."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line.rpartition(",") for line in found.splitlines() if line.strip()]
    return [(name.strip(), int(mebibytes) << 20) for name, _, mebibytes in lines if mebibytes.strip().isdecimal()]
