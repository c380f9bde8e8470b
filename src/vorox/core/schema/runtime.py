"""``precision``, ``runtime``, ``parallel`` and ``run``: number formats, device, parallelism, name and seed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vorox.core.schema.section import Section

SMALLEST_LOSS_SCALE, LARGEST_LOSS_SCALE = 1.0, 2.0**32


class PrecisionConfig(Section):
    dtype: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="Number format of the forward and backward pass; parameters stay fp32."
    )
    matmul: Literal["ieee", "tf32"] = Field(
        default="ieee", description="Precision of fp32 matrix products on NVIDIA GPUs."
    )
    initial_loss_scale: float = Field(
        default=65536.0,
        ge=SMALLEST_LOSS_SCALE,
        le=LARGEST_LOSS_SCALE,
        description="fp16: initial loss scale; it then adapts within the same bounds.",
    )


class RuntimeConfig(Section):
    device: Literal["auto", "cpu", "cuda", "mps", "tpu"] = Field(
        default="auto", description="Device to train on. auto: the first one available."
    )
    num_threads: int | None = Field(
        default=None,
        ge=1,
        description="Compute threads on the CPU; another number changes bits. None: the number of physical cores, "
        "or 1 with determinism=bitwise-any-world.",
    )
    compile: bool = Field(default=False, description="Compile the model before step 1, which takes up to a minute.")
    scan_layers: bool = Field(
        default=False,
        description="jax: compile one block and scan over all of them, so deep models compile faster. A block saves "
        "its matrix products for the backward pass and recomputes the rest.",
    )
    determinism: Literal["auto", "none", "data", "bitwise", "bitwise-any-world"] = Field(
        default="auto",
        description="What repeats when a step is recomputed. none: nothing; data: the batches; bitwise: every bit, on "
        "the same machine; bitwise-any-world (PyTorch): every bit, also on 1, 2, 4, 8, ... replicas with the same "
        "micro-batches. auto: bitwise on the CPU, data on accelerators.",
    )


class ParallelConfig(Section):
    data_parallel_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="Replicas of the whole model; each trains on a part of the batch. auto: as many as the devices of "
        "the run allow, with smaller micro-batches if the batch does not divide.",
    )
    fsdp_size: int = Field(
        default=1,
        ge=1,
        description="Replicas that each train on a part of the batch and hold a shard of the parameters (FSDP).",
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, description="Devices that every matrix product of the model is sharded over."
    )
    reshard_after_forward: bool = Field(
        default=True,
        description="PyTorch with fsdp_size > 1: free the gathered parameters of a block until its backward pass "
        "(ZeRO-3), or keep them (ZeRO-2: more memory, less communication).",
    )

    start_timeout_seconds: float = Field(
        default=300.0,
        gt=0,
        allow_inf_nan=False,
        description="Time that ranks wait for each other at the start; then the run ends and names the missing ranks.",
    )

    @property
    def num_devices(self) -> int:
        """Devices of the run; the fewest possible under ``auto``."""
        return self.num_row_parts * self.tensor_parallel_size

    @property
    def num_row_parts(self) -> int:
        """Parts that the rows of a batch are divided into; the fewest possible under ``auto``."""
        return (1 if self.data_parallel_size == "auto" else self.data_parallel_size) * self.fsdp_size

    def data_parallel_size_on(self, num_devices: int) -> int:
        """Return the number of replicas on so many devices; at least 1, even if they are too few."""
        if self.data_parallel_size != "auto":
            return self.data_parallel_size
        return max(1, num_devices // (self.fsdp_size * self.tensor_parallel_size))

    def micro_batch_sequences(self, limit: int, global_batch_sequences: int, num_parts: int) -> int:
        """Return the rows of a micro-batch: ``limit``, or under ``auto`` the largest divisor of a rank's rows below it.

        Args:
            limit: ``train.micro_batch_sequences``.
            global_batch_sequences: Rows of a step.
            num_parts: Parts that they are divided into.
        """
        share = -(-global_batch_sequences // num_parts)
        if self.data_parallel_size != "auto" or num_parts == 1:
            return limit
        return max(size for size in range(1, max(1, min(limit, share)) + 1) if share % size == 0)


class RunSection(Section):
    name: str | None = Field(
        default=None, description="Readable part of the run id. None: derived from the configuration and the model."
    )
    directory: str = Field(default="runs", description="Parent directory of run directories.")
    seed: int = Field(
        default=1234, ge=0, lt=2**63, description="Seed of the initial weights, the data order and dropout."
    )
