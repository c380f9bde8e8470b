"""What ships as a preset or a configuration file: it loads, describes a model that exists, and says nothing idle."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tiny_runs
from vorox.core.config import config_digest, dump_yaml, load_config
from vorox.core.config.layers.presets import run_presets
from vorox.experiments.tracking import read_metrics
from vorox.models.decoder.spec import decoder_spec

ROOT = Path(__file__).parents[1]
FILES = {**run_presets(), **{f"configs/{path.name}": path for path in sorted((ROOT / "configs").glob("*.yaml"))}}


@pytest.fixture(params=FILES)
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(ROOT)
    return request.param


def test_it_loads_and_reads_back(source: str, tmp_path: Path) -> None:
    config = load_config(source)
    copy = tmp_path / "config.yaml"
    copy.write_text(dump_yaml(config), encoding="utf-8")
    assert load_config(copy) == config


def test_it_describes_a_model(source: str) -> None:
    config = load_config(source)
    if config.model.kind == "huggingface":
        return  # its config.json describes it: tests/huggingface/test_recipes.py
    spec = decoder_spec(
        config.model,
        tokenizer_vocab_size=config.tokenizer.vocab_size,
        sequence_length_tokens=config.data.sequence_length_tokens,
    )
    assert spec.num_parameters > 100_000


def test_it_explains_itself_and_how_to_run_it(source: str) -> None:
    text = FILES[source].read_text(encoding="utf-8")
    first = text.splitlines()[0]
    assert first.startswith("# ")
    assert len(first) > 20
    for line in text.splitlines():
        if line.startswith("#   vorox train "):
            named, *overrides = line.removeprefix("#   vorox train ").replace("}] ", "}]\0").split("\0")
            name, *rest = re.sub(r" --(nproc|from-weights) \S+", "", named).split(" ", 1)
            assert name == source
            load_config(name, [*_split(" ".join(rest)), *_split(" ".join(overrides))])
    assert source == "quickstart" or "#   vorox train " in text


def _split(text: str) -> list[str]:
    """Overrides that are separated by blanks outside of brackets."""
    parts: list[str] = []
    depth = 0
    for word in text.split():
        if depth:
            parts[-1] += f" {word}"
        else:
            parts.append(word)
        depth += sum(word.count(sign) for sign in "[{") - sum(word.count(sign) for sign in "]}")
    return parts


def test_the_published_character_demo_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """nanoGPT's README, `config/train_shakespeare_char.py` and the defaults of its `train.py`, by hand."""
    monkeypatch.chdir(ROOT)
    config = load_config("configs/char_demo.yaml", ["data.sources.0.paths=[anything.txt]"])
    assert config.data.sources[0].paths == ("anything.txt",)
    model = config.model
    assert (model.num_layers, model.num_heads, model.hidden_size) == (4, 4, 128)
    assert (model.positions, model.norm, model.activation) == ("learned", "layer_norm", "gelu")
    assert (model.attention_bias, model.mlp_bias, model.norm_bias) == (False, False, False)
    assert (model.dropout_fraction, model.tie_embeddings, model.init_std) == (0.0, True, 0.02)
    assert (config.data.sequence_length_tokens, config.tokenizer.kind) == (64, "char")
    assert (config.data.validation.split, config.data.validation.held_out_fraction) == ("span", 0.1)
    train = config.train
    assert (train.num_steps, train.global_batch_sequences, train.micro_batch_sequences) == (2000, 12, 12)
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.beta1, optimizer.beta2) == ("adamw", 1e-3, 0.9, 0.99)
    assert (optimizer.weight_decay, optimizer.clip_norm, optimizer.decay_embeddings) == (0.1, 1.0, True)
    schedule = config.schedule
    assert (schedule.name, schedule.warmup_steps, optimizer.lr * schedule.min_lr_fraction) == ("cosine", 100, 1e-4)
    spec = decoder_spec(model, tokenizer_vocab_size=65, sequence_length_tokens=64)
    # 12 L D^2 + (2 L + 1) norms of D + 65 tokens and 64 positions of D
    assert spec.num_parameters == 12 * 4 * 128**2 + 9 * 128 + (65 + 64) * 128


def test_presets_with_a_published_size_have_it() -> None:
    config = load_config("gpt2-124m")
    spec = decoder_spec(config.model, tokenizer_vocab_size=50257, sequence_length_tokens=1024)
    assert spec.num_parameters == 124_439_808


@pytest.mark.torch
def test_the_recipe_of_experts_trains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With overrides only, on a corpus of its own: the loss falls, and the routers use all experts."""
    monkeypatch.chdir(ROOT)
    text = tiny_runs.write_text(tmp_path / "text")
    config = load_config(
        "configs/moe_1b.yaml",
        [
            "model.num_layers=2", "model.hidden_size=32", "model.num_heads=4", "model.num_kv_heads=2",
            "model.head_dim=null", "model.intermediate_size=24", "model.num_experts=4", "model.vocab_size=null",
            "model.max_positions_tokens=null", f"data.sources=[{{name: text, format: jsonl, paths: [{text}]}}]",
            "tokenizer.kind=byte", "data.sequence_length_tokens=32", "data.validation.held_out_fraction=0.1",
            f"data.cache.directory={tmp_path}/cache", "train.num_steps=12", "train.global_batch_sequences=4",
            "train.micro_batch_sequences=2", "optimizer.lr=0.01", "schedule.warmup_steps=2", "precision.dtype=fp32",
            "runtime.device=cpu", "runtime.num_threads=1", f"run.directory={tmp_path}/runs", "log.every_steps=1",
            "log.matmul_peak=false", "eval.every_steps=6", "eval.num_sequences=4", "eval.sample_tokens=2",
        ],
    )  # fmt: skip
    outcome = tiny_runs.run(config)
    metrics = read_metrics(outcome.run_directory)
    assert metrics[12]["loss"] < metrics[1]["loss"] - 0.5
    assert 1 <= metrics[12]["router/load_max_to_mean"] < 4, "4: one expert would have all tokens"
    assert metrics[12]["router/z_loss"] > 0


def test_two_loads_give_the_same_digest(source: str) -> None:
    assert config_digest(load_config(source)) == config_digest(load_config(source))
