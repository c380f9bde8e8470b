"""Models of transformers on two processes: the rows and, within 1e-5, the losses of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eventually import wait_until
from ranks.processes import (
    PATIENCE_SECONDS,
    Runs,
    entries,
    fingerprint,
    losses,
    stored_arrays,
    train_with_kills,
)

pytestmark = [pytest.mark.torch, pytest.mark.hf, pytest.mark.slow]

DENSE = {"layers_block_type": ["mamba", "attention", "mamba", "mlp"]}
"""Nemotron-H without experts."""


@pytest.mark.parametrize("name", ["llama", "mamba", "nemotron_h"])
def test_two_processes_equal_one(name: str, tmp_path: Path) -> None:
    from backends.torch_engine.transformers_models import write_model  # imports torch

    layers = DENSE if name == "nemotron_h" else {}
    model = write_model(tmp_path / "model", name, vocab_size=300, **layers)
    settings = ["backend=torch", "model.kind=huggingface", f"model.name_or_path={model}", "log.matmul_peak=false"]
    settings.append("data.document_mask=true")
    runs = Runs(tmp_path, [*settings, "train.global_batch_sequences=8", "train.micro_batch_sequences=1"])
    alone, _ = runs.train("alone", [])
    for placement in ("fsdp_size", "data_parallel_size"):
        pair, _ = runs.train(placement, [f"parallel.{placement}=2", "--nproc", "2"])
        assert [entry.batch for entry in entries(pair)] == [entry.batch for entry in entries(alone)]
        assert losses(pair) == pytest.approx(losses(alone), rel=1e-5)


def routing_bias(arrays: dict[str, np.ndarray]) -> np.ndarray:
    (found,) = (array for name, array in arrays.items() if name.endswith("e_score_correction_bias"))
    return found


def test_experts_of_nemotron_h_keep_their_routing_bias_under_fsdp(tmp_path: Path) -> None:
    """The bias is a persistent buffer: whole on every rank, in checkpoints, and restored by a resume."""
    from safetensors.numpy import load_file

    from backends.torch_engine.transformers_models import write_model  # imports torch

    layers = {"layers_block_type": ["mamba", "attention", "mamba", "moe"], "n_routed_experts": 5}
    model = write_model(tmp_path / "model", "nemotron_h", vocab_size=300, **layers)
    settings = ["backend=torch", "model.kind=huggingface", f"model.name_or_path={model}", "log.matmul_peak=false"]
    settings += ["data.document_mask=true", "train.global_batch_sequences=8", "train.micro_batch_sequences=1"]
    runs, sharded = Runs(tmp_path, settings), ["parallel.fsdp_size=2"]
    alone, _ = runs.train("alone", [])
    pair, _ = runs.train("pair", [*sharded, "--nproc", "2"])
    assert [entry.batch for entry in entries(pair)] == [entry.batch for entry in entries(alone)]
    assert losses(pair) == pytest.approx(losses(alone), rel=1e-5)
    bias = routing_bias(load_file(model / "model.safetensors"))
    assert len(bias) == 5, "two ranks divide it unequally"
    assert np.abs(bias).min() > 0.01
    mine, theirs = (stored_arrays(run / "checkpoints" / "step-00000012") for run in (pair, alone))
    assert mine.keys() == theirs.keys()
    np.testing.assert_array_equal(routing_bias(mine), bias)
    np.testing.assert_array_equal(routing_bias(theirs), bias)
    restarted = train_with_kills(runs, "torch", sharded, tmp_path / "orders", ("1-step",))
    assert entries(restarted) == entries(pair)
    assert fingerprint(restarted) == fingerprint(pair)


def test_two_processes_train_an_adapter_as_one_does(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from backends.torch_engine.transformers_models import write_model  # imports torch

    model = write_model(tmp_path / "model", "llama", vocab_size=300)
    settings = ["backend=torch", "model.kind=huggingface", f"model.name_or_path={model}", "log.matmul_peak=false"]
    settings += ["adapter.kind=dora", "train.global_batch_sequences=8", "train.micro_batch_sequences=1"]
    runs = Runs(tmp_path, settings)
    alone, _ = runs.train("alone", [])
    pair, _ = runs.train("pair", ["parallel.data_parallel_size=2", "--nproc", "2"])
    assert [entry.batch for entry in entries(pair)] == [entry.batch for entry in entries(alone)]
    assert losses(pair) == pytest.approx(losses(alone), rel=1e-5)


def test_a_killed_run_on_packed_rows_resumes_bit_for_bit(tmp_path: Path) -> None:
    from backends.torch_engine.transformers_models import write_model  # imports torch

    model = write_model(tmp_path / "model", "nemotron_h", vocab_size=300, **DENSE)
    settings = ["backend=torch", "model.kind=huggingface", f"model.name_or_path={model}", "log.matmul_peak=false"]
    settings += ["data.document_mask=true", "train.global_batch_sequences=4", "train.micro_batch_sequences=2"]
    runs = Runs(tmp_path, settings)
    straight, _ = runs.train("straight", [])
    hold = tmp_path / "hold"
    process = runs.start("killed", [], hold)
    try:
        saved = "checkpoints/step-*/MANIFEST.json"
        wait_until(lambda: process.poll() is not None or any(runs.find("killed").glob(saved)), PATIENCE_SECONDS)
        assert process.poll() is None, process.communicate()
    finally:
        process.kill()
        process.communicate()
    assert len(entries(runs.find("killed"))) < len(entries(straight)), "the run was killed before its end"
    hold.unlink()
    killed, _ = runs.train("killed", [])
    assert entries(killed) == entries(straight)
