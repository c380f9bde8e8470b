"""Loss and gradients against F.cross_entropy in float64, for every term, chunking and precision."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vorox.backends.torch_engine.device import matrix_products
from vorox.backends.torch_engine.device.labels import Labels, labels_to_device
from vorox.backends.torch_engine.device.matrix_products import Products
from vorox.backends.torch_engine.losses.loss import FusedLinearLoss, LossSums
from vorox.core.batch import IGNORED_LABEL
from vorox.core.schema import LossConfig
from vorox.planning import memory_estimate

pytestmark = pytest.mark.torch
POSITIONS, WIDTH, VOCAB = 150, 24, 67
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)


@dataclass(frozen=True)
class Case:
    hidden: Tensor
    head: nn.Parameter
    labels: np.ndarray

    @property
    def targets(self) -> Labels:
        return labels_to_device(self.labels, self.hidden.device)


def case(*, ignored_fraction: float = 0.0, spread: float = 1.0, seed: int = 3) -> Case:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, VOCAB, (1, POSITIONS), np.int32)
    labels[generator.random(labels.shape) < ignored_fraction] = IGNORED_LABEL
    head = nn.Parameter(torch.from_numpy(generator.normal(0, spread, (VOCAB, WIDTH)).astype(np.float32)))
    head.grad = torch.zeros_like(head)
    return Case(torch.from_numpy(generator.normal(0, 1, (POSITIONS, WIDTH)).astype(np.float32)), head, labels)


def head_loss(
    given: Case, config: LossConfig | None = None, *, dtype: torch.dtype = torch.float32, onednn: bool = False,
    is_compiled: bool = False,
) -> FusedLinearLoss:  # fmt: skip
    vocab_size, device = given.head.shape[0], given.head.device
    return FusedLinearLoss(
        config or LossConfig(), vocab_size, device, Products(use_onednn=onednn), dtype, count_correct=True,
        compiled=is_compiled,
    )  # fmt: skip


def train(
    loss: FusedLinearLoss, given: Case, scale: float, loss_scale: Tensor | None = None
) -> tuple[LossSums, Tensor]:
    """Loss sums, and the gradient with respect to the hidden state; the head's is in its ``grad``."""
    hidden = given.hidden.detach().requires_grad_()
    objective, sums = loss.train(hidden, given.head, given.targets, scale, loss_scale)
    objective.backward()
    assert hidden.grad is not None
    return sums, hidden.grad


def oracle(given: Case, config: LossConfig, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Plain cross entropy, and gradients of the whole objective, in float64 over logits that stand whole."""
    hidden = given.hidden.double().requires_grad_()
    head = given.head.detach().double().requires_grad_()
    logits = hidden @ head.T
    labels = torch.from_numpy(given.labels[0]).long()
    objective = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=config.label_smoothing_fraction)
    log_partition = logits.logsumexp(-1)[labels != IGNORED_LABEL]
    objective = objective + config.z_loss_weight * log_partition.square().sum()
    (objective * scale).backward()
    plain = F.cross_entropy(logits.detach(), labels, reduction="sum")
    return plain, log_partition.square().sum(), hidden.grad, head.grad


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, POSITIONS, 10_000])
@pytest.mark.parametrize("ignored_fraction", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("terms", [{}, {"z_loss_weight": 0.01}, {"label_smoothing_fraction": 0.2},
                                   {"z_loss_weight": 0.01, "label_smoothing_fraction": 0.2}], ids=str)  # fmt: skip
def test_against_cross_entropy(chunk_tokens: int, ignored_fraction: float, terms: dict[str, float]) -> None:
    config, given, scale = LossConfig(chunk_tokens=chunk_tokens, **terms), case(ignored_fraction=ignored_fraction), 0.01
    plain, squares, d_hidden, d_head = oracle(given, config, scale)
    sums, found = train(head_loss(given, config), given, scale)
    torch.testing.assert_close(sums.cross_entropy, plain, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.double(), d_hidden, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(given.head.grad.double(), d_head, rtol=1e-5, atol=1e-7)
    if config.z_loss_weight:
        torch.testing.assert_close(sums.squared_log_partition, squares, rtol=1e-6, atol=1e-9)


def test_gradients_add_to_what_is_there() -> None:
    given = case()
    given.head.grad.fill_(2.0)
    _, _, _, d_head = oracle(given, LossConfig(), 1.0)
    train(head_loss(given), given, 1.0)
    torch.testing.assert_close(given.head.grad.double() - 2, d_head, rtol=1e-5, atol=1e-4)


def test_the_full_logits_never_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of the computation has more positions than a chunk and the vocabulary at once."""
    given, largest = case(), 0
    original = Products.__call__

    def measured(self: Products, a: Tensor, b: Tensor) -> Tensor:
        nonlocal largest
        result = original(self, a, b)
        if result.shape[-1] == VOCAB:
            largest = max(largest, result.shape[0])
        return result

    monkeypatch.setattr(Products, "__call__", measured)
    train(head_loss(given, LossConfig(chunk_tokens=16)), given, 1.0)
    assert largest == 16


def test_chunks_stay_in_the_cache_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_estimate, "CPU_CHUNK_BYTES", 4 * VOCAB * 100)
    monkeypatch.setattr(memory_estimate, "_LEAST_CPU_CHUNK_POSITIONS", 1)
    given = case()
    chunks = head_loss(given, LossConfig(chunk_tokens=1000))._chunks(given.hidden, given.targets)
    assert [len(hidden) for hidden, _ in chunks] == [100, 50]


def test_unlikely_targets_do_not_underflow() -> None:
    """A probability of exp(-500) is 0 in fp32; its logarithm is not."""
    given = case(spread=60.0)
    plain, _, d_hidden, _ = oracle(given, LossConfig(), 1.0)
    sums, found = train(head_loss(given), given, 1.0)
    assert float(plain) / POSITIONS > 200
    torch.testing.assert_close(sums.cross_entropy, plain, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.double(), d_hidden, rtol=1e-4, atol=0.01)  # of weights around 60


def test_evaluation_counts_and_sums() -> None:
    given = case(ignored_fraction=0.4)
    logits = given.hidden.double() @ given.head.detach().double().T
    labels = torch.from_numpy(given.labels[0]).long()
    sums = head_loss(given, LossConfig(z_loss_weight=1.0, label_smoothing_fraction=0.5)).evaluate(
        given.hidden, given.head, given.targets
    )
    torch.testing.assert_close(sums.cross_entropy, F.cross_entropy(logits, labels, reduction="sum"), rtol=1e-6, atol=0)
    assert int(sums.num_correct) == int((logits.argmax(-1) == labels).sum()) > 0
    assert not given.head.grad.any()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("terms", [{}, {"z_loss_weight": 0.01, "label_smoothing_fraction": 0.2}], ids=str)
def test_positions_that_are_not_trained_on_contribute_nothing(
    value: float, dtype: torch.dtype, terms: dict[str, float]
) -> None:
    config, given = LossConfig(**terms), case()
    given.labels[0, 10] = IGNORED_LABEL
    found = []
    for held in (0.5, value):
        given.hidden[10] = held
        given.head.grad.zero_()
        sums, d_hidden = train(head_loss(given, config, dtype=dtype), given, 0.01)
        found.append((sums.cross_entropy, sums.squared_log_partition, d_hidden, given.head.grad.clone()))
    for clean, dirty in zip(*found, strict=True):
        assert torch.isfinite(clean).all()
        assert torch.equal(clean, dirty)
    assert not found[1][2][10].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_trained_position_shows_in_the_loss(value: float) -> None:
    given = case()
    given.hidden[3, 0] = value
    sums, _ = train(head_loss(given), given, 1.0)
    assert not math.isfinite(float(sums.cross_entropy))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_and_carries_the_loss_scale(dtype: torch.dtype) -> None:
    given = case()
    plain, _, d_hidden, d_head = oracle(given, LossConfig(), 1e-3)
    sums, found = train(head_loss(given, dtype=dtype), given, 1e-3, torch.tensor(256.0))
    tolerance = 0.02 if dtype == torch.bfloat16 else 0.003
    assert float(sums.cross_entropy) == pytest.approx(float(plain), rel=tolerance)
    assert found.dtype == torch.float32
    for mine, theirs in ((found, d_hidden), (given.head.grad, d_head)):
        error = (mine.double() / 256 - theirs).norm() / theirs.norm()
        assert float(error) < tolerance


def num_correct(given: Case) -> int:
    labels = given.labels[0]
    highest = (given.hidden.double() @ given.head.detach().double().T).argmax(1).numpy()
    return int(((highest == labels) & (labels != IGNORED_LABEL)).sum())


def test_products_for_the_head_are_added_in_fp32_where_the_device_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 on CUDA (an oracle here); elsewhere rounded to half precision before."""
    added: list[torch.dtype] = []

    def add(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor, dtype: torch.dtype, *, alpha: float, out: Tensor) -> None:
        added.append(dtype)
        out.add_(a_MK.float() @ b_KN.float(), alpha=alpha)

    monkeypatch.setattr(matrix_products, "_addmm_dtype_out", add)
    a_KM, b_KN = torch.randn(40, 8).bfloat16(), torch.randn(40, 6).bfloat16()
    exact_MN = a_KM.double().T @ b_KN.double()
    for is_exact, tolerance in ((False, 0.02), (True, 1e-5)):
        sum_MN = torch.zeros(8, 6)
        Products(use_onednn=False, has_fp32_sums=is_exact).add_to(sum_MN, a_KM, b_KN)
        error = float((sum_MN.double() - exact_MN).norm() / exact_MN.norm())
        assert error < tolerance
        assert (error > 1e-4) == (not is_exact)
    assert added == [torch.float32]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own modules
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("terms", [{}, {"z_loss_weight": 0.01, "label_smoothing_fraction": 0.2}], ids=str)
def test_compiled_chunks(device: str, dtype: torch.dtype, terms: dict[str, float]) -> None:
    """Two full chunks and a rest, with and without positions that have no target; new numbers every time."""
    torch._dynamo.reset()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}[dtype]
    config, scale = LossConfig(chunk_tokens=POSITIONS * 2 // 5, **terms), 1e-3
    for ignored_fraction in (0.0, 0.3):
        given = case(ignored_fraction=ignored_fraction, seed=random.randrange(1 << 30))
        plain, squares, d_hidden, d_head = oracle(given, config, scale)
        at = Case(given.hidden.to(device), nn.Parameter(given.head.detach().to(device)), given.labels)
        before = d_head.abs().mean().item() * torch.randn_like(at.head)
        at.head.grad = before.clone()
        loss_scale = torch.tensor(16.0 if dtype == torch.float16 else 1.0, device=device)
        sums, found = train(head_loss(at, config, dtype=dtype, is_compiled=True), at, scale, loss_scale)
        assert float(sums.cross_entropy) == pytest.approx(float(plain), rel=tolerance)
        assert float(sums.num_correct) == pytest.approx(float(num_correct(given)), abs=3)
        if config.z_loss_weight:
            assert float(sums.squared_log_partition) == pytest.approx(float(squares), rel=tolerance)
        for mine, theirs in ((found, d_hidden), (at.head.grad - before, d_head)):
            assert mine.dtype == torch.float32
            error = (mine.cpu().double() / float(loss_scale) - theirs).norm() / theirs.norm()
            assert float(error) < tolerance


def test_with_both_libraries() -> None:
    given = case()
    first, d_first = train(head_loss(given), given, 1.0)
    second, d_second = train(head_loss(given, onednn=True), given, 1.0)
    assert float(first.cross_entropy) == pytest.approx(float(second.cross_entropy), rel=1e-6)
    torch.testing.assert_close(d_first, d_second, rtol=1e-5, atol=1e-5)
