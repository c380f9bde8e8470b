"""A target is correct if it is the arg max of its logits: of equal logits, which half precision makes often, the first.

Whole numbers make logits equal in every precision, so numpy's arg max is the oracle for all losses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vorox.backends.torch_engine.device.labels import Labels, labels_to_device
from vorox.backends.torch_engine.device.matrix_products import Products
from vorox.backends.torch_engine.losses.compiled_loss import _chunk_loss
from vorox.backends.torch_engine.losses.logits_loss import LogitsLoss
from vorox.backends.torch_engine.losses.loss import FusedLinearLoss
from vorox.backends.torch_engine.losses.vocabulary_loss import VocabularyLoss
from vorox.core.batch import IGNORED_LABEL
from vorox.core.schema import LossConfig

pytestmark = pytest.mark.torch
POSITIONS, WIDTH, VOCAB = 200, 3, 12


class Case:
    def __init__(self) -> None:
        rng = np.random.default_rng()
        self.hidden = rng.integers(0, 2, (POSITIONS, WIDTH)).astype(np.float32)
        self.head = rng.integers(0, 2, (VOCAB, WIDTH)).astype(np.float32)
        self.labels = rng.integers(0, VOCAB, (1, POSITIONS), np.int32)
        self.labels[rng.random(self.labels.shape) < 0.2] = IGNORED_LABEL
        logits = self.hidden @ self.head.T
        self.expected = int((logits.argmax(1) == self.labels[0]).sum())
        tied = np.take_along_axis(logits, np.maximum(self.labels, 0).T, 1)[:, 0] == logits.max(1)
        assert int((tied & (self.labels[0] >= 0)).sum()) > self.expected, "without ties, nothing is tested"

    @property
    def targets(self) -> Labels:
        return labels_to_device(self.labels, torch.device("cpu"))

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.hidden).requires_grad_(), torch.from_numpy(self.head).requires_grad_()


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fused_loss(dtype: torch.dtype) -> None:
    given = Case()
    loss = FusedLinearLoss(
        LossConfig(chunk_tokens=64), VOCAB, torch.device("cpu"), Products(use_onednn=False), dtype, count_correct=True
    )
    hidden, head = given.tensors
    assert int(loss.evaluate(hidden, head, given.targets).num_correct) == given.expected
    assert int(loss.train(hidden, head, given.targets, 1.0)[1].num_correct) == given.expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_of_whole_logits(dtype: torch.dtype) -> None:
    given, loss = Case(), LogitsLoss(LossConfig(), count_correct=True)
    hidden, head = (tensor.detach().to(dtype) for tensor in given.tensors)
    logits = (hidden @ head.T).float()
    assert int(loss.evaluate(logits, given.targets).num_correct) == given.expected
    assert int(loss.train(logits, given.targets)[1].num_correct) == given.expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_chunk_that_is_compiled(dtype: torch.dtype) -> None:
    given = Case()
    hidden, head = (tensor.detach().to(dtype) for tensor in given.tensors)
    labels = given.targets
    _, sums = _chunk_loss(
        hidden @ head.T, labels.index_M, labels.kept_M, torch.tensor(1.0), smoothing=0.0, z_weight=0.0,
        count_correct=True, sum_dtype=torch.float64,
    )  # fmt: skip
    assert int(sums["num_correct"]) == given.expected


class OneOfTwoRanks:
    """A rank of two that divide the vocabulary; the first pass records what each sends, the second answers."""

    sent: dict[int, list[Tensor]]

    def __init__(self, rank: int, sent: dict[int, list[Tensor]], *, answers: bool) -> None:
        self._rank, self._sent, self._answers, self._index = rank, sent, answers, 0

    def gather(self, x: Tensor) -> Tensor:
        if not self._answers:
            self._sent[self._rank].append(x)
            return torch.stack([x, x])
        self._index += 1
        return torch.stack([self._sent[rank][self._index - 1] for rank in (0, 1)])

    def local_rows(self, index: Tensor, num: int) -> tuple[Tensor, Tensor]:
        assert num == VOCAB
        first = self._rank * (VOCAB // 2)
        is_here = (index >= first) & (index < first + VOCAB // 2)
        return torch.where(is_here, index - first, 0), is_here


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_divided_vocabulary(dtype: torch.dtype) -> None:
    given, sent = Case(), {0: list[Tensor](), 1: list[Tensor]()}
    hidden, head = (tensor.detach() for tensor in given.tensors)
    found: list[int] = []
    for answers in (False, True):
        for rank in (0, 1):
            parallel: Any = OneOfTwoRanks(rank, sent, answers=answers)
            loss = VocabularyLoss(
                parallel, VOCAB, LossConfig(chunk_tokens=64), VOCAB, torch.device("cpu"), Products(use_onednn=False),
                dtype, count_correct=True,
            )  # fmt: skip
            part = head[rank * VOCAB // 2 : (rank + 1) * VOCAB // 2]
            found.append(int(loss.evaluate(hidden, part, given.targets).num_correct))
    assert found[2:] == [given.expected, given.expected]


@pytest.mark.jax
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_of_jax(dtype: str) -> None:
    jnp = pytest.importorskip("jax.numpy")
    from vorox.backends.jax_engine import loss

    given = Case()
    inputs = jnp.asarray(given.hidden[None], dtype), jnp.asarray(given.head), jnp.asarray(given.labels)
    assert int(loss.evaluate(*inputs, 64).num_correct) == given.expected
    assert int(loss.train(*inputs, LossConfig(chunk_tokens=64), jnp.float32(1.0))[0].num_correct) == given.expected
