"""Models of transformers: training, packed rows, checkpoints and refusals.

The oracle is transformers itself in a plain PyTorch loop: each document alone in a forward pass, ``torch.optim.AdamW``
and ``clip_grad_norm_``. So equal losses also prove that no document of a packed row sees another. Losses agree to 1e-5
(relative, fp32) over 20 steps; logits of a written checkpoint to 1e-5.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from backends.torch_engine.transformers_models import (
    DOCUMENTS,
    LENGTH,
    MODELS,
    SEPARATE_ROWS,
    VOCAB,
    batch_of,
    configuration,
    engine_of,
    plain_adamw,
    write_model,
)
from vorox import backends
from vorox.backends.torch_engine.networks.huggingface_network import HuggingFaceNetwork
from vorox.backends.torch_engine.networks.huggingface_settings import resolve
from vorox.core.config import load_config
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.files.staged_directory import StagedDirectory
from vorox.models.huggingface.config import huggingface_files
from vorox.models.huggingface.spec import HuggingFaceSpec
from vorox.models.stored.spec import spec_from_json
from vorox.training.origin.model_origin import find_origin

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch]
STEPS, LR = 20, 1e-3


def plain_losses(directory: Path, spec: HuggingFaceSpec) -> list[float]:
    module = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    decayed = {row.name for row in spec.rows if row.decay and row.kind != "embedding"}
    optimizer = plain_adamw(module, decayed, LR)
    losses: list[float] = []
    for step in range(STEPS):
        batch = batch_of(step)
        total = torch.zeros(())
        for row, lengths in enumerate(DOCUMENTS):
            start = 0
            for length in lengths:
                ids = torch.from_numpy(batch.tokens_ABT[0, row, start : start + length]).long()[None]
                logits = module(input_ids=ids, use_cache=False).logits[0, :-1].float()
                total = total + functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
                start += length
        loss = total / batch.num_target_tokens
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_a_plain_loop_and_transformers_loads_the_checkpoint(name: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", name)
    engine = engine_of(directory)
    network, spec = engine._network, engine._spec
    assert isinstance(network, HuggingFaceNetwork)
    assert isinstance(spec, HuggingFaceSpec)
    assert network.separates_documents == (name not in SEPARATE_ROWS)
    initial = engine.fingerprint()
    losses = [engine.train_step(batch_of(step), lr=LR, weight_decay=0.1).fetch().loss for step in range(STEPS)]
    assert losses == pytest.approx(plain_losses(directory, spec), rel=1e-5)
    assert engine.fingerprint() != initial

    with StagedDirectory(tmp_path / "checkpoint") as staged:
        engine.snapshot(detached=True).write_metadata(staged)
        for file, content in huggingface_files(spec, end_of_text_id=2).items():
            staged.write(file, content)
        staged.commit({})
    module, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    tokens = np.random.default_rng(5).integers(0, VOCAB, (2, LENGTH), np.int32)
    theirs = module(input_ids=torch.from_numpy(tokens).long(), use_cache=False).logits.detach().numpy()
    np.testing.assert_allclose(engine.logits(tokens), theirs, rtol=1e-5, atol=1e-5)
    decoded = engine.decoder(2, LENGTH)
    decoded.feed(tokens[:, :7])
    np.testing.assert_allclose(decoded.feed(tokens[:, 7:9]), theirs[:, 8], rtol=1e-4, atol=1e-4)

    again = engine_of(directory, "model.pretrained=false")
    again.load(tmp_path / "checkpoint")
    assert again.fingerprint() == engine.fingerprint()
    values = [one.train_step(batch_of(99), lr=LR, weight_decay=0.1).fetch() for one in (engine, again)]
    assert values[0] == values[1], "a resumed step is bit for bit equal"
    assert again.fingerprint() == engine.fingerprint()
    assert spec_from_json(json.loads(json.dumps(spec.to_json()))).to_json() == spec.to_json()


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "mamba"])
def test_a_token_of_one_document_changes_nothing_in_the_next(name: str, tmp_path: Path) -> None:
    engine = engine_of(write_model(tmp_path, name))
    before, after = batch_of(0), batch_of(0)
    for batch in (before, after):
        batch.labels_ABT[:, :, :10] = -100  # only the second document of row 0
        batch.labels_ABT[:, 1:] = -100
    after.tokens_ABT[0, 0, 3] = (after.tokens_ABT[0, 0, 3] + 1) % VOCAB
    assert engine.eval_step(before).loss_sum == pytest.approx(engine.eval_step(after).loss_sum, rel=1e-6)
    after.tokens_ABT[0, 0, 12] = (after.tokens_ABT[0, 0, 12] + 1) % VOCAB
    assert engine.eval_step(before).loss_sum != pytest.approx(engine.eval_step(after).loss_sum, rel=1e-3)


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_accumulation_checkpointing_and_bf16_change_only_rounding(name: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path, name)
    norms: dict[str, float] = {}
    for kind, overrides in {
        "plain": [],
        "recomputed": ["train.activation_checkpointing=block"],
        "bf16": ["precision.dtype=bf16"],
    }.items():
        values = engine_of(directory, *overrides).train_step(batch_of(1, micro_batches=2), lr=LR, weight_decay=0.1)
        norms[kind] = values.fetch().grad_norm
    assert norms["recomputed"] == pytest.approx(norms["plain"], rel=1e-5)
    assert norms["bf16"] == pytest.approx(norms["plain"], rel=0.05)
    assert norms["bf16"] != norms["plain"]


def test_router_losses_are_part_of_the_objective_if_the_configuration_asks_for_them(tmp_path: Path) -> None:
    with_router = write_model(tmp_path / "with", "mixtral", output_router_logits=True, router_aux_loss_coef=5.0)
    without = write_model(tmp_path / "without", "mixtral", output_router_logits=False)
    first, second = (
        engine_of(path).train_step(batch_of(0), lr=LR, weight_decay=0.0).fetch() for path in (with_router, without)
    )
    assert first.loss == pytest.approx(second.loss, rel=1e-6), "the reported loss is the cross entropy"
    assert first.grad_norm > 1.05 * second.grad_norm


def test_dropout_depends_on_seed_step_and_micro_batch_only(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "gpt2", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
    losses = [
        [engine.train_step(batch_of(0), lr=0.0, weight_decay=0.0).fetch().loss for _ in range(2)]
        for engine in (engine_of(directory), engine_of(directory), engine_of(directory, "run.seed=1"))
    ]
    assert losses[0] == losses[1]
    assert losses[0][0] == losses[0][1]
    assert losses[0][0] != losses[2][0]
    assert engine_of(directory).eval_step(batch_of(0)).loss_sum != losses[0][0]


def test_random_weights_are_a_function_of_the_seed(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "llama")
    prints = [engine_of(directory, "model.pretrained=false", f"run.seed={s}").fingerprint() for s in (0, 0, 1)]
    assert prints[0] == prints[1] != prints[2]


def test_new_rows_of_a_larger_vocabulary_are_the_mean(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "llama")
    weights = dict(engine_of(directory, "model.vocab_size=100").export_weights())
    embedding = weights["model.embed_tokens.weight"]
    assert embedding.shape == (100, 32)
    np.testing.assert_allclose(embedding[VOCAB:], np.tile(embedding[:VOCAB].mean(0), (3, 1)), rtol=1e-5, atol=1e-6)


def _resolve(directory: Path, values: dict[str, object], *overrides: str, tokenizer: int = 2) -> None:
    resolve(configuration(directory, *overrides), values, revision=None, tokenizer_vocab_size=tokenizer)


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_neox"])
def test_weights_keep_their_bits_whatever_dtype_the_configuration_names(name: str, tmp_path: Path) -> None:
    """A fine-tuned model in fp32 whose config.json still has the dtype of its base."""
    directory = write_model(tmp_path, name)
    expected = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
    values = json.loads((directory / "config.json").read_bytes())
    (directory / "config.json").write_text(json.dumps({**values, "dtype": "bfloat16"}))
    found = dict(engine_of(directory).export_weights())
    assert found
    for key, array in found.items():
        np.testing.assert_array_equal(array, expected[key].numpy(), err_msg=key)


def test_what_is_not_supported_is_refused_before_step_1(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "llama")
    values = json.loads((directory / "config.json").read_bytes())
    remote = {**values, "model_type": "mine", "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}
    without_plan = transformers.AutoConfig.for_model("gpt2", vocab_size=VOCAB, n_embd=32, n_head=2, n_layer=1).to_dict()
    tensor_parallel = "parallel.tensor_parallel_size=2"
    for changed, overrides, tokenizer, match in (
        (values, (), VOCAB + 1, "98 tokens, the model's embedding 97 rows"),
        (values, ("model.vocab_size=50",), 2, "would drop rows"),
        (values, ("data.sequence_length_tokens=128",), 2, "more than the model's 64 positions"),
        (values, ("runtime.compile=true",), 2, "runtime.compile=true is not supported with model.kind"),
        (without_plan, (tensor_parallel,), 2, "GPT2LMHeadModel has no tensor-parallel plan"),
        (remote, (), 2, "needs code from its repository, which is never run"),
        ({**values, "model_type": "nothing"}, (), 2, "has no architecture 'nothing'"),
        ({**values, "quantization_config": {"quant_method": "gptq"}}, (), 2, "quantised"),
        ({**values, "num_attention_heads": 5, "head_dim": None}, (), 2, "cannot build|not valid"),
    ):
        with pytest.raises(ConfigError, match=match):
            _resolve(directory, changed, *overrides, tokenizer=tokenizer)


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    values = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "is_decoder": False}
    config = transformers.AutoConfig.for_model("bert", vocab_size=VOCAB, hidden_size=32, **values)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="not causal"):
        engine_of(tmp_path)


def test_native_settings_and_the_jax_engine_are_refused(tmp_path: Path) -> None:
    for overrides, match in (
        (["model.num_layers=3"], "model.num_layers=3 has no effect with model.kind=huggingface"),
        (["train.from_weights=x"], "train.from_weights"),
    ):
        with pytest.raises(ConfigError, match=match):
            configuration(tmp_path, *overrides)
    with pytest.raises(ConfigError, match=r"needs backend=torch.*llama"):
        backends.model_spec(configuration(tmp_path, "backend=jax"), {}, revision=None, tokenizer_vocab_size=2)
    with pytest.raises(ConfigError, match=r"needs model\.name_or_path"):
        load_config("quickstart", ["backend=torch", "model.kind=huggingface"])
    with pytest.raises(ConfigError, match=r"model\.pretrained=False has no effect|model\.pretrained=false has no"):
        load_config("quickstart", ["model.pretrained=false"])


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", "llama")
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    for content, match in (
        (whole[:-4], "the tensors need"),
        (struct.pack("<Q", 1 << 60) + whole[8:], "the header claims"),
        (whole.replace(b"model.norm.weight", b"model.nirm.weight"), "do not match the model: missing keys model.norm"),
    ):
        weights.write_bytes(content)
        with pytest.raises(CheckpointError, match=match):
            engine_of(directory)
    weights.unlink()
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="points outside its directory"):
        find_origin(configuration(directory))
    with pytest.raises(ConfigError, match="no model at"):
        find_origin(configuration(tmp_path / "missing" / "model"))
