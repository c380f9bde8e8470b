"""A model as a pipeline: this rank places, trains and evaluates its stages (implements ``network.py``).

It knows stages only. A kind of model says what its stages are, how one runs and what its objective is
(``decoder_pipeline.py``, ``huggingface_pipeline.py``). ``models/pipeline_stages.py`` says which rank has which stages,
``pipeline_schedule.py`` in which order they run.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from vorox.backends.torch_engine.device.devices import Compute
from vorox.backends.torch_engine.device.labels import Labels, labels_of
from vorox.backends.torch_engine.layers import kernels
from vorox.backends.torch_engine.layouts.pipeline_parameters import PipelineParameters
from vorox.backends.torch_engine.losses.loss import LossSums
from vorox.backends.torch_engine.network import EnterMicroBatch, Network
from vorox.backends.torch_engine.parallel.deferred_gradients import DeferredGradients
from vorox.backends.torch_engine.parallel.pipeline_schedule import StageRunner, TrainingStep
from vorox.backends.torch_engine.parallel.share import Share
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.core.batch import Batch
from vorox.core.schema import RunConfig
from vorox.models.optimizer_groups import optimizer_groups
from vorox.models.pipeline_stages import PipelineStage, StagePlacement


class PipelineNetwork(Network):
    """See ``Network``; ``train_all`` replaces ``train``. In front of the class of a kind of model."""

    has_stages = True

    loss: Any
    _config: RunConfig
    _spec: Any
    _compute: Compute
    _ranks: Ranks
    _share: Share

    # -- what a kind of model says ------------------------------------------------------------------------------------

    @abstractmethod
    def _build_stage(self, stage: PipelineStage, parameters: Mapping[str, nn.Parameter]) -> Any:
        """Return a stage over its parameters, by their names in the modules; ``blocks`` are its blocks."""

    @abstractmethod
    def _stage_inputs(self, batch: Batch, index: int, *, is_training: bool) -> tuple[Tensor, Any]:
        """Return the tokens of a micro-batch, and what every stage needs besides its input."""

    @abstractmethod
    def _stream_shape(self, tokens: Tensor, inputs: Any) -> tuple[int, ...]:
        """Return the shape of the residual stream between stages."""

    @abstractmethod
    def _run_stage(self, module: Any, x: Tensor, inputs: Any, finish: Callable[..., Any]) -> Any:
        """Return the residual stream after a stage, or of the last one ``finish`` of what the loss and logits need."""

    @abstractmethod
    def _objective(
        self, *outputs: Any, labels: Labels, scale: float, loss_scale: Tensor | None
    ) -> tuple[Tensor, LossSums]:
        """Return the objective of a micro-batch, times both scales, and its loss sums."""

    # -- placement ----------------------------------------------------------------------------------------------------

    @cached_property
    def _placement(self) -> StagePlacement:
        return StagePlacement.of(self._spec.num_layers, self._config.parallel)

    @property
    def _stages(self) -> tuple[PipelineStage, ...]:
        """The stages of this rank."""
        return self._placement.devices[self._ranks.pipeline_index]

    def _place_stages(self) -> nn.ModuleList:
        """Build the stages of this rank over flat buffers, or over shards if several ranks have them."""
        config, compute, ranks = self._config, self._compute, self._ranks
        groups = optimizer_groups(self._spec, config.optimizer)
        placed = PipelineParameters(self._spec, self._share.table, groups, ranks, self._placement, compute.device)
        modules = {stage.index: self._build_stage(stage, placed.modules) for stage in self._stages}
        module, blocks = nn.ModuleList(modules.values()), [block for one in modules.values() for block in one.blocks]
        self._share.divide(module, placed.modules)
        placed.shard(list(modules.values()), blocks, compute.dtype, reshard=config.parallel.reshard_after_forward)
        deferred = None
        if config.parallel.pipeline_needs.divides_backward:
            deferred = DeferredGradients(kernels.products(compute), ranks)
            deferred.attach(blocks)
        self._stage_modules = modules
        self._runner = StageRunner(
            config, ranks, compute.device, self._placement, stream_shape=self._training_stream, train=self._train_stage,
            take_weight_gradients=None if deferred is None else deferred.take,
        )  # fmt: skip
        self.parameters = self._share.place(placed, groups)
        return module

    def _compute_stage(self, stage: PipelineStage, x: Tensor, inputs: Any, finish: Callable[..., Any]) -> Any:
        def apply(*outputs: Any) -> Any:
            with self._compute.no_autocast():
                return finish(*outputs)

        with self._compute.autocast():
            return self._run_stage(self._stage_modules[stage.index], x, inputs, apply)

    # -- training -----------------------------------------------------------------------------------------------------

    def train_all(
        self, batch: Batch, *, scale: float, loss_scale: Tensor | None, enter: EnterMicroBatch
    ) -> dict[int, LossSums]:
        """Train on all micro-batches of a step; see ``StageRunner.train``."""
        sums = self._runner.train(TrainingStep(batch, scale, loss_scale, enter))
        if self.taps.statistics is not None:
            here = {layer for stage in self._stages for layer in stage.layers}
            others = [layer for layer in range(self._spec.num_layers) if layer not in here]
            self.taps.statistics.add_zeros(others, len(sums), self._compute.device)
        return sums

    def _training_stream(self, batch: Batch) -> tuple[int, ...]:
        return self._stream_shape(*self._stage_inputs(batch, 0, is_training=True))

    def _train_stage(self, stage: PipelineStage, step: TrainingStep, x: Tensor, index: int) -> Tensor:
        with step.enter(index):
            tokens, inputs = self._stage_inputs(step.batch, index, is_training=True)
            x = tokens if stage.is_first else x
            found = self._compute_stage(stage, x, inputs, partial(self._finish_training, step, index))
            return found if stage.is_last else found.float()  # FSDP gathers embeddings in the compute precision

    def _finish_training(self, step: TrainingStep, index: int, *outputs: Any) -> Tensor:
        labels = labels_of(step.batch, index, self._ranks.position_part, self._compute.device)
        objective, step.sums[index] = self._objective(
            *outputs, labels=labels, scale=step.scale, loss_scale=step.loss_scale
        )
        return objective

    # -- evaluation and decoding --------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch, index: int) -> LossSums:
        labels = labels_of(batch, index, self._ranks.position_part, self._compute.device)
        tokens, inputs = self._stage_inputs(batch, index, is_training=False)
        found: LossSums | None = self._forward_stages(tokens, inputs, partial(self.loss.evaluate, labels=labels))
        return self._runner.no_sums() if found is None else found

    @torch.no_grad()
    def _forward_stages(self, tokens: Tensor, inputs: Any, finish: Callable[..., Any]) -> Any:
        """Return ``finish`` of what the last stage computes on its rank, else ``None``. Without gradients."""
        shape = self._stream_shape(tokens, inputs)
        found = self._runner.forward(tokens, shape, lambda stage, x: self._compute_stage(stage, x, inputs, finish))
        self.parameters.release()
        return found

    def _logits_of_stages(self, tokens: Tensor, inputs: Any, finish: Callable[..., Tensor], num_rows: int) -> Tensor:
        """Return the logits ``[num_rows, V]`` that ``finish`` computes, on all ranks of the pipeline."""
        found: Tensor | None = self._forward_stages(tokens, inputs, finish)
        return self._runner.broadcast(found, (num_rows, self._spec.vocab_size))
