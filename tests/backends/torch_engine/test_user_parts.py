"""Parts of the model and the loss by import path, against built-in parts and autograd."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from backends.torch_engine.small_models import (
    GPT2,
    LLAMA,
    POSITIONS,
    VOCAB,
    batch_of,
    configuration,
    make,
    random_rows,
    randomise,
    train,
)  # fmt: skip
from backends.torch_engine.test_checkpoint import save
from vorox.backends.torch_engine.device.devices import prepare
from vorox.backends.torch_engine.device.labels import labels_to_device
from vorox.backends.torch_engine.device.matrix_products import Products
from vorox.backends.torch_engine.engine import TorchEngine
from vorox.backends.torch_engine.losses.loss import FusedLinearLoss
from vorox.backends.torch_engine.networks.decoder_network import check_user_parts_alone
from vorox.core.batch import IGNORED_LABEL, Batch
from vorox.core.errors import ConfigError
from vorox.core.schema import LossConfig, RunConfig
from vorox.models.decoder.spec import DecoderSpec, decoder_spec

pytestmark = pytest.mark.torch

PARTS = """
import math

import torch
import torch.nn.functional as F


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    return F.dropout(scores.softmax(-1), dropout_p) @ value


def capped(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):
    scores = 2 * torch.tanh(query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) / 2)
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if attn_mask is None else attn_mask
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value


def gelu(x):
    return F.gelu(x)


def squared_relu(x):
    return F.relu(x).square()


def cross_entropy(logits, labels):
    return F.cross_entropy(logits, labels, reduction="sum")


def focal(logits, labels):
    surprise = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - torch.exp(-surprise)) ** 2 * surprise).sum()


def mixture(x, weights):
    # two gated MLPs, weighted per position
    share = torch.softmax(x @ weights["router"].T, -1)
    inner = F.silu(torch.einsum("md,efd->mef", x, weights["gate"])) * torch.einsum("md,efd->mef", x, weights["up"])
    return torch.einsum("mef,edf,me->md", inner, weights["down"], share) + weights["bias"] * weights["scale"]


mixture.parameters = lambda spec: {
    "router": (2, spec.hidden_size),
    "gate": (2, 24, spec.hidden_size),
    "up": (2, 24, spec.hidden_size),
    "down": ((2, spec.hidden_size, 24), 0.01),
    "bias": (spec.hidden_size,),
    "scale": ((spec.hidden_size,), "ones"),
}


def swiglu(x, weights):
    return F.linear(F.silu(F.linear(x, weights["gate"])) * F.linear(x, weights["up"]), weights["down"])


def swiglu_parameters(spec):
    inner, width = spec.intermediate_size, spec.hidden_size
    return {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}


swiglu.parameters = swiglu_parameters


def undeclared(x, weights):
    return x


def wrong(x, weights):
    return x


wrong.parameters = lambda spec: {"up": 7}


def smoothed(logits, labels):
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.2)
"""


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    (tmp_path / "parts.py").write_text(PARTS, encoding="utf-8")
    return tmp_path / "parts.py"


def some_batch(*, ignored: bool = False, documents: bool = False) -> Batch:
    batch = batch_of(random_rows(8, 5), 2)
    if ignored:
        labels = batch.labels_ABT.copy()
        labels[:, 1:, ::3] = IGNORED_LABEL
        batch = dataclasses.replace(batch, labels_ABT=labels, num_target_tokens=int((labels != IGNORED_LABEL).sum()))
    if documents:
        segments = np.broadcast_to(np.arange(batch.tokens_ABT.shape[2]) // 7 + 1, batch.tokens_ABT.shape)
        batch = dataclasses.replace(batch, segment_ids_ABT=segments.astype(np.int32).copy())
    return batch


def step(engine: TorchEngine, batch: Batch) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Measurements of a step and the weights after it, from random weights."""
    randomise(engine)
    values = engine.train_step(batch, lr=0.01, weight_decay=0.1).fetch()
    return {"loss": values.loss, "norm": values.grad_norm, **values.extra}, dict(engine.export_weights())


def assert_equal(one: TorchEngine, other: TorchEngine, batch: Batch) -> None:
    """One step of both, from equal weights: losses within 1e-6, weights within a hundredth of the update."""
    (values, weights), (expected, expected_weights) = step(one, batch), step(other, batch)
    for name in ("loss", "norm"):
        assert values[name] == pytest.approx(expected[name], rel=2e-6), name
    for name, array in weights.items():
        np.testing.assert_allclose(array, expected_weights[name], rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("documents", [False, True])
def test_attention_against_the_plain_formula(dtype: str, documents: bool, parts: Path) -> None:
    """Grouped queries, whose key heads are repeated for the function."""
    model = LLAMA | {"num_kv_heads": 2}
    settings: dict[str, Any] = {"precision__dtype": dtype}
    mine = make(model | {"attention_kernel": f"{parts}:attention"}, **settings)
    reference = make(model | {"attention_kernel": "reference"}, **settings)
    assert_equal(mine, reference, some_batch(documents=documents))
    capped = make(model | {"attention_kernel": f"{parts}:capped"}, **settings)
    assert step(capped, some_batch())[0]["loss"] != step(reference, some_batch())[0]["loss"]


def test_attention_in_decoding(parts: Path) -> None:
    """Behind a cache, where the mask is neither causal nor absent."""
    engine = make(LLAMA | {"num_kv_heads": 2, "attention_kernel": f"{parts}:attention"})
    randomise(engine)
    tokens_BT = random_rows(2, 1)[:, :9].astype(np.int32)
    expected = engine.logits(tokens_BT)
    decoder = engine.decoder(2, 9)
    for start, end in ((0, 3), (3, 4), (4, 9)):
        np.testing.assert_allclose(decoder.feed(tokens_BT[:, start:end]), expected[:, end - 1], rtol=1e-4, atol=1e-4)


def test_activation_against_the_built_in_one(parts: Path) -> None:
    mine, builtin = make(GPT2 | {"activation": f"{parts}:gelu"}), make(GPT2 | {"activation": "gelu"})
    assert train(mine, 3) == train(builtin, 3)
    randomise(squared := make(GPT2 | {"activation": f"{parts}:squared_relu"}))
    mlp = squared.model.blocks[0].mlp
    x_MD = torch.randn(5, squared._spec.hidden_size)
    expected = F.linear(F.linear(x_MD, mlp.up.weight, mlp.up.bias).clamp(min=0) ** 2, mlp.down.weight, mlp.down.bias)
    torch.testing.assert_close(mlp(x_MD), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [1024, 7])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_loss_against_the_built_in_one(chunk_tokens: int, dtype: str, parts: Path) -> None:
    """Chunks, micro-batches and positions without a target; validation stays plain cross entropy."""
    settings: dict[str, Any] = {"loss__chunk_tokens": chunk_tokens, "precision__dtype": dtype}
    for name, same in (("cross_entropy", {}), ("smoothed", {"loss__label_smoothing_fraction": 0.2})):
        mine = make(LLAMA, loss__name=f"{parts}:{name}", **settings)
        builtin = make(LLAMA, **settings, **same)
        assert_equal(mine, builtin, some_batch(ignored=True))
    randomise(mine)
    randomise(builtin)
    assert mine.eval_step(some_batch()).loss_sum == builtin.eval_step(some_batch()).loss_sum


def test_gradient_of_a_loss(parts: Path) -> None:
    """Against float64 autograd over whole logits, in chunks, with positions without a target."""
    num_positions, width, vocab_size, scale = 50, 12, 31, 1 / 37
    generator = torch.Generator().manual_seed(3)
    hidden_MD = torch.randn(num_positions, width, generator=generator).requires_grad_()
    head_VD = torch.nn.Parameter(torch.randn(vocab_size, width, generator=generator))
    labels_BT = np.random.default_rng(2).integers(0, vocab_size, (1, num_positions), np.int32)
    labels_BT[:, ::4] = IGNORED_LABEL
    loss = FusedLinearLoss(
        LossConfig(name=f"{parts}:focal", chunk_tokens=7), vocab_size, torch.device("cpu"), Products(use_onednn=False),
        torch.float32, count_correct=False,
    )  # fmt: skip
    labels = labels_to_device(labels_BT, torch.device("cpu"))
    objective, sums = loss.train(hidden_MD, head_VD, labels, scale)
    objective.backward()
    wide_MD, wide_VD = (x.detach().double().requires_grad_() for x in (hidden_MD, head_VD))
    surprise_M = F.cross_entropy(wide_MD @ wide_VD.T, torch.from_numpy(labels_BT[0]).long(), reduction="none")
    expected = ((1 - torch.exp(-surprise_M)) ** 2 * surprise_M).sum()
    (expected * scale).backward()
    assert float(sums.objective) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert float(sums.cross_entropy) == pytest.approx(float(surprise_M.detach().sum()), rel=1e-6)
    for found, right in ((hidden_MD.grad, wide_MD.grad), (head_VD.grad, wide_VD.grad)):
        assert found is not None
        assert right is not None
        torch.testing.assert_close(found, right.float(), rtol=1e-4, atol=1e-6)


def test_objective_is_a_metric(parts: Path) -> None:
    engine = make(GPT2, loss__name=f"{parts}:cross_entropy")
    values = engine.train_step(some_batch(ignored=True), lr=0.01, weight_decay=0.0).fetch()
    assert values.extra["objective"] == pytest.approx(values.loss, rel=1e-6)


@pytest.mark.parametrize("settings", [{}, {"optimizer__name": "muon"}])
def test_mlp_against_the_built_in_one(settings: dict[str, Any], parts: Path) -> None:
    """The same function and weights, under other names."""
    mine, builtin = make(LLAMA | {"mlp": f"{parts}:swiglu"}, **settings), make(LLAMA, **settings)
    weights = randomise(builtin)
    mine.import_weights((_own_name(name), array) for name, array in weights.items())
    batch = some_batch(ignored=True)
    for _ in range(3):
        one, other = (engine.train_step(batch, lr=0.01, weight_decay=0.1).fetch() for engine in (mine, builtin))
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
    found = dict(mine.export_weights())
    for name, array in builtin.export_weights():
        np.testing.assert_allclose(found[_own_name(name)], array, rtol=0, atol=5e-3, err_msg=name)


def _own_name(name: str) -> str:
    return name.removesuffix(".weight") if ".mlp." in name else name


def test_parameters_of_an_mlp_are_rows_of_the_table(parts: Path, tmp_path: Path) -> None:
    """Initial values, decay, training, checkpoints."""
    engine = make(LLAMA | {"mlp": f"{parts}:mixture"})
    rows = {row.name: row for row in engine._spec.parameters if row.name.startswith("blocks.1.mlp.")}
    assert {name.rpartition(".")[2]: (row.decay, row.kind) for name, row in rows.items()} == {
        "router": (True, "matrix"), "gate": (True, "matrix"), "up": (True, "matrix"), "down": (True, "matrix"),
        "bias": (False, "bias"), "scale": (False, "norm"),
    }  # fmt: skip
    before = dict(engine.export_weights())
    assert before["blocks.1.mlp.down"].std() == pytest.approx(0.01, rel=0.1)
    assert before["blocks.1.mlp.gate"].std() == pytest.approx(0.02, rel=0.1)
    assert set(before["blocks.1.mlp.scale"]) == {1.0}
    before = {name: array.copy() for name, array in before.items()}
    losses = train(engine, 3)
    assert losses[-1] != losses[0]
    assert all((before[name] != array).any() for name, array in engine.export_weights())
    path, other = save(engine, tmp_path / "state"), make(LLAMA | {"mlp": f"{parts}:mixture"}, run__seed=5)
    other.load(path)
    assert other.fingerprint() == engine.fingerprint()
    assert train(other, 1, start=3) == train(engine, 1, start=3)


@pytest.mark.parametrize(("name", "what"), [("undeclared", "declares no parameters"), ("wrong", "as 7")])
def test_an_mlp_without_shapes_is_refused(name: str, what: str, parts: Path) -> None:
    with pytest.raises(ConfigError, match=what) as refused:
        make(LLAMA | {"mlp": f"{parts}:{name}"})
    assert refused.value.where == "model.mlp"
    assert refused.value.hint


LEAKY = """
import torch
import torch.nn.functional as F


def bidirectional(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):
    return F.scaled_dot_product_attention(query, key, value)


def without_documents(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def softmax(x):
    return x.softmax(0)


def running(x, weights):
    return (x @ weights["up"].T).cumsum(0)


running.parameters = lambda spec: {"up": (spec.hidden_size, spec.hidden_size)}
"""


def spec_of(config: RunConfig) -> DecoderSpec:
    return decoder_spec(config.model, tokenizer_vocab_size=VOCAB, sequence_length_tokens=POSITIONS)


@pytest.mark.parametrize(
    ("key", "name", "text"),
    [
        ("attention_kernel", "bidirectional", "is not causal"),
        ("attention_kernel", "without_documents", "Documents of a row see each other"),
        ("activation", "softmax", "is not causal"),
        ("mlp", "running", "Documents of a row see each other"),
    ],
)
@pytest.mark.parametrize("is_pipeline", [False, True])
def test_functions_that_see_more_than_their_past_are_refused(
    key: str, name: str, text: str, is_pipeline: bool, tmp_path: Path
) -> None:
    """Also by a rank of a pipeline, which has no logits by itself."""
    (tmp_path / "parts.py").write_text(LEAKY, encoding="utf-8")
    model = (LLAMA if key == "attention_kernel" else GPT2) | {key: f"{tmp_path}/parts.py:{name}", "num_layers": 5}
    config = configuration(model, parallel__pipeline_parallel_size=2 if is_pipeline else 1)
    with pytest.raises(ConfigError, match=text) as caught:
        check_user_parts_alone(config, spec_of(config), prepare(config)) if is_pipeline else make(model)
    assert caught.value.where == f"model.{key}"


def test_functions_that_see_their_past_pass_in_a_pipeline(parts: Path) -> None:
    """Layers with and without a window, grouped queries, and optimizer groups that name a later layer."""
    model = LLAMA | {
        "num_layers": 3, "num_kv_heads": 2, "sliding_window_tokens": 5, "attention_kernel": f"{parts}:attention",
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }  # fmt: skip
    groups = [{"match": "blocks.2.*", "lr_scale": 0.5}]
    config = configuration(model, optimizer__groups=groups)
    check_user_parts_alone(config, spec_of(config), prepare(config))


@pytest.mark.parametrize(("name", "text"), [("attention", ""), ("bidirectional", "is not causal")])
def test_functions_are_measured_without_the_rounding_of_8_bit_floats(name: str, text: str, tmp_path: Path) -> None:
    """Which divides a whole tensor by its largest element, so that positions seem to see each other."""
    pytest.importorskip("torchao")
    attention = "def attention(*given, **options):\n    return F.scaled_dot_product_attention(*given, **options)\n"
    (tmp_path / "parts.py").write_text(LEAKY + attention, encoding="utf-8")
    model = LLAMA | {"attention_kernel": f"{tmp_path}/parts.py:{name}"}
    precision = {"precision__float8": "tensorwise", "precision__float8_emulate": True}
    with pytest.raises(ConfigError, match=text) if text else contextlib.nullcontext():
        make(model, **precision)
