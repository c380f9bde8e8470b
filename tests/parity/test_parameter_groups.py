"""Learning rates by parameter and frozen parameters: both engines against torch.optim and against an unfrozen model.

Oracles: torch.optim.AdamW with a parameter group per factor (1e-5 relative, 2e-6 absolute); gradients of an engine that
freezes nothing (1e-5 relative); frozen parameters are compared bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity.test_engines import engine, packed
from small_configurations import GPT2, LR, MODELS
from vorox.core.engine import Engine
from vorox.core.errors import ConfigError
from vorox.core.files.staged_directory import StagedDirectory
from vorox.models.arrays.weights_file import WeightsFile
from vorox.training.checkpoints.store import write_state
from vorox.training.reports.engine_parity import Tolerances, compare

pytestmark = [pytest.mark.torch, pytest.mark.jax]
GROUPS = [
    {"match": "embedding.weight", "frozen": True},
    {"match": "blocks.0.attention.*", "frozen": True},
    {"match": "blocks.0.mlp.down.*", "lr_scale": 0.25},
    {"match": "blocks.1.*norm*", "frozen": True},
    {"match": "blocks.1.mlp.*", "lr_scale": 4.0},
]
UNTIED = MODELS["llama grouped, untied"]


def factor(name: str) -> float:
    """The factors of GROUPS, written out a second time; 0 is frozen."""
    if name == "embedding.weight" or name.startswith("blocks.0.attention."):
        return 0.0
    if name.startswith("blocks.1."):
        return 0.0 if "norm" in name else 4.0 if ".mlp." in name else 1.0
    return 0.25 if name.startswith("blocks.0.mlp.down.") else 1.0


def steps(trained: Engine, count: int, first: int = 0) -> list[tuple[float, float]]:
    found = []
    for step in range(first, first + count):
        result = trained.train_step(packed(step), lr=LR, weight_decay=0.1).fetch()
        found.append((result.loss, result.grad_norm))
    return found


def weights(trained: Engine) -> dict[str, np.ndarray]:
    return dict(trained.export_weights())


def save(trained: Engine, path: Path) -> Path:
    with StagedDirectory(path) as directory:
        write_state(trained.snapshot(detached=False), directory)
        return directory.commit({})


@pytest.mark.parametrize(
    ("model", "optimizer"), [(UNTIED, "muon"), (GPT2, "adamw")], ids=["llama, muon", "gpt2 with tied head"]
)
def test_both_engines_read_one_table(model: dict[str, Any], optimizer: str) -> None:
    settings = {"optimizer__groups": GROUPS, "optimizer__layer_lr_decay": 0.8, "optimizer__name": optimizer}
    pair = [engine(name, model, **settings) for name in ("torch", "jax")]
    before = weights(pair[0])
    found = compare(pair[0], pair[1], map(packed, range(5)), 5, lr=lambda _: 1e-3, weight_decay=lambda _: 0.1)
    assert [step.exceeded(Tolerances()) for step in found] == [None] * 5
    for after in map(weights, pair):
        same = {name for name in after if np.array_equal(after[name], before[name])}
        assert same == {name for name in after if factor(name) == 0}


@pytest.mark.parametrize(
    ("name", "settings"), [("torch", {}), ("torch", {"precision__dtype": "bf16"}), ("jax", {})], ids=str
)
def test_other_gradients_do_not_change(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """AdamW's first moment after one step is a tenth of the gradient; clipping is off."""
    settings = {**settings, "optimizer__clip_norm": None}
    whole = engine(name, UNTIED, **settings)
    frozen = engine(name, UNTIED, **settings, optimizer__groups=GROUPS)
    ((loss, _),), ((frozen_loss, norm),) = steps(whole, 1), steps(frozen, 1)
    assert frozen_loss == pytest.approx(loss, rel=1e-6)
    moments, expected = (
        dict(WeightsFile(save(one, tmp_path / label) / "optimizer.safetensors"))
        for label, one in (("frozen", frozen), ("whole", whole))
    )
    kept = {key for key in expected if factor(key.partition(".")[2])}
    assert set(moments) == kept != set(expected)
    tolerance = 1e-5 if not settings.get("precision__dtype") else 2e-2
    for key in kept:
        close = np.abs(moments[key] - expected[key]).max() <= tolerance * np.abs(expected[key]).max()
        assert close, key
    squares = sum(float(np.square(10 * moments[key].astype(float)).sum()) for key in kept if key.startswith("exp_avg."))
    assert norm == pytest.approx(squares**0.5, rel=1e-4)


def test_updates_against_pytorch() -> None:
    import torch

    trained = engine("torch", UNTIED, optimizer__clip_norm=None, optimizer__groups=GROUPS)
    decays = {row.name: 0.1 if row.decay else 0.0 for row in trained._spec.parameters}  # type: ignore[attr-defined]
    theirs = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in weights(trained).items()}
    oracle = torch.optim.AdamW(
        [
            {"params": [theirs[name]], "lr": LR * factor(name), "weight_decay": decays[name]}
            for name in theirs
            if factor(name)
        ],
        betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    for step in range(4):
        trained.train_step(packed(step), lr=LR, weight_decay=0.1)
        parameters = trained.parameters  # type: ignore[attr-defined]
        for name, gradient in parameters.whole(parameters.gradients):
            theirs[name].grad = gradient.clone()
        oracle.step()
    for name, array in weights(trained).items():
        np.testing.assert_allclose(array, theirs[name].detach().numpy(), rtol=1e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("name", "optimizer"), [("torch", "adamw_8bit"), ("torch", "torch.optim:NAdam"), ("torch", "muon"), ("jax", "muon")]
)
def test_a_saved_state_continues_bit_for_bit(name: str, optimizer: str, tmp_path: Path) -> None:
    settings = {"optimizer__groups": GROUPS, "optimizer__name": optimizer}
    trained, other = (engine(name, UNTIED, run__seed=seed, **settings) for seed in (0, 1))
    before = weights(trained)
    steps(trained, 2)
    path = save(trained, tmp_path / "state")
    other.load(path)
    assert steps(other, 2, 2) == steps(trained, 2, 2)
    assert other.fingerprint() == trained.fingerprint()
    after = weights(other)
    same = {key for key in after if np.array_equal(after[key], before[key])}
    assert same == {key for key in after if factor(key) == 0}
    stored = {key.partition(".")[2] for key, _ in WeightsFile(path / "optimizer.safetensors")}
    assert stored == {key for key in after if factor(key)}


@pytest.mark.parametrize(
    ("name", "settings", "groups"),
    [
        ("torch", {}, [{"match": "blocks.0.attention.query.*", "frozen": True}]),
        ("jax", {"runtime__scan_layers": True}, [{"match": "blocks.0.*", "lr_scale": 0.5}]),
    ],
    ids=["fused", "stacked"],
)
def test_parts_of_what_is_stored_as_one_are_refused(name: str, settings: dict[str, Any], groups: list[Any]) -> None:
    with pytest.raises(ConfigError, match="are stored as one and need the same learning rate") as caught:
        engine(name, UNTIED, **settings, optimizer__groups=groups)
    assert caught.value.hint
