"""Fused output head and cross-entropy loss, in chunks, so that the full logits are never materialised.

A scan goes over chunks of positions. Each chunk's gradient is computed while its logits are in memory, and the head's
gradient is accumulated in the scan, so the head's product is not repeated in a backward pass. Sums are over target
positions; the caller divides by the global count. Chunks split positions, never rows, which may be sharded.

Shape legend: B rows, T positions, n chunks, c positions per chunk, D width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from vorox.core.batch import IGNORED_LABEL
from vorox.core.schema import LossConfig
from vorox.core.user_code.extensions import is_extension, load_function

Array = jax.Array


class LossSums(NamedTuple):
    """Sums over target positions, fp32; ``objective`` is the result of a user function, else 0."""

    cross_entropy: Array
    squared_log_partition: Array
    num_correct: Array
    objective: Array


def evaluate(hidden_BTD: Array, head_VD: Array, labels_BT: Array, chunk_tokens: int) -> LossSums:
    """Return the loss sums without gradients."""
    config = LossConfig(chunk_tokens=chunk_tokens)
    chunks = _chunks(hidden_BTD, labels_BT, chunk_tokens)
    _, sums = jax.lax.scan(lambda carry, chunk: (carry, _objective(*chunk, head_VD, config)[1]), None, chunks)
    return LossSums(*(part.sum() for part in sums))


def train(
    hidden_BTD: Array, head_VD: Array, labels_BT: Array, config: LossConfig, scale: Array
) -> tuple[LossSums, Array, Array]:
    """Return the loss sums and the gradients of the scaled objective with respect to hidden states and head (fp32).

    Args:
        scale: One over the global number of targets.
    """

    def step(d_head_VD: Array, chunk: tuple[Array, Array]) -> tuple[Array, tuple[Array, LossSums]]:
        hidden_BcD, labels_Bc = chunk

        def scaled(hidden: Array, head: Array) -> tuple[Array, LossSums]:
            objective, sums = _objective(hidden, labels_Bc, head, config)
            return objective * scale, sums

        (_, sums), (d_hidden, d_head) = jax.value_and_grad(scaled, argnums=(0, 1), has_aux=True)(hidden_BcD, head_VD)
        return d_head_VD + d_head, (d_hidden, sums)

    chunks = _chunks(hidden_BTD, labels_BT, config.chunk_tokens)
    d_head_VD, (d_hidden_nBcD, sums) = jax.lax.scan(step, jnp.zeros_like(head_VD), chunks)
    num_rows, num_positions, width = hidden_BTD.shape
    d_hidden_BTD = d_hidden_nBcD.swapaxes(0, 1).reshape(num_rows, -1, width)[:, :num_positions]
    return LossSums(*(part.sum() for part in sums)), d_hidden_BTD, d_head_VD


def _chunks(hidden_BTD: Array, labels_BT: Array, chunk_tokens: int) -> tuple[Array, Array]:
    """Split positions into chunks ``[n, B, c, D]`` and ``[n, B, c]``; the last chunk is padded with ignored labels."""
    num_rows, num_positions, width = hidden_BTD.shape
    num_chunks = -(-num_positions // max(1, chunk_tokens // num_rows))
    size = -(-num_positions // num_chunks)
    missing = num_chunks * size - num_positions
    hidden = jnp.pad(hidden_BTD, ((0, 0), (0, missing), (0, 0))).reshape(num_rows, num_chunks, size, width)
    labels = jnp.pad(labels_BT, ((0, 0), (0, missing)), constant_values=IGNORED_LABEL)
    return hidden.swapaxes(0, 1), labels.reshape(num_rows, num_chunks, size).swapaxes(0, 1)


def _objective(hidden_BcD: Array, labels_Bc: Array, head_VD: Array, config: LossConfig) -> tuple[Array, LossSums]:
    """Return the summed objective and the sums that are reported."""
    is_target_Bc = labels_Bc != IGNORED_LABEL
    # Ignored positions must not reach the head's gradient, not even as 0 * inf.
    hidden_BcD = jnp.where(is_target_Bc[..., None], hidden_BcD, 0.0)
    logits_BcV = jnp.einsum(
        "bcd,vd->bcv", hidden_BcD, head_VD.astype(hidden_BcD.dtype), preferred_element_type=jnp.float32
    )
    target_Bc1 = jnp.where(is_target_Bc, labels_Bc, 0)[..., None]
    target_Bc = jnp.take_along_axis(logits_BcV, target_Bc1, axis=-1)[..., 0]
    log_partition_Bc = jax.nn.logsumexp(logits_BcV, axis=-1)
    cross_entropy_Bc = log_partition_Bc - target_Bc
    objective_Bc, smoothing = cross_entropy_Bc, config.label_smoothing_fraction
    if smoothing:
        uniform_Bc = log_partition_Bc - logits_BcV.mean(axis=-1)
        objective_Bc = (1 - smoothing) * cross_entropy_Bc + smoothing * uniform_Bc
    if config.z_loss_weight:
        objective_Bc = objective_Bc + config.z_loss_weight * jnp.square(log_partition_Bc)

    def total(values_Bc: Array) -> Array:
        return jnp.where(is_target_Bc, values_Bc, 0.0).sum()

    is_correct_Bc = (jnp.argmax(jax.lax.stop_gradient(logits_BcV), axis=-1) == labels_Bc).astype(jnp.float32)
    sums = LossSums(total(cross_entropy_Bc), total(jnp.square(log_partition_Bc)), total(is_correct_Bc), jnp.zeros(()))
    if not is_extension(config.name):
        return total(objective_Bc), sums
    objective = load_function(config.name, kind="loss", where="loss.name")(logits_BcV, labels_Bc)
    return objective, sums._replace(objective=objective)
