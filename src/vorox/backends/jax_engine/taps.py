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

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vorox.core.engine import TapPoint
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.decoder.tap_points import POINTS, TapFunctions, decoder_points

MIXER_POINTS: tuple[TapPoint, ...] = ("block_input", "after_mlp")
"""Where a layer of ``model.layer_pattern`` is measured."""
Tap = Callable[[jax.Array], jax.Array | None]


class Taps(TapFunctions):
    """The taps of one model; compiled steps are invalid after a change."""

    def __init__(self, spec: DecoderSpec, on_change: Callable[[], None]) -> None:
        super().__init__(decoder_points(spec), on_change)

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
