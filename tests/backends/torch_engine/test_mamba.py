"""Layer patterns of the native decoder: documents of packed rows, initial values, exact replay, checkpoints, cost.

``test_model.py`` and ``test_decoder.py`` compare logits, gradients and decoding with the numpy decoder in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backends.torch_engine.small_models import (
    PATTERNS,
    POSITIONS,
    VOCAB,
    batch_of,
    configuration,
    make,
    random_rows,
    randomise,
    train,
)
from packed_rows import loss_of_documents, packed
from small_configurations import HYBRID
from vorox.core.config import load_config
from vorox.core.errors import ConfigError
from vorox.core.files.atomic import MANIFEST_NAME
from vorox.core.files.staged_directory import StagedDirectory
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.models.optimizer_groups import optimizer_groups
from vorox.planning.flops import flops_per_token
from vorox.planning.memory_estimate import memory_per_device
from vorox.training.checkpoints.store import write_state

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_documents_of_a_row_do_not_meet(name: str) -> None:
    engine, batch = make(PATTERNS[name]), packed()
    weights = randomise(engine)
    expected = loss_of_documents(engine._spec, weights, batch)
    values = engine.train_step(batch, lr=0.0, weight_decay=0.0).fetch()
    assert values.loss == pytest.approx(expected, rel=1e-5)


def test_initial_values_are_those_of_mamba() -> None:
    spec = make(HYBRID)._spec
    weights = dict(make(HYBRID).export_weights())
    assert isinstance(spec, DecoderSpec)
    np.testing.assert_allclose(weights["blocks.0.mamba.A_log"], np.log(np.arange(1, 7)), rtol=1e-6)
    assert np.all(weights["blocks.0.mamba.D"] == 1)
    steps = np.log1p(np.exp(weights["blocks.0.mamba.dt_bias"].astype(np.float64)))
    assert np.all((steps >= 0.00099) & (steps <= 0.1001))
    assert len(set(steps)) == 6
    conv = weights["blocks.0.mamba.conv.weight"]
    assert np.abs(conv).max() <= 0.5
    assert conv.std() == pytest.approx(0.5 / 3**0.5, rel=0.15)
    other = dict(make(HYBRID, run__seed=1).export_weights())
    assert not np.array_equal(other["blocks.0.mamba.dt_bias"], weights["blocks.0.mamba.dt_bias"])


def test_scan_parameters_never_decay() -> None:
    spec = make(HYBRID)._spec
    groups = optimizer_groups(spec, configuration().optimizer)
    plain = {name.split(".", 2)[2] for name, group in groups.items() if group.rule == "plain" and ".mamba." in name}
    assert plain == {"mamba.A_log", "mamba.D", "mamba.dt_bias", "mamba.norm.weight", "mamba.conv.bias"}


@pytest.mark.parametrize("overrides", [{}, {"optimizer__name": "muon"}, {"precision__dtype": "bf16"}], ids=str)
def test_loss_falls(overrides: dict[str, Any]) -> None:
    engine = make(HYBRID, **overrides)
    losses = [engine.train_step(packed(), lr=3e-3, weight_decay=0.1).fetch().loss for _ in range(40)]
    assert losses[-1] < losses[0] - 0.5


def test_training_is_exact_and_resumes_exactly(tmp_path: Path) -> None:
    first, second = make(HYBRID), make(HYBRID)
    losses = train(first, 6)
    assert train(second, 3) == losses[:3]
    with StagedDirectory(tmp_path / "state") as directory:
        write_state(second.snapshot(detached=False), directory)
        place = directory.commit({})
    assert (place / MANIFEST_NAME).exists()
    resumed = make(HYBRID, run__seed=0)
    resumed.load(place)
    assert train(resumed, 3, start=3) == losses[3:]
    assert resumed.fingerprint() == first.fingerprint()


@pytest.mark.parametrize("kind", ["block", "dots"])
def test_activation_checkpointing_changes_no_bit(kind: str) -> None:
    plain, recomputed = make(HYBRID), make(HYBRID, train__activation_checkpointing=kind)
    for step in range(2):
        values = [engine.train_step(packed(step), lr=1e-3, weight_decay=0.1).fetch() for engine in (plain, recomputed)]
        assert values[0] == values[1]
    assert plain.fingerprint() == recomputed.fingerprint()


def test_patterns_repeat_and_defaults_follow_the_width() -> None:
    model = configuration({"layer_pattern": "M*", "num_layers": 5}).model
    spec = decoder_spec(model, tokenizer_vocab_size=VOCAB, sequence_length_tokens=POSITIONS)
    assert spec.layer_pattern == "M*M*M"
    assert spec.mamba_num_heads == 1  # 2 x 32 / 64
    assert spec.layer_windows == (None, None)
    assert DecoderSpec(**spec.to_json()) == spec


def test_flops_are_counted_by_layer() -> None:
    spec = make(HYBRID)._spec
    assert isinstance(spec, DecoderSpec)
    matrices = sum(row.num_elements for row in spec.parameters if len(row.shape) == 2) - VOCAB * 32  # no look-up
    scans, attention = 3 * 21 * 48 * 7, 12 * 32 * POSITIONS  # three layers of Mamba-2, one of attention
    assert flops_per_token(spec, POSITIONS) == 6 * matrices + scans + attention


def test_memory_of_activations_is_estimated() -> None:
    """Measured bytes that autograd saves in the blocks, against the estimate, for a model of a usual shape."""
    model = {"layer_pattern": "M*-M", "num_layers": 4, "hidden_size": 256, "positions": "none", "activation": "relu2",
             "mamba_head_dim": 64, "mamba_state_size": 64, "mamba_chunk_tokens": 64, "num_heads": 4}  # fmt: skip
    engine = make(model)
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    parameters = {tensor.untyped_storage().data_ptr() for tensor in engine.parameters.modules.values()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.train_step(batch_of(random_rows(8)), lr=0.0, weight_decay=0.0).fetch()
    found = sum(size for place, size in saved.items() if place not in parameters)
    memory = memory_per_device(engine._spec, engine._config)
    assert memory.activation_bytes == pytest.approx(found, rel=0.4)


REFUSED = [
    (["model.layer_pattern=M*E"], "has E"),
    (["model.layer_pattern=M*-M*-M", "model.num_layers=6"], "set model.num_layers=7"),
    (["model.layer_pattern=*-", "model.mamba_head_dim=32"], "model.layer_pattern with M"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_contradictions_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("quickstart", overrides)
