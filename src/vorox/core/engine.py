"""The seam to PyTorch, JAX or any other framework: the training *step*, never the op.

An engine owns the model, the optimizer and the devices. It takes numpy batches and returns lazily fetched floats. It
never reads data, decides when to save, or knows what a run is. The protocol is structural: no base class, no mixin.

Rules that every engine keeps (``tests/conformance`` holds it to them):

- The loss is the sum over trained tokens divided by their *global* count, however the step is split.
- A step whose loss or gradient is not finite leaves parameters and optimizer untouched and says so.
- Randomness (dropout) is drawn from (seed, step, micro-batch), so no generator state exists to save.
- What a snapshot writes, loaded, then a step gives the same bits as the step without them.
- No later step changes a bit of a detached snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from vorox.core.batch import Batch, DataShard, Int32Array
from vorox.core.errors import ConfigError
from vorox.core.staged_directory import StagedDirectory

NamedArray = tuple[str, npt.NDArray[np.float32]]
"""A parameter under its canonical name (``models/spec.py``), fp32."""

TapPoint = Literal["block_input", "after_attention", "after_mlp"]
"""Where a function can watch or replace the residual stream: as it enters a block, behind its attention, behind its
MLP. ``engine.taps.attach(point, layer, function)`` of every engine that has the capability ``taps``."""


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
    """What one step measured, on the host.

    Attributes:
        loss: Mean cross entropy in nats over the trained tokens of the global batch, without auxiliary terms.
        grad_norm: Global L2 norm of the gradient before clipping.
        finite: Whether loss and gradient were finite. If not, no parameter was changed.
        extra: Further metrics by registry name (accuracy, z-loss, activation statistics, ...).
    """

    loss: float
    grad_norm: float
    finite: bool
    extra: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class NonfiniteOrigin:
    """Where numbers of a step stop being finite.

    Attributes:
        micro_batch: The first micro-batch with such a number, from 0.
        loss: Its part of the loss.
        activation: The first point of the residual stream, ``layer 3, after_attention``; empty if all are finite.
        gradient: The first parameter, from the head backwards, with such a gradient; empty if there is none.
    """

    micro_batch: int
    loss: float
    activation: str
    gradient: str

    @classmethod
    def of(
        cls, micro_batch: int, loss: float, activations: Mapping[str, float], gradients: Mapping[str, bool]
    ) -> NonfiniteOrigin | None:
        """From what a pass over one micro-batch measured; ``None`` if all of it is finite.

        Args:
            micro_batch: Which one.
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
        place = self.activation or (f"the gradient of {self.gradient}" if self.gradient else "the loss")
        return f"micro-batch {self.micro_batch}, {place}"


class StepResult(Protocol):
    """A step that may still be running on the device."""

    def fetch(self) -> StepValues:
        """Wait for the step and return its numbers. The only host synchronisation of a step; repeatable."""
        ...


@dataclass(frozen=True, slots=True)
class EvalValues:
    """Sums over one evaluation batch, on the host, so that batches of any size add up exactly.

    Attributes:
        loss_sum: Cross entropy summed over target tokens, in nats.
        num_target_tokens: Tokens in the sum.
        num_correct: Targets that had the highest logit.
    """

    loss_sum: float
    num_target_tokens: int
    num_correct: int


class Decoder(Protocol):
    """Incremental decoding of one batch of sequences, keeping whatever cache the engine needs."""

    def feed(self, tokens_BT: Int32Array) -> npt.NDArray[np.float32]:
        """Append tokens to every sequence and return the logits that follow the last one, fp32 ``[B, V]``."""
        ...


class EngineSnapshot(Protocol):
    """The training state of one moment. Used by one thread at a time, any thread."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its arrays: the least that a disk must have room for."""
        ...

    def nonfinite_array(self) -> str:
        """Name of the first array of this process that holds NaN or infinity; empty if none does."""
        ...

    def write(self, directory: StagedDirectory) -> None:
        """Write the complete training state into a directory that the caller commits; for a run of one process."""
        ...

    def write_parts(self, directory: Path) -> None:
        """Write what only this process of several has, below a directory that every process names."""
        ...

    def describe(self, directory: StagedDirectory) -> None:
        """Write the rest, in the main process, once all parts are there."""
        ...

    def fingerprint(self) -> str:
        """What ``Engine.fingerprint`` said at that moment."""
        ...


class Engine(Protocol):
    """One model in training on this process's devices."""

    @property
    def name(self) -> str:
        """Name of the backend, as in ``config.backend``."""
        ...

    @property
    def data_shard(self) -> DataShard:
        """The part of each global batch that this process must be given."""
        ...

    @property
    def capabilities(self) -> frozenset[str]:
        """Optional features that this engine honours; a configuration that asks for another one is refused."""
        ...

    def train_step(self, batch: Batch, *, lr: float, weight_decay: float) -> StepResult:
        """Run forward, backward and update over all micro-batches of the step.

        Args:
            batch: Every micro-batch of the step; accumulation is the engine's own business.
            lr: Learning rate of this step, from the stateless schedule.
            weight_decay: Decoupled weight decay of this step, applied to the parameters whose table entry says so.
        """
        ...

    def locate_nonfinite(self, batch: Batch) -> NonfiniteOrigin | None:
        """Repeat forward and backward of a batch without an update, and say where a number is not finite first.

        Disturbs no bit of the training. ``None`` if everything is finite with the parameters as they are now.
        """
        ...

    def eval_step(self, batch: Batch) -> EvalValues:
        """Sum the loss of a batch without training on it. Does not disturb training in any bit."""
        ...

    def logits(self, tokens_BT: Int32Array) -> npt.NDArray[np.float32]:
        """Logits of whole sequences, fp32 ``[B, T, V]``, in evaluation mode."""
        ...

    def decoder(self, batch_size: int, max_tokens: int) -> Decoder:
        """Start decoding ``batch_size`` sequences of at most ``max_tokens`` tokens."""
        ...

    def snapshot(self, *, detached: bool) -> EngineSnapshot:
        """The complete training state as it is now. In a run of several processes, all of them take it together.

        Args:
            detached: Copy it into host memory, so that steps may be made before it is written. If not, it shares the
                engine's memory and holds until the next step.
        """
        ...

    def load(self, directory: Path) -> None:
        """Replace the training state by one that a snapshot wrote and the caller has verified.

        Raises:
            CheckpointError: The state belongs to another architecture or array format.
        """
        ...

    def export_weights(self) -> Iterator[NamedArray]:
        """Parameters under canonical names, fp32, in table order."""
        ...

    def import_weights(self, weights: Iterable[NamedArray]) -> None:
        """Replace all parameters. The optimizer starts afresh.

        Raises:
            CheckpointError: A parameter is missing, unknown or of another shape.
        """
        ...

    def fingerprint(self) -> str:
        """Hash over parameters and optimizer state in name order, as hex: equal iff the state is equal bit for bit."""
        ...

    def device_stats(self) -> Mapping[str, float]:
        """Memory and similar numbers of the devices, by metric registry name. Never synchronises."""
        ...

    def environment(self) -> Mapping[str, str | int | bool]:
        """What decides bit-equality besides the configuration: versions, device, threads, determinism level."""
        ...

    def matmul_seconds(self, m: int, k: int, n: int) -> float:
        """Multiply ``[m, k] @ [k, n]`` of normal random numbers in the run's arithmetic and wait for the result.

        Returns:
            Seconds of the product alone. Disturbs no bit of the training.
        """
        ...

    def synchronize(self) -> None:
        """Wait until the devices are idle (for timing)."""
        ...


class _Taps(Protocol):
    def attach(self, point: TapPoint, layer: int, function: Callable[[Any], Any]) -> Callable[[], None]: ...


def attach_taps(engine: Engine, taps: Sequence[Tap]) -> Callable[[], None]:
    """Attach functions to a model.

    Returns:
        A function that detaches them.

    Raises:
        ConfigError: The engine has no taps, or the model has no such point or layer.
    """
    if taps and "taps" not in engine.capabilities:
        raise ConfigError(
            f"the backend {engine.name} has no taps", where="taps", hint="use backend=torch or backend=jax"
        )
    detaches = [cast("_Taps", getattr(engine, "taps")).attach(*tap) for tap in taps]  # noqa: B009

    def detach() -> None:
        for one in detaches:
            one()

    return detach
