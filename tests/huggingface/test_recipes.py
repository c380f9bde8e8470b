"""The shipped recipes on tiny random weights of the same architecture, with overrides only: plan, dry run, training."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from servers import hub_server
from training_device import DEVICE
from vorox.cli import main
from vorox.core.run_layout import step_directories

pytestmark = [pytest.mark.hf, pytest.mark.torch]
ROOT = Path(__file__).parents[2]
RECIPES = {
    "nemotron3_8b_base": "nemotron", "production_multi_gpu": "nemotron_h", "prototype_rtx4090": "nemotron_h",
}  # fmt: skip
LENGTH = 32
WORDS = ("the", "small", "model", "reads", "every", "document", "once", "and", "writes", "what", "it", "saw")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like that of a user: the recipes, and a corpus in four formats."""
    import pyarrow
    import pyarrow.parquet

    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for kind in ("txt", "jsonl", "parquet", "csv"):
        (tmp_path / "corpus" / kind).mkdir(parents=True)
    texts = [" ".join(WORDS[(index * 7 + k) % len(WORDS)] for k in range(60)) for index in range(40)]
    for index, text in enumerate(texts[:10]):
        (tmp_path / "corpus/txt" / f"{index}.txt").write_text(text)
    (tmp_path / "corpus/jsonl/a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[10:20]))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts[20:30]}), tmp_path / "corpus/parquet/a.parquet")
    with (tmp_path / "corpus/csv/a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts[30:])])
    return tmp_path


def tiny(folder: Path, recipe: str) -> list[str]:
    """Write a tiny model of the recipe's architecture with a tokenizer, and return the overrides that name it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from backends.torch_engine.transformers_models import write_model

    layers = {"hybrid_override_pattern": "M-*-"} if RECIPES[recipe] == "nemotron_h" else {}  # as the 8B: no experts
    directory = write_model(folder / "model", RECIPES[recipe], vocab_size=300, **layers)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=["<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)
    return [
        f"model.name_or_path={directory}", "data.sources.0.preset=null", "data.sources.0.format=jsonl",
        "data.sources.0.paths=[corpus/jsonl/]", f"data.sequence_length_tokens={LENGTH}",
    ]  # fmt: skip


SMALL_RUN = [
    "train.num_tokens=null", "train.num_steps=4", "train.global_batch_sequences=4", "train.micro_batch_sequences=1",
    "precision.dtype=fp32", f"runtime.device={DEVICE}", "checkpoint.every_steps=2", "checkpoint.every_seconds=null",
    "data.validation.held_out_fraction=0.2", "eval.every_steps=2", "eval.num_sequences=4", "eval.sample_tokens=4",
    "log.matmul_peak=false",
]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_dry_run_of_every_recipe(recipe: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*tiny(folder, recipe), *SMALL_RUN, "parallel.fsdp_size=1"]
    assert main(["train", f"configs/{recipe}.yaml", "--dry-run", *overrides]) == 0
    text = capsys.readouterr().out
    for name in ("general", "books", "articles", "papers", "records"):
        assert name in text
    assert not (folder / "runs").exists()


CARD = b"""---
configs:
- config_name: sample-10BT
  data_files: sample/10BT/*
---
"""


ZERO_3 = "parallel.deepspeed_config=configs/ds_config_production.json"
ZERO = ["parallel.kind=deepspeed", "parallel.fsdp_size=1", ZERO_3]
"""As the recipe says, with the file of the repository: ZeRO-3."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", [["parallel.fsdp_size=2"], ZERO], ids=["FSDP2", "DeepSpeed"])
def test_nemotron_h_trains_on_two_processes_from_the_recipe(folder: Path, layout: list[str]) -> None:
    """Four corpora in four formats and a dataset of a hub, validated by source, with TensorBoard."""
    if layout is ZERO and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    overrides = [*tiny(folder, "production_multi_gpu")[:1], f"data.sequence_length_tokens={LENGTH}", *SMALL_RUN]
    arguments = ["train", "configs/production_multi_gpu.yaml", "--nproc", "2", *layout, *overrides]
    with hub_server() as hub:
        parquet = (folder / "corpus/parquet/a.parquet").read_bytes()
        hub.commit("HuggingFaceFW/fineweb-edu", {"README.md": CARD, "sample/10BT/000.parquet": parquet})
        done = subprocess.run(
            [sys.executable, "-m", "vorox", *arguments], env=os.environ | hub.environment(), text=True,
            capture_output=True, timeout=600,
        )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    [run] = [path for path in (folder / "runs").iterdir() if (path / "checkpoints").is_dir()]
    assert sorted(step_directories(run)) == [2, 4]
    last = json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])
    assert {"general", "books", "articles", "papers", "records"} <= set(json.dumps(last).replace('"', "/").split("/"))
    assert list((run / "tensorboard").rglob("events.*"))
