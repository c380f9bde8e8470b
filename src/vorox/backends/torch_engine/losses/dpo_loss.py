"""Direct preference optimization: the loss of preference pairs (Rafailov et al., arXiv 2305.18290).

With ``r = beta (log p(answer) - log p_reference(answer))`` of each answer, the loss of a pair is
``-(1 - s) log sigmoid(r_chosen - r_rejected) - s log sigmoid(r_rejected - r_chosen)``; ``s`` is the probability that a
label is wrong (conservative DPO). Log-probabilities are summed over the targets of an answer in fp64, sums are over
pairs; the caller divides by their global number.

Shape legend: M positions of a micro-batch, K targets, P pairs, H = 2 P conversations, L targets of the longest one,
C targets of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vorox.backends.torch_engine.device.device_copy import to_device
from vorox.core.preference_pairs import Pairs
from vorox.core.schema import LossConfig, RunConfig


class PairSums(NamedTuple):
    """Sums over the pairs, on the device.

    Attributes:
        loss: The loss of DPO.
        num_correct: Pairs whose chosen answer has the higher reward.
        chosen_reward: ``r`` of the chosen answers.
        rejected_reward: ``r`` of the rejected answers.
    """

    loss: Tensor
    num_correct: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor

    def metrics(self, config: RunConfig, count: int) -> dict[str, Tensor]:
        """Return the means over ``count`` pairs, by metric name."""
        del config
        return {
            "rewards/accuracy": self.num_correct / count,
            "rewards/margin": (self.chosen_reward - self.rejected_reward) / count,
            "rewards/chosen": self.chosen_reward / count,
            "rewards/rejected": self.rejected_reward / count,
        }


class DeviceTargets(NamedTuple):
    """The targets of a micro-batch on the device (``core/preference_pairs.Pairs``)."""

    position_K: Tensor
    label_K: Tensor
    target_HL: Tensor


def targets_to_device(pairs: Pairs, device: torch.device) -> DeviceTargets:
    """Copy the targets of pairs to the device."""
    return DeviceTargets(*(to_device(array, device) for array in (pairs.position_K, pairs.label_K, pairs.target_HL)))


def answer_log_probs(log_prob_K: Tensor, targets: DeviceTargets) -> Tensor:
    """Return the log-probability of each answer, ``[H]``; the sum does not depend on an order of atomics."""
    padded = F.pad(log_prob_K.to(torch.float32 if log_prob_K.device.type == "mps" else torch.float64), (0, 1))
    return padded[targets.target_HL].sum(1)


def dpo_loss(
    policy_H: Tensor, reference_H: Tensor, config: LossConfig, masked_P: npt.NDArray[np.bool_] | None = None
) -> tuple[Tensor, PairSums]:
    """Return the loss, summed over the pairs that are not masked, and the sums for metrics.

    A masked pair has rewards of zero, because its conversations have no targets (``Pairs.target_HL``).
    """
    reward_P2 = config.dpo_beta * (policy_H - reference_H).view(-1, 2)
    margin_P = reward_P2[:, 0] - reward_P2[:, 1]
    smoothing = config.dpo_label_smoothing_fraction
    log_likelihood_P = (1 - smoothing) * F.logsigmoid(margin_P) + smoothing * F.logsigmoid(-margin_P)
    if masked_P is not None:
        log_likelihood_P = log_likelihood_P.masked_fill(to_device(masked_P, margin_P.device), 0)
    loss = -log_likelihood_P.sum()
    chosen, rejected = reward_P2.detach().sum(0)
    return loss, PairSums(loss.detach(), (margin_P.detach() > 0).sum().to(loss.dtype), chosen, rejected)


def log_probs_of_logits(logits_MV: Tensor, targets: DeviceTargets) -> Tensor:
    """Return the log-probability of each target, ``[K]``, from the logits of all positions."""
    return _at_labels(logits_MV[targets.position_K], targets.label_K)


def log_probs_of_hidden(
    hidden_MD: Tensor, targets: DeviceTargets, head: Callable[[Tensor], Tensor], chunk_tokens: int
) -> Tensor:
    """Return the log-probability of each target, ``[K]``; the backward pass computes the logits of a chunk again.

    Args:
        hidden_MD: Final hidden state.
        targets: The targets.
        head: (hidden_CD) -> logits_CV, fp32.
        chunk_tokens: Targets whose logits are materialised together.
    """
    hidden_KD = hidden_MD[targets.position_K]
    chunks = zip(hidden_KD.split(chunk_tokens), targets.label_K.split(chunk_tokens), strict=True)
    compute = partial(checkpoint, partial(_chunk_log_probs, head), use_reentrant=False, preserve_rng_state=False)
    return torch.cat([cast(Tensor, compute(hidden_CD, label_C)) for hidden_CD, label_C in chunks])


def _chunk_log_probs(head: Callable[[Tensor], Tensor], hidden_CD: Tensor, label_C: Tensor) -> Tensor:
    return _at_labels(head(hidden_CD), label_C)


def _at_labels(logits_CV: Tensor, label_C: Tensor) -> Tensor:
    return logits_CV.gather(1, label_C[:, None])[:, 0] - torch.logsumexp(logits_CV, dim=1)
