"""The stages of this rank, run in the order of a schedule of ``torch.distributed.pipelining``.

All ranks of a pipeline read the same rows, so only the residual stream and its gradient travel between stages; masks,
positions and labels do not. Training runs a schedule over the micro-batches of a step. Evaluation and decoding run one
micro-batch after the other; the last stage has their result.

Shape legend: A micro-batches, B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vorox.backends.torch_engine.losses.loss import LossSums
from vorox.backends.torch_engine.network import EnterMicroBatch
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.core.batch import Batch
from vorox.core.config.checks.parallel import PIPELINE_SIZE, micro_batches_fault
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.core.schema.runtime import PipelineScheduleName
from vorox.models.pipeline_stages import PipelineStage, StagePlacement

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage as TorchStage
    from torch.distributed.pipelining.schedules import _PipelineSchedule

_CLASSES: Mapping[PipelineScheduleName, str] = {
    "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B", "zero_bubble": "ScheduleInterleavedZeroBubble",
}  # fmt: skip
"""``parallel.pipeline_schedule`` to the class of ``torch.distributed.pipelining``."""


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
        placement: The stages of all ranks.
        stream_shape: Returns the shape of the residual stream of a micro-batch in training.
        train: Returns the residual stream after a stage, fp32, or the scaled objective of the last one, for its input
            (unused by the first stage) and the index of a micro-batch.
        take_weight_gradients: ``DeferredGradients.take``, if the schedule divides backward passes.
    """

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        device: torch.device,
        placement: StagePlacement,
        *,
        stream_shape: Callable[[Batch], tuple[int, ...]],
        train: Callable[[PipelineStage, TrainingStep, Tensor, int], Tensor],
        take_weight_gradients: Callable[[], Callable[[], None]] | None = None,
    ) -> None:
        self._class, self._ranks, self._device = _CLASSES[config.parallel.pipeline_schedule], ranks, device
        self._placement, self._stream_shape, self._train = placement, stream_shape, train
        self._stages = placement.devices[ranks.pipeline_index]
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
        schedule = self._schedule(step.batch)
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

    def _schedule(self, batch: Batch) -> _PipelineSchedule:
        """Return the schedule for batches of this shape."""
        shape_ABT = batch.tokens_ABT.shape
        if shape_ABT not in self._schedules:
            # Takes more than a second to import, and one device needs none of it.
            from torch.distributed import pipelining

            num_micro_batches, shape = shape_ABT[0], self._stream_shape(batch)
            stages = [self._torch_stage(stage, shape) for stage in self._stages]
            self._schedules[shape_ABT] = getattr(pipelining, self._class)(
                stages if len(stages) > 1 else stages[0], num_micro_batches, loss_fn=_pass_on, scale_grads=False
            )
        return self._schedules[shape_ABT]

    def _torch_stage(self, stage: PipelineStage, shape: tuple[int, ...]) -> TorchStage:
        from torch.distributed.pipelining import PipelineStage as TorchStage

        stream = torch.empty(shape, device="meta", requires_grad=True)
        index = torch.empty(1, dtype=torch.int64, device="meta")
        return TorchStage(
            _StageModule(partial(self._run, stage)), stage.index, stage.count, self._device,
            input_args=index if stage.is_first else stream, output_args=stream, group=self._ranks.pipeline_group,
            dw_builder=self._take_weight_gradients,
        )  # fmt: skip

    def _run(self, stage: PipelineStage, x: Tensor, index: int) -> Tensor:
        assert self._step is not None
        return self._train(stage, self._step, x, index)

    # -- evaluation and decoding --------------------------------------------------------------------------------------

    def forward(self, first: Tensor, stream_shape: tuple[int, ...], run: Callable[[PipelineStage, Tensor], Any]) -> Any:
        """Run the stages without gradients, each when its input arrives.

        Args:
            first: Input of the first stage.
            stream_shape: Shape of the residual stream.
            run: Returns the residual stream after a stage, or the result of the last one.

        Returns:
            The result on the rank of the last stage, else ``None``.
        """
        found: Any = None
        for stage in self._stages:
            x = first
            if not stage.is_first:
                x = torch.empty(stream_shape, device=self._device)
                dist.recv(x, self._rank(stage.index - 1), self._ranks.pipeline_group)
            found = run(stage, x)
            if not stage.is_last:
                dist.send(found.float().contiguous(), self._rank(stage.index + 1), self._ranks.pipeline_group)
                found = None
        return found

    def broadcast(self, found: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor in fp32 that the rank of the last stage has, on all ranks of the pipeline."""
        value = torch.empty(shape, device=self._device) if found is None else found.float().contiguous()
        dist.broadcast(value, self._rank(self._stages[0].count - 1), self._ranks.pipeline_group)
        return value

    def _rank(self, stage_index: int) -> int:
        """Return the global rank that has a stage."""
        pipeline = self._ranks.pipeline_group
        assert pipeline is not None
        return dist.get_global_rank(pipeline, self._placement.device_of(stage_index))


def check(config: RunConfig, ranks: Ranks) -> None:
    """Check that the micro-batches of a step fill the pipeline.

    Raises:
        ConfigError: They do not.
    """
    if config.parallel.pipeline_parallel_size > 1 and (fault := micro_batches_fault(config, ranks.shard.count)):
        raise ConfigError(fault, where=PIPELINE_SIZE)
