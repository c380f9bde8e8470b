"""What only a CUDA device can show: it computes what the CPU does, keeps its determinism level, and never waits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_runs
from backends.torch_engine.small_models import (
    GPT2,
    LLAMA,
    LR,
    MODELS,
    PATTERNS,
    QWEN3,
    batch_of,
    make,
    random_rows,
    randomise,
    train,
)
from backends.torch_engine.test_cuda_graphs import batches
from packed_rows import loss_of_documents, packed
from tiny_runs import run, whole_and_resumed
from vorox.backends.torch_engine.engine import TorchEngine

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
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


SETTINGS: dict[str, dict[str, Any]] = {
    "recomputed": {"train__activation_checkpointing": "block"},
    "recomputed but for products": {"train__activation_checkpointing": "dots"},
    "several micro-batches": {"train__micro_batch_sequences": 2},
    "8-bit moments": {"optimizer__name": "adamw_8bit"},
    "update in the backward pass": {"optimizer__in_backward": True, "optimizer__clip_norm": None},
    "average": {"train__ema_decay": 0.9},
    "terms of the loss": {"loss__z_loss_weight": 1e-3, "loss__label_smoothing_fraction": 0.1},
    "plain attention": {"model__attention_kernel": "reference"},
    "statistics": {"log__activation_statistics": True, "log__parameter_norms": True, "log__accuracy": True},
    "checksums of gradients": {"runtime__recompute_every_steps": 2},
}


@pytest.mark.parametrize("model", MODELS | PATTERNS)
def test_trains_like_the_cpu(model: str) -> None:
    compare_with_cpu((MODELS | PATTERNS)[model], {}, 1e-4)


@FAMILIES
def test_muon(model: dict[str, Any]) -> None:
    compare_with_cpu(model, {"optimizer__name": "muon"}, 2e-3)  # it iterates in bf16 there


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings(settings: str) -> None:
    chosen = dict(SETTINGS[settings])
    kernel = {"attention_kernel": chosen.pop("model__attention_kernel", "auto")}
    compare_with_cpu(LLAMA | {"num_kv_heads": 2} | kernel, chosen, 1e-4)


def compare_with_cpu(model: dict[str, Any], settings: dict[str, Any], tolerance: float) -> None:
    here, there = make(model, **settings), make(model, **settings, runtime__device="cuda")
    tokens = random_rows(3)[:, :-1]
    np.testing.assert_allclose(there.logits(tokens), here.logits(tokens), atol=1e-4)
    assert train(there, 5) == pytest.approx(train(here, 5), rel=tolerance)
    decoder = there.decoder(3, tokens.shape[1])
    decoded = [decoder.feed(tokens[:, :5]), *(decoder.feed(tokens[:, [place]]) for place in range(5, tokens.shape[1]))]
    np.testing.assert_allclose(np.stack(decoded, 1), there.logits(tokens)[:, 4:], atol=1e-3)


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


@pytest.mark.filterwarnings("ignore")  # of the compiler's own modules
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adamw_8bit"])
def test_a_step_does_not_wait_for_the_device(optimizer: str, compiled: bool) -> None:
    """PyTorch raises at any operation that makes the host wait; only ``fetch`` may."""
    torch._dynamo.reset()
    engine = make(
        runtime__device="cuda", precision__dtype="fp16", log__accuracy=True, log__activation_statistics=not compiled,
        optimizer__name=optimizer, runtime__compile=compiled,
    )  # fmt: skip
    batches = [batch_of(random_rows(8, step), 2, step=step) for step in range(3)]
    for batch in batches[:2]:
        engine.train_step(batch, lr=LR, weight_decay=0.1).fetch()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcome = engine.train_step(batches[2], lr=LR, weight_decay=0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert outcome.fetch().finite


@pytest.mark.filterwarnings("ignore")  # of the compiler's own modules
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (GPT2, {"precision__dtype": "bf16"}),
        (LLAMA | {"num_kv_heads": 2}, {"precision__dtype": "fp16", "optimizer__name": "muon"}),
        (QWEN3 | {"sliding_window_tokens": 4}, {"train__activation_checkpointing": "block"}),
    ],
    ids=["gpt2, bf16", "llama, fp16", "qwen3, fp32, recomputed"],
)
def test_graphs_compute_what_passes_without_them_do(model: dict[str, Any], settings: dict[str, Any]) -> None:
    """Whole rows, positions without targets, packed rows; later steps do not make the host wait."""
    torch._dynamo.reset()
    compiled = {"runtime__device": "cuda", "runtime__compile": True, "loss__chunk_tokens": 40} | settings
    plain, graphs = make(model, **compiled), make(model, **compiled, runtime__cuda_graphs=True)
    given = batches()
    for batch in given:
        expected, found = (one.train_step(batch, lr=LR, weight_decay=0.1).fetch() for one in (plain, graphs))
        assert (found.loss, found.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=2e-5)
    captured = graphs._network._graphs._graphs
    assert len(captured) >= 3
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [graphs.train_step(batch, lr=LR, weight_decay=0.1) for batch in given[:3]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(result.fetch().finite for result in results)


ON_CUDA = ["backend=torch", "runtime.device=cuda", "log.matmul_peak=false"]


def test_a_resumed_run_is_bit_for_bit_the_run_it_would_have_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At level D2, killed at step 7 and resumed from the save of step 4."""
    settings = [*ON_CUDA, "runtime.determinism=bitwise", "model.dropout_fraction=0.1", "precision.dtype=bf16"]
    whole, resumed = whole_and_resumed(tmp_path, monkeypatch, TorchEngine, settings)
    assert resumed == whole


def test_the_profile_has_kernels_of_the_gpu(tmp_path: Path) -> None:
    outcome = run(tiny_runs.configuration(tmp_path, [*ON_CUDA, "runtime.profile_steps=[5, 6]"]))
    table = (outcome.run_directory / "profile" / "step-00000005-rank-00000.txt").read_text()
    assert not tiny_runs.events(outcome.run_directory, "profile_failed")
    assert float(re.search(r"compute\D*([\d.]+)", table)[1]) > 0


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="before Ampere")
@pytest.mark.parametrize(
    "settings", [{}, {"sliding_window_tokens": 4}, {"head_dim": 12}], ids=["full", "windows", "heads of 12"]
)
def test_documents_by_the_variable_length_kernel(settings: dict[str, Any]) -> None:
    """The losses of the numpy decoder on each document alone, and of a run with dense masks."""
    model = LLAMA | {"num_kv_heads": 2} | settings
    losses: list[list[float]] = []
    for recorded in ("varlen", "mask"):
        engine = make(model, runtime__device="cuda", precision__dtype="bf16")
        assert engine.environment()["document_attention"] == "varlen"
        if recorded == "mask":
            engine.adopt_environment({"engine": "torch", "document_attention": "mask"})
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
