"""Optimizers by import path: updates of torch.optim, state in checkpoints, and what is refused before step 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from backends.torch_engine.small_models import GPT2, LLAMA, make, train
from backends.torch_engine.test_checkpoint import save
from backends.torch_engine.test_optim import LOSS, set_gradients, state_of, values_of
from vorox.core.errors import ConfigError

pytestmark = pytest.mark.torch

OPTIMIZERS = """
import torch


def momentum(groups, lr):
    return torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True)


class Drifting(torch.optim.Optimizer):
    \"\"\"State of every kind: a number per parameter, a bf16 moment, a number in the group, a copy of the start.\"\"\"

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "distance": 1.0, "fixed": 3})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["distance"] *= 1.5
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["count"], state["start"] = 0, parameter.clone()
                    state["average"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                state["count"] += 1
                state["average"].lerp_(parameter.grad.bfloat16(), 0.5)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(state["average"], alpha=group["lr"] * group["distance"] / state["count"])
                parameter.lerp_(state["start"], 0.1)


class Factored(torch.optim.Optimizer):
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = parameter.grad.square().sum(0)


class Failing(torch.optim.SGD):
    def step(self):
        raise ArithmeticError("as it does")


def undecayed(groups, lr):
    return torch.optim.Rprop(groups, lr=lr)


def no_optimizer(groups, lr):
    return groups
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(OPTIMIZERS, encoding="utf-8")
    return tmp_path / "mine.py"


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("name", ["torch.optim:AdamW", "torch.optim:NAdam", "torch.optim:Adagrad", "momentum"])
def test_against_torch_optim(name: str, clip_norm: float | None, file: Path) -> None:
    """Six steps on plain tensors, with changing rates, decay of matrices only, and clipping."""
    path = name if ":" in name else f"{file}:{name}"
    engine = make(GPT2, optimizer__name=path, optimizer__clip_norm=clip_norm)
    decayed = {row.name for row in engine._spec.parameters if row.decay}
    theirs = {key: value.requires_grad_() for key, value in values_of(engine).items()}
    groups = [
        {"params": [theirs[key] for key in theirs if (key in decayed) == is_decayed]} for is_decayed in (True, False)
    ]
    options: dict[str, Any] = {"momentum": 0.9, "nesterov": True} if name == "momentum" else {}
    kind = torch.optim.SGD if name == "momentum" else getattr(torch.optim, name.rpartition(":")[2])
    oracle = kind(groups, lr=1e-3, **options)
    for step in range(6):
        lr, weight_decay = 1e-2 / (step + 1), 0.1 + 0.01 * step
        for key, gradient in set_gradients(engine, step).items():
            theirs[key].grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_(list(theirs.values()), clip_norm or float("inf"))
        for group, decay in zip(oracle.param_groups, (weight_decay, 0.0), strict=True):
            group["lr"], group["weight_decay"] = lr, decay
        oracle.step()
        engine.optimizer.step(lr=lr, weight_decay=weight_decay, loss=LOSS)
    for key, value in values_of(engine).items():
        torch.testing.assert_close(value, theirs[key].detach(), rtol=1e-5, atol=2e-6, msg=key)


@pytest.mark.parametrize("name", ["momentum", "Drifting", "torch.optim:SGD", "torch.optim:ASGD"])
def test_state_survives_a_checkpoint(name: str, file: Path, tmp_path: Path) -> None:
    """Bit for bit, also in an engine that has trained before, and from a checkpoint before the first step."""
    settings: dict[str, Any] = {"optimizer__name": name if ":" in name else f"{file}:{name}"}
    engine = make(LLAMA, **settings)
    start = save(engine, tmp_path / "start")
    losses = train(engine, 2)
    path, other = save(engine, tmp_path / "state"), make(LLAMA, run__seed=9, **settings)
    train(other, 3, start=50)
    other.load(path)
    assert other.fingerprint() == engine.fingerprint()
    assert train(other, 2, start=2) == train(engine, 2, start=2)
    assert other.fingerprint() == engine.fingerprint()
    other.load(start)
    assert train(other, 2) == losses


def test_state_in_the_files(file: Path) -> None:
    engine = make(LLAMA, optimizer__name=f"{file}:Drifting")
    assert not engine.optimizer.buffers
    train(engine, 3)
    assert set(engine.optimizer.buffers) == {"start", "average"}
    counters = {name: float(value) for name, value in engine.optimizer.counters.items()}
    assert counters["updates"] == counters["count.embedding.weight"] == 3
    assert counters["group.0.distance"] == counters["group.1.distance"] == 1.5**3
    assert not any("fixed" in name for name in counters)


def test_nonfinite_steps_change_nothing(file: Path) -> None:
    engine = make(LLAMA, optimizer__name=f"{file}:Drifting")
    train(engine, 2)
    before = state_of(engine)
    set_gradients(engine, 3, factor=float("nan"))
    assert not engine.optimizer.step(lr=0.1, weight_decay=0.1, loss=LOSS).finite
    assert all(torch.equal(before[name], tensor) for name, tensor in state_of(engine).items())


@pytest.mark.parametrize(
    ("name", "settings", "what"),
    [
        ("Factored", {}, r"its state 'rows' of .* cannot be saved"),
        ("Failing", {}, "its step fails with ArithmeticError: as it does"),
        ("undecayed", {}, "has no weight decay"),
        ("no_optimizer", {"optimizer__weight_decay": 0.0}, "has no param_groups"),
        ("torch.optim:LBFGS", {"optimizer__weight_decay": 0.0}, "is not usable as an optimizer"),
        ("torch.optim:Nothing", {}, "Cannot import optimizer"),
    ],
)
def test_refused_before_step_1(name: str, settings: dict[str, Any], what: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=what) as refused:
        make(LLAMA, optimizer__name=name if ":" in name else f"{file}:{name}", **settings)
    assert refused.value.hint
    assert refused.value.where.startswith("optimizer.")
