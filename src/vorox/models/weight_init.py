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

from vorox.core.atomic import canonical_json
from vorox.core.distributed_context import membership
from vorox.core.engine import NamedArray
from vorox.core.environment import usable_cores
from vorox.models.spec import ModelSpec, ParameterSpec

AHEAD_BYTES = 1 << 29
"""Sampled parameters that wait for their turn."""
Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def initial_weights(spec: ModelSpec, seed: int) -> Iterator[NamedArray]:
    """Yield the initial value of every parameter, in table order.

    Threads sample ahead, on this rank's share of the cores, while at most ``AHEAD_BYTES`` wait, or one parameter.
    """
    found = membership()
    num_ranks_here = (found.local_world_size or 1) if found is not None else 1
    waiting, sampled = deque(spec.parameters), deque[tuple[ParameterSpec, Future[Array]]]()
    ahead_bytes = 0
    with ThreadPoolExecutor(max(1, usable_cores() // num_ranks_here), "vorox-weights") as pool:
        try:
            while waiting or sampled:
                while waiting and (not sampled or ahead_bytes + _size_bytes(waiting[0]) <= AHEAD_BYTES):
                    parameter = waiting.popleft()
                    ahead_bytes += _size_bytes(parameter)
                    sampled.append((parameter, pool.submit(_sample, parameter, seed)))
                parameter, future = sampled.popleft()
                ahead_bytes -= _size_bytes(parameter)
                yield parameter.name, future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _size_bytes(parameter: ParameterSpec) -> int:
    return 4 * parameter.num_elements


def _sample(parameter: ParameterSpec, seed: int) -> Array:
    if parameter.init == "ones":
        return np.ones(parameter.shape, np.float32)
    if parameter.init == "zeros":
        return np.zeros(parameter.shape, np.float32)
    if parameter.init == "log_range":
        return np.log(np.arange(1, parameter.num_elements + 1, dtype=np.float32))
    key = xxhash.xxh3_128_intdigest(canonical_json(["initial weights", 1, seed, parameter.name]))
    generator = np.random.Generator(np.random.Philox(key=key))
    if parameter.init == "uniform":
        values = generator.random(parameter.shape, dtype=np.float32)
        values -= np.float32(0.5)
        values *= np.float32(parameter.std * 12**0.5)
        return values
    if parameter.init == "time_step":
        low, high = np.log(parameter.bounds)
        steps = np.exp(low + generator.random(parameter.shape) * (high - low))
        return (steps + np.log(-np.expm1(-steps))).astype(np.float32)  # softplus of it is the time step
    values = generator.standard_normal(parameter.shape, dtype=np.float32)
    values *= np.float32(parameter.std)
    return values
