"""What is saved comes back bit for bit, in every configuration; what does not belong is refused and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from backends.torch_engine.small_models import GPT2, LLAMA, MODELS, QWEN3, make, randomise, train
from vorox.backends.torch_engine.engine import TorchEngine
from vorox.core.errors import CheckpointError
from vorox.core.files.staged_directory import StagedDirectory, verify_directory
from vorox.models.huggingface.families import huggingface_family
from vorox.models.optimizer_groups import DECAYED
from vorox.training.checkpoints.store import write_state

pytestmark = pytest.mark.torch
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {"optimizer__name": "muon"},
    "adamw_8bit": {"optimizer__name": "adamw_8bit"},
    "user optimizer": {"optimizer__name": "torch.optim:NAdam"},
    "fp16": {"precision__dtype": "fp16"},
    "bf16, no decay of embeddings": {"precision__dtype": "bf16", "optimizer__decay_embeddings": False},
}


def save(engine: TorchEngine, target: Path) -> Path:
    with StagedDirectory(target) as directory:
        write_state(engine.snapshot(detached=False), directory)
        return directory.commit({})


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("settings", sorted(SETTINGS))
def test_save_load_step_is_bitwise(model: str, settings: str, tmp_path: Path) -> None:
    engine = make(MODELS[model], **SETTINGS[settings])
    train(engine, 2)
    before = engine.fingerprint()
    path = save(engine, tmp_path / "state")
    verify_directory(path)
    assert sorted(entry.name for entry in path.iterdir()) == [
        "MANIFEST.json", "engine.json", "model.safetensors", "model.safetensors.index.json", "optimizer.safetensors",
    ]  # fmt: skip
    other = make(MODELS[model], run__seed=99, **SETTINGS[settings])
    train(other, 1, start=50)
    assert other.fingerprint() != before
    other.load(path)
    assert other.fingerprint() == before == engine.fingerprint()
    assert train(other, 3, start=2) == train(engine, 3, start=2)
    assert other.fingerprint() == engine.fingerprint()


def test_the_files_say_the_same_under_their_public_format(tmp_path: Path) -> None:
    """Read by the official library: canonical names where transformers has no such model, fp32 throughout."""
    engine = make(LLAMA | {"positions": "learned"}, optimizer__name="muon")
    assert huggingface_family(engine._spec) is None
    train(engine, 2)
    path = save(engine, tmp_path / "state")
    stored = load_file(path / "model.safetensors")
    exported = dict(engine.export_weights())
    assert set(stored) == set(exported)
    assert all(
        np.array_equal(stored[name], array) and stored[name].dtype == np.float32 for name, array in exported.items()
    )
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(stored, "model.safetensors"), "the optimizer's file is left out"
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in stored.values())
    moments = load_file(path / "optimizer.safetensors")
    for kind, buffers in engine.optimizer.buffers.items():
        for name, view in engine.parameters.whole(buffers):
            assert np.array_equal(moments.pop(f"{kind}.{name}"), view.numpy())
    assert not moments
    state = json.loads((path / "engine.json").read_text())
    assert state["format"] == "vorox-engine/2"
    assert state["counters"] == {"updates": 2.0}


def test_known_families_are_saved_under_their_names(tmp_path: Path) -> None:
    for number, (model, name) in enumerate(
        [(GPT2, "transformer.h.1.attn.c_attn.weight"), (LLAMA, "model.layers.1.self_attn.q_proj.weight"),
         (QWEN3, "model.layers.0.self_attn.q_norm.weight")]
    ):  # fmt: skip
        path = save(make(model), tmp_path / str(number))
        assert name in load_file(path / "model.safetensors")


def test_fingerprint_sees_every_bit() -> None:
    engine = make(optimizer__name="muon", precision__dtype="fp16")
    train(engine, 1)
    clean = engine.fingerprint()
    buffers = [*(values for (values,) in engine.parameters.values.values()), *engine.optimizer.counters.values()]
    buffers += [buffer for groups in engine.optimizer.buffers.values() for (buffer,) in groups.values()]
    for buffer in buffers:
        bits = buffer.view(-1).view(torch.int32)
        place = 3 if bits.numel() > 3 else 0
        bits[place] ^= 1
        assert engine.fingerprint() != clean
        bits[place] ^= 1
    assert engine.fingerprint() == clean


def test_fingerprint_is_the_same_in_another_layout() -> None:
    """Of names and bytes, not of where they lie: other decay groups, same fingerprint."""
    first, second = make(GPT2), make(GPT2, optimizer__decay_embeddings=False)
    assert first.parameters.values[DECAYED][0].numel() != second.parameters.values[DECAYED][0].numel()
    assert first.fingerprint() == second.fingerprint()


class TestRefusals:
    @pytest.mark.parametrize(
        "change",
        [{"num_layers": 3}, {"hidden_size": 48}, {"num_heads": 2}, {"rope_theta": 500.0}, {"norm_eps": 1e-6},
         {"activation": "geglu"}, {"tie_embeddings": False}, {"positions": "learned"}, {"intermediate_size": 44}],
        ids=str,
    )  # fmt: skip
    def test_another_model(self, change: dict[str, Any], tmp_path: Path) -> None:
        path = save(make(LLAMA | change), tmp_path / "state")
        engine = make(LLAMA)
        before = engine.fingerprint()
        with pytest.raises(CheckpointError, match="belongs to a different model") as caught:
            engine.load(path)
        assert next(iter(change)) in str(caught.value)
        assert engine.fingerprint() == before

    def test_what_does_not_matter_may_differ(self, tmp_path: Path) -> None:
        engine = make(LLAMA)
        path = save(engine, tmp_path / "state")
        other = make(LLAMA | {"dropout_fraction": 0.1, "init_std": 0.5, "scale_residual_init": False})
        other.load(path)
        assert other.fingerprint() == engine.fingerprint()

    @pytest.mark.parametrize("settings", [{"optimizer__name": "muon"}, {"precision__dtype": "fp16"}], ids=str)
    def test_another_optimizer(self, settings: dict[str, Any], tmp_path: Path) -> None:
        path = save(make(LLAMA), tmp_path / "state")
        engine = make(LLAMA, **settings)
        before = engine.fingerprint()
        with pytest.raises(CheckpointError, match="The optimizer state holds"):
            engine.load(path)
        assert engine.fingerprint() == before

    @pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"format": "vorox-engine/3"}', b"\xff\xfe"])
    def test_a_broken_state_file(self, content: bytes, tmp_path: Path) -> None:
        engine = make()
        path = save(engine, tmp_path / "state")
        (path / "engine.json").write_bytes(content)
        with pytest.raises(CheckpointError):
            engine.load(path)

    def test_another_format(self, tmp_path: Path) -> None:
        engine = make()
        path = save(engine, tmp_path / "state")
        state = json.loads((path / "engine.json").read_text())
        (path / "engine.json").write_text(json.dumps(state | {"format": "vorox-engine/1"}))
        with pytest.raises(CheckpointError, match="format 'vorox-engine/1', but this version reads 'vorox-engine/2'"):
            engine.load(path)

    @pytest.mark.parametrize("name", ["engine.json", "model.safetensors", "optimizer.safetensors"])
    def test_a_missing_file(self, name: str, tmp_path: Path) -> None:
        engine = make()
        path = save(engine, tmp_path / "state")
        (path / name).unlink()
        before = engine.fingerprint()
        with pytest.raises(CheckpointError):
            engine.load(path)
        assert engine.fingerprint() == before


class TestImport:
    def test_weights_come_back(self) -> None:
        first, second = make(QWEN3), make(QWEN3)
        weights = randomise(first)
        train(second, 2)
        second.import_weights(weights.items())
        assert second.fingerprint() == first.fingerprint(), "the optimizer starts afresh"

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda weights: weights.pop("final_norm.weight"), "final_norm.weight is missing"),
            (lambda weights: weights.update(other=np.zeros(3, np.float32)), "other is unknown"),
            (lambda weights: weights.update({"final_norm.weight": np.zeros(3, np.float32)}), "has shape"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, change: Any, message: str) -> None:
        engine = make()
        weights = dict(engine.export_weights())
        change(weights)
        with pytest.raises(CheckpointError, match=message):
            engine.import_weights(weights.items())

    def test_twice_is_refused(self) -> None:
        engine = make()
        weights = list(engine.export_weights())
        with pytest.raises(CheckpointError, match="duplicated"):
            engine.import_weights([*weights, weights[0]])
