"""The native decoder as a pipeline: this rank computes its stages (implements ``network.py``).

``pipeline_schedule.py`` runs them.

Shape legend: M = rows x positions of a micro-batch, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vorox.backends.torch_engine import attention, kernels
from vorox.backends.torch_engine.decoder_network import DecoderNetwork, check_user_parts_alone
from vorox.backends.torch_engine.forward_context import ForwardContext
from vorox.backends.torch_engine.loss import LossSums
from vorox.backends.torch_engine.model import Decoder, Parts, ResidualBlock, RunBlock
from vorox.backends.torch_engine.network import EnterMicroBatch
from vorox.backends.torch_engine.parallel.deferred_gradients import DeferredGradients
from vorox.backends.torch_engine.parallel.pipeline_parameters import PipelineParameters
from vorox.backends.torch_engine.parallel.pipeline_schedule import StageRunner, TrainingStep
from vorox.backends.torch_engine.user_part_probe import user_parts
from vorox.core.batch import Batch
from vorox.models.optimizer_groups import optimizer_groups
from vorox.models.pipeline_stages import Stage


class PipelineNetwork(DecoderNetwork):
    """See ``network.Network``; ``train_all`` replaces ``train``."""

    has_stages = True

    def _check_user_parts(self) -> None:
        if user_parts(self._config):
            check_user_parts_alone(self._config, self._spec, self._compute)

    def _place(self) -> tuple[nn.Module, Callable[..., Any]]:
        config, spec, compute, ranks = self._config, self._spec, self._compute, self._ranks
        groups = optimizer_groups(spec, config.optimizer)
        per_device = config.parallel.pipeline_stages_per_device
        placed = PipelineParameters(spec, self._share.table, groups, ranks, per_device, compute.device)
        chosen = kernels.plain(compute)
        if ranks.num_fsdp_shards == 1:
            chosen = kernels.select(compute, keeps_products=config.train.activation_checkpointing == "dots")
        attend = attention.attention_kernel(config.model.attention_kernel)
        parts = Parts(spec, placed.modules, chosen, attend, self.taps, compute.device, self._parallel)
        decoders = [Decoder(parts, stage) for stage in placed.stages]
        self._share.divide(nn.ModuleList(decoders), placed.modules)
        blocks = [block for decoder in decoders for block in decoder.blocks]
        placed.shard(decoders, blocks, compute.dtype, reshard=config.parallel.reshard_after_forward)
        deferred = None
        if config.parallel.pipeline_schedule == "zero_bubble":
            deferred = DeferredGradients(kernels.products(compute), ranks)
            deferred.attach(blocks)
        self._decoders = {stage.index: decoder for stage, decoder in zip(placed.stages, decoders, strict=True)}
        self._layers = {layer for stage in placed.stages for layer in stage.layers}
        self._runner = StageRunner(
            config, ranks, compute.device, placed.stages, stream_shape=self._stream_shape, train=self._train_stage,
            take_weight_gradients=None if deferred is None else deferred.take,
        )  # fmt: skip
        self.parameters = self._share.place(placed, groups)
        return nn.ModuleList(decoders), self._forward

    def _stream_shape(self, num_rows: int, num_positions: int, is_training: bool) -> tuple[int, int]:
        size = 1
        if is_training:
            part = None if self._parallel is None else self._parallel.part
            size = self._ranks.context_parallel_size * (1 if part is None else part.size)
        return num_rows * num_positions // size, self._spec.hidden_size

    # -- training -----------------------------------------------------------------------------------------------------

    def train_all(
        self, batch: Batch, *, scale: float, loss_scale: Tensor | None, enter: EnterMicroBatch
    ) -> dict[int, LossSums]:
        """Train on all micro-batches of a step; see ``StageRunner.train``."""
        sums = self._runner.train(TrainingStep(batch, scale, loss_scale, enter))
        self._add_other_layers(len(sums))
        return sums

    def _train_stage(self, stage: Stage, step: TrainingStep, x: Tensor, index: int) -> Tensor:
        decoder = self._decoders[stage.index]
        with step.enter(index), self._compute.autocast():
            tokens_M, context = self._inputs(step.batch, index, is_training=True)
            x = tokens_M if stage.is_first else x
            found = decoder(x, context, partial(self._objective, step, decoder, index), self._block_of(index))
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

    def _objective(self, step: TrainingStep, decoder: Decoder, index: int, hidden_MD: Tensor) -> Tensor:
        """Return the scaled objective of a micro-batch on the last stage."""
        labels = self._labels(step.batch, index)
        with self._compute.no_autocast():
            objective, step.sums[index] = self.loss.train(
                hidden_MD, decoder.head_weight, labels, step.scale, step.loss_scale
            )
        return objective

    def _add_other_layers(self, num_micro_batches: int) -> None:
        if self.taps.statistics is not None:
            others = [layer for layer in range(self._spec.num_layers) if layer not in self._layers]
            self.taps.statistics.add_zeros(others, num_micro_batches, self._compute.device)

    # -- evaluation and decoding --------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch, index: int) -> LossSums:
        return super().evaluate(batch, index) or self._runner.no_sums()

    @torch.no_grad()
    def _forward(
        self,
        tokens_M: Tensor,
        context: ForwardContext,
        finish: Callable[[Tensor, Tensor], Any],
        run_block: RunBlock | None = None,
    ) -> Any:
        """Return ``finish(hidden_MD, head_VD)`` on the rank of the last stage, else ``None``. Without gradients."""

        def run(stage: Stage, x: Tensor) -> Any:
            decoder = self._decoders[stage.index]

            def apply(hidden_MD: Tensor) -> Any:
                with self._compute.no_autocast():
                    return finish(hidden_MD, decoder.head_weight)

            with self._compute.autocast():
                return decoder(x, context, apply, run_block)

        found = self._runner.forward(tokens_M, 1, len(tokens_M), run)
        self.parameters.release()
        return found

    def _logits(
        self, tokens_M: Tensor, context: ForwardContext, finish: Callable[[Tensor, Tensor], Tensor], num_rows: int
    ) -> Tensor:
        """Return logits on all ranks of the pipeline, without gradients."""
        found: Tensor | None = self._forward(tokens_M, context, finish)
        return self._runner.broadcast(found, (num_rows, self._spec.vocab_size))
