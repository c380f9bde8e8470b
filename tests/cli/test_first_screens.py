"""The line about the training, the closing commands, and the options that name steps."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from vorox.cli.data.provenance import chosen_steps
from vorox.cli.settings.training_settings import training_settings
from vorox.cli.training.summary import _check_option
from vorox.core.config import load_config, resolve_config
from vorox.core.errors import ConfigError

TEXT = 'data.sources=[{"name": "t", "format": "txt", "paths": ["t"]}]'


def test_settings_are_named_by_the_place_that_set_them() -> None:
    resolved = resolve_config("gpt2-124m", [TEXT, "optimizer.lr=0.001", "schedule.warmup_steps=7"])
    text = training_settings(resolved.config, resolved.origin)
    assert "learning rate 0.001 (override optimizer.lr=0.001)" in text
    assert "warm-up 7 steps (override schedule.warmup_steps=7)" in text
    assert "2.50B tokens (preset gpt2-124m:" in text
    assert "512 rows a step (preset gpt2-124m:" in text
    known = training_settings(resolved.config, resolved.origin, warmup_steps=9)
    assert "warm-up 9 steps" in known


def test_settings_of_a_recorded_run_have_no_places() -> None:
    config = load_config("quickstart")
    assert training_settings(config) == (
        "learning rate 0.01, 0.02 for matrices, cosine to 10%, warm-up 20 steps, 600 steps, 8 rows a step, rows of 256 "
        "tokens"
    )
    without = load_config("quickstart", ["schedule.warmup_steps=0", "schedule.name=constant"])
    assert "constant, no warm-up" in training_settings(without)
    held = load_config("quickstart", ["schedule.name=hold", "schedule.warmup_steps=0", "schedule.min_lr_fraction=0.2"])
    assert "learning rate 0.002, 0.004 for matrices, hold at 20% of 0.01, no warm-up" in training_settings(held)


@pytest.mark.parametrize(("form", "library"), [("hf", "transformers"), ("peft", "peft")])
def test_a_closing_command_needs_only_what_is_installed(
    form: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {library}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    assert _check_option(form) == " --check"
    installed.clear()
    assert _check_option(form) == ""


def test_step_and_steps_name_the_same_steps_everywhere() -> None:
    assert chosen_steps(None, None) is None
    assert chosen_steps(5, None) == (5, 5)
    assert chosen_steps(None, "3:7") == (3, 7)
    for wrong in ((5, "3:7"), (None, "7:3"), (None, "x")):
        with pytest.raises(ConfigError):
            chosen_steps(*wrong)


def test_replay_refuses_two_ways_to_name_steps() -> None:
    from vorox.cli.checks.replay import replay

    arguments: dict[str, Any] = {
        "run": "x",
        "first_step": 2,
        "last_step": None,
        "step": 3,
        "steps": None,
        "nproc": 1,
        "root": "runs",
        "as_json": False,
    }
    with pytest.raises(ConfigError, match="--step and --steps replace --from and --to"):
        replay(**arguments)
