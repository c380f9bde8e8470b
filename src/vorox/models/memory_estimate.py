"""Estimate of the memory that training a model takes.

Computed from shapes: parameters, gradients and optimizer state, plus the activations saved for the backward pass
(Korthikanti et al., arXiv 2205.05198, without tensor parallelism). Accurate to some tens of percent; memory of
allocators, kernels and the framework is not included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vorox.core.errors import DoesNotFitError
from vorox.core.schema import RunConfig
from vorox.models.spec import ModelSpec

FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Peak memory of a step on one device, and of checkpoints on the host.

    Attributes:
        parameter_bytes: Parameters.
        gradient_bytes: Gradients, with the partial sums of ``determinism=bitwise-any-world``.
        optimizer_bytes: Optimizer moments.
        activation_bytes: Activations saved for the backward pass.
        logits_bytes: Logits of a chunk and their gradient.
        mask_bytes: Dense attention masks, with ``data.document_mask`` or sliding windows.
        saved_moment_bytes: Optimizer moments in a checkpoint, fp32.
        snapshot_bytes: Host memory of the snapshot from which a checkpoint is written in the background.
        copy_bytes: Parameters in the compute precision: of all matrices, or of what FSDP has gathered.
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
        )

    def total_bytes_on(self, device_kind: str) -> int:
        """Return the memory on the device; on a ``cpu`` it includes the host's."""
        return self.total_bytes + (self.snapshot_bytes if device_kind == "cpu" else 0)


def planned_memory(spec: ModelSpec, config: RunConfig) -> MemoryEstimate:
    """Estimate the peak memory of a run's training step while a checkpoint is being written."""
    step = training_memory(
        spec,
        micro_batch_sequences=config.train.micro_batch_sequences,
        sequence_length_tokens=config.data.sequence_length_tokens,
        dtype_bytes=FP32_BYTES if config.precision.dtype == "fp32" else 2,
        optimizer=config.optimizer.name,
        recompute_blocks=config.train.activation_checkpointing == "block",
        loss_chunk_tokens=config.loss.chunk_tokens,
        dense_masks=_dense_masks(spec, config),
    )
    return replace(
        step,
        gradient_bytes=step.gradient_bytes * (1 + _num_partial_sums(config)),
        snapshot_bytes=step.parameter_bytes + step.saved_moment_bytes if config.checkpoint.asynchronous else 0,
    )


def _num_partial_sums(config: RunConfig) -> int:
    """Return how many partial sums of the gradients a step keeps while it runs its micro-batches."""
    if config.runtime.determinism != "bitwise-any-world":
        return 0
    rows = config.train.micro_batch_sequences * config.parallel.num_row_parts
    return (-(-config.train.global_batch_sequences // rows) - 1).bit_length()


def memory_per_device(spec: ModelSpec, config: RunConfig) -> MemoryEstimate:
    """Estimate the peak memory of one of the run's devices, with ``parallel.*`` counted.

    FSDP shards parameters, gradients and optimizer state. It gathers two blocks (one computes while the next arrives)
    and the embedding and head, or all blocks without ``reshard_after_forward``; a block's gradients exist whole until
    they are summed.
    """
    parallel, planned = config.parallel, planned_memory(spec, config)
    dtype_bytes = FP32_BYTES if config.precision.dtype == "fp32" else 2
    shards = parallel.fsdp_size * parallel.tensor_parallel_size
    if parallel.fsdp_size > 1:
        blocks = sum(row.num_elements for row in spec.parameters if row.name.startswith("blocks."))
        block, rest = blocks // max(1, spec.num_layers), spec.num_parameters - blocks
        gathered = (2 * block if parallel.reshard_after_forward else blocks) + rest
        copies = dtype_bytes * gathered + FP32_BYTES * max(block, rest)
    else:
        copies = 0 if dtype_bytes == FP32_BYTES else dtype_bytes * spec.num_matmul_weights // shards
    return replace(
        planned,
        parameter_bytes=planned.parameter_bytes // shards,
        gradient_bytes=planned.gradient_bytes // shards,
        optimizer_bytes=planned.optimizer_bytes // shards,
        snapshot_bytes=planned.snapshot_bytes // shards,
        copy_bytes=copies,
    )


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
    """
    weights = FP32_BYTES * spec.num_parameters
    state = 2 * weights
    if optimizer == "muon":
        state -= FP32_BYTES * sum(row.num_elements for row in spec.parameters if row.kind == "matrix")
    saved = state
    if optimizer == "adamw_8bit":
        state -= 6 * sum(row.num_elements for row in spec.parameters if row.decay)
    positions = micro_batch_sequences * sequence_length_tokens
    block = positions * spec.saved_per_position * dtype_bytes
    stream = positions * spec.hidden_size * dtype_bytes
    blocks = stream * spec.num_layers + block if recompute_blocks else block * spec.num_layers
    chunk = min(loss_chunk_tokens, positions)
    return MemoryEstimate(
        parameter_bytes=weights,
        gradient_bytes=weights,
        optimizer_bytes=state,
        saved_moment_bytes=saved,
        activation_bytes=blocks + 2 * stream,
        logits_bytes=2 * FP32_BYTES * chunk * spec.vocab_size,
        mask_bytes=dense_masks * positions * sequence_length_tokens * (1 + dtype_bytes),
    )


def _dense_masks(spec: ModelSpec, config: RunConfig) -> int:
    """Return the number of kinds of layers whose attention mask is dense: full, and with a sliding window."""
    length = config.data.sequence_length_tokens
    windows = {None if window is None or window >= length else window for window in spec.layer_windows}
    return len(windows) if config.data.document_mask else len(windows - {None})


def check_host_memory(spec: ModelSpec, config: RunConfig, available_bytes: int) -> None:
    """Check before step 1 that a run on the CPU fits into the machine's memory.

    Raises:
        DoesNotFitError: It does not; the hint names settings that fit.
    """
    needed_bytes = planned_memory(spec, config).total_bytes_on("cpu")
    if needed_bytes > available_bytes:
        fitting = _fitting_settings(spec, config, available_bytes)
        tokens = config.train.micro_batch_sequences * config.data.sequence_length_tokens
        raise DoesNotFitError(
            f"A micro-batch of {tokens:,} tokens takes about {needed_bytes / 2**30:,.1f} GiB; this machine has "
            f"{available_bytes / 2**30:,.1f} GiB",
            where="memory",
            hint=f"set {' or '.join(fitting)}" if fitting else "lower model.num_layers or model.hidden_size",
        )  # fmt: skip


def _fitting_settings(spec: ModelSpec, config: RunConfig, available_bytes: int) -> list[str]:
    """Return the single settings that make a run fit, each with its largest value that does."""

    def fits(section: str, **values: object) -> bool:
        changed = getattr(config, section).model_copy(update=values)
        return (
            planned_memory(spec, config.model_copy(update={section: changed})).total_bytes_on("cpu") <= available_bytes
        )

    rows, length = config.train.micro_batch_sequences, config.data.sequence_length_tokens
    lengths = [1 << power for power in range(length.bit_length() - 1, 4, -1)]
    choices: list[tuple[str, str, list[object]]] = [
        ("train", "micro_batch_sequences", [part for part in range(rows - 1, 0, -1) if rows % part == 0]),
        ("train", "activation_checkpointing", ["block"]),
        ("checkpoint", "asynchronous", [False]),
        ("data", "sequence_length_tokens", [shorter for shorter in lengths if shorter < length]),
    ]
    found = [
        (section, name, next((value for value in values if fits(section, **{name: value})), None))
        for section, name, values in choices
    ]
    return [f"{section}.{name}={str(value).lower()}" for section, name, value in found if value is not None]


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The estimated peak memory of a run and the memory of its device.

    Attributes:
        planned: The estimate.
        available_bytes: Memory of the device; ``None`` if unknown.
        state_parts: Number of devices over which parameters and optimizer state are sharded.
    """

    planned: MemoryEstimate
    available_bytes: int | None
    state_parts: int = 1

    @property
    def _state_bytes(self) -> int:
        whole = self.planned.parameter_bytes + self.planned.gradient_bytes + self.planned.optimizer_bytes
        return whole // self.state_parts

    def check_state(self) -> None:
        """Check, before allocating, that parameters, gradients and optimizer state fit into the device.

        Raises:
            DoesNotFitError: They do not.
        """
        if self.available_bytes is not None and self._state_bytes > self.available_bytes:
            raise self.error("creating the model")

    def error(self, doing: str) -> DoesNotFitError:
        """Return the error for a device or host that ran out of memory."""
        rest_bytes = self.planned.activation_bytes + self.planned.logits_bytes + self.planned.mask_bytes
        has = "" if self.available_bytes is None else f"; the device has {self.available_bytes / 2**30:,.2f} GiB"
        what = (
            f"Out of memory while {doing}: parameters, gradients and optimizer state take about "
            f"{self._state_bytes / 2**30:,.2f} GiB, activations and logits {rest_bytes / 2**30:,.2f} GiB{has}"
        )
        if self.available_bytes is not None and self._state_bytes > 0.9 * self.available_bytes:
            return DoesNotFitError(what, where="model", hint="lower model.num_layers or model.hidden_size")
        return DoesNotFitError(
            what, where="train.micro_batch_sequences",
            hint="lower train.micro_batch_sequences or data.sequence_length_tokens, or set "
            "train.activation_checkpointing=block",
        )  # fmt: skip
