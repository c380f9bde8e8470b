"""Experts against a plain dense loop over all of them in float64, and how routers are trained and measured.

Shape legend: M positions, D width, E experts, K experts per token.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backends.torch_engine.small_models import (
    LLAMA,
    MODELS,
    POSITIONS,
    QWEN3,
    batch_of,
    make,
    random_rows,
    randomise,
    train,
)
from vorox.backends.torch_engine.layers import kernels
from vorox.backends.torch_engine.layers.experts import Experts, RouterMetrics, RouterStep
from vorox.backends.torch_engine.layouts.parameters import module_name
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.core.schema import LossConfig
from vorox.models.decoder.experts import split_expert
from vorox.models.decoder.spec import DecoderSpec

pytestmark = pytest.mark.torch

EXPERTS = LLAMA | {"num_experts": 4}
NAMES = ("mixtral", "qwen3 experts", "experts without gate")
ROUTERS = LossConfig(load_balancing_weight=0.7, router_z_loss_weight=0.3)


def dense(
    spec: DecoderSpec, weights: dict[str, Tensor], x_MD: Tensor, kept_M: Tensor, losses: LossConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """All experts on all positions: the output, the weighted losses of the router, and the load of each expert."""
    assert spec.num_experts is not None
    assert spec.experts_per_token is not None
    logits_ME = x_MD @ weights["router"].T
    p_ME = logits_ME.exp() / logits_ME.exp().sum(1, keepdim=True)
    output, load = torch.zeros_like(x_MD), [0] * spec.num_experts
    for position, p_E in enumerate(p_ME):
        chosen = sorted(range(spec.num_experts), key=lambda expert, p_E=p_E: -float(p_E.detach()[expert]))
        chosen = chosen[: spec.experts_per_token]
        for expert in range(spec.num_experts):
            hidden = x_MD[position] @ weights[f"{expert}.up"].T
            if spec.is_gated:
                hidden = hidden * torch.nn.functional.silu(x_MD[position] @ weights[f"{expert}.gate"].T)
            else:
                hidden = hidden.clamp(min=0)
            if expert in chosen:
                load[expert] += int(kept_M[position])
                divisor = sum(p_E[other] for other in chosen) if spec.normalize_expert_weights else 1.0
                step = torch.zeros_like(output)
                step[position] = p_E[expert] / divisor * (hidden @ weights[f"{expert}.down"].T)
                output = output + step
    load_E = torch.tensor(load, dtype=torch.float64)
    balance = spec.num_experts * (load_E / load_E.sum() * p_ME[kept_M].sum(0)).sum()
    square = logits_ME.exp().sum(1).log()[kept_M].square().sum()
    return output, losses.load_balancing_weight * balance + losses.router_z_loss_weight * square, load_E


def module_of(name: str, *, direct: bool) -> tuple[Experts, DecoderSpec, dict[str, np.ndarray]]:
    """The experts of block 1 with random weights, by the direct kernels or by those of autograd."""
    engine = make(MODELS[name])
    spec = engine._spec
    assert isinstance(spec, DecoderSpec)
    weights = randomise(engine)
    parameters = {key: nn.Parameter(value.detach().clone()) for key, value in engine.parameters.modules.items()}
    chosen = kernels.select(engine.compute) if direct else kernels.plain(engine.compute)
    return Experts(spec, parameters, chosen, 1), spec, weights


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "autograd"])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_losses_and_gradients_are_those_of_a_dense_loop(name: str, direct: bool) -> None:
    module, spec, stored = module_of(name, direct=direct)
    assert spec.num_experts is not None
    generator = torch.Generator().manual_seed(4)
    x_MD = torch.randn(23, spec.hidden_size, generator=generator)
    direction_MD = torch.randn(x_MD.shape, generator=generator)
    kept_M = torch.rand(len(x_MD), generator=generator) < 0.7
    prefix = "blocks.1.mlp."
    oracle = {
        key.removeprefix(prefix).removeprefix("experts.").removesuffix(".weight"): torch.tensor(
            array.astype(np.float64), requires_grad=True
        )
        for key, array in stored.items()
        if key.startswith(prefix)
    }
    exact_MD = x_MD.double().requires_grad_()
    expected_MD, losses, load_E = dense(spec, oracle, exact_MD, kept_M, ROUTERS)
    ((expected_MD * direction_MD).sum() + 0.25 * losses).backward()

    ours_MD, step = x_MD.clone().requires_grad_(), RouterStep(ROUTERS, 0.25, kept_M)
    found_MD = module(ours_MD, step)
    (found_MD * direction_MD).sum().backward()
    torch.testing.assert_close(found_MD.double(), expected_MD, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(cast("Tensor", ours_MD.grad).double(), exact_MD.grad, atol=2e-4, rtol=1e-4)
    gradients = {key.removesuffix(".weight"): cast("Tensor", value.grad) for key, value in module.named_parameters()}
    for key, value in oracle.items():
        split = split_expert(f"{prefix}experts.{key}")
        if split is None:
            found = gradients["router"]
        else:
            stack = module_name(f"{prefix}experts.{key}.weight", gated=spec.is_gated)
            stack_EOD = gradients[stack.removeprefix(prefix).removesuffix(".weight")].view(
                spec.num_experts, -1, value.shape[1]
            )
            half = value.shape[0] if spec.is_gated and key.endswith("up") else 0
            found = stack_EOD[split[1], half : half + value.shape[0]]
        torch.testing.assert_close(
            found.double(), value.grad, atol=5e-4, rtol=1e-4, msg=lambda m, key=key: f"{key}: {m}"
        )
    (measured,) = step.measured.values()
    np.testing.assert_array_equal(measured[: spec.num_experts], load_E)
    total = (measured[-2:] * torch.tensor([0.7, 0.3])).sum()
    assert float(total) == pytest.approx(float(losses.detach()), rel=1e-5)


def test_an_expert_without_tokens_computes_nothing_and_has_no_gradient() -> None:
    module, _, _ = module_of("mixtral", direct=True)
    with torch.no_grad():
        module.router.weight.data[2] = -100.0
    x_MD = torch.rand(9, 32, requires_grad=True)
    module(x_MD, None).sum().backward()
    down_EDF = cast("Tensor", module.get_parameter("experts.down.weight").grad).view(4, 32, -1)
    assert [bool(part.any()) for part in down_EDF] == [True, True, False, True]


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "autograd"])
def test_no_slots_at_all(direct: bool) -> None:
    """With expert parallelism, a rank may get no token: empty output, gradients of zero."""
    engine = make(EXPERTS)
    grouped = (kernels.select(engine.compute) if direct else kernels.plain(engine.compute)).grouped
    weight_RD, x_SD = nn.Parameter(torch.ones(2 * 5, 3)), torch.ones(0, 3, requires_grad=True)
    y_SO = grouped(x_SD, weight_RD, torch.zeros(2, dtype=torch.int32))
    assert y_SO.shape == (0, 5)
    y_SO.sum().backward()
    assert x_SD.grad is not None
    assert weight_RD.grad is None or not weight_RD.grad.any()


def test_metrics_are_those_of_the_loads() -> None:
    spec = cast("DecoderSpec", make(EXPERTS)._spec)
    metrics = RouterMetrics(spec, ROUTERS, Ranks())
    for loads in ([[4.0, 0, 2, 2], [3, 1, 2, 2]], [[4.0, 4, 2, 2], [1, 3, 6, 2]]):
        step = RouterStep(LossConfig(), 1.0, None)
        for layer, load in enumerate(loads):
            step.measured[layer] = torch.tensor([*load, 8.0, 2.0 + layer])
        metrics.add(step)
    found = {name: float(value) for name, value in metrics.take(10).items()}
    shares = np.array([[8, 4, 4, 4], [4, 4, 8, 4]]) / 20
    assert found == pytest.approx(
        {
            "router/load_balancing_loss": 1.6,
            "router/z_loss": 0.5,
            "router/load_max_to_mean": 0.4 * 4,
            "router/load_entropy_fraction": float(-(shares * np.log(shares)).sum() / 2 / math.log(4)),
            "router/busiest_expert_fraction": 0.8,
        }
    )
    assert metrics.take(10) == {}


def test_the_losses_of_routers_are_not_in_the_loss_and_balance_the_load() -> None:
    """The reported loss of the first step is that without them; after it, a skewed router becomes balanced."""
    engines = [make(EXPERTS, loss={"load_balancing_weight": weight}) for weight in (0.0, 1.0)]
    found: list[list[dict[str, float]]] = []
    for engine in engines:
        weights = dict(engine.export_weights())
        for layer in range(2):
            router = weights[f"blocks.{layer}.mlp.router.weight"]
            weights[f"blocks.{layer}.mlp.router.weight"] = router * 0.2 + [[0.1], [0], [0], [0]] * np.sign(
                weights["final_norm.weight"]
            )
        engine.import_weights(weights.items())
        values = []
        for step in range(40):
            result = engine.train_step(batch_of(random_rows(8, step)), lr=3e-3, weight_decay=0.0).fetch()
            values.append({"loss": result.loss, "grad_norm": result.grad_norm, **result.extra})
        found.append(values)
    free, balanced = found
    assert free[0]["loss"] == balanced[0]["loss"]
    assert free[0]["router/load_max_to_mean"] == balanced[0]["router/load_max_to_mean"]
    assert free[0]["grad_norm"] != balanced[0]["grad_norm"]
    assert balanced[-1]["router/load_balancing_loss"] < 1.05
    assert balanced[-1]["router/load_entropy_fraction"] > 0.95 > free[-1]["router/load_entropy_fraction"]
    assert balanced[-1]["router/load_max_to_mean"] < free[-1]["router/load_max_to_mean"]


def test_tokens_without_a_target_do_not_count() -> None:
    """Rows without labels change neither losses of routers nor loads."""
    plain, padded = make(EXPERTS), make(EXPERTS)
    expected = plain.train_step(batch_of(random_rows(4)), lr=1e-3, weight_decay=0.1).fetch()
    keep = np.repeat([True, False], 4)[:, None] & np.ones((8, POSITIONS), bool)
    rows = np.concatenate([random_rows(4), random_rows(4, 9)])
    found = padded.train_step(batch_of(rows, 2, keep=keep), lr=1e-3, weight_decay=0.1).fetch()
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert found.extra == pytest.approx(expected.extra, rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{"train__activation_checkpointing": "block"}, {"train__activation_checkpointing": "dots"}],
    ids=["block", "dots"],
)
def test_recomputed_blocks_have_the_same_bits_and_metrics(settings: dict[str, Any]) -> None:
    engines = [make(QWEN3 | {"num_experts": 4, "dropout_fraction": 0.1}, **extra) for extra in ({}, settings)]
    for step in range(3):
        batch = batch_of(random_rows(8, step), 2, step=step)
        first, second = (engine.train_step(batch, lr=3e-3, weight_decay=0.1).fetch() for engine in engines)
        assert first == second
        assert first.extra["router/load_max_to_mean"] > 1
    assert engines[0].fingerprint() == engines[1].fingerprint()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own modules
def test_attention_is_compiled_beside_experts() -> None:
    plain, compiled = make(EXPERTS), make(EXPERTS, runtime__compile=True)
    assert train(compiled, 3) == pytest.approx(train(plain, 3), rel=1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_trains_near_fp32(dtype: str) -> None:
    exact, half = make(EXPERTS), make(EXPERTS, precision__dtype=dtype)
    assert train(half, 6) == pytest.approx(train(exact, 6), rel=3e-3)


def test_work_counts_the_active_experts_and_memory_all() -> None:
    spec = make(EXPERTS)._spec
    attention, expert, router = 4 * 32 * 32, 3 * 32 * 40, 4 * 32
    assert spec.num_matmul_weights == 2 * (attention + router + 2 * expert) + 61 * 32
    assert spec.num_parameters == 2 * (attention + router + 4 * expert + 2 * 32) + 61 * 32 + 32
    assert spec.num_converted_weights == 2 * (attention + 4 * expert) + 61 * 32


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("width", "inner"), [(36, 44), (30, 41), (33, 64), (64, 33)])
def test_experts_of_any_width(width: int, inner: int, dtype: str) -> None:
    """The grouped product takes multiples of 16 bytes; values and gradients against each expert by itself."""
    from vorox.backends.torch_engine.layers.kernels import _plain_grouped

    kind, rng = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype], np.random.default_rng()
    ends = torch.tensor([3, 3, 10], dtype=torch.int32)
    x = torch.from_numpy(rng.normal(size=(10, width)).astype(np.float32)).requires_grad_()
    weight = torch.nn.Parameter(torch.from_numpy(rng.normal(size=(3 * inner, width)).astype(np.float32)))
    gradient = torch.from_numpy(rng.normal(size=(10, inner)).astype(np.float32))
    found = _plain_grouped(x, weight, ends, kind)
    (found.float() * gradient).sum().backward()
    own_x, own = (tensor.detach().clone().double().requires_grad_() for tensor in (x, weight))
    matrices = own.view(3, inner, width)
    expected = torch.cat([own_x[:3] @ matrices[0].T, own_x[3:] @ matrices[2].T])
    (expected * gradient).sum().backward()
    tolerance = 1e-5 if dtype == "fp32" else 0.02
    pairs = ((found, expected), (x.grad, own_x.grad), (weight.grad, own.grad))
    for mine, theirs in pairs:
        assert mine is not None
        assert theirs is not None
        assert float((mine.detach().double() - theirs.detach()).norm() / theirs.detach().norm()) < tolerance
