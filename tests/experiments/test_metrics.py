"""The registry is complete, consistent and closed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vorox.core.errors import ConfigError
from vorox.experiments.metrics import MetricFunctions, metric, registry
from vorox.records.log import RunLog

NEEDED = [
    "loss",
    "perplexity",
    "bits_per_byte",
    "accuracy",
    "learning_rate",
    "weight_decay",
    "grad_norm",
    "parameter_norm",
    "z_loss",
    "loss_scale",
    "tokens_per_second",
    "step_seconds",
    "data_wait_seconds",
    "data_wait_fraction",
    "mfu_fraction",
    "matmul_peak_fraction",
    "eval/loss",
    "eval/perplexity",
    "eval/bits_per_byte",
    "eval/accuracy",
    "tokens_total",
    "epoch",
    "memory/host_bytes",
    "memory/device_bytes",
    "queue_depth",
    "checkpoint_seconds",
    "activation/3/mlp/std",
    "activation/11/block_input/absmax",
    "pipeline/tokenize/busy_seconds",
    "pipeline/read_to_filter/held_bytes",
]


@pytest.mark.parametrize("name", NEEDED)
def test_every_metric_of_the_house_is_defined(name: str) -> None:
    assert metric(name).description


def test_names_are_unique_and_units_agree_with_names() -> None:
    names = [entry.name for entry in registry()]
    assert len(names) == len(set(names))
    for entry in registry():
        assert entry.description.endswith(".")
        for suffix, unit in {"_seconds": "s", "_fraction": "fraction", "_bytes": "bytes"}.items():
            if entry.name.endswith(suffix) and not entry.name.startswith("seconds"):
                assert entry.unit == unit, entry.name
        assert re.fullmatch(r"[a-z0-9_/<>]+", entry.name)


HIGHER = {
    "accuracy", "eval/accuracy", "tokens_per_second", "mfu_fraction", "matmul_peak_fraction", "queue_depth",
    "memory/host_available_bytes", "model_flops_per_second", "rewards/accuracy", "rewards/margin",
}  # fmt: skip
LOWER = {
    "loss", "perplexity", "bits_per_byte", "eval/loss", "eval/perplexity", "eval/bits_per_byte", "step_seconds",
    "data_wait_seconds", "data_wait_fraction", "checkpoint_seconds", "eval_seconds", "memory/host_bytes",
    "memory/host_peak_bytes", "memory/device_bytes", "memory/device_peak_bytes", "memory/device_reserved_bytes",
    "mirror/age_seconds", "mirror/waiting_checkpoints", "runtime/compile_seconds",
}  # fmt: skip
NEITHER = {
    "learning_rate", "weight_decay", "grad_norm", "loss_scale", "tokens_total", "epoch", "eval/tokens", "eval/pairs",
    "rewards/chosen", "rewards/rejected",
}  # fmt: skip


def test_which_direction_is_better() -> None:
    """Comparisons of runs and sweeps rank by it."""
    better = {name: metric(name).better for name in HIGHER | LOWER | NEITHER}
    assert {name for name, direction in better.items() if direction == "higher"} == HIGHER
    assert {name for name, direction in better.items() if direction == "lower"} == LOWER
    assert {name for name, direction in better.items() if direction is None} == NEITHER


def test_memory_over_an_interval_is_its_worst_moment() -> None:
    for entry in registry():
        if entry.name.startswith("memory/"):
            assert entry.reduction == ("min" if "available" in entry.name else "max"), entry.name


@pytest.mark.parametrize("name", ["los", "activation/x/mlp/std", "activation/1/mlp", "activation/1/mlp/median", ""])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="Unknown metric") as caught:
        metric(name)
    assert caught.value.hint


def test_the_nearest_name_is_given() -> None:
    with pytest.raises(ConfigError, match="did you mean grad_norm"):
        metric("gradnorm")


def test_a_metric_that_asks_for_an_unknown_value_is_told_their_names(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def rate(step, values): return values['lr']\n", encoding="utf-8")
    shown: list[str] = []
    log = RunLog(None, echo=lambda text, _: shown.append(text))
    path = f"{tmp_path}/mine.py:rate"
    functions = MetricFunctions([path], kind="metric", key="log.metrics", prefix="custom/", log=log)
    assert functions(1, {"learning_rate": 0.1, "loss": 2.0}) == {}
    assert len(shown) == 1
    assert "KeyError: 'lr'" in shown[0]
    assert "the values are learning_rate, loss" in shown[0]
