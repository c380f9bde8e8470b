"""What fake tensors say that a transformers model saves, against the storages that a real forward pass keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from backends.torch_engine.transformers_models import write_model
from small_configurations import MODELS, POSITIONS, VOCAB, batch_of, configuration, random_rows
from vorox.backends.torch_engine.engine import create
from vorox.backends.torch_engine.foreign import huggingface_model
from vorox.backends.torch_engine.networks.activation_memory import measured
from vorox.core.errors import ConfigError
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.models.decoder.spec import decoder_spec
from vorox.models.huggingface.spec import HuggingFaceSpec
from vorox.planning.cpu_memory import dropout_elements, window_copy_elements

pytestmark = [pytest.mark.torch, pytest.mark.hf]
LENGTH = 40


def spec_of(directory: Path) -> HuggingFaceSpec:
    return huggingface_model.describe(json.loads((directory / "config.json").read_bytes()), revision=None)[0]


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


@pytest.mark.parametrize(("name", "dropout_fraction"), [*((name, 0.0) for name in sorted(MODELS)), ("llama", 0.1)])
def test_a_native_block_saves_what_its_formula_counts(name: str, dropout_fraction: float) -> None:
    """Every storage that autograd keeps of a block in a training step, without parameters; fp32 on the CPU."""
    config = configuration(MODELS[name] | {"dropout_fraction": dropout_fraction})
    spec = decoder_spec(config.model, tokenizer_vocab_size=VOCAB, sequence_length_tokens=POSITIONS)
    engine = create(config, spec, DistributedContext())
    block = engine.model.get_submodule("blocks.1")
    parameters = {parameter.untyped_storage().data_ptr() for parameter in engine.model.parameters()}
    kept: dict[int, torch.Tensor] = {}
    is_inside = [False]

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if is_inside[0] and address not in parameters and tensor.dtype.is_floating_point:
            kept.setdefault(address, tensor)
        return tensor

    block.register_forward_pre_hook(lambda *_: is_inside.__setitem__(0, True))
    block.register_forward_hook(lambda *_: is_inside.__setitem__(0, False))
    batch = batch_of(random_rows(8))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.train_step(batch, lr=0.0, weight_decay=0.0).fetch()
    saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / 4 / batch.num_tokens
    copies = 0 if spec.layer_windows[1] is None else window_copy_elements(spec)
    copies += dropout_elements(spec, POSITIONS)
    assert spec.saved_per_position + copies == pytest.approx(saved, rel=0.02)
