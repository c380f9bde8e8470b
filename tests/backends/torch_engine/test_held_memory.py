"""The parts of memory that a rank holds, against the number of elements of the model, and against the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends.torch_engine.small_models import GPT2, LLAMA, POSITIONS, VOCAB, configuration, engine_of, train
from vorox.backends.torch_engine import held_memory
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.planning.memory_estimate import memory_per_device

pytestmark = pytest.mark.torch
PARTS: tuple[str, ...] = ("memory/parameter_bytes", "memory/gradient_bytes", "memory/optimizer_bytes")
COUNTERS = 3 * 4
"""Updates, loss scale and its age."""


def held(model: dict[str, Any], **settings: Any) -> tuple[list[float], DecoderSpec, list[int]]:
    """Train a step; return the held bytes by part, the model, and the planned bytes."""
    config = configuration(model, **settings)
    engine = engine_of(config)
    train(engine, 1)
    found = engine.device_stats()
    spec = decoder_spec(config.model, tokenizer_vocab_size=VOCAB, sequence_length_tokens=POSITIONS)
    plan = memory_per_device(spec, config, "cpu")
    return [found[name] for name in PARTS], spec, [plan.parameter_bytes, plan.gradient_bytes, plan.optimizer_bytes]


def padding(spec: DecoderSpec) -> int:
    """Bytes that alignment adds at most to a buffer: 60 for each parameter."""
    return 60 * len(spec.parameters)


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_adamw_holds_four_numbers_for_each_parameter(model: dict[str, Any]) -> None:
    found, spec, planned = held(model)
    whole = 4 * spec.num_parameters
    for bytes_held, times in zip(found, (1, 1, 2), strict=True):
        assert times * whole <= bytes_held <= times * (whole + padding(spec)) + COUNTERS
    assert found == pytest.approx(planned, rel=0.05), "as planned, but for alignment"


def test_muon_has_one_moment_for_matrices() -> None:
    found, spec, planned = held(LLAMA, optimizer__name="muon")
    matrices = sum(row.num_elements for row in spec.parameters if row.kind == "matrix")
    expected = 8 * spec.num_parameters - 4 * matrices
    assert expected <= found[2] <= expected + 2 * padding(spec) + COUNTERS
    assert found == pytest.approx(planned, rel=0.05)


def test_an_average_is_held_with_the_optimizer() -> None:
    found, spec, _ = held(LLAMA, train__ema_decay=0.9)
    assert 12 * spec.num_parameters <= found[2] <= 12 * spec.num_parameters + 3 * padding(spec) + COUNTERS


def test_moments_in_8_bits_take_a_quarter() -> None:
    whole, spec, _ = held(LLAMA)
    found, _, _ = held(LLAMA, optimizer__name="adamw_8bit")
    decayed = sum(row.num_elements for row in spec.parameters if row.decay)
    assert whole[2] - found[2] == pytest.approx(6 * decayed, rel=0.1)


def test_gradients_that_are_applied_in_the_backward_pass_are_not_held() -> None:
    found, spec, _ = held(
        LLAMA, optimizer__in_backward=True, optimizer__clip_norm=None, train__max_nonfinite_steps=0,
        train__global_batch_sequences=8, train__micro_batch_sequences=8,
    )  # fmt: skip
    assert found[1] < 4 * spec.num_parameters / 2
    assert found[0] == pytest.approx(4 * spec.num_parameters, rel=0.05)


def test_frozen_parameters_have_neither_gradient_nor_moments() -> None:
    found, spec, planned = held(LLAMA, optimizer__groups=[{"match": "blocks.*", "frozen": True}])
    trained = sum(row.num_elements for row in spec.parameters if not row.name.startswith("blocks."))
    assert found[0] >= 4 * spec.num_parameters
    assert found[1] == pytest.approx(4 * trained, rel=0.05)
    assert found == pytest.approx(planned, rel=0.05)


def test_a_storage_counts_once_and_only_on_its_device() -> None:
    whole = torch.zeros(100)
    counted: set[int] = set()
    tensors = [whole[:10], whole[50:], torch.zeros(7), torch.zeros(3, device="meta")]
    assert held_memory._new_bytes(tensors, torch.device("cpu"), counted) == 428
    assert held_memory._new_bytes([whole], torch.device("cpu"), counted) == 0


def test_the_rest_of_the_peak_is_what_steps_allocate() -> None:
    parts = dict.fromkeys(PARTS, 100.0)
    assert held_memory.beyond({"memory/device_peak_bytes": 750.0}, parts) == {"memory/step_peak_bytes": 450.0}
    assert held_memory.beyond({}, parts) == {}, "no counter, no number"


def test_reads_between_two_measurements_walk_over_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(configuration(LLAMA))
    measured: list[str] = []
    original = held_memory.HeldMemory._measure
    monkeypatch.setattr(held_memory.HeldMemory, "_measure", lambda self: measured.append("measured") or original(self))
    found = [engine.device_stats() for _ in range(2 * held_memory.MEASURE_EVERY_READS)]
    assert len(measured) == 3
    assert found[0] == found[-1]
    assert found[0]["memory/parameter_bytes"] > 0
