"""A training loop from public pieces, against the run of the same configuration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tiny_runs
import vorox
from vorox.core.errors import ConfigError

pytestmark = pytest.mark.torch

SETTINGS = [
    "schedule.name=constant", "schedule.warmup_steps=0", "optimizer.weight_decay=0", "optimizer.clip_norm=null",
    "train.micro_batch_sequences=4", "train.num_steps=6", "log.every_steps=1", "data.document_mask=false",
]  # fmt: skip


def test_a_custom_loop_repeats_the_losses_of_a_run(tmp_path: Path) -> None:
    """With torch's AdamW and autograd on the module; then the engine trains on, though gradients were set to None."""
    import torch
    import torch.nn.functional as F

    config = tiny_runs.configuration(tmp_path, SETTINGS)
    run = vorox.open_run(vorox.train(config).run_directory)
    expected = [run.metrics()[step]["loss"] for step in range(1, 7)]
    model = vorox.create_model(config)
    assert model.path is None
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0)
    batches = list(run.batches(first_step=1, num_steps=6))
    losses = []
    for batch in batches:
        logits = model.forward(torch.from_numpy(batch.tokens_ABT[0]))
        loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.labels_ABT[0]).long().flatten())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < losses[0] - 0.1
    before = model.weights()
    model.engine.train_step(batches[0], lr=0.01, weight_decay=0.0).fetch()
    assert all(np.abs(array - before[name]).max() > 1e-3 for name, array in model.weights().items())


def test_a_hook_sees_the_forward_pass(tmp_path: Path) -> None:
    model = vorox.create_model(tiny_runs.configuration(tmp_path, SETTINGS))
    seen: list[tuple[int, ...]] = []
    hook = model.module.blocks[0].mlp.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    model.logits([1, 2, 3])
    hook.remove()
    model.logits([1, 2, 3])
    assert seen == [(3, 16)]
    with pytest.raises(ConfigError, match="belongs to no run"):
        _ = model.run_directory


def test_other_engines_have_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    model = vorox.create_model(tiny_runs.configuration(tmp_path))
    with pytest.raises(ConfigError, match="has no torch module"):
        _ = model.module
