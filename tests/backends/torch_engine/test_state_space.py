"""The scan of Mamba-2 against its recurrence in float64, written as a plain loop, and against transformers.

Shape legend: B rows, T positions, N heads, G groups, H head width, S state size, E channels, K taps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vorox.backends.torch_engine.layers import state_space
from vorox.backends.torch_engine.layers.state_space import causal_convolution, gated_norm, scan, scan_step

pytestmark = pytest.mark.torch
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(length: int, *, rows: int = 2, dtype: torch.dtype = torch.float64, seed: int = 0) -> Inputs:
    """x, dt, A, B, C and D of 6 heads in 2 groups."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    values = (
        normal(rows, length, 6, 5), torch.nn.functional.softplus(normal(rows, length, 6) - 1),
        -torch.exp(normal(6)), normal(rows, length, 2, 7), normal(rows, length, 2, 7), normal(6),
    )  # fmt: skip
    return tuple(value.to(dtype) for value in values)  # pyright: ignore[reportReturnType]


def recurrence(
    values: Inputs, documents_BT: Tensor | None = None, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, position by position and head by head."""
    x, dt, a, b, c, d = (value.double() for value in values)
    rows, length, heads, width = x.shape
    outputs = []
    state = torch.zeros(rows, heads, width, b.shape[-1], dtype=torch.float64) if initial is None else initial.double()
    for t in range(length):
        if documents_BT is not None and t:
            state = state * (documents_BT[:, t] == documents_BT[:, t - 1])[:, None, None, None]
        here = []
        for head in range(heads):
            group = head * b.shape[2] // heads
            decay = torch.exp(dt[:, t, head] * a[head])[:, None, None]
            added = dt[:, t, head, None, None] * x[:, t, head, :, None] * b[:, t, group, None, :]
            here.append(state[:, head] * decay + added)
        state = torch.stack(here, dim=1)
        read = [torch.einsum("bhs,bs->bh", here[head], c[:, t, head * b.shape[2] // heads]) for head in range(heads)]
        outputs.append(torch.stack(read, dim=1) + d[:, None] * x[:, t])
    return torch.stack(outputs, dim=1), state


def documents(*rows: tuple[int, ...]) -> Tensor:
    """Document of each position, from the lengths of the documents of each row."""
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows])


PACKED = documents((4, 1, 8, 4, 2), (1, 1, 13, 3, 1))


@pytest.mark.parametrize("chunk", [1, 4, 19, 64])
@pytest.mark.parametrize("packed", [None, PACKED], ids=["one document", "packed"])
def test_scan_is_the_recurrence(chunk: int, packed: Tensor | None) -> None:
    values = inputs(19)
    y, state = scan(*values, chunk_tokens=chunk, documents_BT=packed)
    expected_y, expected_state = recurrence(values, packed)
    assert torch.allclose(y, expected_y, rtol=0, atol=1e-12)
    assert torch.allclose(state, expected_state, rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [1, 8, 9])
def test_initial_state_continues_a_row(length: int) -> None:
    values, initial = inputs(length), torch.randn(2, 6, 5, 7, dtype=torch.float64)
    y, state = scan(*values, chunk_tokens=4, initial_BNHS=initial)
    expected_y, expected_state = recurrence(values, initial=initial)
    assert torch.allclose(y, expected_y, rtol=0, atol=1e-12)
    assert torch.allclose(state, expected_state, rtol=0, atol=1e-12)


@pytest.mark.parametrize("packed", [None, PACKED], ids=["one document", "packed"])
def test_gradients_are_those_of_the_recurrence(packed: Tensor | None) -> None:
    ours = [value.requires_grad_() for value in inputs(19)]
    theirs = [value.detach().clone().requires_grad_() for value in ours]
    weights = torch.randn(2, 19, 6, 5, dtype=torch.float64)
    (scan(*ours, chunk_tokens=8, documents_BT=packed)[0] * weights).sum().backward()
    (recurrence(tuple(theirs), packed)[0] * weights).sum().backward()  # pyright: ignore[reportArgumentType]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.allclose(mine.grad, other.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_fp32_in_every_precision(dtype: torch.dtype) -> None:
    values = inputs(300, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = scan(*values, chunk_tokens=64)
    assert y.dtype == state.dtype == torch.float32
    expected, _ = recurrence(values)
    assert float((y - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def test_packed_documents_equal_documents_alone() -> None:
    values = inputs(19, dtype=torch.float32)
    x, dt, a, b, c, d = values
    y, _ = scan(*values, chunk_tokens=8, documents_BT=PACKED)
    for row, lengths in enumerate(((4, 1, 8, 4, 2), (1, 1, 13, 3, 1))):
        start = 0
        for length in lengths:
            here = (slice(row, row + 1), slice(start, start + length))
            alone, _ = scan(x[here], dt[here], a, b[here], c[here], d, chunk_tokens=8)
            assert torch.allclose(y[here], alone, rtol=0, atol=2e-6)
            start += length
    leaking, _ = scan(*values, chunk_tokens=8)
    assert float((leaking - y).abs().max()) > 0.1, "the comparison would be trivial"


def test_steps_equal_the_scan() -> None:
    x, dt, a, b, c, d = values = inputs(9)
    expected, final = scan(*values, chunk_tokens=4)
    state = torch.zeros(2, 6, 5, 7, dtype=torch.float64)
    for t in range(9):
        y, state = scan_step(state, x[:, t], dt[:, t], a, b[:, t], c[:, t], d)
        assert torch.allclose(y, expected[:, t], rtol=0, atol=1e-12)
    assert torch.allclose(state, final, rtol=0, atol=1e-12)


def plain_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    rows = []
    for row in range(len(x)):
        here = []
        for t in range(x.shape[1]):
            total = torch.zeros(x.shape[2], dtype=x.dtype) if bias is None else bias
            for back in range(min(t + 1, weight.shape[1])):
                if packed is None or packed[row, t] == packed[row, t - back]:
                    total = total + weight[:, weight.shape[1] - 1 - back] * x[row, t - back]
            here.append(total * torch.sigmoid(total))
        rows.append(torch.stack(here))
    return torch.stack(rows)


@pytest.mark.parametrize("packed", [None, PACKED], ids=["one document", "packed"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_convolution_stays_in_its_document(packed: Tensor | None, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 19, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, generator=generator, requires_grad=True) if has_bias else None
    y = causal_convolution(x, weight, bias, documents_BT=packed)
    expected = plain_convolution(x, weight, bias, packed)
    assert torch.allclose(y, expected, rtol=0, atol=1e-12)
    scale = torch.randn_like(y)
    wanted = [x, weight] + ([bias] if bias is not None else [])
    found = torch.autograd.grad((y * scale).sum(), wanted)
    for mine, other in zip(found, torch.autograd.grad((expected * scale).sum(), wanted), strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-11)


def test_convolution_continues_a_row() -> None:
    x, weight = torch.randn(2, 11, 6), torch.randn(6, 4)
    whole = causal_convolution(x, weight, None)
    for start in (1, 3, 5):
        before = torch.nn.functional.pad(x, (0, 0, 3, 0))[:, start : start + 3]
        rest = causal_convolution(x[:, start:], weight, None, before_BKE=before)
        assert torch.allclose(rest, whole[:, start:], rtol=0, atol=1e-6)


def mixers() -> list[Any]:
    pytest.importorskip("transformers")
    from transformers import Mamba2Config, NemotronHConfig
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    torch.manual_seed(3)
    mamba2 = Mamba2Config(
        hidden_size=24, num_heads=6, head_dim=8, expand=2, state_size=7, n_groups=2, chunk_size=16, num_hidden_layers=1
    )
    nemotron = NemotronHConfig(
        hidden_size=24, mamba_num_heads=6, mamba_head_dim=8, ssm_state_size=7, n_groups=2, chunk_size=16,
        layers_block_type=["linear_attention"],
    )  # fmt: skip
    found = [Mamba2Mixer(mamba2, layer_idx=0), NemotronHMamba2Mixer(nemotron, layer_idx=0)]
    for mixer in found:
        for parameter in mixer.parameters():
            parameter.data.normal_(std=0.3)
    return found


@pytest.mark.hf
@pytest.mark.parametrize("index", [0, 1], ids=["Mamba2Mixer", "NemotronHMamba2Mixer"])
def test_mixers_of_transformers_agree(index: int) -> None:
    mixer: Any = mixers()[index].eval()
    hidden = torch.randn(2, 37, 24)
    width, channels = 48, 48 + 2 * 2 * 7
    with torch.no_grad():
        gate, mixed, dt = mixer.in_proj(hidden).split([width, channels, 6], dim=-1)
        mixed = causal_convolution(mixed, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias)
        x, b, c = mixed.split([width, 14, 14], dim=-1)
        dt = torch.nn.functional.softplus(dt + mixer.dt_bias).clamp(min=mixer.time_step_limit[0])
        y, _ = scan(
            x.unflatten(-1, (6, 8)), dt, -torch.exp(mixer.A_log), b.unflatten(-1, (2, 7)), c.unflatten(-1, (2, 7)),
            mixer.D, chunk_tokens=8,
        )  # fmt: skip
        groups = width // mixer.norm.group_size
        found = mixer.out_proj(gated_norm(y.flatten(-2), gate, mixer.norm.weight, groups, mixer.norm.variance_epsilon))
        expected = mixer(hidden)
    assert float(expected.std()) > 0.1, "the comparison would be trivial"
    assert float((found - expected).abs().max()) <= 1e-5


class OnCuda:
    """A tensor that says it is on a GPU."""

    is_cuda = True


def test_fast_kernels_are_for_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel() -> None: ...

    monkeypatch.setattr(state_space, "_load", lambda module, name: kernel)
    chosen: Any = state_space._kernel
    assert chosen("mamba_ssm", "scan", torch.zeros(1)) is None
    assert chosen("mamba_ssm", "scan", OnCuda()) is kernel
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen("mamba_ssm", "scan", OnCuda()) is None
    finally:
        torch.use_deterministic_algorithms(False)


def test_missing_kernels_are_not_an_error() -> None:
    assert state_space._load("vorox_has_no_such_module", "scan") is None
