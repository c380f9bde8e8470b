"""The moving average of the weights: against ten lines of numpy over the weights of every step, on both engines.

Bounds: 1e-6 of the largest weight. What must not change (training itself, a resumed run) is compared bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_runs
from parity.test_engines import engine, packed
from parity.test_parameter_groups import save, steps, weights
from small_configurations import MODELS
from vorox.core.config import config_digest
from vorox.core.engine import Engine, exchange_average
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.run_layout import step_directories
from vorox.core.schema import RunConfig
from vorox.models.arrays.weights_file import WeightsFile
from vorox.models.stored.engine_state import AVERAGE, read_average, read_weights
from vorox.models.stored.spec import spec_from_json
from vorox.models.weight_init import initial_weights
from vorox.training.checkpoints.store import verify
from vorox.training.export.checkpoint import export

pytestmark = [pytest.mark.torch, pytest.mark.jax]
MODEL = MODELS["llama grouped, untied"]
DECAY = 0.6
FROZEN = [{"match": "blocks.0.mlp.*", "frozen": True}]


def averages(every: list[dict[str, np.ndarray]], *, warmup: bool = True) -> dict[str, np.ndarray]:
    """The oracle, in float64, from the weights before step 1 and after every step."""
    found = {name: array.astype(float) for name, array in every[0].items()}
    for count, now in enumerate(every[1:], 1):
        decay = min(DECAY, (1 + count) / (10 + count)) if warmup else DECAY
        found = {name: decay * found[name] + (1 - decay) * now[name] for name in found}
    return found


def assert_near(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.abs(found[name] - array).max() <= 1e-6 * max(1.0, np.abs(array).max()), name


def exchange(trained: Engine, config: RunConfig) -> None:
    exchange_average(trained, config)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("torch", {"optimizer__name": "adamw_8bit"}),
        ("torch", {"train__ema_warmup": False, "optimizer__groups": FROZEN}),
        ("torch", {"optimizer__name": "torch.optim:NAdam"}),
        ("jax", {"optimizer__name": "muon", "optimizer__groups": FROZEN}),
    ],
    ids=["torch, 8 bits", "torch, frozen", "torch, NAdam", "jax, frozen"],
)
def test_average_of_every_step(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    trained, other = (engine(name, MODEL, run__seed=seed, train__ema_decay=DECAY, **settings) for seed in (0, 1))
    config: RunConfig = trained._config  # type: ignore[attr-defined]
    plain = engine(name, MODEL, run__seed=0, **{key: value for key, value in settings.items() if "ema" not in key})
    every = [weights(trained)]
    for step in range(4):
        assert steps(trained, 1, step) == steps(plain, 1, step), "training does not read the average"
        every.append(weights(trained))
    expected = averages(every, warmup=settings.get("train__ema_warmup", True))
    path = save(trained, tmp_path / "state")
    spec = trained._spec  # type: ignore[attr-defined]
    assert_near(dict(read_average(path, spec)), expected)
    stored = {key for key, _ in WeightsFile(path / "optimizer.safetensors") if key.startswith(AVERAGE)}
    is_frozen = "blocks.0.mlp." if "optimizer__groups" in settings else "none"
    assert stored == {f"{AVERAGE}.{key}" for key in expected if not key.startswith(is_frozen)}

    before = trained.fingerprint()
    loss = trained.eval_step(packed(9)).loss_sum
    exchange(trained, config)
    assert_near(weights(trained), expected)
    plain.import_weights(weights(trained).items())
    assert trained.eval_step(packed(9)).loss_sum == plain.eval_step(packed(9)).loss_sum != loss
    exchange(trained, config)
    assert trained.fingerprint() == before

    other.load(path)
    assert other.fingerprint() == before
    assert steps(other, 2, 4) == steps(trained, 2, 4)
    assert other.fingerprint() == trained.fingerprint()


def test_a_run_validates_and_exports_its_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at step 5 and resumed; the oracle reads the checkpoints of all steps."""
    overrides = [
        f"train.ema_decay={DECAY}", "checkpoint.every_steps=1", "checkpoint.keep_last=20", "train.num_steps=8",
        "eval.weights=ema", "eval.every_steps=8", "model.family=llama", "checkpoint.asynchronous=false",
    ]  # fmt: skip
    config = tiny_runs.configuration(tmp_path, overrides)
    other = tiny_runs.configuration(tmp_path, [*overrides, "eval.weights=model", "run.directory=other"])
    monkeypatch.chdir(tmp_path)
    from vorox.backends.torch_engine.engine import TorchEngine

    original, killed = TorchEngine.train_step, []

    def train_step(self: TorchEngine, batch: Any, **kwargs: float) -> Any:
        if batch.step == 5 and not killed:
            killed.append(True)
            raise tiny_runs.Killed
        return original(self, batch, **kwargs)

    monkeypatch.setattr(TorchEngine, "train_step", train_step)
    with pytest.raises(tiny_runs.Killed):
        tiny_runs.run(config)
    outcome, plain = tiny_runs.run(config), tiny_runs.run(other)
    assert (outcome.start_step, outcome.fingerprint) == (5, plain.fingerprint)
    assert outcome.eval_losses != plain.eval_losses

    paths = step_directories(outcome.run_directory)
    assert sorted(paths) == list(range(1, 9))
    spec = spec_from_json(verify(paths[8]).metadata["spec"])
    every = [
        dict(initial_weights(spec, config.run.seed)),
        *(dict(read_weights(paths[step], spec)) for step in sorted(paths)),
    ]
    assert_near(dict(read_average(paths[8], spec)), averages(every))

    exported = export(paths[8], tmp_path / "averaged", weights="ema")
    assert export(paths[8], tmp_path / "averaged", weights="ema").existed
    with pytest.raises(ConfigError, match="other than this export"):
        export(paths[8], tmp_path / "averaged")
    stored = dict(WeightsFile(exported.path / "model.safetensors"))
    expected = averages(every)
    assert np.abs(stored["model.norm.weight"] - expected["final_norm.weight"]).max() < 1e-6
    assert np.abs(stored["model.embed_tokens.weight"] - expected["embedding.weight"]).max() < 1e-6


def test_a_run_without_an_average_is_named(tmp_path: Path) -> None:
    trained = engine("torch", MODEL)
    path = save(trained, tmp_path / "state")
    with pytest.raises(CheckpointError, match="no moving average"):
        list(read_average(path, trained._spec))  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="no moving average"):
        exchange(trained, trained._config)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="expected exp_avg, exp_avg_sq, weights_ema") as caught:
        engine("torch", MODEL, train__ema_decay=0.9).load(path)
    assert "train.ema_decay" in caught.value.hint


def test_the_average_is_part_of_the_identity_of_a_run(tmp_path: Path) -> None:
    plain = tiny_runs.configuration(tmp_path)
    averaged, validated = (
        tiny_runs.configuration(tmp_path, overrides)
        for overrides in (["train.ema_decay=0.9"], ["train.ema_decay=0.9", "eval.weights=ema"])
    )
    assert config_digest(plain) != config_digest(averaged) == config_digest(validated)
    with pytest.raises(ConfigError, match=r"eval\.weights=ema has no effect"):
        tiny_runs.configuration(tmp_path, ["eval.weights=ema"])
