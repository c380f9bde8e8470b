"""Layer patterns in JAX: logits, decoding, documents of packed rows, exact replay, checkpoints, devices.

``tests/parity`` compares training with the torch engine; logits here are those of the numpy decoder in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.jax_engine.jax_models import make
from packed_rows import loss_of_documents, packed
from reference_decoder import numpy_logits
from small_configurations import HYBRID, PATTERNS, POSITIONS, batch_of, random_rows, randomise
from vorox.backends.jax_engine.engine import JaxEngine
from vorox.core.files.staged_directory import StagedDirectory
from vorox.training.checkpoints.store import write_state

pytestmark = pytest.mark.jax
ALL = [
    pytest.param(name, marks=() if name == "hybrid" else pytest.mark.slow, id=name) for name in sorted(PATTERNS)
]  # fmt: skip


def train(engine: JaxEngine, steps: int, *, start: int = 0) -> list[float]:
    return [
        engine.train_step(packed(step), lr=1e-3, weight_decay=0.1).fetch().loss for step in range(start, start + steps)
    ]


@pytest.mark.parametrize("name", ALL)
def test_logits_and_decoding_are_those_of_the_reference(name: str) -> None:
    engine = make(PATTERNS[name])
    weights = randomise(engine)
    tokens = random_rows(3)[:, :-1]
    expected = numpy_logits(engine._spec, weights, tokens)
    np.testing.assert_allclose(engine.logits(tokens), expected, atol=5e-4)
    for pieces in ((POSITIONS,), (5, 1, 1, 9, 1, 7)):
        decoder, fed = engine.decoder(3, POSITIONS), 0
        for count in pieces:
            found = decoder.feed(tokens[:, fed : fed + count])
            fed += count
            np.testing.assert_allclose(found, expected[:, fed - 1], atol=5e-4)  # as in the torch engine


@pytest.mark.parametrize("name", ALL)
def test_documents_of_a_row_do_not_meet(name: str) -> None:
    engine, batch = make(PATTERNS[name]), packed()
    weights = randomise(engine)
    values = engine.train_step(batch, lr=0.0, weight_decay=0.0).fetch()
    assert values.loss == pytest.approx(loss_of_documents(engine._spec, weights, batch), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [{}, {"optimizer__name": "muon"}, {"precision__dtype": "bf16"}], ids=str)
def test_loss_falls(overrides: dict[str, Any]) -> None:
    engine = make(HYBRID, **overrides)
    losses = [engine.train_step(packed(), lr=3e-3, weight_decay=0.1).fetch().loss for _ in range(40)]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
def test_training_is_exact_and_resumes_exactly(tmp_path: Path) -> None:
    first, second = make(HYBRID), make(HYBRID)
    losses = train(first, 6)
    assert train(second, 3) == losses[:3]
    with StagedDirectory(tmp_path / "state") as directory:
        write_state(second.snapshot(detached=False), directory)
        place = directory.commit({})
    resumed = make(HYBRID, run__seed=0)
    resumed.load(place)
    assert train(resumed, 3, start=3) == losses[3:]
    assert resumed.fingerprint() == first.fingerprint()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["block", "dots"])
def test_activation_checkpointing_computes_the_same(kind: str) -> None:
    plain, recomputed = make(HYBRID), make(HYBRID, train__activation_checkpointing=kind)
    assert train(recomputed, 3) == pytest.approx(train(plain, 3), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data_parallel_size": 4}, {"fsdp_size": 4}], ids=str)
def test_four_devices_give_what_one_gives(mesh: dict[str, int]) -> None:
    model = HYBRID | {"vocab_size": 64, "mamba_num_groups": 1}
    found = []
    for parallel in ({}, mesh):
        engine = make(model, parallel=parallel, train__micro_batch_sequences=2)
        batches = [batch_of(random_rows(8, step), 4, step=step) for step in range(4)]
        found.append([engine.train_step(batch, lr=1e-3, weight_decay=0.1).fetch().loss for batch in batches])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_dropout_and_statistics_of_layers() -> None:
    engine = make(HYBRID | {"dropout_fraction": 0.5}, log={"activation_statistics": True})
    values = engine.train_step(packed(), lr=1e-3, weight_decay=0.1).fetch()
    points = {key.split("/")[2] for key in values.extra if key.startswith("activation/")}
    assert points == {"block_input", "after_mlp"}
    again = make(HYBRID | {"dropout_fraction": 0.5}, log={"activation_statistics": True})
    assert again.train_step(packed(), lr=1e-3, weight_decay=0.1).fetch() == values
    without = make(HYBRID).train_step(packed(), lr=1e-3, weight_decay=0.1).fetch()
    assert without.loss != values.loss
