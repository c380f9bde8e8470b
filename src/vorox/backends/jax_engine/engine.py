"""The JAX engine: trains a decoder on a mesh of devices (implements ``core/engine.py``).

In: numpy batches with all micro-batches of a step, a learning rate, a weight decay. Out: results that are fetched
lazily. A step is one compiled function of (state, batch, scalars) that donates its state's buffers to the next step;
gradient accumulation is a scan inside it. ``model`` and ``loss`` compute, ``parameters`` defines the pytree,
``optimizer`` updates, ``checkpoint`` copies and restores the state, ``decoder`` generates.

Invariant: a step is a pure function of (state, batch, lr, weight decay).

Shape legend: A micro-batches, B rows, T positions, D width, V vocabulary, L layers, P tap points.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vorox.backends.jax_engine import attention, loss, nonfinite
from vorox.backends.jax_engine.attention import AttentionMask
from vorox.backends.jax_engine.checkpoint import OrbaxSnapshot, copy_to_host, require_orbax, restore_trees
from vorox.backends.jax_engine.device import devices
from vorox.backends.jax_engine.device.devices import Compute
from vorox.backends.jax_engine.device.inputs import batch_to_devices, loss_scale
from vorox.backends.jax_engine.device.profiler import JaxRecording
from vorox.backends.jax_engine.device.results import JaxStepResult, gradient_bits
from vorox.backends.jax_engine.layers import experts
from vorox.backends.jax_engine.layers.mamba import decoder_blocks, empty_cache
from vorox.backends.jax_engine.layers.model import Decoder, ForwardContext
from vorox.backends.jax_engine.networks.decoder import JaxDecoder
from vorox.backends.jax_engine.networks.user_part_probe import check_user_parts
from vorox.backends.jax_engine.optimizer import KINDS, Optimizer, State
from vorox.backends.jax_engine.parameters import ParameterLayout, Tree
from vorox.backends.jax_engine.ranks import distributed
from vorox.backends.jax_engine.taps import Taps
from vorox.core.batch import AnyImages, Batch, DataShard, Int32Array
from vorox.core.engine import TIMED_PRODUCTS, Engine, EngineSnapshot, EvalValues, NamedArray, NonfiniteOrigin
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.models.arrays.array_reader import WEIGHTS
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.input_checks import check_length, check_tokens
from vorox.models.spec import ModelSpec
from vorox.models.stored import engine_state
from vorox.models.stored.engine_state import AVERAGE, EngineState, Snapshot
from vorox.models.weight_init import initial_weights
from vorox.planning.memory_advice import COPYING, READING, SAMPLING

Array = jax.Array
connect = distributed.connect


def create(config: RunConfig, spec: ModelSpec, dist: DistributedContext) -> JaxEngine:
    """Create the engine with initial weights.

    Raises:
        ConfigError: This machine or engine does not support a setting.
        DoesNotFitError: The state needs more memory than a device has.
    """
    assert isinstance(spec, DecoderSpec)
    compute = devices.prepare(config, dist)
    if config.checkpoint.format == "orbax":
        require_orbax()
    budget = devices.memory_budget(config, spec, compute.mesh)
    budget.check_state()
    with devices.memory_errors("creating the model", budget):
        with compute.precision():
            check_user_parts(config, spec, compute.dtype)
        engine = JaxEngine(config, spec, compute)
        engine.import_weights(initial_weights(spec, config.run.seed))
        return engine


class JaxEngine(Engine):
    """See ``core.engine.Engine``. Without weights, until ``import_weights`` or ``load``.

    Attributes:
        layout: The leaves of the parameter tree.
        state: Parameters and optimizer state on the devices.
    """

    name = "jax"

    def __init__(self, config: RunConfig, spec: DecoderSpec, compute: Compute) -> None:
        self._config, self._spec, self.compute = config, spec, compute
        self._memory = devices.memory_budget(config, spec, compute.mesh)
        self.layout = ParameterLayout(spec, scanned=config.runtime.scan_layers)
        devices.check_divisible(self.layout, compute.mesh)
        self.data_shard = distributed.data_shard(compute.mesh)
        self._taps = Taps(spec, self._reset_compiled)
        self._decoder = Decoder(
            self.layout, decoder_blocks(spec, attention.attention_kernel(compute.attention)),
            attention.rotary_tables(spec), dtype=compute.dtype, taps=self._taps,
            remat=config.train.activation_checkpointing, constrain=compute.constrain_rows,
        )  # fmt: skip
        self.optimizer = Optimizer(config.optimizer, config.train, self.layout)
        self._reset_compiled()
        self._products: dict[tuple[int, int, int], Callable[..., Array]] = {}
        self.compile_seconds, self._held = 0.0, devices.HeldMemory(compute)

    @property
    def taps(self) -> Taps:
        return self._taps

    def _reset_compiled(self) -> None:
        """Drop compiled functions, which contain the attached taps."""
        self._compiled_steps: dict[Any, Callable[..., Any]] = {}
        self._evaluate = jax.jit(self._evaluate_rows, out_shardings=self.compute.sharding())
        self._all_logits = jax.jit(self._logits_of_rows, out_shardings=self.compute.sharding())
        self._decode_compiled = jax.jit(
            self._decode_rows, donate_argnums=2, out_shardings=(self.compute.sharding(), None)
        )

    def _initial_state(self, packed: Mapping[str, npt.NDArray[np.float32]]) -> State:
        """Return packed parameters, their average and zeroed moments on the devices, sharded over the mesh."""
        shardings = {leaf: self.compute.parameter_sharding(self.layout, leaf) for leaf in packed}
        params = {leaf: distributed.to_devices(array, shardings[leaf]) for leaf, array in packed.items()}
        empty = jax.eval_shape(self.optimizer.init, params)
        moments = {
            kind: {
                leaf: distributed.to_devices(
                    packed[leaf].copy() if kind == AVERAGE else np.zeros(array.shape, np.float32), shardings[leaf]
                )
                for leaf, array in tree.items()
            }
            for kind, tree in empty.moments.items()
        }
        return empty._replace(params=params, **moments, updates=self._scalar(0.0))

    # -- training -----------------------------------------------------------------------------------------------------

    def train_step(
        self, batch: Batch, *, lr: float, weight_decay: float, max_loss: float | None = None
    ) -> JaxStepResult:
        """Run forward, backward and update over all micro-batches of the step."""
        check_tokens(batch, self._spec)
        with devices.memory_errors("training", self._memory), self.compute.precision():
            arrays = batch_to_devices(batch, self.data_shard, self.compute)
            limit = np.float32(np.inf if max_loss is None else max_loss)  # one compiled step with and without a limit
            arguments = (self.state, arrays, np.float32(lr), np.float32(weight_decay), np.uint32(batch.step), limit)
            self.state, numbers, moments_ALP3 = self.compiled_step(arguments)(*arguments)
            return JaxStepResult(numbers, moments_ALP3, self._memory)

    def compiled_step(self, arguments: tuple[Any, ...]) -> Any:
        """Return the step compiled for the shapes of a state and a batch."""
        key = tuple((name, array.shape) for name, array in arguments[1].items())
        if key not in self._compiled_steps:
            shardings = jax.tree.map(lambda array: array.sharding, arguments[0])
            replicated = self.compute.sharding()
            step = jax.jit(self._step, donate_argnums=0, out_shardings=(shardings, replicated, replicated))
            self._compiled_steps[key], seconds = devices.compile_logged(step, arguments)
            self.compile_seconds += seconds
        return self._compiled_steps[key]

    def _step(
        self,
        state: State,
        arrays: Mapping[str, Array],
        lr: Array,
        weight_decay: Array,
        step: Array,
        max_loss: Array,
    ) -> tuple[State, dict[str, Array], Array | None]:
        scale = loss_scale(arrays)
        key = self._step_key(step)
        forward_backward = partial(self._forward_backward, state.params, scale)

        def body(gradients: dict[str, Array], part: tuple[Array, Mapping[str, Array]]) -> Any:
            new, sums, seen = forward_backward(part[1], jax.random.fold_in(key, part[0]))
            return jax.tree.map(jnp.add, gradients, new), (sums, seen)

        num_micro_batches = arrays["tokens"].shape[0]
        if num_micro_batches == 1:
            first = {name: array[0] for name, array in arrays.items()}
            gradients, sums, seen = forward_backward(first, jax.random.fold_in(key, 0))
            seen = jax.tree.map(lambda array: array[None], seen)
        else:
            zeros = jax.tree.map(jnp.zeros_like, self.optimizer.trained(state.params))
            gradients, (sums, seen) = jax.lax.scan(body, zeros, (jnp.arange(num_micro_batches), dict(arrays)))
        totals = loss.LossSums(*(part.sum() for part in sums))
        mean_loss = totals.cross_entropy * scale
        after, grad_norm, finite = self.optimizer.step(
            state, gradients, lr=lr, weight_decay=weight_decay, loss=mean_loss, max_loss=max_loss
        )
        numbers = {"loss": mean_loss, "grad_norm": grad_norm, "finite": finite}
        numbers |= gradient_bits(gradients) if self._config.runtime.recompute_every_steps is not None else {}
        numbers |= experts.metrics(seen.routers, self._spec, self._config.loss, scale)
        return after, numbers | self._extras(after, totals, scale), seen.moments

    def _step_key(self, step: Array | int) -> Array:
        high, low = divmod(self._config.run.seed, 1 << 32)
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(low), high), step)

    def locate_nonfinite(self, batch: Batch) -> NonfiniteOrigin | None:
        """Repeat forward and backward without an update and return the first non-finite place."""
        with devices.memory_errors("locating non-finite values", self._memory), self.compute.precision():
            forward_backward = jax.jit(partial(self._forward_backward, measure=True))
            arrays, key = batch_to_devices(batch, self.data_shard, self.compute), self._step_key(batch.step)
            return nonfinite.find_origin(forward_backward, self.state.params, arrays, key, self.layout)

    def gradient_norms(self, batch: Batch) -> dict[str, float]:
        if jax.process_count() > 1:
            return super().gradient_norms(batch)
        with devices.memory_errors("computing gradients", self._memory), self.compute.precision():
            arrays, key = batch_to_devices(batch, self.data_shard, self.compute), self._step_key(batch.step)
            forward_backward, scale = jax.jit(self._forward_backward), loss_scale(arrays)
            parts = (
                forward_backward(self.state.params, scale, rows, jax.random.fold_in(key, index))[0]
                for index in range(arrays["tokens"].shape[0])
                for rows in [{name: array[index] for name, array in arrays.items()}]
            )
            gradients = reduce(lambda total, part: jax.tree.map(jnp.add, total, part), parts)
            return {name: float(np.linalg.norm(array)) for name, array in self.layout.unpack(gradients)}

    def _forward_backward(
        self, params: Mapping[str, Array], scale: Array, rows: Mapping[str, Array], key: Array, *, measure: bool = False
    ) -> tuple[dict[str, Array], loss.LossSums, experts.Seen]:
        """Run forward and backward over a micro-batch; return gradients, loss sums and what was measured."""
        context = self._context(
            rows,
            dropout_key=key if self._spec.dropout_fraction > 0 else None,
            measure=measure or self._config.log.activation_statistics,
            router=experts.router_step(self._spec, self._config.loss, scale, rows["labels"]),
        )

        def hidden(trained: Mapping[str, Array]) -> tuple[Array, experts.Seen]:
            hidden_BTD, _, seen = self._decoder({**params, **trained}, rows["tokens"], context)
            return hidden_BTD, seen

        hidden_BTD, pullback, seen = jax.vjp(hidden, self.optimizer.trained(params), has_aux=True)
        head_name, head_VD = self._decoder.head(params)
        sums, d_hidden_BTD, d_head_VD = loss.train(hidden_BTD, head_VD, rows["labels"], self._config.loss, scale)
        (gradients,) = pullback(d_hidden_BTD)
        if head_name in gradients:
            gradients[head_name] = gradients[head_name] + d_head_VD
        return gradients, sums, seen

    def _context(self, rows: Mapping[str, Array], **others: Any) -> ForwardContext:
        """Return the inputs of a forward pass; ``others`` are fields of ``ForwardContext``."""
        positions_BT = rows.get("positions")
        if positions_BT is None:
            positions_BT = jnp.arange(rows["tokens"].shape[1])[None]
        return ForwardContext(AttentionMask(rows.get("segments")), positions_BT, **others)

    def _extras(self, after: State, totals: loss.LossSums, scale: Array) -> dict[str, Array]:
        extras: dict[str, Array] = {}
        if self._config.log.accuracy:
            extras["accuracy"] = totals.num_correct * scale
        if self._config.loss.z_loss_weight:
            extras["z_loss"] = totals.squared_log_partition * scale * self._config.loss.z_loss_weight
        if self._config.loss.name != "cross_entropy":
            extras["objective"] = totals.objective * scale
        if self._config.log.parameter_norms:
            extras["parameter_norm"] = jnp.sqrt(jnp.stack([jnp.square(x).sum() for x in after.params.values()]).sum())
        return extras

    # -- evaluation and decoding --------------------------------------------------------------------------------------

    def eval_step(self, batch: Batch) -> EvalValues:
        """Sum the loss of a batch without training on it."""
        check_tokens(batch, self._spec)
        with devices.memory_errors("evaluating", self._memory), self.compute.precision():
            arrays = batch_to_devices(batch, DataShard(), self.compute)
            parts = [
                self._evaluate(self.state.params, {name: array[index] for name, array in arrays.items()})
                for index in range(arrays["tokens"].shape[0])
            ]
            loss_sum = sum(float(part.cross_entropy) for part in parts)
            return EvalValues(loss_sum, batch.num_target_tokens, sum(int(part.num_correct) for part in parts))

    def _evaluate_rows(self, params: Mapping[str, Array], rows: Mapping[str, Array]) -> loss.LossSums:
        hidden_BTD, _, _ = self._decoder(params, rows["tokens"], self._context(rows))
        return loss.evaluate(hidden_BTD, self._decoder.head(params)[1], rows["labels"], self._config.loss.chunk_tokens)

    def logits(self, tokens_BT: Int32Array) -> npt.NDArray[np.float32]:
        """Return the logits of whole sequences, fp32 ``[B, T, V]``, without dropout."""
        check_length(tokens_BT.shape[1], self._spec)
        with self.compute.precision():
            return np.asarray(self._all_logits(self.state.params, np.asarray(tokens_BT)))

    def _logits_of_rows(self, params: Mapping[str, Array], tokens_BT: Array) -> Array:
        hidden_BTD, _, _ = self._decoder(params, tokens_BT, self._context({"tokens": tokens_BT}))
        return self._head_logits(params, hidden_BTD)

    def _head_logits(self, params: Mapping[str, Array], hidden: Array) -> Array:
        head_VD = self._decoder.head(params)[1].astype(hidden.dtype)
        return jnp.einsum("...d,vd->...v", hidden, head_VD, preferred_element_type=jnp.float32)

    def decoder(self, batch_size: int, max_tokens: int, images: AnyImages | None = None) -> JaxDecoder:
        """Start decoding ``batch_size`` sequences of at most ``max_tokens`` tokens."""
        assert images is None, "refused with the configuration"
        check_length(max_tokens, self._spec)
        with devices.memory_errors(SAMPLING, self._memory):
            empty = empty_cache(self._spec, batch_size, max_tokens, self.compute.dtype)
            return JaxDecoder(empty, max_tokens, self._decode)

    def _decode(self, tokens_BT: Int32Array, num_new: int, cache: Any, start: int) -> tuple[Array, Any]:
        with self.compute.precision():
            return self._decode_compiled(self.state.params, tokens_BT, cache, np.int32(start), np.int32(num_new))

    def _decode_rows(
        self, params: Mapping[str, Array], tokens_BT: Array, cache: Any, start: Array, num_new: Array
    ) -> tuple[Array, Any]:
        """Return the logits after the last new token and the extended cache; ``tokens_BT`` is padded."""
        index_T = start + jnp.arange(tokens_BT.shape[1])
        context = ForwardContext(AttentionMask(None, index_T), index_T[None], None, cache, start, num_new=num_new)
        hidden_BTD, cache_after, _ = self._decoder(params, tokens_BT, context)
        last_BD = jax.lax.dynamic_index_in_dim(hidden_BTD, num_new - 1, axis=1, keepdims=False)
        return self._head_logits(params, last_BD), cache_after

    # -- state --------------------------------------------------------------------------------------------------------

    def _engine_state(self, state: State) -> EngineState:
        return EngineState(
            weights=partial(self.layout.unpack, state.params),
            moments={kind: partial(self.layout.unpack, tree) for kind, tree in state.moments.items()},
            moment_names={kind: self.layout.names(tree) for kind, tree in state.moments.items()},
            counters={"updates": float(state.updates)},
        )

    def _trees(self) -> dict[str, Tree]:
        return {WEIGHTS: self.state.params, **self.state.moments}

    def snapshot(self, *, detached: bool) -> EngineSnapshot:
        """Return a snapshot of the complete training state; a detached one is a copy in host memory."""
        several = jax.process_count() > 1
        with devices.memory_errors(COPYING if detached else READING, self._memory):
            if self._config.checkpoint.format == "orbax":
                counters, known = {"updates": float(self.state.updates)}, self.fingerprint() if several else None
                return OrbaxSnapshot.of(
                    self._spec, self.layout, self._trees(), counters, detached=detached, fingerprint=known
                )
            if several:
                return Snapshot(self._spec, self._engine_state(distributed.gather_to_main(self.state)))
            return Snapshot(self._spec, self._engine_state(copy_to_host(self.state) if detached else self.state))

    def load(self, directory: Path) -> None:
        """Load a training state that a snapshot wrote and the caller has verified."""
        stored = engine_state.load(directory, self._spec, self._engine_state(self.state))
        if stored.pieces is not None:
            trees = restore_trees(stored.pieces, self.layout, self._trees())
            updates = self._scalar(stored.counters["updates"])
            self.state = self.state._replace(params=trees.pop(WEIGHTS), **trees, updates=updates)
            return
        fresh = self._initial_state(self.layout.pack(stored.weights))
        found: dict[str, dict[str, npt.NDArray[np.float32]]] = {kind: {} for kind in KINDS}
        for kind, name, array in stored.moments:
            found[kind][name] = array
        moments: dict[str, Any] = {}
        for kind, tree in fresh.moments.items():
            packed = self.layout.pack_group(found[kind], tree)
            moments[kind] = {leaf: distributed.to_devices(packed[leaf], tree[leaf].sharding) for leaf in tree}
        self.state = fresh._replace(**moments, updates=self._scalar(stored.counters["updates"]))

    def _scalar(self, value: float) -> Array:
        return distributed.to_devices(np.asarray(value, np.float32), self.compute.sharding())

    def export_weights(self) -> Iterator[NamedArray]:
        """Yield the parameters in fp32 under canonical names, in table order."""
        yield from ((name, array.copy()) for name, array in self.layout.unpack(self.state.params))

    def import_weights(self, weights: Iterable[NamedArray]) -> None:
        """Replace all parameters and reset the optimizer."""
        self.state = self._initial_state(self.layout.pack(weights))

    def exchange_average(self) -> None:
        """Exchange the parameters and their moving average (``train.ema_decay``)."""
        params, average = self.state.params, self.state.weights_ema
        self.state = self.state._replace(params=params | average, weights_ema={leaf: params[leaf] for leaf in average})

    def fingerprint(self) -> str:
        """Return a digest of parameters and optimizer state (``models/arrays/fingerprint.py``)."""
        return engine_state.state_fingerprint(self._engine_state(self.state))

    def device_stats(self) -> Mapping[str, float]:
        """Return device memory and compile time by metric name. Never synchronises."""
        return {**self._held.read(self.state), "runtime/compile_seconds": self.compile_seconds}

    def environment(self) -> Mapping[str, str | int | bool]:
        """Return what affects the bits of a run besides its configuration."""
        return devices.environment(self.compute)

    def adopt_environment(self, recorded: Mapping[str, object]) -> None:
        """Do nothing: no choice of this engine depends on the version or the machine."""

    def matmul_seconds(self, m: int, k: int, n: int) -> float:
        """Time ``[m, k] @ [k, n]`` in the run's precision, in seconds; allocation is excluded."""
        draw = partial(jax.random.normal, dtype=self.compute.dtype)
        with self.compute.precision():
            left_MK, right_NK = map(draw, jax.random.split(jax.random.key(0)), ((m, k), (n, k)))
            if (m, k, n) not in self._products:
                self._products[m, k, n] = jax.jit(lambda left, right: left @ right.T).lower(left_MK, right_NK).compile()
            count = 1 if self.compute.platform == "cpu" else TIMED_PRODUCTS
            jax.block_until_ready((left_MK, right_NK))
            started = time.perf_counter()
            multiply = self._products[m, k, n]
            reduce(lambda *_: multiply(left_MK, right_NK), range(count), left_MK).block_until_ready()  # keeps the last
            return (time.perf_counter() - started) / count

    def start_profiler(self, trace: Path) -> JaxRecording:
        """Start the profiler; see ``core.step_profile.StepRecording``."""
        return JaxRecording(trace)

    def synchronize(self) -> None:
        """Wait until the devices are idle; for timing."""
        jax.block_until_ready(self.state)
