"""Presets for hardware: each fits into its devices, with the batch that the card is known for."""

from __future__ import annotations

import json

import pytest

from vorox.cli import main
from vorox.core.config import load_config

ROWS = {
    # preset: (rows of a micro-batch, micro-batches of a step, rows of a step)
    "rtx4090": (12, 4, 48),
    "rtx3080": (8, 6, 48),
    "rtx3070": (6, 8, 48),
    "a100-80x4": (4, 4, 64),
    "h100": (8, 32, 256),
    "h200": (4, 64, 256),
}


@pytest.mark.parametrize("name", ROWS)
def test_it_fits_with_a_tenth_to_spare(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", name, "--hardware", name, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"]
    assert plan["memory_bytes"] <= 0.9 * plan["hardware"]["memory_bytes"]
    micro, count, rows = ROWS[name]
    assert plan["micro_batch_sequences"] == micro
    assert micro * count * plan["hardware"]["num_devices"] == rows
    assert plan["alternatives"] == []
    config = load_config(name)
    assert config.train.global_batch_sequences == rows
    assert config.parallel.fsdp_size == plan["hardware"]["num_devices"]


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("rtx3080", "train.activation_checkpointing=none"),
        ("rtx3070", "optimizer.name=adamw"),
        ("h200", "train.micro_batch_sequences=8"),
        ("a100-80x4", "parallel.fsdp_size=1 train.micro_batch_sequences=16 train.activation_checkpointing=none"),
    ],
)
def test_what_it_sets_is_needed(name: str, without: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", name, *without.split(), "--hardware", name]) == 3
    assert "DOES NOT FIT" in capsys.readouterr().out


@pytest.mark.parametrize("name", ROWS)
def test_a_token_for_each_twentieth_of_a_parameter(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", name, "--hardware", name, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    num_parameters = plan["memory"]["parameter_bytes"] / 4 * plan["hardware"]["num_devices"]
    assert plan["total_tokens"] / num_parameters == pytest.approx(20, rel=0.05)


def test_the_cards_of_one_model_take_the_same_steps() -> None:
    """The three RTX presets differ only in what decides memory."""
    base = load_config("rtx4090").model_dump()
    for name in ("rtx3080", "rtx3070"):
        other = load_config(name).model_dump()
        for section in base:
            for key, value in base[section].items() if isinstance(base[section], dict) else ():
                if other[section][key] != value:
                    assert f"{section}.{key}" in {
                        "train.micro_batch_sequences", "train.activation_checkpointing", "optimizer.name", "run.name",
                    }  # fmt: skip
