"""The engine protocol: one training step on numpy batches, for PyTorch, JAX or another framework.

An engine owns the model, the optimizer and the devices. It takes numpy batches and returns lazily fetched floats. It
does not read data, schedule checkpoints, or know about runs. The protocol is structural: no base class, no mixin.

Every engine satisfies these rules (tested in ``tests/conformance``):

- The loss is the sum over trained tokens divided by their *global* count, however the step is split.
- A step with a non-finite loss or gradient leaves parameters and optimizer unchanged and reports it.
- So does a step whose loss is larger than ``max_loss``; a larger limit changes no bit.
- Randomness (dropout) is a function of (seed, step, micro-batch), so there is no generator state to save.
- A step after saving and loading a snapshot gives the same bits as without.
- No later step changes a bit of a detached snapshot.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from vorox.core.batch import AnyImages, Batch, DataShard, Int32Array
from vorox.core.errors import ConfigError
from vorox.core.files.staged_directory import StagedDirectory, StagedPart
from vorox.core.schema import RunConfig
from vorox.core.step_profile import StepRecording

NamedArray = tuple[str, npt.NDArray[np.float32]]
"""A parameter under its canonical name (``models/spec.py``), fp32."""

TIMED_PRODUCTS = 20
"""Products of one measurement on an accelerator: one alone takes about as long to start as to compute."""

TapPoint = Literal["block_input", "after_attention", "after_mlp"]
"""Points where a function can read or replace the residual stream: before a block, after its attention, and after its
MLP, which is the end of every block, also of one without an MLP. A block without attention has no ``after_attention``.
``engine.taps.attach(point, layer, function)``."""


class Tap(NamedTuple):
    """A function at a point of a layer.

    Attributes:
        point: ``block_input``, ``after_attention`` or ``after_mlp``.
        layer: From 0.
        function: Takes the residual stream ``x_BTD`` in the engine's framework; a result other than ``None``
            replaces it.
    """

    point: TapPoint
    layer: int
    function: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class StepValues:
    """The measurements of one step, on the host.

    Attributes:
        loss: Mean cross entropy in nats over the trained tokens of the global batch, without auxiliary terms; with DPO,
            its mean loss over the preference pairs.
        grad_norm: Global L2 norm of the gradient before clipping.
        finite: Whether loss and gradient are finite. If not, no parameter was changed.
        extra: Further metrics by registry name (accuracy, z-loss, activation statistics, ...).
        gradient_bits: Checksum over the bits of this rank's gradients before clipping, with
            ``runtime.recompute_every_steps``; otherwise empty. One changed element always changes it.
    """

    loss: float
    grad_norm: float
    finite: bool
    extra: Mapping[str, float]
    gradient_bits: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class NonfiniteOrigin:
    """The first non-finite values of a step.

    Attributes:
        micro_batch: The first micro-batch with a non-finite value, from 0.
        loss: Its part of the loss.
        activation: The first point of the residual stream, ``layer 3, after_attention``; empty if all are finite.
        gradient: The first parameter with a non-finite gradient, from the head backwards; empty if all are finite.
    """

    micro_batch: int
    loss: float
    activation: str
    gradient: str

    @classmethod
    def locate(
        cls, micro_batch: int, loss: float, activations: Mapping[str, float], gradients: Mapping[str, bool]
    ) -> NonfiniteOrigin | None:
        """Locate the origin in the measurements of one micro-batch; ``None`` if all are finite.

        Args:
            micro_batch: Its index.
            loss: Its part of the loss.
            activations: Activation statistics by metric name, in the order of the layers.
            gradients: Whether the gradient of a parameter is finite, in table order.
        """
        metric = next((name for name, value in activations.items() if not math.isfinite(value)), "")
        _, layer, point, _ = metric.split("/") if metric else ("", "", "", "")
        gradient = next((name for name, is_finite in reversed(list(gradients.items())) if not is_finite), "")
        if not metric and not gradient and math.isfinite(loss):
            return None
        return cls(micro_batch, loss, f"layer {layer}, {point}" if metric else "", gradient)

    def __str__(self) -> str:
        where = self.activation or (f"the gradient of {self.gradient}" if self.gradient else "the loss")
        return f"micro-batch {self.micro_batch}, {where}"


class StepResult(Protocol):
    """The result of a step that may still be running on the device."""

    def fetch(self) -> StepValues:
        """Wait for the step and return its values. The only host synchronisation of a step; idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class EvalValues:
    """Sums over one evaluation batch, on the host, so that batches of any size can be added exactly.

    Attributes:
        loss_sum: Cross entropy summed over target tokens, in nats; with DPO, its loss summed over pairs.
        num_target_tokens: Tokens, or pairs, in the sum.
        num_correct: Targets that had the highest logit, or pairs whose chosen answer has the higher reward.
        is_cross_entropy: Whether the loss is the cross entropy of tokens.
    """

    loss_sum: float
    num_target_tokens: int
    num_correct: int
    is_cross_entropy: bool = True


class Decoder(Protocol):
    """Incremental decoding of one batch of sequences, with the engine's KV cache."""

    def feed(self, tokens_BT: Int32Array) -> npt.NDArray[np.float32]:
        """Append tokens to every sequence and return the logits that follow the last one, fp32 ``[B, V]``."""
        ...


PartReport = Mapping[str, Any]
"""A rank's report about the shards that it wrote, as plain JSON."""


class EngineSnapshot(Protocol):
    """The training state after one step. Used by one thread at a time, any thread."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its arrays, a lower bound of the disk space needed."""
        ...

    def nonfinite_array(self) -> str:
        """Return the name of the first array of this rank with NaN or infinity; empty if all are finite."""
        ...

    def write_part(self, directory: StagedPart) -> PartReport:
        """Write the shards of this rank into a directory shared by all ranks."""
        ...

    def write_metadata(self, directory: StagedDirectory, parts: Sequence[PartReport]) -> None:
        """Write the files that are not shards; called on rank 0 after all shards are written.

        Args:
            directory: Contains the shards of all ranks.
            parts: What ``write_part`` returned, by rank.
        """
        ...

    def fingerprint(self, parts: Sequence[PartReport] = ()) -> str:
        """Return ``Engine.fingerprint`` of this state; one of several ranks that hold it needs their reports."""
        ...


class Taps(Protocol):
    """Functions attached to the residual stream."""

    def attach(self, point: TapPoint, layer: int, function: Callable[[Any], Any]) -> Callable[[], None]:
        """Attach a function, and return one that detaches it.

        Raises:
            ConfigError: The model has no such point or layer, or the engine no taps.
        """
        ...


@dataclass(frozen=True, slots=True)
class NoTaps:
    """Those of an engine without taps."""

    engine_name: str

    def attach(self, point: TapPoint, layer: int, function: Callable[[Any], Any]) -> Callable[[], None]:
        raise ConfigError(
            f"Backend {self.engine_name} does not support taps", where="taps", hint="use backend=torch or backend=jax"
        )


class Engine(Protocol):
    """A model in training on this rank's devices.

    Engines derive from it. What follows ``synchronize`` is optional: an engine inherits what it does not have.

    Attributes:
        name: Name of the backend, as in ``config.backend``.
        data_shard: The part of each global batch that this rank expects.
        teacher_fingerprint: Identifies the teacher of a distillation; empty without one.
    """

    name: str
    data_shard: DataShard

    def train_step(self, batch: Batch, *, lr: float, weight_decay: float, max_loss: float | None = None) -> StepResult:
        """Run forward, backward and update over all micro-batches of the step.

        Args:
            batch: All micro-batches of the step; the engine accumulates their gradients.
            lr: Learning rate of this step, from the stateless schedule.
            weight_decay: Decoupled weight decay of this step, for the parameters marked in the table.
            max_loss: A step with a larger loss leaves parameters and optimizer unchanged, decided on the device like
                a non-finite one. Exact in fp32; ``None``: no limit. The values of the step are those without it. With
                ``-inf``, no bit of the training state changes.
        """
        ...

    def locate_nonfinite(self, batch: Batch) -> NonfiniteOrigin | None:
        """Repeat forward and backward of a batch without an update, and return the first non-finite value.

        Changes no bit of the training state. ``None`` if all values are finite with the current parameters.
        """
        ...

    def eval_step(self, batch: Batch) -> EvalValues:
        """Sum the loss of a batch without training on it. Changes no bit of the training state."""
        ...

    def logits(self, tokens_BT: Int32Array) -> npt.NDArray[np.float32]:
        """Return the logits of whole sequences in evaluation mode, fp32 ``[B, T, V]``."""
        ...

    def decoder(self, batch_size: int, max_tokens: int, images: AnyImages | None = None) -> Decoder:
        """Start decoding ``batch_size`` sequences of at most ``max_tokens`` tokens; the first ones have the images."""
        ...

    def snapshot(self, *, detached: bool) -> EngineSnapshot:
        """Return the training state that this rank writes; that of all ranks is complete. All ranks take part.

        Args:
            detached: Copy it into host memory, so that training can continue while it is written. Otherwise it
                shares the engine's memory and is valid until the next step.
        """
        ...

    def load(self, directory: Path) -> None:
        """Replace the training state by that of a verified snapshot.

        Raises:
            CheckpointError: The state belongs to another architecture or array format.
        """
        ...

    def export_weights(self) -> Iterator[NamedArray]:
        """Yield the parameters under canonical names, fp32, in table order."""
        ...

    def import_weights(self, weights: Iterable[NamedArray]) -> None:
        """Replace all parameters and reset the optimizer state.

        Raises:
            CheckpointError: A parameter is missing, unknown or of another shape.
        """
        ...

    def fingerprint(self) -> str:
        """Return a hash of parameters and optimizer state, equal iff the state is equal bit for bit. A collective."""
        ...

    def device_stats(self) -> Mapping[str, float]:
        """Return memory and similar metrics of the devices by registry name. Never synchronises."""
        ...

    def environment(self) -> Mapping[str, str | int | bool]:
        """Return what decides bit-equality besides the configuration: versions, device, threads, determinism level."""
        ...

    def adopt_environment(self, recorded: Mapping[str, object]) -> None:
        """Compute as a recorded run did, where this machine can; ``recorded`` is what ``environment`` returned.

        Called before the first step of a resume or a replay.
        """
        ...

    def matmul_seconds(self, m: int, k: int, n: int) -> float:
        """Multiply ``[m, k] @ [k, n]`` of normal random numbers in the run's arithmetic and wait for the result.

        Returns:
            Seconds of a product alone. Changes no bit of the training state.
        """
        ...

    def synchronize(self) -> None:
        """Wait until the devices are idle; used for timing."""
        ...

    teacher_fingerprint: str = ""

    @property
    def taps(self) -> Taps:
        """Functions attached to the residual stream."""
        return NoTaps(self.name)

    @property
    def collective_seconds(self) -> float:
        """Time that this host has spent in sums over ranks; 0 if it is not measured."""
        return 0.0

    def start_profiler(self, trace: Path) -> StepRecording:
        """Start the profiler, which writes ``trace``."""
        raise _lacking(self, "profiler")

    def gradient_norms(self, batch: Batch) -> dict[str, float]:
        """Repeat forward and backward of a batch without an update; return the L2 norm of each parameter's gradient.

        Norms have a common factor. Changes no bit of the training state. A collective.
        """
        del batch
        raise _lacking(self, "norm of the gradient by parameter")

    def exchange_average(self) -> None:
        """Exchange the parameters and their moving average (``train.ema_decay``)."""
        raise _lacking(self, "moving average")

    def import_pretrained(self, directory: Path) -> None:
        """Replace all parameters by the weights of a transformers directory (``model.kind: huggingface``).

        With an adapter, they replace its frozen base, and the adapter is initialised.
        """
        raise _lacking(self, "model of transformers")

    def merged_weights(self) -> Iterator[NamedArray]:
        """Yield the weights of the base of an adapter with the adapter merged into them, in fp32."""
        raise _lacking(self, "adapter")

    def freeze_reference(self) -> None:
        """Make the current weights the reference of DPO; with an adapter, its base stays it."""
        raise _lacking(self, "reference model")

    def reference_fingerprint(self) -> str:
        """Return the hash of the reference of DPO; empty for the base of an adapter, which its spec identifies."""
        raise _lacking(self, "reference model")

    def set_teacher(self, spec: Any, weights: Iterable[NamedArray]) -> None:
        """Train towards the predictions of a frozen model (``train.distillation``).

        Args:
            spec: The teacher, a ``DecoderSpec``.
            weights: Its weights, in table order.
        """
        raise _lacking(self, "teacher")

    def set_stored_teacher(self, identity: str) -> None:
        """Train towards the logits that batches carry (``train.distillation.logits``)."""
        raise _lacking(self, "teacher")


def _lacking(engine: Engine, feature: str) -> ConfigError:
    """Return the error of a feature that an engine does not have."""
    return ConfigError(f"The {engine.name} engine has no {feature}", where="backend", hint="use another backend")


def exchange_average(engine: Engine, config: RunConfig) -> None:
    """Exchange the parameters of an engine with their moving average; a second time, every bit is as before.

    Raises:
        ConfigError: The run keeps no average.
    """
    if config.train.ema_decay is None:
        raise ConfigError(
            "The run has no moving average of the weights", where="weights=ema",
            hint="only a run with train.ema_decay has one",
        )  # fmt: skip
    engine.exchange_average()


@contextlib.contextmanager
def validated_weights(engine: Engine, config: RunConfig) -> Generator[None]:
    """Inside the block, evaluation and decoding use the weights that ``eval.weights`` names."""
    if config.eval.weights == "model":
        yield
        return
    exchange_average(engine, config)
    try:
        yield
    finally:
        exchange_average(engine, config)


def attach_taps(engine: Engine, taps: Sequence[Tap]) -> Callable[[], None]:
    """Attach functions to a model.

    Returns:
        A function that detaches them.

    Raises:
        ConfigError: The engine has no taps, or the model has no such point or layer.
    """
    detaches = [engine.taps.attach(*tap) for tap in taps]

    def detach() -> None:
        for one in detaches:
            one()

    return detach
