"""Two ranks that train a Qwen-VL model on pictures are one process (tolerances: ``test_torch_ranks.py``)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from image_text_models import write_captions, write_image_model
from ranks.processes import Runs, entries, fingerprint, losses, stored_arrays, train_with_kills

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.hf]
MODEL = "qwen2_5_vl"
FROZEN = "optimizer.groups=[{match: 'model.visual.*', frozen: true}]"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Pictures, and as much text without any, so that some ranks have a micro-batch without pictures."""
    pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("pictures")
    file, model = write_captions(place / "text"), write_image_model(place / "model", MODEL)
    alone = [{"text": f"Text {number} " + "green blue " * 8, "images": []} for number in range(40)]
    file.write_text(file.read_text() + "".join(json.dumps(record) + "\n" for record in alone))
    settings = [
        "backend=torch", "model.kind=huggingface", f"model.name_or_path={model}", f"data.sources.0.paths=[{file}]",
        "data.sources.0.images_field=images", "data.sequence_length_tokens=96", "tokenizer.kind=huggingface",
        f"tokenizer.path={model}", "train.global_batch_sequences=6", "train.micro_batch_sequences=1", "eval.prompts=[]",
        "log.matmul_peak=false",
    ]  # fmt: skip
    return Runs(place, settings)


def has_pictures(run: Path) -> np.ndarray:
    """Whether each micro-batch of each step has a picture; a micro-batch is one row here."""
    from vorox import open_run

    return np.array([[len(images.rows_I) > 0 for images in batch.images_A or ()] for batch in open_run(run).batches()])


def assert_same_run(run: Path, oracle: Path) -> None:
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(oracle)]
    assert losses(run) == pytest.approx(losses(oracle), rel=1e-5)
    mine, theirs = (stored_arrays(path / "checkpoints" / "step-00000012") for path in (run, oracle))
    assert mine.keys() == theirs.keys()
    for key, array in theirs.items():
        # softmax cancels the bias of keys: its gradient is rounding
        atol = 1e-3 if key.endswith(("qkv.bias", "k_proj.bias")) else 2e-5
        np.testing.assert_allclose(mine[key], array, rtol=1e-3, atol=atol, err_msg=key)


@pytest.mark.parametrize(
    ("replicas", "shards"), [(2, 1), (1, 2), (2, 2)], ids=["replicas", "shards", "replicas of shards"]
)
@pytest.mark.parametrize("settings", [[], [FROZEN]], ids=["trained", "frozen"])
def test_ranks_equal_one_process(runs: Runs, replicas: int, shards: int, settings: Sequence[str]) -> None:
    name = "frozen" if settings else "trained"
    alone = runs.train(f"{name}-alone", settings)[0]
    sizes = [f"parallel.data_parallel_size={replicas}", f"parallel.fsdp_size={shards}"]
    words = [*settings, *sizes, "--nproc", str(replicas * shards)]
    divided = runs.train(f"{name}-{replicas}-{shards}", words)[0]
    assert_same_run(divided, alone)
    rows = has_pictures(alone)
    assert (rows[:, :3] != rows[:, 3:]).sum() > 3, "a rank has pictures while the other has none"


def test_killed_shards_resume_bit_for_bit(runs: Runs, tmp_path: Path) -> None:
    sharded = ["parallel.fsdp_size=2"]
    pair = runs.train("pair", [*sharded, "--nproc", "2"])[0]
    restarted = train_with_kills(runs, "torch", sharded, tmp_path / "orders", ("1-step",))
    assert entries(restarted) == entries(pair)
    assert fingerprint(restarted) == fingerprint(pair)


def test_replicas_train_an_adapter_on_pictures_as_one_process_does(runs: Runs) -> None:
    pytest.importorskip("peft")
    adapter = ["adapter.kind=lora"]
    alone = runs.train("adapter-alone", adapter)[0]
    pair = runs.train("adapter-pair", [*adapter, "parallel.data_parallel_size=2", "--nproc", "2"])[0]
    assert_same_run(pair, alone)
