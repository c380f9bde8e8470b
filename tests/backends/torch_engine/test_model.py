"""Every architecture against the numpy decoder in float64, its gradients against finite differences, and its table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from backends.torch_engine.small_models import (
    GPT2,
    LLAMA,
    MODELS,
    PATTERNS,
    POSITIONS,
    QWEN3,
    batch_of,
    make,
    random_rows,
    randomise,
)
from reference_decoder import numpy_logits
from vorox.backends.torch_engine.layouts.parameters import module_name

pytestmark = pytest.mark.torch
ALL = MODELS | PATTERNS


@pytest.mark.parametrize("name", sorted(ALL))
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_logits_against_numpy(name: str, kernel: str) -> None:
    engine = make(ALL[name] | {"attention_kernel": kernel})
    weights = randomise(engine)
    tokens = random_rows(3)[:, :-1]
    expected = numpy_logits(engine._spec, weights, tokens)
    assert expected.std() > 0.5, "the comparison would be trivial"
    np.testing.assert_allclose(engine.logits(tokens), expected, atol=1e-4)


@pytest.mark.parametrize("name", sorted(ALL))
def test_gradients_against_finite_differences(name: str) -> None:
    """Directional derivatives of the mean loss of the numpy decoder, one random direction per parameter."""
    routers = {"load_balancing_weight": 0.0} if "num_experts" in ALL[name] else {}
    engine = make(ALL[name], optimizer__clip_norm=None, loss=routers)
    weights = {key: array.astype(np.float64) for key, array in randomise(engine, seed=2).items()}
    rows = random_rows(2, seed=5)
    engine.train_step(batch_of(rows), lr=0.0, weight_decay=0.0)
    gradients = {key: view.double().numpy() for key, view in engine.parameters.whole(engine.parameters.gradients)}

    def loss(changed: dict[str, np.ndarray]) -> float:
        logits = numpy_logits(engine._spec, changed, rows[:, :-1])
        logits = logits - logits.max(-1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return -float(np.take_along_axis(log_p, rows[:, 1:, None], -1).mean())

    generator = np.random.default_rng(3)
    for key, array in weights.items():
        direction, step = generator.normal(size=array.shape), 1e-6
        slope = (loss(weights | {key: array + step * direction}) - loss(weights | {key: array - step * direction})) / 2
        found = float((gradients[key] * direction).sum())
        assert found == pytest.approx(slope / step, rel=2e-3, abs=2e-5), key


@pytest.mark.parametrize("name", sorted(ALL))
def test_modules_hold_exactly_the_table(name: str) -> None:
    engine = make(ALL[name])
    spec = engine._spec
    expected = {module_name(parameter.name, gated=spec.is_gated) for parameter in spec.parameters}
    assert {name for name, _ in engine.model.named_parameters()} == expected
    assert [name for name, _ in engine.export_weights()] == [parameter.name for parameter in spec.parameters]
    assert {name: array.shape for name, array in engine.export_weights()} == {p.name: p.shape for p in spec.parameters}
    total = sum(parameter.numel() for parameter in engine.parameters.modules.values())
    assert total == spec.num_parameters


def test_fused_parameters_are_their_parts() -> None:
    engine = make(QWEN3)
    weights = randomise(engine)
    fused = engine.parameters.modules["blocks.1.attention.qkv.weight"].detach().numpy()
    parts = [weights[f"blocks.1.attention.{part}.weight"] for part in ("query", "key", "value")]
    assert np.array_equal(fused, np.concatenate(parts))
    gate_up = engine.parameters.modules["blocks.0.mlp.gate_up.weight"].detach().numpy()
    assert np.array_equal(
        gate_up, np.concatenate([weights["blocks.0.mlp.gate.weight"], weights["blocks.0.mlp.up.weight"]])
    )


@pytest.mark.parametrize("model", [GPT2, LLAMA, QWEN3], ids=["gpt2", "llama", "qwen3"])
def test_a_position_does_not_see_the_future(model: dict[str, Any]) -> None:
    engine = make(model)
    randomise(engine)
    rows = random_rows(2)[:, :-1]
    changed = rows.copy()
    changed[:, 10:] = (changed[:, 10:] + 1) % 61
    first, second = engine.logits(rows), engine.logits(changed)
    np.testing.assert_array_equal(first[:, :10], second[:, :10])
    assert np.abs(first[:, 10:] - second[:, 10:]).max() > 0.1


@pytest.mark.parametrize("model", [GPT2, LLAMA, QWEN3], ids=["gpt2", "llama", "qwen3"])
def test_shorter_rows_than_in_training(model: dict[str, Any]) -> None:
    engine = make(model)
    randomise(engine)
    rows = random_rows(2)[:, :-1]
    np.testing.assert_allclose(engine.logits(rows[:, :7]), engine.logits(rows)[:, :7], atol=2e-5)
    assert engine.logits(rows[:, :1]).shape == (2, 1, 61)
    assert engine.logits(rows).shape == (2, POSITIONS, 61)


class _Products(TorchDispatchMode):
    """Counts matrix products and attention that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.count += any(
            part in name for part in ("aten.mm.", "addmm.", "linear_pointwise", "flash_attention_for_cpu.")
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model", [GPT2 | {"dropout_fraction": 0.1}, LLAMA | {"num_kv_heads": 2}, QWEN3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_dots_recomputes_no_matrix_product_and_changes_no_bit(model: dict[str, Any], dtype: str) -> None:
    found: dict[str, tuple[float, str]] = {}
    counts: dict[str, int] = {}
    for recompute in ("none", "dots", "block"):
        engine = make(model, train__activation_checkpointing=recompute, precision__dtype=dtype)
        batch = batch_of(random_rows(4), 2)
        with _Products() as products:
            loss = engine.train_step(batch, lr=0.01, weight_decay=0.1).fetch().loss
        found[recompute], counts[recompute] = (loss, engine.fingerprint()), products.count
    assert found["dots"] == found["none"] == found["block"]
    assert counts["dots"] == counts["none"] < counts["block"]
