"""How much memory training a model takes, before it is tried.

An estimate from shapes: what must be there whatever the kernels do (parameters, gradients, optimizer state), and what
the backward pass needs of the forward pass (Korthikanti et al., arXiv 2205.05198, without their tensor parallelism).
Good to within some tens of percent; allocators, kernels and the framework itself come on top.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vorox.core.errors import DoesNotFitError
from vorox.core.schema import RunConfig
from vorox.models.spec import ModelSpec

FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one device at the peak of a step, and of the host beside it.

    Attributes:
        parameter_bytes: Parameters.
        gradient_bytes: Their gradients.
        optimizer_bytes: Moments of the optimizer.
        activation_bytes: What the backward pass needs of the forward pass.
        logits_bytes: Logits of a chunk, and their gradient.
        mask_bytes: Which position may see which, where documents of a row are kept apart.
        snapshot_bytes: Host memory of the copy that a checkpoint is written from in the background.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    logits_bytes: int
    mask_bytes: int = 0
    snapshot_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """On the device."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.logits_bytes
            + self.mask_bytes
        )

    def total_bytes_on(self, device_kind: str) -> int:
        """In the device's memory, which on a ``cpu`` is the host's as well."""
        return self.total_bytes + (self.snapshot_bytes if device_kind == "cpu" else 0)


def planned_memory(spec: ModelSpec, config: RunConfig) -> MemoryEstimate:
    """Estimate the peak of a training step of a run, with a checkpoint being written meanwhile."""
    step = training_memory(
        spec,
        micro_batch_sequences=config.train.micro_batch_sequences,
        sequence_length_tokens=config.data.sequence_length_tokens,
        dtype_bytes=FP32_BYTES if config.precision.dtype == "fp32" else 2,
        optimizer=config.optimizer.name,
        recompute_blocks=config.train.activation_checkpointing == "block",
        loss_chunk_tokens=config.loss.chunk_tokens,
        document_mask=config.data.document_mask,
    )
    return replace(
        step, snapshot_bytes=step.parameter_bytes + step.optimizer_bytes if config.checkpoint.asynchronous else 0
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
    document_mask: bool = False,
) -> MemoryEstimate:
    """Estimate the peak of one training step.

    Args:
        spec: The model. Parameters, gradients and optimizer state are fp32.
        micro_batch_sequences: Rows of a forward pass.
        sequence_length_tokens: Positions of a row.
        dtype_bytes: Width of activations: 4 for fp32, 2 for bf16 and fp16.
        optimizer: ``adamw`` keeps two moments of every parameter, ``muon`` one of the matrices.
        recompute_blocks: Only block inputs are kept, and one block at a time is computed again.
        loss_chunk_tokens: Positions whose logits exist at once.
        document_mask: Attention gets a mask of all pairs of positions, as booleans and as numbers to add.
    """
    weights = FP32_BYTES * spec.num_parameters
    state = 2 * weights
    if optimizer == "muon":
        state -= FP32_BYTES * sum(row.num_elements for row in spec.parameters if row.kind == "matrix")
    positions = micro_batch_sequences * sequence_length_tokens
    block = positions * _kept_per_position(spec) * dtype_bytes
    stream = positions * spec.hidden_size * dtype_bytes
    blocks = stream * spec.num_layers + block if recompute_blocks else block * spec.num_layers
    chunk = min(loss_chunk_tokens, positions)
    return MemoryEstimate(
        parameter_bytes=weights,
        gradient_bytes=weights,
        optimizer_bytes=state,
        activation_bytes=blocks + 2 * stream,
        logits_bytes=2 * FP32_BYTES * chunk * spec.vocab_size,
        mask_bytes=positions * sequence_length_tokens * (1 + dtype_bytes) if document_mask else 0,
    )


def check_host_memory(spec: ModelSpec, config: RunConfig, available_bytes: int) -> None:
    """Refuse a run on the CPU whose steps take more memory than the machine has, before the first of them.

    Raises:
        DoesNotFitError: They do; settings that fit are named.
    """
    needed_bytes = planned_memory(spec, config).total_bytes_on("cpu")
    if needed_bytes > available_bytes:
        fitting = _fitting_settings(spec, config, available_bytes)
        tokens = config.train.micro_batch_sequences * config.data.sequence_length_tokens
        raise DoesNotFitError(
            f"a micro-batch of {tokens:,} tokens takes about {needed_bytes / 2**30:,.1f} GiB, this machine has "
            f"{available_bytes / 2**30:,.1f} GiB",
            where="memory",
            hint=f"set {' or '.join(fitting)}" if fitting else "lower model.num_layers or model.hidden_size",
        )  # fmt: skip


def _fitting_settings(spec: ModelSpec, config: RunConfig, available_bytes: int) -> list[str]:
    """Single settings that are enough for a run to fit, the largest value of each."""

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


def _kept_per_position(spec: ModelSpec) -> int:
    """Elements per position that one block keeps for its backward pass, attention without the T x T matrix."""
    query, key_value = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = 2 * spec.hidden_size + query + 2 * key_value + query  # stream, norm, projections, mixed values
    mlp = 2 * spec.hidden_size + (3 if spec.is_gated else 2) * spec.intermediate_size
    return attention + mlp


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What a run holds on a device at its peak, against what the device has.

    Attributes:
        planned: The estimate.
        available_bytes: Memory of the device; ``None`` if it does not say.
        state_parts: Among how many devices parameters and optimizer state are divided.
    """

    planned: MemoryEstimate
    available_bytes: int | None
    state_parts: int = 1

    @property
    def _state_bytes(self) -> int:
        whole = self.planned.parameter_bytes + self.planned.gradient_bytes + self.planned.optimizer_bytes
        return whole // self.state_parts

    def check_state(self) -> None:
        """Refuse a model whose parameters, gradients and optimizer state alone exceed the device, before allocating.

        Raises:
            DoesNotFitError: They do.
        """
        if self.available_bytes is not None and self._state_bytes > self.available_bytes:
            raise self.error("creating the model")

    def error(self, doing: str) -> DoesNotFitError:
        """The error for a device, or a host, that had no memory left."""
        rest_bytes = self.planned.activation_bytes + self.planned.logits_bytes + self.planned.mask_bytes
        has = "" if self.available_bytes is None else f"; there are {self.available_bytes / 2**30:,.2f} GiB"
        what = (
            f"out of memory while {doing}: parameters, gradients and optimizer state take about "
            f"{self._state_bytes / 2**30:,.2f} GiB, activations and logits {rest_bytes / 2**30:,.2f} GiB{has}"
        )
        if self.available_bytes is not None and self._state_bytes > 0.9 * self.available_bytes:
            return DoesNotFitError(what, where="model", hint="lower model.num_layers or model.hidden_size")
        return DoesNotFitError(
            what, where="train.micro_batch_sequences",
            hint="lower train.micro_batch_sequences or data.sequence_length_tokens, or set "
            "train.activation_checkpointing=block",
        )  # fmt: skip
