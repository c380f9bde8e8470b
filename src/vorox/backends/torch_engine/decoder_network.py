"""The native decoder on this rank: placement, inputs, fused loss and decoding (implements ``network.py``).

Shape legend: B rows, T positions, M = B x T, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vorox.backends.torch_engine import attention, compilation, kernels
from vorox.backends.torch_engine.decoder import KeyValueCache, TorchDecoder
from vorox.backends.torch_engine.devices import Compute
from vorox.backends.torch_engine.distributed import Ranks
from vorox.backends.torch_engine.inputs import labels_to_device, to_device
from vorox.backends.torch_engine.loss import HeadLoss, LossSums
from vorox.backends.torch_engine.model import Decoder, ForwardContext, Parts, RunBlock
from vorox.backends.torch_engine.parameters import FlatParameters, Parameters
from vorox.backends.torch_engine.sharded_parameters import ShardedParameters
from vorox.backends.torch_engine.taps import Taps
from vorox.core.batch import Batch, Int32Array
from vorox.core.engine import NamedArray
from vorox.core.schema import RunConfig
from vorox.models.decoder_spec import DecoderSpec
from vorox.models.weight_init import initial_weights


class DecoderNetwork:
    """See ``network.Network``.

    Attributes:
        module: The decoder.
        parameters: Its parameters and gradients on this rank.
        taps: Functions attached to the residual stream.
    """

    def __init__(self, config: RunConfig, spec: DecoderSpec, compute: Compute, ranks: Ranks) -> None:
        self._config, self._spec, self._compute, self._ranks = config, spec, compute, ranks
        self.taps = Taps(spec.num_layers, compiled=compute.compiled)
        self.parameters: Parameters
        self.module = self._place()
        self._run_block = compilation.compiled_block(compute) if compute.compiled else None
        self._products = kernels.products(compute)
        self._loss = HeadLoss(
            config.loss, spec.vocab_size, compute.device, self._products, compute.dtype,
            count_correct=config.log.accuracy,
        )  # fmt: skip
        self._rotary = attention.rotary_tables(spec, compute.device)

    @property
    def is_random(self) -> bool:
        return self._spec.dropout_fraction > 0

    def initial_weights(self, seed: int) -> Iterator[NamedArray]:
        return initial_weights(self._spec, seed)

    def _place(self) -> Decoder:
        """Build the model over flat buffers, or over shards if several ranks share a replica."""
        config, spec, compute = self._config, self._spec, self._compute
        groups = {"muon": config.optimizer.name == "muon", "decay_embeddings": config.optimizer.decay_embeddings}
        attend = attention.attention_kernel(config.model.attention_kernel)
        if self._ranks.fsdp_size == 1:
            self.parameters = FlatParameters(spec, **groups, device=compute.device)
            chosen = kernels.select(compute)
            return Decoder(Parts(spec, self.parameters.modules, chosen, attend, self.taps))
        self.parameters = sharded = ShardedParameters(spec, **groups, ranks=self._ranks)
        model = Decoder(Parts(spec, sharded.modules, kernels.plain(compute), attend, self.taps))
        sharded.shard(model, list(model.blocks), compute.dtype, reshard=config.parallel.reshard_after_forward)
        return model

    def train(
        self, batch: Batch, index: int, *, scale: float, loss_scale: Tensor | None, compiled: bool = True
    ) -> LossSums:
        labels = labels_to_device(batch.labels_ABT[index], self._compute.device)
        tokens_M, context = self._inputs(batch, index, is_training=True)
        objective, sums = self._forward(
            tokens_M,
            context,
            lambda hidden_MD, head_VD: self._loss.train(hidden_MD, head_VD, labels, scale, loss_scale),
            self._run_block if compiled else None,
        )
        objective.backward()
        return sums

    def evaluate(self, batch: Batch, index: int) -> LossSums:
        labels = labels_to_device(batch.labels_ABT[index], self._compute.device)
        tokens_M, context = self._inputs(batch, index, is_training=False)
        return self._forward(tokens_M, context, partial(self._loss.evaluate, labels=labels))

    def logits(self, tokens_BT: Int32Array) -> Tensor:
        context = self._context(tokens_BT.shape, attention.CAUSAL)
        tokens_M = to_device(tokens_BT, self._compute.device).view(-1)
        return self._forward(tokens_M, context, self._head_logits).view(*tokens_BT.shape, -1)

    def decoder(self, batch_size: int, max_tokens: int) -> TorchDecoder:
        cache = KeyValueCache(self._spec, batch_size, max_tokens, self._compute.device, self._compute.dtype)
        return TorchDecoder(cache, max_tokens, self._decode)

    @torch.no_grad()
    def _decode(self, tokens_BT: Int32Array, cache: KeyValueCache) -> Tensor:
        attention_mask = attention.decoding_mask(cache.num_tokens, tokens_BT.shape[1], self._compute.device)
        context = self._context(tokens_BT.shape, attention_mask, num_past=cache.num_tokens, cache=cache)

        def last_logits(hidden_MD: Tensor, head_VD: Tensor) -> Tensor:
            return self._head_logits(hidden_MD.view(*tokens_BT.shape, -1)[:, -1], head_VD)

        return self._forward(to_device(tokens_BT, self._compute.device).view(-1), context, last_logits)

    def _head_logits(self, hidden_MD: Tensor, head_VD: Tensor) -> Tensor:
        dtype = self._compute.dtype
        return self._products(hidden_MD.to(dtype), head_VD.to(dtype)).float()

    def _forward(
        self,
        tokens_M: Tensor,
        context: ForwardContext,
        finish: Callable[[Tensor, Tensor], Any],
        run_block: RunBlock | None = None,
    ) -> Any:
        """Return ``finish(hidden_MD, head_VD)``, computed outside autocast."""

        def apply(hidden_MD: Tensor) -> Any:
            with self._compute.no_autocast():
                return finish(hidden_MD, self.module.head_weight)

        with self._compute.autocast():
            found = self.module(tokens_M, context, apply, run_block)
        if not torch.is_grad_enabled():
            self.parameters.release()
        return found

    def _inputs(self, batch: Batch, index: int, *, is_training: bool) -> tuple[Tensor, ForwardContext]:
        segments_ABT, positions_ABT = batch.segment_ids_ABT, batch.position_ids_ABT
        segments_BT = None if segments_ABT is None else segments_ABT[index]
        positions_BT = None if positions_ABT is None else positions_ABT[index]
        tokens_BT = batch.tokens_ABT[index]
        context = self._context(
            tokens_BT.shape,
            attention.document_mask(
                segments_BT, self._compute.device, always_mask=is_training and self._compute.compiled
            ),
            positions_BT=positions_BT,
            is_training=is_training,
        )
        return to_device(tokens_BT, self._compute.device).view(-1), context

    def _context(
        self,
        shape_BT: tuple[int, ...],
        attention_mask: attention.AttentionMask,
        *,
        positions_BT: Int32Array | None = None,
        num_past: int = 0,
        is_training: bool = False,
        cache: KeyValueCache | None = None,
    ) -> ForwardContext:
        num_rows, num_positions = shape_BT
        positions: Tensor | None = None
        here = slice(num_past, num_past + num_positions)
        if positions_BT is not None:
            positions = to_device(positions_BT, self._compute.device)
        rotary = [
            (_rows_at(cosines, positions, here)[:, :, None], _rows_at(sines, positions, here)[:, :, None])
            for cosines, sines in self._rotary
        ]
        if rotary:
            positions = None
        elif positions is None:
            positions = torch.arange(here.start, here.stop, device=self._compute.device)[None]
        return ForwardContext(
            shape_BT=(num_rows, num_positions),
            attention_mask=attention.add_window(
                attention_mask, self._spec.sliding_window_tokens, num_past, num_positions, self._compute.device
            ),
            rotary=rotary[0] if rotary else None,
            sliding_rotary=rotary[1] if len(rotary) > 1 else None,
            positions=positions,
            dropout=self._spec.dropout_fraction if is_training else 0.0,
            cache=cache,
            recompute_blocks=is_training and self._config.train.activation_checkpointing == "block",
        )


def _rows_at(table: Tensor, positions: Tensor | None, here: slice) -> Tensor:
    """Return the rows of a rotary table at the positions of tokens, or at consecutive ones, ``[B or 1, T, H / 2]``."""
    return table[here][None] if positions is None else table[positions]
