"""Whole runs with an adapter through the command line: kill and resume, replay, export, generate, and another base."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_runs
from vorox.api.model import load_model
from vorox.cli import main
from vorox.core.batch import Batch
from vorox.records.replay_chain import read_chain

pytestmark = [
    pytest.mark.torch,
    pytest.mark.hf,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),  # importing takes seconds
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft calls it
]
SETTINGS = [
    "backend=torch", "model.kind=huggingface", "model.name_or_path=base", "tokenizer.kind=byte",
    "log.matmul_peak=false", "eval.num_sequences=2", "train.num_steps=6", "checkpoint.every_steps=3",
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model, a corpus and ``tiny.yaml``."""
    from backends.torch_engine.transformers_models import write_model  # imports torch

    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "base", "llama", vocab_size=260)
    tiny_runs.configuration(tmp_path)
    settings = json.loads((tmp_path / "tiny.yaml").read_text())
    (tmp_path / "tiny.yaml").write_text(json.dumps(settings | {"model": {}}))
    return tmp_path


def train(name: str, *overrides: str) -> Path:
    assert main(["train", "tiny.yaml", *SETTINGS, f"run.name={name}", *overrides]) == 0
    return next(Path("runs").glob(f"{name}-*"))


def kill_at_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    from vorox.backends.torch_engine.engine import TorchEngine

    original = TorchEngine.train_step

    def train_step(self: Any, batch: Batch, **kwargs: float) -> Any:
        if batch.step + 1 == step:
            tiny_runs.kill()
        return original(self, batch, **kwargs)

    monkeypatch.setattr(TorchEngine, "train_step", train_step)


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.inference_mode():
        return model.eval()(input_ids=torch.from_numpy(tokens).long()).logits.numpy()


@pytest.mark.parametrize("kind", ["lora", "dora", "qlora"])
def test_a_run_resumes_replays_and_exports(kind: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import peft
    import transformers

    adapter = f"adapter.kind={kind}"
    whole = train("whole", adapter)
    with monkeypatch.context() as patched:
        kill_at_step(patched, 5)
        with pytest.raises(tiny_runs.Killed):
            main(["train", "tiny.yaml", *SETTINGS, "run.name=killed", adapter])
    killed = train("killed", adapter)
    chains = [[entry.chain for entry in read_chain(run).values()] for run in (whole, killed)]
    assert len(chains[0]) == 6
    assert chains[0] == chains[1]
    assert main(["replay", "killed", "--from", "2", "--to", "6"]) == 0
    assert main(["generate", "killed", "-p", "the run", "--tokens", "4", "--temperature", "0"]) == 0
    files = {path.name for path in (killed / "checkpoints" / "step-00000006").iterdir()}
    assert "config.json" not in files, "the checkpoint is no transformers model"

    assert main(["export", "killed", "--to", "peft", "--check", "--output", "adapter"]) == 0
    assert main(["export", "killed", "--to", "hf", "--check", "--output", "merged"]) == 0
    assert main(["export", "killed", "--to", "hf", "--output", "merged"]) == 0, "repeating changes nothing"
    tokens = np.random.default_rng().integers(0, 256, (2, 15), np.int32)
    ours = load_model("killed").logits(tokens)
    base = transformers.AutoModelForCausalLM.from_pretrained("base", dtype="float32")
    untrained = logits_of(base, tokens)
    loaded = logits_of(peft.PeftModel.from_pretrained(base, "adapter"), tokens)
    merged = logits_of(transformers.AutoModelForCausalLM.from_pretrained("merged", dtype="float32"), tokens)
    by_name = logits_of(peft.AutoPeftModelForCausalLM.from_pretrained("adapter"), tokens)
    if kind == "qlora":  # beside a base in 4 bits, which --check loads, but not beside this one
        assert np.abs(loaded - ours).max() > 1e-3
        loaded = by_name = merged
    assert np.abs(ours - untrained).max() > 1e-2, "the comparison would be trivial"
    for theirs in (loaded, merged, by_name):
        np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-4)


def test_another_base_is_refused_and_nothing_is_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    import transformers

    run = train("mine", "adapter.kind=lora")
    before = (run / "chain.jsonl").read_bytes()
    shutil.move("base", "first")
    module = transformers.AutoModelForCausalLM.from_pretrained("first", dtype="float32")
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight[5, 7] += 1e-3
    module.save_pretrained("base")
    capsys.readouterr()
    for command in (
        ["train", "--resume", "mine", "train.num_steps=8"],
        ["replay", "mine"],
        ["generate", "mine", "-p", "the"],
        ["export", "mine", "--to", "hf"],
    ):
        assert main(command) == 5
        assert "dapter for another base" in capsys.readouterr().err, command
    assert not list((run / "export").glob("*"))
    assert (run / "chain.jsonl").read_bytes() == before
    shutil.rmtree("base")
    shutil.move("first", "base")
    assert main(["train", "--resume", "mine", "train.num_steps=8"]) == 0


def test_exports_that_do_not_fit_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    run = train("mine", "adapter.kind=lora", "train.num_steps=3", "train.ema_decay=0.5")
    for options, words in (
        (["--to", "gguf"], "GGUF export needs a native model"),
        (["--to", "hf", "--dtype", "bf16", "--check"], "check of an adapter needs fp32"),
    ):
        capsys.readouterr()
        assert main(["export", "mine", *options]) == 2
        assert words in capsys.readouterr().err
    assert main(["export", "mine", "--to", "hf", "--dtype", "bf16", "--output", "rounded"]) == 0
    assert transformers.AutoModelForCausalLM.from_pretrained("rounded", dtype="auto").dtype.itemsize == 2
    assert main(["export", "mine", "--to", "peft", "--weights", "ema", "--check"]) == 0
    capsys.readouterr()
    assert main(["train", "tiny.yaml", "--from-weights", str(run)]) == 2
    assert "adapter without its base" in capsys.readouterr().err
    train("whole", "train.num_steps=3")
    assert main(["export", "whole", "--to", "peft"]) == 2
    assert "has no adapter" in capsys.readouterr().err
