"""The native decoder on this rank: placement, inputs, fused loss and decoding (implements ``network.py``).

Shape legend: B rows, T positions, M = B x T, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vorox.backends.torch_engine.attention import attention
from vorox.backends.torch_engine.attention.context_parallel import ContextParallel
from vorox.backends.torch_engine.device.device_copy import to_device
from vorox.backends.torch_engine.device.devices import Compute
from vorox.backends.torch_engine.device.inputs import RowPositions
from vorox.backends.torch_engine.device.labels import Labels, TeacherOutput, TopLogits, labels_of
from vorox.backends.torch_engine.layers import compilation, kernels
from vorox.backends.torch_engine.layers.cuda_graphs import CudaGraphs
from vorox.backends.torch_engine.layers.direct_block import direct_blocks
from vorox.backends.torch_engine.layers.experts import RouterMetrics, RouterStep
from vorox.backends.torch_engine.layers.forward_context import ForwardContext
from vorox.backends.torch_engine.layers.mamba import MixerBlock
from vorox.backends.torch_engine.layers.model import Block, Decoder, Parts, RunBlock
from vorox.backends.torch_engine.layers.vision import ImageInputs, images_to_device
from vorox.backends.torch_engine.layouts.sharded_parameters import ShardedParameters
from vorox.backends.torch_engine.layouts.zero_parameters import ZeroParameters
from vorox.backends.torch_engine.losses.dpo_loss import (
    PairSums,
    answer_log_probs,
    dpo_loss,
    log_probs_of_hidden,
    targets_to_device,
)
from vorox.backends.torch_engine.losses.loss import FusedLinearLoss, LossSums
from vorox.backends.torch_engine.losses.vocabulary_loss import VocabularyLoss
from vorox.backends.torch_engine.low_precision.fake_quantization import quantize_kernels
from vorox.backends.torch_engine.low_precision.float8_linear import float8_kernels
from vorox.backends.torch_engine.network import Network
from vorox.backends.torch_engine.networks.decoder import KeyValueCache, PrefixDecoder, TorchDecoder
from vorox.backends.torch_engine.networks.user_block import UserBlock, block_values
from vorox.backends.torch_engine.networks.user_part_probe import check_user_parts, user_parts
from vorox.backends.torch_engine.optimizers.optimizer_in_backward import flat_parameters
from vorox.backends.torch_engine.parallel import decoder_plan
from vorox.backends.torch_engine.parallel.share import share_of
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.backends.torch_engine.ranks.rank_group import num_here
from vorox.backends.torch_engine.taps import Taps
from vorox.core.batch import AnyImages, Batch, Int32Array
from vorox.core.engine import NamedArray
from vorox.core.preference_pairs import Pairs, find_pairs
from vorox.core.schema import OptimizerConfig, ParallelConfig, RunConfig
from vorox.models.decoder.document_separation import DocumentAttention, separation
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.decoder.tap_points import decoder_points
from vorox.models.optimizer_groups import optimizer_groups
from vorox.models.weight_init import initial_weights

_PROBE_LAYERS, _PROBE_VOCABULARY = 2, 64


class DecoderNetwork(Network):
    """See ``network.Network``.

    Attributes:
        loss: Head and loss.
        teach: Computes what the loss needs of a teacher (``train.distillation``).
    """

    def __init__(self, config: RunConfig, spec: DecoderSpec, compute: Compute, ranks: Ranks) -> None:
        self._config, self._spec, self._compute, self._ranks = config, spec, compute, ranks
        self.taps = Taps(decoder_points(spec))
        self._share = share_of(
            spec,
            ranks,
            partial(decoder_plan.tensor_plan, spec),
            partial(decoder_plan.expert_plan, spec, ranks.expert_parallel_size),
            divides_positions=config.parallel.sequence_parallel,
        )
        self._parallel = self._share.tensor_group
        self._exchange = ContextParallel.of(ranks)
        self.module, self._run = self._place()
        self._products = kernels.products(compute)
        self._run_block: RunBlock | None = None
        self._graphs: CudaGraphs | None = None
        if compute.compiled:
            self._run_block = compilation.compiled_block(compute)
            if config.runtime.cuda_graphs:
                self._graphs = CudaGraphs(partial(self._pass, run_block=self._run_block))
        elif config.train.forward_backward is None:  # a step of the user may change the modules
            self._run_block = direct_blocks()
        make_loss = FusedLinearLoss
        if self._parallel is not None:
            make_loss = partial(VocabularyLoss, self._parallel, spec.vocab_size)
        self.loss = make_loss(
            config.loss, num_here(self._parallel, spec.vocab_size), compute.device, self._products, compute.dtype,
            count_correct=config.log.accuracy, distillation=config.train.distillation,
            compiled=compute.compiled and self._parallel is None,
        )  # fmt: skip
        self.teach: Callable[[Batch, int], TeacherOutput | TopLogits] | None = None
        self._rotary = attention.rotary_tables(spec, compute.device)
        self._routers = None if spec.num_experts is None else RouterMetrics(spec, config.loss, ranks)
        self._check_user_parts()

    def _check_user_parts(self) -> None:
        """Check functions of the user before the parameters have values; see ``user_part_probe.py``."""
        if self._config.precision.float8 is None:
            check_user_parts(self._config, self._spec, self.parameters, self._probe_logits)
        elif user_parts(self._config):
            check_user_parts_alone(self._config, self._spec, self._compute)

    @torch.no_grad()
    def _probe_logits(self, batch: Batch) -> Tensor:
        tokens_M, context = self._inputs(batch, 0, is_training=False)
        return self._forward(tokens_M, context, self._head_logits)

    @property
    def is_random(self) -> bool:
        is_noisy = self._config.train.embedding_noise is not None
        return is_noisy or self._spec.dropout_fraction > 0 or self._spec.block is not None

    @property
    def _separation(self) -> DocumentAttention:
        """How documents and windows are separated."""
        available = self._compute.choices.document_attention
        return separation(self._spec, self._config, available, compiled=self._compute.compiled)

    def initial_weights(self, seed: int) -> Iterator[NamedArray]:
        """Yield initial weights; those of user blocks are the values of their modules."""
        own = {} if self._spec.block is None else block_values(self._spec, self._spec.block, seed)
        return ((name, own.get(name, array)) for name, array in initial_weights(self._spec, seed))

    def _place(self) -> tuple[nn.Module, Callable[..., Any]]:
        """Build this rank's share over flat buffers, or over shards if several ranks share it; return what runs it."""
        config, spec, compute = self._config, self._spec, self._compute
        groups = optimizer_groups(spec, config.optimizer)
        if config.parallel.kind == "deepspeed":
            self.parameters = zero = ZeroParameters(config, spec, groups, self._ranks, compute.device, compute.dtype)
            attend = attention.attention_kernel(config.model.attention_kernel)
            model = build_decoder(Parts(spec, zero.modules, kernels.plain(compute), attend, self.taps, compute.device))
            return model, zero.shard_by_zero(model, external={model: model.head_weight})
        if self._ranks.num_fsdp_shards == 1:
            inner = flat_parameters(config, spec, groups, device=compute.device, table=self._share.table)
        else:
            inner = ShardedParameters(spec, groups, ranks=self._ranks, table=self._share.table)
        model = build_decoder(self._parts(inner.modules))
        self._share.divide(model, inner.modules)
        if isinstance(inner, ShardedParameters):
            reshard, offload = config.parallel.reshard_after_forward, config.parallel.fsdp_offload
            inner.shard(model, list(model.blocks), compute.dtype, reshard=reshard, offload=offload)
        self.parameters = self._share.place(inner, groups)
        return model, model

    def _parts(self, parameters: Mapping[str, nn.Parameter]) -> Parts:
        """Return what modules over these parameters are built from."""
        config, compute, parallel = self._config, self._compute, self._parallel
        attend = attention.attention_kernel(config.model.attention_kernel)
        if parallel is not None and self._exchange is None:
            attend = attention.attend_with_share(attend, parallel.index, parallel.size)
        chosen = kernels.plain(compute)
        if self._ranks.num_fsdp_shards == 1:
            chosen = kernels.select(compute, keeps_products=config.train.activation_checkpointing == "dots")
        chosen = quantize_kernels(chosen, compute, config.train.quantization_aware)
        chosen = float8_kernels(chosen, compute, config.precision)
        return Parts(self._spec, parameters, chosen, attend, self.taps, compute.device, parallel)

    def train(
        self,
        batch: Batch,
        index: int,
        *,
        scale: float,
        loss_scale: Tensor | None,
        reference_H: Tensor | None = None,
        compiled: bool = True,
    ) -> LossSums | PairSums:
        tokens_M, context = self._inputs(batch, index, is_training=True)
        run_block = self._run_block if compiled else None
        if reference_H is not None:
            pairs = find_pairs(batch, index)
            policy_H = self._forward(tokens_M, context, self._answer_log_probs(pairs), run_block)
            loss, pair_sums = dpo_loss(policy_H, reference_H, self._config.loss, pairs.masked_P)
            self.parameters.backward(loss * scale, loss_scale)
            return pair_sums
        labels = self._labels(batch, index)
        if self.teach is not None:
            labels = replace(labels, teacher=self.teach(batch, index))
        if self._routers is not None:
            factor = scale if loss_scale is None else loss_scale * scale
            context = replace(context, router=RouterStep(self._config.loss, factor, labels.kept_M))
        if self._graphs is not None and self._can_replay and compiled:
            factor = torch.full((), scale, device=self._compute.device)
            return self._graphs(tokens_M, context, labels, factor if loss_scale is None else loss_scale * factor)
        sums = self._pass(tokens_M, context, labels, loss_scale, scale=scale, run_block=run_block)
        if self._routers is not None and context.router is not None and compiled:  # not while a value is located
            self._routers.add(context.router)
        return sums

    @property
    def _can_replay(self) -> bool:
        """Taps run on the host, and an uncompiled loss in fp32 scales its products by a number of the host."""
        is_captured = self._compute.dtype != torch.float32 or self._compute.compiled
        return is_captured and not self.taps.active

    def _pass(
        self,
        tokens_M: Tensor,
        context: ForwardContext,
        labels: Labels,
        loss_scale: Tensor | None,
        *,
        scale: float = 1.0,
        run_block: RunBlock | None,
    ) -> LossSums:
        """Add the gradients of a micro-batch, and return its loss sums."""
        finish = partial(self.loss.train, labels=labels, scale=scale, loss_scale=loss_scale)
        objective, sums = self._forward(tokens_M, context, finish, run_block)
        self.parameters.backward(objective)
        return sums

    def is_single_pass(self, batch: Batch) -> bool:
        del batch
        return True

    def metrics(self, count: int) -> dict[str, Tensor]:
        return {} if self._routers is None else self._routers.take(count)

    def answer_log_probs(self, batch: Batch, index: int) -> Tensor:
        tokens_M, context = self._inputs(batch, index, is_training=False)
        return self._forward(tokens_M, context, self._answer_log_probs(find_pairs(batch, index)))

    def _answer_log_probs(self, pairs: Pairs) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function from final hidden state and head to the log-probability of each answer."""
        targets = targets_to_device(pairs, self._compute.device)

        def finish(hidden_MD: Tensor, head_VD: Tensor) -> Tensor:
            head = partial(self._head_with_gradient, head_VD=head_VD)
            return answer_log_probs(
                log_probs_of_hidden(hidden_MD, targets, head, self._config.loss.chunk_tokens), targets
            )

        return finish

    def _head_with_gradient(self, hidden_CD: Tensor, head_VD: Tensor) -> Tensor:
        """Return logits in fp32, by kernels that autograd differentiates."""
        dtype = self._compute.dtype
        return F.linear(hidden_CD.to(dtype), head_VD.to(dtype)).float()

    def evaluate(self, batch: Batch, index: int) -> LossSums:
        labels = self._labels(batch, index)
        tokens_M, context = self._inputs(batch, index, is_training=False)
        return self._forward(tokens_M, context, partial(self.loss.evaluate, labels=labels))

    def _labels(self, batch: Batch, index: int) -> Labels:
        return labels_of(batch, index, self._ranks.position_part, self._compute.device)

    def hidden(self, batch: Batch, index: int) -> tuple[Tensor, Tensor]:
        """Return the final hidden state of a micro-batch, ``[M, D]``, without dropout, and the head, ``[V, D]``."""
        tokens_M, context = self._inputs(batch, index, is_training=False)
        return self._forward(tokens_M, context, lambda hidden_MD, head_VD: (hidden_MD, head_VD))

    def logits(self, tokens_BT: Int32Array) -> Tensor:
        context = self._context(tokens_BT.shape, attention.CAUSAL)
        tokens_M = to_device(tokens_BT, self._compute.device).view(-1)
        return self._logits(tokens_M, context, self._head_logits, tokens_BT.size).view(*tokens_BT.shape, -1)

    def decoder(
        self, batch_size: int, max_tokens: int, images: AnyImages | None = None
    ) -> TorchDecoder | PrefixDecoder:
        if self._spec.block is not None:  # it has no key/value cache
            return PrefixDecoder(torch.no_grad()(self.logits), batch_size, max_tokens)
        num_kv_heads = num_here(self._parallel, self._spec.num_kv_heads)
        cache = KeyValueCache(
            self._spec, num_kv_heads, batch_size, max_tokens, self._compute.device, self._compute.dtype
        )
        return TorchDecoder(cache, max_tokens, partial(self._decode, images))

    @torch.no_grad()
    def _decode(self, images: AnyImages | None, tokens_BT: Int32Array, cache: KeyValueCache) -> Tensor:
        device = self._compute.device
        first = None if images is None or cache.num_tokens else images_to_device(images, tokens_BT, device)
        attention_mask = attention.decoding_mask(cache.num_tokens, tokens_BT.shape[1], self._compute.device)
        context = self._context(tokens_BT.shape, attention_mask, num_past=cache.num_tokens, cache=cache, images=first)

        def last_logits(hidden_MD: Tensor, head_VD: Tensor) -> Tensor:
            return self._head_logits(hidden_MD.view(*tokens_BT.shape, -1)[:, -1], head_VD)

        tokens_M = to_device(tokens_BT, self._compute.device).view(-1)
        return self._logits(tokens_M, context, last_logits, tokens_BT.shape[0])

    def _logits(
        self, tokens_M: Tensor, context: ForwardContext, finish: Callable[[Tensor, Tensor], Tensor], num_rows: int
    ) -> Tensor:
        """Return the fp32 logits ``[num_rows, V]`` that ``finish`` computes."""
        found: Tensor = self._forward(tokens_M, context, finish)
        assert len(found) == num_rows
        return found

    def _head_logits(self, hidden_MD: Tensor, head_VD: Tensor) -> Tensor:
        dtype, parallel = self._compute.dtype, self._parallel
        if parallel is None:
            multiply = F.linear if torch.is_grad_enabled() else self._products  # oneDNN's has no gradient
            return multiply(hidden_MD.to(dtype), head_VD.to(dtype)).float()
        part_MV = self._products(parallel.share(hidden_MD).to(dtype), head_VD.to(dtype)).float()
        return parallel.join_columns(part_MV, self._spec.vocab_size)

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
                return finish(hidden_MD, cast("Decoder", self.module).head_weight)

        with self._compute.autocast():
            found = self._run(tokens_M, context, apply, run_block)
        if not torch.is_grad_enabled():
            self.parameters.release()
        return found

    def _inputs(self, batch: Batch, index: int, *, is_training: bool) -> tuple[Tensor, ForwardContext]:
        rows, exchange = RowPositions.of(batch, index, self._ranks.position_part), self._exchange
        tokens_BP, segments_BT = rows.tokens_BP, rows.segments_BT
        window_tokens, device = self._spec.sliding_window_tokens, self._compute.device
        mask = None if exchange is None else exchange.mask(segments_BT, window_tokens, device)
        always_mask = is_training and self._compute.compiled
        if mask is None and self._separation != "mask":
            target = device if self._separation == "varlen" else None
            mask = attention.separated_mask(
                segments_BT, batch.tokens_ABT[index].shape, window_tokens, target, always_mask=always_mask
            )
        if mask is None:
            mask = attention.document_mask(segments_BT, device, always_mask=always_mask)
        context = self._context(
            tokens_BP.shape,
            mask,
            positions_BT=rows.positions_BP,
            documents_BT=segments_BT,
            is_training=is_training,
            exchange=exchange,
            images=None if batch.images_A is None else images_to_device(batch.images_A[index], tokens_BP, device),
        )
        return to_device(tokens_BP, device).view(-1), context

    def _context(
        self,
        shape_BT: tuple[int, ...],
        attention_mask: attention.AttentionMask,
        *,
        positions_BT: Int32Array | None = None,
        documents_BT: Int32Array | None = None,
        num_past: int = 0,
        is_training: bool = False,
        cache: KeyValueCache | None = None,
        exchange: ContextParallel | None = None,
        images: ImageInputs | None = None,
    ) -> ForwardContext:
        # The residual stream is divided in training only. A user block may change the mode of its own parts.
        if self.module.training != is_training or self._spec.block is not None:
            self.module.train(is_training)
        num_rows, num_positions = shape_BT
        positions: Tensor | None = None
        here = slice(num_past, num_past + num_positions)
        if positions_BT is not None:
            positions = to_device(positions_BT, self._compute.device)
        rotary = [attention.rows_at(tables, positions, here) for tables in self._rotary]
        if rotary and self._spec.block is None:
            positions = None
        elif positions is None:
            positions = torch.arange(here.start, here.stop, device=self._compute.device)[None]
        return ForwardContext(
            shape_BT=(num_rows, num_positions),
            attention_mask=attention.add_window(
                attention_mask,
                self._spec.sliding_window_tokens,
                num_past,
                num_positions if exchange is None else num_positions * exchange.part.size,
                self._compute.device,
            ),
            rotary=rotary[0] if rotary else None,
            sliding_rotary=rotary[1] if len(rotary) > 1 else None,
            documents=self._documents(documents_BT),
            positions=positions,
            dropout=self._spec.dropout_fraction if is_training else 0.0,
            embedding_noise=self._config.train.embedding_noise if is_training else None,
            cache=cache,
            images=images,
            recompute=self._config.train.activation_checkpointing if is_training else "none",
            part=self._parallel.part if is_training and self._parallel is not None else None,
            exchange=exchange,
        )

    def _documents(self, documents_BT: Int32Array | None) -> Tensor | None:
        """Return the documents of positions for Mamba-2 layers, where rows hold several; padding is document 0."""
        if documents_BT is None or "M" not in (self._spec.layer_pattern or ""):
            return None
        if bool(((documents_BT == documents_BT[:, :1]) | (documents_BT == 0)).all()):
            return None
        return to_device(documents_BT, self._compute.device)


def build_decoder(parts: Parts) -> Decoder:
    """Return the decoder with built-in blocks, those of ``model.layer_pattern``, or of the user."""
    if parts.spec.block is not None:
        return Decoder(parts, make_block=UserBlock)
    return Decoder(parts, make_block=Block if parts.spec.layer_pattern is None else MixerBlock)


def check_user_parts_alone(config: RunConfig, spec: DecoderSpec, compute: Compute) -> None:
    """Check functions of the user in a decoder of few layers on this rank, in the precision of ``precision.dtype``.

    No rank of a pipeline has all blocks; and where a row is scaled by its largest element, all its positions meet.

    Raises:
        ConfigError: See ``user_part_probe.check_user_parts``.
    """
    layers = min(spec.num_layers, _PROBE_LAYERS)
    types = None if spec.layer_types is None else spec.layer_types[-layers:]
    vocabulary = min(spec.vocab_size, _PROBE_VOCABULARY)
    small = replace(spec, num_layers=layers, layer_types=types, vocab_size=vocabulary)
    plain = config.precision.model_copy(update={"float8": None})
    alone = config.model_copy(update={"parallel": ParallelConfig(), "optimizer": OptimizerConfig(), "precision": plain})
    DecoderNetwork(alone, small, compute, Ranks())
