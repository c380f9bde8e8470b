"""What only a CUDA device can show: it computes what the CPU does, keeps its determinism level, and never waits."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from backends.torch_engine.small_models import GPT2, LLAMA, LR, QWEN3, batch_of, make, random_rows, randomise, train
from packed_rows import loss_of_documents, packed

pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
FAMILIES = pytest.mark.parametrize("model", [GPT2, LLAMA | {"num_kv_heads": 2}, QWEN3], ids=["gpt2", "llama", "qwen3"])
DETERMINISTIC = """
import sys
from backends.torch_engine.small_models import LLAMA, make, train
engine = make(LLAMA | {"num_kv_heads": 2, "dropout_fraction": 0.1}, runtime__device="cuda",
              runtime__determinism="bitwise", precision__dtype=sys.argv[1])
print(train(engine, 5), engine.fingerprint())
"""


@FAMILIES
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_trains_like_the_cpu(model: dict[str, Any], optimizer: str) -> None:
    here, there = make(model, optimizer__name=optimizer), make(model, optimizer__name=optimizer, runtime__device="cuda")
    tokens = random_rows(3)[:, :-1]
    np.testing.assert_allclose(there.logits(tokens), here.logits(tokens), atol=1e-4)
    tolerance = 1e-4 if optimizer == "adamw" else 2e-3  # Muon iterates in bf16 there
    assert train(there, 5) == pytest.approx(train(here, 5), rel=tolerance)


@FAMILIES
@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 0.01), ("fp16", 0.003)])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")  # of the compiler's own modules
def test_half_precision(model: dict[str, Any], dtype: str, tolerance: float, compiled: bool) -> None:
    torch._dynamo.reset()
    there = make(model, runtime__device="cuda", precision__dtype=dtype, runtime__compile=compiled)
    assert train(there, 8) == pytest.approx(train(make(model), 8), rel=tolerance)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_d2_gives_the_same_bits_in_two_processes(dtype: str) -> None:
    """Processes of their own, because cuBLAS reads its setting when CUDA starts."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = {
        subprocess.run(
            [sys.executable, "-c", DETERMINISTIC, dtype], env=environment, check=True, capture_output=True
        ).stdout
        for _ in range(2)
    }
    assert len(found) == 1


def test_a_step_does_not_wait_for_the_device() -> None:
    """PyTorch raises at any operation that makes the host wait; only ``fetch`` may."""
    engine = make(runtime__device="cuda", precision__dtype="fp16", log__accuracy=True, log__activation_statistics=True)
    train(engine, 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = engine.train_step(batch_of(random_rows(8), 2), lr=LR, weight_decay=0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.fetch().finite


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="before Ampere")
@pytest.mark.parametrize("windows", [{}, {"sliding_window_tokens": 4}], ids=["full", "windows"])
def test_documents_by_the_variable_length_kernel(windows: dict[str, Any]) -> None:
    """The losses of the numpy decoder on each document alone, and of a run with dense masks."""
    model = LLAMA | {"num_kv_heads": 2} | windows
    losses: list[list[float]] = []
    for recorded in ("varlen", "mask"):
        engine = make(model, runtime__device="cuda", precision__dtype="bf16")
        assert engine.environment()["document_attention"] == "varlen"
        if recorded == "mask":
            engine.adopt_environment({"engine": "torch"})
        expected = loss_of_documents(engine._spec, randomise(engine), packed())
        losses.append([engine.train_step(packed(step), lr=LR, weight_decay=0.1).fetch().loss for step in range(5)])
        assert losses[-1][0] == pytest.approx(expected, rel=0.02)
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_a_nonfinite_step_touches_nothing() -> None:
    engine = make(runtime__device="cuda")
    train(engine, 2)
    before = engine.fingerprint()
    detach = engine.taps.attach("after_mlp", 0, lambda x: x * float("inf"))
    assert not engine.train_step(batch_of(random_rows(8)), lr=LR, weight_decay=0.1).fetch().finite
    detach()
    assert engine.fingerprint() == before
