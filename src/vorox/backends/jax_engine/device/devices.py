"""Devices, mesh, precision and determinism of the engine, chosen before step 1.

In: the configuration. Out: a frozen ``Compute``. There are no silent fallbacks: a setting that this machine or engine
does not support is a ``ConfigError``. The mesh has the axes ``data`` (replicas), ``fsdp`` (data parallel with sharded
parameters) and ``tensor`` (tensor parallel); the rows of a batch are sharded over the first two.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vorox.backends.jax_engine.parameters import ParameterLayout
from vorox.core.errors import ConfigError
from vorox.core.platform.environment import host_memory_bytes, processor_name, usable_cores
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.core.user_code.extensions import is_extension
from vorox.models.decoder.spec import DecoderSpec
from vorox.planning.memory_advice import MemoryBudget

_log = logging.getLogger("vorox.jax_engine")

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}
"""``runtime.device`` to JAX's platform name."""
ROWS = ("data", "fsdp")
"""Mesh axes over which the rows of a batch are sharded."""
MESH_AXIS = {"vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "hidden": "fsdp"}
"""Logical axis of a parameter (``models/spec.py``) to the mesh axis over which it is sharded."""


@dataclass(frozen=True, slots=True)
class Compute:
    """How this process computes.

    Attributes:
        mesh: Devices by ``data``, ``fsdp`` and ``tensor``.
        dtype: Precision of forward and backward; parameters and optimizer state are fp32.
        determinism: none, data or bitwise.
        attention: Name of the attention kernel.
        float32_products: JAX's precision of fp32 matrix products.
    """

    mesh: Mesh
    dtype: Any
    determinism: str
    attention: str
    float32_products: str

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @property
    def num_row_parts(self) -> int:
        """Number of shards of the rows of a batch."""
        return self.mesh.shape["data"] * self.mesh.shape["fsdp"]

    def precision(self) -> AbstractContextManager[object]:
        """Set the precision of matrix products while functions are traced and run."""
        return jax.default_matmul_precision(self.float32_products)

    def sharding(self, *axes: Any) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def parameter_sharding(self, layout: ParameterLayout, leaf: str) -> NamedSharding:
        """Return the sharding of a leaf. Vectors of the hidden size are small and stay replicated."""
        axes = layout.axes(leaf)
        if [axis for axis in axes if axis != "layers"] == ["hidden"]:
            return self.sharding()
        return self.sharding(*(MESH_AXIS.get(axis) for axis in axes))

    def constrain_rows(self, x_BTD: jax.Array) -> jax.Array:
        """Constrain the residual stream to be sharded by rows."""
        if self.mesh.size == 1:
            return x_BTD
        return jax.lax.with_sharding_constraint(x_BTD, self.sharding(ROWS, None, None))


def prepare(config: RunConfig, dist: DistributedContext) -> Compute:
    """Check the machine against the configuration.

    Raises:
        ConfigError: The machine or this engine cannot honour a setting.
    """
    platform = _select_platform(config, dist)
    mesh = _mesh(config, platform)
    if config.model.num_experts is not None and mesh.size > 1:
        raise ConfigError(
            f"model.num_experts = {config.model.num_experts} is not supported by the jax engine on {mesh.size} devices",
            where="model.num_experts, parallel", hint="set parallel.data_parallel_size=1, or backend=torch",
        )  # fmt: skip
    determinism = config.runtime.determinism
    if determinism == "auto":
        determinism = "bitwise" if platform == "cpu" else "data"
    if determinism == "bitwise" and platform == "gpu":
        raise ConfigError(
            "determinism = bitwise is impossible with XLA on GPUs: it picks kernels by timing them",
            where="runtime.determinism", hint="use data, or the CPU",
        )  # fmt: skip
    if config.precision.matmul == "tf32" and platform != "gpu":
        raise ConfigError(
            f"matmul = tf32 needs an NVIDIA GPU; this device is a {platform}",
            where="precision.matmul",
            hint="set it to ieee",
        )
    return Compute(
        mesh=mesh,
        dtype=DTYPES[config.precision.dtype],
        determinism=determinism,
        attention=_select_attention(config.model.attention_kernel, platform, mesh),
        float32_products="tensorfloat32" if config.precision.matmul == "tf32" else "highest",
    )


def _select_platform(config: RunConfig, dist: DistributedContext) -> str:
    wanted = config.runtime.device
    num_devices = config.parallel.num_devices
    if dist.world_size == 1 and num_devices > 1 and wanted in {"auto", "cpu"}:
        with contextlib.suppress(RuntimeError):  # JAX is already initialised with a fixed number of devices
            set_before: int = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
            jax.config.update("jax_num_cpu_devices", max(num_devices, set_before))
    present = jax.default_backend()
    if wanted == "auto":
        return present
    try:
        jax.devices(PLATFORMS[wanted])
    except RuntimeError as error:
        raise ConfigError(
            f"device = {wanted}, but JAX {jax.__version__} finds no such device; it has {present}",
            where="runtime.device",
            hint="set runtime.device=auto, or install the JAX build for that device (pip install 'jax[cuda12]')",
        ) from error  # fmt: skip
    return PLATFORMS[wanted]


def _mesh(config: RunConfig, platform: str) -> Mesh:
    parallel, devices = config.parallel, jax.devices(platform)
    # Host devices of one process share its cores: several are slower than one.
    num_devices = 1 if platform == "cpu" and jax.process_count() == 1 else len(devices)
    shape = (parallel.data_parallel_size_on(num_devices), parallel.fsdp_size, parallel.tensor_parallel_size)
    needed = math.prod(shape)
    if needed > len(devices):
        raise ConfigError(
            f"{shape[0]} x {parallel.fsdp_size} x {parallel.tensor_parallel_size} (data x fsdp x "
            f"tensor) need {needed} devices; this process group has {len(devices)} ({devices[0].device_kind})",
            where="parallel", hint="lower parallel.data_parallel_size, fsdp_size or tensor_parallel_size",
        )  # fmt: skip
    return Mesh(np.array(devices[:needed]).reshape(shape), ("data", "fsdp", "tensor"))


def _select_attention(name: str, platform: str, mesh: Mesh) -> str:
    if name == "auto":
        # XLA cannot partition the fused kernels, so a sharded model uses XLA's own attention.
        return "splash" if platform == "tpu" and mesh.size == 1 else "xla"
    if is_extension(name):
        return name
    needs = {"cudnn": "gpu", "splash": "tpu"}.get(name, platform)
    if needs != platform:
        raise ConfigError(
            f"attention_kernel = {name} needs a {needs}; this device is a {platform}",
            where="model.attention_kernel", hint="auto picks the kernel for the device",
        )  # fmt: skip
    return name


def check_divisible(layout: ParameterLayout, mesh: Mesh) -> None:
    """Check that the mesh divides every sharded axis evenly.

    Raises:
        ConfigError: It does not; the message names the parameter and axis.
    """
    spec = layout.spec
    heads = {"heads": spec.num_heads, "kv_heads": spec.num_kv_heads}
    for leaf, (parameter, *_) in layout.leaves.items():
        for axis, size in zip(parameter.axes, parameter.shape, strict=True):
            mesh_axis = MESH_AXIS.get(axis)
            count = heads.get(axis, size)
            if mesh_axis is not None and count % mesh.shape[mesh_axis]:
                key = {"fsdp": "fsdp_size", "tensor": "tensor_parallel_size"}[mesh_axis]
                raise ConfigError(
                    f"{axis} = {count} of {leaf} is not divisible by {mesh.shape[mesh_axis]} devices",
                    where=f"parallel.{key}", hint=f"choose a divisor of {count}",
                )  # fmt: skip


def environment(compute: Compute) -> dict[str, str | int | bool]:
    """Return what affects the bits of a run besides its configuration."""
    device = compute.mesh.devices.flat[0]
    on_cpu = compute.platform == "cpu"
    facts: dict[str, str | int | bool] = {
        "engine": "jax",
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "device": processor_name() if on_cpu else device.device_kind,
        "device_kind": compute.platform,
        "num_devices": compute.mesh.size,
        "dtype": np.dtype(compute.dtype).name,
        "determinism": compute.determinism,
        "attention": compute.attention,
        "float32_products": compute.float32_products,
        "compiled": True,
    }
    if on_cpu:
        facts["num_threads"] = usable_cores()  # XLA starts one thread per core
    if jax.process_count() > 1:
        facts["num_processes"] = jax.process_count()
    return facts


def memory_stats(compute: Compute) -> dict[str, float]:
    """Return current and peak memory of the fullest device. Reads counters only."""
    stats = [found for device in compute.mesh.local_devices if (found := device.memory_stats())]
    names = {"memory/device_bytes": "bytes_in_use", "memory/device_peak_bytes": "peak_bytes_in_use"}
    return {
        metric: float(max(found[key] for found in stats))
        for metric, key in names.items()
        if stats and all(key in found for found in stats)
    }


class HeldMemory:
    """Reads the device memory of an engine; the sizes of its state do not change, and are measured once."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._held: dict[str, float] = {}

    def read(self, state: Any) -> dict[str, float]:
        """Return device memory by metric name. Reads counters and sizes only."""
        if not self._held:
            parts = {"memory/parameter_bytes": state.params, "memory/optimizer_bytes": state.moments}
            self._held = {name: _held_bytes(arrays) for name, arrays in parts.items()}
        return self._held | memory_stats(self._compute)


def _held_bytes(arrays: Any) -> float:
    """Return the bytes of arrays on the device of this process that has most of them."""
    sizes: Counter[int] = Counter()
    for array in jax.tree.leaves(arrays):
        for shard in array.addressable_shards:
            sizes[shard.device.id] += math.prod(shard.data.shape) * shard.data.dtype.itemsize
    return float(max(sizes.values(), default=0))


@contextlib.contextmanager
def memory_errors(doing: str, budget: MemoryBudget) -> Iterator[None]:
    """Translate out-of-memory errors of devices and host into ``DoesNotFitError`` with a hint."""
    try:
        yield
    except MemoryError as error:
        raise budget.out_of_memory_error(doing) from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "Out of memory" not in str(error):
            raise
        raise budget.out_of_memory_error(doing) from error


def memory_budget(config: RunConfig, spec: DecoderSpec, mesh: Mesh) -> MemoryBudget:
    """Return the estimated peak memory of a run on one device, with that device's memory."""
    # A process without a device of the mesh is refused later (``data_shard``), with the same message on all processes.
    device = next(iter(mesh.local_devices), jax.local_devices()[0])
    stats = device.memory_stats() or {}
    limit = host_memory_bytes() if device.platform == "cpu" else stats.get("bytes_limit")
    return MemoryBudget.of(config, spec, limit, num_devices=mesh.devices.size, device_kind=device.platform)


def compile_logged(step: Any, arguments: tuple[Any, ...]) -> tuple[Any, float]:
    """Compile a jitted function for these arguments, and log the start and the end; also return the seconds."""
    _log.info(
        "Compiling the step for %s; this can take a minute", jax.default_backend(),
        extra={"event_kind": "compile_started"},
    )  # fmt: skip
    started = time.perf_counter()
    compiled = step.lower(*arguments).compile()
    seconds = time.perf_counter() - started
    _log.info("Compiled in %.1f s", seconds, extra={"event_kind": "compiled", "event_fields": {"seconds": seconds}})
    return compiled, seconds
