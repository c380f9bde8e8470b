"""Locate the first NaN or infinity of a batch: repeat forward and backward by micro-batch.

In: the engine's forward-backward function, parameters and a batch on the devices. Out: the first non-finite loss,
activation or gradient. Compiled on first use, so finite steps pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from vorox.backends.jax_engine.device.inputs import loss_scale
from vorox.backends.jax_engine.parameters import ParameterLayout
from vorox.backends.jax_engine.taps import statistics
from vorox.core.engine import NonfiniteOrigin


def find_origin(
    forward_backward: Callable[..., Any],
    params: Mapping[str, jax.Array],
    arrays: Mapping[str, jax.Array],
    key: jax.Array,
    layout: ParameterLayout,
) -> NonfiniteOrigin | None:
    """Return the first non-finite place, or ``None``.

    Args:
        forward_backward: (parameters, loss scale, rows, key) -> gradients, loss sums, measurements.
        params: Parameters.
        arrays: The batch, with a leading axis of micro-batches.
        key: Random key of the step.
        layout: Names of the parameters.
    """
    scale = loss_scale(arrays)
    for index in range(arrays["tokens"].shape[0]):
        rows = {name: array[index] for name, array in arrays.items()}
        gradients, sums, seen = forward_backward(params, scale, rows, jax.random.fold_in(key, index))
        finite = {name: bool(np.isfinite(array).all()) for name, array in layout.unpack(gradients)}
        loss = float(sums.cross_entropy * scale)
        found = NonfiniteOrigin.locate(index, loss, statistics(np.asarray(seen.moments)[None]), finite)
        if found is not None:
            return found
    return None
