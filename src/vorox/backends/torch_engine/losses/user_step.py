"""A user function in the place of forward and backward of a micro-batch (``train.forward_backward``).

It receives a ``MicroBatch`` and calls ``forward_backward`` once or several times, perhaps with other tokens or labels.
PyTorch's generators are seeded from (seed, step, micro-batch) while it runs, so a replay draws the same numbers.
Where ranks share a replica, a pass has collectives, so all ranks must run equally many; they compare before each one.

Shape legend: B rows, T positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vorox.backends.torch_engine.losses.dpo_loss import PairSums
from vorox.backends.torch_engine.losses.loss import LossSums
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.core.batch import Batch, Int32Array
from vorox.core.errors import ConfigError
from vorox.core.user_code.extensions import load_function
from vorox.models.input_checks import check_tokens
from vorox.models.spec import ModelSpec

_KEY = "train.forward_backward"

Train = Callable[..., LossSums | PairSums]
"""(batch, micro-batch of it, scale=of the gradients) -> loss sums, never those of DPO; adds to the gradients."""


class MicroBatch:
    """One micro-batch of this rank.

    Attributes:
        step: Step, counted from 0.
        index: Micro-batch of the step.
        tokens_BT: Token ids.
        labels_BT: Targets; -100 where there is none.
        module: The model.
    """

    def __init__(
        self, batch: Batch, index: int, module: nn.Module, spec: ModelSpec, train: Train, scale: float, ranks: Ranks
    ) -> None:
        here = slice(index, index + 1)
        segments, positions = batch.segment_ids_ABT, batch.position_ids_ABT
        self._batch = dataclasses.replace(
            batch,
            tokens_ABT=batch.tokens_ABT[here],
            labels_ABT=batch.labels_ABT[here],
            segment_ids_ABT=None if segments is None else segments[here],
            position_ids_ABT=None if positions is None else positions[here],
            row_digests_AB=batch.row_digests_AB[here],
        )
        self.step, self.index, self.module = batch.step, index, module
        self.tokens_BT: Int32Array = batch.tokens_ABT[index]
        self.labels_BT: Int32Array = batch.labels_ABT[index]
        self._spec, self._train, self._scale, self._ranks = spec, train, scale, ranks
        self._sums: list[list[Tensor]] = []

    def forward_backward(
        self, tokens_BT: npt.ArrayLike | None = None, labels_BT: npt.ArrayLike | None = None, weight: float = 1.0
    ) -> Tensor:
        """Run forward and backward, and add to the gradients.

        Args:
            tokens_BT: Token ids. Default: those of the data.
            labels_BT: Targets. Default: those of the data.
            weight: Factor on the loss. The weights of a micro-batch should add up to 1.

        Returns:
            The cross entropy, summed over the targets, on the device.

        Raises:
            ConfigError: The rows have another shape, or other ranks run no further pass.
        """
        batch = dataclasses.replace(
            self._batch,
            tokens_ABT=self._like(self.tokens_BT, tokens_BT),
            labels_ABT=self._like(self.labels_BT, labels_BT),
        )
        check_tokens(batch, self._spec)
        self._agree(is_over=False)
        sums = self._train(batch, 0, scale=weight * self._scale)
        assert isinstance(sums, LossSums), "loss.name=dpo refuses train.forward_backward"
        self._sums.append([weight * value for value in sums])
        return sums.cross_entropy

    def _like(self, data_BT: Int32Array, values_BT: npt.ArrayLike | None) -> Int32Array:
        found_BT = data_BT if values_BT is None else np.asarray(values_BT, dtype=np.int32)
        if found_BT.shape != data_BT.shape:
            raise ConfigError(
                f"Rows have shape {list(found_BT.shape)}; this micro-batch has {list(data_BT.shape)}", where=_KEY,
                hint="change the values of tokens_BT and labels_BT, not their shape",
            )  # fmt: skip
        return np.ascontiguousarray(found_BT)[None]

    def _agree(self, *, is_over: bool) -> None:
        """Check that all ranks run another pass, or that none does; otherwise its collectives would hang."""
        if self._ranks.num_shards > 1 and not self._ranks.are_equal(int(is_over)):
            raise ConfigError(
                f"Ranks call micro_batch.forward_backward a different number of times in step {self.step + 1}",
                where=_KEY, hint="call it equally often for every micro-batch, with weight=0 where nothing is to be "
                "added; or use replicas, parallel.data_parallel_size alone, which need not agree",
            )  # fmt: skip

    def total(self) -> LossSums:
        """Return the weighted sums of all passes.

        Raises:
            ConfigError: There were none, or other ranks run another one.
        """
        self._agree(is_over=True)
        if not self._sums:
            raise ConfigError(
                "The function ran no backward pass", where=_KEY, hint="call micro_batch.forward_backward() in it"
            )
        totals = [torch.stack(values).sum() for values in zip(*self._sums, strict=True)]
        return LossSums(*totals)


def load_step(path: str | None) -> Callable[[MicroBatch], Any] | None:
    """Return the function of ``train.forward_backward``; ``None`` without one."""
    return None if path is None else load_function(path, kind="forward and backward pass", where=_KEY)
