"""The output head and loss over a vocabulary that is divided over ranks (``tensor_parallel.py``).

Each rank computes the logits of its part. For each chunk of positions the ranks exchange a few numbers per position:
the highest logit, the sum of exponentials below it, the logit of the target, which one rank has, and if correct
targets are counted, whether the target is the arg max of the part.

Shape legend: C positions of a chunk, V vocabulary of this rank, R ranks of the group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vorox.backends.torch_engine.device.labels import Labels
from vorox.backends.torch_engine.losses.loss import FusedLinearLoss, LossSums, Partition
from vorox.backends.torch_engine.ranks.tensor_parallel import TensorGroup


class VocabularyLoss(FusedLinearLoss):
    """See ``FusedLinearLoss``; the head is this rank's part of the vocabulary.

    Args:
        parallel: The ranks that divide the vocabulary.
        vocab_size: Tokens of the whole vocabulary.
        arguments: Those of ``FusedLinearLoss``.
        options: Those of ``FusedLinearLoss``.
    """

    def __init__(self, parallel: TensorGroup, vocab_size: int, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._parallel, self._num_tokens = parallel, vocab_size

    def gradients(
        self,
        hidden_MD: Tensor,
        head_VD: Tensor,
        head_gradient: Tensor | None,
        labels: Labels,
        scale: float,
        loss_scale: Tensor | None,
    ) -> tuple[LossSums, Tensor]:
        hidden_MD = self._parallel.gather_positions(hidden_MD)
        return super().gradients(hidden_MD, head_VD, head_gradient, labels, scale, loss_scale)

    def _total(self, d_hidden_MD: Tensor) -> Tensor:
        return self._parallel.sum_positions(d_hidden_MD)

    def _partition(self, logits_CV: Tensor, labels: Labels, *, count_correct: bool) -> Partition:
        highest_C = logits_CV.amax(dim=1)
        exponentials_CV = (logits_CV - highest_C[:, None]).exp_()
        index_C, is_here_C = self._parallel.local_rows(labels.index_M, self._num_tokens)
        target_C = logits_CV.gather(1, index_C[:, None])[:, 0].where(is_here_C, 0.0)
        numbers = [highest_C, exponentials_CV.sum(dim=1), target_C]
        if count_correct:
            numbers.append(((logits_CV.argmax(dim=1) == index_C) & is_here_C).to(target_C.dtype))
        highest_RC, sums_RC, target_RC, *is_first_RC = self._parallel.gather(torch.stack(numbers)).unbind(1)
        top_C = highest_RC.amax(dim=0)
        total_C = (sums_RC * (highest_RC - top_C).exp()).sum(dim=0)
        probabilities_CV = exponentials_CV.mul_(((highest_C - top_C).exp() / total_C)[:, None])
        # Parts are in the order of the vocabulary: the first part with the highest logit has the arg max.
        part_1C = highest_RC.argmax(dim=0, keepdim=True)
        is_correct_C = is_first_RC[0].gather(0, part_1C)[0] > 0 if is_first_RC else None
        return Partition(probabilities_CV, top_C + total_C.log(), target_RC.sum(dim=0), is_correct_C)

    def _target(self, labels: Labels) -> tuple[Tensor, Tensor | float]:
        index_C, is_here_C = self._parallel.local_rows(labels.index_M, self._num_tokens)
        return index_C[:, None], is_here_C[:, None].float()
