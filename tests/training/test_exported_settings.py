"""What a base model had is in the export of a run on it, and generation stops where an answer ends.

The oracles are transformers, which wrote the base and reads the export, and the rules of vLLM and llama.cpp.
"""

from __future__ import annotations

import importlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import base_models
import tiny_runs
import vorox
from vorox.cli import main
from vorox.data.tokenizers.loading import load

pytestmark = [pytest.mark.hf, pytest.mark.torch]
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.05}
KINDS = {
    "native": ["train.from_weights=base"],
    "transformers": ["model.kind=huggingface", "model.name_or_path=base"],
    "adapter": ["model.kind=huggingface", "model.name_or_path=base", "adapter.kind=lora"],
}


def train(directory: Path, *overrides: str) -> Path:
    tiny_runs.configuration(directory)
    file = directory / "tiny.yaml"
    settings = json.loads(file.read_text())
    settings |= {"model": {}, "tokenizer": {}, "backend": "torch"}
    chats = [[{"role": "user", "content": f"say {w}"}, {"role": "assistant", "content": w}] for w in tiny_runs.WORDS]
    (directory / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats * 4))
    source = {"name": "a", "format": "jsonl", "paths": [str(directory / "chats.jsonl")], "chat_fields": ["messages"]}
    settings["data"] |= {"sources": [source], "sequence_length_tokens": 64}
    del settings["tokenizer"]
    file.write_text(json.dumps(settings))
    short = ["train.num_steps=2", "checkpoint.every_steps=2", "eval.num_sequences=2", "log.matmul_peak=false"]
    assert main(["train", str(file), *short, "runtime.compile=false", *overrides]) == 0
    return next((directory / "runs").glob("tiny-*"))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("native", "llama3"),
        pytest.param("native", "mistral", marks=pytest.mark.slow),
        pytest.param("transformers", "qwen", marks=pytest.mark.slow),
        pytest.param("adapter", "gemma", marks=pytest.mark.slow),
    ],
)
def test_the_export_has_the_settings_of_the_base_and_the_ends_of_answers(
    kind: str, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers: Any = importlib.import_module("transformers")
    if kind == "adapter":
        pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    base = base_models.tokenizer(shape)
    ends = [9, base.eos_token_id]  # an id that only the base's list has
    base_models.write(tmp_path / "base", shape, generation={**SAMPLING, "eos_token_id": ends})
    run = train(tmp_path, *KINDS[kind])
    checkpoint = max((run / "checkpoints").iterdir())
    assert main(["export", str(run), "--to", "hf", "--output", str(tmp_path / "hf"), "--check"]) == 0
    turn_end = base.convert_tokens_to_ids(base_models.turn_end(shape))
    expected = list(dict.fromkeys([*ends, turn_end]))
    described = json.loads((tmp_path / "base" / "config.json").read_text())
    written_base = json.loads((tmp_path / "base" / "tokenizer_config.json").read_text())
    for directory in [tmp_path / "hf", *([] if kind == "adapter" else [checkpoint])]:
        generation = json.loads((directory / "generation_config.json").read_text())
        assert generation["eos_token_id"] == expected
        assert generation.items() >= SAMPLING.items()
        assert generation.get("bos_token_id") == base.bos_token_id
        assert generation.get("pad_token_id") == base.pad_token_id
        config = json.loads((directory / "config.json").read_text())
        ids = config["eos_token_id"] if isinstance(config["eos_token_id"], list) else [config["eos_token_id"]]
        assert {base.eos_token_id, turn_end} <= set(ids)
        assert [config.get(f"{name}_token_id") for name in ("bos", "pad")] == [
            described.get(f"{name}_token_id") for name in ("bos", "pad")
        ]
        written = json.loads((directory / "tokenizer_config.json").read_text())
        assert written["model_input_names"] == ["input_ids", "attention_mask"]
        kept = {key: value for key, value in written_base.items() if key not in {"tokenizer_class", "chat_template"}}
        assert written.items() >= (kept | {"model_max_length": max(kept["model_max_length"], 128)}).items()
        theirs = transformers.AutoTokenizer.from_pretrained(directory)
        assert theirs.special_tokens_map == base.special_tokens_map
        assert theirs.chat_template == base.chat_template
        for text in ("the step of a run", base.eos_token + " x"):
            assert theirs(text)["input_ids"] == base(text)["input_ids"]

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    prompt = base.apply_chat_template(
        [{"role": "user", "content": "say a"}], add_generation_prompt=True, return_tensors="pt"
    )
    for end in expected:

        def force(ids: Any, scores: Any, end: int = end) -> Any:
            del ids
            scores[:] = -1e9
            scores[:, end] = 0
            return scores

        made = model.generate(**prompt, max_new_tokens=9, do_sample=False, logits_processor=[force])
        assert made[0, prompt["input_ids"].shape[1] :].tolist() == [end]
    assert vllm_stops(tmp_path / "hf") >= set(expected)


@pytest.mark.parametrize("as_files", [False, True])
def test_named_templates_of_the_base_are_kept_beside_its_own(as_files: bool, tmp_path: Path) -> None:
    """transformers takes ``tool_use`` if there are tools; a template of the user's own has none of the base's."""
    transformers: Any = importlib.import_module("transformers")
    base = base_models.tokenizer("qwen")
    own, with_tools = base.chat_template, "{{ tools | tojson }}" + base.chat_template
    base.chat_template = {"default": own, "tool_use": with_tools}
    base.save_pretrained(tmp_path / "base")
    if not as_files:
        file = tmp_path / "base" / "tokenizer_config.json"
        for path in [*(tmp_path / "base").rglob("*.jinja")]:
            path.unlink()
        named = [{"name": name, "template": text} for name, text in base.chat_template.items()]
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": named}))
    found = load(tmp_path / "base")
    assert found.chat_template is not None
    assert found.chat_template.source == own
    for number, one in enumerate([found, pickle.loads(pickle.dumps(found)), found.with_special_tokens(["<|more|>"])]):
        one.save(tmp_path / str(number))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / str(number))
        assert theirs.chat_template == base.chat_template
        chat = [{"role": "user", "content": "hi"}]
        for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
            expected = base.apply_chat_template(chat, tools=tools, tokenize=False)
            assert theirs.apply_chat_template(chat, tools=tools, tokenize=False) == expected
        assert load(tmp_path / str(number)).files() == one.files(), "as a checkpoint is read again"
    found.with_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}").save(tmp_path / "other")
    assert isinstance(transformers.AutoTokenizer.from_pretrained(tmp_path / "other").chat_template, str)


def vllm_stops(directory: Path) -> set[int]:
    """Where vLLM stops: at the tokenizer's EOS, and at the ids of ``generation_config.json``
    (``SamplingParams.update_from_generation_config``)."""
    transformers: Any = importlib.import_module("transformers")
    ids: Any = json.loads((directory / "generation_config.json").read_text()).get("eos_token_id", [])
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    return {tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])}


@pytest.mark.slow
def test_a_chat_model_stops_everywhere_where_it_stops_in_a_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that learns to repeat a word, from nothing."""
    transformers: Any = importlib.import_module("transformers")
    monkeypatch.chdir(tmp_path)
    words = ["red", "blue", "green", "gold"]
    chats = [[{"role": "user", "content": f"say {w}"}, {"role": "assistant", "content": w}] for w in words * 200]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    small = ["train.num_steps=250", "model.dropout_fraction=0", "model.num_layers=2", "model.hidden_size=64"]
    assert main(["train", "--data", "data.jsonl", "--name", "echo", *small]) == 0
    assert main(["export", "echo", "--to", "hf", "--check", "--output", "hf"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained("hf")
    model = transformers.AutoModelForCausalLM.from_pretrained("hf")
    question = [{"role": "user", "content": "say gold"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    made = model.generate(**prompt, max_new_tokens=60, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(made) == "gold<|im_end|>"
    ours = vorox.load_model("echo")
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert ours.tokenizer.encode_as_transformers(text) == prompt["input_ids"][0].tolist()
    # The canonical lines of transformers 4 and 5.
    encoded = tokenizer("say", return_tensors="pt")
    assert set(encoded) == {"input_ids", "attention_mask"}
    model.generate(**encoded, max_new_tokens=2, do_sample=False)
