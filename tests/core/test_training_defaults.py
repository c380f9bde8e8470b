"""The defaults of training: the rates of fine-tuning for trained weights, those of a width from scratch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vorox.core.config import GivenConfig, load_config, resolve_config
from vorox.core.config.config_for_text import config_for_text
from vorox.core.config.layers.pretrained import Pretrained
from vorox.core.config.layers.training_defaults import RULES

CHATS: dict[str, Any] = {"name": "chats", "format": "jsonl", "paths": ["c.jsonl"], "chat_fields": ["messages"]}
PAIRS: dict[str, Any] = {**CHATS, "chat_fields": ["prompt", "chosen", "rejected"], "preference_pairs": True}
TEXT: dict[str, Any] = {"name": "text", "format": "txt", "paths": ["t"]}
NATIVE = ["train.from_weights=weights"]
FOREIGN = ["model.kind=huggingface", "model.name_or_path=weights"]
LORA = [*FOREIGN, "adapter.kind=lora"]
BASE = Pretrained("weights", "train.from_weights=weights", 1024, 4096, False)

# Full fine-tuning 1-2e-5, LoRA 1-2e-4, DPO 5e-7 to 5e-6: the papers and recipes that docs/fine_tuning.md names.
RANGES = {
    "continued pretraining": (1e-5, 5e-5),
    "full fine-tuning": (1e-5, 2e-5),
    "LoRA": (1e-4, 2e-4),
    "DPO": (5e-7, 5e-6),
    "DPO with LoRA": (5e-7, 5e-6),
}


def sources(*entries: dict[str, Any]) -> str:
    return f"data.sources={json.dumps(entries)}"


def bases() -> list[Any]:
    """What a user may start from: nothing, shipped presets of every optimizer and schedule, and ``--data``."""
    own = config_for_text("own", dict(TEXT), text_bytes=10_000, repeated_words=900, opening="")
    return [None, "quickstart", "gpt2-124m", "llama-125m", "rtx3070", "h100", own]


@pytest.mark.parametrize("base", bases(), ids=lambda base: base.name if isinstance(base, GivenConfig) else str(base))
@pytest.mark.parametrize(
    ("settings", "entry", "name"),
    [
        (NATIVE, TEXT, "continued pretraining"),
        (FOREIGN, TEXT, "continued pretraining"),
        (NATIVE, CHATS, "full fine-tuning"),
        (FOREIGN, CHATS, "full fine-tuning"),
        (LORA, CHATS, "LoRA"),
        (LORA, TEXT, "LoRA"),
        ([*FOREIGN, "adapter.kind=qlora"], CHATS, "QLoRA"),
        ([*NATIVE, "loss.name=dpo"], PAIRS, "DPO"),
        ([*FOREIGN, "loss.name=dpo"], PAIRS, "DPO"),
        ([*LORA, "loss.name=dpo"], PAIRS, "DPO with LoRA"),
    ],
)
def test_trained_weights_never_get_the_rates_of_a_model_from_scratch(
    base: Any, settings: list[str], entry: dict[str, Any], name: str
) -> None:
    resolved = resolve_config(base, [sources(entry), "backend=torch", *settings])
    config, low, high = resolved.config, *RANGES[name.replace("QLoRA", "LoRA")]
    assert low <= config.optimizer.lr <= high
    for key in ("optimizer.lr", "schedule.warmup_fraction", "train.num_epochs", "train.global_batch_sequences"):
        assert resolved.origin(key) == f"default for {name}", key
    assert 1 <= (config.train.num_epochs or 0) <= 3
    assert config.train.num_steps is None
    assert config.train.num_tokens is None
    assert 0 < (config.schedule.warmup_fraction or 0) <= 0.2, "of an epoch: a short warm-up"
    assert config.schedule.warmup_steps is None
    assert config.schedule.name == "cosine", "not wsd, which llama-125m chose for its own length"
    assert config.optimizer.name in {"adamw", "adamw_8bit"}, "not the Muon of the quickstart"
    assert config.optimizer.weight_decay == (0.1 if name == "continued pretraining" else 0.0)
    assert config.train.global_batch_sequences == 16, "not the half million tokens of gpt2-124m"


def test_what_the_user_sets_stays(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(
        "preset: gpt2-124m\noptimizer: {lr: 3.0e-3, weight_decay: 0.3}\nschedule: {name: wsd, warmup_steps: 7}\n"
        "train: {num_steps: 90, global_batch_sequences: 24, micro_batch_sequences: 3}\n"
    )
    config = load_config(file, [sources(CHATS), *NATIVE])
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (3e-3, 0.3)
    assert (config.schedule.name, config.schedule.warmup_steps, config.schedule.warmup_fraction) == ("wsd", 7, None)
    assert (config.train.num_steps, config.train.num_epochs) == (90, None)
    assert (config.train.global_batch_sequences, config.train.micro_batch_sequences) == (24, 3)


@pytest.mark.parametrize(
    ("length", "key", "expected"),
    [
        ("train.num_steps=20", "warmup_steps", 1),  # 3% of 20, rounded up
        ("train.num_steps=1000", "warmup_steps", 30),
        ("train.num_tokens=100000000", "warmup_tokens", 3_000_000),
        ("train.num_epochs=3", "warmup_fraction", 0.09),
    ],
)
def test_the_warmup_is_a_share_of_the_run_in_the_unit_of_its_length(length: str, key: str, expected: float) -> None:
    schedule = load_config(None, [sources(CHATS), *NATIVE, length]).schedule
    given = {name: getattr(schedule, name) for name in ("warmup_steps", "warmup_tokens", "warmup_fraction")}
    assert given == {**dict.fromkeys(given), key: expected}


def test_continued_pretraining_of_a_run_stays_below_its_peak() -> None:
    base = replace(BASE, peak_lr=6e-4)
    resolved = resolve_config(None, [sources(TEXT), *NATIVE], adopt=lambda _: base)
    assert resolved.config.optimizer.lr == pytest.approx(0.3 * 6e-4)
    assert "default for continued pretraining" in resolved.origin("optimizer.lr")
    assert (resolved.config.schedule.warmup_fraction or 0) > 0, "re-warm-up"
    chats = resolve_config(None, [sources(CHATS), *NATIVE], adopt=lambda _: base)
    assert chats.config.optimizer.lr == 2e-5, "fine-tuning does not follow the peak"


def test_muon_keeps_its_ratio_to_the_rate_of_the_other_parameters() -> None:
    def muon_lr(*settings: str) -> float:
        return load_config(
            None, [sources(TEXT), "train.num_epochs=1", "optimizer.name=muon", *settings]
        ).optimizer.muon_lr

    assert muon_lr() == 0.02
    assert muon_lr(*NATIVE) == pytest.approx(0.02 * 2e-5 / 3e-3, rel=0.05)


@pytest.mark.parametrize(("width", "lr"), [(64, 3e-3), (256, 1.6e-3), (1024, 3.9e-4), (4096, 9.8e-5)])
def test_a_model_from_scratch_has_a_rate_by_its_width_without_a_preset(width: int, lr: float) -> None:
    words = [sources(TEXT), f"model.hidden_size={width}", "model.num_heads=4", "train.num_steps=400"]
    resolved = resolve_config(None, words)
    assert resolved.config.optimizer.lr == lr
    assert resolved.origin("optimizer.lr") == f"fitted to model.hidden_size={width}"
    assert resolved.config.schedule.warmup_steps == 20
    assert resolved.config.optimizer.weight_decay == 0.1
    assert resolved.config.eval.every_steps == 250
    assert load_config(None, [*words, "schedule.warmup_steps=0", "eval.every_steps=null"]).schedule.warmup_steps == 0


def test_a_preset_keeps_what_it_chose_for_a_model_from_scratch() -> None:
    config = load_config("gpt2-124m")
    assert (config.optimizer.lr, config.schedule.warmup_tokens) == (6e-4, 375_000_000)
    assert config.train.global_batch_sequences == 512


def test_a_transformers_architecture_from_scratch_has_the_rate_of_its_own_width() -> None:
    words = [sources(TEXT), *FOREIGN, "model.pretrained=false", "train.num_steps=400"]
    assert resolve_config(None, words, adopt=lambda _: BASE).config.optimizer.lr == 3.9e-4
    unknown = resolve_config(None, words)
    assert unknown.config.optimizer.lr == 6e-4, "not the 3e-3 of the default decoder's width"


def test_the_micro_batch_is_small_for_long_rows_and_divides_the_batch() -> None:
    for length, batch, micro in ((256, 16, 16), (1024, 16, 4), (4096, 16, 1), (8192, 16, 1), (1024, 6, 3)):
        words = [sources(CHATS), *NATIVE, f"data.sequence_length_tokens={length}"]
        train = load_config("rtx3070", [*words, f"train.global_batch_sequences={batch}"]).train
        assert (train.global_batch_sequences, train.micro_batch_sequences) == (batch, micro)
    sharded = load_config("h100", [sources(CHATS), *NATIVE, "parallel.fsdp_size=24"]).train
    assert sharded.global_batch_sequences == 24


def test_a_recorded_configuration_is_read_as_it_is(tmp_path: Path) -> None:
    from vorox.core.config import dump_yaml

    config = load_config(None, [sources(CHATS), *NATIVE])
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config


def test_every_rule_names_its_sources() -> None:
    assert all(rule.source for rule in RULES.values())
