"""The stages of the native decoder (see ``pipeline_network.py``).

Shape legend: M = rows x positions of a micro-batch, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from vorox.backends.torch_engine.layers.forward_context import ForwardContext
from vorox.backends.torch_engine.layers.model import Decoder, ResidualBlock, RunBlock
from vorox.backends.torch_engine.losses.loss import LossSums
from vorox.backends.torch_engine.networks.decoder_network import DecoderNetwork, check_user_parts_alone
from vorox.backends.torch_engine.networks.user_part_probe import user_parts
from vorox.backends.torch_engine.parallel.pipeline_network import PipelineNetwork
from vorox.core.batch import Batch
from vorox.models.pipeline_stages import PipelineStage


class _Inputs(NamedTuple):
    context: ForwardContext
    run_block: RunBlock | None = None


class DecoderPipeline(PipelineNetwork, DecoderNetwork):
    """See ``PipelineNetwork``."""

    def _check_user_parts(self) -> None:
        if user_parts(self._config):
            check_user_parts_alone(self._config, self._spec, self._compute)

    def _place(self) -> tuple[nn.Module, Callable[..., Any]]:
        module = self._place_stages()
        return module, module

    def _build_stage(self, stage: PipelineStage, parameters: Mapping[str, nn.Parameter]) -> Decoder:
        return Decoder(self._parts(parameters), stage)

    def _stage_inputs(self, batch: Batch, index: int, *, is_training: bool) -> tuple[Tensor, _Inputs]:
        tokens_M, context = self._inputs(batch, index, is_training=is_training)
        return tokens_M, _Inputs(context, self._block_of(index) if is_training else None)

    def _block_of(self, index: int) -> RunBlock | None:
        """Return what runs a block; with activation checkpointing, blocks run again after those of later ones."""
        statistics = self.taps.statistics
        if statistics is None:
            return None

        def run(block: ResidualBlock, x_MD: Tensor, context: ForwardContext) -> Tensor:
            statistics.micro_batch = index
            return block(x_MD, context)

        return run

    def _stream_shape(self, tokens: Tensor, inputs: _Inputs) -> tuple[int, int]:
        del tokens
        return math.prod(inputs.context.stream_BT), self._spec.hidden_size

    def _run_stage(self, module: Decoder, x: Tensor, inputs: _Inputs, finish: Callable[..., Any]) -> Any:
        return module(x, inputs.context, lambda hidden_MD: finish(hidden_MD, module.head_weight), inputs.run_block)

    def _objective(self, *outputs: Any, **settings: Any) -> tuple[Tensor, LossSums]:
        return self.loss.train(*outputs, **settings)

    def _logits(
        self, tokens_M: Tensor, context: ForwardContext, finish: Callable[[Tensor, Tensor], Tensor], num_rows: int
    ) -> Tensor:
        return self._logits_of_stages(tokens_M, _Inputs(context), finish, num_rows)
