"""Linear layers in 8-bit floats on two processes: FSDP2 trains as one process.

The scales of inputs are those of a micro-batch of one row, so both layouts round the same numbers: the first losses
agree to 1e-6. An input whose last bit differs may round to the next 8-bit number, an eighth away; a loss after that
differs by a few 1e-4.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ranks.processes import Runs, entries, fingerprint, losses, train_with_kills

pytestmark = [pytest.mark.torch, pytest.mark.slow]
FLOAT8 = ["precision.float8=tensorwise", "precision.float8_emulate=true"]
MODEL = [
    "backend=torch", "model.num_layers=2", "model.num_heads=4", "model.hidden_size=48", "log.matmul_peak=false",
    "train.global_batch_sequences=8", "train.micro_batch_sequences=1",
]  # fmt: skip


def assert_agree(found: list[float], expected: list[float]) -> None:
    differences = np.abs(np.array(found) / np.array(expected) - 1)
    assert differences[: len(expected) // 3].max() < 1e-6, differences
    assert differences.max() < 1e-3, differences


def test_sharded_ranks_train_as_one_process_and_resume(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    runs, sharded = Runs(tmp_path, MODEL), [*FLOAT8, "parallel.fsdp_size=2"]
    alone, _ = runs.train("alone", FLOAT8)
    pair, _ = runs.train("pair", [*sharded, "--nproc", "2"])
    assert [entry.batch for entry in entries(pair)] == [entry.batch for entry in entries(alone)]
    assert_agree(losses(pair), losses(alone))
    assert losses(pair) != pytest.approx(losses(runs.train("plain", [])[0]), rel=1e-4), "rounding matters"
    restarted = train_with_kills(runs, "torch", sharded, tmp_path / "orders", ("1-step",))
    assert entries(restarted) == entries(pair)
    assert fingerprint(restarted) == fingerprint(pair)


@pytest.mark.hf
def test_sharded_models_of_transformers_train_as_one_process(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from backends.torch_engine.transformers_models import write_model  # imports torch

    model = write_model(tmp_path / "model", "llama", vocab_size=300)
    settings = ["backend=torch", "model.kind=huggingface", f"model.name_or_path={model}", *MODEL[4:], *FLOAT8]
    runs = Runs(tmp_path, settings)
    alone, _ = runs.train("alone", [])
    pair, _ = runs.train("pair", ["parallel.fsdp_size=2", "--nproc", "2"])
    assert_agree(losses(pair), losses(alone))
