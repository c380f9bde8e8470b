"""A function in the place of forward and backward, against the built-in pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.torch_engine.small_models import LLAMA, batch_of, make, random_rows, train
from vorox.core.errors import ConfigError

pytestmark = pytest.mark.torch

STEPS = """
import numpy as np
import torch


def once(micro_batch):
    micro_batch.forward_backward()


def twice(micro_batch):
    micro_batch.forward_backward(weight=0.25)
    micro_batch.forward_backward(micro_batch.tokens_BT, micro_batch.labels_BT, weight=0.75)


def reversed_rows(micro_batch):
    micro_batch.forward_backward(micro_batch.tokens_BT[::-1], micro_batch.labels_BT[::-1].copy())


def noisy(micro_batch):
    tokens = torch.from_numpy(micro_batch.tokens_BT)
    micro_batch.forward_backward(torch.where(torch.rand(tokens.shape) < 0.3, 0, tokens))


def no_pass(micro_batch):
    pass


def wrong_shape(micro_batch):
    micro_batch.forward_backward(micro_batch.tokens_BT[:, :-1])


def unknown_token(micro_batch):
    micro_batch.forward_backward(np.full_like(micro_batch.tokens_BT, 10**6))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "steps.py").write_text(STEPS, encoding="utf-8")
    return tmp_path / "steps.py"


def some_steps(name: str | None, file: Path, **settings: Any) -> tuple[list[float], dict[str, np.ndarray]]:
    path = {} if name is None else {"train__forward_backward": f"{file}:{name}"}
    engine = make(LLAMA, **settings, **path)
    losses = [
        engine.train_step(batch_of(random_rows(8, step), 2, step=step), lr=1e-3, weight_decay=0.1).fetch().loss
        for step in range(3)
    ]
    return losses, dict(engine.export_weights())


def test_one_pass_has_the_same_bits(file: Path) -> None:
    for settings in ({}, {"model__dropout_fraction": 0.1}, {"precision__dtype": "bf16"}):
        (losses, weights), (expected, expected_weights) = (
            some_steps(name, file, **settings) for name in ("once", None)
        )
        assert losses == expected
        assert all(np.array_equal(array, expected_weights[name]) for name, array in weights.items())


@pytest.mark.parametrize("name", ["twice", "reversed_rows"])
def test_passes_that_compute_the_same_loss(name: str, file: Path) -> None:
    """Up to the order of sums."""
    (losses, weights), (expected, expected_weights) = (some_steps(one, file) for one in (name, None))
    assert losses == pytest.approx(expected, rel=1e-5)
    for key, array in weights.items():
        np.testing.assert_allclose(array, expected_weights[key], rtol=0, atol=2e-4, err_msg=key)


def test_random_numbers_repeat(file: Path) -> None:
    """By step and micro-batch, not by history."""
    noisy, _ = some_steps("noisy", file)
    assert noisy == some_steps("noisy", file)[0] != some_steps(None, file)[0]
    engine, other = (make(LLAMA, train__forward_backward=f"{file}:noisy") for _ in range(2))
    before = train(engine, 1, start=5)
    other.eval_step(batch_of(random_rows(8, 9)))
    assert train(other, 1, start=5) == before


@pytest.mark.parametrize(
    ("name", "what"),
    [("no_pass", "ran no backward pass"), ("wrong_shape", "this micro-batch has"), ("unknown_token", "1000000")],
)
def test_what_cannot_work_is_refused(name: str, what: str, file: Path) -> None:
    with pytest.raises(Exception, match=what) as refused:
        some_steps(name, file)
    assert isinstance(refused.value, ConfigError) or name == "unknown_token"
