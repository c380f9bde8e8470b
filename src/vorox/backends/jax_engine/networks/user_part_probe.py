"""Check functions of the user inside the decoder before step 1: they run, and see neither future nor others.

``model.attention_kernel`` and ``model.activation`` are called as the decoder calls them, with random values. A later
position must not change earlier ones, nor a document the next in its row. A function that cannot be called is refused
with what it is called with.

Shape legend: B rows, T positions, N query heads, K key/value heads, H head width, F width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from vorox.backends.jax_engine.attention import Array, AttentionMask, attention_kernel
from vorox.core.errors import ConfigError, VoroxError
from vorox.core.schema import RunConfig
from vorox.core.user_code.extensions import call_error, is_extension, load_function
from vorox.models.decoder.spec import DecoderSpec

PROBE_TOKENS = 512
"""Kernels of accelerators take multiples of their tiles."""
_TOLERANCE, _HALF_TOLERANCE = 1e-4, 1e-2
"""Largest difference that is rounding, relative to the largest value, in fp32 and in half precision."""

Run = Callable[[slice, Array | None], Array]
"""(changed positions, segment ids ``[B, T]``) -> values of all positions ``[B, T, ...]``."""


def check_user_parts(config: RunConfig, spec: DecoderSpec, dtype: Any) -> None:
    """Check the functions of the user.

    Args:
        config: The run.
        spec: The model.
        dtype: Precision of activations.

    Raises:
        ConfigError: A function cannot be called as it is, or what it sees is not its own past.
    """
    length = min(config.data.sequence_length_tokens, PROBE_TOKENS)
    tolerance = _TOLERANCE if dtype == jnp.float32 else _HALF_TOLERANCE
    kernel, activation = config.model.attention_kernel, config.model.activation
    if is_extension(kernel):
        key, width = "model.attention_kernel", spec.head_dim
        attend, shapes = attention_kernel(kernel), [(spec.num_heads, width), *[(spec.num_kv_heads, width)] * 2]
        values = [_random((1, length, *shape), dtype, seed) for seed, shape in enumerate(shapes)]

        def mix(changed: slice, segments_BT: Array | None) -> Array:
            query_BTNH, key_BTKH, value_BTKH = (_changed(value, changed) for value in values)
            try:
                mixed_BTNH = attend(query_BTNH, key_BTKH, value_BTKH, AttentionMask(segments_BT), None)
                return _same_shape(mixed_BTNH, query_BTNH)
            except VoroxError:
                raise
            except Exception as error:  # a user's function can raise anything
                raise call_error(
                    kernel, error, where=key, signature="f(query, key, value, mask=None, is_causal=False)",
                    arguments="query, key and value [rows, positions, heads, width], and a mask that is true where a "
                    "query may attend", returns="an array of the shape of the query",
                ) from error  # fmt: skip

        _check(mix, length, config.data.document_mask, tolerance, kernel, key)
    if activation is not None and is_extension(activation):
        key, function = "model.activation", load_function(activation, kind="activation", where="model.activation")
        x_BTF = _random((1, length, spec.intermediate_size), dtype, 0)

        def activate(changed: slice, segments_BT: Array | None) -> Array:
            del segments_BT
            try:
                return _same_shape(function(_changed(x_BTF, changed)), x_BTF)
            except Exception as error:  # a user's function can raise anything
                raise call_error(
                    activation, error, where=key, signature="f(x)", arguments="x [rows, positions, intermediate_size]",
                    returns="an array of the shape of x",
                ) from error  # fmt: skip

        _check(activate, length, config.data.document_mask, tolerance, activation, key)


def _check(run: Run, length: int, separates: bool, tolerance: float, name: str, where: str) -> None:
    def differs(found: Array, expected: Array) -> bool:
        difference = np.abs(np.asarray(found, np.float32) - np.asarray(expected, np.float32)).max()
        return not difference <= tolerance * np.abs(np.asarray(expected, np.float32)).max()

    whole, middle = run(slice(0, 0), None), length // 2
    for start in sorted({length - 1, middle} - {0}):
        if differs(run(slice(start, None), None)[:, :start], whole[:, :start]):
            raise ConfigError(
                f"{name} is not causal: a later position changes earlier ones", where=where,
                hint="let a position see earlier ones only: apply is_causal, or the mask that it is given",
            )  # fmt: skip
    if not separates or not middle:
        return
    segments_BT = jnp.asarray(np.repeat([1, 2], [middle, length - middle])[None])
    packed = run(slice(0, 0), segments_BT)
    if differs(run(slice(0, middle), segments_BT)[:, middle:], packed[:, middle:]):
        raise ConfigError(
            f"Documents of a row see each other in {name}", where=where,
            hint="apply mask, or set data.document_mask=false",
        )  # fmt: skip
    if differs(run(slice(length - 1, None), segments_BT)[:, : length - 1], packed[:, : length - 1]):
        raise ConfigError(f"{name} is not causal in rows of several documents", where=where, hint="apply mask")


def _random(shape: tuple[int, ...], dtype: Any, seed: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def _changed(value: Array, positions: slice) -> Array:
    return value.at[:, positions].add(1)


def _same_shape(found: Array, expected: Array) -> Array:
    if found.shape != expected.shape:
        raise ValueError(f"it returned the shape {list(found.shape)} instead of {list(expected.shape)}")
    return found
