"""Memory of a compiled step as XLA plans it (``vorox plan --compile``).

In: a run. Out: its memory estimate, with XLA's figure in place of everything that a step computes. The step is compiled
for arrays that do not exist, so only the compiler takes memory and time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vorox.backends.jax_engine.device import devices
from vorox.backends.jax_engine.device.inputs import batch_to_devices
from vorox.backends.jax_engine.engine import JaxEngine
from vorox.backends.jax_engine.optimizer import State
from vorox.core.batch import Batch, DataCursor
from vorox.core.batch_sizes import batch_sizes_of
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.models.decoder.spec import DecoderSpec
from vorox.planning.memory_estimate import MemoryEstimate

_PROCESS_BYTES = 320 << 20
_COMPILED_LAYER_BYTES = 28 << 20
"""On a CPU: libraries and buffers of the process, and what the compiler keeps of a layer (measured, jaxlib 0.11)."""


def compiled_memory(config: RunConfig, spec: DecoderSpec, estimate: MemoryEstimate) -> MemoryEstimate:
    """Return the memory of one device, with the temporary arrays of a step as XLA plans them.

    Args:
        config: The run, on the devices of this machine.
        spec: Its model.
        estimate: Its estimate; parameters, optimizer state and checkpoints are kept.

    Raises:
        ConfigError: The machine or this engine cannot honour a setting.
    """
    engine = JaxEngine(config, spec, devices.prepare(config, DistributedContext()))
    arrays = batch_to_devices(_empty_batch(config), engine.data_shard, engine.compute)
    numbers = (np.float32(0), np.float32(0), np.uint32(0), np.float32(np.inf))
    with engine.compute.precision():
        compiled = engine.compiled_step((_abstract_state(engine), arrays, *numbers))
    found = compiled.memory_analysis()
    temporary = found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    if engine.compute.platform == "cpu":
        num_bodies = 1 if config.runtime.scan_layers else spec.num_layers
        temporary += _PROCESS_BYTES + _COMPILED_LAYER_BYTES * num_bodies
    return replace(
        estimate, gradient_bytes=0, activation_bytes=0, logits_bytes=0, mask_bytes=0, copy_bytes=0,
        workspace_bytes=temporary,
    )  # fmt: skip


def _abstract_state(engine: JaxEngine) -> State:
    """Return shapes and shardings of the training state."""
    layout, compute = engine.layout, engine.compute

    def sharded(tree: Mapping[str, Any]) -> Any:
        shardings = {leaf: compute.parameter_sharding(layout, leaf) for leaf in tree}
        return {
            leaf: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=shardings[leaf])
            for leaf, array in tree.items()
        }

    params: Any = {
        leaf: jax.ShapeDtypeStruct((*layout.stack_shape(leaf), *parameters[0].shape), jnp.float32)
        for leaf, parameters in layout.leaves.items()
    }
    state, updates = jax.eval_shape(engine.optimizer.init, params), jax.ShapeDtypeStruct((), jnp.float32)
    moments = {kind: sharded(tree) for kind, tree in state.moments.items()}
    counter: Any = updates.update(sharding=compute.sharding())
    return state._replace(params=sharded(params), **moments, updates=counter)


def _empty_batch(config: RunConfig) -> Batch:
    """Return the largest batch of the run, with no content."""
    rows, length = config.train.micro_batch_rows, config.data.sequence_length_tokens
    shape = (-(-batch_sizes_of(config).largest // rows), rows, length)
    empty = np.zeros(shape, np.int32)
    documents = empty if config.data.document_mask else None
    return Batch(
        0, empty, empty, documents, documents, np.zeros(shape[:2], np.uint64), empty.size, DataCursor("", 0, 1, 0, 0)
    )
