"""The stages of a transformers model (see ``pipeline_network.py``).

A stage is the whole model of ``config.json`` in which the blocks of other stages return their input and have no
parameters. So blocks keep their indices, by which models choose masks and rotary frequencies, and transformers' own
code runs a stage. Stages after the first one get the residual stream as ``inputs_embeds``; position ids and with them
the masks of documents are computed from the rows of the micro-batch, which all ranks read.

Shape legend: B rows, T positions, M = B x T, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from vorox.backends.torch_engine.device.labels import Labels
from vorox.backends.torch_engine.foreign.module_table import move_buffers, named_tensors, replace_tensors
from vorox.backends.torch_engine.losses.loss import LossSums
from vorox.backends.torch_engine.networks.huggingface_network import HuggingFaceNetwork, recompute_blocks
from vorox.backends.torch_engine.parallel.pipeline_network import PipelineNetwork
from vorox.core.batch import Batch
from vorox.models.pipeline_stages import PipelineStage


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
        stage: Its blocks.
        names: Names of its parameters to canonical names.
        blocks: The blocks of the stage.
    """

    def __init__(self, model: Any, stage: PipelineStage) -> None:
        super().__init__()
        canonical = {id(tensor): name for name, tensor in named_tensors(model)}
        self.model, self.stage = model, stage
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
        inputs = {"input_ids" if self.stage.is_first else "inputs_embeds": x, "position_ids": positions_BT}
        if self.stage.is_last:
            return self.model(**inputs, use_cache=False).logits
        return self.model.base_model(**inputs, use_cache=False).last_hidden_state


class HuggingFacePipeline(PipelineNetwork, HuggingFaceNetwork):
    """See ``PipelineNetwork``."""

    def _build(self) -> nn.Module:
        self._models: dict[int, ModelStage] = {}
        for stage in self._stages:
            model = super()._build()
            self._share = self._share_of(model)  # the same for every stage
            self._models[stage.index] = ModelStage(model, stage)
        return nn.ModuleList(self._models.values())

    def _place(self) -> None:
        self._place_stages()

    def _build_stage(self, stage: PipelineStage, parameters: Mapping[str, nn.Parameter]) -> ModelStage:
        model = self._models[stage.index]
        replace_tensors(model, {path: parameters[name] for path, name in model.names.items()})
        move_buffers(model, self._compute.device)
        return model

    def _recompute_blocks(self) -> None:
        for model in self._models.values():
            recompute_blocks(model.model)

    @cached_property
    def _takes_positions(self) -> bool:
        return True

    def _stage_inputs(self, batch: Batch, index: int, *, is_training: bool) -> tuple[Tensor, Tensor | None]:
        self.module.train(is_training)
        ((inputs, _),) = self._forward_passes(batch, index)
        return inputs["tokens"].long(), inputs.get("positions")

    def _stream_shape(self, tokens: Tensor, inputs: Tensor | None) -> tuple[int, ...]:
        del inputs
        return *tokens.shape, self._spec.hidden_size

    def _run_stage(self, module: ModelStage, x: Tensor, inputs: Tensor | None, finish: Callable[..., Any]) -> Any:
        # The stream travels in fp32; within a model, FSDP2 has it in the precision of the gathered embedding.
        x = x if module.stage.is_first else x.to(self._weights_dtype)
        found = module(x, inputs)
        return finish(found.float().flatten(0, 1)) if module.stage.is_last else found

    def _objective(
        self, *outputs: Tensor, labels: Labels, scale: float, loss_scale: Tensor | None
    ) -> tuple[Tensor, LossSums]:
        objective, sums = self.loss.train(*outputs, labels)
        objective = objective * scale
        return objective if loss_scale is None else objective * loss_scale, sums

    def _call(
        self, tokens: Tensor, positions: Tensor | None, is_token: Tensor | None, documents: Tensor | None,
        **images: Tensor,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        assert is_token is None
        assert not images
        del documents  # found by position ids
        logits_MV = self._logits_of_stages(tokens, positions, lambda logits_MV: logits_MV, tokens.numel())
        return logits_MV.view(*tokens.shape, -1), None
