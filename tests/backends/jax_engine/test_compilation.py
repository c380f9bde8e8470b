"""What is compiled, how often, and what it keeps in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.jax_engine.jax_models import engine_of, jax_configuration, make
from small_configurations import LLAMA, POSITIONS, batch_of, random_rows
from vorox.backends.jax_engine import compiled_memory as compiled_memory_module
from vorox.backends.jax_engine import engine as engine_module
from vorox.backends.jax_engine.compiled_memory import compiled_memory
from vorox.planning.memory_estimate import memory_per_device


def temporary_bytes(**changes: object) -> int:
    """What the compiled step needs besides its arguments, as XLA plans it."""
    engine = make(LLAMA | {"num_layers": 4}, **changes)
    engine.train_step(batch_of(random_rows(8)), lr=1e-3, weight_decay=0.0)
    (step,) = engine._compiled_steps.values()
    return step.memory_analysis().temp_size_in_bytes


def test_scanned_layers_keep_less_than_layers_one_by_one() -> None:
    """A scan that kept every intermediate for its backward pass needed a third more memory and time."""
    assert temporary_bytes(runtime__scan_layers=True) < 0.8 * temporary_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"runtime__scan_layers": True, "optimizer__name": "muon", "train__ema_decay": 0.99},
        {"data__document_mask": True, "train__activation_checkpointing": "block"},
    ],
    ids=["layers", "scanned, muon, average", "documents, recomputed"],
)
def test_a_step_is_planned_as_it_is_compiled(changes: dict[str, Any]) -> None:
    """Compiled for arrays that do not exist, a step needs what the same step of a run needs."""
    config = jax_configuration(LLAMA | {"num_layers": 4}, train__micro_batch_sequences=2, **changes)
    engine = engine_of(config)
    batch = batch_of(random_rows(config.train.global_batch_sequences), config.train.global_batch_sequences // 2)
    if config.data.document_mask:
        positions = np.broadcast_to(np.arange(POSITIONS, dtype=np.int32), batch.tokens_ABT.shape)
        batch = replace(batch, segment_ids_ABT=np.ones_like(positions), position_ids_ABT=positions)
    engine.train_step(batch, lr=1e-3, weight_decay=0.0)
    (step,) = engine._compiled_steps.values()
    expected = step.memory_analysis()
    estimate = memory_per_device(engine._spec, config, "cpu")
    found = compiled_memory(config, engine._spec, estimate)
    process = compiled_memory_module._PROCESS_BYTES + compiled_memory_module._COMPILED_LAYER_BYTES * (
        1 if config.runtime.scan_layers else 4
    )
    assert found.workspace_bytes - process == expected.temp_size_in_bytes + (
        expected.output_size_in_bytes - expected.alias_size_in_bytes
    )
    assert (found.parameter_bytes, found.optimizer_bytes) == (estimate.parameter_bytes, estimate.optimizer_bytes)


def test_the_log_says_when_a_step_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    engine = make()
    with caplog.at_level("INFO", logger="vorox"):
        for _ in range(2):
            engine.train_step(batch_of(random_rows(8)), lr=1e-3, weight_decay=0.0)
    started, ended = caplog.records
    assert started.getMessage().startswith("Compiling the step for cpu")
    assert ended.getMessage().startswith("Compiled in ")
    assert ended.event_fields["seconds"] == pytest.approx(engine.device_stats()["runtime/compile_seconds"])


def test_a_product_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    assert engine.matmul_seconds(8, 16, 24) > 0
    monkeypatch.setattr(engine_module.jax, "jit", lambda *_: pytest.fail("compiled again"))
    assert np.isfinite(engine.matmul_seconds(8, 16, 24))


@pytest.mark.parametrize(("optimizer", "moments"), [("adamw", 2), ("muon", 1)])
def test_the_memory_that_is_held_between_steps(optimizer: str, moments: int) -> None:
    engine = make(LLAMA, optimizer__name=optimizer)
    engine.train_step(batch_of(random_rows(8)), lr=1e-3, weight_decay=0.0)
    found = engine.device_stats()
    rows = engine._spec.parameters
    whole = sum(row.num_elements for row in rows)
    assert found["memory/parameter_bytes"] == 4 * whole
    matrices = sum(row.num_elements for row in rows if row.kind == "matrix")
    assert found["memory/optimizer_bytes"] == 8 * whole - (2 - moments) * 4 * matrices
    assert "memory/gradient_bytes" not in found, "they exist within the compiled step only"
