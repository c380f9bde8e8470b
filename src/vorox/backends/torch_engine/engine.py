"""The PyTorch engine: trains a decoder on the devices of all ranks (implements ``core/engine.py``).

In: numpy batches with all micro-batches of a step, a learning rate, a weight decay. Out: results that are fetched
lazily; until then the host never waits for the device. A ``network`` computes, ``parameters`` and
``sharded_parameters`` store, ``distributed`` sums over ranks, ``optimizer`` updates, ``checkpoint`` saves and loads.

Invariant: a step is a function of (state, batch, lr, weight decay). Nothing else is drawn, timed or remembered.

Shape legend: A micro-batches, B rows, T positions, V vocabulary, M, K and N dimensions of a matrix product.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vorox.backends.torch_engine import checkpoint, held_memory
from vorox.backends.torch_engine.device import devices
from vorox.backends.torch_engine.device.devices import Compute
from vorox.backends.torch_engine.device.inputs import keyed_randomness, rows_of_rank
from vorox.backends.torch_engine.device.profiler import TorchRecording
from vorox.backends.torch_engine.device.results import TorchStepResult, gradient_bits
from vorox.backends.torch_engine.layers import compilation, cuda_graphs, kernels
from vorox.backends.torch_engine.layouts import gradient_buckets, gradient_sums
from vorox.backends.torch_engine.losses.dpo_loss import PairSums, dpo_loss
from vorox.backends.torch_engine.losses.loss import LossSums
from vorox.backends.torch_engine.losses.user_step import MicroBatch, load_step
from vorox.backends.torch_engine.network import Network
from vorox.backends.torch_engine.networks import teacher
from vorox.backends.torch_engine.networks.adapter_network import AdapterNetwork
from vorox.backends.torch_engine.networks.decoder_network import DecoderNetwork
from vorox.backends.torch_engine.networks.decoder_pipeline import DecoderPipeline
from vorox.backends.torch_engine.networks.huggingface_network import HuggingFaceNetwork
from vorox.backends.torch_engine.networks.huggingface_pipeline import HuggingFacePipeline
from vorox.backends.torch_engine.networks.reference_model import ReferenceModel
from vorox.backends.torch_engine.networks.user_model import UserNetwork
from vorox.backends.torch_engine.optimizers.make_optimizer import make_optimizer
from vorox.backends.torch_engine.optimizers.optimizer import global_norm
from vorox.backends.torch_engine.parallel import pipeline_schedule
from vorox.backends.torch_engine.ranks.distributed import Ranks, connect, ranks
from vorox.backends.torch_engine.taps import ActivationStatistics, Taps
from vorox.core.batch import AnyImages, Batch, Int32Array
from vorox.core.engine import TIMED_PRODUCTS, Decoder, Engine, EvalValues, NamedArray, NonfiniteOrigin
from vorox.core.preference_pairs import count_pairs
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.divisibility import check_divisible
from vorox.models.huggingface.adapter_spec import AdapterSpec
from vorox.models.huggingface.spec import HuggingFaceSpec
from vorox.models.input_checks import check_length, check_tokens
from vorox.models.module_spec import UserSpec
from vorox.models.spec import ModelSpec
from vorox.models.stored.engine_state import Snapshot
from vorox.models.stored.sharded_snapshot import ShardedSnapshot
from vorox.planning.memory_advice import COPYING, READING, SAMPLING

__all__ = ["TorchEngine", "connect", "create"]


def create(config: RunConfig, spec: ModelSpec, dist: DistributedContext) -> TorchEngine:
    """Create the engine with initial weights.

    Raises:
        ConfigError: This machine or engine does not support a setting.
        DoesNotFitError: The state needs more memory than the device has.
    """
    compute = devices.prepare(config)
    compilation.check(compute)
    check_divisible(config, spec)
    budget = devices.memory_budget(config, spec, compute.device)
    budget.check_state()
    layout = ranks(config, dist, compute.device)
    gradient_sums.check(config, layout)
    pipeline_schedule.check(config, layout)
    cuda_graphs.check(config, compute, layout.world_size)
    with devices.memory_errors("creating the model", budget):
        return TorchEngine(config, spec, compute, layout)


class TorchEngine(Engine):
    """See ``core.engine.Engine``.

    Attributes:
        model: The modules.
        parameters: Parameters and gradients.
        optimizer: Update rule and its state.
    """

    name = "torch"

    def __init__(self, config: RunConfig, spec: ModelSpec, compute: Compute, ranks: Ranks | None = None) -> None:
        self._config, self._spec, self.compute = config, spec, compute
        self._ranks = ranks if ranks is not None else Ranks()
        self.data_shard = self._ranks.shard
        self._memory = devices.memory_budget(config, spec, compute.device)
        self._statistics = ActivationStatistics() if config.log.activation_statistics else None
        self._user_step, self._products = load_step(config.train.forward_backward), kernels.products(compute)
        self._network = _network(config, spec, compute, self._ranks)
        self.model, self.parameters = self._network.module, self._network.parameters
        checkpoint.set_parameters(self.parameters, self._network.initial_weights(config.run.seed), spec)
        self._reference = ReferenceModel(self._network) if config.loss.name == "dpo" else None
        self.optimizer = make_optimizer(config, spec, self.parameters, compute, self._ranks)
        self._held = held_memory.HeldMemory(compute.device, self._network, self.optimizer, self._reference)
        self._buckets = gradient_buckets.create(config, self.parameters, self._ranks)

    @property
    def taps(self) -> Taps:
        return self._network.taps

    @property
    def collective_seconds(self) -> float:
        return self._ranks.collective_time.seconds

    # -- training -----------------------------------------------------------------------------------------------------

    def train_step(
        self, batch: Batch, *, lr: float, weight_decay: float, max_loss: float | None = None
    ) -> TorchStepResult:
        """Run forward, backward and update over all micro-batches of the step."""
        check_tokens(batch, self._spec)
        with devices.memory_errors("training", self._memory):
            (num_examples,) = self._ranks.sum_counts(self._num_examples(batch))
            count = max(1, int(num_examples) // self._ranks.context_parallel_size)  # ranks of a group count the same
            references = self._reference.answer_log_probs(batch) if self._reference is not None else None
            self.taps.measure(self._statistics)  # of the policy, not of the reference
            self.optimizer.begin_step(lr=lr, weight_decay=weight_decay, max_loss=max_loss)
            try:
                sums = self._train_micro_batches(batch, count, references)
            finally:
                self.taps.measure(None)
            total = self._total([sums[index] for index in sorted(sums)])
            loss, bits = total.loss / count, self._gradient_bits()
            outcome = self.optimizer.step(lr=lr, weight_decay=weight_decay, loss=loss, max_loss=max_loss)
            return TorchStepResult(
                {"loss": loss, "grad_norm": outcome.grad_norm, "finite": outcome.finite},
                self._extras(total, count),
                self._statistics.take(self._ranks) if self._statistics is not None else None,
                bits,
            )

    def _gradient_bits(self) -> Tensor | None:
        """Return the checksum of the gradients, if steps are recomputed."""
        is_needed = self._config.runtime.recompute_every_steps is not None
        return gradient_bits(self.parameters.owned(self.parameters.gradients)) if is_needed else None

    def _train_micro_batches(
        self, batch: Batch, count: int, references: list[Tensor] | None
    ) -> dict[int, LossSums | PairSums]:
        """Run forward and backward of all micro-batches; return their loss sums by index."""
        num_passes, sums = len(batch.tokens_ABT), dict[int, LossSums | PairSums]()
        if self._network.has_stages:
            for _ in gradient_sums.accumulate(self.parameters, self._ranks, 1):
                sums |= self._network.train_all(
                    batch, scale=self.parameters.gradient_divisor / count, loss_scale=self._loss_scale,
                    enter=partial(self._micro_batch, batch),
                )  # fmt: skip
            return sums
        overlaps = self._user_step is None and self._network.is_single_pass(batch)
        for index in gradient_sums.accumulate(self.parameters, self._ranks, num_passes, self._buckets, overlaps):
            sums[index] = self._train_micro_batch(batch, index, count, references)
        return sums

    @property
    def _loss_scale(self) -> Tensor | None:
        return self.optimizer.loss_scale if self.optimizer.is_scaled else None

    @contextlib.contextmanager
    def _micro_batch(self, batch: Batch, index: int) -> Iterator[None]:
        """Run a micro-batch with its randomness and statistics."""
        if self._statistics is not None:
            self._statistics.begin(index, self._num_rows(batch, index))
        shard = self.data_shard
        with keyed_randomness(
            self._config.run.seed, batch.step, index * shard.count + shard.index, self.compute.device,
            active=self._network.is_random or self._user_step is not None,
        ):  # fmt: skip
            yield

    def _num_examples(self, batch: Batch) -> int:
        """Return what the loss of a batch is divided by: its target tokens, or its preference pairs."""
        return batch.num_target_tokens if self._reference is None else count_pairs(batch)

    def _total(self, sums: list[LossSums | PairSums]) -> LossSums | PairSums:
        """Add the loss sums of all micro-batches of all ranks."""
        parts_4A = torch.stack([torch.stack(part) for part in zip(*sums, strict=True)])
        return type(sums[0])(*self._ranks.sum_micro_batches(parts_4A).unbind())

    def locate_nonfinite(self, batch: Batch) -> NonfiniteOrigin | None:
        """Repeat forward and backward, uncompiled and without an update, and return the first non-finite place."""
        kept, self._statistics, count = self._statistics, ActivationStatistics(), max(1, self._num_examples(batch))
        try:
            with devices.memory_errors("locating non-finite values", self._memory):
                references = self._reference.answer_log_probs(batch) if self._reference is not None else None
                self.taps.measure(self._statistics)
                for index in range(batch.tokens_ABT.shape[0]):
                    self.parameters.zero_gradients()
                    sums = self._train_micro_batch(batch, index, count, references, compiled=False)
                    loss = float(sums.loss) / count
                    names, values = self._statistics.take(Ranks())
                    activations = dict(zip(names, [] if values is None else values.tolist(), strict=True))
                    finite = {
                        part.name: bool(part.view.isfinite().all())
                        for part in self.parameters.local_parts(self.parameters.gradients)
                    }
                    found = NonfiniteOrigin.locate(index, loss, activations, finite)
                    if found is not None:
                        return found
            return None
        finally:
            self.taps.measure(None)
            self._statistics = kept

    def gradient_norms(self, batch: Batch) -> dict[str, float]:
        if self._config.parallel.kind == "deepspeed" or self._config.optimizer.in_backward:
            return super().gradient_norms(batch)  # a backward pass is an update
        with devices.memory_errors("computing gradients", self._memory):
            (num_examples,) = self._ranks.sum_counts(self._num_examples(batch))
            references = self._reference.answer_log_probs(batch) if self._reference is not None else None
            self._train_micro_batches(batch, max(1, int(num_examples)), references)
            gradients = self.parameters.whole(self.parameters.gradients)
            norms = {name: float(torch.linalg.vector_norm(whole.float())) for name, whole in gradients}
            self.parameters.zero_gradients()
            return norms

    def _train_micro_batch(
        self, batch: Batch, index: int, count: int, references: list[Tensor] | None, *, compiled: bool = True
    ) -> LossSums | PairSums:
        scale = self.parameters.gradient_divisor / count
        with self._micro_batch(batch, index):
            train = partial(self._network.train, loss_scale=self._loss_scale, compiled=compiled)
            if self._user_step is None:
                reference_H = None if references is None else references[index]
                return train(batch, index, scale=scale, reference_H=reference_H)
            micro_batch = MicroBatch(batch, index, self.model, self._spec, train, scale, self._ranks)
            self._user_step(micro_batch)
            return micro_batch.total()

    def _num_rows(self, batch: Batch, index: int) -> int:
        """Return the rows of a micro-batch without those that pad a shorter shard, which have digest 0."""
        num_rows = batch.tokens_ABT.shape[1]
        return num_rows if self.data_shard.is_whole else int(np.count_nonzero(batch.row_digests_AB[index]))

    def _extras(self, total: LossSums | PairSums, count: int) -> dict[str, Tensor]:
        extras = total.metrics(self._config, count) | self._network.metrics(count)
        if self._config.log.parameter_norms:
            extras["parameter_norm"] = global_norm(self.parameters, self.parameters.values, self._ranks)
        if self.optimizer.is_scaled:
            extras["loss_scale"] = self.optimizer.loss_scale.clone()
        return extras

    # -- evaluation and decoding --------------------------------------------------------------------------------------

    @torch.no_grad()
    def eval_step(self, batch: Batch) -> EvalValues:
        """Sum the loss of a batch without training on it. Every rank gets the whole batch and computes its part."""
        check_tokens(batch, self._spec)
        shard = self.data_shard
        losses, num_correct = [0.0] * max(batch.tokens_ABT.shape[1], shard.count), 0
        with devices.memory_errors("evaluating", self._memory):
            for place, part in enumerate(rows_of_rank(batch, shard, one_by_one=self._ranks.is_exact)):
                for sums in self._evaluate(part):
                    losses[shard.index + place * shard.count] += float(sums.loss)
                    num_correct += int(sums.num_correct)
            *losses, total_correct = self._ranks.sum_values(*losses, num_correct)
        is_cross_entropy = self._reference is None
        return EvalValues(math.fsum(losses), self._num_examples(batch), int(total_correct), is_cross_entropy)

    def _evaluate(self, batch: Batch) -> Iterator[LossSums | PairSums]:
        """Yield the loss sums of each micro-batch, without gradients and dropout."""
        indices = range(batch.tokens_ABT.shape[0])
        if self._reference is None:
            yield from (self._network.evaluate(batch, index) for index in indices)
            return
        for index, reference_H in zip(indices, self._reference.answer_log_probs(batch), strict=True):
            policy_H = self._network.answer_log_probs(batch, index)
            yield dpo_loss(policy_H, reference_H, self._config.loss)[1]

    @torch.no_grad()
    def logits(self, tokens_BT: Int32Array) -> npt.NDArray[np.float32]:
        """Return the logits of whole sequences, fp32 ``[B, T, V]``, without dropout."""
        check_length(tokens_BT.shape[1], self._spec)
        return self._network.logits(tokens_BT).cpu().numpy()

    def forward(self, tokens_BT: Int32Array) -> Tensor:
        """Return the logits of whole sequences, fp32 ``[B, T, V]``, with gradients and without dropout."""
        check_length(tokens_BT.shape[1], self._spec)
        return self._network.logits(tokens_BT)

    def decoder(self, batch_size: int, max_tokens: int, images: AnyImages | None = None) -> Decoder:
        """Start decoding ``batch_size`` sequences of at most ``max_tokens`` tokens; the first ones have the images."""
        check_length(max_tokens, self._spec)
        with devices.memory_errors(SAMPLING, self._memory):
            return self._network.decoder(batch_size, max_tokens, images)

    # -- state --------------------------------------------------------------------------------------------------------

    def snapshot(self, *, detached: bool) -> Snapshot | ShardedSnapshot:
        """Return what this rank writes of the training state; a detached one is a copy in host memory."""
        with devices.memory_errors(COPYING if detached else READING, self._memory):
            return checkpoint.snapshot(self._spec, self.parameters, self.optimizer, self._ranks, detached=detached)

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

    def import_pretrained(self, directory: Path) -> None:
        self.import_weights(self._network.pretrained_weights(directory))

    def freeze_reference(self) -> None:
        assert self._reference is not None
        self._reference.freeze()

    def reference_fingerprint(self) -> str:
        assert self._reference is not None
        return self._reference.fingerprint()

    def set_teacher(self, spec: ModelSpec, weights: Iterable[NamedArray]) -> None:
        with devices.memory_errors("loading the teacher", self._memory):
            self.teacher_fingerprint = teacher.attach(self._network, self._config, spec, self.compute, weights)

    def set_stored_teacher(self, identity: str) -> None:
        self.teacher_fingerprint = teacher.attach_stored(self._network, self.compute.device, identity)

    def exchange_average(self) -> None:
        self.optimizer.exchange_average()

    def merged_weights(self) -> Iterator[NamedArray]:
        return self._network.merged_weights()

    def fingerprint(self) -> str:
        """Return a digest of parameters and optimizer state (``models/arrays/fingerprint.py``)."""
        return checkpoint.fingerprint(self._spec, self.parameters, self.optimizer, self._ranks)

    def device_stats(self) -> Mapping[str, float]:
        """Return device memory, and its parts, by metric name. Never synchronises."""
        return self._held.read()

    def environment(self) -> Mapping[str, str | int | bool]:
        """Return what affects the bits of a run besides its configuration."""
        return devices.environment(self.compute) | self._ranks.facts() | self.optimizer.facts()

    def adopt_environment(self, recorded: Mapping[str, object]) -> None:
        """Compute as a recorded run did, where this machine can."""
        self.compute.adopt(recorded)

    @torch.no_grad()
    def matmul_seconds(self, m: int, k: int, n: int) -> float:
        """Time ``[m, k] @ [k, n]`` in the run's precision, in seconds; allocation is excluded."""
        device = self.compute.device
        generator = torch.Generator(device).manual_seed(0)  # leaves the global generator untouched
        draw = partial(torch.randn, device=device, dtype=self.compute.dtype, generator=generator)
        left_MK, right_NK = draw(m, k), draw(n, k)
        count = 1 if device.type == "cpu" else TIMED_PRODUCTS
        self.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            self._products(left_MK, right_NK)
        self.synchronize()
        return (time.perf_counter() - started) / count

    def start_profiler(self, trace: Path) -> TorchRecording:
        """Start the profiler; see ``core.step_profile.StepRecording``."""
        return TorchRecording(trace, self.compute.device)

    def synchronize(self) -> None:
        """Wait until the device is idle; for timing."""
        devices.synchronize(self.compute.device)


def _network(config: RunConfig, spec: ModelSpec, compute: Compute, ranks: Ranks) -> Network:
    has_stages = ranks.pipeline_parallel_size > 1
    if isinstance(spec, AdapterSpec):
        return AdapterNetwork(config, spec, compute, ranks)
    if isinstance(spec, HuggingFaceSpec):
        return (HuggingFacePipeline if has_stages else HuggingFaceNetwork)(config, spec, compute, ranks)
    if isinstance(spec, UserSpec):
        return UserNetwork(config, spec, compute, ranks)
    assert isinstance(spec, DecoderSpec)
    return (DecoderPipeline if has_stages else DecoderNetwork)(config, spec, compute, ranks)
