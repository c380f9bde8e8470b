"""The numbers of a step, on their way from the devices to the host."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from vorox.backends.jax_engine.taps import statistics
from vorox.core.engine import StepValues


class JaxStepResult:
    """A step that may still be running. The copies to the host are started at once; ``fetch`` waits for them.

    Args:
        numbers: loss, grad_norm, finite, and further metrics by name.
        seen_ALP3: What was measured at the taps, if it was.
    """

    def __init__(self, numbers: Mapping[str, jax.Array], seen_ALP3: jax.Array | None) -> None:
        self._numbers, self._seen = dict(numbers), seen_ALP3
        for array in (*self._numbers.values(), *([] if seen_ALP3 is None else [seen_ALP3])):
            array.copy_to_host_async()
        self._fetched: StepValues | None = None

    def fetch(self) -> StepValues:
        """Wait for the step and return its numbers."""
        if self._fetched is None:
            values = {name: float(array) for name, array in self._numbers.items()}
            loss, grad_norm, finite = (values.pop(name) for name in ("loss", "grad_norm", "finite"))
            if self._seen is not None:
                values |= statistics(np.asarray(self._seen))
            self._fetched = StepValues(loss, grad_norm, bool(finite), values)
        return self._fetched
