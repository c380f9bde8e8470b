"""``precision``, ``runtime``, ``parallel`` and ``run``: number formats, device, parallelism, name and seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from vorox.core.schema.section import Section
from vorox.core.schema.setting import Need, setting

NumberFormat = Literal["fp32", "bf16", "fp16"]
PipelineScheduleName = Literal["1f1b", "interleaved", "zero_bubble"]

SMALLEST_LOSS_SCALE, LARGEST_LOSS_SCALE = 1.0, 2.0**32

_NATIVE = Need("kind", ("native",))


class PrecisionConfig(Section):
    dtype: NumberFormat = setting(
        default="fp32",
        description="Number format of the forward and backward pass; parameters stay fp32.",
        engines={"fp16": ("torch",)},
        synonyms=("dtype",),
    )
    matmul: Literal["ieee", "tf32"] = setting(
        default="ieee", description="Precision of fp32 matrix products on NVIDIA GPUs."
    )
    float8: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = setting(
        default=None,
        description="torch: multiply in 8-bit floats in the linear layers of the blocks, by the torchao recipe of this "
        "name; the head and matrices with a size that is no multiple of 16 keep precision.dtype. Needs "
        "torchao and a GPU of compute capability 8.9 or newer, or float8_emulate. None: off.",
        engines=("torch",),
    )
    float8_emulate: bool = setting(
        default=False,
        description="Emulate float8 on any device: the same rounding with fp32 products, which is slower than no "
        "float8.",
        needs=Need("float8"),
    )
    initial_loss_scale: float = setting(
        default=65536.0,
        ge=SMALLEST_LOSS_SCALE,
        le=LARGEST_LOSS_SCALE,
        description="fp16: initial loss scale; it then adapts within the same bounds.",
        needs=Need("dtype", ("fp16",)),
    )


class RuntimeConfig(Section):
    device: Literal["auto", "cpu", "cuda", "mps", "tpu"] = setting(
        default="auto",
        description="Device to train on. auto: the first one available.",
        engines={"mps": ("torch",), "tpu": ("jax",)},
        synonyms=("device",),
    )
    num_threads: int | None = setting(
        default=None,
        ge=1,
        description="Compute threads on the CPU; another number changes bits. None: the number of physical cores, "
        "or 1 with determinism=bitwise-any-world. JAX uses all that the process may.",
        engines=("torch",),
    )
    compile: bool = setting(
        default=False, description="Compile the model before step 1, which takes up to a minute.", synonyms=("compile",)
    )
    cuda_graphs: bool = setting(
        default=False,
        description="torch on a GPU, with compile: start forward and backward pass of a micro-batch as one CUDA "
        "graph, which makes small steps faster. The memory of a pass stays reserved.",
        digest="none",
        engines=("torch",),
    )
    scan_layers: bool = setting(
        default=False,
        description="jax: compile one block and scan over all of them, so deep models compile faster. A block saves "
        "its matrix products for the backward pass and recomputes the rest.",
        engines=("jax",),
    )
    determinism: Literal["auto", "none", "data", "bitwise", "bitwise-any-world"] = setting(
        default="auto",
        description="What repeats when a step is recomputed. none: nothing; data: the batches; bitwise: every bit, on "
        "the same machine; bitwise-any-world (PyTorch): every bit, also on 1, 2, 4, 8, ... replicas with the same "
        "micro-batches. auto: bitwise on the CPU, data on accelerators.",
        engines={"bitwise-any-world": ("torch",)},
    )
    stall_timeout_seconds: float | None = setting(
        default=None,
        gt=0,
        description="Time without progress of a step or its batch after which a watchdog process writes the stacks of "
        "all ranks and ends the run with exit code 6. A store that does not answer does not count. None: no watchdog.",
        digest="none",
    )
    long_stall_timeout_seconds: float | None = setting(
        default=3600.0,
        gt=0,
        description="The same limit for start, compilation, saves and validation, if it is longer than "
        "stall_timeout_seconds. A validation batch and a batch of a task are progress; a function in eval.functions, a "
        "sample and a save are one piece. Needs stall_timeout_seconds. None: no limit.",
        digest="none",
        needs=Need("stall_timeout_seconds"),
    )
    profile_steps: tuple[Annotated[int, Field(ge=1)], ...] = setting(
        default=(),
        description="Steps to profile, from 1, such as [10, 11, 12]: a Chrome trace and a table in profile/ of the run "
        "directory. Consecutive steps share a trace. Empty: no profiler.",
        digest="none",
    )
    rehearsal: bool | Literal["auto"] = setting(
        default="auto",
        description="Before the first step, try a step, a validation batch of each set, eval.functions, the samples "
        "and a save, and discard them, so that a run that cannot finish fails before it. No bit of the run changes. "
        "auto: with at least 1,000 steps ahead.",
        digest="none",
        needs=Need("parallel.kind", ("native",), is_feature=True),
    )
    recompute_every_steps: int | None = setting(
        default=None,
        ge=1,
        description="Compute loss and gradients of every N-th step twice from the same state. Other bits end the run "
        "with exit code 7: a device that computes wrongly. Needs bitwise determinism. None: never.",
        digest="none",
        needs=Need("determinism", never=("none", "data"), remedy="runtime.determinism=bitwise", is_feature=True),
    )


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """What a value of ``parallel.pipeline_schedule`` needs.

    Attributes:
        stages_per_device: Stages of consecutive blocks that a device of a pipeline holds.
        needs_rounds: Whether the number of micro-batches must be a multiple of that of devices.
        divides_backward: Whether gradients of weights are computed apart from those of inputs.
    """

    stages_per_device: int = 2
    needs_rounds: bool = True
    divides_backward: bool = False


_SCHEDULES: Mapping[PipelineScheduleName, PipelineSchedule] = {
    "1f1b": PipelineSchedule(stages_per_device=1, needs_rounds=False),
    "interleaved": PipelineSchedule(),
    "zero_bubble": PipelineSchedule(divides_backward=True),
}


class ParallelConfig(Section):
    data_parallel_size: Annotated[int, Field(ge=1)] | Literal["auto"] = setting(
        default="auto",
        description="Replicas of the whole model; each trains on a part of the batch. auto: as many as the devices of "
        "the run allow, with smaller micro-batches if the batch does not divide.",
    )
    fsdp_size: int = setting(
        default=1,
        ge=1,
        description="Replicas that each train on a part of the batch and hold a shard of the parameters (FSDP).",
        needs=_NATIVE,
    )
    tensor_parallel_size: int = setting(
        default=1,
        ge=1,
        description="Devices that every matrix product of the model is sharded over; they train on the same rows. "
        "PyTorch: the native decoder or a transformers model, with this many processes for each replica or shard.",
        needs=_NATIVE,
    )
    sequence_parallel: bool = setting(
        default=False,
        description="PyTorch with tensor_parallel_size > 1: divide the residual stream of training along its "
        "positions, so norms and saved block inputs take a part of the memory. The communication is the same.",
        engines=("torch",),
        needs=Need("tensor_parallel_size", never=(1,), remedy="parallel.tensor_parallel_size above 1"),
    )
    pipeline_parallel_size: int = setting(
        default=1,
        ge=1,
        description="PyTorch, the native decoder and transformers models: processes that each hold some of the "
        "blocks; the micro-batches of a step pass through them in turn. With tensor_parallel_size, or (the native "
        "decoder) context_parallel_size, each stage is that many processes.",
        engines=("torch",),
        needs=_NATIVE,
    )
    pipeline_schedule: PipelineScheduleName = setting(
        default="1f1b",
        description="Order of the forward and backward passes of a pipeline. 1f1b: one stage of consecutive blocks for "
        "each process; interleaved: two, so processes idle less and communicate more; zero_bubble: two, and gradients "
        "of weights are computed when a process would idle.",
        needs=Need("pipeline_parallel_size", never=(1,), remedy="parallel.pipeline_parallel_size above 1"),
    )
    context_parallel_size: int = setting(
        default=1,
        ge=1,
        description="PyTorch, the native decoder and transformers models: processes that each compute a part of the "
        "positions of every row, for rows that are too long for one device; see context_parallel_kind.",
        engines=("torch",),
        needs=_NATIVE,
    )
    context_parallel_kind: Literal["ulysses", "ring"] = setting(
        default="ulysses",
        description="How attention reaches the positions of other processes. ulysses: each computes some of the heads "
        "for all positions; ring (the native decoder): keys and values pass through the processes, so heads "
        "need not divide by their number.",
        needs=Need("context_parallel_size", never=(1,), remedy="parallel.context_parallel_size above 1"),
    )
    expert_parallel_size: int = setting(
        default=1,
        ge=1,
        description="PyTorch, with model.num_experts or a transformers model with experts: replicas that divide the "
        "experts of each block and exchange tokens for them. They are among those of data_parallel_size and train on "
        "different rows.",
        engines=("torch",),
    )
    gradient_bucket_bytes: int = setting(
        default=25 * 2**20,
        ge=0,
        description="PyTorch, replicas of whole models: size of the parts in which gradients are summed over ranks "
        "while the backward pass computes the rest. 0: whole, after the last backward pass.",
        engines=("torch",),
        needs=_NATIVE,
    )
    reshard_after_forward: bool = setting(
        default=True,
        description="PyTorch with fsdp_size > 1: free the gathered parameters of a block until its backward pass "
        "(ZeRO-3), or keep them (ZeRO-2: more memory, less communication).",
        digest="none",
        needs=_NATIVE,
    )
    fsdp_offload: bool = setting(
        default=False,
        description="PyTorch with fsdp_size > 1, the native decoder: keep parameters, gradients and optimizer state in "
        "host memory, and update them there; a GPU holds the parameters of the blocks that it computes. No effect on "
        "a CPU.",
        engines=("torch",),
        needs=Need("fsdp_size", never=(1,), remedy="parallel.fsdp_size above 1"),
    )
    kind: Literal["native", "deepspeed"] = setting(
        default="native",
        description="What distributes the state over ranks. native: fsdp_size, tensor_parallel_size, "
        "pipeline_parallel_size and context_parallel_size; deepspeed (PyTorch): ZeRO of DeepSpeed, over all ranks.",
        engines={"deepspeed": ("torch",)},
    )
    zero_stage: Literal[1, 2, 3] = setting(
        default=2,
        description="DeepSpeed: what is sharded. 1: optimizer state; 2: also gradients; 3: also parameters.",
        needs=(
            Need("kind", ("deepspeed",)),
            Need("deepspeed_config", (None,), remedy="no parallel.deepspeed_config: the file sets it"),
        ),
    )
    zero_offload: Literal["none", "optimizer", "parameters"] = setting(
        default="none",
        description="DeepSpeed: what is kept in host memory. optimizer: optimizer state and its update; parameters "
        "(stage 3): also parameters.",
        needs=(
            Need("kind", ("deepspeed",)),
            Need("deepspeed_config", (None,), remedy="no parallel.deepspeed_config: the file sets it"),
        ),
    )
    deepspeed_config: str | None = setting(
        default=None,
        description="DeepSpeed: its JSON file, instead of zero_stage and zero_offload. Values that other settings "
        "determine are auto or equal.",
        needs=Need("kind", ("deepspeed",)),
    )
    start_timeout_seconds: float = setting(
        default=300.0,
        gt=0,
        allow_inf_nan=False,
        description="Time that ranks wait for each other at the start; then the run ends and names the missing ranks.",
        digest="none",
    )

    @property
    def num_devices(self) -> int:
        """Devices of the run; the fewest possible under ``auto``."""
        return self.num_row_parts * self._devices_per_row_part

    @property
    def _devices_per_row_part(self) -> int:
        """Devices that train on the same rows."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def num_row_parts(self) -> int:
        """Parts that the rows of a batch are divided into; the fewest possible under ``auto``."""
        return (1 if self.data_parallel_size == "auto" else self.data_parallel_size) * self.fsdp_size

    def data_parallel_size_on(self, num_devices: int) -> int:
        """Return the number of replicas on so many devices; at least 1, even if they are too few."""
        if self.data_parallel_size != "auto":
            return self.data_parallel_size
        return max(1, num_devices // (self.fsdp_size * self._devices_per_row_part))

    @property
    def num_state_shards(self) -> int:
        """Devices that parameters and optimizer state are sharded over, without the stages of a pipeline."""
        shards = self.fsdp_size * self.context_parallel_size if self.fsdp_size > 1 else 1
        return shards * self.tensor_parallel_size

    @property
    def pipeline_needs(self) -> PipelineSchedule:
        return _SCHEDULES[self.pipeline_schedule]

    @property
    def position_chunks_per_device(self) -> int:
        """Chunks of a row that a device has with context parallelism: in a ring two, so that devices have equal work
        under a causal mask."""
        return 2 if self.context_parallel_kind == "ring" else 1

    def micro_batch_sequences(self, limit: int, global_batch_sequences: int, num_parts: int) -> int:
        """Return the rows of a micro-batch: ``limit``, or under ``auto`` the largest divisor of a rank's rows below it.

        Under ``auto``, the micro-batches also fill a pipeline, if the rows allow it.

        Args:
            limit: ``train.micro_batch_sequences``.
            global_batch_sequences: Rows of a step.
            num_parts: Parts that they are divided into.
        """
        share = -(-global_batch_sequences // num_parts)
        if self.data_parallel_size != "auto" or num_parts == 1:
            return limit
        sizes = [size for size in range(1, max(1, min(limit, share)) + 1) if share % size == 0]
        return max((size for size in sizes if self.fills_pipeline(share // size)), default=max(sizes))

    def num_micro_batches(self, limit: int, global_batch_sequences: int, num_parts: int) -> int:
        """Return the micro-batches of a step on one rank; for the arguments, see ``micro_batch_sequences``."""
        share = -(-global_batch_sequences // num_parts)
        return -(-share // self.micro_batch_sequences(limit, global_batch_sequences, num_parts))

    def fills_pipeline(self, num_micro_batches: int) -> bool:
        """Return whether the schedule of the pipeline runs with so many micro-batches."""
        size = self.pipeline_parallel_size
        return num_micro_batches >= size and (not self.pipeline_needs.needs_rounds or num_micro_batches % size == 0)


class RunSection(Section):
    name: str | None = setting(
        default=None,
        description="Readable part of the run id. None: derived from the configuration and the model.",
        digest="none",
    )
    directory: str = setting(
        default="runs",
        description="Parent directory of run directories.",
        digest="none",
        synonyms=("save_dir", "out_dir", "output_dir"),
    )
    seed: int = setting(
        default=1234,
        ge=0,
        lt=2**63,
        description="Seed of the initial weights, the data order and dropout.",
        resume="refused",
        synonyms=("seed",),
    )
