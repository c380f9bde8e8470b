"""Estimate of the memory that training a model takes.

Computed from shapes: parameters, gradients and optimizer state, the activations that operations save for the backward
pass, logits, and temporary tensors. On a CPU, the memory of libraries and the copy for a checkpoint are included, and
a benchmark compares the sum with the peak of real runs. On accelerators, memory of kernels and the
framework is not included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, replace

from vorox.core.batch_sizes import batch_sizes_of
from vorox.core.schema import RunConfig
from vorox.models.decoder.document_separation import attention_matrix_bytes
from vorox.models.optimizer_groups import optimizer_groups
from vorox.models.pipeline_stages import StagePlacement, parameters_of
from vorox.models.spec import ModelSpec
from vorox.planning.cpu_memory import cpu_workspace

FP32_BYTES = 4
CPU_CHUNK_BYTES = 4 << 20
"""Largest logits chunk on the CPU, so that it stays within the processor's caches."""
_LEAST_CPU_CHUNK_POSITIONS = 64
PART_NAMES = {
    "parameter_bytes": "parameters", "gradient_bytes": "gradients", "optimizer_bytes": "optimizer state",
    "copy_bytes": "copies in lower precision", "activation_bytes": "activations", "logits_bytes": "logits",
    "mask_bytes": "attention mask", "workspace_bytes": "temporary tensors and libraries",
    "snapshot_bytes": "checkpoint copy",
}  # fmt: skip
"""Fields of ``MemoryEstimate`` that are memory, with their names for people."""


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
        mask_bytes: Dense attention masks, where documents or sliding windows need them, and the weights of attention by
            the plain formula (``decoder/document_separation.py``).
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

    def parts_on(self, device_kind: str) -> dict[str, int]:
        """Return the parts of ``total_bytes_on`` that are not empty, by their names for people."""
        fields = [field for field in PART_NAMES if field != "snapshot_bytes" or device_kind == "cpu"]
        return {PART_NAMES[field]: value for field in fields if (value := int(getattr(self, field)))}


def on_devices(config: RunConfig, num_devices: int) -> RunConfig:
    """Return the configuration with replicas on all devices, and the micro-batch that the run would use."""
    parallel = config.parallel.model_copy(
        update={"data_parallel_size": config.parallel.data_parallel_size_on(num_devices)}
    )
    rows = config.parallel.micro_batch_sequences(
        config.train.micro_batch_rows, config.train.global_batch_sequences, parallel.num_row_parts
    )
    train = config.train.model_copy(update={"micro_batch_sequences": rows})
    return config.model_copy(update={"parallel": parallel, "train": train})


def _fullest_pipeline_device(spec: ModelSpec, config: RunConfig, device_kind: str) -> MemoryEstimate:
    """Estimate the device of a pipeline that needs most memory, before its state is sharded; without one, any device.

    With context parallelism, a device has its part of the positions.
    """
    whole, size = _undivided_memory(spec, config, device_kind), config.parallel.pipeline_parallel_size
    if size == 1:
        return whole
    devices = [_pipeline_device(spec, config, whole, index) for index in range(size)]
    return max(devices, key=lambda device: device.total_bytes)


def checkpoint_state_bytes(spec: ModelSpec, config: RunConfig) -> int:
    """Return the size of the state in a checkpoint: the parameters of the model or adapter, and their moments, fp32.

    A frozen base, and the reference of DPO, are in no checkpoint.
    """
    return FP32_BYTES * spec.num_parameters + _saved_moment_bytes(spec, config)


def _frozen_names(spec: ModelSpec, config: RunConfig) -> set[str]:
    return {name for name, group in optimizer_groups(spec, config.optimizer).items() if group.is_frozen}


def _saved_moment_bytes(spec: ModelSpec, config: RunConfig) -> int:
    """Return the size of all moments in fp32.

    An average of the weights counts as one more.
    """
    frozen = _frozen_names(spec, config)
    trained = [row for row in spec.parameters if row.name not in frozen]
    num_averages = 0 if config.train.ema_decay is None else 1
    num_moments = {"matrix": 1 if config.optimizer.facts.orthogonalises else 2}
    return FP32_BYTES * sum((num_moments.get(row.kind, 2) + num_averages) * row.num_elements for row in trained)


def _undivided_memory(spec: ModelSpec, config: RunConfig, device_kind: str) -> MemoryEstimate:
    """Estimate the memory of a device that has the whole state.

    Parameters, gradients and moments are fp32, but for the moments of ``adamw_8bit``.
    """
    train, optimizer = config.train, config.optimizer
    frozen = _frozen_names(spec, config)
    trained = [row for row in spec.parameters if row.name not in frozen]
    gradients = FP32_BYTES * sum(row.num_elements for row in trained)
    moments = saved = _saved_moment_bytes(spec, config)
    moments -= (2 * FP32_BYTES - optimizer.facts.held_moment_bytes) * sum(
        row.num_elements for row in trained if row.decay
    )
    if optimizer.in_backward:
        gradients = FP32_BYTES * _transient_gradient_elements(spec, frozen)
    rows, length, dtype_bytes = train.micro_batch_rows, config.data.sequence_length_tokens, _dtype_bytes(config)
    row = spec.saved_activations(length, dtype_bytes)
    blocks, stream = row.all_blocks_bytes, row.block_input_bytes / _stream_parts(config)
    if train.activation_checkpointing == "block":
        blocks = stream * spec.num_layers + row.largest_block_bytes
    has_reference = config.loss.name == "dpo" and config.adapter.kind == "none"
    # A graph keeps the memory of its pass, and passes without one need their own.
    num_passes = 2 if config.runtime.cuda_graphs else 1
    return MemoryEstimate(
        parameter_bytes=(FP32_BYTES * spec.num_parameters + spec.frozen_bytes(dtype_bytes)) * (1 + has_reference),
        gradient_bytes=gradients * (1 + _num_partial_sums(config)),
        optimizer_bytes=moments,
        activation_bytes=round(num_passes * rows * (blocks + 2 * stream) / config.parallel.context_parallel_size),
        logits_bytes=num_passes * _logits_bytes(spec, config, device_kind),
        mask_bytes=rows * attention_matrix_bytes(spec, config, device_kind, dtype_bytes),
        saved_moment_bytes=saved,
        snapshot_bytes=checkpoint_state_bytes(spec, config) if config.checkpoint.asynchronous else 0,
        workspace_bytes=cpu_workspace(spec, config) if device_kind == "cpu" else 0,
    )


def _dtype_bytes(config: RunConfig) -> int:
    """Return the bytes of an activation."""
    return FP32_BYTES if config.precision.dtype == "fp32" else 2


def _logits_bytes(spec: ModelSpec, config: RunConfig, device_kind: str) -> int:
    """Return the bytes of the logits of a chunk, or of the micro-batch, and of their gradient."""
    positions = config.train.micro_batch_rows * config.data.sequence_length_tokens
    here, dtype_bytes = -(-positions // config.parallel.context_parallel_size), _dtype_bytes(config)
    if spec.has_whole_logits:  # in the compute precision; in fp32 and twice as gradients
        return here * spec.vocab_size * (3 * FP32_BYTES + (dtype_bytes if dtype_bytes < FP32_BYTES else 0))
    chunk = min(loss_chunk_positions(config.loss.chunk_tokens, spec.vocab_size, device_kind), here)
    num_chunks = 2 if device_kind == "cpu" else 1  # those of the chunk before, too
    return num_chunks * 2 * FP32_BYTES * chunk * spec.vocab_size


def _transient_gradient_elements(spec: ModelSpec, frozen: Container[str]) -> int:
    """Return the elements of the gradients that exist at a time with ``optimizer.in_backward``, at most.

    Parameters outside the blocks are updated one by one. All gradients of a block are counted: a compiled block returns
    them together. A matrix that is embedding and head gets its gradient from the loss on, and is complete at the end.
    """
    parts = Counter[str]()
    for row in spec.parameters:
        if row.name not in frozen:
            parts[_block_of(row.name) or row.name] += row.num_elements
    vocabulary = [row for row in spec.parameters if len(row.shape) == 2 and row.shape[0] == spec.vocab_size]
    tied = parts.pop(vocabulary[0].name, 0) if len(vocabulary) == 1 else 0
    return tied + max(parts.values(), default=0)


def _block_of(name: str) -> str:
    """Return the start of a canonical name up to the number of its block; empty outside of the blocks."""
    parts = name.split(".")
    return next((".".join(parts[: index + 1]) for index, part in enumerate(parts) if part.isdigit()), "")


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
    size, per_device = parallel.pipeline_parallel_size, parallel.pipeline_needs.stages_per_device
    stages = StagePlacement.of(spec.num_layers, parallel).devices[index]
    table = parameters_of(spec, stages)
    share = sum(row.num_elements for row in table) / spec.num_parameters
    count = parallel.num_micro_batches(train.micro_batch_rows, batch_sizes_of(config).largest, parallel.num_row_parts)
    kept = min(count, size - index)  # micro-batches, or passes through one stage
    if per_device > 1:
        waiting = index if parallel.pipeline_needs.divides_backward else 0
        kept = min(count * per_device, (per_device - 1) * size + 2 * (size - index - 1) + 1 + waiting)
    layers = max(len(stage.layers) for stage in stages)
    dtype_bytes = _dtype_bytes(config)
    row, stream_parts = spec.saved_activations(length, dtype_bytes), _stream_parts(config)
    block_input = row.block_input_bytes / stream_parts
    if train.activation_checkpointing == "block":
        blocks = kept * layers * block_input + row.largest_block_bytes
    else:
        blocks = kept * layers * row.all_blocks_bytes / spec.num_layers
    received = sum((not stage.is_first) + (not stage.is_last) for stage in stages)
    stream = FP32_BYTES * length * spec.hidden_size / stream_parts
    num_rows = train.micro_batch_rows / parallel.context_parallel_size  # in positions of this device
    return replace(
        whole,
        parameter_bytes=round(whole.parameter_bytes * share),
        gradient_bytes=round(whole.gradient_bytes * share),
        optimizer_bytes=round(whole.optimizer_bytes * share),
        snapshot_bytes=round(whole.snapshot_bytes * share),
        activation_bytes=round(num_rows * (blocks + 2 * block_input + received * count * stream)),
        logits_bytes=whole.logits_bytes if any(stage.is_last for stage in stages) else 0,
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


def memory_per_device(
    spec: ModelSpec, config: RunConfig, device_kind: str = "cuda", num_devices: int | None = None
) -> MemoryEstimate:
    """Estimate the peak memory of one of the run's devices in a training step while a checkpoint is being written.

    FSDP and tensor parallelism shard parameters, gradients and optimizer state; ranks that divide positions share the
    shards of FSDP. FSDP gathers two blocks (one computes while the next arrives) and the embedding and head, or all
    blocks without ``reshard_after_forward``; a block's gradients exist whole until they are summed. With
    ``fsdp_offload``, a GPU has nothing else of parameters, gradients and optimizer state. Of a pipeline, it is the
    fullest device.

    Args:
        spec: The model.
        config: The run.
        device_kind: Kind of the device; on a ``cpu``, chunks of logits are smaller, and libraries are included.
        num_devices: Devices of the run; ``None``: as few as its sizes need.
    """
    config = on_devices(config, num_devices or config.parallel.num_devices)
    parallel, planned = config.parallel, _fullest_pipeline_device(spec, config, device_kind)
    dtype_bytes = _dtype_bytes(config)
    shards = parallel.num_state_shards
    if parallel.fsdp_size > 1:
        tensor = parallel.tensor_parallel_size
        blocks = sum(row.num_elements for row in spec.parameters if _block_of(row.name)) // tensor
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
        experts = sum(row.num_elements for row in spec.parameters if row.is_routed)
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
