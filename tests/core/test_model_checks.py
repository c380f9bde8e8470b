"""Settings of a mixture of experts that contradict each other or others."""

from __future__ import annotations

import re
from typing import Any

import pytest

from small_configurations import configuration
from vorox.core.config import load_config
from vorox.core.config.checks.cross_checks import find_problems
from vorox.core.errors import ConfigError

EXPERTS: dict[str, Any] = {"num_experts": 4}
DPO = {"loss__name": "dpo", "loss__load_balancing_weight": 0.0}


@pytest.mark.parametrize(
    ("model", "settings", "key"),
    [
        (EXPERTS | {"experts_per_token": 5}, {}, "model.experts_per_token"),
        (EXPERTS | {"mlp_bias": True}, {}, "model.mlp_bias"),
        (EXPERTS | {"mlp": "own.py:mlp"}, {}, "model.mlp"),
        (EXPERTS | {"block": "own.py:Block"}, {}, "model.block"),
        (EXPERTS | {"vision": {"num_layers": 1}}, {}, "model.vision.num_layers"),
        (EXPERTS | {"mup_base_hidden_size": 16, "tie_embeddings": False}, {}, "model.mup_base_hidden_size"),
        (EXPERTS, {"parallel__kind": "deepspeed"}, "model.num_experts"),
        (EXPERTS, {"parallel__context_parallel_size": 2}, "model.num_experts"),
        (EXPERTS, {"loss__name": "dpo"}, "loss.load_balancing_weight"),
        (EXPERTS, DPO | {"loss__router_z_loss_weight": 0.1}, "loss.load_balancing_weight"),
    ],
    ids=[
        "too many",
        "bias",
        "mlp",
        "block",
        "images",
        "width transfer",
        "deepspeed",
        "context",
        "dpo",
        "dpo with z-loss",
    ],
)
def test_contradictions_are_named(model: dict[str, Any], settings: dict[str, Any], key: str) -> None:
    def named(model: dict[str, Any], settings: dict[str, Any]) -> set[str]:
        problems = find_problems(configuration(model, **settings))
        return {key for problem in problems if re.search("expert|router", problem.what) for key in problem.keys}

    assert key in named(model, settings)
    without = {name: value for name, value in model.items() if name not in EXPERTS}
    assert key not in named(without | {"experts_per_token": None}, settings)
    assert key not in named(EXPERTS, {}), "experts alone have no problem"
    assert "loss.load_balancing_weight" not in named(EXPERTS, DPO)


@pytest.mark.parametrize("setting", ["model.experts_per_token=1", "loss.router_z_loss_weight=0.1"])
def test_settings_without_experts_are_refused(setting: str) -> None:
    load_config("quickstart", [setting, "model.num_experts=4"])
    with pytest.raises(ConfigError, match=r"model\.num_experts"):
        load_config("quickstart", [setting])
