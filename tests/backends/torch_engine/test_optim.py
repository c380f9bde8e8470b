"""Updates against torch.optim.AdamW, clipping against clip_grad_norm_, and steps that must not change anything."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from backends.torch_engine.small_models import GPT2, batch_of, configuration, engine_of, make, random_rows, train
from vorox.backends.torch_engine.engine import TorchEngine
from vorox.backends.torch_engine.optimizers import optimizer as optim
from vorox.core.config import load_config
from vorox.core.errors import ConfigError
from vorox.core.schema.runtime import LARGEST_LOSS_SCALE

pytestmark = pytest.mark.torch
LOSS = torch.tensor(1.0)


def set_gradients(engine: TorchEngine, seed: int, factor: float = 1.0) -> dict[str, Tensor]:
    """Random gradients for every canonical parameter; returns copies."""
    generator = np.random.default_rng(seed)
    gradients: dict[str, Tensor] = {}
    for name, view in engine.parameters.whole(engine.parameters.gradients):
        gradients[name] = torch.from_numpy(generator.normal(0, factor, view.shape).astype(np.float32))
        view.copy_(gradients[name])
    return gradients


def values_of(engine: TorchEngine) -> dict[str, Tensor]:
    return {name: view.detach().clone() for name, view in engine.parameters.whole(engine.parameters.values)}


def state_of(engine: TorchEngine) -> dict[str, Tensor]:
    buffers = {f"value {group}": buffer for group, (buffer,) in engine.parameters.values.items()}
    for kind, groups in engine.optimizer.buffers.items():
        buffers |= {f"{kind} {group}": buffer for group, (buffer,) in groups.items()}
    return {name: buffer.clone() for name, buffer in (buffers | dict(engine.optimizer.counters)).items()}


@pytest.mark.parametrize("clip_norm", [None, 1e-3, 1e6])
@pytest.mark.parametrize("fused", [True, False])
def test_adamw_against_pytorch(clip_norm: float | None, fused: bool) -> None:
    """Ten steps with changing rates, decay and gradients, two decay groups, clipping included."""
    engine = make(GPT2, optimizer__clip_norm=clip_norm, optimizer__beta2=0.99)
    engine.optimizer._has_fused = fused
    theirs = {name: value.requires_grad_() for name, value in values_of(engine).items()}
    decayed = [p.name for p in engine._spec.parameters if p.decay]
    assert "blocks.0.attention_norm.weight" not in decayed
    assert "blocks.0.mlp.up.bias" not in decayed
    assert {"embedding.weight", "position_embedding.weight", "blocks.1.mlp.down.weight"} <= set(decayed)
    oracle = torch.optim.AdamW(
        [
            {"params": [theirs[name] for name in decayed], "weight_decay": 0.1},
            {"params": [theirs[name] for name in theirs if name not in decayed], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.99), eps=1e-8, foreach=False, fused=False,
    )  # fmt: skip
    for index in range(10):
        lr, weight_decay = 1e-2 / (index + 1), 0.1 + 0.01 * index
        gradients = set_gradients(engine, index, factor=0.1 + index)
        for name, gradient in gradients.items():
            theirs[name].grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(list(theirs.values()), clip_norm or float("inf"))
        for group, decay in zip(oracle.param_groups, (weight_decay, 0.0), strict=True):
            group["lr"], group["weight_decay"] = lr, decay
        oracle.step()
        outcome = engine.optimizer.step(lr=lr, weight_decay=weight_decay, loss=LOSS)
        assert bool(outcome.finite)
        assert float(outcome.grad_norm) == pytest.approx(float(norm), rel=1e-5)
    for name, value in values_of(engine).items():
        torch.testing.assert_close(value, theirs[name].detach(), rtol=1e-5, atol=2e-6, msg=name)


def test_embeddings_can_be_exempt_from_decay() -> None:
    engine = make(GPT2 | {"tie_embeddings": False}, optimizer__decay_embeddings=False)
    before = values_of(engine)
    engine.parameters.zero_gradients()
    engine.optimizer.step(lr=0.1, weight_decay=0.5, loss=LOSS)
    shrunk = {name for name, value in values_of(engine).items() if not torch.equal(value, before[name])}
    assert "head.weight" in shrunk
    assert "blocks.0.attention.query.weight" in shrunk
    assert not any("embedding" in name or "norm" in name or "bias" in name for name in shrunk)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("poison", ["nan gradient", "inf gradient", "overflowing norm", "nan loss", "inf loss"])
def test_a_step_that_is_not_finite_changes_no_bit(optimizer: str, fused: bool, poison: str) -> None:
    engine = make(GPT2, optimizer__name=optimizer, train__ema_decay=0.9)
    engine.optimizer._has_fused = fused
    train(engine, 3)
    before = state_of(engine)
    set_gradients(engine, 1, factor=1e30 if poison == "overflowing norm" else 1.0)
    loss = LOSS
    if "gradient" in poison:
        next(iter(engine.parameters.gradients.values()))[0][5] = float(poison.split()[0])
    elif "loss" in poison:
        loss = torch.tensor(float(poison.split()[0]))
    assert not bool(engine.optimizer.step(lr=0.1, weight_decay=0.1, loss=loss).finite)
    for name, buffer in state_of(engine).items():
        assert torch.equal(buffer, before[name]), name
    engine.parameters.zero_gradients()
    assert bool(engine.optimizer.step(lr=0.1, weight_decay=0.1, loss=LOSS).finite)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_loss_at_the_limit_is_applied_and_one_above_it_changes_no_bit(optimizer: str) -> None:
    engine = make(GPT2, optimizer__name=optimizer)
    train(engine, 1)
    before = state_of(engine)
    for max_loss, is_applied in ((float(LOSS) * (1 - 2**-20), False), (float(LOSS), True)):
        set_gradients(engine, 1)
        assert bool(engine.optimizer.step(lr=0.1, weight_decay=0.1, loss=LOSS, max_loss=max_loss).finite)
        changed = {name for name, buffer in state_of(engine).items() if not torch.equal(buffer, before[name])}
        assert bool(changed) == is_applied


def test_alignment_gaps_stay_zero() -> None:
    engine = make(GPT2 | {"hidden_size": 20, "num_heads": 2}, optimizer__weight_decay=0.1)
    train(engine, 3)
    moments = engine.optimizer.exp_avg, engine.optimizer.exp_avg_sq
    for buffers in (engine.parameters.values, engine.parameters.gradients, *moments):
        inside = sum(float(view.double().abs().sum()) for _, view in engine.parameters.whole(buffers))
        everything = sum(float(buffer.double().abs().sum()) for (buffer,) in buffers.values())
        assert inside == pytest.approx(everything, rel=1e-12)
    sizes = sum(buffer.numel() for (buffer,) in engine.parameters.values.values())
    assert sizes > engine._spec.num_parameters, "there are gaps in this shape"


class TestLossScale:
    """fp16: the scale halves when a step is not finite and doubles after enough finite ones."""

    def engine(self, **overrides: Any) -> TorchEngine:
        return engine_of(configuration(precision__dtype="fp16", precision__initial_loss_scale=1024.0, **overrides))

    def test_unscales_before_clipping(self) -> None:
        scaled, plain = self.engine(), make()
        gradients = set_gradients(plain, 0)
        for name, view in scaled.parameters.whole(scaled.parameters.gradients):
            view.copy_(gradients[name] * 1024)
        first = scaled.optimizer.step(lr=0.01, weight_decay=0.1, loss=LOSS)
        second = plain.optimizer.step(lr=0.01, weight_decay=0.1, loss=LOSS)
        assert float(first.grad_norm) == pytest.approx(float(second.grad_norm), rel=1e-6)
        expected = values_of(plain)
        for name, value in values_of(scaled).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)

    def test_halves_and_doubles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(optim, "GROWTH_INTERVAL_STEPS", 3)
        engine, scales = self.engine(), []
        for finite in (True, True, False, True, True, True, True, True, True):
            set_gradients(engine, 0)
            if not finite:
                next(iter(engine.parameters.gradients.values()))[0][0] = float("inf")
            engine.optimizer.step(lr=0.01, weight_decay=0.1, loss=LOSS)
            scales.append(float(engine.optimizer.loss_scale))
        assert scales == [1024, 1024, 512, 512, 512, 1024, 1024, 1024, 2048]

    @pytest.mark.parametrize("before", [2.0**32, 2.0**20, 3.0, 2.0, 1.5, 1.0])
    def test_a_step_that_is_not_finite_never_raises_it_nor_takes_it_below_one(self, before: float) -> None:
        engine = self.engine()
        engine.optimizer.loss_scale.fill_(before)
        next(iter(engine.parameters.gradients.values()))[0][0] = float("inf")
        engine.optimizer.step(lr=0.01, weight_decay=0.1, loss=LOSS)
        assert float(engine.optimizer.loss_scale) == max(before / 2, 1.0)

    def test_never_grows_above_its_bound(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(optim, "GROWTH_INTERVAL_STEPS", 1)
        engine, scales = self.engine(), []
        engine.optimizer.loss_scale.fill_(LARGEST_LOSS_SCALE / 4)
        for _ in range(4):
            set_gradients(engine, 0)
            engine.optimizer.step(lr=0.01, weight_decay=0.1, loss=LOSS)
            scales.append(float(engine.optimizer.loss_scale) / LARGEST_LOSS_SCALE)
        assert scales == [0.5, 1.0, 1.0, 1.0]

    @pytest.mark.parametrize("value", [0.25, 2.0**33])
    def test_a_first_scale_outside_the_bounds_is_refused(self, value: float) -> None:
        with pytest.raises(ConfigError, match="initial_loss_scale"):
            load_config("quickstart", ["precision.dtype=fp16", f"precision.initial_loss_scale={value}"])

    def test_an_overflow_is_reported_and_the_next_scale_is_lower(self) -> None:
        engine = engine_of(configuration(precision__dtype="fp16", precision__initial_loss_scale=2.0**32))
        before = copy.deepcopy(values_of(engine))
        values = engine.train_step(batch_of(random_rows(8)), lr=0.01, weight_decay=0.1).fetch()
        assert not values.finite
        assert np.isfinite(values.loss)
        assert values.extra["loss_scale"] == 2.0**31
        assert all(torch.equal(value, before[name]) for name, value in values_of(engine).items())


@pytest.mark.parametrize("num_elements", [1, 16_383, 16_385, 3_000_000])
def test_the_norm_of_a_large_buffer_is_exact_to_a_millionth(num_elements: int) -> None:
    generator = np.random.default_rng(11)
    values = (generator.standard_normal(num_elements) * generator.random(num_elements) ** 4).astype(np.float32)
    expected = float(np.linalg.norm(values.astype(np.float64)))
    assert float(optim.tensor_norm(torch.from_numpy(values))) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("size", [0, 1, 100, 1 << 14, 50_000, 7 << 14, 15 << 14, 100_001])
def test_the_norm_is_that_of_pieces_bit_for_bit(size: int) -> None:
    values = torch.from_numpy(np.random.default_rng(size).normal(size=size).astype(np.float32))
    norms = [torch.linalg.vector_norm(piece) for piece in values.split(1 << 14)]
    assert torch.equal(optim.tensor_norm(values), torch.linalg.vector_norm(torch.stack(norms)))
