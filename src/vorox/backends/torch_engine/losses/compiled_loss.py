"""The loss of a chunk of positions as one compiled graph (``runtime.compile``).

The logits are read in the compute precision, once for their softmax and once for their gradient, which is written in
the same precision; what lies between stays in registers, in fp32. Uncompiled, every operation of ``loss.py`` reads and
writes fp32 logits, which takes a GPU longer than the products.

Shape legend: C positions of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

ChunkLoss = Callable[[Tensor, Tensor, Tensor | None, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(logits_CV, index_C, kept_C, factor) -> gradient of the objective times ``factor``, ``[C, V]``, and sums by name."""


def compiled_chunk_loss(*, smoothing: float, z_weight: float, count_correct: bool, sum_dtype: torch.dtype) -> ChunkLoss:
    """Return the objective of ``loss.py`` for a chunk, compiled on the first call.

    Args:
        smoothing: Label smoothing.
        z_weight: Weight of the z-loss.
        count_correct: Whether correct targets are counted.
        sum_dtype: Number format of the sums.
    """
    function = partial(
        _chunk_loss, smoothing=smoothing, z_weight=z_weight, count_correct=count_correct, sum_dtype=sum_dtype
    )
    compiled: ChunkLoss | None = None

    def call(*arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
        nonlocal compiled
        if compiled is None:  # loading the compiler takes a second
            compiled = torch.compile(function, dynamic=False, fullgraph=True)
        return compiled(*arguments)

    return call


def _chunk_loss(
    logits_CV: Tensor,
    index_C: Tensor,
    kept_C: Tensor | None,
    factor: Tensor,
    *,
    smoothing: float,
    z_weight: float,
    count_correct: bool,
    sum_dtype: torch.dtype,
) -> tuple[Tensor, dict[str, Tensor]]:
    vocab_size = logits_CV.shape[1]
    wide_CV = logits_CV.float()
    target_C = logits_CV.gather(1, index_C[:, None])[:, 0].float()
    highest_C = wide_CV.amax(dim=1)
    log_partition_C = highest_C + (wide_CV - highest_C[:, None]).exp().sum(dim=1).log()

    gradient_CV = (wide_CV - log_partition_C[:, None]).exp()
    if z_weight:
        gradient_CV = gradient_CV * (1 + 2 * z_weight * log_partition_C)[:, None]
    if smoothing:
        gradient_CV = gradient_CV - smoothing / vocab_size
    is_target_CV = torch.arange(vocab_size, device=logits_CV.device) == index_C[:, None]
    gradient_CV = (gradient_CV - is_target_CV * (1 - smoothing)) * factor

    values = {"cross_entropy": log_partition_C - target_C}
    if z_weight:
        values["squared_log_partition"] = log_partition_C.square()
    if count_correct:
        values["num_correct"] = (wide_CV.argmax(dim=1) == index_C).float()
    if kept_C is not None:
        gradient_CV = gradient_CV.where(kept_C[:, None], 0.0)
        values = {name: value_C.where(kept_C, 0.0) for name, value_C in values.items()}
    sums = {name: value_C.sum(dtype=sum_dtype) for name, value_C in values.items()}
    return gradient_CV.to(logits_CV.dtype), sums
