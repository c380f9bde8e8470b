"""The stages of this rank, run in the order of a schedule of ``torch.distributed.pipelining``.

All ranks of a pipeline read the same rows, so only the residual stream and its gradient travel between stages; masks,
positions and labels do not. Training runs a schedule over the micro-batches of a step. Evaluation and decoding run one
micro-batch after the other; the last stage has their result.

Shape legend: A micro-batches, B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vorox.backends.torch_engine.distributed import Ranks
from vorox.backends.torch_engine.loss import LossSums
from vorox.backends.torch_engine.network import EnterMicroBatch
from vorox.core.batch import Batch
from vorox.core.config.checks.parallel import PIPELINE_SIZE, micro_batches_fault
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.models.pipeline_stages import Stage

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineSchedule


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """What the stages need of the step that is running.

    Attributes:
        batch: The rows of this rank.
        scale: One over the global number of targets.
        loss_scale: Loss scale of fp16.
        enter: Opens the context of a micro-batch.
        sums: Loss sums by micro-batch, which the last stage fills in.
    """

    batch: Batch
    scale: float
    loss_scale: Tensor | None
    enter: EnterMicroBatch
    sums: dict[int, LossSums] = field(default_factory=dict[int, LossSums])


class _StageModule(nn.Module):
    """A stage as ``torch.distributed.pipelining`` calls it: the input stream, and the index of the micro-batch."""

    def __init__(self, run: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self._run = run

    def forward(self, x: Tensor, *, index: Tensor) -> Tensor:
        return self._run(x, int(index))


def _pass_on(objective: Tensor, _: Tensor) -> Tensor:
    """The loss of the schedule: the last stage has computed it already, where its head is gathered."""
    return objective


class StageRunner:
    """Runs the stages of this rank.

    Args:
        config: The schedule.
        ranks: The layout.
        device: Where stages compute.
        stages: The stages of this rank.
        stream_shape: Shape of the residual stream of a micro-batch with so many rows and positions, in evaluation or
            in training, where this rank may have a part of it.
        train: Returns the residual stream after a stage, fp32, or the scaled objective of the last one, for its input
            (unused by the first stage) and the index of a micro-batch.
        take_weight_gradients: ``DeferredGradients.take``, if the schedule divides backward passes.
    """

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        device: torch.device,
        stages: Sequence[Stage],
        *,
        stream_shape: Callable[[int, int, bool], tuple[int, ...]],
        train: Callable[[Stage, TrainingStep, Tensor, int], Tensor],
        take_weight_gradients: Callable[[], Callable[[], None]] | None = None,
    ) -> None:
        self._name, self._ranks, self._device = config.parallel.pipeline_schedule, ranks, device
        self._stages, self._stream_shape, self._train = stages, stream_shape, train
        self._take_weight_gradients = take_weight_gradients
        self._schedules: dict[tuple[int, ...], _PipelineSchedule] = {}
        self._step: TrainingStep | None = None
        self._sum_dtype = torch.float32 if device.type == "mps" else torch.float64

    # -- training -----------------------------------------------------------------------------------------------------

    def train(self, step: TrainingStep) -> dict[int, LossSums]:
        """Run forward and backward of all micro-batches of a step, and add to the gradients.

        Returns:
            Loss sums by micro-batch; 0 on ranks without the last stage.
        """
        num_micro_batches = step.batch.tokens_ABT.shape[0]
        schedule = self._schedule(step.batch.tokens_ABT.shape)
        indices = torch.arange(num_micro_batches)
        inputs = (indices,) if self._stages[0].is_first else ()
        self._step = step
        try:
            cast("Any", schedule).step(*inputs, index=indices, target=indices, losses=[], return_outputs=False)
        except RuntimeError as error:  # the schedule wraps what a stage raises
            raise error.__cause__ or error from None
        finally:
            self._step = None
        return {index: step.sums.get(index, self.no_sums()) for index in range(num_micro_batches)}

    def no_sums(self) -> LossSums:
        """Return the loss sums of a rank without the last stage."""
        zero = torch.zeros((), dtype=self._sum_dtype, device=self._device)
        return LossSums(zero, zero, zero, zero)

    def _schedule(self, shape_ABT: tuple[int, ...]) -> _PipelineSchedule:
        """Return the schedule for batches of a shape."""
        if shape_ABT not in self._schedules:
            # Takes more than a second to import, and one device needs none of it.
            from torch.distributed.pipelining import (
                Schedule1F1B,
                ScheduleInterleaved1F1B,
                ScheduleInterleavedZeroBubble,
            )

            num_micro_batches, num_rows, num_positions = shape_ABT
            shape = self._stream_shape(num_rows, num_positions, True)
            stages = [self._pipeline_stage(stage, shape) for stage in self._stages]
            options: dict[str, Any] = {"loss_fn": _pass_on, "scale_grads": False}
            if self._name == "1f1b":
                made: _PipelineSchedule = Schedule1F1B(stages[0], num_micro_batches, **options)
            else:
                multiple = ScheduleInterleaved1F1B if self._name == "interleaved" else ScheduleInterleavedZeroBubble
                made = multiple(list(stages), num_micro_batches, **options)
            self._schedules[shape_ABT] = made
        return self._schedules[shape_ABT]

    def _pipeline_stage(self, stage: Stage, shape: tuple[int, ...]) -> PipelineStage:
        from torch.distributed.pipelining import PipelineStage

        stream = torch.empty(shape, device="meta", requires_grad=True)
        index = torch.empty(1, dtype=torch.int64, device="meta")
        return PipelineStage(
            _StageModule(partial(self._run, stage)), stage.index, stage.count, self._device,
            input_args=index if stage.is_first else stream, output_args=stream, group=self._ranks.pipeline_group,
            dw_builder=self._take_weight_gradients,
        )  # fmt: skip

    def _run(self, stage: Stage, x: Tensor, index: int) -> Tensor:
        assert self._step is not None
        return self._train(stage, self._step, x, index)

    # -- evaluation and decoding --------------------------------------------------------------------------------------

    def forward(self, first: Tensor, num_rows: int, num_positions: int, run: Callable[[Stage, Tensor], Tensor]) -> Any:
        """Run the stages without gradients, each when its input arrives.

        Args:
            first: Input of the first stage.
            num_rows: Its rows.
            num_positions: Its positions.
            run: Returns the residual stream after a stage, or the result of the last one.

        Returns:
            The result on the rank of the last stage, else ``None``.
        """
        found: Any = None
        for stage in self._stages:
            x = first
            if not stage.is_first:
                x = torch.empty(self._stream_shape(num_rows, num_positions, False), device=self._device)
                dist.recv(x, self._rank(stage.index - 1), self._ranks.pipeline_group)
            found = run(stage, x)
            if not stage.is_last:
                dist.send(found.float().contiguous(), self._rank(stage.index + 1), self._ranks.pipeline_group)
                found = None
        return found

    def broadcast(self, found: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor in fp32 that the rank of the last stage has, on all ranks of the pipeline."""
        value = torch.empty(shape, device=self._device) if found is None else found.float().contiguous()
        dist.broadcast(value, self._rank(self._ranks.pipeline_parallel_size - 1), self._ranks.pipeline_group)
        return value

    def _rank(self, stage_index: int) -> int:
        """Return the global rank that has a stage."""
        pipeline = self._ranks.pipeline_group
        assert pipeline is not None
        return dist.get_global_rank(pipeline, stage_index % self._ranks.pipeline_parallel_size)


def check(config: RunConfig, ranks: Ranks) -> None:
    """Check that the micro-batches of a step fill the pipeline.

    Raises:
        ConfigError: They do not.
    """
    if config.parallel.pipeline_parallel_size > 1 and (fault := micro_batches_fault(config, ranks.shard.count)):
        raise ConfigError(fault, where=PIPELINE_SIZE)
