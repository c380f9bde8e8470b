"""Parts of the model and the loss by import path, against built-in parts."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from backends.jax_engine.jax_models import make
from small_configurations import GPT2, LLAMA, batch_of, random_rows
from vorox.core.config import load_config
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


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.name=adamw_8bit", "optimizer.name=torch.optim:NAdam", "model.mlp=torch:nothing",
        "model.block=torch:nothing", "train.forward_backward=torch:nothing", "train.embedding_noise=5", "loss.name=dpo",
        "parallel.kind=deepspeed", "runtime.cuda_graphs=true", "runtime.num_threads=2", "runtime.device=mps",
        "runtime.determinism=bitwise-any-world", "precision.dtype=fp16", "model.attention_kernel=sdpa",
    ],
)  # fmt: skip
def test_parts_of_torch_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(override.partition('=')[0])}=.*it needs backend=torch"):
        load_config("quickstart", ["backend=jax", override])


LEAKY = """
import jax
import jax.numpy as jnp


def bidirectional(query, key, value, mask=None, is_causal=False):
    return jax.nn.dot_product_attention(query, key, value)


def without_documents(query, key, value, mask=None, is_causal=False):
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def ahead_in_packed_rows(query, key, value, mask=None, is_causal=False):
    if mask is not None:
        mask = mask | jnp.swapaxes(mask, -1, -2)
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=is_causal)


def without_mask(query, key, value):
    return query


def one_position(query, key, value, mask=None, is_causal=False):
    return query[:, :1]


def softmax(x):
    return jax.nn.softmax(x, axis=1)


def running(x):
    return jnp.cumsum(x, axis=1)
"""


@pytest.mark.parametrize(
    ("name", "document_mask", "text"),
    [
        ("bidirectional", False, "is not causal: a later position"),
        ("without_documents", True, "Documents of a row see each other in "),
        ("without_documents", False, ""),
        ("ahead_in_packed_rows", True, "is not causal in rows of several documents"),
        ("without_mask", True, "without_mask in .* failed with TypeError"),
        ("one_position", True, "instead of "),
    ],
)
def test_attention_that_sees_more_than_its_past_is_refused(
    name: str, document_mask: bool, text: str, tmp_path: Path
) -> None:
    (tmp_path / "parts.py").write_text(LEAKY, encoding="utf-8")
    model = LLAMA | {"attention_kernel": f"{tmp_path}/parts.py:{name}"}
    settings = {"data__document_mask": document_mask, "precision__dtype": "bf16"}
    if not text:
        make(model, **settings)
        return
    with pytest.raises(ConfigError, match=text) as caught:
        make(model, **settings)
    assert caught.value.where == "model.attention_kernel"


@pytest.mark.parametrize(
    ("name", "text"), [("softmax", "is not causal"), ("running", "Documents of a row see each other")]
)
def test_an_activation_that_mixes_positions_is_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(LEAKY, encoding="utf-8")
    with pytest.raises(ConfigError, match=text) as caught:
        make(GPT2 | {"activation": f"{tmp_path}/parts.py:{name}"})
    assert caught.value.where == "model.activation"
