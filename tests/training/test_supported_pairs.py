"""Pairs of features that the table allows train: a draw of those that one process has, each for four steps.

Layouts of several processes have their own draws in ``tests/ranks``.
"""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest

import tiny_runs
from vorox.core.config.checks.support import FEATURES, exclusions, support_page
from vorox.experiments.tracking import read_metrics

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]
NUM_PAIRS = 24
PARTS = """
import torch
import torch.nn.functional as F
from torch import nn

def optimizer(groups, lr):
    return torch.optim.SGD(groups, lr=lr)

def loss(logits, labels):
    return F.cross_entropy(logits, labels, reduction="sum")

def step(micro_batch):
    micro_batch.forward_backward()

def activation(x):
    return F.relu(x) ** 2

def attention(query, key, value, **options):
    return F.scaled_dot_product_attention(query, key, value, **options)

def mlp(x, weights):
    return F.linear(F.gelu(F.linear(x, weights["up"])), weights["down"])

mlp.parameters = lambda spec: {"up": (48, spec.hidden_size), "down": (spec.hidden_size, 48)}

class Bigram(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, 16)
        self.head = nn.Linear(16, config.vocab_size)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))
"""

EXAMPLES = {
    "own MLP": "model.mlp=parts.py:mlp",
    "own activation": "model.activation=parts.py:activation",
    "own attention": "model.attention_kernel=parts.py:attention",
    "own model": "model.kind=parts.py:Bigram data.document_mask=false",
    "own loss": "loss.name=parts.py:loss",
    "own step": "train.forward_backward=parts.py:step",
    "own optimizer": "optimizer.name=parts.py:optimizer",
    "chosen attention kernel": "model.attention_kernel=reference",
    "mixture of experts": "model.num_experts=4",
    "layer pattern": "model.layer_pattern=M*- model.num_layers=3 model.mamba_head_dim=8 model.mamba_state_size=8",
    "layer types": "model.sliding_window_tokens=4 model.layer_types=[sliding_attention]",
    "norms elsewhere": "model.norm_placement=post",
    "QK norm over the full width": "model.qk_norm=full_width",
    "MLP biases": "model.mlp_bias=true",
    "scaled embeddings": "model.scale_embeddings=true",
    "dropout": "model.dropout_fraction=0.1",
    "width transfer": "model.mup_base_hidden_size=8 model.tie_embeddings=false",
    "embedding noise": "train.embedding_noise=5",
    "moving average": "train.ema_decay=0.9",
    "spike policy": "train.spike_policy=skip",
    "stages of the batch size": 'train.batch_stages=[{"start_step":2,"global_batch_sequences":2}]',
    "saved matrix products": "train.activation_checkpointing=dots",
    "Muon": "optimizer.name=muon",
    "8-bit AdamW": "optimizer.name=adamw_8bit",
    "updates in the backward pass": "optimizer.in_backward=true optimizer.clip_norm=null train.max_nonfinite_steps=0 "
    "train.micro_batch_sequences=4",
    "frozen groups": 'optimizer.groups=[{"match":"embedding.*","frozen":true}]',
    "8-bit floats": "precision.float8=tensorwise precision.float8_emulate=true",
    "quantisation-aware training": "train.quantization_aware=int8-weight-only",
    "bits of any world": "runtime.determinism=bitwise-any-world",
    "recomputed steps": "runtime.recompute_every_steps=2",
    "activation statistics": "log.activation_statistics=true",
    "streaming": "data.mode=streaming",
    "transforms": 'data.transforms=[{"name":"exact_duplicates"}]',
    "concatenated rows": "data.packing=concat",
    "attention between documents": "data.document_mask=false",
    "stages of the row length": 'data.stages=[{"start_tokens":0,"weights":{"text":1},"sequence_length_tokens":8}]',
    "tied embeddings": "model.tie_embeddings=true",
}
"""A configuration of each feature that one process on a CPU can train on plain text; compiling is in its own tests."""

ELSEWHERE = {
    "replicas", "FSDP2", "FSDP2 in host memory", "tensor parallelism", "sequence parallelism", "pipeline parallelism",
    "context parallelism", "ring attention", "expert parallelism", "DeepSpeed", "model of transformers", "adapter",
    "own block", "image encoder", "images for transformers", "DPO", "distillation", "stored logits of a teacher",
    "kept zeros", "fp16", "compilation", "CUDA graphs", "scanned layers", "Apple or TPU device", "trained routers",
}  # fmt: skip
"""Features that need other data, weights, devices or processes, with tests of their own."""


def allowed() -> list[tuple[str, str]]:
    """All pairs with examples that the table allows and that do not set one key to two values."""
    found: list[tuple[str, str]] = []
    for one, other in itertools.combinations(EXAMPLES, 2):
        given = [dict(word.split("=", 1) for word in EXAMPLES[name].split()) for name in (one, other)]
        if all(given[1].get(key, value) == value for key, value in given[0].items()):
            found += [(one, other)] if frozenset((one, other)) not in exclusions() else []
    return found


DRAWN = sorted(random.Random(support_page()).sample(allowed(), NUM_PAIRS))


def test_every_feature_has_an_example_or_is_tried_elsewhere() -> None:
    names = {feature.name for feature in FEATURES}
    missing = names - EXAMPLES.keys() - ELSEWHERE
    assert not missing, f"give {sorted(missing)} a configuration in EXAMPLES, or name it in ELSEWHERE"
    assert EXAMPLES.keys() | ELSEWHERE == names
    assert not EXAMPLES.keys() & ELSEWHERE


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), DRAWN, ids=lambda name: name.replace(" ", "_"))
def test_a_pair_that_the_table_allows_trains(
    one: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("parts.py").write_text(PARTS, encoding="utf-8")
    given = dict(word.split("=", 1) for name in (one, other) for word in EXAMPLES[name].split())
    given = {"train.num_steps": "4", "eval.every_steps": "4", "log.every_steps": "1", **given}
    config = tiny_runs.configuration(tmp_path, [f"{key}={value}" for key, value in given.items()])
    features = {feature.name for feature in FEATURES if feature.is_on(config)}
    assert {one, other} <= features
    outcome = tiny_runs.run(config)
    losses = [values["loss"] for values in read_metrics(outcome.run_directory).values() if "loss" in values]
    assert len(losses) == 4
    assert all(map(math.isfinite, losses))
