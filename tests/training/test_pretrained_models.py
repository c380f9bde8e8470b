"""Any directory of transformers trains with ``--from-weights`` and answers every command that a run does.

The oracle is transformers itself: greedy ids and losses.
"""

from __future__ import annotations

import io
import json
import shlex
import shutil
import subprocess
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vorox
from pretrained_models import reference, write_pretrained
from tiny_runs import TEXT, write_text
from vorox.api.model import Model
from vorox.cli import main

pytestmark = [pytest.mark.torch, pytest.mark.hf, pytest.mark.filterwarnings("default")]
NATIVE, FOREIGN = ("llama", "gpt2"), ("gemma2", "mamba2")


@pytest.fixture(scope="module")
def place_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directories, written before a test captures output: libraries keep the stream of their import."""
    root = tmp_path_factory.mktemp("models")
    for model_type in (*NATIVE, *FOREIGN):
        write_pretrained(root / model_type, model_type)
    model, tokenizer = reference(root / "llama")
    ids = tokenizer("the", return_tensors="pt", add_special_tokens=False).input_ids
    model.generate(ids, do_sample=False, max_new_tokens=1, pad_token_id=1)  # imports what transformers imports late
    return lambda model_type: root / model_type


def settings(tmp_path: Path, **sections: Any) -> Path:
    """A configuration without a word on the model or the tokenizer."""
    source = {"name": "text", "format": "jsonl", "paths": [str(write_text(tmp_path / "text"))]}
    file = tmp_path / "mine.yaml"
    values = {
        "data": {
            "sources": [source], "sequence_length_tokens": 32, "cache": {"directory": str(tmp_path / "cache")},
            "validation": {"held_out_fraction": 0.1}, "document_mask": False,
        },
        "train": {"num_steps": 1, "global_batch_sequences": 2, "micro_batch_sequences": 2},
        "optimizer": {"lr": 1e-4}, "eval": {"num_sequences": 4, "at_start": True, "prompts": []},
        "runtime": {"device": "cpu", "num_threads": 1}, "run": {"directory": str(tmp_path / "runs")},
        **sections,
    }  # fmt: skip
    file.write_text(json.dumps(values), encoding="utf-8")
    return file


def theirs_loss(model: Any, batches: list[Any]) -> float:
    """Mean cross entropy of transformers over the targets of some batches, in fp64."""
    import torch

    total, count = 0.0, 0
    for batch in batches:
        with torch.inference_mode():
            logits = model(input_ids=torch.from_numpy(batch.tokens_ABT.reshape(-1, batch.tokens_ABT.shape[-1])).long())
        labels = torch.from_numpy(batch.labels_ABT.reshape(-1, batch.labels_ABT.shape[-1])).long()
        loss = torch.nn.functional.cross_entropy(
            logits.logits.double().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        total, count = total + float(loss), count + int((labels != -100).sum())
    return total / count


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*NATIVE, *FOREIGN])
def test_a_directory_trains_from_its_weights_with_the_engine_that_computes_it(
    model_type: str, place_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = place_of(model_type)
    assert main(["train", str(settings(tmp_path)), "--from-weights", str(place)]) == 0
    notes = capsys.readouterr().err
    (directory,) = (tmp_path / "runs").iterdir()
    with vorox.open_run(directory) as run:
        assert run.config.model.kind == ("decoder" if model_type in NATIVE else "huggingface")
        assert ("model.kind=huggingface" in notes) == (model_type in FOREIGN)
        assert (run.config.tokenizer.kind, run.config.tokenizer.path) == ("huggingface", str(place))
        batches = list(run.validation_batches())
        first = json.loads((directory / "evaluations.jsonl").read_text().splitlines()[0])
    model, _ = reference(place)
    assert first["loss"] == pytest.approx(theirs_loss(model, batches), abs=2e-5)


@pytest.mark.parametrize("model_type", [*NATIVE, *FOREIGN])
def test_a_directory_generates_and_scores_as_transformers_does(
    model_type: str, place_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    place = place_of(model_type)
    model, tokenizer = reference(place)
    prompt = TEXT[:40]
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    completed = model.generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=1)[0, ids.shape[1] :]
    ours = vorox.load_model(place, device="cpu")
    assert isinstance(ours, Model)
    assert ours.generate(prompt, num_tokens=12, temperature=0) == tokenizer.decode(completed, skip_special_tokens=True)
    assert main(
        ["generate", str(place), "-p", prompt, "--tokens", "12", "--temperature", "0", "--device", "cpu", "--json"]
    ) == 0  # fmt: skip
    said = json.loads(capsys.readouterr().out)
    assert said["completions"][0]["completion"] == tokenizer.decode(completed, skip_special_tokens=True)
    row = ids.numpy().astype(np.int32)
    theirs = model(input_ids=ids).logits.detach().numpy()
    assert np.abs(ours.logits(row) - theirs).max() < 1e-4
    with pytest.raises(vorox.VoroxError, match="no steps"):
        vorox.load_model(place, step=3)


def test_completions_have_the_repetition_penalty_of_the_directory(
    place_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of ``generation_config.json``, as chat models of Qwen have it: it changes greedy completions too."""
    plain, place = place_of("llama"), tmp_path / "penalised"
    shutil.copytree(plain, place)
    options = json.loads((place / "generation_config.json").read_text())
    (place / "generation_config.json").write_text(json.dumps({**options, "repetition_penalty": 1.4}))
    model, tokenizer = reference(place)
    prompt = TEXT[:40]
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    completed = model.generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=1)[0, ids.shape[1] :]
    expected = tokenizer.decode(completed, skip_special_tokens=True)
    found = [vorox.load_model(path, device="cpu") for path in (place, plain)]
    completions = [one.generate(prompt, num_tokens=12, temperature=0) for one in found]  # pyright: ignore
    assert completions[0] == expected != completions[1]


def test_chat_and_serve_take_a_directory(
    place_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import urllib.request

    from model_server import NAME, TOKEN, model_server

    place = place_of("llama")
    words = ["--tokens", "5", "--temperature", "0", "--device", "cpu"]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{TEXT[:30]}\n"))
    assert main(["chat", str(place), *words]) == 0
    said = capsys.readouterr()
    assert "Pretrained weights" in said.err
    expected = vorox.load_model(place, device="cpu").generate(TEXT[:30], num_tokens=5, temperature=0)
    assert said.out.rstrip("\n") == expected.rstrip("\n")
    with model_server(place) as url:
        body = {"model": NAME, "prompt": TEXT[:30], "max_tokens": 5, "temperature": 0}
        request = urllib.request.Request(
            f"{url}/completions", json.dumps(body).encode(),
            {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request) as answer:
            assert json.loads(answer.read())["choices"][0]["text"] == expected


@pytest.mark.parametrize("model_type", NATIVE)
def test_a_directory_is_exported_and_the_export_is_a_model_again(
    model_type: str, place_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = place_of(model_type)
    assert main(["export", str(place), "--to", "hf", "--dtype", "bf16", "--output", str(tmp_path / "bf16")]) == 0
    assert main(["export", str(place), "--to", "hf", "--output", str(tmp_path / "fp32"), "--check"]) == 0
    capsys.readouterr()
    row = np.arange(20, dtype=np.int32) + 5
    model, _ = reference(tmp_path / "fp32")
    import torch

    theirs = model(input_ids=torch.from_numpy(row[None]).long()).logits[0].detach().numpy()
    for name in (place, tmp_path / "fp32"):
        assert np.abs(vorox.load_model(name, device="cpu").logits(row) - theirs).max() < 1e-4, name
    rounded = vorox.load_model(tmp_path / "bf16", device="cpu").logits(row)
    assert 1e-4 < np.abs(rounded - theirs).max() < 0.2, "weights are rounded to bf16"
    assert main(["export", str(place), "--to", "hf"]) == 2
    assert "--output" in capsys.readouterr().err
    edited = tmp_path / "fp32" / "generation_config.json"
    edited.write_text(json.dumps({**json.loads(edited.read_text()), "temperature": 0.5}))
    with pytest.raises(vorox.VoroxError, match="the manifest has") as caught:
        vorox.load_model(tmp_path / "fp32", device="cpu")
    subprocess.run(shlex.split(caught.value.hint.split("`")[1]), check=True)
    assert np.abs(vorox.load_model(tmp_path / "fp32", device="cpu").logits(row) - theirs).max() < 1e-4


def test_a_directory_is_exported_for_llama_cpp(place_of: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    target = tmp_path / "gguf"
    assert main(["export", str(place_of("llama")), "--to", "gguf", "--output", str(target), "--check"]) == 0
    assert (target / "model.gguf").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_an_adapter_trains_from_a_directory_and_from_a_run(
    model_type: str, place_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error asked to export a native model; now LoRA starts from whatever --from-weights names."""
    place, file = place_of(model_type), str(settings(tmp_path))
    lora = ["adapter.kind=lora", "adapter.rank=2"]
    assert main(["train", file, "--name", "lora", "--from-weights", str(place), *lora]) == 0
    assert "adapter.kind=lora" in capsys.readouterr().err
    assert main(["train", file, "--name", "full", "--from-weights", str(place)]) == 0
    full, adapter = (next((tmp_path / "runs").glob(f"{name}-*")) for name in ("full", "lora"))
    assert main(["train", file, "--name", "second", "--from-weights", str(full), *lora]) == 0
    with vorox.open_run(next((tmp_path / "runs").glob("second-*"))) as run:
        assert run.config.model.name_or_path == str(full / "checkpoints" / "step-00000001")
        batches = list(run.validation_batches())
        first = json.loads((run.directory / "evaluations.jsonl").read_text().splitlines()[0])
    model, _ = reference(full / "checkpoints" / "step-00000001")
    assert first["loss"] == pytest.approx(theirs_loss(model, batches), abs=2e-5)
    capsys.readouterr()
    assert main(["train", file, "--from-weights", str(adapter)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--to hf --output merged; then name merged" in said, "also true of a teacher"
    command = ["export", str(adapter), "--to", "hf", "--output", str(tmp_path / "merged")]
    assert main(command) == 0
    assert main(["train", file, "--name", "third", "--from-weights", str(tmp_path / "merged"), *lora]) == 0


@pytest.mark.slow
def test_base_and_fine_tuned_model_are_evaluated_by_the_same_command(
    place_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base is evaluated as lm-evaluation-harness evaluates it; nothing is recorded for it."""
    harness = pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    loader, manager = import_module("lm_eval.models.huggingface"), import_module("lm_eval.tasks").TaskManager
    from training.test_task_evaluation import TASKS, write_tasks

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    tasks, place = write_tasks(tmp_path / "tasks"), place_of("gemma2")
    words = ["--tasks", ",".join(TASKS), "--task-path", str(tasks), "--device", "cpu", "--json"]
    assert main(["eval", str(place), *words]) == 0
    base = json.loads(capsys.readouterr().out)
    assert (base["run"], base["model"], base["file"], base["checkpoint_sha256"]) == (None, str(place), None, None)
    manager = manager(include_path=str(tasks), include_defaults=False)
    model = loader.HFLM(pretrained=str(place), device="cpu", batch_size=3, max_length=64)
    expected: Any = harness.simple_evaluate(
        model=model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, log_samples=False
    )
    for name in TASKS:
        for key, value in expected["results"][name].items():
            if "," in key and "stderr" not in key:
                found = base["tasks"][name]["metrics"][key.partition(",")[0]]
                assert found == pytest.approx(value, rel=1e-5, abs=1e-6), key
    assert main(["train", str(settings(tmp_path)), "--from-weights", str(place), "optimizer.lr=0.05"]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    capsys.readouterr()
    assert main(["eval", str(run), *words]) == 0
    tuned = json.loads(capsys.readouterr().out)
    assert tuned["run"] == run.name
    assert tuned["tasks"].keys() == base["tasks"].keys()
    assert tuned["tasks"] != base["tasks"]
