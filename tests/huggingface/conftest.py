"""Small random transformers models, scaled so that logits are far from trivial.

Nothing touches the network: models are made from configurations, and the hub's client is offline while a test runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest

from huggingface.small_cases import CASES


@pytest.fixture(autouse=True)
def hub_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """For these tests only: others of the same process talk to a hub on this machine."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A config.json, with token ids that lie inside the vocabulary."""
    return deepcopy(dict(CASES[request.param])) | {"bos_token_id": 1, "eos_token_id": 1}


@pytest.fixture
def random_model() -> Callable[..., Any]:
    """(config dict, seed) to a transformers model with random weights, biases and norms, in evaluation mode."""

    def make(config: Mapping[str, Any], seed: int = 0) -> Any:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        fields = deepcopy(dict(config))  # transformers fills in nested values
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                matrix = parameter.ndim == 2
                # Wide enough that attention is far from uniform and logits of different tokens lie apart.
                parameter.copy_(noise * 0.2 if matrix else 1 + noise * 0.3 if parameter.mean() > 0.5 else noise * 0.3)
        return model.float().eval()

    return make
