"""A block by import path in the native decoder, against the built-in block with the same weights.

Losses and parameters agree to 1e-5 over 3 steps in fp32, on plain rows and on rows of several documents.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.torch_engine.small_models import GPT2, LLAMA, batch_of, configuration, engine_of, make, random_rows, train
from backends.torch_engine.test_checkpoint import save
from vorox.backends.torch_engine.engine import TorchEngine
from vorox.core.batch import Batch
from vorox.core.config import load_config
from vorox.core.errors import ConfigError
from vorox.models.huggingface.families import huggingface_family

pytestmark = pytest.mark.torch
BLOCKS = """
import torch
from torch import nn
import torch.nn.functional as F


class Plain(nn.Module):
    def __init__(self, spec, layer):
        super().__init__()
        width, self.heads = spec.hidden_size, spec.num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, spec.intermediate_size), nn.Linear(spec.intermediate_size, width)
        self.register_buffer("one", torch.ones(1), persistent=False)

    def forward(self, x, positions, attn_mask):
        assert positions.shape[-1] == x.shape[1]
        normed = self.attention_norm(x)
        query, key, value = (
            f(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, is_causal=attn_mask is None)
        x = x + self.one * self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Dropping(Plain):
    def forward(self, x, positions, attn_mask):
        return F.dropout(super().forward(x, positions, attn_mask), 0.1, self.training)


class Evaluating(Plain):
    def __init__(self, spec, layer):
        super().__init__(spec, layer)
        self.drop = nn.Dropout(0.5).eval()

    def forward(self, x, positions, attn_mask):
        return self.drop(super().forward(x, positions, attn_mask))


class Narrow(Plain):
    def forward(self, x, positions, attn_mask):
        return super().forward(x, positions, attn_mask)[..., 1:]


class Stateful(Plain):
    def __init__(self, spec, layer):
        super().__init__(spec, layer)
        self.register_buffer("seen", torch.zeros(1))


def number(spec, layer):
    return 7
"""


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    (tmp_path / "blocks.py").write_text(BLOCKS, encoding="utf-8")
    return tmp_path / "blocks.py"


def documents(batch: Batch, number: int) -> Batch:
    """The same rows as documents of equal length."""
    length = batch.tokens_ABT.shape[2] // number
    here = np.arange(batch.tokens_ABT.shape[2], dtype=np.int32)
    segments, positions = (np.broadcast_to(part, batch.tokens_ABT.shape).copy() for part in divmod(here, length))
    return dataclasses.replace(batch, segment_ids_ABT=segments + 1, position_ids_ABT=positions)


def block_name(name: str) -> str:
    """The name in the block of a parameter of the built-in one."""
    for old, new in (("attention_norm", "module.attention_norm"), ("mlp_norm", "module.mlp_norm")):
        if f".{old}." in name:
            return name.replace(old, new)
    return name.replace(".attention.", ".module.").replace(".mlp.", ".module.")


def with_weights_of(native: TorchEngine, blocks: Path, **settings: Any) -> TorchEngine:
    engine = make(GPT2, model__block=f"{blocks}:Plain", **settings)
    engine.import_weights((name, array) for name, array in _in_order(native, engine))
    return engine


def _in_order(native: TorchEngine, engine: TorchEngine) -> list[tuple[str, np.ndarray[Any, Any]]]:
    found = {block_name(name): array for name, array in native.export_weights()}
    return [(row.name, found[row.name]) for row in engine._spec.parameters]


@pytest.mark.parametrize("settings", [{}, {"train__activation_checkpointing": "block"}], ids=["", "recomputed"])
def test_a_block_equals_the_built_in_one(settings: dict[str, Any], blocks: Path) -> None:
    native = make(GPT2)
    engine = with_weights_of(native, blocks, **settings)
    tokens = random_rows(3)[:, :-1]
    np.testing.assert_allclose(engine.logits(tokens), native.logits(tokens), rtol=1e-5, atol=1e-5)
    for step in range(3):
        batch = documents(batch_of(random_rows(8, step), step=step), (1, 2, 3)[step])
        mine, theirs = (one.train_step(batch, lr=1e-3, weight_decay=0.1).fetch() for one in (engine, native))
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    for (name, here), (_, there) in zip(engine.export_weights(), _in_order(native, engine), strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-4, atol=2e-5, err_msg=name)
    first, second = engine.decoder(3, 24), native.decoder(3, 24)
    for start, end in ((0, 5), (5, 6)):
        here, there = (decoder.feed(tokens[:, start:end]) for decoder in (first, second))
        np.testing.assert_allclose(here, there, rtol=1e-4, atol=1e-4)


def test_an_evaluation_changes_no_mode(blocks: Path) -> None:
    """A part of a block that its constructor leaves in evaluation mode trains with or without an evaluation before."""
    with_evaluation, without = (make(LLAMA, model__block=f"{blocks}:Evaluating") for _ in range(2))
    losses = train(with_evaluation, 1)
    with_evaluation.eval_step(batch_of(random_rows(8)))
    assert losses + train(with_evaluation, 2, start=1) == train(without, 3)


def test_a_saved_state_continues_bit_for_bit(blocks: Path, tmp_path: Path) -> None:
    whole, half = (make(LLAMA, model__block=f"{blocks}:Dropping") for _ in range(2))
    assert whole.fingerprint() == half.fingerprint(), "initial weights are a function of the seed"
    losses = train(whole, 4)
    assert train(half, 2) == losses[:2], "dropout is one too"
    again = make(LLAMA, model__block=f"{blocks}:Dropping")
    again.load(save(half, tmp_path / "state"))
    assert train(again, 2, start=2) == losses[2:]
    assert again.fingerprint() == whole.fingerprint()
    batch = batch_of(random_rows(4))
    assert whole.eval_step(batch) == whole.eval_step(batch), "no dropout in evaluation"


def test_taps_are_around_the_block(blocks: Path) -> None:
    engine = make(GPT2, model__block=f"{blocks}:Plain")
    seen: list[tuple[int, ...]] = []
    engine.taps.attach("after_mlp", 1, lambda x_BTD: seen.append(tuple(x_BTD.shape)))
    train(engine, 1)
    assert seen[0][1:] == (24, engine._spec.hidden_size)
    with pytest.raises(ConfigError, match="Layer 1 has no tap point 'after_attention'; it has block_input, after_mlp"):
        engine.taps.attach("after_attention", 1, lambda x_BTD: None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Narrow", "Narrow returns"),
        ("Stateful", "has buffers that checkpoints would have to store"),
        ("number", "returned int, not a torch.nn.Module"),
    ],
)
def test_what_does_not_work_is_refused(name: str, message: str, blocks: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        train(make(GPT2, model__block=f"{blocks}:{name}"), 1)


def test_other_parts_and_exports_are_refused(blocks: Path) -> None:
    spec = engine_of(configuration(LLAMA, model__block=f"{blocks}:Plain"))._spec
    assert huggingface_family(spec) is None  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model\.mlp"):
        load_config("quickstart", [f"model.block={blocks}:Plain", f"model.mlp={blocks}:number"])
