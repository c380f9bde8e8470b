"""Parts of the model and the loss by import path, against built-in parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backends.jax_engine.jax_models import make
from small_configurations import GPT2, LLAMA, batch_of, random_rows
from vorox.core.errors import ConfigError

pytestmark = pytest.mark.jax

PARTS = """
import jax
import jax.numpy as jnp


def attention(query, key, value, mask=None, is_causal=False):
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=is_causal)


def gelu(x):
    return jax.nn.gelu(x, approximate=False)


def cross_entropy(logits, labels):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return -jnp.where(labels >= 0, picked, 0).sum()
"""


def test_parts_against_the_built_in_ones(tmp_path: Path) -> None:
    """Attention over a sliding window, activation and loss at once, from random weights."""
    (tmp_path / "parts.py").write_text(PARTS, encoding="utf-8")
    model = GPT2 | {"sliding_window_tokens": 5, "activation": "gelu"}
    names = {"model__attention_kernel": "attention", "model__activation": "gelu", "loss__name": "cross_entropy"}
    mine = make(model, **{key: f"{tmp_path}/parts.py:{name}" for key, name in names.items()})
    builtin, without_window = make(model), make(model | {"sliding_window_tokens": None})
    generator = np.random.default_rng(1)
    weights = {name: generator.normal(0, 0.3, array.shape) for name, array in mine.export_weights()}
    batch = batch_of(random_rows(8, 5), 2)
    values = []
    for engine in (mine, builtin, without_window):
        engine.import_weights((name, array.astype(np.float32)) for name, array in weights.items())
        values.append(engine.train_step(batch, lr=0.01, weight_decay=0.1).fetch())
    assert values[0].loss == pytest.approx(values[1].loss, rel=1e-5)
    assert values[0].grad_norm == pytest.approx(values[1].grad_norm, rel=1e-4)
    assert values[0].extra["objective"] == pytest.approx(values[0].loss, rel=1e-5)
    assert abs(values[2].loss - values[0].loss) > 1e-3, "the window matters"


def test_attention_with_dropout_is_refused(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PARTS, encoding="utf-8")
    with pytest.raises(ConfigError, match="has no dropout in the jax engine"):
        make(LLAMA | {"attention_kernel": f"{tmp_path}/parts.py:attention", "dropout_fraction": 0.1})


def test_parts_of_torch_are_refused() -> None:
    for name in ("adamw_8bit", "torch.optim:NAdam"):
        with pytest.raises(ConfigError, match=r"it has adamw, muon"):
            make(LLAMA, optimizer__name=name)
    for key in ("model__mlp", "train__forward_backward"):
        with pytest.raises(ConfigError, match="is not supported by the jax engine"):
            make(None, **{key: "torch:nothing"})
    for key, value in (("loss__name", "dpo"), ("parallel__kind", "deepspeed"), ("train__embedding_noise", 5.0)):
        with pytest.raises(ConfigError, match=f"{value} is not supported by the jax engine"):
            make(LLAMA, **{key: value})
