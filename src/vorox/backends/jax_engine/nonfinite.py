"""Where the numbers of a batch stop being finite: forward and backward once more, micro-batch by micro-batch.

In: the engine's pass over one micro-batch, its parameters and a batch on the devices. Out: the first place whose number
is NaN or infinite. Compiled on first use, so finite steps pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vorox.backends.jax_engine.parameters import ParameterLayout
from vorox.backends.jax_engine.taps import statistics
from vorox.core.batch import IGNORED_LABEL
from vorox.core.engine import NonfiniteOrigin


def find_origin(
    run: Callable[..., Any],
    params: Mapping[str, jax.Array],
    given: Mapping[str, jax.Array],
    key: jax.Array,
    layout: ParameterLayout,
) -> NonfiniteOrigin | None:
    """Look at one micro-batch after the other.

    Args:
        run: Parameters, scale of the loss, rows and key to gradients, sums and statistics at the taps.
        params: Parameters.
        given: The arrays of the batch, micro-batches first.
        key: Of the step.
        layout: Names of the parameters.
    """
    scale = 1.0 / jnp.maximum((given["labels"] != IGNORED_LABEL).sum(), 1).astype(jnp.float32)
    for index in range(given["tokens"].shape[0]):
        rows = {name: array[index] for name, array in given.items()}
        gradients, sums, seen_LP3 = run(params, scale, rows, jax.random.fold_in(key, index))
        finite = {name: bool(np.isfinite(array).all()) for name, array in layout.unpack(gradients)}
        loss = float(sums.cross_entropy * scale)
        found = NonfiniteOrigin.of(index, loss, statistics(np.asarray(seen_LP3)[None]), finite)
        if found is not None:
            return found
    return None
