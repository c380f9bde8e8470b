"""Both sets of kernels against float64 autograd of the plain formulas, and the matrix products against numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vorox.backends.torch_engine.device.devices import Compute, has_onednn_linear
from vorox.backends.torch_engine.layers import kernels

pytestmark = pytest.mark.torch
ROWS, WIDTH, OUT = 48, 40, 72
LIBRARIES = [
    "blas",
    pytest.param("onednn", marks=pytest.mark.skipif(not has_onednn_linear(), reason="no oneDNN in this build")),
]


def compute(products: str = "blas", *, compiled: bool = False) -> Compute:
    return Compute(torch.device("cpu"), torch.float32, "bitwise", 1, compiled, products)  # pyright: ignore[reportArgumentType]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32))


@pytest.mark.skipif(not has_onednn_linear(), reason="no oneDNN in this build")
def test_products_are_added_to_gradients_by_blas_also_where_onednn_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply, called = kernels.products(compute("onednn")), list[str]()
    monkeypatch.setattr(multiply, "_onednn", lambda *_: called.append("onednn") or torch.zeros(200, 200))
    multiply(random(200, 200), random(200, 200))
    multiply.add_to(torch.zeros(200, 200), random(200, 200), random(200, 200))
    assert called == ["onednn"]


def with_gradient(values: Tensor) -> nn.Parameter:
    """A parameter as the store makes them: its gradient exists and holds something already."""
    parameter = nn.Parameter(values.clone())
    parameter.grad = torch.full_like(values, 0.5)
    return parameter


def compare(
    found: Callable[[Tensor, list[nn.Parameter]], Tensor],
    expected: Callable[[Tensor, list[Tensor]], Tensor],
    x: Tensor,
    parameters: list[Tensor],
) -> None:
    """Output, gradient of the input and what was added to the parameters' gradients, to fp32 rounding."""
    ours = [with_gradient(parameter) for parameter in parameters]
    x32 = x.clone().requires_grad_(x.is_floating_point())
    y32 = found(x32, ours)
    direction = random(*y32.shape, seed=9)
    y32.backward(direction)
    theirs = [parameter.double().requires_grad_() for parameter in parameters]
    x64 = x.double().requires_grad_() if x.is_floating_point() else x
    y64 = expected(x64, theirs)
    y64.backward(direction.double())
    torch.testing.assert_close(y32.double(), y64, rtol=1e-5, atol=1e-5)
    if x.is_floating_point():
        torch.testing.assert_close(x32.grad.double(), x64.grad, rtol=1e-5, atol=5e-5)
    for mine, oracle in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad.double() - 0.5, oracle.grad, rtol=1e-5, atol=5e-5)


SETS = ["plain", "direct", pytest.param("traceable", marks=LIBRARIES[1].marks)]


@pytest.fixture(params=SETS)
def chosen(request: pytest.FixtureRequest) -> kernels.Kernels:
    if request.param == "plain":
        return kernels.PLAIN
    is_direct = request.param == "direct"
    return kernels.select(compute("blas" if is_direct else "onednn", compiled=not is_direct))


@pytest.mark.parametrize("bias", [False, True])
def test_linear(chosen: kernels.Kernels, bias: bool) -> None:
    parameters = [random(OUT, WIDTH), random(OUT)][: 2 if bias else 1]
    compare(
        lambda x, p: chosen.linear(x, p[0], p[1] if bias else None),
        lambda x, p: x @ p[0].T + (p[1] if bias else 0),
        random(ROWS, WIDTH),
        parameters,
    )


@pytest.mark.parametrize("products", LIBRARIES)
def test_direct_linear_with_each_library(products: str) -> None:
    linear = kernels.select(compute(products)).linear
    compare(
        lambda x, p: linear(x, p[0], None), lambda x, p: x @ p[0].T, random(300, WIDTH), [random(300, WIDTH, seed=3)]
    )


def test_embed(chosen: kernels.Kernels) -> None:
    tokens = torch.tensor([3, 0, 3, 3, 7, 0], dtype=torch.int32)  # repeated tokens add up
    compare(lambda t, p: chosen.embed(t, p[0]), lambda t, p: F.embedding(t, p[0]), tokens, [random(9, WIDTH)])


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(chosen: kernels.Kernels, offset: float) -> None:
    x = random(ROWS, WIDTH) * torch.logspace(-3, 3, ROWS)[:, None]  # small rows are where eps counts
    parameters = [random(WIDTH) + 1]
    ours, oracle = with_gradient(parameters[0]), parameters[0].double().requires_grad_()
    x32, x64 = x.clone().requires_grad_(), x.double().requires_grad_()
    direction = random(ROWS, WIDTH, seed=4)
    y32 = chosen.rms_norm(x32, ours, 1e-5, offset)
    y64 = x64 / (x64.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (oracle + offset)
    y32.backward(direction)
    y64.backward(direction.double())
    torch.testing.assert_close(y32.double(), y64, rtol=1e-5, atol=1e-5)
    scale = x64.grad.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(x32.grad.double() / scale, x64.grad / scale, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.grad.double() - 0.5, oracle.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "geglu_tanh"])
def test_gate(chosen: kernels.Kernels, activation: str) -> None:
    def oracle(x: Tensor, _: list[Tensor]) -> Tensor:
        gate, up = x[:, : OUT // 2], x[:, OUT // 2 :]
        rise = {
            "swiglu": 1 / (1 + torch.exp(-gate)),
            "geglu": (1 + torch.erf(gate / 2**0.5)) / 2,
            "geglu_tanh": (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) / 2,
        }
        return gate * rise[activation] * up

    compare(lambda x, _: chosen.gate(x, activation), oracle, random(ROWS, OUT), [])


@pytest.mark.parametrize("num_rotated", [5, 3])
@pytest.mark.parametrize("rows", [1, 2])
def test_rotate(chosen: kernels.Kernels, num_rotated: int, rows: int) -> None:
    angles = random(rows, 6, 1, 4, seed=2)

    def oracle(x: Tensor, _: list[Tensor]) -> Tensor:
        pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles).to(
            torch.complex128
        )
        turned = torch.cat([pairs.real, pairs.imag], dim=-1)
        return torch.cat([turned[:, :, :num_rotated], x[:, :, num_rotated:]], dim=2)

    compare(lambda x, _: chosen.rotate(x, angles.cos(), angles.sin(), num_rotated), oracle, random(2, 6, 5, 8), [])


@pytest.mark.parametrize("products", LIBRARIES)
@pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 64, 2000), (130, 129, 131), (256, 384, 96), (97, 1, 2000), (200, 5003, 2)]
)
@pytest.mark.parametrize("layout", ["rows", "left transposed", "right transposed", "both", "slices"])
def test_products(products: str, m: int, k: int, n: int, layout: str) -> None:
    multiply = kernels.products(compute(products))
    a, b = random(m, k), random(n, k, seed=1)
    expected = a.double() @ b.double().T
    if layout in {"left transposed", "both"}:
        a = a.T.contiguous().T
    if layout in {"right transposed", "both"}:
        b = b.T.contiguous().T
    if layout == "slices":
        a, b = torch.cat([a, a], 1)[:, :k], torch.cat([b, b], 1)[:, :k]
    tolerance = {"rtol": 1e-5, "atol": 1e-6 * k}
    torch.testing.assert_close(multiply(a, b).double(), expected, **tolerance)
    total = torch.ones(m, n)
    multiply.add_to(total, a.t(), b.t(), 0.25)
    torch.testing.assert_close(total.double(), 1 + expected / 4, **tolerance)


def test_the_direct_set_is_for_plain_fp32_on_the_cpu() -> None:
    assert compute().is_direct
    assert not compute(compiled=True).is_direct
    assert not dataclasses.replace(compute(), dtype=torch.bfloat16).is_direct
    assert not dataclasses.replace(compute(), device=torch.device("meta")).is_direct
    half = dataclasses.replace(compute(), dtype=torch.bfloat16)
    chosen, plain = kernels.select(half), kernels.PLAIN
    assert (chosen.linear, chosen.embed, chosen.rms_norm) == (plain.linear, plain.embed, plain.rms_norm)


def test_onednn_is_for_fp32_only() -> None:
    assert not kernels.products(dataclasses.replace(compute("onednn"), dtype=torch.bfloat16)).is_onednn


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "relu", "silu"])
def test_activations(name: str) -> None:
    x = torch.linspace(-6, 6, 101)
    expected = {
        "gelu": x * (1 + torch.erf(x / 2**0.5)) / 2,
        "gelu_tanh": x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
        "relu": x.clamp(min=0),
        "silu": x / (1 + torch.exp(-x)),
    }[name]
    torch.testing.assert_close(kernels.activation(name)(x), expected)
