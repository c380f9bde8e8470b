"""Adapters of transformers models: training, the frozen base, checkpoints and refusals.

The oracle is peft in a plain PyTorch loop: each document alone in a forward pass, ``torch.optim.AdamW`` and
``clip_grad_norm_``. Losses agree to 1e-5 (relative, fp32) over 20 steps. For qlora, transformers and bitsandbytes
quantise the base on their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from backends.torch_engine.transformers_models import (
    DOCUMENTS,
    LENGTH,
    VOCAB,
    batch_of,
    configuration,
    engine_of,
    write_model,
)
from vorox import backends
from vorox.backends.torch_engine.engine import TorchEngine
from vorox.backends.torch_engine.networks.adapter_network import AdapterNetwork
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.files.staged_directory import StagedDirectory
from vorox.models.arrays.fingerprint import fingerprint
from vorox.models.arrays.weights_file import WeightsFile
from vorox.models.huggingface.adapter_spec import AdapterSpec, base_fingerprint
from vorox.models.stored.spec import spec_from_json
from vorox.planning.disk_space import checkpoint_bytes
from vorox.planning.flops import flops_per_token
from vorox.planning.memory_estimate import memory_per_device
from vorox.training.checkpoints.store import write_state
from vorox.training.export.adapter import keep_layers_unpacked, peft_config

pytestmark = [
    pytest.mark.torch,
    pytest.mark.hf,
    pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),  # importing takes seconds
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft calls it
]
STEPS, LR = 20, 1e-3
KINDS = {
    "lora": ("llama", ["adapter.kind=lora", "adapter.rank=4", "adapter.target_modules=[q_proj, mlp.down_proj]"]),
    "lora-gpt2": ("gpt2", ["adapter.kind=lora", "adapter.rank=4", "adapter.alpha=3"]),
    "lora-mamba": ("mamba", ["adapter.kind=lora", "adapter.target_modules=[in_proj, x_proj]"]),
    "dora": ("qwen3", ["adapter.kind=dora", "adapter.rank=4"]),
    "qlora": ("llama", ["adapter.kind=qlora", "adapter.rank=4", "adapter.target_modules=[q_proj]"]),
}
"""Adapter to model and settings: some layers, all layers, transposed layers, rows of single documents."""


def spec_of(engine: TorchEngine) -> AdapterSpec:
    assert isinstance(engine._spec, AdapterSpec)
    return engine._spec


def frozen_fingerprint(engine: TorchEngine) -> str:
    """A digest over the bits of everything that the optimizer does not update."""
    trained = {id(parameter) for parameter in engine.parameters.modules.values()}
    kept = [(name, value) for name, value in engine.model.named_parameters() if id(value) not in trained]
    assert kept
    assert not any(value.requires_grad for _, value in kept)
    return fingerprint((name, value.detach().numpy()) for name, value in kept)


def peft_model(directory: Path, engine: TorchEngine) -> Any:
    """The same model made by transformers and peft, with the initial adapter of the engine."""
    import peft
    import transformers

    spec = spec_of(engine)
    options: dict[str, Any] = {}
    if spec.adapter.kind == "qlora":
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )  # fmt: skip
        options["device_map"] = "cpu"
    base = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)
    keep_layers_unpacked(base)
    settings = {key: value for key, value in peft_config(spec).items() if key not in ("peft_type", "inference_mode")}
    model = peft.get_peft_model(base, peft.LoraConfig(**settings))
    initial = {f"base_model.model.{name}": torch.from_numpy(array) for name, array in engine.export_weights()}
    report = peft.set_peft_model_state_dict(model, initial)
    assert not report.unexpected_keys
    return model.train()


def plain_losses(model: Any) -> list[float]:
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [value for value in trained if value.ndim > 1], "weight_decay": 0.1},
            {"params": [value for value in trained if value.ndim == 1], "weight_decay": 0.0},
        ],
        lr=LR, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    losses: list[float] = []
    for step in range(STEPS):
        batch = batch_of(step)
        total = torch.zeros(())
        for row, lengths in enumerate(DOCUMENTS):
            start = 0
            for length in lengths:
                ids = torch.from_numpy(batch.tokens_ABT[0, row, start : start + length]).long()[None]
                logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
                total = total + functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
                start += length
        loss = total / batch.num_target_tokens
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return model.eval()(input_ids=torch.from_numpy(tokens).long(), use_cache=False).logits.numpy()


def test_loading_peft_recommends_no_download() -> None:
    """On CPUs with AVX512-BF16, bitsandbytes would ask for a kernel that plain adapters do not use."""
    program = (
        "from vorox.backends.torch_engine.networks.adapters import _library; _library('peft'); import bitsandbytes"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install kernels" not in output.stderr


@pytest.mark.parametrize("case", KINDS)
def test_training_equals_a_plain_loop_of_peft_and_resumes_bit_for_bit(case: str, tmp_path: Path) -> None:
    import peft

    name, overrides = KINDS[case]
    directory = write_model(tmp_path / "model", name)
    engine = engine_of(directory, *overrides)
    spec, frozen = spec_of(engine), frozen_fingerprint(engine)
    expected = plain_losses(model := peft_model(directory, engine))
    losses = [engine.train_step(batch_of(step), lr=LR, weight_decay=0.1).fetch().loss for step in range(STEPS)]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[0] != pytest.approx(losses[-1], rel=1e-3)
    assert frozen_fingerprint(engine) == frozen, "the base keeps every bit"
    tokens = np.random.default_rng().integers(0, VOCAB, (2, LENGTH), np.int32)
    np.testing.assert_allclose(engine.logits(tokens), logits_of(model, tokens), rtol=1e-4, atol=1e-4)

    with StagedDirectory(tmp_path / "checkpoint") as staged:
        engine.snapshot(detached=True).write_metadata(staged)
        staged.commit({})
    stored = WeightsFile(tmp_path / "checkpoint" / "model.safetensors").entries
    assert list(stored) == [row.name for row in spec.parameters], "a checkpoint holds the adapter only"
    assert {"base_model.model." + key for key in stored} == set(peft.get_peft_model_state_dict(model))
    again = engine_of(directory, *overrides)
    again.load(tmp_path / "checkpoint")
    values = [one.train_step(batch_of(99), lr=LR, weight_decay=0.1).fetch() for one in (engine, again)]
    assert values[0] == values[1]
    assert again.fingerprint() == engine.fingerprint()
    assert spec_from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize("case", KINDS)
def test_merged_weights_compute_the_same(case: str, tmp_path: Path) -> None:
    """Logits of the base with merged weights are those of base and adapter, within 1e-4."""
    name, overrides = KINDS[case]
    directory = write_model(tmp_path / "model", name)
    engine = engine_of(directory, *overrides)
    tokens = np.random.default_rng().integers(0, VOCAB, (2, LENGTH), np.int32)
    before = engine.logits(tokens)
    for step in range(3):
        engine.train_step(batch_of(step), lr=3e-2, weight_decay=0.1)
    network = engine._network
    assert isinstance(network, AdapterNetwork)
    whole = engine_of(directory)
    whole.import_weights(network.merged_weights())
    after = engine.logits(tokens)
    assert np.abs(after - before).max() > 0.1, "the comparison would be trivial"
    np.testing.assert_allclose(whole.logits(tokens), after, rtol=1e-4, atol=1e-4)


def test_qlora_stores_four_bits_and_learns(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", "llama")
    engine = engine_of(directory, "adapter.kind=qlora")
    layer: Any = engine.model.get_submodule("model.layers.0.mlp.up_proj.base_layer")
    assert layer.weight.dtype == torch.uint8
    assert layer.weight.numel() == 32 * 48 // 2
    losses = [engine.train_step(batch_of(0), lr=1e-2, weight_decay=0.0).fetch().loss for _ in range(15)]
    assert losses[-1] < 0.7 * losses[0]


def test_the_initial_adapter_is_a_function_of_names_and_seed(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", "llama")
    lora = ["adapter.kind=lora", "adapter.target_modules=[q_proj]"]
    first = dict(engine_of(directory, *lora).export_weights())
    wider = dict(engine_of(directory, "adapter.kind=lora").export_weights())
    other = dict(engine_of(directory, *lora, "run.seed=1").export_weights())
    for name, array in first.items():
        np.testing.assert_array_equal(array, wider[name])
        if name.endswith("lora_B.weight"):
            assert not array.any()
        else:
            assert (array != other[name]).mean() > 0.99
            bound = 32**-0.5
            assert np.abs(array).max() <= bound
            assert array.std() == pytest.approx(bound / 3**0.5, rel=0.15)


def test_an_initial_adapter_changes_no_logit(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", "qwen3")
    tokens = np.random.default_rng().integers(0, VOCAB, (2, LENGTH), np.int32)
    base = engine_of(directory).logits(tokens)
    np.testing.assert_array_equal(engine_of(directory, "adapter.kind=lora").logits(tokens), base)
    np.testing.assert_allclose(engine_of(directory, "adapter.kind=dora").logits(tokens), base, rtol=1e-5, atol=1e-5)


def test_dropout_depends_on_seed_and_step_only(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", "llama")
    wide = ["adapter.kind=lora", "adapter.dropout_fraction=0.3"]
    first, second, without = (
        [engine.train_step(batch_of(step), lr=LR, weight_decay=0.0).fetch().loss for step in range(4)]
        for engine in (engine_of(directory, *wide), engine_of(directory, *wide), engine_of(directory, wide[0]))
    )
    assert first == second
    assert first[1:] != without[1:]


def test_bf16_stores_adapted_layers_in_bf16_and_changes_no_product(tmp_path: Path) -> None:
    """Autocast rounds the same weights; the loss is that of fp32 storage, bit for bit."""
    directory = write_model(tmp_path / "model", "llama")
    engine = engine_of(directory, "adapter.kind=lora", "precision.dtype=bf16")
    layer: Any = engine.model.get_submodule("model.layers.0.mlp.up_proj.base_layer")
    assert layer.weight.dtype == torch.bfloat16
    whole = engine_of(directory, "precision.dtype=bf16")
    assert engine.eval_step(batch_of(0)).loss_sum == whole.eval_step(batch_of(0)).loss_sum


def test_estimates_count_only_what_is_trained(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", "llama")
    engine, whole = engine_of(directory, "adapter.kind=lora", "adapter.rank=2"), engine_of(directory)
    spec, base = spec_of(engine), whole._spec
    trained = sum(array.size for _, array in engine.export_weights())
    memory = memory_per_device(spec, configuration(directory, "adapter.kind=lora"))
    assert memory.gradient_bytes == 4 * trained
    assert memory.optimizer_bytes == 8 * trained
    assert memory.snapshot_bytes == 12 * trained
    assert memory.parameter_bytes == 4 * (trained + base.num_parameters)
    with StagedDirectory(tmp_path / "checkpoint") as staged:
        write_state(engine.snapshot(detached=True), staged)
        staged.commit({})
    arrays = sum(path.stat().st_size for path in (tmp_path / "checkpoint").rglob("*.safetensors"))
    description = checkpoint_bytes(engine._config, spec) - 12 * trained
    assert 12 * trained < arrays <= 12 * trained + description
    weights = base.num_matmul_weights
    attention = flops_per_token(base, LENGTH) - 6 * weights
    assert flops_per_token(spec, LENGTH) == 4 * weights + 6 * trained + attention
    quantised = spec_of(engine_of(directory, "adapter.kind=qlora"))
    matrices = sum(row.num_elements for row in base.parameters if row.kind == "matrix")
    assert quantised.frozen_bytes(4) == pytest.approx(4 * (base.num_parameters - matrices) + matrices * 0.516, rel=0.01)


def test_the_fingerprint_of_a_base_is_that_of_its_tensors(tmp_path: Path) -> None:
    import transformers

    first = write_model(tmp_path / "first", "llama")
    module = transformers.AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    module.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert base_fingerprint(tmp_path / "shards") == base_fingerprint(first)
    with torch.no_grad():
        module.model.norm.weight[3] += 1e-6
    module.save_pretrained(tmp_path / "changed")
    assert base_fingerprint(tmp_path / "changed") != base_fingerprint(first)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", "llama")
    with StagedDirectory(tmp_path / "checkpoint") as staged:
        engine_of(directory, "adapter.kind=lora").snapshot(detached=True).write_metadata(staged)
        staged.commit({})
    for overrides, match in (
        (["adapter.kind=lora", "adapter.alpha=4"], r"adapter\.alpha = 16\.0 \(here 4\.0\)"),
        (["adapter.kind=dora"], r"adapter\.kind = lora \(here dora\)"),
    ):
        with pytest.raises(CheckpointError, match=match):
            engine_of(directory, *overrides).load(tmp_path / "checkpoint")


def test_what_is_not_supported_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", "llama")
    for overrides, match in (
        (["adapter.kind=lora", "model.pretrained=false"], "needs a pretrained model"),
        (["adapter.kind=lora", "model.vocab_size=100"], "needs the vocabulary of the model"),
        (["adapter.kind=lora", "optimizer.name=muon"], "Muon updates whole matrices"),
        (["adapter.kind=lora", "parallel.fsdp_size=2"], r"not supported with parallel\.fsdp_size=2"),
        (["adapter.rank=4"], r"adapter\.rank=4 has no effect with adapter\.kind=none"),
    ):
        with pytest.raises(ConfigError, match=match):
            configuration(directory, *overrides)
    with pytest.raises(ConfigError, match="no linear layer q_prj") as caught:
        engine_of(directory, "adapter.kind=lora", "adapter.target_modules=[k_proj, q_prj]")
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="no linear layer lm_head"):
        engine_of(directory, "adapter.kind=lora", "adapter.target_modules=[lm_head]")
    with pytest.raises(ConfigError, match="transposed weights"):
        engine_of(write_model(tmp_path / "gpt2", "gpt2"), "adapter.kind=qlora")
    with pytest.raises(ConfigError, match=r"peft cannot adapt this model: .*out_proj"):
        engine_of(write_model(tmp_path / "mamba", "mamba"), "adapter.kind=lora")
    with pytest.raises(ConfigError, match="needs backend=torch"):
        backends.model_spec(
            configuration(directory, "backend=jax", "adapter.kind=lora"), {}, revision=None, tokenizer_vocab_size=2
        )


def test_a_native_model_is_refused_with_the_way_to_adapt_it() -> None:
    from vorox.core.config import load_config

    with pytest.raises(ConfigError, match=r"needs pretrained weights .*; add --from-weights"):
        load_config("quickstart", ["adapter.kind=lora"])
