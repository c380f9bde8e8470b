"""Passes that are replayed see new inputs, one for each kind of input. ``test_cuda.py`` has those of a GPU."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from backends.torch_engine.small_models import GPT2, LLAMA, LR, QWEN3, batch_of, make, random_rows
from packed_rows import packed
from small_configurations import configuration
from vorox.backends.torch_engine.engine import TorchEngine
from vorox.backends.torch_engine.layers import cuda_graphs
from vorox.backends.torch_engine.layers.cuda_graphs import WARMUP_PASSES, CudaGraphs
from vorox.backends.torch_engine.networks.decoder_network import DecoderNetwork
from vorox.core.batch import Batch
from vorox.core.errors import ConfigError

pytestmark = pytest.mark.torch
WINDOWS = {"sliding_window_tokens": 4, "layer_types": ("sliding_attention", "full_attention")}


def replaying(engine: TorchEngine) -> list[Any]:
    """Let an engine on the CPU run its passes on the inputs of the captured ones; returns what was captured."""
    network, captured = engine._network, list[Any]()
    assert isinstance(network, DecoderNetwork)

    def capture(run: Any) -> Any:
        captured.append(run)
        return run

    network._graphs = CudaGraphs(partial(network._pass, run_block=None), capture)
    return captured


def batches() -> list[Batch]:
    """Whole rows, rows with positions that are not trained on, packed rows; other numbers in every step."""
    found: list[Batch] = []
    for step in range(4 * WARMUP_PASSES):
        keep = np.random.default_rng(step).random((4, 24)) < 0.8
        found += [
            batch_of(random_rows(4, step), 2, step=step),
            batch_of(random_rows(4, step), 2, step=step, keep=keep),
            packed(step),
        ]
    return [dataclasses.replace(batch, step=step) for step, batch in enumerate(found)]


@pytest.mark.parametrize(
    "model", [GPT2, LLAMA | {"num_kv_heads": 2}, QWEN3, LLAMA | WINDOWS], ids=["gpt2", "llama", "qwen3", "windows"]
)
def test_no_bit_changes(model: dict[str, Any]) -> None:
    plain, engine = (make(model, precision__dtype="bf16") for _ in range(2))
    captured = replaying(engine)
    for batch in batches():
        expected, found = (one.train_step(batch, lr=LR, weight_decay=0.1).fetch() for one in (plain, engine))
        assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
    assert engine.fingerprint() == plain.fingerprint()
    assert len(captured) >= 3


def test_an_uncompiled_loss_in_fp32_is_not_captured() -> None:
    """Of a run of an older version: it scales its products by a number of the host."""
    plain, engine = make(), make()
    captured = replaying(engine)
    for step in range(2 * WARMUP_PASSES):
        for one in (plain, engine):
            one.train_step(batch_of(random_rows(4, step), step=step), lr=LR, weight_decay=0.1)
    assert not captured
    assert engine.fingerprint() == plain.fingerprint()


def test_a_tap_is_called_in_every_step() -> None:
    engine, seen = make(precision__dtype="bf16"), list[torch.Size]()
    replaying(engine)
    for step in range(2 * WARMUP_PASSES):
        engine.train_step(batch_of(random_rows(4, step), step=step), lr=LR, weight_decay=0.1)
    detach = engine.taps.attach("after_mlp", 0, lambda x: seen.append(x.shape))
    engine.train_step(batch_of(random_rows(4)), lr=LR, weight_decay=0.1)
    detach()
    assert len(seen) == 1


def test_only_so_many_kinds_of_inputs_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 1)
    captured: list[Any] = []
    passes = CudaGraphs(lambda x: (x.sum(),) * 4, lambda run: captured.append(run) or run)
    for _ in range(3 * WARMUP_PASSES):
        for size in (2, 3):
            assert passes(torch.ones(size))[0] == size
    assert len(captured) == 1


@pytest.mark.parametrize(
    ("device", "is_compiled", "world_size", "needed"),
    [("cpu", True, 1, "an NVIDIA GPU"), ("cuda", False, 1, "runtime.compile=true"), ("cuda", True, 2, "one process")],
)
def test_a_machine_that_cannot_capture_is_refused(device: str, is_compiled: bool, world_size: int, needed: str) -> None:
    config = configuration(runtime__cuda_graphs=True)
    compute = dataclasses.replace(make().compute, device=torch.device(device), compiled=is_compiled)
    with pytest.raises(ConfigError, match=f"needs {needed}; altogether it needs an NVIDIA GPU, runtime.compile=true"):
        cuda_graphs.check(config, compute, world_size)
    cuda_graphs.check(config, dataclasses.replace(compute, device=torch.device("cuda"), compiled=True), 1)
