"""Models that cannot be trained, through the command line: message, exit code, and nothing left behind."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import tiny_runs
from servers.hub import model_hub
from vorox.cli import main

pytestmark = [pytest.mark.torch, pytest.mark.hf]
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(directory)
    return directory


@pytest.fixture
def damaged(model: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "damaged"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def edit_config(**values: object) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


def claim_a_huge_header(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])


def leave_the_directory(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


class Bad(NamedTuple):
    damage: Callable[[Path], None]
    exit_code: int
    message: str
    words: tuple[str, ...] = ()


BAD = {
    "remote code": Bad(
        edit_config(model_type="mine", auto_map={"AutoModelForCausalLM": "modeling.Mine"}), 2, "never run"
    ),
    "a path outside": Bad(leave_the_directory, 5, "outside"),
    "a huge header": Bad(claim_a_huge_header, 5, "header"),
    "a small vocabulary": Bad(
        lambda directory: None, 2, "embedding", ("tokenizer.kind=bpe", "tokenizer.vocab_size=999")
    ),
    "a wrong column": Bad(lambda directory: None, 2, "nothing", ("data.sources.0.text_field=nothing",)),
    "an unknown task": Bad(lambda directory: None, 2, "Unknown task not_a_task", ("eval.tasks=[not_a_task]",)),
}


def words(directory: Path, *overrides: str) -> list[str]:
    tiny_runs.configuration(directory)  # writes tiny.yaml and its text
    return ["train", str(directory / "tiny.yaml"), "backend=torch", "model={kind: huggingface}", *overrides]


def assert_nothing_is_left(directory: Path) -> None:
    assert not list((directory / "runs").glob("*/checkpoints/*"))
    assert not list((directory / "runs").glob("*/metrics.jsonl"))


@pytest.mark.parametrize("name", BAD)
def test_a_bad_model_is_refused(name: str, damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = BAD[name]
    if name == "an unknown task":
        pytest.importorskip("lm_eval")
    bad.damage(damaged)
    code = main(words(tmp_path, f"model.name_or_path={damaged}", *bad.words))
    said = capsys.readouterr().err
    assert (code, bad.message in said) == (bad.exit_code, True), said
    assert_nothing_is_left(tmp_path)


@pytest.fixture
def hub_with(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with model_hub(tmp_path / "hub") as hub:
        hub.commit("owner/gated", {path.name: path.read_bytes() for path in model.iterdir()})
        hub.gated.add("owner/gated")
        yield


@pytest.mark.usefixtures("hub_with")
@pytest.mark.parametrize("setting", ["model.name_or_path=owner/", "train.from_weights=hf://owner/"])
@pytest.mark.parametrize("name", ["gated", "missing"])
def test_a_model_that_the_hub_does_not_give(
    name: str, setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = words(tmp_path, f"{setting}{name}")
    if setting.startswith("train"):
        command.remove("model={kind: huggingface}")
    assert main(command) == 4
    said = capsys.readouterr().err
    assert f"owner/{name}" in said
    assert "HF_TOKEN" in said
    assert_nothing_is_left(tmp_path)


KERNEL = "kernels-community/flash-attn"


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal",
                                 "experts_implementation", "_experts_implementation"])  # fmt: skip
def test_a_kernel_that_the_configuration_names_is_never_fetched(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a stand-in for the package that downloads kernels; the control shows that transformers would use it."""
    transformers = pytest.importorskip("transformers")
    hub_kernels = pytest.importorskip("transformers.integrations.hub_kernels")
    from transformers import modeling_utils

    from vorox.backends.torch_engine.foreign.huggingface_model import build
    from vorox.models.huggingface.spec import without_kernels

    fetched: list[object] = []

    def get_kernel(name: str, *arguments: object, **options: object) -> None:
        fetched.append((name, arguments, options))
        raise RuntimeError("fetched a kernel")

    for module in (hub_kernels, modeling_utils):
        monkeypatch.setattr(module, "is_kernels_available", lambda *_, **__: True, raising=False)
    monkeypatch.setattr(hub_kernels, "get_kernel", get_kernel, raising=False)
    build({**LLAMA, key: KERNEL})
    assert fetched == []
    values = {**LLAMA, key: KERNEL, "text_config": {key: KERNEL, "a": [{key: KERNEL}]}}
    assert KERNEL not in json.dumps(without_kernels(values))
    if key == "attn_implementation":
        with pytest.raises(Exception):  # noqa: B017 - of any version of transformers
            transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**LLAMA, attn_implementation=KERNEL))
        assert fetched, "transformers fetches it where nobody removes the key"
