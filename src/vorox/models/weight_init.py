"""Weight initialisation: a pure function of model spec and seed, identical for every engine.

Each parameter has its own random stream, keyed by its canonical name, so neither the order of the table nor other
parameters affect its values. Values are sampled in fp32 with NumPy's Philox generator, on all cores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import xxhash

from vorox.core.engine import NamedArray
from vorox.core.files.atomic import canonical_json
from vorox.core.platform.environment import usable_cores
from vorox.core.ranks.distributed_context import membership
from vorox.models.spec import ModelSpec, ParameterSpec

AHEAD_BYTES = 1 << 29
"""Sampled parameters that wait for their turn."""
Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def initial_weights(spec: ModelSpec, seed: int) -> Iterator[NamedArray]:
    """Yield the initial value of every parameter, in table order.

    Threads sample ahead, on this rank's share of the cores, one parameter each, while at most ``AHEAD_BYTES`` wait,
    or one parameter. The reader's thread allocates: what another thread allocates and frees, glibc keeps for that one.
    """
    found = membership()
    num_ranks_here = (found.local_world_size or 1) if found is not None else 1
    num_threads = max(1, usable_cores() // num_ranks_here)
    waiting, sampled = deque(spec.parameters), deque[tuple[ParameterSpec, Future[Array]]]()
    ahead_bytes = 0
    with ThreadPoolExecutor(num_threads, "vorox-weights") as pool:
        try:
            while waiting or sampled:
                while waiting and (
                    not sampled
                    or (len(sampled) <= num_threads and ahead_bytes + _size_bytes(waiting[0]) <= AHEAD_BYTES)
                ):
                    parameter = waiting.popleft()
                    ahead_bytes += _size_bytes(parameter)
                    values = np.empty(parameter.shape, np.float32)
                    sampled.append((parameter, pool.submit(_sample, parameter, seed, values)))
                parameter, future = sampled.popleft()
                ahead_bytes -= _size_bytes(parameter)
                yield parameter.name, future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _size_bytes(parameter: ParameterSpec) -> int:
    return 4 * parameter.num_elements


def _sample(parameter: ParameterSpec, seed: int, values: Array) -> Array:
    """Fill ``values``, and return them."""
    if parameter.init in {"ones", "zeros"}:
        values.fill(parameter.init == "ones")
        return values
    if parameter.init == "log_range":
        values[...] = np.log(np.arange(1, parameter.num_elements + 1, dtype=np.float32))
        return values
    key = xxhash.xxh3_128_intdigest(canonical_json(["initial weights", 1, seed, parameter.name]))
    generator = np.random.Generator(np.random.Philox(key=key))
    if parameter.init == "uniform":
        generator.random(dtype=np.float32, out=values)
        values -= np.float32(0.5)
        values *= np.float32(parameter.std * 12**0.5)
    elif parameter.init == "time_step":
        low, high = np.log(parameter.bounds)
        steps = np.exp(low + generator.random(parameter.shape) * (high - low))
        values[...] = steps + np.log(-np.expm1(-steps))  # softplus of it is the time step
    else:
        generator.standard_normal(dtype=np.float32, out=values)
        values *= np.float32(parameter.std)
    return values
