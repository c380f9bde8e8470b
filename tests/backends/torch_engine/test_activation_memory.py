"""What fake tensors say that a model of transformers saves, against the storages that a real forward pass keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from backends.torch_engine.transformers_models import write_model
from vorox.backends.torch_engine import huggingface_model
from vorox.backends.torch_engine.activation_memory import measured
from vorox.core.errors import ConfigError
from vorox.models.huggingface_spec import HuggingFaceSpec

pytestmark = [pytest.mark.torch, pytest.mark.hf]
LENGTH = 40


def spec_of(directory: Path) -> HuggingFaceSpec:
    return huggingface_model.describe(json.loads((directory / "config.json").read_bytes()), revision=None)


def kept_bytes(directory: Path, num_rows: int) -> int:
    """Bytes of all storages that the graph of a real forward pass keeps, without parameters."""
    import transformers

    module = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    module.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = module.model(input_ids=torch.zeros((num_rows, LENGTH), dtype=torch.long), use_cache=False)
    del hidden
    return sum(
        tensor.untyped_storage().nbytes()
        for address, tensor in kept.items()
        if address not in parameters and tensor.dtype.is_floating_point
    )


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_it_is_what_a_forward_pass_keeps(name: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path, name)
    real = kept_bytes(directory, 3) - kept_bytes(directory, 2)
    found = measured(spec_of(directory)).saved_activations(LENGTH, 4)
    # outside of the blocks: the final norm keeps its input, the normalised input and a number for each position
    outside = LENGTH * (2 * 32 + 1) * 4
    assert found.all_blocks_bytes == pytest.approx(real, abs=2 * outside)
    assert found.largest_block_bytes == pytest.approx(found.all_blocks_bytes / 2)


def test_lower_precision_saves_less_but_more_than_half(tmp_path: Path) -> None:
    spec = measured(spec_of(write_model(tmp_path, "llama")))
    full, half = spec.saved_activations(LENGTH, 4), spec.saved_activations(LENGTH, 2)
    assert full.all_blocks_bytes / 2 < half.all_blocks_bytes < full.all_blocks_bytes
    assert half.block_input_bytes == full.block_input_bytes == LENGTH * 32 * 4


def test_a_recurrent_model_grows_linearly(tmp_path: Path) -> None:
    spec = measured(spec_of(write_model(tmp_path, "mamba")))
    short, long = (spec.saved_activations(length, 4).all_blocks_bytes for length in (64, 128))
    assert long == pytest.approx(2 * short, rel=0.01)


def test_a_mixture_of_experts_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not known without running"):
        measured(spec_of(write_model(tmp_path, "mixtral"))).saved_activations(LENGTH, 4)
