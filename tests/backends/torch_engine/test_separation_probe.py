"""What a model sees is measured before step 1: thresholds, half precision and adapters do not hide a leak."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vorox import backends
from vorox.backends.torch_engine.foreign import huggingface_model, huggingface_probe
from vorox.core.batch import IGNORED_LABEL, Batch, DataCursor
from vorox.core.errors import ConfigError
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig

pytestmark = [pytest.mark.hf, pytest.mark.torch]
transformers = pytest.importorskip("transformers")

VOCAB, LENGTH = 96, 48
SHARED = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA4 = {**SHARED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}


def longrope(original: int) -> dict[str, Any]:
    parameters = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": original,
    }  # fmt: skip
    return {**SHARED, "original_max_position_embeddings": original, "rope_parameters": parameters}


def engine_of(model_type: str, values: dict[str, Any], tmp_path: Path, **sections: Any) -> Any:
    """An engine with random weights of the library."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[model_type](**values))
    model.save_pretrained(tmp_path)
    config = RunConfig.model_validate({
        "backend": "torch", "model": {"kind": "huggingface", "name_or_path": str(tmp_path)},
        "data": {"sources": [{"name": "t", "format": "txt"}], "sequence_length_tokens": LENGTH},
        "train": {"num_steps": 9, "global_batch_sequences": 2, "micro_batch_sequences": 2},
        "runtime": {"device": "cpu", "num_threads": 1}, **sections,
    })  # fmt: skip
    values = json.loads((tmp_path / "config.json").read_text())
    spec = backends.model_spec(config, values, revision=None, tokenizer_vocab_size=VOCAB)
    engine: Any = backends.load("torch").create(config, spec, DistributedContext())
    engine.import_pretrained(tmp_path)
    return engine


def batch_of(rows: list[tuple[int, ...]], tokens: np.ndarray) -> Batch:
    """Rows of documents; every token but the last of a document is trained on."""
    labels = np.full_like(tokens, IGNORED_LABEL)
    segments, positions = np.zeros_like(tokens), np.zeros_like(tokens)
    for row, lengths in enumerate(rows):
        start = 0
        for index, length in enumerate(lengths):
            end = start + length
            labels[row, start : end - 1] = tokens[row, start + 1 : end]
            segments[row, start:end], positions[row, start:end] = index + 1, np.arange(length)
            start = end
    count = int((labels != IGNORED_LABEL).sum())
    return Batch(
        0, tokens[None], labels[None], segments[None], positions[None], np.zeros((1, len(rows)), np.uint64), count,
        DataCursor("", 0, 1, 0, 0),
    )  # fmt: skip


ROWS = [(29, 12, 7), (LENGTH,)]
CASES = {
    "llama4-temperature": ("llama4_text", {**LLAMA4, "floor_scale": 17}, "rows"),
    "llama4-unreached": ("llama4_text", LLAMA4, "packed"),
    "llama4-chunks": ("llama4_text", {**LLAMA4, "attention_chunk_size": 16}, None),
    "longrope": ("phi3", longrope(20), "single"),
    "longrope-unreached": ("phi3", longrope(64), "packed"),
    "mistral-window": ("mistral", {**SHARED, "sliding_window": 16}, "packed"),
    "minimax": ("minimax", {**SHARED, **EXPERTS, "head_dim": 8, "block_size": 8}, "rows"),
    "gemma4": (
        "gemma4_text",
        {**SHARED, "head_dim": 8, "num_hidden_layers": 6, "sliding_window": 20, "vocab_size_per_layer_input": VOCAB,
         "hidden_size_per_layer_input": 8},
        None,
    ),
    "apertus": ("apertus", SHARED, "packed"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_documents_have_the_loss_that_they_have_alone(name: str, tmp_path: Path) -> None:
    """Against transformers on each document by itself, on both sides of every threshold."""
    model_type, values, expected = CASES[name]
    engine = engine_of(model_type, values, tmp_path)
    if expected is not None:
        assert engine._network._separation == expected
    tokens = np.random.default_rng().integers(3, VOCAB, (len(ROWS), LENGTH)).astype(np.int32)
    found = engine.eval_step(batch_of(ROWS, tokens)).loss_sum
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    total = 0.0
    with torch.no_grad():
        for row, lengths in enumerate(ROWS):
            start = 0
            for length in lengths:
                ids = torch.from_numpy(tokens[row, start : start + length]).long()[None]
                logits = model(input_ids=ids, use_cache=False).logits.double()
                total += torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()
                start += length
    assert found == pytest.approx(total, rel=2e-6)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("adapter", [None, "lora"])
def test_a_weak_leak_is_seen_in_every_precision(dtype: str, adapter: str | None, tmp_path: Path) -> None:
    """openai-gpt has no position ids within a row: at its initial weights, the first document moves the next by 1%."""
    values = {
        "vocab_size": VOCAB, "n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip
    sections: dict[str, Any] = {"precision": {"dtype": dtype}}
    if adapter is not None:
        pytest.importorskip("peft")
        sections["adapter"] = {"kind": adapter, "rank": 4}
    engine = engine_of("openai-gpt", values, tmp_path, **sections)
    rng, losses = np.random.default_rng(), []
    tokens = rng.integers(0, VOCAB, (1, LENGTH)).astype(np.int32)
    for _ in range(2):
        tokens[:, :36] = rng.integers(0, VOCAB, (1, 36))
        batch = batch_of([(36, 12)], tokens.copy())
        batch.labels_ABT[..., :36] = IGNORED_LABEL
        losses.append(engine.eval_step(batch).loss_sum)
    assert losses[0] == losses[1]


def test_buffers_that_hold_the_causal_mask_are_left_alone(tmp_path: Path) -> None:
    model_type, values, _ = CASES["minimax"]
    copy, _ = probe_copy(model_type, values, 32)
    built = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[model_type](**values))
    buffers = {name: buffer for name, buffer in built.named_buffers() if "decay" in name}
    assert buffers
    for name, buffer in copy.named_buffers():
        if name in buffers:
            torch.testing.assert_close(buffer, buffers[name])


def probe_copy(model_type: str, values: dict[str, Any], length: int) -> tuple[Any, int]:
    config = transformers.CONFIG_MAPPING[model_type](**values)
    found = {**json.loads(config.to_json_string(use_diff=False)), "model_type": model_type}
    spec, _ = huggingface_model.describe(found, revision=None)
    copy = huggingface_probe.small_copy(spec, attention=None, length=length, device=torch.device("cpu"))
    assert copy is not None
    return copy


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("llama", {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24}),
        ("gpt_oss", {"num_hidden_layers": 2, "num_local_experts": 8, "sliding_window": 128}),
        ("gemma2", {"num_hidden_layers": 6}),
    ],
)
def test_large_models_are_measured_small_and_near_their_thresholds(model_type: str, values: dict[str, Any]) -> None:
    copy, length = probe_copy(model_type, values, 8192)
    assert sum(parameter.numel() for parameter in copy.parameters()) < 20_000_000
    text = copy.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    assert window is None or window < length <= 32
    types = getattr(text, "layer_types", None)
    assert types is None or len(set(types)) == len(set(transformers.CONFIG_MAPPING[model_type](**values).layer_types))


PARTS = """
import torch
import torch.nn.functional as F
from torch import nn

def good(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, is_causal=is_causal)

def future(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):
    return F.scaled_dot_product_attention(query, key, value)

def weak(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):
    own = good(query, key, value, attn_mask, dropout_p, is_causal)
    return own + 1e-2 * F.scaled_dot_product_attention(query, key, value)

def others(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)

def few(query, key):
    return query

def broken(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):
    return query @ value

class Block(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.linear = nn.Linear(spec.hidden_size, spec.hidden_size)
    def forward(self, x, positions=None, attn_mask=None):
        return x + self.linear(x)

class Averaging(Block):
    def forward(self, x, positions=None, attn_mask=None):
        return x + self.linear(x).mean(1, keepdim=True)

class Past(Block):
    def forward(self, x, positions=None, attn_mask=None):
        return x + self.linear(x).cumsum(1)

class Narrow(Block):
    def forward(self, x):
        return x

def block(spec, layer): return Block(spec)
def averaging(spec, layer): return Averaging(spec)
def past(spec, layer): return Past(spec)
def narrow(spec, layer): return Narrow(spec)

def mixing(x, weights):
    return F.linear(x, weights["up"]) + x.mean(0)
mixing.parameters = lambda spec: {"up": (spec.hidden_size, spec.hidden_size)}

def plain(x, weights):
    return F.linear(x, weights["up"])
plain.parameters = mixing.parameters
"""


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    file = tmp_path / "own_parts.py"
    file.write_text(PARTS)
    return file


def native(file: Path, key: str, name: str, **sections: Any) -> Any:
    config = RunConfig.model_validate({
        "backend": "torch",
        "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": VOCAB, key: f"{file}:{name}"},
        "data": {"sources": [{"name": "t", "format": "txt"}], "sequence_length_tokens": LENGTH},
        "train": {"num_steps": 9, "global_batch_sequences": 2, "micro_batch_sequences": 2},
        "runtime": {"device": "cpu", "num_threads": 1}, **sections,
    })  # fmt: skip
    spec = backends.model_spec(config, None, revision=None, tokenizer_vocab_size=VOCAB)
    return backends.load("torch").create(config, spec, DistributedContext())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("attention_kernel", "future", "not causal"),
        ("attention_kernel", "weak", "not causal"),
        ("attention_kernel", "others", "Documents of a row see each other"),
        ("block", "averaging", "not causal"),
        ("block", "past", "Documents of a row see each other"),
        ("mlp", "mixing", "not causal"),
    ],
)
def test_a_part_that_leaks_is_refused_before_step_1(key: str, name: str, message: str, dtype: str, parts: Path) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        native(parts, key, name, precision={"dtype": dtype})
    assert f"{parts}:{name}" in str(refused.value)
    assert refused.value.where == f"model.{key}"


@pytest.mark.parametrize(("key", "name"), [("attention_kernel", "good"), ("block", "block"), ("mlp", "plain")])
def test_a_part_that_sees_its_own_past_is_accepted(key: str, name: str, parts: Path) -> None:
    engine = native(parts, key, name)
    weights = dict(engine.export_weights())
    with_probe = {name: array.copy() for name, array in weights.items()}
    again = dict(native(parts, key, name).export_weights())
    assert any(array.any() for array in with_probe.values())
    for weight, array in with_probe.items():
        np.testing.assert_array_equal(array, again[weight])


def test_documents_may_see_each_other_where_the_run_says_so(parts: Path) -> None:
    data = {"sources": [{"name": "t", "format": "txt"}], "sequence_length_tokens": LENGTH, "document_mask": False}
    native(parts, "attention_kernel", "others", data=data)


@pytest.mark.parametrize(
    ("key", "name", "signature"),
    [
        ("attention_kernel", "few", "f(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False)"),
        ("attention_kernel", "broken", "f(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False)"),
        ("block", "narrow", "f(spec, layer)(x, positions=..., attn_mask=...)"),
    ],
)
def test_a_part_that_cannot_be_called_is_named_with_its_signature(
    key: str, name: str, signature: str, parts: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        native(parts, key, name)
    assert f"{name} in {parts} failed with" in refused.value.what
    assert signature in refused.value.hint
    assert refused.value.where == f"model.{key}"
