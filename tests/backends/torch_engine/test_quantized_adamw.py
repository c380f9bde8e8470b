"""Quantised moments against brute force, AdamW with them against AdamW, and the memory that they take."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backends.torch_engine.small_models import GPT2, LLAMA, batch_of, make, random_rows, train
from backends.torch_engine.test_optim import LOSS, set_gradients, state_of
from vorox.backends.torch_engine.optimizers import quantized_adamw
from vorox.backends.torch_engine.optimizers.quantized_adamw import QuantizedAdamW, QuantizedTensor, dynamic_table

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


def random_values(num_elements: int, *, signed: bool) -> torch.Tensor:
    """Values of many magnitudes, with blocks of zeros, of negative values, and near the smallest scale."""
    generator = np.random.default_rng(num_elements)
    values = generator.normal(0, 1, num_elements) * 10.0 ** generator.uniform(-9, 3, num_elements)
    values[:256], values[256:512] = 0, values[256:512] / np.abs(values[256:512]).max() * 1.1e-12
    values[512:768] = -np.abs(values[512:768])
    values[768:1024] *= 1e-30
    return torch.from_numpy((values if signed else np.abs(values)).astype(np.float32))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("num_elements", [4096, 3001])
def test_nearest_code_and_exact_repetition(signed: bool, num_elements: int) -> None:
    table = dynamic_table(signed=signed)
    assert len(table) == (255 if signed else 256)
    assert torch.equal(table, table.sort().values)
    assert {0.0, 1.0, *([-1.0] if signed else [])} <= set(table.tolist())
    values = random_values(num_elements, signed=signed)
    quantized = QuantizedTensor(num_elements, CPU, signed=signed)
    assert not quantized.read(0, num_elements).any()
    quantized.write(0, values)
    found = quantized.read(0, num_elements)
    for block in values.split(256):
        scale = block.abs().max().double()
        distances = (block.double()[:, None] / scale.clamp(min=1e-30) - table.double()).abs()
        nearest = distances.amin(dim=1) * scale
        start = int((block.data_ptr() - values.data_ptr()) / 4)
        error = (found[start : start + len(block)].double() - block.double()).abs()
        if scale < 1e-12:
            assert not found[start : start + len(block)].any()
        else:
            torch.testing.assert_close(error, nearest, rtol=1e-4, atol=float(scale) * 1e-6)
    again = QuantizedTensor(num_elements, CPU, signed=signed)
    through_file = found if signed else found.square().sqrt()  # the second moment is stored squared
    again.write(0, through_file)
    assert torch.equal(again.codes_KE, quantized.codes_KE)
    assert torch.equal(again.scales_K, quantized.scales_K)
    assert torch.equal(quantized.to(CPU), found)


@pytest.mark.parametrize("piece", [1 << 20, 512])
def test_distance_from_adamw(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty steps: losses within 2%; parameters differ by less than a fifth of the distance that they moved."""
    monkeypatch.setattr(quantized_adamw, "PIECE_ELEMENTS", piece)
    exact, quantized = make(LLAMA), make(LLAMA, optimizer__name="adamw_8bit")
    initial = {name: array.copy() for name, array in exact.export_weights()}
    rows = random_rows(8, 0)
    for step in range(40):
        losses = [
            engine.train_step(batch_of(rows, step=step), lr=3e-3, weight_decay=0.1).fetch().loss
            for engine in (exact, quantized)
        ]
        assert losses[1] == pytest.approx(losses[0], rel=0.02), step
    assert losses[0] < 2.0, "the model learns the rows"
    one, other = dict(exact.export_weights()), dict(quantized.export_weights())
    moved = sum(float(np.square(one[name] - initial[name]).sum()) for name in one)
    apart = sum(float(np.square(one[name] - other[name]).sum()) for name in one)
    assert 0 < apart < 0.2**2 * moved


def test_state_takes_a_quarter_of_the_memory() -> None:
    model = LLAMA | {"hidden_size": 128, "num_layers": 2, "intermediate_size": 512}
    exact, quantized = make(model), make(model, optimizer__name="adamw_8bit")
    train(quantized, 1)
    assert isinstance(quantized.optimizer, QuantizedAdamW)
    full = sum(t.nbytes for b in exact.optimizer.buffers.values() for tensors in b.values() for t in tensors)
    tensors = [
        x
        for groups in (quantized.optimizer._first, quantized.optimizer._root_second)
        for ones in groups.values()
        for one in ones
        for x in vars(one).values()
    ]
    held = sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor) and x.numel() > 256)
    held += sum(
        x.nbytes for b in (quantized.optimizer.exp_avg, quantized.optimizer.exp_avg_sq) for t in b.values() for x in t
    )
    assert 0.25 < held / full < 0.26


def test_nonfinite_steps_change_nothing() -> None:
    engine = make(GPT2, optimizer__name="adamw_8bit")
    train(engine, 2)
    before = state_of(engine)
    fingerprint = engine.fingerprint()
    set_gradients(engine, 3, factor=float("inf"))
    assert not engine.optimizer.step(lr=0.1, weight_decay=0.1, loss=LOSS).finite
    assert engine.fingerprint() == fingerprint
    assert all(torch.equal(before[name], tensor) for name, tensor in state_of(engine).items())
