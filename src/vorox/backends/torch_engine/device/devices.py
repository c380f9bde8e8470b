"""Device, precision, threads and determinism of the engine, chosen before step 1.

In: the configuration. Out: a frozen ``Compute``; process-wide switches of PyTorch are set here and nowhere else.
There are no silent fallbacks: a setting that this machine or engine does not support is a ``ConfigError``. No choice
depends on a timing, so the same machine always computes the same bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import psutil
import torch

from vorox.backends.torch_engine.device import barriers
from vorox.backends.torch_engine.device.document_attention import available_attention
from vorox.backends.torch_engine.device.recorded_choices import RecordedChoices
from vorox.core.config.checks.training import FLOAT8
from vorox.core.errors import ConfigError
from vorox.core.platform.environment import host_memory_bytes, usable_cores
from vorox.core.platform.installation import install_command
from vorox.core.ranks.distributed_context import DistributedContext, membership
from vorox.core.schema import PrecisionConfig, RunConfig
from vorox.models.decoder.document_separation import DocumentAttention
from vorox.models.spec import ModelSpec
from vorox.planning.memory_advice import Devices, MemoryBudget

Products = Literal["blas", "onednn"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DETERMINISTIC_CUBLAS = (":4096:8", ":16:8")


@dataclass(frozen=True, slots=True)
class Compute:
    """How this process computes.

    Attributes:
        device: Device of the parameters.
        dtype: Precision of forward and backward; parameters and optimizer state are fp32.
        determinism: none, data, bitwise or bitwise-any-world.
        num_threads: Compute threads on the CPU.
        compiled: Whether the model is compiled.
        products: Library for fp32 matrix products of an uncompiled model on the CPU.
        float8: Version of torchao if linear layers multiply in 8-bit floats, else ``None``.
        document_attention: How this device separates documents best.
        choices: Choices that a resume takes over from its run.
    """

    device: torch.device
    dtype: torch.dtype
    determinism: str
    num_threads: int
    compiled: bool
    products: Products
    float8: str | None = None
    document_attention: DocumentAttention = "mask"
    choices: RecordedChoices = field(default_factory=RecordedChoices)

    @property
    def is_direct(self) -> bool:
        """Whether the hand-written backward passes of ``direct_kernels.py`` are used: fp32 on the CPU, not compiled."""
        return self.device.type == "cpu" and self.dtype == torch.float32 and not self.compiled

    def adopt(self, recorded: Mapping[str, object]) -> None:
        """Take over the choices of a recorded run, where this device and its settings can."""
        self.choices.adopt(recorded, self.document_attention)

    def autocast(self) -> AbstractContextManager[object]:
        """Run the forward pass in the chosen precision."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def no_autocast(self) -> AbstractContextManager[object]:
        """Suspend ``autocast``."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, enabled=False)


def prepare(config: RunConfig) -> Compute:
    """Check the machine against the configuration and set PyTorch's process-wide switches.

    Raises:
        ConfigError: The machine or this engine cannot honour a setting.
    """
    device = _select_device(config.runtime.device)
    dtype = _select_dtype(config.precision.dtype, device)
    float8 = _check_float8(config.precision, device)
    determinism = config.runtime.determinism
    if determinism == "auto":
        determinism = "bitwise" if device.type == "cpu" else "data"
    default_threads = _cpu_threads(determinism) if device.type == "cpu" else torch.get_num_threads()
    num_threads = config.runtime.num_threads or default_threads
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
    if device.type == "cpu":
        _keep_freed_memory()
        barriers.watch(num_threads)
    _set_float32_products(config.precision.matmul, device)
    _set_determinism(determinism, device, compiled=config.runtime.compile)
    attention = available_attention(device, dtype)
    return Compute(
        device=device,
        dtype=dtype,
        determinism=determinism,
        num_threads=num_threads,
        compiled=config.runtime.compile,
        products=_select_products(device),
        float8=float8,
        document_attention=attention,
        choices=RecordedChoices(attention),
    )


def _select_device(name: str) -> torch.device:
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if available[kind])
    if not available[name]:
        present = ", ".join(kind for kind, exists in available.items() if exists)
        raise ConfigError(
            f"device = {name}, but PyTorch {torch.__version__} finds no such device; it has {present}",
            where="runtime.device",
            hint="set runtime.device=auto, or install the PyTorch build for that device",
        )
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def _select_dtype(name: str, device: torch.device) -> torch.dtype:
    supported = True
    if device.type == "cuda" and name == "bf16":
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "mps" and name != "fp32":
        supported = torch.amp.autocast_mode.is_autocast_available("mps")
    if not supported:
        raise ConfigError(
            f"dtype = {name} is not supported by {device_name(device)}",
            where="precision.dtype",
            hint="choose fp32" + (" or fp16" if device.type == "cuda" else ""),
        )
    return DTYPES[name]


def _check_float8(precision: PrecisionConfig, device: torch.device) -> str | None:
    """Return the version of torchao, if linear layers multiply in 8-bit floats."""
    if precision.float8 is None:
        return None
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"{FLOAT8} needs torchao", where=FLOAT8, hint=install_command("compress"))
    has_float8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    if not has_float8 and not precision.float8_emulate:
        raise ConfigError(
            f"{FLOAT8} needs a GPU of compute capability 8.9 or newer (Ada, Hopper); this device is "
            f"{device_name(device) or device.type}",
            where=FLOAT8,
            hint=f"remove {FLOAT8}, or set precision.float8_emulate=true for the same rounding without the speed",
        )
    return importlib.metadata.version("torchao")


def _set_float32_products(choice: str, device: torch.device) -> None:
    if device.type == "cuda":
        if choice == "tf32" and torch.cuda.get_device_capability(device) < (8, 0):
            raise ConfigError(
                f"matmul = tf32, but {device_name(device)} has no TensorFloat-32", where="precision.matmul"
            )
        torch.backends.cuda.matmul.fp32_precision = choice
    elif choice == "tf32":
        raise ConfigError(
            f"matmul = tf32 needs an NVIDIA GPU; this device is a {device.type}", where="precision.matmul"
        )


def _set_determinism(level: str, device: torch.device, *, compiled: bool) -> None:
    """Set PyTorch's determinism switches. The CPU kernels in use are deterministic for a fixed number of threads."""
    if device.type == "cpu":
        return
    if level not in {"bitwise", "bitwise-any-world"}:
        torch.use_deterministic_algorithms(False)
        return
    if device.type == "mps":
        raise ConfigError(
            f"determinism = {level} is not supported on mps", where="runtime.determinism", hint="use data or the CPU"
        )
    if compiled:
        raise ConfigError(
            f"determinism = {level} is impossible with compiled CUDA kernels: the compiler picks them by timing",
            where="runtime.determinism",
            hint="set runtime.compile=false, or determinism=data",
        )
    if not torch.cuda.is_initialized():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", DETERMINISTIC_CUBLAS[0])
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in DETERMINISTIC_CUBLAS:
        raise ConfigError(
            f"determinism = {level} needs CUBLAS_WORKSPACE_CONFIG to be set before CUDA starts",
            where="runtime.determinism",
            hint=f"set the environment variable CUBLAS_WORKSPACE_CONFIG={DETERMINISTIC_CUBLAS[0]}",
        )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_cudnn_sdp(False)


def _cpu_threads(determinism: str) -> int:
    """Return this rank's part of the physical cores; 1 if bits must not depend on the number of ranks."""
    if determinism == "bitwise-any-world":
        return 1
    found = membership()
    return max(1, physical_cores() // (found.local_world_size or 1 if found is not None else 1))


def _select_products(device: torch.device) -> Products:
    """Choose the library of matrix products: MKL uses AVX-512 on Intel only; on AMD, oneDNN is twice as fast."""
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    if device.type == "cpu" and wide and torch.backends.mkl.is_available() and not _is_intel() and has_onednn_linear():
        return "onednn"
    return "blas"


def has_onednn_linear() -> bool:
    """Whether this build of PyTorch has a oneDNN linear for plain fp32 tensors."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cache
def _is_intel() -> bool:
    if platform.system() == "Linux":
        with contextlib.suppress(OSError):
            return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return "AuthenticAMD" not in platform.processor()


@cache
def physical_cores() -> int:
    """Return the number of physical cores available to this process."""
    allowed = usable_cores()
    return min(psutil.cpu_count(logical=False) or allowed, allowed)


@cache
def _keep_freed_memory() -> None:
    """Make glibc keep freed memory, since every step allocates the same activations.

    By default every large tensor is unmapped and mapped again, and the page faults cost several times the arithmetic.
    The process stays at its peak size.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    trim_threshold, mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(mmap_max, 0)


def device_name(device: torch.device) -> str:
    """Return the product name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu" and platform.system() == "Linux":
        with contextlib.suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def environment(compute: Compute) -> dict[str, str | int | bool]:
    """Return what affects the bits of a run besides its configuration."""
    facts: dict[str, str | int | bool] = {
        "engine": "torch",
        "torch": torch.__version__,
        "device": device_name(compute.device),
        "device_kind": compute.device.type,
        "dtype": str(compute.dtype).removeprefix("torch."),
        "determinism": compute.determinism,
        "compiled": compute.compiled,
    }
    if compute.device.type == "cpu":
        facts |= {
            "num_threads": compute.num_threads,
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "matrix_products": compute.products if compute.is_direct else "blas",
        }
    if compute.float8 is not None:
        facts["torchao"] = compute.float8
    facts |= compute.choices.facts()
    if compute.device.type == "cuda":
        facts |= {
            "cuda": torch.version.cuda or "",
            "cudnn": torch.backends.cudnn.version() or 0,
            "float32_products": torch.backends.cuda.matmul.fp32_precision,
        }
    return facts


def memory_stats(device: torch.device) -> dict[str, float]:
    """Return current and peak device memory. Reads counters only."""
    if device.type == "cuda":
        return {
            "memory/device_bytes": float(torch.cuda.memory_allocated(device)),
            "memory/device_peak_bytes": float(torch.cuda.max_memory_allocated(device)),
            "memory/device_reserved_bytes": float(torch.cuda.memory_reserved(device)),
        }
    if device.type == "mps":
        return {
            "memory/device_bytes": float(torch.mps.current_allocated_memory()),
            "memory/device_reserved_bytes": float(torch.mps.driver_allocated_memory()),
        }
    return {}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
"""Parts of other errors of an exhausted device: host allocator; CUDA driver and MPS; cuBLAS, cuDNN and cuSPARSE."""


@contextlib.contextmanager
def memory_errors(doing: str, budget: MemoryBudget) -> Iterator[None]:
    """Translate out-of-memory errors of device and host into ``DoesNotFitError`` with a hint."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise budget.out_of_memory_error(doing) from error
    except RuntimeError as error:
        if not any(text in str(error) for text in _OUT_OF_MEMORY):
            raise
        raise budget.out_of_memory_error(doing) from error


def memory_budget(config: RunConfig, spec: ModelSpec, device: torch.device) -> MemoryBudget:
    """Return the estimated peak memory of a run, with the memory of its device.

    DeepSpeed may keep the state in host memory, so then it is not compared with that of the device.
    """
    memory_bytes = None if config.parallel.kind == "deepspeed" else _memory_bytes(device)
    count = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return MemoryBudget.of(config, spec, memory_bytes, num_devices=count, device_kind=device.type)


def training_devices(config: RunConfig, dist: DistributedContext) -> Devices | None:
    """Return the devices of a run: one for each rank; ``None`` if their memory is unknown."""
    device = _select_device(config.runtime.device)
    memory_bytes, is_cpu = _memory_bytes(device), device.type == "cpu"
    return None if memory_bytes is None else Devices(dist.world_size, memory_bytes, is_cpu, has_bf16=not is_cpu)


def _memory_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory_bytes() if device.type == "cpu" else None
