"""The PyTorch engine: trains a decoder on the devices of all ranks (implements ``core/engine.py``).

In: numpy batches with all micro-batches of a step, a learning rate, a weight decay. Out: results that are fetched
lazily; until then the host never waits for the device. ``model`` and ``loss`` compute, ``parameters`` and
``sharded_parameters`` store, ``distributed`` sums over ranks, ``optim`` updates, ``checkpoint`` saves and loads,
``decoder`` generates.

Invariant: a step is a function of (state, batch, lr, weight decay). Nothing else is drawn, timed or remembered.

Shape legend: A micro-batches, B rows, T positions, M = B x T, D width, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vorox.backends.torch_engine import attention, checkpoint, compilation, devices, kernels
from vorox.backends.torch_engine.decoder import KeyValueCache, TorchDecoder
from vorox.backends.torch_engine.devices import Compute
from vorox.backends.torch_engine.distributed import Ranks, connect, ranks
from vorox.backends.torch_engine.inputs import keyed_randomness, labels_to_device, rows_of_rank, to_device
from vorox.backends.torch_engine.loss import HeadLoss, LossSums
from vorox.backends.torch_engine.model import Decoder, ForwardContext, Parts, RunBlock
from vorox.backends.torch_engine.optim import Optimizer, global_norm
from vorox.backends.torch_engine.parameters import FlatParameters, Parameters
from vorox.backends.torch_engine.results import TorchStepResult
from vorox.backends.torch_engine.sharded_parameters import ShardedParameters
from vorox.backends.torch_engine.taps import ActivationStatistics, Taps
from vorox.core.batch import Batch, Int32Array
from vorox.core.distributed_context import DistributedContext
from vorox.core.engine import EvalValues, NamedArray, NonfiniteOrigin
from vorox.core.schema import RunConfig
from vorox.models.decoder_spec import DecoderSpec
from vorox.models.engine_state import Snapshot
from vorox.models.input_checks import check_length, check_tokens
from vorox.models.spec import ModelSpec
from vorox.models.weight_init import initial_weights

__all__ = ["CAPABILITIES", "TorchEngine", "connect", "create"]

CAPABILITIES = frozenset(
    {
        "activation_checkpointing", "activation_statistics", "bf16", "compile", "document_mask", "dropout", "fp16",
        "muon", "taps",
    }
)  # fmt: skip


def create(config: RunConfig, spec: ModelSpec, dist: DistributedContext) -> TorchEngine:
    """Create the engine with initial weights.

    Raises:
        ConfigError: This machine or engine does not support a setting.
        DoesNotFitError: The state needs more memory than the device has.
    """
    assert isinstance(spec, DecoderSpec)
    compute = devices.prepare(config)
    compilation.check(config, compute)
    budget = devices.memory_budget(config, spec, compute.device)
    budget.check_state()
    with devices.memory_errors("creating the model", budget):
        return TorchEngine(config, spec, compute, ranks(config, dist, compute.device))


class TorchEngine:
    """See ``core.engine.Engine``.

    Attributes:
        data_shard: The part of each global batch that this rank trains on.
        taps: Functions attached to the residual stream.
        model: The modules.
        parameters: Parameters and gradients.
        optimizer: Update rule and its state.
    """

    name = "torch"
    capabilities = CAPABILITIES

    def __init__(self, config: RunConfig, spec: DecoderSpec, compute: Compute, ranks: Ranks | None = None) -> None:
        self._config, self._spec, self.compute = config, spec, compute
        self._ranks = ranks if ranks is not None else Ranks()
        self.data_shard = self._ranks.shard
        self._memory = devices.memory_budget(config, spec, compute.device)
        self.taps = Taps(spec.num_layers, compiled=compute.compiled)
        self._statistics = ActivationStatistics() if config.log.activation_statistics else None
        self.parameters: Parameters
        self.model = self._place_model()
        self._run_block = compilation.compiled_block(compute) if compute.compiled else None
        self._products = kernels.products(compute)
        self._loss = HeadLoss(
            config.loss, spec.vocab_size, compute.device, self._products, compute.dtype,
            count_correct=config.log.accuracy,
        )  # fmt: skip
        self._rotary = attention.rotary_tables(spec, compute.device)
        self.optimizer = Optimizer(config, self.parameters, compute, self._ranks)
        checkpoint.set_parameters(self.parameters, initial_weights(spec, config.run.seed), spec)

    def _place_model(self) -> Decoder:
        """Build the model over flat buffers, or over shards if several ranks share a replica."""
        config, spec, compute = self._config, self._spec, self.compute
        groups = {"muon": config.optimizer.name == "muon", "decay_embeddings": config.optimizer.decay_embeddings}
        attend = attention.ATTENTION[config.model.attention_kernel]
        if self._ranks.fsdp_size == 1:
            self.parameters = FlatParameters(spec, **groups, device=compute.device)
            chosen = kernels.select(compute)
            return Decoder(Parts(spec, self.parameters.modules, chosen, attend, self.taps))
        self.parameters = sharded = ShardedParameters(spec, **groups, ranks=self._ranks)
        model = Decoder(Parts(spec, sharded.modules, kernels.plain(compute), attend, self.taps))
        sharded.shard(model, list(model.blocks), compute.dtype, reshard=config.parallel.reshard_after_forward)
        return model

    # -- training -----------------------------------------------------------------------------------------------------

    def train_step(self, batch: Batch, *, lr: float, weight_decay: float) -> TorchStepResult:
        """Run forward, backward and update over all micro-batches of the step."""
        check_tokens(batch, self._spec)
        with devices.memory_errors("training", self._memory):
            self.parameters.zero_gradients()
            self.taps.measure(self._statistics)
            count = max(1, int(self._ranks.sum_counts(batch.num_target_tokens)[0]))
            try:
                sums = [self._train_micro_batch(batch, index, count) for index in range(batch.tokens_ABT.shape[0])]
            finally:
                self.taps.measure(None)
            total = self._total(sums)
            loss = total.cross_entropy / count
            if self._ranks.fsdp_size == 1:  # FSDP has summed them in the backward pass
                self._ranks.sum(*(tensor for tensors in self.parameters.gradients.values() for tensor in tensors))
            outcome = self.optimizer.step(lr=lr, weight_decay=weight_decay, loss=loss)
            return TorchStepResult(
                {"loss": loss, "grad_norm": outcome.grad_norm, "finite": outcome.finite},
                self._extras(total, count),
                self._statistics.take(self._ranks) if self._statistics is not None else None,
            )

    def _total(self, sums: list[LossSums]) -> LossSums:
        """Add the loss sums of all micro-batches of all ranks."""
        total_3 = torch.stack(
            [
                torch.stack([part.cross_entropy for part in sums]).sum(),
                torch.stack([part.squared_log_partition for part in sums]).sum(),
                torch.stack([part.num_correct for part in sums]).sum(),
            ]
        )
        self._ranks.sum(total_3)
        return LossSums(*total_3.unbind())

    def locate_nonfinite(self, batch: Batch) -> NonfiniteOrigin | None:
        """Repeat forward and backward, uncompiled and without an update, and return the first non-finite place."""
        kept = self._run_block, self._statistics
        self._run_block, self._statistics = None, ActivationStatistics()
        count = max(1, batch.num_target_tokens)
        try:
            with devices.memory_errors("locating non-finite values", self._memory):
                self.taps.measure(self._statistics)
                for index in range(batch.tokens_ABT.shape[0]):
                    self.parameters.zero_gradients()
                    loss = float(self._train_micro_batch(batch, index, count).cross_entropy) / count
                    names, values = self._statistics.take(Ranks())
                    activations = dict(zip(names, [] if values is None else values.tolist(), strict=True))
                    finite = {
                        piece.name: bool(piece.view.isfinite().all())
                        for piece in self.parameters.pieces(self.parameters.gradients)
                    }
                    found = NonfiniteOrigin.locate(index, loss, activations, finite)
                    if found is not None:
                        return found
            return None
        finally:
            self.taps.measure(None)
            self._run_block, self._statistics = kept

    def _train_micro_batch(self, batch: Batch, index: int, num_targets: int) -> LossSums:
        labels = labels_to_device(batch.labels_ABT[index], self.compute.device)
        tokens_M, context = self._inputs(batch, index, is_training=True)
        if self._statistics is not None:
            self._statistics.begin(index, self._num_rows(batch, index))
        loss_scale = self.optimizer.loss_scale if self.optimizer.is_scaled else None
        shard = self.data_shard
        with keyed_randomness(
            self._config.run.seed, batch.step, index * shard.count + shard.index, self.compute.device,
            active=context.dropout > 0,
        ):  # fmt: skip
            objective, sums = self._forward(
                tokens_M,
                context,
                lambda hidden_MD, head_VD: self._loss.train(hidden_MD, head_VD, labels, 1.0 / num_targets, loss_scale),
                self._run_block,
            )
            objective.backward()
        return sums

    def _num_rows(self, batch: Batch, index: int) -> int:
        """Return the rows of a micro-batch without those that pad a shorter shard, which have digest 0."""
        num_rows = batch.tokens_ABT.shape[1]
        return num_rows if self.data_shard.is_whole else int(np.count_nonzero(batch.row_digests_AB[index]))

    def _forward(
        self,
        tokens_M: Tensor,
        context: ForwardContext,
        finish: Callable[[Tensor, Tensor], Any],
        run_block: RunBlock | None = None,
    ) -> Any:
        """Return ``finish(hidden_MD, head_VD)``, computed outside autocast."""

        def apply(hidden_MD: Tensor) -> Any:
            with self.compute.no_autocast():
                return finish(hidden_MD, self.model.head_weight)

        with self.compute.autocast():
            found = self.model(tokens_M, context, apply, run_block)
        if not torch.is_grad_enabled():
            self.parameters.release()
        return found

    def _extras(self, total: LossSums, count: int) -> dict[str, Tensor]:
        extras: dict[str, Tensor] = {}
        if self._config.log.accuracy:
            extras["accuracy"] = total.num_correct / count
        if self._config.loss.z_loss_weight:
            extras["z_loss"] = total.squared_log_partition * (self._config.loss.z_loss_weight / count)
        if self._config.log.parameter_norms:
            extras["parameter_norm"] = global_norm(self.parameters.values, self._ranks)
        if self.optimizer.is_scaled:
            extras["loss_scale"] = self.optimizer.loss_scale.clone()
        return extras

    def _inputs(self, batch: Batch, index: int, *, is_training: bool) -> tuple[Tensor, ForwardContext]:
        segments_ABT, positions_ABT = batch.segment_ids_ABT, batch.position_ids_ABT
        segments_BT = None if segments_ABT is None else segments_ABT[index]
        positions_BT = None if positions_ABT is None else positions_ABT[index]
        tokens_BT = batch.tokens_ABT[index]
        context = self._context(
            tokens_BT.shape,
            attention.document_mask(
                segments_BT, self.compute.device, always_mask=is_training and self.compute.compiled
            ),
            positions_BT=positions_BT,
            is_training=is_training,
        )
        return to_device(tokens_BT, self.compute.device).view(-1), context

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
            positions = to_device(positions_BT, self.compute.device)
        rotary = [
            (_rows_at(cosines, positions, here)[:, :, None], _rows_at(sines, positions, here)[:, :, None])
            for cosines, sines in self._rotary
        ]
        if rotary:
            positions = None
        elif positions is None:
            positions = torch.arange(here.start, here.stop, device=self.compute.device)[None]
        return ForwardContext(
            shape_BT=(num_rows, num_positions),
            attention_mask=attention.add_window(
                attention_mask, self._spec.sliding_window_tokens, num_past, num_positions, self.compute.device
            ),
            rotary=rotary[0] if rotary else None,
            sliding_rotary=rotary[1] if len(rotary) > 1 else None,
            positions=positions,
            dropout=self._spec.dropout_fraction if is_training else 0.0,
            cache=cache,
            recompute_blocks=is_training and self._config.train.activation_checkpointing == "block",
        )

    # -- evaluation and decoding --------------------------------------------------------------------------------------

    @torch.no_grad()
    def eval_step(self, batch: Batch) -> EvalValues:
        """Sum the loss of a batch without training on it. Every rank gets the whole batch and computes its part."""
        check_tokens(batch, self._spec)
        part = rows_of_rank(batch, self.data_shard)
        loss_sum, num_correct = 0.0, 0
        with devices.memory_errors("evaluating", self._memory):
            for index in range(part.tokens_ABT.shape[0]):
                labels = labels_to_device(part.labels_ABT[index], self.compute.device)
                tokens_M, context = self._inputs(part, index, is_training=False)
                sums = self._forward(tokens_M, context, partial(self._loss.evaluate, labels=labels))
                loss_sum += float(sums.cross_entropy)
                num_correct += int(sums.num_correct)
            loss_sum, total_correct = self._ranks.sum_counts(loss_sum, num_correct)
        return EvalValues(loss_sum, batch.num_target_tokens, int(total_correct))

    @torch.no_grad()
    def logits(self, tokens_BT: Int32Array) -> npt.NDArray[np.float32]:
        """Return the logits of whole sequences, fp32 ``[B, T, V]``, without dropout."""
        check_length(tokens_BT.shape[1], self._spec)
        context = self._context(tokens_BT.shape, attention.CAUSAL)
        tokens_M = to_device(tokens_BT, self.compute.device).view(-1)
        return self._forward(tokens_M, context, self._head_logits).cpu().numpy().reshape(*tokens_BT.shape, -1)

    def decoder(self, batch_size: int, max_tokens: int) -> TorchDecoder:
        """Start decoding ``batch_size`` sequences of at most ``max_tokens`` tokens."""
        check_length(max_tokens, self._spec)
        cache = KeyValueCache(self._spec, batch_size, max_tokens, self.compute.device, self.compute.dtype)
        return TorchDecoder(cache, max_tokens, self._decode)

    @torch.no_grad()
    def _decode(self, tokens_BT: Int32Array, cache: KeyValueCache) -> Tensor:
        attention_mask = attention.decoding_mask(cache.num_tokens, tokens_BT.shape[1], self.compute.device)
        context = self._context(tokens_BT.shape, attention_mask, num_past=cache.num_tokens, cache=cache)

        def last_logits(hidden_MD: Tensor, head_VD: Tensor) -> Tensor:
            return self._head_logits(hidden_MD.view(*tokens_BT.shape, -1)[:, -1], head_VD)

        return self._forward(to_device(tokens_BT, self.compute.device).view(-1), context, last_logits)

    def _head_logits(self, hidden_MD: Tensor, head_VD: Tensor) -> Tensor:
        dtype = self.compute.dtype
        return self._products(hidden_MD.to(dtype), head_VD.to(dtype)).float()

    # -- state --------------------------------------------------------------------------------------------------------

    def snapshot(self, *, detached: bool) -> Snapshot:
        """Return a snapshot of the complete training state; a detached one is a copy in host memory.

        Of several ranks, the main one writes it, and the snapshots of the others are empty.
        """
        with devices.memory_errors("copying the state for a checkpoint", self._memory):
            if self._ranks.world_size == 1:
                return Snapshot(self._spec, checkpoint.state(self.parameters, self.optimizer, detached=detached))
            is_main = self.data_shard.index == 0
            return Snapshot(self._spec, checkpoint.gathered_state(self.parameters, self.optimizer, is_main=is_main))

    def load(self, directory: Path) -> None:
        """Load a training state that a snapshot wrote and the caller has verified."""
        checkpoint.load(directory, self._spec, self.parameters, self.optimizer)

    def export_weights(self) -> Iterator[NamedArray]:
        """Yield the parameters in fp32 under canonical names, in table order."""
        for name, array in checkpoint.arrays(self.parameters, self.parameters.values):
            yield name, array.copy()

    def import_weights(self, weights: Iterable[NamedArray]) -> None:
        """Replace all parameters and reset the optimizer."""
        checkpoint.set_parameters(self.parameters, weights, self._spec)
        self.optimizer.reset()

    def fingerprint(self) -> str:
        """Return a hex digest of parameters and optimizer state, array by array in name order."""
        return Snapshot(self._spec, checkpoint.state(self.parameters, self.optimizer)).fingerprint()

    def device_stats(self) -> Mapping[str, float]:
        """Return device memory by metric name. Never synchronises."""
        return devices.memory_stats(self.compute.device)

    def environment(self) -> Mapping[str, str | int | bool]:
        """Return what affects the bits of a run besides its configuration."""
        return devices.environment(self.compute) | self._ranks.facts()

    @torch.no_grad()
    def matmul_seconds(self, m: int, k: int, n: int) -> float:
        """Time ``[m, k] @ [k, n]`` in the run's precision, in seconds; allocation is excluded."""
        device, dtype = self.compute.device, self.compute.dtype
        generator = torch.Generator(device).manual_seed(0)  # leaves the global generator untouched
        left_MK = torch.randn(m, k, device=device, generator=generator).to(dtype)
        right_NK = torch.randn(n, k, device=device, generator=generator).to(dtype)
        self.synchronize()
        started = time.perf_counter()
        self._products(left_MK, right_NK)
        self.synchronize()
        return time.perf_counter() - started

    def synchronize(self) -> None:
        """Wait until the device is idle; for timing."""
        devices.synchronize(self.compute.device)


def _rows_at(table: Tensor, positions: Tensor | None, here: slice) -> Tensor:
    """Return the rows of a rotary table at the positions of tokens, or at consecutive ones, ``[B or 1, T, H / 2]``."""
    return table[here][None] if positions is None else table[positions]
