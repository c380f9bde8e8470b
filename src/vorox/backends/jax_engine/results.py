"""Asynchronous step results: metrics on their way from the devices to the host."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from vorox.backends.jax_engine.taps import statistics
from vorox.core.engine import StepValues

_BITS = "gradient_bits/"


class JaxStepResult:
    """The result of a step that may still be running. Starts the copies to the host; ``fetch`` waits for them.

    Args:
        numbers: loss, grad_norm, finite, and further metrics by name.
        moments_ALP3: Moments at the tap points (``taps.moments``), if measured.
    """

    def __init__(self, numbers: Mapping[str, jax.Array], moments_ALP3: jax.Array | None) -> None:
        self._numbers, self._moments = dict(numbers), moments_ALP3
        for array in (*self._numbers.values(), *([] if moments_ALP3 is None else [moments_ALP3])):
            array.copy_to_host_async()
        self._fetched: StepValues | None = None

    def fetch(self) -> StepValues:
        """Wait for the step and return its values."""
        if self._fetched is None:
            bits = tuple(float(array) for name, array in self._numbers.items() if name.startswith(_BITS))
            values = {name: float(array) for name, array in self._numbers.items() if not name.startswith(_BITS)}
            loss, grad_norm, finite = (values.pop(name) for name in ("loss", "grad_norm", "finite"))
            if self._moments is not None:
                values |= statistics(np.asarray(self._moments))
            self._fetched = StepValues(loss, grad_norm, bool(finite), values, bits)
        return self._fetched


def gradient_bits(gradients: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return two sums over the bits of fp32 arrays modulo 2^32, one over the bits and one over a mix of them."""
    words = [jax.lax.bitcast_convert_type(array, jnp.uint32) for _, array in sorted(gradients.items())]
    mixed = [(word ^ (word >> 15)) * jnp.uint32(0x2C1B3C6D) for word in words]
    return {
        f"{_BITS}{index}": sum((part.sum(dtype=jnp.uint32) for part in parts), jnp.uint32(0))
        for index, parts in enumerate((words, mixed))
    }
