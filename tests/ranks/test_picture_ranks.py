"""Two replicas that train on pictures are one process that trains on them (tolerances: ``test_torch_ranks.py``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pictures import VISION, write_pictures
from ranks.processes import Runs, entries, lines, losses, stored_arrays

pytestmark = [pytest.mark.torch, pytest.mark.slow]

MODEL = [
    "backend=torch", "model.num_layers=2", "model.num_heads=4", "model.hidden_size=40",
    *(f"model.vision.{key}={value}" for key, value in VISION.items()),
    "data.sources.0.images_field=images", "data.sequence_length_tokens=64", "tokenizer.special_tokens=['<|image|>']",
    "train.global_batch_sequences=6", "train.micro_batch_sequences=1", "eval.prompts=[]", "log.matmul_peak=false",
]  # fmt: skip


def test_replicas_equal_one_process(tmp_path: Path) -> None:
    file = write_pictures(tmp_path / "pictures")
    runs = Runs(tmp_path, [*MODEL, f"data.sources.0.paths=[{file}]"])
    alone = runs.train("alone", [])[0]
    pair = runs.train("pair", ["parallel.data_parallel_size=2", "--nproc", "2"])[0]
    assert [entry.batch for entry in entries(pair)] == [entry.batch for entry in entries(alone)]
    assert losses(pair) == pytest.approx(losses(alone), rel=1e-5)
    for here, there in zip(lines(pair, "evaluations"), lines(alone, "evaluations"), strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-5)
    mine, theirs = (stored_arrays(path / "checkpoints" / "step-00000012") for path in (pair, alone))
    for key, array in theirs.items():
        np.testing.assert_allclose(mine[key], array, rtol=1e-3, atol=2e-5, err_msg=key)
