"""Two replicas that train a Qwen-VL model on pictures are one process (tolerances: ``test_torch_ranks.py``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from image_text_models import write_captions, write_image_model
from ranks.processes import Runs, entries, losses, stored_arrays

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.hf]


def test_replicas_equal_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file, model = write_captions(tmp_path / "text"), write_image_model(tmp_path / "model", "qwen2_vl")
    settings = [
        "backend=torch", "model.kind=huggingface", f"model.name_or_path={model}", f"data.sources.0.paths=[{file}]",
        "data.sources.0.images_field=images", "data.sequence_length_tokens=96", "tokenizer.kind=huggingface",
        f"tokenizer.path={model}", "train.global_batch_sequences=6", "train.micro_batch_sequences=1", "eval.prompts=[]",
        "log.matmul_peak=false",
    ]  # fmt: skip
    runs = Runs(tmp_path, settings)
    alone = runs.train("alone", [])[0]
    pair = runs.train("pair", ["parallel.data_parallel_size=2", "--nproc", "2"])[0]
    assert [entry.batch for entry in entries(pair)] == [entry.batch for entry in entries(alone)]
    assert losses(pair) == pytest.approx(losses(alone), rel=1e-5)
    mine, theirs = (stored_arrays(path / "checkpoints" / "step-00000012") for path in (pair, alone))
    for key, array in theirs.items():
        atol = 1e-3 if key.endswith("qkv.bias") else 2e-5  # softmax cancels the bias of keys: its gradient is rounding
        np.testing.assert_allclose(mine[key], array, rtol=1e-3, atol=atol, err_msg=key)
