"""A step makes the host wait for the device nowhere. CUDA's own count is in ``test_cuda.py``."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from backends.torch_engine.small_models import GPT2, LLAMA, LR, MODELS, POSITIONS, batch_of, make, random_rows
from backends.torch_engine.synchronisations import recorded
from small_configurations import HYBRID
from vorox.core.batch import Batch

pytestmark = pytest.mark.torch


def packed(step: int, micro_batches: int = 2) -> Batch:
    """Rows of three documents, some positions without a target."""
    keep = np.random.default_rng(step).random((8, POSITIONS)) < 0.7
    batch = batch_of(random_rows(8, step), micro_batches, step=step, keep=keep)
    segments_T = np.repeat([1, 2, 3], [5, 11, POSITIONS - 16])
    positions_T = np.concatenate([np.arange(5), np.arange(11), np.arange(POSITIONS - 16)])
    shape = batch.tokens_ABT.shape
    return dataclasses.replace(
        batch, segment_ids_ABT=np.ascontiguousarray(np.broadcast_to(segments_T, shape), np.int32),
        position_ids_ABT=np.ascontiguousarray(np.broadcast_to(positions_T, shape), np.int32),
    )  # fmt: skip


def test_every_way_to_wait_is_found() -> None:
    """The oracle of the counter: each of these waits on CUDA (``torch.cuda.set_sync_debug_mode``)."""
    x, device = torch.arange(4.0), torch.device("cpu")
    waits: dict[str, Any] = {
        "_local_scalar_dense": lambda: [x.sum().item(), float(x[0]), int(x[0]), bool(x[0] > 0)],
        "nonzero": lambda: [x.nonzero(), torch.where(x > 1)],
        "index": lambda: [x[x > 1]],
        "masked_select": lambda: [x.masked_select(x > 1)],
        "equal": lambda: [torch.equal(x, x)],
        "repeat_interleave": lambda: [x.repeat_interleave(x.long())],
        "tolist": lambda: [x.tolist()],
        "numpy": lambda: [x.numpy()],
        "cpu": lambda: [x.cpu()],
        "to": lambda: [x.to(device)],
        "tensor": lambda: [torch.tensor(1.0, device=device)],
    }
    for name, call in waits.items():
        with recorded() as found:
            results = call()
        assert [one.split(" in ")[0] for one in found] == [name] * len(results), name
    with recorded() as found:
        y = x.clone().requires_grad_()
        (y.masked_fill(x > 1, 0.0) + torch.where(x > 1, y, 0.0)).sum().backward()
        y.detach()[x.long()].sum().to(torch.bfloat16)
    assert not found


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "decoder": (LLAMA, {}),
    "biases, untied": (MODELS["gpt2 exact gelu, untied"], {}),
    "windows": (MODELS["gemma3"], {}),
    "accumulated": (LLAMA, {"train__micro_batch_sequences": 4}),
    "fp16": (LLAMA, {"precision__dtype": "fp16"}),
    "muon": (LLAMA, {"optimizer__name": "muon"}),
    "8 bits": (LLAMA, {"optimizer__name": "adamw_8bit"}),
    "in backward": (LLAMA, {"optimizer__in_backward": True, "optimizer__clip_norm": None}),
    "average": (LLAMA, {"train__ema_decay": 0.9}),
    "dropout": (GPT2 | {"dropout_fraction": 0.1}, {"train__embedding_noise": 5.0}),
    "statistics": (LLAMA, {"log__activation_statistics": True, "log__parameter_norms": True}),
    "checksums": (LLAMA, {"runtime__recompute_every_steps": 2}),
    "checkpointing": (LLAMA, {"train__activation_checkpointing": "block"}),
    "experts": (MODELS["mixtral"], {}),
    "hybrid": (HYBRID, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_does_not_wait(case: str) -> None:
    model, overrides = CASES[case]
    overrides = {"precision__dtype": "bf16"} | overrides  # without the fp32 kernels of the CPU
    engine = make(model, **overrides)
    for step, max_loss in enumerate([None, 100.0]):
        batch = packed(step, 1 if case == "in backward" else 2)
        with recorded() as found:
            result = engine.train_step(batch, lr=LR, weight_decay=0.1, max_loss=max_loss)
        assert found == [], f"step {step + 1}"
        with recorded() as found:
            result.fetch()
        assert found, "the loop reads the numbers of a step one step later"
