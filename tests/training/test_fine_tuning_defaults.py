"""Defaults of runs from a transformers directory that transformers and tokenizers wrote, for each kind of training."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

import vorox.run
from vorox.cli.settings.arguments import parse_arguments
from vorox.cli.settings.config import load_with_origins, source_and_overrides
from vorox.core.config import ResolvedConfig
from vorox.experiments.tracking import read_metrics

transformers = pytest.importorskip("transformers")
pytest.importorskip("torch")

POSITIONS, WIDTH = 512, 64
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n'}}{% endfor %}"
)


def words(chooser: random.Random, count: int) -> str:
    return " ".join(chooser.choices(["alpha", "beta", "gamma", "delta", "omega", "one", "two"], k=count))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama, conversations, pairs and text."""
    import tokenizers
    import torch

    folder, chooser = tmp_path_factory.mktemp("base"), random.Random(7)
    library: Any = tokenizers
    raw = library.Tokenizer(library.models.BPE())
    raw.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = library.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    raw.train_from_iterator([words(chooser, 200)], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=special[0])
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=128, max_position_embeddings=POSITIONS, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")

    def chat(question: int, answer: int) -> dict[str, Any]:
        contents = [("user", words(chooser, question)), ("assistant", words(chooser, answer))]
        return {"messages": [{"role": role, "content": content} for role, content in contents]}

    def write(name: str, records: list[dict[str, Any]]) -> None:
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")

    write("short.jsonl", [chat(4, 8) for _ in range(300)])
    write("medium.jsonl", [chat(90, 210) for _ in range(60)])
    write("long.jsonl", [chat(100, 900) for _ in range(60)])
    pairs = [
        {"prompt": words(chooser, 4), "chosen": " one one one " + words(chooser, 2), "rejected": " two two two"}
        for _ in range(300)
    ]
    write("pairs.jsonl", pairs)
    (folder / "text.txt").write_text("\n\n".join(words(chooser, 50) for _ in range(400)), encoding="utf-8")
    return folder


def resolved(place: Path, data: str, *arguments: str) -> ResolvedConfig:
    """What ``vorox train --data FILE ...`` trains."""
    directories = [f"data.cache.directory={place / 'cache'}", f"run.directory={place / 'runs'}", "runtime.device=cpu"]
    parsed = parse_arguments(
        ["--data", str(place / data), *arguments, *directories], options=("--from-weights",), max_positional=1
    )
    return load_with_origins(*source_and_overrides(parsed, is_quiet=True), is_quiet=True)


def native(place: Path) -> list[str]:
    return [f"train.from_weights={place / 'model'}"]


def foreign(place: Path) -> list[str]:
    return ["model.kind=huggingface", f"model.name_or_path={place / 'model'}"]


KINDS = {
    "full, native": ("short.jsonl", native, [], 2e-5, "full fine-tuning"),
    "full, transformers": ("short.jsonl", foreign, [], 2e-5, "full fine-tuning"),
    "LoRA": ("short.jsonl", foreign, ["adapter.kind=lora"], 2e-4, "LoRA"),
    "LoRA by --from-weights": ("short.jsonl", native, ["adapter.kind=lora"], 2e-4, "LoRA"),
    "DPO": ("pairs.jsonl", native, [], 1e-6, "DPO"),
    "DPO, transformers": ("pairs.jsonl", foreign, [], 1e-6, "DPO"),
    "DPO with LoRA": ("pairs.jsonl", foreign, ["adapter.kind=lora"], 5e-6, "DPO with LoRA"),
    "text, native": ("text.txt", native, [], 2e-5, "continued pretraining"),
    "text, transformers": ("text.txt", foreign, [], 2e-5, "continued pretraining"),
}


@pytest.mark.parametrize(("data", "base", "settings", "lr", "name"), KINDS.values(), ids=KINDS)
def test_the_rate_is_that_of_the_kind_of_training(
    data: str, base: Any, settings: list[str], lr: float, name: str, place: Path
) -> None:
    found = resolved(place, data, *base(place), *settings)
    assert found.config.optimizer.lr == lr
    assert found.origin("optimizer.lr") == f"default for {name}"
    assert 1 <= (found.config.train.num_epochs or 0) <= 3


def test_the_same_conversations_have_the_same_defaults_in_every_format(place: Path) -> None:
    """JSON Lines, a JSON array, an indented one, Parquet and Arrow: row length, rows of a step, epochs."""
    library: Any = pytest.importorskip("datasets")

    def sizes(data: str) -> tuple[object, ...]:
        config = resolved(place, data, *native(place)).config
        return config.data.sequence_length_tokens, config.train.global_batch_sequences, config.train.num_epochs

    lines = (place / "medium.jsonl").read_text()
    records = [json.loads(line) for line in lines.splitlines()] * 2
    folder = place / "same"
    folder.mkdir()
    (folder / "a.jsonl").write_text(lines * 2)
    (folder / "a.json").write_text(json.dumps(records))
    (folder / "b.json").write_text(json.dumps(records, indent=2))
    table = library.Dataset.from_list(records)
    table.to_parquet(folder / "a.parquet")
    table.save_to_disk(folder / "arrow")
    expected = sizes("same/a.jsonl")
    assert expected[0] == 512
    found = {name: sizes(f"same/{name}") for name in ("a.json", "b.json", "a.parquet", "arrow")}
    assert found == dict.fromkeys(found, expected)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("torn.jsonl.gz", gzip.compress(b"{}\n" * 99)[:-9], "truncated"),
        ("bad.jsonl", b"{]\n" * 9, "no record"),
        ("none.jsonl", b'{"turns": []}\n' * 9, "can be read (no field 'messages'"),
    ],
    ids=["torn", "bad", "none"],
)
def test_conversations_that_cannot_be_measured_are_named(name: str, content: bytes, reason: str, place: Path) -> None:
    (place / name).write_bytes(content)
    source = {"name": "torn", "format": "jsonl", "paths": [str(place / name)], "chat_fields": ["messages"]}
    found = resolved(place, "short.jsonl", *native(place), f"data.sources={json.dumps([source])}")
    assert found.pretrained is not None
    (note,) = (note for note in found.pretrained.notes if "measured" in note)
    assert note.startswith("The conversations of torn are not measured: ")
    assert reason in note


@pytest.mark.parametrize("base", [native, foreign])
@pytest.mark.parametrize(
    ("data", "row_tokens"), [("short.jsonl", 256), ("medium.jsonl", 512), ("long.jsonl", POSITIONS)]
)
def test_rows_hold_the_conversations_within_the_positions(data: str, row_tokens: int, base: Any, place: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "model")
    chats = [json.loads(line)["messages"] for line in (place / data).read_text().splitlines()]
    longest = max(len(tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]) for chat in chats)
    config = resolved(place, data, *base(place)).config
    assert config.data.sequence_length_tokens == row_tokens
    assert row_tokens >= min(longest, POSITIONS)
    tokens = config.train.global_batch_sequences * row_tokens
    total = sum(len(tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]) for chat in chats)
    assert total / tokens > 1, "an epoch has several steps"
    assert (
        resolved(place, data, *base(place), "data.sequence_length_tokens=128").config.data.sequence_length_tokens == 128
    )


def test_conversations_that_are_cut_are_reported_before_the_run(place: Path) -> None:
    from vorox.cli.planning.dry_run import RunPreview

    config = resolved(place, "long.jsonl", *native(place)).config
    text = "\n".join(RunPreview(config, "never").lines())
    assert "60 of 60 conversations of long are longer than a row of 512 tokens and are cut" in text
    fitting = resolved(place, "medium.jsonl", *native(place)).config
    assert "are cut" not in "\n".join(RunPreview(fitting, "never").lines())


def test_the_first_screen_names_rate_schedule_and_length_with_their_places(place: Path) -> None:
    from vorox.cli.planning.dry_run import RunPreview

    found = resolved(place, "short.jsonl", *foreign(place), "adapter.kind=lora", "train.num_epochs=1")
    lines = list(RunPreview(found.config, "never", (), found.origin).lines())
    (line,) = [line for line in lines if line.startswith("training ")]
    assert "learning rate 0.0002, warm-up" in line
    assert "(default for LoRA)" in line
    assert "cosine to 10% (default)" in line
    assert "1 epoch (override train.num_epochs=1)" in line
    assert "rows of 256 tokens (fitted to the conversations)" in line


@pytest.mark.slow
@pytest.mark.parametrize(("data", "base", "settings", "lr", "name"), KINDS.values(), ids=KINDS)
def test_the_loss_falls_with_the_defaults(
    data: str, base: Any, settings: list[str], lr: float, name: str, place: Path
) -> None:
    if "adapter.kind=lora" in settings:
        pytest.importorskip("peft")
    words = [*base(place), *settings, "eval.at_start=true", f"run.name={name.replace(' ', '-')}", "log.every_steps=1"]
    words += ["data.validation.held_out_fraction=0.1"]
    outcome = vorox.run.train(resolved(place, data, *words).config, resume_from="never")
    losses = outcome.eval_losses
    assert losses[max(losses)] < losses[0]
    logged = [values["loss"] for values in read_metrics(outcome.run_directory).values() if "loss" in values]
    assert max(logged) < logged[0] * 1.1 + 0.1, "and does not jump"
