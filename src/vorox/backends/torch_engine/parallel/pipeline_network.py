"""The native decoder as a pipeline: this rank computes its stages (implements ``network.py``).

All ranks of a pipeline read the same rows, so only the residual stream and its gradient travel between stages; masks,
positions and labels do not. Training runs a schedule of ``torch.distributed.pipelining`` over the micro-batches of a
step. Evaluation and decoding run one micro-batch after the other; the last stage has their result.

Shape legend: A micro-batches, B rows, T positions, M = B x T, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vorox.backends.torch_engine import attention, kernels
from vorox.backends.torch_engine.decoder_network import DecoderNetwork
from vorox.backends.torch_engine.distributed import Ranks
from vorox.backends.torch_engine.forward_context import ForwardContext
from vorox.backends.torch_engine.inputs import labels_to_device
from vorox.backends.torch_engine.loss import LossSums
from vorox.backends.torch_engine.model import Decoder, Parts, ResidualBlock, RunBlock
from vorox.backends.torch_engine.parallel.deferred_gradients import DeferredGradients
from vorox.backends.torch_engine.parallel.pipeline_parameters import PipelineParameters
from vorox.core.batch import Batch
from vorox.core.config.pipeline_checks import SIZE, micro_batches_fault
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.models.optimizer_groups import optimizer_groups
from vorox.models.pipeline_stages import Stage

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineSchedule

EnterMicroBatch = Callable[[int], AbstractContextManager[None]]
"""Opens the context in which a micro-batch runs: its randomness and its statistics."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What the stages need of the step that is running; ``sums`` are the results of the last stage."""

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


class PipelineNetwork(DecoderNetwork):
    """See ``network.Network``; ``train_all`` replaces ``train``."""

    def _place(self) -> tuple[nn.Module, Callable[..., Any]]:
        config, spec, compute, ranks = self._config, self._spec, self._compute, self._ranks
        groups = optimizer_groups(spec, config.optimizer)
        per_device = config.parallel.pipeline_stages_per_device
        self.parameters = placed = PipelineParameters(spec, groups, ranks, per_device, compute.device)
        chosen = kernels.plain(compute)
        if ranks.fsdp_size == 1:
            chosen = kernels.select(compute, keeps_products=config.train.activation_checkpointing == "dots")
        self._deferred: DeferredGradients | None = None
        if config.parallel.pipeline_schedule == "zero_bubble":
            self._deferred = DeferredGradients(kernels.products(compute))
            chosen = self._deferred.defer(chosen)
        attend = attention.attention_kernel(config.model.attention_kernel)
        parts = Parts(spec, placed.modules, chosen, attend, self.taps, compute.device)
        self._stages: list[tuple[Stage, Decoder]] = [(stage, Decoder(parts, stage)) for stage in placed.stages]
        decoders = [decoder for _, decoder in self._stages]
        placed.shard(decoders, compute.dtype, reshard=config.parallel.reshard_after_forward)
        self._schedules: dict[tuple[int, ...], _PipelineSchedule] = {}
        self._step: _Step | None = None
        return nn.ModuleList(decoders), self._forward

    # -- training -----------------------------------------------------------------------------------------------------

    def train_all(
        self, batch: Batch, *, scale: float, loss_scale: Tensor | None, enter: EnterMicroBatch
    ) -> dict[int, LossSums]:
        """Run forward and backward of all micro-batches of a step, and add to the gradients.

        Returns:
            Loss sums by micro-batch; 0 on ranks without the last stage.
        """
        num_micro_batches = batch.tokens_ABT.shape[0]
        self._step = step = _Step(batch, scale, loss_scale, enter)
        schedule = self._schedule(batch.tokens_ABT.shape)
        indices = torch.arange(num_micro_batches)
        inputs = (indices,) if self._stages[0][0].is_first else ()
        try:
            cast("Any", schedule).step(*inputs, index=indices, target=indices, losses=[], return_outputs=False)
        except RuntimeError as error:  # the schedule wraps what a stage raises
            raise error.__cause__ or error from None
        finally:
            self._step = None
        self._add_other_layers(num_micro_batches)
        return {index: step.sums.get(index, self._no_sums()) for index in range(num_micro_batches)}

    def _run_stage(self, stage: Stage, decoder: Decoder, x: Tensor, index: int) -> Tensor:
        """Return the residual stream after a stage, or the objective; ``x`` is unused by the first stage."""
        step = self._step
        assert step is not None
        with step.enter(index), self._compute.autocast():
            tokens_M, context = self._inputs(step.batch, index, is_training=True)
            x = tokens_M if stage.is_first else x
            found = decoder(x, context, partial(self._objective, decoder, index), self._block_of(index))
            return found if stage.is_last else found.float()  # FSDP gathers embeddings in the compute precision

    def _block_of(self, index: int) -> RunBlock | None:
        """Return what runs a block; with activation checkpointing, blocks run again after those of later ones."""
        statistics = self.taps.statistics
        if statistics is None:
            return None

        def run(block: ResidualBlock, x_MD: Tensor, context: ForwardContext) -> Tensor:
            statistics.micro_batch = index
            return block(x_MD, context)

        return run

    def _objective(self, decoder: Decoder, index: int, hidden_MD: Tensor) -> Tensor:
        """Return the scaled objective of a micro-batch on the last stage."""
        step = self._step
        assert step is not None
        labels = labels_to_device(step.batch.labels_ABT[index], self._compute.device)
        with self._compute.no_autocast():
            objective, step.sums[index] = self.loss.train(
                hidden_MD, decoder.head_weight, labels, step.scale, step.loss_scale
            )
        return objective

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
            stages = [self._pipeline_stage(stage, decoder, num_rows * num_positions) for stage, decoder in self._stages]
            options: dict[str, Any] = {"loss_fn": _pass_on, "scale_grads": False}
            name = self._config.parallel.pipeline_schedule
            if name == "1f1b":
                made: _PipelineSchedule = Schedule1F1B(stages[0], num_micro_batches, **options)
            else:
                multiple = ScheduleInterleaved1F1B if name == "interleaved" else ScheduleInterleavedZeroBubble
                made = multiple(list(stages), num_micro_batches, **options)
            self._schedules[shape_ABT] = made
        return self._schedules[shape_ABT]

    def _pipeline_stage(self, stage: Stage, decoder: Decoder, num_positions: int) -> PipelineStage:
        from torch.distributed.pipelining import PipelineStage

        stream_MD = torch.empty(num_positions, self._spec.hidden_size, device="meta", requires_grad=True)
        index = torch.empty(1, dtype=torch.int64, device="meta")
        return PipelineStage(
            _StageModule(partial(self._run_stage, stage, decoder)), stage.index, stage.count, self._compute.device,
            input_args=index if stage.is_first else stream_MD, output_args=stream_MD, group=self._ranks.pipeline_group,
            dw_builder=None if self._deferred is None else self._deferred.take,
        )  # fmt: skip

    def _add_other_layers(self, num_micro_batches: int) -> None:
        if self.taps.statistics is not None:
            here = {layer for stage, _ in self._stages for layer in stage.layers}
            others = [layer for layer in range(self._spec.num_layers) if layer not in here]
            self.taps.statistics.add_zeros(others, num_micro_batches, self._compute.device)

    # -- evaluation and decoding --------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch, index: int) -> LossSums:
        return super().evaluate(batch, index) or self._no_sums()

    def _no_sums(self) -> LossSums:
        zero = torch.zeros((), dtype=self.loss.sum_dtype, device=self._compute.device)
        return LossSums(zero, zero, zero, zero)

    @torch.no_grad()
    def _forward(
        self,
        tokens_M: Tensor,
        context: ForwardContext,
        finish: Callable[[Tensor, Tensor], Any],
        run_block: RunBlock | None = None,
    ) -> Any:
        """Return ``finish(hidden_MD, head_VD)`` on the rank of the last stage, else ``None``. Without gradients."""

        def apply(decoder: Decoder, hidden_MD: Tensor) -> Any:
            with self._compute.no_autocast():
                return finish(hidden_MD, decoder.head_weight)

        found: Any = None
        for stage, decoder in self._stages:
            x = tokens_M
            if not stage.is_first:
                x = torch.empty(len(tokens_M), self._spec.hidden_size, device=self._compute.device)
                dist.recv(x, self._rank(stage.index - 1), self._ranks.pipeline_group)
            with self._compute.autocast():
                found = decoder(x, context, partial(apply, decoder), run_block)
            if not stage.is_last:
                dist.send(found.float().contiguous(), self._rank(stage.index + 1), self._ranks.pipeline_group)
                found = None
        self.parameters.release()
        return found

    def _logits(
        self, tokens_M: Tensor, context: ForwardContext, finish: Callable[[Tensor, Tensor], Tensor], num_rows: int
    ) -> Tensor:
        """Return logits on all ranks of the pipeline, without gradients."""
        found: Tensor | None = self._forward(tokens_M, context, finish)
        if found is None:
            found = torch.empty(num_rows, self._spec.vocab_size, device=self._compute.device)
        found = found.contiguous()
        dist.broadcast(found, self._rank(self._ranks.pipeline_parallel_size - 1), self._ranks.pipeline_group)
        return found

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
        raise ConfigError(fault, where=SIZE)
