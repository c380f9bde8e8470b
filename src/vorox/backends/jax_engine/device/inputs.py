"""Batches on their way to the devices."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from vorox.backends.jax_engine.device import devices
from vorox.backends.jax_engine.device.devices import Compute
from vorox.backends.jax_engine.ranks import distributed
from vorox.core.batch import IGNORED_LABEL, Batch, DataShard, Int32Array


def batch_to_devices(batch: Batch, shard: DataShard, compute: Compute) -> dict[str, jax.Array]:
    """Copy a batch to the devices, rows sharded over the mesh; consecutive micro-batches run side by side.

    Of masked documents, ``masked_targets`` has the number of labels that the loss is divided by nevertheless. It is
    there in every batch of several processes, which compile one program.

    Args:
        batch: The rows of ``shard``.
        shard: The part of the global batch that this process holds.
        compute: The mesh.
    """
    arrays = {
        "tokens": batch.tokens_ABT,
        "labels": batch.labels_ABT,
        "segments": batch.segment_ids_ABT,
        "positions": batch.position_ids_ABT,
        "masked_targets": _masked_targets(batch, shard),
    }
    parts, num_micro_batches = compute.num_row_parts, batch.tokens_ABT.shape[0]
    together = parts if shard.is_whole and num_micro_batches % parts == 0 else 1
    found: dict[str, jax.Array] = {}
    for name, array in arrays.items():
        if array is None:
            continue
        joined = array.reshape(num_micro_batches // together, -1, array.shape[2])
        num_rows = joined.shape[1] // shard.width * shard.count
        sharding = compute.sharding(None, devices.ROWS if num_rows % parts == 0 else None, None)
        found[name] = distributed.rows_to_devices(joined, sharding, num_rows, shard)
    return found


def _masked_targets(batch: Batch, shard: DataShard) -> Int32Array | None:
    """Return the number of targets without a label, ``[A, B, 1]``, all in one row."""
    missing = batch.num_target_tokens - int(np.count_nonzero(batch.labels_ABT != IGNORED_LABEL))
    if not missing and shard.is_whole:
        return None
    counts_AB1 = np.zeros((*batch.labels_ABT.shape[:2], 1), np.int32)
    counts_AB1[0, 0] = missing
    return counts_AB1


def loss_scale(arrays: Mapping[str, jax.Array]) -> jax.Array:
    """Return one over the number of targets of a batch, over all processes; those of masked documents count."""
    num_targets = (arrays["labels"] != IGNORED_LABEL).sum()
    if "masked_targets" in arrays:
        num_targets += arrays["masked_targets"].sum()
    return 1.0 / jnp.maximum(num_targets, 1).astype(jnp.float32)
