"""``precision``, ``runtime``, ``parallel`` and ``run``: on what machine, in which numbers, under which name."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vorox.core.schema.section import Section

SMALLEST_LOSS_SCALE, LARGEST_LOSS_SCALE = 1.0, 2.0**32


class PrecisionConfig(Section):
    dtype: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="Arithmetic of the forward and backward pass; parameters stay fp32."
    )
    matmul: Literal["ieee", "tf32"] = Field(
        default="ieee", description="fp32 products on GPUs that have TensorFloat-32."
    )
    initial_loss_scale: float = Field(
        default=65536.0,
        ge=SMALLEST_LOSS_SCALE,
        le=LARGEST_LOSS_SCALE,
        description="fp16: first loss scale; it adapts from there, within the same bounds.",
    )


class RuntimeConfig(Section):
    device: Literal["auto", "cpu", "cuda", "mps", "tpu"] = Field(
        default="auto", description="auto takes the first that exists."
    )
    num_threads: int | None = Field(
        default=None, ge=1, description="Arithmetic threads on the CPU. None: the physical cores. Part of bit-equality."
    )
    compile: bool = Field(default=False, description="Compile the model before step 1; takes up to a minute.")
    scan_layers: bool = Field(
        default=False,
        description="jax: compile one block and scan over all, which compiles deep models faster; a block keeps its "
        "matrix products for the backward pass and computes the rest again.",
    )
    determinism: Literal["auto", "none", "data", "bitwise"] = Field(
        default="auto",
        description="What repeats when a step is recomputed. none: nothing; data: the batches; bitwise: every bit, on "
        "the same machine. auto: bitwise on the CPU, data on accelerators.",
    )


class ParallelConfig(Section):
    data_parallel_size: int = Field(default=1, ge=1, description="Whole copies of the model that share each batch.")
    fsdp_size: int = Field(
        default=1, ge=1, description="Copies that share each batch and keep a part of the parameters each."
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, description="Devices that every matrix product of the model is split over."
    )

    @property
    def num_row_parts(self) -> int:
        """Parts that the rows of a batch are cut into."""
        return self.data_parallel_size * self.fsdp_size

    @property
    def num_devices(self) -> int:
        return self.num_row_parts * self.tensor_parallel_size


class RunSection(Section):
    name: str | None = Field(
        default=None, description="Readable part of the run id. None: from model, data and length."
    )
    directory: str = Field(default="runs", description="Where run directories are made.")
    seed: int = Field(default=1234, ge=0, lt=2**63, description="Seed of initial weights, data order and dropout.")
