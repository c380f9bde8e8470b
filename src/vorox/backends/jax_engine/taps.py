"""Taps: functions that observe or replace the residual stream inside the model.

``engine.taps.attach(point, layer, function)`` makes the model pass ``x_BTD`` through ``function`` at that point, in
training, evaluation and generation. The function becomes part of the compiled step, so it must be a pure JAX function,
and attaching or detaching it triggers a recompilation::

    detach = engine.taps.attach("after_attention", 3, lambda x_BTD: x_BTD + 0.1 * direction_D)

To see values, call ``jax.debug.callback`` in the function; one that returns ``None`` only observes.

Shape legend: B rows, T positions, D width, A micro-batches, L layers, P tap points, 3 moments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vorox.core.engine import TapPoint
from vorox.core.errors import ConfigError

POINTS: tuple[str, ...] = get_args(TapPoint)
MIXER_POINTS = ("block_input", "after_mlp")
"""The points of a layer of ``model.layer_pattern``."""
Tap = Callable[[jax.Array], jax.Array | None]


class Taps:
    """The taps of one model.

    Args:
        num_layers: Layers of the model.
        on_change: Called when compiled steps become invalid.
    """

    def __init__(self, num_layers: int, on_change: Callable[[], None]) -> None:
        self._num_layers, self._on_change = num_layers, on_change
        self._functions: dict[tuple[str, int], list[Tap]] = {}

    def attach(self, point: TapPoint, layer: int, function: Tap) -> Callable[[], None]:
        """Pass the residual stream through ``function`` at a point of a layer (from 0).

        Returns:
            A function that detaches it.

        Raises:
            ConfigError: The point or layer does not exist.
        """
        if point not in POINTS:
            raise ConfigError(f"Unknown tap point {point!r}; available: {', '.join(POINTS)}", where="taps")
        if not 0 <= layer < self._num_layers:
            raise ConfigError(f"Tap layer {layer} does not exist; there are {self._num_layers}", where="taps")
        functions = self._functions.setdefault((point, layer), [])
        functions.append(function)
        self._on_change()

        def detach() -> None:
            functions.remove(function)
            self._on_change()

        return detach

    def apply(self, point: str, layer: jax.Array | int, x_BTD: jax.Array) -> jax.Array:
        """Return the residual stream after the taps of a point. With scanned layers, ``layer`` is a traced value."""
        for (tap_point, tap_layer), functions in self._functions.items():
            if tap_point != point or not functions or (isinstance(layer, int) and layer != tap_layer):
                continue
            if isinstance(layer, int):
                x_BTD = _call(functions, x_BTD)
            else:
                x_BTD = jax.lax.cond(layer == tap_layer, lambda x, f=tuple(functions): _call(f, x), lambda x: x, x_BTD)
        return x_BTD


def _call(functions: list[Tap] | tuple[Tap, ...], x_BTD: jax.Array) -> jax.Array:
    for function in functions:
        replacement = function(x_BTD)
        if replacement is not None:
            x_BTD = replacement.astype(x_BTD.dtype)
    return x_BTD


def moments(x_BTD: jax.Array) -> jax.Array:
    """Return mean, mean square and largest magnitude ``[3]``, which can be reduced over micro-batches."""
    x = jax.lax.stop_gradient(x_BTD).astype(jnp.float32)
    return jnp.stack([x.mean(), jnp.square(x).mean(), jnp.abs(x).max()])


def statistics(moments_ALP3: npt.NDArray[np.float32]) -> dict[str, float]:
    """Reduce moments to mean, standard deviation and largest magnitude per tap point of a step, by metric name."""
    mean_LP = moments_ALP3[..., 0].mean(axis=0)
    deviation_LP = np.sqrt(np.maximum(moments_ALP3[..., 1].mean(axis=0) - np.square(mean_LP), 0))
    largest_LP = moments_ALP3[..., 2].max(axis=0)
    points = POINTS if mean_LP.shape[1] == len(POINTS) else MIXER_POINTS
    return {
        f"activation/{layer}/{point}/{kind}": float(values[layer, index])
        for layer in range(mean_LP.shape[0])
        for index, point in enumerate(points)
        for kind, values in (("mean", mean_LP), ("std", deviation_LP), ("absmax", largest_LP))
    }
