"""Estimate of the memory that training a model takes.

Computed from shapes: parameters, gradients and optimizer state, the activations that operations save for the backward
pass, logits, and temporary tensors. On a CPU, the memory of libraries and the copy for a checkpoint are included, and
a benchmark compares the sum with the peak of real runs. On accelerators, memory of kernels and the
framework is not included.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

from vorox.core.batch_sizes import batch_sizes_of
from vorox.core.schema import RunConfig
from vorox.models.cpu_memory import cpu_workspace
from vorox.models.experts import split_expert
from vorox.models.module_spec import is_stack_of_experts
from vorox.models.optimizer_groups import optimizer_groups
from vorox.models.pipeline_stages import parameters_of, stages_of_device
from vorox.models.spec import ModelSpec, ParameterSpec
from vorox.models.transient_gradients import gradient_elements

FP32_BYTES = 4
CPU_CHUNK_BYTES = 4 << 20
"""Largest logits chunk on the CPU, so that it stays within the processor's caches."""
_LEAST_CPU_CHUNK_POSITIONS = 64


def loss_chunk_positions(chunk_tokens: int, vocab_size: int, device_kind: str) -> int:
    """Return the positions of a chunk of logits.

    Args:
        chunk_tokens: ``loss.chunk_tokens``.
        vocab_size: Logits of a position.
        device_kind: Kind of the device; on the ``cpu``, chunks are smaller.
    """
    if device_kind != "cpu":
        return chunk_tokens
    return min(chunk_tokens, max(_LEAST_CPU_CHUNK_POSITIONS, CPU_CHUNK_BYTES // (FP32_BYTES * vocab_size)))


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Peak memory of a step on one device, and of checkpoints on the host.

    Attributes:
        parameter_bytes: Parameters, with the frozen model under an adapter, or the reference of DPO.
        gradient_bytes: Gradients, with the partial sums of ``determinism=bitwise-any-world``; with
            ``optimizer.in_backward``, those that exist at a time.
        optimizer_bytes: Optimizer moments.
        activation_bytes: Activations saved for the backward pass.
        logits_bytes: Logits of a chunk, or of the micro-batch, and their gradient.
        mask_bytes: Dense attention masks, with ``data.document_mask`` or sliding windows.
        saved_moment_bytes: Optimizer moments in a checkpoint, fp32.
        snapshot_bytes: Host memory of the snapshot from which a checkpoint is written in the background.
        copy_bytes: Parameters in the compute precision: of all matrices, or of what FSDP has gathered.
        workspace_bytes: On a CPU: temporary tensors of gradients and of the update, with the holes that they leave,
            and libraries.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    logits_bytes: int
    mask_bytes: int = 0
    saved_moment_bytes: int = 0
    snapshot_bytes: int = 0
    copy_bytes: int = 0
    workspace_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Memory on the device."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.logits_bytes
            + self.mask_bytes
            + self.copy_bytes
            + self.workspace_bytes
        )

    def total_bytes_on(self, device_kind: str) -> int:
        """Return the memory on the device; on a ``cpu`` it includes the host's."""
        return self.total_bytes + (self.snapshot_bytes if device_kind == "cpu" else 0)


def estimate_memory(spec: ModelSpec, config: RunConfig, device_kind: str = "cuda") -> MemoryEstimate:
    """Estimate the peak memory of a run's training step while a checkpoint is being written.

    State and activations of one device, except that FSDP and tensor parallelism are not counted; see
    ``memory_per_device``. For a pipeline, it is the fullest device. With context parallelism, a device has its
    part of the positions.

    Args:
        spec: The model.
        config: The run.
        device_kind: Kind of the device; on a ``cpu``, chunks of logits are smaller, and libraries are included.
    """
    whole, size = undivided_memory(spec, config, device_kind), config.parallel.pipeline_parallel_size
    if size == 1:
        return whole
    devices = [_pipeline_device(spec, config, whole, index) for index in range(size)]
    return max(devices, key=lambda device: device.total_bytes)


def undivided_memory(spec: ModelSpec, config: RunConfig, device_kind: str = "cuda") -> MemoryEstimate:
    """Estimate ``estimate_memory`` without a pipeline; checkpoints have the state of all its devices."""
    frozen = {name for name, group in optimizer_groups(spec, config.optimizer).items() if group.is_frozen}
    step = training_memory(
        spec,
        micro_batch_sequences=config.train.micro_batch_rows,
        sequence_length_tokens=config.data.sequence_length_tokens,
        dtype_bytes=FP32_BYTES if config.precision.dtype == "fp32" else 2,
        optimizer=config.optimizer.name,
        recompute_blocks=config.train.activation_checkpointing == "block",
        loss_chunk_tokens=loss_chunk_positions(config.loss.chunk_tokens, spec.vocab_size, device_kind),
        dense_masks=_dense_masks(spec, config),
        frozen=frozen,
        has_average=config.train.ema_decay is not None,
        position_parts=config.parallel.context_parallel_size,
        stream_parts=_stream_parts(config),
    )
    if config.optimizer.in_backward:
        step = replace(step, gradient_bytes=FP32_BYTES * gradient_elements(spec, frozen))
    saved = FP32_BYTES * spec.num_parameters + step.saved_moment_bytes
    reference = config.loss.name == "dpo" and config.adapter.kind == "none"
    if device_kind == "cpu":
        logits = step.logits_bytes if spec.has_whole_logits else 2 * step.logits_bytes  # those of the chunk before, too
        step = replace(step, logits_bytes=logits, workspace_bytes=cpu_workspace(spec, config))
    return replace(
        step,
        parameter_bytes=step.parameter_bytes * (1 + reference),
        gradient_bytes=step.gradient_bytes * (1 + _num_partial_sums(config)),
        snapshot_bytes=saved if config.checkpoint.asynchronous else 0,
    )


def _pipeline_device(spec: ModelSpec, config: RunConfig, whole: MemoryEstimate, index: int) -> MemoryEstimate:
    """Return the memory of a device of a pipeline.

    It keeps the activations of the micro-batches whose backward pass has not come: as many as there are devices from
    this one on. Interleaved stages keep more (Narayanan et al., arXiv 2104.04473), and with a zero-bubble schedule also
    what gradients of weights wait for. It also has a buffer for every micro-batch, for what it receives from other
    stages.

    Args:
        spec: The model.
        config: The run.
        whole: The memory without a pipeline.
        index: Index of the device in the pipeline.
    """
    parallel, train, length = config.parallel, config.train, config.data.sequence_length_tokens
    size, per_device = parallel.pipeline_parallel_size, parallel.pipeline_stages_per_device
    stages = stages_of_device(spec.num_layers, size, per_device, index)
    table = parameters_of(spec, stages)
    share = sum(row.num_elements for row in table) / spec.num_parameters
    count = parallel.num_micro_batches(train.micro_batch_rows, batch_sizes_of(config).largest, parallel.num_row_parts)
    kept = min(count, size - index)  # micro-batches, or passes through one stage
    if per_device > 1:
        waiting = index if parallel.pipeline_schedule == "zero_bubble" else 0
        kept = min(count * per_device, (per_device - 1) * size + 2 * (size - index - 1) + 1 + waiting)
    layers = max(len(stage.layers) for stage in stages)
    dtype_bytes = FP32_BYTES if config.precision.dtype == "fp32" else 2
    row, stream_parts = spec.saved_activations(length, dtype_bytes), _stream_parts(config)
    block_input = row.block_input_bytes / stream_parts
    if train.activation_checkpointing == "block":
        blocks = kept * layers * block_input + row.largest_block_bytes
    else:
        blocks = kept * layers * row.all_blocks_bytes / spec.num_layers
    received = sum((not stage.is_first) + (not stage.is_last) for stage in stages)
    stream = FP32_BYTES * length * spec.hidden_size / stream_parts
    return replace(
        whole,
        parameter_bytes=round(whole.parameter_bytes * share),
        gradient_bytes=round(whole.gradient_bytes * share),
        optimizer_bytes=round(whole.optimizer_bytes * share),
        snapshot_bytes=round(whole.snapshot_bytes * share),
        activation_bytes=round(train.micro_batch_rows * (blocks + 2 * block_input + received * count * stream)),
        logits_bytes=whole.logits_bytes if stages[-1].is_last else 0,
        mask_bytes=whole.mask_bytes * kept,
    )


def _stream_parts(config: RunConfig) -> int:
    """Return how many ranks the residual stream of training is divided over (sequence parallelism)."""
    return config.parallel.tensor_parallel_size if config.parallel.sequence_parallel else 1


def _num_partial_sums(config: RunConfig) -> int:
    """Return how many partial sums of the gradients a step keeps while it runs its micro-batches."""
    if config.runtime.determinism != "bitwise-any-world":
        return 0
    rows = config.train.micro_batch_rows * config.parallel.num_row_parts
    return (-(-batch_sizes_of(config).largest // rows) - 1).bit_length()


def memory_per_device(spec: ModelSpec, config: RunConfig, device_kind: str = "cuda") -> MemoryEstimate:
    """Estimate the peak memory of one of the run's devices, with ``parallel.*`` counted.

    FSDP and tensor parallelism shard parameters, gradients and optimizer state; ranks that divide positions share the
    shards of FSDP. FSDP gathers two blocks (one computes while the next arrives) and the embedding and head, or all
    blocks without ``reshard_after_forward``; a block's gradients exist whole until they are summed. With
    ``fsdp_offload``, a GPU has nothing else of parameters, gradients and optimizer state.
    """
    parallel, planned = config.parallel, estimate_memory(spec, config, device_kind)
    dtype_bytes = FP32_BYTES if config.precision.dtype == "fp32" else 2
    shards = parallel.num_state_shards
    if parallel.fsdp_size > 1:
        tensor = parallel.tensor_parallel_size
        blocks = sum(row.num_elements for row in spec.parameters if _is_in_a_block(row.name)) // tensor
        block, rest = blocks // max(1, spec.num_layers), spec.num_parameters // tensor - blocks
        if parallel.pipeline_parallel_size > 1:  # the blocks of this device; it has the embedding or the head at most
            here = planned.parameter_bytes // FP32_BYTES // tensor
            blocks, rest = min(blocks, here), min(rest, here)
        gathered = (2 * block if parallel.reshard_after_forward else blocks) + rest
        copies = dtype_bytes * gathered + FP32_BYTES * max(block, rest)
    else:
        converted = spec.num_converted_weights
        if parallel.pipeline_parallel_size > 1:
            converted = min(converted, planned.parameter_bytes // FP32_BYTES)
        copies = 0 if dtype_bytes == FP32_BYTES else dtype_bytes * converted // shards
    share = 1 / shards
    if parallel.expert_parallel_size > 1:
        experts = sum(row.num_elements for row in spec.parameters if _is_of_experts(row))
        share = 1 - experts / spec.num_parameters * (1 - 1 / parallel.expert_parallel_size)
        copies = round(copies * share)
    on_device = 0 if parallel.fsdp_offload and device_kind != "cpu" else share
    return replace(
        planned,
        parameter_bytes=round(planned.parameter_bytes * on_device),
        gradient_bytes=round(planned.gradient_bytes * on_device),
        optimizer_bytes=round(planned.optimizer_bytes * on_device),
        snapshot_bytes=round(planned.snapshot_bytes * share),
        copy_bytes=copies,
    )


def _is_of_experts(row: ParameterSpec) -> bool:
    return split_expert(row.name) is not None or is_stack_of_experts(row)


def _is_in_a_block(name: str) -> bool:
    """Whether a parameter belongs to a repeated block: its canonical name contains the number of the block."""
    return any(part.isdigit() for part in name.split("."))


def training_memory(
    spec: ModelSpec,
    *,
    micro_batch_sequences: int,
    sequence_length_tokens: int,
    dtype_bytes: int,
    optimizer: str,
    recompute_blocks: bool,
    loss_chunk_tokens: int,
    dense_masks: int = 0,
    frozen: Container[str] = (),
    has_average: bool = False,
    position_parts: int = 1,
    stream_parts: int = 1,
) -> MemoryEstimate:
    """Estimate the peak memory of one training step.

    Args:
        spec: The model. Parameters, gradients and optimizer state are fp32.
        micro_batch_sequences: Rows of a forward pass.
        sequence_length_tokens: Positions of a row.
        dtype_bytes: Bytes per activation element: 4 for fp32, 2 for bf16 and fp16.
        optimizer: ``adamw`` has two moments per parameter, ``muon`` one for matrices, ``adamw_8bit`` two bytes for each
            decayed parameter; others are assumed to have two moments.
        recompute_blocks: Activation checkpointing: only block inputs are saved, and blocks are recomputed one by one.
        loss_chunk_tokens: Positions per chunk of logits.
        dense_masks: Number of dense attention masks, each as booleans and as additive floats.
        frozen: Parameters without gradient and optimizer state.
        has_average: Whether a moving average of the trained parameters is kept.
        position_parts: Devices that the positions of each row are divided over. Masks cover whole rows.
        stream_parts: Devices that the residual stream is divided over (sequence parallelism).
    """
    trained = [row for row in spec.parameters if row.name not in frozen]
    gradients = FP32_BYTES * sum(row.num_elements for row in trained)
    state = (3 if has_average else 2) * gradients
    if optimizer == "muon":
        state -= FP32_BYTES * sum(row.num_elements for row in trained if row.kind == "matrix")
    saved = state
    if optimizer == "adamw_8bit":
        state -= 6 * sum(row.num_elements for row in trained if row.decay)
    positions = micro_batch_sequences * sequence_length_tokens
    row = spec.saved_activations(sequence_length_tokens, dtype_bytes)
    stream, here = row.block_input_bytes / stream_parts, -(-positions // position_parts)
    blocks = stream * spec.num_layers + row.largest_block_bytes if recompute_blocks else row.all_blocks_bytes
    if spec.has_whole_logits:  # in the compute precision; in fp32 and twice as gradients
        logits = here * spec.vocab_size * (3 * FP32_BYTES + (dtype_bytes if dtype_bytes < FP32_BYTES else 0))
    else:
        logits = 2 * FP32_BYTES * min(loss_chunk_tokens, here) * spec.vocab_size
    return MemoryEstimate(
        parameter_bytes=FP32_BYTES * spec.num_parameters + spec.frozen_bytes(dtype_bytes),
        gradient_bytes=gradients,
        optimizer_bytes=state,
        saved_moment_bytes=saved,
        activation_bytes=round(micro_batch_sequences * (blocks + 2 * stream) / position_parts),
        logits_bytes=logits,
        mask_bytes=dense_masks * positions * sequence_length_tokens * (1 + dtype_bytes),
    )


def _dense_masks(spec: ModelSpec, config: RunConfig) -> int:
    """Return the number of kinds of layers whose attention mask is dense: full, and with a sliding window."""
    if config.parallel.context_parallel_size > 1 and config.parallel.context_parallel_kind == "ring":
        return 0
    length = config.data.sequence_length_tokens
    windows = {None if window is None or window >= length else window for window in spec.layer_windows}
    return len(windows) if config.data.document_mask else len(windows - {None})
