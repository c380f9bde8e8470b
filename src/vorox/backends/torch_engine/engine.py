"""The PyTorch engine: trains a decoder on one device (implements ``core/engine.py``).

In: numpy batches with all micro-batches of a step, a learning rate, a weight decay. Out: results that are fetched
lazily; until then the host never waits for the device. ``model`` and ``loss`` compute, ``parameters`` stores, ``optim``
updates, ``checkpoint`` saves and loads, ``decoder`` generates.

Invariant: a step is a function of (state, batch, lr, weight decay). Nothing else is drawn, timed or remembered.

Shape legend: A micro-batches, B rows, T positions, M = B x T, D width, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vorox.backends.torch_engine import attention, checkpoint, compilation, devices, kernels
from vorox.backends.torch_engine.decoder import KeyValueCache, TorchDecoder
from vorox.backends.torch_engine.devices import Compute
from vorox.backends.torch_engine.inputs import keyed_randomness, labels_to_device, to_device
from vorox.backends.torch_engine.loss import HeadLoss, LossSums
from vorox.backends.torch_engine.model import Decoder, ForwardContext, Parts
from vorox.backends.torch_engine.optim import Optimizer, flat_norm
from vorox.backends.torch_engine.parameters import ParameterStore
from vorox.backends.torch_engine.results import TorchStepResult
from vorox.backends.torch_engine.taps import ActivationStatistics, Taps
from vorox.core.batch import Batch, DataShard, Int32Array
from vorox.core.distributed_context import DistributedContext, membership
from vorox.core.engine import EvalValues, NamedArray, NonfiniteOrigin
from vorox.core.schema import RunConfig
from vorox.models.engine_state import Snapshot
from vorox.models.input_checks import check_length, check_tokens
from vorox.models.spec import ModelSpec
from vorox.models.weight_init import initial_weights

CAPABILITIES = frozenset(
    {
        "activation_checkpointing",
        "activation_statistics",
        "bf16",
        "compile",
        "document_mask",
        "dropout",
        "fp16",
        "muon",
        "taps",
    }
)


def connect(config: RunConfig) -> DistributedContext:
    """Return the context of a single process; refuse an environment that describes several."""
    del config
    found = membership()
    devices.refuse_processes(1 if found is None else found.world_size)
    return DistributedContext()


def create(config: RunConfig, spec: ModelSpec, dist: DistributedContext) -> TorchEngine:
    """Create the engine with initial weights.

    Raises:
        ConfigError: This machine or engine does not support a setting.
        DoesNotFitError: The state needs more memory than the device has.
    """
    compute = devices.prepare(config, dist)
    compilation.check(config, compute)
    budget = devices.memory_budget(config, spec, compute.device)
    budget.check_state()
    with devices.memory_errors("creating the model", budget):
        return TorchEngine(config, spec, compute)


class TorchEngine:
    """See ``core.engine.Engine``.

    Attributes:
        taps: Functions attached to the residual stream.
        model: The modules.
        store: Parameters and gradients.
        optimizer: Update rule and its state.
    """

    name = "torch"
    data_shard = DataShard()
    capabilities = CAPABILITIES

    def __init__(self, config: RunConfig, spec: ModelSpec, compute: Compute) -> None:
        self._config, self._spec, self.compute = config, spec, compute
        self._memory = devices.memory_budget(config, spec, compute.device)
        self.taps = Taps(spec.num_layers, compiled=compute.compiled)
        self._statistics = ActivationStatistics() if config.log.activation_statistics else None
        self.store = ParameterStore(
            spec,
            muon=config.optimizer.name == "muon",
            decay_embeddings=config.optimizer.decay_embeddings,
            device=compute.device,
        )
        attend = attention.ATTENTION[config.model.attention_kernel]
        self.model = Decoder(Parts(spec, self.store.modules, kernels.select(compute), attend, self.taps))
        self._run_block = compilation.compiled_block(compute) if compute.compiled else None
        self._head = self.model.head_weight
        self._products = kernels.products(compute)
        self._loss = HeadLoss(
            config.loss, self._head, self._products, compute.dtype, count_correct=config.log.accuracy
        )  # fmt: skip
        self._rotary = attention.rotary_tables(spec, compute.device)
        self.optimizer = Optimizer(config, self.store, compute)
        checkpoint.set_parameters(self.store, initial_weights(spec, config.run.seed))

    # -- training -----------------------------------------------------------------------------------------------------

    def train_step(self, batch: Batch, *, lr: float, weight_decay: float) -> TorchStepResult:
        """Run forward, backward and update over all micro-batches of the step."""
        check_tokens(batch, self._spec)
        with devices.memory_errors("training", self._memory):
            self.store.zero_gradients()
            self.taps.measure(self._statistics)
            try:
                sums = [self._train_micro_batch(batch, index) for index in range(batch.tokens_ABT.shape[0])]
            finally:
                self.taps.measure(None)
            count = max(1, batch.num_target_tokens)
            loss = torch.stack([part.cross_entropy for part in sums]).sum() / count
            outcome = self.optimizer.step(lr=lr, weight_decay=weight_decay, loss=loss)
            return TorchStepResult(
                {"loss": loss, "grad_norm": outcome.grad_norm, "finite": outcome.finite},
                self._extras(sums, count),
                self._statistics.take() if self._statistics is not None else None,
            )

    def locate_nonfinite(self, batch: Batch) -> NonfiniteOrigin | None:
        """Repeat forward and backward, uncompiled and without an update, and return the first non-finite place."""
        kept = self._run_block, self._statistics
        self._run_block, self._statistics = None, ActivationStatistics()
        count = max(1, batch.num_target_tokens)
        try:
            with devices.memory_errors("locating non-finite values", self._memory):
                self.taps.measure(self._statistics)
                for index in range(batch.tokens_ABT.shape[0]):
                    self.store.zero_gradients()
                    loss = float(self._train_micro_batch(batch, index).cross_entropy) / count
                    names, values = self._statistics.take()
                    activations = dict(zip(names, [] if values is None else values.tolist(), strict=True))
                    finite = {
                        name: bool(view.isfinite().all()) for name, view in self.store.views(self.store.gradients)
                    }
                    found = NonfiniteOrigin.locate(index, loss, activations, finite)
                    if found is not None:
                        return found
            return None
        finally:
            self.taps.measure(None)
            self._run_block, self._statistics = kept

    def _train_micro_batch(self, batch: Batch, index: int) -> LossSums:
        labels = labels_to_device(batch.labels_ABT[index], self.compute.device)
        tokens_M, context = self._inputs(batch, index, is_training=True)
        if self._statistics is not None:
            self._statistics.micro_batch = index
        scale = 1.0 / max(1, batch.num_target_tokens)
        loss_scale = self.optimizer.loss_scale if self.optimizer.is_scaled else None
        with keyed_randomness(
            self._config.run.seed, batch.step, index, self.compute.device, active=context.dropout > 0
        ):
            with self.compute.autocast():
                hidden_MD = self.model(tokens_M, context, self._run_block)
            sums, d_hidden_MD = self._loss.train(hidden_MD, labels, scale, loss_scale)
            hidden_MD.backward(d_hidden_MD)
        return sums

    def _extras(self, sums: list[LossSums], count: int) -> dict[str, Tensor]:
        extras: dict[str, Tensor] = {}
        if self._config.log.accuracy:
            extras["accuracy"] = torch.stack([part.num_correct for part in sums]).sum() / count
        if self._config.loss.z_loss_weight:
            squares = torch.stack([part.squared_log_partition for part in sums]).sum()
            extras["z_loss"] = squares * (self._config.loss.z_loss_weight / count)
        if self._config.log.parameter_norms:
            norms = [flat_norm(self.store.values[group]) for group in self.store.groups]
            extras["parameter_norm"] = torch.linalg.vector_norm(torch.stack(norms))
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
        rotary: tuple[Tensor, Tensor] | None = None
        positions: Tensor | None = None
        here = slice(num_past, num_past + num_positions)
        if positions_BT is not None:
            positions = to_device(positions_BT, self.compute.device)
        if self._rotary is not None:
            tables = self._rotary
            chosen = (table[here][None] if positions is None else table[positions] for table in tables)
            cosines, sines = (table[:, :, None] for table in chosen)
            rotary, positions = (cosines, sines), None
        elif positions is None:
            positions = torch.arange(here.start, here.stop, device=self.compute.device)[None]
        return ForwardContext(
            shape_BT=(num_rows, num_positions),
            attention_mask=attention.add_window(
                attention_mask, self._spec.sliding_window_tokens, num_past, num_positions, self.compute.device
            ),
            rotary=rotary,
            positions=positions,
            dropout=self._spec.dropout_fraction if is_training else 0.0,
            cache=cache,
            recompute_blocks=is_training and self._config.train.activation_checkpointing == "block",
        )

    # -- evaluation and decoding --------------------------------------------------------------------------------------

    @torch.no_grad()
    def eval_step(self, batch: Batch) -> EvalValues:
        """Sum the loss of a batch without training on it."""
        check_tokens(batch, self._spec)
        loss_sum, num_correct = 0.0, 0
        with devices.memory_errors("evaluating", self._memory):
            for index in range(batch.tokens_ABT.shape[0]):
                labels = labels_to_device(batch.labels_ABT[index], self.compute.device)
                tokens_M, context = self._inputs(batch, index, is_training=False)
                with self.compute.autocast():
                    hidden_MD = self.model(tokens_M, context)
                sums = self._loss.evaluate(hidden_MD, labels)
                loss_sum += float(sums.cross_entropy)
                num_correct += int(sums.num_correct)
        return EvalValues(loss_sum, batch.num_target_tokens, num_correct)

    @torch.no_grad()
    def logits(self, tokens_BT: Int32Array) -> npt.NDArray[np.float32]:
        """Return the logits of whole sequences, fp32 ``[B, T, V]``, without dropout."""
        check_length(tokens_BT.shape[1], self._spec)
        context = self._context(tokens_BT.shape, attention.CAUSAL)
        with self.compute.autocast():
            hidden_MD = self.model(to_device(tokens_BT, self.compute.device).view(-1), context)
        return self._head_logits(hidden_MD).cpu().numpy().reshape(*tokens_BT.shape, -1)

    def decoder(self, batch_size: int, max_tokens: int) -> TorchDecoder:
        """Start decoding ``batch_size`` sequences of at most ``max_tokens`` tokens."""
        check_length(max_tokens, self._spec)
        cache = KeyValueCache(self._spec, batch_size, max_tokens, self.compute.device, self.compute.dtype)
        return TorchDecoder(cache, max_tokens, self._decode)

    @torch.no_grad()
    def _decode(self, tokens_BT: Int32Array, cache: KeyValueCache) -> Tensor:
        attention_mask = attention.decoding_mask(cache.num_tokens, tokens_BT.shape[1], self.compute.device)
        context = self._context(tokens_BT.shape, attention_mask, num_past=cache.num_tokens, cache=cache)
        with self.compute.autocast():
            hidden_MD = self.model(to_device(tokens_BT, self.compute.device).view(-1), context)
        return self._head_logits(hidden_MD.view(*tokens_BT.shape, -1)[:, -1])

    def _head_logits(self, hidden_MD: Tensor) -> Tensor:
        dtype = self.compute.dtype
        return self._products(hidden_MD.to(dtype), self._head.to(dtype)).float()

    # -- state --------------------------------------------------------------------------------------------------------

    def snapshot(self, *, detached: bool) -> Snapshot:
        """Return a snapshot of the complete training state; a detached one is a copy in host memory."""
        with devices.memory_errors("copying the state for a checkpoint", self._memory):
            return Snapshot(self._spec, checkpoint.state(self.store, self.optimizer, detached=detached))

    def load(self, directory: Path) -> None:
        """Load a training state that a snapshot wrote and the caller has verified."""
        checkpoint.load(directory, self._spec, self.store, self.optimizer)

    def export_weights(self) -> Iterator[NamedArray]:
        """Yield the parameters in fp32 under canonical names, in table order."""
        for name, array in checkpoint.arrays(self.store, self.store.values):
            yield name, array.copy()

    def import_weights(self, weights: Iterable[NamedArray]) -> None:
        """Replace all parameters and reset the optimizer."""
        checkpoint.set_parameters(self.store, weights)
        self.optimizer.reset()

    def fingerprint(self) -> str:
        """Return a hex digest of parameters and optimizer state, array by array in name order."""
        return self.snapshot(detached=False).fingerprint()

    def device_stats(self) -> Mapping[str, float]:
        """Return device memory by metric name. Never synchronises."""
        return devices.memory_stats(self.compute.device)

    def environment(self) -> Mapping[str, str | int | bool]:
        """Return what affects the bits of a run besides its configuration."""
        return devices.environment(self.compute)

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
