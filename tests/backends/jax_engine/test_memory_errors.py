"""Devices that run out of memory: when a step is started, and while it runs."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.engines import LR, batch, make_engine, rows
from vorox.core.errors import DoesNotFitError

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax
EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7516192768 bytes"


@pytest.mark.parametrize("text", [EXHAUSTED, "INTERNAL: something else"])
@pytest.mark.parametrize("is_running", [False, True], ids=["at the start", "while it runs"])
def test_an_exhausted_device_names_settings_that_fit(
    monkeypatch: pytest.MonkeyPatch, text: str, is_running: bool
) -> None:
    from vorox.backends.jax_engine.device import results
    from vorox.backends.jax_engine.engine import JaxEngine

    def fail(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError(text)

    owner, name = (results.JaxStepResult, "_values") if is_running else (JaxEngine, "compiled_step")
    monkeypatch.setattr(owner, name, fail)
    engine = make_engine("jax")
    with pytest.raises(DoesNotFitError if text == EXHAUSTED else jax.errors.JaxRuntimeError) as found:
        engine.train_step(batch(rows(4)), lr=LR, weight_decay=0.1).fetch()
    if text == EXHAUSTED:
        assert found.value.exit_code == 3
        assert "activations grow to" in found.value.what or "logits grow to" in found.value.what
        assert "train.micro_batch_sequences" in found.value.hint
        assert "RESOURCE" not in found.value.what
