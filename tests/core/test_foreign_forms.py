"""Configurations in the forms of other trainers: Python files, data.source and data.settings, dotted GPT options."""

from __future__ import annotations

from pathlib import Path

import pytest

from vorox.cli.training.run_choice import _default_preset
from vorox.core import redaction
from vorox.core.config import dump_yaml, load_config, resolve_config
from vorox.core.config.layers.synonyms import key_of
from vorox.core.config.schema_fields import synonyms
from vorox.core.errors import ConfigError
from vorox.core.redaction import redact
from vorox.planning.time_limit import parse_minutes

PASSWORD = "correcthorse9"
STREAMING = f"""
data:
  settings:
    prefetch_size: 1000
    cache_dsn: "postgresql://user:{PASSWORD}@host:port/db"
    shuffle_buffer: true
  source:
    name: "dolma" # or other supported datasets
    urls:
      - "s3://bucket/train_part1.txt"
      - "s3://bucket/train_part2.txt"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(redaction, "_held", {})


def file(name: str, text: str) -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def refusal(source: str, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return caught.value


# data.settings and data.source


def test_the_streaming_form_loads_as_it_is() -> None:
    config = load_config(file("s.yaml", STREAMING))
    source = config.data.sources[0]
    assert (source.name, source.format) == ("dolma", "txt")
    assert source.paths == ("s3://bucket/train_part1.txt", "s3://bucket/train_part2.txt")
    assert config.data.shuffle
    assert config.data.loader.prefetch_batches * config.train.global_batch_sequences >= 1000
    assert config.log.metadata == "postgres"
    assert config.train.num_epochs == 1.0


def test_the_password_is_used_and_written_nowhere() -> None:
    resolved = resolve_config(file("s.yaml", STREAMING), [f"data.settings.cache_dsn=postgres://u:{PASSWORD}@h/d"])
    assert redaction.held_secret("VOROX_METADATA_DSN") == f"postgres://u:{PASSWORD}@h/d"
    assert PASSWORD not in dump_yaml(resolved.config, resolved)
    assert PASSWORD not in repr(resolved)
    assert PASSWORD not in redact(f"FATAL: no entry for user u, {PASSWORD!r}")
    for wrong in (f"mysql://u:{PASSWORD}@h/d", f"[{PASSWORD}]"):
        assert PASSWORD not in str(refusal("s.yaml", f"data.settings.cache_dsn={wrong}"))


def test_what_the_streaming_form_does_not_have_is_refused() -> None:
    assert "data.settings.prefetch" in str(refusal(file("s.yaml", STREAMING), "data.settings.prefetch=3"))
    assert "not a named source" in str(refusal(file("n.yaml", "data: {source: {name: nonsense}}\n")))
    assert load_config(file("c.yaml", "data: {source: {name: c4}}\n")).data.sources[0].format == "jsonl"
    both = "data:\n  source: {name: c4}\n  sources: [{name: c, preset: c4}]\n"
    assert "keep one" in str(refusal(file("b.yaml", both)))
    assert "data.settings.prefetch_size" in str(refusal("s.yaml", "data.settings.prefetch_size=many"))


# Python files

PLAIN = '{"data": {"sources": [{"name": "t", "format": "txt", "paths": (Path("a.txt"),)}]}, "train": {"num_steps": 5}}'


@pytest.mark.parametrize(
    "form", ["config = {}", "def config():\n    return {}", "config: dict = {}", "config = dict(**{})"]
)
def test_a_python_file_is_a_configuration(form: str) -> None:
    name = file("mine.py", "from pathlib import Path\n" + form.replace("{}", PLAIN))
    config = load_config(name, ["train.global_batch_sequences=32"])
    assert config.data.sources[0].paths == ("a.txt",)
    assert config.train.num_steps == 5
    assert config.run.name == "mine-llama-6x384"


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("x = 1\nconfig = {'a': 1 / 0}\n", "bad.py:2", "ZeroDivisionError"),
        (
            "def config():\n    return {\n        'train': {\n            'num_stepz': 3}}\n",
            "bad.py:4",
            "train.num_steps",
        ),
        ("config = {\n", "bad.py:1", "SyntaxError"),
        ("import nonsense_module\n", "bad.py:1", "nonsense_module"),
        ("x = 3\n", "bad.py", "config = "),
        ("config = 3\n", "bad.py", "type int"),
        ("config = {'train': {'num_steps': object()}}\n", "bad.py:1", "train.num_steps is of type object"),
        ("raise SystemExit(3)\n", "bad.py:1", "SystemExit"),
    ],
)
def test_errors_of_a_python_file_have_their_line(text: str, place: str, what: str) -> None:
    error = refusal(file("bad.py", text))
    said = f"{error} {error.where} {error.hint}"
    assert place in said
    assert what in said


# Options of a GPT trainer


def test_gpt_options_without_a_configuration_start_from_that_trainer() -> None:
    options = ["--model.n_layer=12", "--batch_size=512", "--num_tokens=1000000000", "--save_dir=./checkpoints"]
    assert _default_preset([*options, "--data_dir=shards"]) == "gpt2-shards"
    assert _default_preset(["--lr=1e-3", "--steps=5"]) == "quickstart"
    config = load_config("gpt2-shards", ["--data_dir=shards", *options])
    model, train = config.model, config.train
    assert (model.family, model.num_layers, model.num_heads, model.hidden_size) == ("gpt2", 12, 12, 768)
    assert (model.vocab_size, model.dropout_fraction, model.intermediate_size) == (50304, 0.0, None)
    assert (train.global_batch_sequences, train.micro_batch_sequences) == (512, 16)
    assert (config.data.sequence_length_tokens, train.num_tokens) == (1024, 10**9)
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.weight_decay) == ("adamw", 6e-4, 0.1)
    assert (config.run.directory, config.data.sources[0].paths) == ("./checkpoints", ("shards",))
    assert config.data.sources[0].format == "bin"


def test_every_second_name_means_a_key_that_exists() -> None:
    from vorox.core.config.schema_fields import find_field

    assert [name for name in synonyms() if find_field(key_of(name)) is None] == []


def test_a_smaller_batch_lowers_the_rows_of_a_pass() -> None:
    assert load_config("quickstart", ["batch_size=2"]).train.micro_batch_sequences == 2
    assert load_config("quickstart", ["batch_size=32"]).train.micro_batch_sequences == 8
    assert "micro_batch_sequences" in str(refusal("quickstart", "batch_size=4", "micro_batch_size=8"))


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("2", 2.0), ("0.5", 0.5), ("2m", 2.0), ("90s", 1.5), ("1h30m", 90.0), ("2 min", 2.0), ("1e1", 10.0)],
)
def test_times_are_read_with_and_without_units(text: str, minutes: float) -> None:
    assert parse_minutes(text) == pytest.approx(minutes)


@pytest.mark.parametrize("text", ["abc", "2x", "", "m", "2m3", "1h foo"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--minutes"):
        parse_minutes(text)


# model_config and training_config of a packed-cache trainer in Python

OBJECTS = """
model_config.hidden_size = 1536        # Model dimension
model_config.num_layers = 24           # Transformer layers
model_config.num_heads = 24            # Attention heads
training_config.batch_size = 12        # Per-device batch size
training_config.gradient_accumulation_steps = 4  # Effective batch = 48
training_config.learning_rate = 3e-4   # Peak learning rate
training_config.target_epochs = 5      # Training epochs
training_config.use_packed_cache = True     # Use compressed cache
training_config.epoch_dataset_fraction = 0.8  # Use 80% per epoch
training_config.sequence_length = 512       # Token sequence length
training_config.use_mixed_precision = True  # FP16 training
training_config.use_torch_compile = True    # Torch compilation
training_config.use_flash_attention = True  # Flash attention
"""
OWN_OBJECTS = (
    "from types import SimpleNamespace\nmodel_config, training_config = SimpleNamespace(), SimpleNamespace()\n"
)
OWN_CLASSES = """
from dataclasses import dataclass
@dataclass
class ModelConfig:
    hidden_size: int = 8
    def width(self): return self.hidden_size
class TrainingConfig:
    batch_size = 1
    _private = object()
model_config, training_config = ModelConfig(), TrainingConfig
"""


@pytest.mark.parametrize("before", ["", OWN_OBJECTS, OWN_CLASSES], ids=["given", "own objects", "own classes"])
def test_attributes_of_two_objects_are_a_configuration(before: str) -> None:
    resolved = resolve_config(file("config.py", before + OBJECTS))
    config = resolved.config
    assert (config.model.hidden_size, config.model.num_layers, config.model.num_heads) == (1536, 24, 24)
    assert (config.train.micro_batch_sequences, config.train.global_batch_sequences) == (12, 48)
    assert (config.optimizer.lr, config.train.num_epochs, config.train.epoch_dataset_fraction) == (3e-4, 5, 0.8)
    assert (config.data.sequence_length_tokens, config.data.mode) == (512, "cached")
    assert (config.precision.dtype, config.runtime.compile, config.model.attention_kernel) == ("fp16", True, "sdpa")
    assert config.schedule.warmup_fraction == 0.025
    assert config.data.sources[0].paths == ("hf://HuggingFaceFW/fineweb-edu",)
    line = OBJECTS[: OBJECTS.index("training_config.learning_rate")].count("\n") + before.count("\n") + 1
    assert resolved.origin("optimizer.lr") == f"config.py:{line}"
    over = load_config("config.py", ["train.micro_batch_sequences=6", "train.global_batch_sequences=24"])
    assert (over.train.micro_batch_sequences, over.train.global_batch_sequences) == (6, 24), "later layers win"


def test_the_batch_size_of_training_config_is_that_of_a_device() -> None:
    alone = load_config(file("config.py", "training_config.batch_size = 3\ntraining_config.num_epochs = 1\n"))
    assert (alone.train.micro_batch_sequences, alone.train.global_batch_sequences) == (3, 3)
    assert key_of("training_config.batch_size") == "train.micro_batch_sequences"
    yaml = "preset: quickstart\ntraining_config: {batch_size: 4, gradient_accumulation_steps: 3}\n"
    train = load_config(file("a.yaml", yaml)).train
    assert (train.micro_batch_sequences, train.global_batch_sequences) == (4, 12)
    words = ["training_config.batch_size=2", "training_config.gradient_accumulation_steps=5"]
    train = load_config("quickstart", words).train
    assert (train.micro_batch_sequences, train.global_batch_sequences) == (2, 10)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("training_config.batch_size = 0\n", "training_config.batch_size must be an integer, at least 1"),
        ("training_config.use_torch_compile = 1\n", "training_config.use_torch_compile must be true or false"),
        ("training_config.momentum = 1\n", "Unknown key training_config.momentum"),
        ("model_config.hiden_size = 8\n", "did you mean model.hidden_size?"),
        ("config = {}\ntraining_config.batch_size = 1\n", "keep one of them"),
        ("pass\n", "it is not defined"),
    ],
)
def test_attributes_that_mean_nothing_are_refused(text: str, found: str) -> None:
    assert found in str(refusal(file("config.py", text)))


def test_an_object_beside_a_mapping_is_the_file_s_own() -> None:
    text = "training_config = {'num_steps': 7}\nconfig = {'preset': 'quickstart', 'train': training_config}\n"
    assert load_config(file("config.py", text)).train.num_steps == 7


# Names of other trainers in files


@pytest.mark.parametrize("name", [name for name in synonyms() if name != "data_dir"])
def test_a_synonym_works_at_the_top_of_a_file_and_in_its_section(name: str) -> None:
    key = synonyms()[name]
    section = key.partition(".")[0]
    assert key_of(f"{section}.{name}") == key
    for text in (f"{name}: nonsense\n", f"{section}:\n  {name}: nonsense\n"):
        config_file = file("a.yaml", f"preset: quickstart\n{text}")
        if key in {"run.directory", "train.from_weights"}:
            assert resolve_config(config_file).tree.get(key) == "nonsense"
        else:
            assert key in str(refusal(config_file)), "translated before the value is checked"


def test_values_of_synonyms_in_sections_are_those_of_the_settings() -> None:
    text = (
        "preset: quickstart\ntrain: {max_steps: 9, batch_size: 4}\noptimizer: {learning_rate: 0.5, max_grad_norm: 2}\n"
    )
    config = load_config(file("a.yaml", text))
    assert (config.train.num_steps, config.train.global_batch_sequences) == (9, 4)
    assert (config.optimizer.lr, config.optimizer.clip_norm) == (0.5, 2)
    assert load_config("quickstart", ["optimizer.learning_rate=0.25"]).optimizer.lr == 0.25


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("extends: base.yaml", "write preset: NAME or preset: FILE.yaml"),
        ("defaults: [base]", "write preset: NAME or preset: FILE.yaml"),
        ("log: {sinks: [wandb]}", "write log.wandb=true"),
        ("log: {sinks: [TensorBoard]}", "write log.tensorboard=true"),
        ("report_to: wandb", "log.wandb=true"),
        ("lora: true", "write adapter.kind=lora"),
        ("bf16: true", "write precision.dtype=bf16"),
        ("gradient_accumulation_steps: 4", "write train.global_batch_sequences="),
        ("warmup_ratio: 0.1", "write schedule.warmup_steps=STEPS (the ratio times the steps of the run)"),
        ("neftune_noise_alpha: 5", "write train.embedding_noise=5.0"),
        ("load_best_model_at_end: true", "write checkpoint.keep_best=1"),
        ("lr_scheduler_type: cosine", "write schedule.name=cosine"),
        ("schedule: {warmup_ratio: 0.1}", "did you mean schedule.warmup_steps?"),
    ],
)
def test_names_of_other_trainers_are_answered_with_the_setting_to_write(text: str, remedy: str) -> None:
    assert remedy in str(refusal(file("a.yaml", f"preset: quickstart\n{text}\n")))
