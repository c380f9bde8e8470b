"""Every preset size as transformers sees it: same parameter count, same names and shapes, on the meta device."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import pytest
import yaml

from vorox.core.schema.model import ModelConfig
from vorox.models.decoder.spec import decoder_spec
from vorox.models.huggingface.config import huggingface_config, spec_from_huggingface
from vorox.models.huggingface.weights import huggingface_entries

pytestmark = [pytest.mark.hf, pytest.mark.torch]
PRESETS: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(
    files("vorox").joinpath("presets/models.yaml").read_text(encoding="utf-8")
)


def _stacked(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Stack the matrices of experts as the modules in transformers do; its files have them one by one."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        name = name.replace("block_sparse_moe", "mlp")
        match = re.fullmatch(r"(.+\.experts)\.\d+\.(\w+)\.weight", name)
        if match is None:
            found[name] = shape
            continue
        part = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "gate_up_proj", "w3": "gate_up_proj"}
        stack = f"{match[1]}.{part.get(match[2], 'down_proj')}"
        count, rows, columns = found.get(stack, (0, shape[0] * (2 if "gate_up" in stack else 1), shape[1]))
        found[stack] = (count + 1, rows, columns)
    return {
        name: (shape[0] // 2, *shape[1:]) if name.endswith("gate_up_proj") else shape for name, shape in found.items()
    }


@pytest.mark.parametrize("size", PRESETS["sizes"])
def test_transformers_builds_the_same_tensors(size: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = PRESETS["sizes"][size]
    config = ModelConfig(**(PRESETS["families"][fields["family"]] | fields))
    spec = decoder_spec(config, tokenizer_vocab_size=1000, sequence_length_tokens=64)
    written = huggingface_config(spec, end_of_text_id=0)
    loaded = dict(written)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(loaded.pop("model_type"), **loaded))
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert _stacked({entry.name: entry.shape for entry in huggingface_entries(spec)}) == parameters
    assert model.num_parameters() == spec.num_parameters

    back = decoder_spec(spec_from_huggingface(written), tokenizer_vocab_size=1000, sequence_length_tokens=64)
    differences = {key for key, value in spec.to_json().items() if back.to_json()[key] != value}
    assert differences <= {"scale_residual_init"}, "only what decides initial weights, which transformers does not keep"
