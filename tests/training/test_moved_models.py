"""Runs whose base was moved, changed or deleted, and commands typed in another directory; beside runs left alone."""

from __future__ import annotations

import json
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import yaml

import base_models
import tiny_runs
from vorox.api.model import load_model
from vorox.cli import main
from vorox.core.errors import ConfigError
from vorox.records.replay_chain import read_chain

pytestmark = [
    pytest.mark.torch,
    pytest.mark.hf,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft calls it
]
KINDS = [
    pytest.param([], "train.from_weights", id="native"),
    pytest.param(["model.kind=huggingface"], "model.name_or_path", id="transformers"),
    pytest.param(
        ["adapter.kind=lora"], "model.name_or_path", id="lora",
        marks=pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
    ),
]  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a base written by transformers, and a configuration that names it by a relative path."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    base_models.write(home / "base", "llama3")
    tiny_runs.configuration(home)
    settings = json.loads((home / "tiny.yaml").read_text())
    del settings["model"], settings["tokenizer"]
    settings["train"] |= {"from_weights": "base", "num_steps": 8}
    settings |= {"checkpoint": {"every_steps": 4, "keep_last": 9}, "backend": "torch"}
    (home / "tiny.yaml").write_text(json.dumps(settings))
    return home


def train(*arguments: str) -> int:
    return main(["train", *arguments, "log.matmul_peak=false"])


def begin(name: str, overrides: list[str]) -> Path:
    assert train("tiny.yaml", f"run.name={name}", *overrides) == 0
    return next(Path("runs").absolute().glob(f"{name}-*"))


def chain(run: Path) -> list[str]:
    return [entry.chain for entry in read_chain(run).values()]


def state_of(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["runs", "list", "--json", "--root", str(run.parent)]) == 0
    return next(one["state"] for one in json.loads(capsys.readouterr().out) if one["run_id"] == run.name)


@pytest.mark.parametrize(("overrides", "key"), KINDS)
def test_a_run_follows_its_moved_base(
    overrides: list[str], key: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    still, moved = begin("still", overrides), begin("moved", overrides)
    (tmp_path / "other").mkdir()
    with monkeypatch.context() as patched:  # any command runs in any directory
        patched.chdir(tmp_path / "other")
        assert train("--resume", str(still), "train.num_steps=12") == 0
        for command in (["replay"], ["data", "verify"], ["generate", "-p", "the"], ["export", "--to", "hf"]):
            assert main([*command, str(still)]) == 0, capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == []

    shutil.move("base", "elsewhere")
    capsys.readouterr()
    if key == "train.from_weights" or "adapter.kind=lora" not in overrides:
        assert train("--resume", "moved", "train.num_steps=12") == 0, "checkpoints hold weights and tokenizer"
    else:
        assert train("--resume", "moved", "train.num_steps=12") == 2
        command = f"vorox train --resume {moved.name} {key}=DIRECTORY"
        assert command in capsys.readouterr().err.replace("\n", " ")
        assert state_of(moved, capsys) == "finished"
        assert train("--resume", "moved", "train.num_steps=12", f"{key}=elsewhere") == 0
    assert chain(moved) == chain(still)
    assert len(chain(moved)) == 12

    if "adapter.kind=lora" not in overrides:
        capsys.readouterr()
        assert main(["replay", "moved"]) == 2
        assert f"{key}=DIRECTORY" in capsys.readouterr().err
        assert train("--resume", "moved", f"{key}=elsewhere") == 0
    recorded = yaml.safe_load((moved / "config.yaml").read_text())
    section, _, name = key.partition(".")
    assert recorded[section][name] == str(home / "elsewhere")
    for command in (["replay"], ["data", "verify"], ["generate", "-p", "the"], ["export", "--to", "hf"]):
        assert main([*command, "moved"]) == 0, capsys.readouterr().err
    assert train("--resume", "moved", "train.num_steps=13") == 0, "a recorded move is no edit of config.yaml"
    shutil.move("elsewhere", "base")
    assert train("--resume", "still", "train.num_steps=13") == 0
    assert chain(moved) == chain(still)


def test_the_base_of_an_adapter_outlives_the_retention_of_its_run(home: Path) -> None:
    pytest.importorskip("peft")
    first = begin("first", ["train.num_steps=4", "checkpoint.keep_last=1"])
    adapter = begin("adapter", [f"train.from_weights={first}", "adapter.kind=lora"])
    assert train("--resume", "first", "train.num_steps=12") == 0
    assert {path.name for path in (first / "checkpoints").iterdir()} == {"step-00000004", "step-00000012"}
    assert main(["generate", str(adapter), "-p", "the", "--tokens", "2", "--device", "cpu"]) == 0
    assert main(["replay", str(adapter)]) == 0
    shutil.move(adapter, "elsewhere")
    assert train("--resume", "first", "train.num_steps=16") == 0
    assert (first / "checkpoints" / "step-00000004").is_dir(), "the adapter may have been moved"


@pytest.mark.parametrize(("overrides", "key"), KINDS)
def test_another_base_is_refused_by_its_content(
    overrides: list[str], key: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    import transformers

    run = begin("mine", overrides)
    before = (run / "run.json").read_bytes(), (run / "config.yaml").read_bytes()
    module = transformers.AutoModelForCausalLM.from_pretrained("base", dtype="float32")
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight[5, 7] += 1e-3
    shutil.copytree("base", "other")
    module.save_pretrained("other")
    capsys.readouterr()
    assert train("--resume", "mine", "train.num_steps=12", f"{key}=other") == 5
    message = " ".join(capsys.readouterr().err.split())
    assert "another base" in message or "Initial weights have changed" in message
    assert f"{key}=DIRECTORY" in message
    assert state_of(run, capsys) == "finished"
    assert ((run / "run.json").read_bytes(), (run / "config.yaml").read_bytes()) == before

    module.save_pretrained("base")  # the same place, other bytes
    capsys.readouterr()
    assert main(["replay", "mine"]) == 5
    message = " ".join(capsys.readouterr().err.split())
    assert "another base" in message or "Initial weights have changed" in message


def test_a_run_keeps_the_tokenizer_and_the_chat_template_that_it_started_with(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [{"messages": [{"role": "user", "content": "the run"}, {"role": "assistant", "content": f"step {n}"}]}
             for n in range(40)]  # fmt: skip
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, chats)) + "\n")
    settings = json.loads(Path("tiny.yaml").read_text())
    source = {"name": "chats", "format": "jsonl", "paths": ["chats.jsonl"], "chat_fields": ["messages"]}
    settings["data"] |= {"sources": [source], "sequence_length_tokens": 64}
    Path("tiny.yaml").write_text(json.dumps(settings))
    still, edited = begin("still", []), begin("edited", [])
    assert train("--resume", "still", "train.num_steps=12") == 0
    templates = [path for path in Path("base").iterdir() if "assistant" in path.read_bytes().decode(errors="replace")]
    assert templates, "the base has a chat template"
    for path in templates:
        path.write_text(path.read_text().replace("assistant", "asistant"))
    assert train("--resume", "edited", "train.num_steps=12") == 0, capsys.readouterr().err
    assert chain(edited) == chain(still)
    capsys.readouterr()
    assert train("--resume", "edited", "train.num_steps=13", "tokenizer.chat_template=chatml") == 2
    assert "tokenizer.chat_template: null -> chatml" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
def test_a_directory_of_peft_is_refused_with_the_command_that_merges_it(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import peft
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained("base", dtype="float32")
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained("adapter")
    with pytest.raises(ConfigError, match="Directory is an adapter of base") as caught:
        load_model("adapter")
    capsys.readouterr()
    assert train("tiny.yaml", "train.from_weights=adapter") == 2
    assert "Directory is an adapter of base" in capsys.readouterr().err
    command = shlex.split(caught.value.hint.removeprefix("merge them: ").split("; then name")[0])
    assert command[:2] == ["python", "-c"]
    exec(command[2])  # what the user types
    tokens = np.random.default_rng().integers(0, 256, (2, 15), np.int32)
    with torch.inference_mode():
        expected = model.eval()(input_ids=torch.from_numpy(tokens).long()).logits.numpy()
        base = model.get_base_model()
        with model.disable_adapter():
            untrained = base(input_ids=torch.from_numpy(tokens).long()).logits.numpy()
    assert np.abs(expected - untrained).max() > 1e-2, "the comparison would be trivial"
    np.testing.assert_allclose(load_model("adapter-merged").logits(tokens), expected, rtol=1e-4, atol=1e-4)
