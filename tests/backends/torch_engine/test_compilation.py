"""The compiled model computes what the uncompiled one does, says when it compiles, and compiles once for all blocks."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from backends.torch_engine.small_models import GPT2, LLAMA, batch_of, make, random_rows, train
from vorox.core.engine import StepValues
from vorox.core.errors import ConfigError

pytestmark = pytest.mark.torch
WINDOWS = ("sliding_attention", "full_attention")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own modules
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (GPT2 | {"num_layers": 4}, {}),
        (LLAMA | {"num_layers": 4, "num_kv_heads": 2}, {"train__activation_checkpointing": "block"}),
        (LLAMA | {"num_layers": 4, "dropout_fraction": 0.1}, {}),
        (LLAMA | {"num_layers": 4, "sliding_window_tokens": 6, "layer_types": WINDOWS, "rotary_fraction": 0.5}, {}),
    ],
    ids=["gpt2", "llama, recomputed", "llama, dropout", "some windows"],
)
def test_equal_within_tolerance(
    model: dict[str, Any], settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    plain, compiled = make(model, **settings), make(model, runtime__compile=True, **settings)
    twin = make(model, runtime__compile=True, **settings)
    with caplog.at_level(logging.INFO, "vorox.torch_engine"):
        found = train(compiled, 3)
    said = [record.message.split(" ")[0] for record in caplog.records if record.name == "vorox.torch_engine"]
    assert said == ["Compiling", "Compiled"]
    if not model.get("dropout_fraction"):  # a compiled model draws other numbers
        assert found == pytest.approx(train(plain, 3), rel=2e-6)
    assert train(twin, 3) == found, "bit for bit"
    assert twin.fingerprint() == compiled.fingerprint()
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_nothing_compiles_again_after_the_first_step() -> None:
    """Not for the next block, another step, or a micro-batch whose rows happen to hold one document each."""
    import torch._dynamo.utils  # takes seconds, and only these tests need it

    torch._dynamo.reset()
    engine, compiled = make(LLAMA | {"num_layers": 3}, runtime__compile=True), torch._dynamo.utils.counters["stats"]
    before = compiled["unique_graphs"]
    for step, num_documents in enumerate((2, 1, 3)):
        given = batch_of(random_rows(4, step), 2, step=step)
        segments = np.repeat(np.arange(1, num_documents + 1, dtype=np.int32), 24 // num_documents)
        segments_ABT = np.broadcast_to(segments, given.tokens_ABT.shape).copy()
        positions_ABT = np.broadcast_to(
            np.arange(24, dtype=np.int32) % (24 // num_documents), segments_ABT.shape
        ).copy()
        given = dataclasses.replace(given, segment_ids_ABT=segments_ABT, position_ids_ABT=positions_ABT)
        engine.train_step(given, lr=0.01, weight_decay=0.1).fetch()
    assert compiled["unique_graphs"] - before == 2, "one for all blocks, one for all chunks of the loss"
    torch._dynamo.reset()


def train_with_taps(*, is_compiled: bool) -> tuple[list[float], list[dict[str, float]], list[np.ndarray]]:
    """Losses, statistics and observed activations; step 1 has a tap that observes, steps 1 and 2 one that adds."""
    engine = make(
        LLAMA | {"num_layers": 3}, runtime__compile=is_compiled, log__activation_statistics=True,
        train__activation_checkpointing="block",
    )  # fmt: skip
    direction_D = torch.linspace(-0.1, 0.1, engine._spec.hidden_size)
    seen: list[np.ndarray] = []
    detach = list[Callable[[], None]]()
    found: list[StepValues] = []
    for step in range(3):
        if step == 1:
            engine.taps.attach("after_attention", 1, lambda x_BTD: x_BTD + direction_D)
            detach.append(engine.taps.attach("after_mlp", 2, lambda x_BTD: seen.append(x_BTD.detach().numpy().copy())))
        if step == 2:
            detach.pop()()
        batch = batch_of(random_rows(8, step), step=step)
        found.append(engine.train_step(batch, lr=0.01, weight_decay=0.1).fetch())
    return [values.loss for values in found], [dict(values.extra) for values in found], seen


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_taps_and_statistics_see_and_change_what_they_do_uncompiled() -> None:
    """A tap that observes, one that replaces, and statistics at all points, with recomputed blocks."""
    torch._dynamo.reset()
    losses, activations, seen = train_with_taps(is_compiled=False)
    compiled_losses, compiled_activations, compiled_seen = train_with_taps(is_compiled=True)
    assert compiled_losses == pytest.approx(losses, rel=2e-6)
    assert len(compiled_seen) == len(seen) > 0
    for here, there in zip(compiled_seen, seen, strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-4, atol=1e-5)
    for here, there in zip(compiled_activations, activations, strict=True):
        assert sum(name.startswith("activation/") for name in here) == 3 * 3 * 3
        assert here == pytest.approx(there, rel=1e-4, abs=1e-6)
    torch._dynamo.reset()


def test_a_missing_compiler_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Any:
        from torch._dynamo.exc import BackendCompilerFailed

        raise BackendCompilerFailed(lambda: None, RuntimeError("No working C++ compiler found"), None)

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    with pytest.raises(ConfigError, match="Compiling the model failed") as caught:
        make(runtime__compile=True).train_step(batch_of(random_rows(2)), lr=0.0, weight_decay=0.0)
    assert "runtime.compile=false" in caught.value.hint


def test_the_log_says_when_blocks_are_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    engine = make(runtime__compile=True)
    with caplog.at_level("INFO", logger="vorox"):
        for _ in range(2):
            engine.train_step(batch_of(random_rows(2)), lr=0.0, weight_decay=0.0)
    assert [record.event_kind for record in caplog.records] == ["compile_started", "compiled"]
    assert caplog.messages[0].startswith("Compiling the model for cpu")


def test_evaluation_never_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise AssertionError("compiled")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    engine = make(runtime__compile=True)
    assert engine.eval_step(batch_of(random_rows(2))).loss_sum > 0
    assert engine.logits(random_rows(2)[:, :-1]).shape == (2, 24, 61)


def test_the_compiler_is_not_imported_without_need() -> None:
    """It takes a second, which is a fifth of the time from start to the first step."""
    program = (
        "import sys; from backends.torch_engine.small_models import make, train; train(make(), 1); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
