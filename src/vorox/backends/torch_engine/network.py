"""The interface between the engine and a model on this rank: losses with gradients, logits, decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from vorox.backends.torch_engine.layouts.parameters import Parameters
from vorox.backends.torch_engine.losses.dpo_loss import PairSums
from vorox.backends.torch_engine.losses.loss import LossSums
from vorox.backends.torch_engine.taps import Taps
from vorox.core.batch import AnyImages, Batch, Int32Array
from vorox.core.engine import Decoder, NamedArray

EnterMicroBatch = Callable[[int], AbstractContextManager[None]]
"""Returns the context of a micro-batch: its randomness and statistics."""


class Network(Protocol):
    """A model with its loss, placed on the devices of a replica.

    Networks derive from it. What follows ``decoder`` is for some of them: the others inherit a refusal.

    Attributes:
        module: The model.
        parameters: Values and gradients on this rank.
        taps: Functions attached to the residual stream.
        has_stages: Whether it is a pipeline: ``train_all`` trains on all micro-batches at once, in place of ``train``.
        has_adapter: Whether an adapter is trained, on a frozen base.
    """

    module: nn.Module
    parameters: Parameters
    taps: Taps
    has_stages: bool = False
    has_adapter: bool = False

    @property
    def is_random(self) -> bool:
        """Whether training samples random numbers, for dropout."""
        ...

    def initial_weights(self, seed: int) -> Iterable[NamedArray]:
        """Yield initial weights under canonical names, in table order."""
        ...

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
        """Run forward and backward of a micro-batch, and add to the gradients.

        Args:
            batch: The rows of this rank.
            index: The micro-batch.
            scale: One over the global number of targets, or of pairs.
            loss_scale: Loss scale of fp16.
            reference_H: ``answer_log_probs`` under the reference of DPO; ``None`` for other losses.
            compiled: Whether compiled code may run.
        """
        ...

    def is_single_pass(self, batch: Batch) -> bool:
        """Whether ``train`` runs one backward pass."""
        ...

    def evaluate(self, batch: Batch, index: int) -> LossSums:
        """Return the loss sums of a micro-batch, without gradients and dropout."""
        ...

    def metrics(self, count: int) -> dict[str, Tensor]:
        """Return metrics of the step besides those of its loss, by name; ``count`` targets. A collective."""
        ...

    def answer_log_probs(self, batch: Batch, index: int) -> Tensor:
        """Return the log-probability of each answer of the preference pairs of a micro-batch, ``[H]``, fp64.

        Chosen and rejected answers alternate. Without gradients and dropout.
        """
        ...

    def logits(self, tokens_BT: Int32Array) -> Tensor:
        """Return the logits of whole sequences, fp32 ``[B, T, V]``."""
        ...

    def decoder(self, batch_size: int, max_tokens: int, images: AnyImages | None = None) -> Decoder:
        """Start decoding ``batch_size`` sequences of at most ``max_tokens`` tokens."""
        ...

    def train_all(
        self, batch: Batch, *, scale: float, loss_scale: Tensor | None, enter: EnterMicroBatch
    ) -> dict[int, LossSums]:
        """Run forward and backward of all micro-batches of a step; return their loss sums by index.

        Args:
            batch: The rows of this rank.
            scale: See ``train``.
            loss_scale: See ``train``.
            enter: Entered for each micro-batch.
        """
        raise TypeError(f"{type(self).__name__} has no stages")

    def pretrained_weights(self, directory: Path) -> Iterator[NamedArray]:
        """Yield the weights of a transformers directory under the names of ``initial_weights``."""
        raise TypeError(f"{type(self).__name__} has no weights of transformers")

    def merged_weights(self) -> Iterator[NamedArray]:
        """Yield the weights of the base with the adapter merged into them, in fp32."""
        raise TypeError(f"{type(self).__name__} has no adapter")

    def without_adapter(self) -> AbstractContextManager[None]:
        """Return a context in which the base of an adapter computes alone."""
        raise TypeError(f"{type(self).__name__} has no adapter")

    def check_pairs(self) -> None:
        """Check that both answers of a preference pair run in one forward pass.

        Raises:
            ConfigError: They do not.
        """
