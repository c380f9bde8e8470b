"""Asynchronous step results: metrics on their way from the devices to the host."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from vorox.backends.jax_engine.device.devices import memory_errors
from vorox.backends.jax_engine.taps import statistics
from vorox.core.engine import StepValues
from vorox.planning.memory_advice import MemoryBudget

_BITS = "gradient_bits/"


class JaxStepResult:
    """The result of a step that may still be running. Starts the copies to the host; ``fetch`` waits for them.

    Args:
        numbers: loss, grad_norm, finite, and further metrics by name.
        moments_ALP3: Moments at the tap points (``taps.moments``), if measured.
        memory: Names settings that fit, if the devices ran out of memory while the step ran.
    """

    def __init__(self, numbers: Mapping[str, jax.Array], moments_ALP3: jax.Array | None, memory: MemoryBudget) -> None:
        self._numbers, self._moments, self._memory = dict(numbers), moments_ALP3, memory
        for array in (*self._numbers.values(), *([] if moments_ALP3 is None else [moments_ALP3])):
            array.copy_to_host_async()
        self._fetched: StepValues | None = None

    def fetch(self) -> StepValues:
        """Wait for the step and return its values."""
        if self._fetched is None:
            with memory_errors("training", self._memory):  # a running step reports its errors here
                self._fetched = self._values()
        return self._fetched

    def _values(self) -> StepValues:
        bits = tuple(float(array) for name, array in self._numbers.items() if name.startswith(_BITS))
        values = {name: float(array) for name, array in self._numbers.items() if not name.startswith(_BITS)}
        loss, grad_norm, finite = (values.pop(name) for name in ("loss", "grad_norm", "finite"))
        if self._moments is not None:
            values |= statistics(np.asarray(self._moments))
        return StepValues(loss, grad_norm, bool(finite), values, bits)


def gradient_bits(gradients: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return two sums over the bits of fp32 arrays modulo 2^32, one over the bits and one over a mix of them."""
    words = [jax.lax.bitcast_convert_type(array, jnp.uint32) for _, array in sorted(gradients.items())]
    mixed = [(word ^ (word >> 15)) * jnp.uint32(0x2C1B3C6D) for word in words]
    return {
        f"{_BITS}{index}": sum((part.sum(dtype=jnp.uint32) for part in parts), jnp.uint32(0))
        for index, parts in enumerate((words, mixed))
    }
