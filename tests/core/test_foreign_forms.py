"""Configurations in the forms of other trainers: Python files, data.source and data.settings, dotted GPT options."""

from __future__ import annotations

from pathlib import Path

import pytest

from vorox.cli.time_limit import parse_minutes
from vorox.cli.train import _default_preset
from vorox.core import redaction
from vorox.core.config import dump_yaml, load_config, resolve_config
from vorox.core.config.synonyms import SYNONYMS, key_of
from vorox.core.errors import ConfigError
from vorox.core.redaction import redact

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

    assert [name for name in SYNONYMS if find_field(key_of(name)) is None] == []


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
