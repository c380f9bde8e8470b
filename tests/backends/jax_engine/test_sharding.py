"""Four devices give what one gives: data parallel, FSDP, tensor parallel and their products, on host devices.

Sums over devices are made in another order, so losses agree to 1e-5 (relative, over five AdamW steps) and parameters
to 2e-4 of the way allowed by the learning rate. What is restored on another mesh is equal bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from backends.jax_engine.jax_models import jax_configuration, make
from small_configurations import GPT2, LLAMA, QWEN3, batch_of, random_rows
from vorox.backends.jax_engine.engine import JaxEngine
from vorox.core.errors import ConfigError
from vorox.core.files.staged_directory import StagedDirectory
from vorox.training.checkpoints.store import write_state

pytestmark = pytest.mark.jax

MESHES = {
    "data 4": {"data_parallel_size": 4},
    "fsdp 4": {"fsdp_size": 4},
    "tensor 4": {"tensor_parallel_size": 4},
    "data 2, fsdp 2": {"data_parallel_size": 2, "fsdp_size": 2},
    "fsdp 2, tensor 2": {"fsdp_size": 2, "tensor_parallel_size": 2},
}
DIVISIBLE: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "llama": LLAMA | {"tie_embeddings": False},
    "qwen3": QWEN3 | {"num_kv_heads": 4},
}
LR = 1e-3


def on(mesh: dict[str, int], model: dict[str, Any], **overrides: Any) -> JaxEngine:
    return make(
        model | {"vocab_size": 64}, train__micro_batch_sequences=2, parallel=mesh, **overrides,
    )  # fmt: skip


def losses(engine: JaxEngine, num_steps: int = 5) -> list[float]:
    found: list[float] = []
    for step in range(num_steps):
        keep = np.random.default_rng(step).random((8, 24)) < 0.8
        batch = batch_of(random_rows(8, step), 4, step=step, keep=keep)
        found.append(engine.train_step(batch, lr=LR, weight_decay=0.1).fetch().loss)
    return found


def saved(engine: JaxEngine, target: Path) -> Path:
    with StagedDirectory(target) as directory:
        write_state(engine.snapshot(detached=False), directory)
        return directory.commit({})


@pytest.mark.parametrize(
    ("mesh", "model", "scan_layers"),
    [
        ("data 4", "gpt2", False),
        ("fsdp 4", "llama", True),
        ("tensor 4", "llama", False),
        ("tensor 4", "gpt2", True),
        ("data 2, fsdp 2", "qwen3", True),
        ("fsdp 2, tensor 2", "qwen3", False),
    ],
)
def test_many_devices_give_the_losses_of_one(mesh: str, model: str, scan_layers: bool) -> None:
    one = on({}, DIVISIBLE[model])
    many = on(MESHES[mesh], DIVISIBLE[model], runtime__scan_layers=scan_layers)
    assert many.compute.mesh.size == 4
    assert losses(many) == pytest.approx(losses(one), rel=1e-5)
    for (name, left), (_, right) in zip(one.export_weights(), many.export_weights(), strict=True):
        np.testing.assert_allclose(right, left, atol=2e-4 * 5, err_msg=name)


@pytest.mark.parametrize("mesh", ["fsdp 4", "tensor 4", "fsdp 2, tensor 2"])
def test_parameters_and_moments_are_really_spread(mesh: str) -> None:
    engine = on(MESHES[mesh], DIVISIBLE["llama"])
    for tree in (engine.state.params, engine.state.exp_avg, engine.state.exp_avg_sq):
        held = sum(array.addressable_shards[0].data.size for array in tree.values())
        assert held < 0.6 * sum(array.size for array in tree.values())


@pytest.mark.parametrize("to", ["one", "tensor 4"])
def test_restored_on_another_mesh_bit_for_bit(to: str, tmp_path: Path) -> None:
    engine = on(MESHES["fsdp 2, tensor 2"], DIVISIBLE["qwen3"], optimizer__name="muon")
    losses(engine, 2)
    path = saved(engine, tmp_path / "saved")
    other = on(MESHES.get(to, {}), DIVISIBLE["qwen3"], optimizer__name="muon", run__seed=9)
    other.load(path)
    assert other.fingerprint() == engine.fingerprint()
    assert dict(other.state.params.items()).keys() == dict(engine.state.params.items()).keys()
    assert losses(other, 2) == pytest.approx(losses(engine, 2), rel=1e-5)


def test_evaluation_is_the_same(tmp_path: Path) -> None:
    one, many = on({}, DIVISIBLE["gpt2"]), on(MESHES["data 2, fsdp 2"], DIVISIBLE["gpt2"])
    for num_rows in (4, 3):
        batch = batch_of(random_rows(num_rows))
        assert many.eval_step(batch).loss_sum == pytest.approx(one.eval_step(batch).loss_sum, rel=1e-6)
    np.testing.assert_allclose(many.logits(random_rows(3)[:, :-1]), one.logits(random_rows(3)[:, :-1]), atol=1e-5)
    prompt = random_rows(2)[:, :7]
    np.testing.assert_allclose(many.decoder(2, 24).feed(prompt), one.decoder(2, 24).feed(prompt), atol=1e-5)


def test_a_mesh_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_heads = 2 of .* is not divisible by 4 devices") as caught:
        on({"tensor_parallel_size": 4}, QWEN3)
    assert caught.value.where == "parallel.tensor_parallel_size"
    assert caught.value.exit_code == 2


def test_too_few_devices_are_refused() -> None:
    assert jax.device_count() == 4  # once there are devices, no more are made
    with pytest.raises(ConfigError, match="need 64 devices; this process group has 4") as caught:
        make(LLAMA, parallel={"data_parallel_size": 64}, train__global_batch_sequences=512)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"runtime__device": "cuda"}, "runtime.device"),
        ({"precision__matmul": "tf32"}, "precision.matmul"),
        ({"model__attention_kernel": "cudnn"}, "model.attention_kernel"),
        ({"model__attention_kernel": "splash"}, "model.attention_kernel"),
    ],
)
def test_what_this_device_lacks_is_refused(overrides: dict[str, Any], key: str) -> None:
    config = jax_configuration(LLAMA, **overrides)
    with pytest.raises(ConfigError) as caught:
        make(LLAMA, **overrides)
    assert caught.value.where == key
    assert caught.value.hint
    assert config.backend == "jax"
