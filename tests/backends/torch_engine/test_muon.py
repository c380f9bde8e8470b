"""Muon: what the orthogonalisation does to singular values, and whole updates against torch.optim.Muon."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backends.torch_engine.small_models import GPT2, LLAMA, LR, batch_of, make, random_rows
from vorox.backends.torch_engine.optimizers import muon
from vorox.models.optimizer_groups import ORTHOGONAL
from vorox.planning import cpu_memory

pytestmark = pytest.mark.torch


def newton_schulz(matrix: Tensor) -> Tensor:
    """The published iteration for one matrix, in float64."""
    x = matrix.double()
    if x.shape[0] > x.shape[1]:
        return newton_schulz(matrix.T).T
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (24, 8)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    matrices = torch.from_numpy(np.random.default_rng(1).normal(size=(3, *shape)).astype(np.float32))
    matrices[1] *= 1e-6
    matrices[2] *= 1e6
    found = muon.orthogonalise(matrices)
    for matrix, result in zip(matrices, found, strict=True):
        values = torch.linalg.svdvals(result)
        assert float(values.min()) > 0.4, "nothing that matters is lost"
        assert float(values.max()) < 1.3
        torch.testing.assert_close(result.double(), newton_schulz(matrix), rtol=1e-3, atol=1e-3)
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        assert float((u.T @ result @ v.T).diagonal().min()) > 0.4, "the singular vectors stay"


def test_a_zero_gradient_stays_zero() -> None:
    assert not muon.orthogonalise(torch.zeros(1, 4, 6)).any()


def test_updates_against_pytorch() -> None:
    """Every canonical matrix for itself, though queries, keys and values are stored as one.

    PyTorch iterates in bf16, hence the tolerance; the iteration itself is held to float64 above.
    """
    engine = make(GPT2, optimizer__name="muon", optimizer__clip_norm=None, optimizer__muon_lr=0.05)
    matrices = {p.name for p in engine._spec.parameters if p.kind == "matrix"}
    theirs = {
        name: torch.nn.Parameter(view.detach().clone())
        for name, view in engine.parameters.whole({ORTHOGONAL: engine.parameters.values[ORTHOGONAL]})
    }
    assert set(theirs) == matrices
    oracle = torch.optim.Muon(theirs.values(), lr=1.0, weight_decay=0.1, momentum=0.95, nesterov=True)
    for step in range(3):
        lr = LR / (step + 1)
        engine.train_step(batch_of(random_rows(8, step)), lr=lr, weight_decay=0.1)
        for name, gradient in engine.parameters.whole({ORTHOGONAL: engine.parameters.gradients[ORTHOGONAL]}):
            theirs[name].grad = gradient.clone()
        oracle.param_groups[0]["lr"] = 0.05 * lr / LR
        before = {name: value.detach().clone() for name, value in theirs.items()}
        oracle.step()
        for name, view in engine.parameters.whole({ORTHOGONAL: engine.parameters.values[ORTHOGONAL]}):
            change, expected = view.detach() - before[name], theirs[name].detach() - before[name]
            assert float((change - expected).norm() / expected.norm()) < 0.06, name
            theirs[name].data.copy_(view)  # compare single updates, not the divergence of trajectories


def test_everything_else_is_adamw() -> None:
    muon_engine = make(GPT2, optimizer__name="muon")
    adamw_engine = make(GPT2)
    for engine in (muon_engine, adamw_engine):
        engine.train_step(batch_of(random_rows(8)), lr=LR, weight_decay=0.1)
    expected = dict(adamw_engine.export_weights())
    for parameter in muon_engine._spec.parameters:
        if parameter.kind != "matrix":
            found = dict(muon_engine.export_weights())[parameter.name]
            np.testing.assert_allclose(found, expected[parameter.name], rtol=1e-6, atol=1e-7, err_msg=parameter.name)
    assert set(muon_engine.optimizer.buffers) == {"exp_avg", "exp_avg_sq", "momentum"}
    state = sum(b.numel() for groups in muon_engine.optimizer.buffers.values() for (b,) in groups.values())
    assert state < 2 * sum(buffer.numel() for (buffer,) in muon_engine.parameters.values.values())


def test_learns() -> None:
    engine, given = make(optimizer__name="muon", optimizer__muon_lr=0.02), batch_of(random_rows(4))
    losses = [engine.train_step(given, lr=LR, weight_decay=0.1).fetch().loss for _ in range(30)]
    assert losses[-1] < losses[0] - 1.0


class NewTensors(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, as long as they exist; ``peak`` is the largest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._seen = weakref.WeakSet[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._seen.update(one.untyped_storage() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor))
        result = func(*args, **kwargs)
        for storage in (one.untyped_storage() for one in tree_leaves(result) if isinstance(one, Tensor)):
            if storage not in self._seen:
                self._seen.add(storage)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.bytes)
        return result

    def _free(self, num_bytes: int) -> None:
        self.bytes -= num_bytes


@pytest.mark.parametrize(
    "model",
    [GPT2 | {"num_heads": 2}, LLAMA | {"intermediate_size": 640}, LLAMA | {"num_kv_heads": 1, "num_layers": 12}],
    ids=["square", "wide", "many"],
)
@pytest.mark.parametrize("frozen", [[], [{"match": "blocks.1.*", "frozen": True}]], ids=["all", "a frozen block"])
def test_an_update_takes_the_memory_that_the_plan_expects(model: dict[str, Any], frozen: list[Any]) -> None:
    """The oracle counts the tensors of an update while they exist, without the products' own working memory."""
    engine = make(
        {"hidden_size": 64, "num_layers": 3, "num_heads": 4, **model}, optimizer__name="muon", optimizer__groups=frozen
    )
    engine.train_step(batch_of(random_rows(4)), lr=LR, weight_decay=0.1)
    buffers = engine.parameters.gradients[ORTHOGONAL], engine.optimizer.momentum[ORTHOGONAL]
    one = torch.ones(())
    with torch.no_grad(), NewTensors() as found:
        muon.update(
            engine.parameters, ORTHOGONAL, *buffers, one, one > 0, layouts=engine.optimizer.layouts, lr=LR,
                weight_decay=0.1, momentum=0.9,
        )  # fmt: skip
    (shapes,) = cpu_memory._muon_shapes(engine._spec, engine._config)
    assert found.peak == pytest.approx(4 * cpu_memory._update_elements(shapes), rel=0.02)
