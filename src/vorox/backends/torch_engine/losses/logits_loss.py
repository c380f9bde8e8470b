"""Cross-entropy loss on the logits of a model, for models that have no separate head.

The same objective as ``loss.py``, by autograd: ``(1 - s) nll + s mean_V(-log p) + z lse^2``, or a user function
(``loss.name``), summed over targets.

Shape legend: M positions of a micro-batch, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vorox.backends.torch_engine.device.labels import Labels
from vorox.backends.torch_engine.losses.loss import LossSums, user_loss
from vorox.core.batch import IGNORED_LABEL
from vorox.core.schema import LossConfig


class LogitsLoss:
    """Cross entropy with label smoothing and z-loss, from full logits that the model has computed.

    Args:
        config: Label smoothing and z-loss.
        count_correct: Whether training counts correct targets.
    """

    def __init__(self, config: LossConfig, *, count_correct: bool) -> None:
        self._smoothing, self._z_weight = config.label_smoothing_fraction, config.z_loss_weight
        self._count_correct, self._function = count_correct, user_loss(config.name)

    def train(self, logits_MV: Tensor, labels: Labels) -> tuple[Tensor, LossSums]:
        """Return the objective, summed over targets, and the loss sums."""
        log_partition_M = torch.logsumexp(logits_MV, dim=1)
        nll_M = log_partition_M - logits_MV.gather(1, labels.index_M[:, None])[:, 0]
        if self._function is not None:
            kept_M = labels.kept_M
            labels_M = labels.index_M if kept_M is None else labels.index_M.masked_fill(~kept_M, IGNORED_LABEL)
            objective = self._function(logits_MV, labels_M)
            with torch.no_grad():
                sums = self._sums(logits_MV, nll_M, log_partition_M, labels, count_correct=self._count_correct)
            return objective, sums._replace(objective=objective.detach().to(sums.cross_entropy.dtype))
        objective_M = nll_M
        if self._smoothing:
            objective_M = nll_M.lerp(log_partition_M - logits_MV.mean(1), self._smoothing)
        if self._z_weight:
            objective_M = objective_M + self._z_weight * log_partition_M.square()
        with torch.no_grad():
            sums = self._sums(logits_MV, nll_M, log_partition_M, labels, count_correct=self._count_correct)
        return _total(objective_M, labels), sums

    @torch.no_grad()
    def evaluate(self, logits_MV: Tensor, labels: Labels) -> LossSums:
        """Return the loss sums; correct targets are counted."""
        log_partition_M = torch.logsumexp(logits_MV, dim=1)
        nll_M = log_partition_M - logits_MV.gather(1, labels.index_M[:, None])[:, 0]
        return self._sums(logits_MV, nll_M, log_partition_M, labels, count_correct=True)

    def _sums(
        self, logits_MV: Tensor, nll_M: Tensor, log_partition_M: Tensor, labels: Labels, *, count_correct: bool
    ) -> LossSums:
        correct_M = torch.zeros_like(nll_M)
        if count_correct:
            correct_M = (logits_MV.argmax(1) == labels.index_M).float()  # of equal logits, the first
        cross_entropy = _total(nll_M, labels)
        squares, correct = _total(log_partition_M.square(), labels), _total(correct_M, labels)
        return LossSums(cross_entropy, squares, correct, torch.zeros_like(cross_entropy))


def _total(values_M: Tensor, labels: Labels) -> Tensor:
    if labels.kept_M is not None:
        values_M = torch.where(labels.kept_M, values_M, 0.0)
    return values_M.sum(dtype=torch.float32 if values_M.device.type == "mps" else torch.float64)
