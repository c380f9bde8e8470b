"""Recomputed steps: an injected bit error is found and named, the run resumes, and without one no bit changes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numpy_engine import NumpyEngine
from tiny_runs import configuration, result, run, use_numpy_engine
from vorox.core.config import load_config
from vorox.core.errors import ConfigError, NumericalError

RECOMPUTE = ["runtime.recompute_every_steps=3"]


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)


def flip_one_bit(monkeypatch: pytest.MonkeyPatch, *, at_call: int) -> list[int]:
    """Flip a bit of the largest gradient element in one computation of a step; return the steps that are computed.

    A lower bit, or that of a small element, may be lost by rounding in the sum over micro-batches.
    """
    train_step, gradients = NumpyEngine.train_step, NumpyEngine._gradients
    computed: list[int] = []

    def recorded(engine: NumpyEngine, batch: Any, **kwargs: Any) -> Any:
        computed.append(batch.step + 1)
        return train_step(engine, batch, **kwargs)

    def flipped(engine: NumpyEngine, *arguments: Any) -> Any:
        loss, found = gradients(engine, *arguments)
        if len(computed) == at_call:
            words = found["output"].view(np.uint32)
            words.flat[np.abs(found["output"]).argmax()] ^= 1 << 16
        return loss, found

    monkeypatch.setattr(NumpyEngine, "train_step", recorded)
    monkeypatch.setattr(NumpyEngine, "_gradients", flipped)
    return computed


def test_without_an_error_no_bit_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(configuration(tmp_path / "plain"))
    computed = flip_one_bit(monkeypatch, at_call=0)
    checked = run(configuration(tmp_path / "checked", RECOMPUTE))
    assert result(checked) == result(plain)
    assert [(step, len([*same])) for step, same in itertools.groupby(computed)] == [
        (step, 2 if step % 3 == 0 else 1) for step in range(1, 13)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("at_call", [7, 8], ids=["first", "second"])
def test_a_flipped_bit_ends_the_run_before_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_call: int
) -> None:
    """Step 6 is the seventh and eighth computation."""
    plain, config = run(configuration(tmp_path / "plain")), configuration(tmp_path / "checked", RECOMPUTE)
    with monkeypatch.context() as patch:
        flip_one_bit(patch, at_call=at_call)
        with pytest.raises(NumericalError, match="Silent bit error") as stopped:
            run(config)
    assert (stopped.value.exit_code, stopped.value.where) == (7, "step 6")
    assert stopped.value.saved == "training state up to step 4 is safe in step-00000004"
    resumed = run(config)
    assert result(resumed) == {**result(plain), "losses": result(resumed)["losses"]}


def test_an_engine_that_does_not_repeat_bits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(tmp_path, RECOMPUTE)
    facts = NumpyEngine.environment
    monkeypatch.setattr(NumpyEngine, "environment", lambda engine: {**facts(engine), "determinism": "data"})
    with pytest.raises(ConfigError, match="determinism is data"):
        run(config)
    assert not any((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("setting", ["runtime.determinism=data", "parallel.kind=deepspeed"])
def test_a_setting_that_cannot_repeat_a_step_is_refused(tmp_path: Path, setting: str) -> None:
    configuration(tmp_path)
    with pytest.raises(ConfigError, match=r"runtime\.recompute_every_steps"):
        load_config(tmp_path / "tiny.yaml", [*RECOMPUTE, setting])
