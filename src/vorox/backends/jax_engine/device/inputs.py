"""Batches on their way to the devices."""

from __future__ import annotations

import jax

from vorox.backends.jax_engine.device import devices
from vorox.backends.jax_engine.device.devices import Compute
from vorox.backends.jax_engine.ranks import distributed
from vorox.core.batch import Batch, DataShard


def batch_to_devices(batch: Batch, shard: DataShard, compute: Compute) -> dict[str, jax.Array]:
    """Copy a batch to the devices, rows sharded over the mesh; consecutive micro-batches run side by side.

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
