"""Experts in JAX: metrics of the torch engine on the same weights, stacked leaves, and checkpoints of both layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.jax_engine.jax_models import make
from small_configurations import MODELS, POSITIONS, VOCAB, batch_of, configuration, random_rows
from vorox import backends
from vorox.core.errors import ConfigError
from vorox.core.files.staged_directory import StagedDirectory
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.models.decoder.spec import decoder_spec
from vorox.training.checkpoints.store import write_state

pytestmark = pytest.mark.jax

MODEL = MODELS["qwen3 experts"]
ROUTERS = {"load_balancing_weight": 0.3, "router_z_loss_weight": 0.2}


def save(engine: Any, target: Path) -> Path:
    with StagedDirectory(target) as directory:
        write_state(engine.snapshot(detached=False), directory)
        return directory.commit({})


def train(engine: Any, steps: int) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []
    keep = np.random.default_rng(3).random((8, POSITIONS)) < 0.8
    for step in range(steps):
        batch = batch_of(random_rows(8, step), 2, step=step, keep=keep)
        result = engine.train_step(batch, lr=1e-3, weight_decay=0.1).fetch()
        found.append({"loss": result.loss, "grad_norm": result.grad_norm, **result.extra})
    return found


@pytest.mark.torch
def test_metrics_and_gradients_of_routers_are_those_of_torch() -> None:
    config = configuration(MODEL, loss=ROUTERS)
    spec = decoder_spec(config.model, tokenizer_vocab_size=VOCAB, sequence_length_tokens=POSITIONS)
    expected = train(backends.load("torch").create(config, spec, DistributedContext()), 4)
    assert len(expected[0]) == 7, "all metrics of routers"
    for here, there in zip(train(make(MODEL, loss=ROUTERS), 4), expected, strict=True):
        assert here == pytest.approx(there, rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_scanned_layers_stack_experts_behind_layers(optimizer: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizer__name": optimizer, "checkpoint__format": "orbax", "loss": ROUTERS}
    plain, scanned = make(MODEL, **settings), make(MODEL, runtime__scan_layers=True, **settings)
    assert scanned.state.params["blocks.mlp.experts.up.weight"].shape == (2, 5, 40, 32)
    assert plain.state.params["blocks.1.mlp.experts.up.weight"].shape == (5, 40, 32)
    first = dict(plain.export_weights())
    for name, array in scanned.export_weights():
        np.testing.assert_array_equal(array, first[name], err_msg=name)
    for here, there in zip(train(scanned, 3), train(plain, 3), strict=True):
        assert here == pytest.approx(there, rel=1e-4)
    path, before = save(plain, tmp_path / "saved"), plain.fingerprint()
    scanned.load(path)
    assert scanned.fingerprint() == before
    plain.load(save(scanned, tmp_path / "again"))
    assert plain.fingerprint() == before


def test_several_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_experts = 5 is not supported by the jax engine on 2 devices"):
        make(MODEL, parallel__fsdp_size=2)
