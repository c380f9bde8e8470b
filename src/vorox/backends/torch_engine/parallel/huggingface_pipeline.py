"""A transformers model as a pipeline: this rank computes its stages (implements ``network.py``).

A stage is the whole model of ``config.json`` in which the blocks of other stages return their input and have no
parameters. So blocks keep their indices, by which models choose masks and rotary frequencies, and transformers' own
code runs a stage. Stages after the first one get the residual stream as ``inputs_embeds``; position ids and with them
the masks of documents are computed from the rows of the micro-batch, which all ranks read.

Shape legend: B rows, T positions, D width, V vocabulary.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from vorox.backends.torch_engine import kernels
from vorox.backends.torch_engine.huggingface_network import HuggingFaceNetwork, recompute_blocks
from vorox.backends.torch_engine.loss import LossSums
from vorox.backends.torch_engine.module_table import move_buffers, named_tensors, replace_tensors
from vorox.backends.torch_engine.network import EnterMicroBatch
from vorox.backends.torch_engine.parallel.deferred_gradients import DeferredGradients
from vorox.backends.torch_engine.parallel.pipeline_parameters import PipelineParameters
from vorox.backends.torch_engine.parallel.pipeline_schedule import StageRunner, TrainingStep
from vorox.core.batch import Batch
from vorox.models.optimizer_groups import optimizer_groups
from vorox.models.pipeline_stages import Stage, stages_of_device


class _OtherBlock(nn.Module):
    """A block of another stage."""

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        return hidden_states


class _AddedBefore(nn.Module):
    """Learned positions behind the first stage, which has added them."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)


class ModelStage(nn.Module):
    """A stage of a causal language model.

    Args:
        model: The model; it becomes the stage.
        stage: Its blocks.

    Attributes:
        names: Names of its parameters to canonical names.
        blocks: The blocks of the stage.
    """

    def __init__(self, model: Any, stage: Stage) -> None:
        super().__init__()
        canonical = {id(tensor): name for name, tensor in named_tensors(model)}
        self.model, self._stage = model, stage
        decoder = model.base_model
        layers = decoder.h if hasattr(decoder, "h") else decoder.layers  # GPT-2, and all others
        self.blocks = [block for index, block in enumerate(layers) if index in stage.layers]
        for index in range(len(layers)):
            if index not in stage.layers:
                layers[index] = _OtherBlock()
        if not stage.is_first:
            model.set_input_embeddings(nn.Identity())
            if hasattr(decoder, "wpe"):
                decoder.wpe = _AddedBefore()
        if not stage.is_last:
            setattr(decoder, "ln_f" if hasattr(decoder, "ln_f") else "norm", nn.Identity())
            model.set_output_embeddings(nn.Identity())
        self.names = {path: canonical[id(tensor)] for path, tensor in named_tensors(self)}

    def forward(self, x: Tensor, positions_BT: Tensor | None) -> Tensor:
        """Return the residual stream ``[B, T, D]`` after the stage, or the logits ``[B, T, V]``.

        Args:
            x: Token ids ``[B, T]``, or the residual stream.
            positions_BT: Position of each token in its document; ``None`` for consecutive ones.
        """
        inputs = {"input_ids" if self._stage.is_first else "inputs_embeds": x, "position_ids": positions_BT}
        if self._stage.is_last:
            return self.model(**inputs, use_cache=False).logits
        return self.model.base_model(**inputs, use_cache=False).last_hidden_state


class HuggingFacePipeline(HuggingFaceNetwork):
    """See ``ModuleNetwork``; ``train_all`` replaces ``train``."""

    has_stages = True

    module: nn.ModuleList

    def _build(self) -> nn.Module:
        size, index = self._ranks.pipeline_parallel_size, self._ranks.pipeline_index
        per_device = self._config.parallel.pipeline_stages_per_device
        self._stages = stages_of_device(self._spec.num_layers, size, per_device, index)
        self._models: dict[int, ModelStage] = {}
        for stage in self._stages:
            model = super()._build()
            self._share = self._share_of(model)  # the same for every stage
            self._models[stage.index] = ModelStage(model, stage)
        return nn.ModuleList(self._models.values())

    def _place(self) -> None:
        config, spec, device = self._config, self._spec, self._compute.device
        groups = optimizer_groups(spec, config.optimizer)
        per_device = config.parallel.pipeline_stages_per_device
        placed = PipelineParameters(spec, self._share.table, groups, self._ranks, per_device, device)
        self.parameters = self._share.place(placed, groups)
        for model in self._models.values():
            replace_tensors(model, {path: placed.modules[name] for path, name in model.names.items()})
            self._share.divide(model, placed.modules)
            move_buffers(model, device)
        models = list(self._models.values())
        blocks = [block for model in models for block in model.blocks]
        placed.shard(models, blocks, self._compute.dtype, reshard=config.parallel.reshard_after_forward)
        deferred = None
        if config.parallel.pipeline_schedule == "zero_bubble":
            deferred = DeferredGradients(kernels.products(self._compute), self._ranks)
            deferred.attach(blocks)
        self._runner = StageRunner(
            config, self._ranks, device, self._stages,
            stream_shape=lambda num_rows, num_positions, _: (num_rows, num_positions, spec.hidden_size),
            train=self._train_stage, take_weight_gradients=None if deferred is None else deferred.take,
        )  # fmt: skip

    def _recompute_blocks(self) -> None:
        for model in self._models.values():
            recompute_blocks(model.model)

    @cached_property
    def _takes_positions(self) -> bool:
        return True

    # -- training -----------------------------------------------------------------------------------------------------

    def train_all(
        self, batch: Batch, *, scale: float, loss_scale: Tensor | None, enter: EnterMicroBatch
    ) -> dict[int, LossSums]:
        """Train on all micro-batches of a step; see ``StageRunner.train``."""
        self.module.train()
        return self._runner.train(TrainingStep(batch, scale, loss_scale, enter))

    def _train_stage(self, stage: Stage, step: TrainingStep, x: Tensor, index: int) -> Tensor:
        ((inputs, labels),) = self._forward_passes(step.batch, index)
        with step.enter(index), self._compute.autocast():
            found = self._run_stage(stage, inputs["tokens"].long() if stage.is_first else x, inputs.get("positions"))
        if not stage.is_last:
            return found.float()
        objective, step.sums[index] = self._loss.train(found.float().flatten(0, 1), labels)
        objective = objective * step.scale
        return objective if step.loss_scale is None else objective * step.loss_scale

    def _run_stage(self, stage: Stage, x: Tensor, positions_BT: Tensor | None) -> Tensor:
        # The stream travels in fp32; within a model, FSDP2 has it in the precision of the gathered embedding.
        x = x if stage.is_first else x.to(self._weights_dtype)
        return self._models[stage.index](x, positions_BT)

    # -- evaluation and decoding --------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch, index: int) -> LossSums:
        self.module.eval()
        ((inputs, labels),) = self._forward_passes(batch, index)
        with self._compute.autocast():
            logits = self._last_stage(inputs["tokens"].long(), inputs.get("positions"))
        return self._runner.no_sums() if logits is None else self._loss.evaluate(logits.float().flatten(0, 1), labels)

    def _last_stage(self, tokens_BT: Tensor, positions_BT: Tensor | None) -> Tensor | None:
        """Return logits on the rank of the last stage, without gradients."""
        num_rows, num_positions = tokens_BT.shape
        found = self._runner.forward(
            tokens_BT, num_rows, num_positions, lambda stage, x: self._run_stage(stage, x, positions_BT)
        )
        self.parameters.release()
        return found

    @torch.no_grad()
    def _call(
        self, tokens: Tensor, positions: Tensor | None, is_token: Tensor | None, documents: Tensor | None,
        **images: Tensor,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        assert is_token is None
        assert not images
        del documents  # found by position ids
        logits = self._last_stage(tokens, positions)
        return self._runner.broadcast(logits, (*tokens.shape, self._spec.vocab_size)), None
