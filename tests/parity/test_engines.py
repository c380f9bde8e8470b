"""The torch and the JAX engine held equal: the same weights over the same batches for 50 steps, in fp32.

Bounds: logits 1e-5 over the 50 steps and 1e-4 elsewhere, loss 1e-5 relative, gradient norm 1e-5 relative; a single
element within a tenth of what the learning rates so far allow (AdamW gives a gradient that is all rounding the full
rate with any sign), all parameters together within a thousandth of the way that training went. Every family, with
document masks and accumulation.

The learning rate is one at which training does not amplify rounding: at 3e-3 an engine and itself, begun with weights
that differ in the last bit, are 1e-4 apart after 50 steps.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from small_configurations import MODELS, PATTERNS, POSITIONS, VOCAB, configuration, random_rows
from vorox import backends
from vorox.core.batch import IGNORED_LABEL, Batch, DataCursor
from vorox.core.engine import Engine
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.models.decoder.spec import decoder_spec
from vorox.training.reports.engine_parity import QUANTITIES, Tolerances, compare

pytestmark = [pytest.mark.torch, pytest.mark.jax]
NUM_STEPS = 50
ALL = MODELS | PATTERNS


def engine(name: str, model: dict[str, Any], **overrides: Any) -> Engine:
    config = configuration(model, **overrides)
    if name == "jax":
        config = config.model_copy(
            update={"backend": "jax", "runtime": config.runtime.model_copy(update={"num_threads": None})}
        )
    spec = decoder_spec(config.model, tokenizer_vocab_size=VOCAB, sequence_length_tokens=POSITIONS)
    return backends.load(name).create(config, spec, DistributedContext())


def packed(step: int) -> Batch:
    """Two micro-batches of four rows that hold one to four documents each, and padding."""
    generator = np.random.default_rng([3, step])
    rows = random_rows(8, step)
    segments = np.sort(generator.integers(1, 5, (8, POSITIONS)), axis=1).astype(np.int32)
    segments[:, POSITIONS - int(generator.integers(0, 5)) :] = 0
    starts = np.concatenate([np.ones((8, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    index = np.broadcast_to(np.arange(POSITIONS), segments.shape)
    positions = (index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)).astype(np.int32)
    same = np.concatenate([segments[:, 1:] == segments[:, :-1], np.zeros((8, 1), bool)], axis=1) & (segments > 0)
    labels = np.where(same, rows[:, 1:], IGNORED_LABEL).astype(np.int32)
    shaped = [array.reshape(2, 4, POSITIONS) for array in (rows[:, :-1].copy(), labels, segments, positions)]
    count = int((labels != IGNORED_LABEL).sum())
    return Batch(step, *shaped, np.zeros((2, 4), np.uint64), count, DataCursor("", 0, step + 1, 0, 0))


@pytest.mark.parametrize("model", ["gpt2", "llama grouped, untied", "qwen3", "mixtral", "hybrid"])
def test_every_family_over_fifty_steps(model: str) -> None:
    found = compare(
        engine("torch", ALL[model]), engine("jax", ALL[model]),
        (packed(step % 4) for step in range(NUM_STEPS)), NUM_STEPS,
        lr=lambda step: 1e-3 * min(1, (step + 1) / 10), weight_decay=lambda _: 0.1,
    )  # fmt: skip
    assert len(found) == NUM_STEPS
    assert [step.exceeded(Tolerances(logits=1e-5)) for step in found] == [None] * NUM_STEPS
    assert found[-1].losses[0] < found[0].losses[0]


@pytest.mark.parametrize("model", sorted(ALL))
def test_every_kind_of_model_over_a_few_steps(model: str) -> None:
    found = compare(
        engine("torch", ALL[model]), engine("jax", ALL[model]), map(packed, range(3)), 3,
        lr=lambda _: 1e-3, weight_decay=lambda _: 0.1,
    )  # fmt: skip
    assert [step.exceeded(Tolerances()) for step in found] == [None] * 3


@pytest.mark.parametrize(
    "overrides",
    [
        {"optimizer__name": "muon"},
        {"loss__z_loss_weight": 1e-3, "loss__label_smoothing_fraction": 0.1, "loss__chunk_tokens": 16},
        {"optimizer__clip_norm": 0.1, "optimizer__decay_embeddings": False},
        {"train__activation_checkpointing": "block"},
    ],
    ids=lambda value: ", ".join(value),
)
def test_options_mean_the_same(overrides: dict[str, Any]) -> None:
    found = compare(
        engine("torch", MODELS["llama"], **overrides), engine("jax", MODELS["llama"], **overrides),
        map(packed, range(5)), 5, lr=lambda _: 1e-3, weight_decay=lambda _: 0.1,
    )  # fmt: skip
    assert [step.exceeded(Tolerances()) for step in found] == [None] * 5


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_a_difference_is_named(quantity: str) -> None:
    """The comparison can fail: a tolerance below what rounding gives, one at a time, in order."""
    (step,) = compare(
        engine("torch", MODELS["gpt2"]), engine("jax", MODELS["gpt2"]), map(packed, range(1)), 1,
        lr=lambda _: 1e-3, weight_decay=lambda _: 0.1,
    )  # fmt: skip
    assert step.exceeded(dataclasses.replace(Tolerances(), **{quantity: -1.0})) == quantity


def test_another_model_is_told_apart() -> None:
    """One engine with another rotary base: equal shapes, other numbers, found in the first logits."""
    found = compare(
        engine("torch", MODELS["llama"]), engine("jax", MODELS["llama"] | {"rope_theta": 500.0}), map(packed, range(1)),
        1, lr=lambda _: 1e-3, weight_decay=lambda _: 0.1,
    )  # fmt: skip
    assert found[0].exceeded(Tolerances()) == "logits"
