"""Maximal update parametrisation: the coordinate check of Yang et al. (arXiv 2203.03466, appendix D.1).

What a few steps of AdamW add to the residual stream and to the logits has the same size at every width; without it, the
same learning rate moves a wider model further. At the base width, nothing differs from a model without it.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from parity.test_engines import engine, packed
from small_configurations import LLAMA, random_rows
from vorox.core.config import load_config
from vorox.core.errors import ConfigError

BASE, WIDEST = 32, 512
TOKENS = random_rows(8, 5)[:, :-1]
FRAMEWORKS = [pytest.param("torch", marks=pytest.mark.torch), pytest.param("jax", marks=pytest.mark.jax)]


def of_width(width: int, base: int | None) -> dict[str, Any]:
    shape = {"hidden_size": width, "num_heads": width // 16, "intermediate_size": 2 * width, "tie_embeddings": False}
    return LLAMA | shape | {"mup_base_hidden_size": base}


def moved(framework: str, width: int, base: int | None, seen: list[npt.NDArray[np.float32]] | None = None) -> float:
    """Train four steps; return the root mean square of what they add to the logits."""
    trained = engine(framework, of_width(width, base), optimizer__clip_norm=None)
    before = trained.logits(TOKENS)
    for step in range(4):
        trained.train_step(packed(step), lr=3e-3, weight_decay=0.0).fetch()
    if seen is not None:
        taps = cast("Any", trained).taps
        taps.attach("after_mlp", 1, lambda x: seen.append(x.detach().numpy()))
    return float(np.sqrt(np.mean((trained.logits(TOKENS) - before) ** 2)))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_steps_add_to_the_logits_does_not_depend_on_the_width(framework: str) -> None:
    scaled = moved(framework, WIDEST, BASE) / moved(framework, BASE, BASE)
    plain = moved(framework, WIDEST, None) / moved(framework, BASE, None)
    assert 0.5 < scaled < 1.5
    assert plain > 8


@pytest.mark.torch
def test_the_stream_has_one_scale_at_every_width() -> None:
    sizes = {}
    for base in (BASE, None):
        seen: list[npt.NDArray[np.float32]] = []
        for width in (BASE, WIDEST):
            moved("torch", width, base, seen)
        narrow, wide = (float(np.sqrt(np.mean(x**2))) for x in seen)
        sizes[base] = wide / narrow
    assert sizes[BASE] == pytest.approx(1, abs=0.1)
    assert sizes[None] > 20


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_at_the_base_width_nothing_changes(framework: str) -> None:
    assert moved(framework, BASE, BASE) == moved(framework, BASE, None)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "tie_embeddings=false"),
        (["model.tie_embeddings=false", "optimizer.name=muon"], "optimizer.name=adamw"),
        (["model.tie_embeddings=false", "model.scale_embeddings=true"], "scale_embeddings=false"),
        (["model.tie_embeddings=false", "model.vision.num_layers=1"], "vision.num_layers=0"),
    ],
)
def test_what_has_no_rule_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("quickstart", ["model.mup_base_hidden_size=64", "optimizer.name=adamw", *overrides])
