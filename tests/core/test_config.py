"""From presets, files and overrides to one configuration: precedence, origins, and every way to be refused."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from pydantic import ValidationError

from vorox.core.config.checks.sources import exact_weight
from vorox.core.config.digest import (
    config_digest,
    decides_bits,
    differences,
    flat_values,
)
from vorox.core.config.explain import explain, json_schema
from vorox.core.config.layers.overrides import is_override
from vorox.core.config.layers.presets import model_presets, run_presets
from vorox.core.config.resolve import (
    ResolvedConfig,
    check_recordable,
    dump_yaml,
    load_config,
    resolve_config,
)
from vorox.core.config.schema_fields import leaf_keys, nearest, wildcard
from vorox.core.errors import ConfigError

SMALL = """
data:
  sources:
    - name: a
      format: txt
      paths: [a.txt]
train:
  num_steps: 10
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SMALL, encoding="utf-8")
    return "small.yaml"


def written(text: str, name: str = "my.yaml") -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def refusal(source: str | None, *overrides: str) -> str:
    """The text of the refusal."""
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


# Precedence


def test_files_stand_on_presets_and_overrides_on_both(small: str) -> None:
    written("preset: quickstart\noptimizer:\n  lr: 3e-4\nmodel:\n  num_layers: 2\n")
    config = load_config("my.yaml", ["model.num_layers=3", "--optimizer.beta2=0.99", "train.num_tokens=1e6"])
    quickstart = load_config("quickstart")
    assert config.optimizer.lr == 3e-4
    assert config.model.num_layers == 3
    assert config.optimizer.beta2 == 0.99
    assert (config.train.num_tokens, config.train.num_steps) == (1_000_000, None)
    assert config.model.hidden_size == quickstart.model.hidden_size
    assert config.eval.prompts == quickstart.eval.prompts


def test_dashes_and_plain_mean_the_same_and_the_last_word_counts(small: str) -> None:
    assert load_config(small, ["--optimizer.lr=6e-4"]) == load_config(small, ["optimizer.lr=1", "optimizer.lr=6e-4"])


def test_presets_chain_and_files_may_stand_on_files(small: str) -> None:
    Path("deep").mkdir()
    written("preset: ../small.yaml\noptimizer: {lr: 1e-3}\n", "deep/base.yaml")
    written("preset: deep/base.yaml\noptimizer: {beta2: 0.9}\n", "top.yaml")
    config = load_config("top.yaml")
    assert (config.train.num_steps, config.optimizer.lr, config.optimizer.beta2) == (10, 1e-3, 0.9)
    assert load_config(None, ["preset=top.yaml", "train.num_steps=4"]).train.num_steps == 4


def test_an_override_may_change_what_a_file_stands_on(small: str) -> None:
    written("preset: nonsense\noptimizer: {lr: 1e-3}\n")
    config = load_config("my.yaml", ["preset=quickstart"])
    assert config.optimizer.lr == 1e-3
    assert config.data.sources[0].format == "python_stdlib"


def test_a_preset_that_stands_on_itself_is_refused(small: str) -> None:
    written("preset: two.yaml\n", "one.yaml")
    written("preset: one.yaml\n", "two.yaml")
    assert "is based on itself" in refusal("one.yaml")


def test_environment_variables_change_nothing(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load_config(small)
    for key in leaf_keys():
        name = key.upper().replace(".", "_").replace("*", "0")
        for variable in (name, f"VOROX_{name}", f"VOROX_{name}".replace("_", "__")):
            monkeypatch.setenv(variable, "7")
    assert load_config(small) == before


def test_lists_are_indexed_and_mappings_merge(small: str) -> None:
    config = load_config(
        small,
        ["data.sources.0.weight=2", "optimizer={lr: 1e-3, name: muon}", 'eval.prompts=["def ", x]', "eval.prompts.1=y"],
    )
    assert config.data.sources[0].weight == 2.0
    assert config.data.sources[0].paths == ("a.txt",)
    assert (config.optimizer.lr, config.optimizer.name, config.optimizer.beta2) == (1e-3, "muon", 0.95)
    assert config.eval.prompts == ("def ", "y")


def test_whole_floats_are_integers_where_integers_are_wanted(small: str) -> None:
    config = load_config(small, ["train.num_steps=2e3", "optimizer.lr=1", "eval.num_sequences=64.0"])
    assert config.train.num_steps == 2000
    assert type(config.train.num_steps) is int
    assert type(config.optimizer.lr) is float
    assert config.eval.num_sequences == 64
    assert "train.num_steps=2.5" in refusal(small, "train.num_steps=2.5")


def test_the_result_is_frozen_and_explicit(small: str) -> None:
    config = load_config(small)
    with pytest.raises(ValidationError):
        config.optimizer.lr = 1.0  # type: ignore[misc]
    # a list without entries is a value
    empty = {"data.transforms", "data.stages", "data.validation.sources", "optimizer.groups", "train.batch_stages"}
    inside = {key for key in leaf_keys() if key.startswith(tuple(f"{name}." for name in empty))}
    assert {key.replace(".0.", ".*.") for key in flat_values(config)} == set(leaf_keys()) - inside | empty


# Families and sizes


def test_a_family_fills_what_is_not_given(small: str) -> None:
    config = load_config(small, ["model.family=gpt2", "model.activation=relu", "model.num_layers=2"])
    model = config.model
    assert (model.positions, model.norm, model.attention_bias) == ("learned", "layer_norm", True)
    assert (model.activation, model.num_layers, model.hidden_size) == ("relu", 2, 384)


def test_a_size_starts_the_model_anew_and_keys_beside_it_win(small: str) -> None:
    written(SMALL + "model: {family: qwen3, num_layers: 3, num_kv_heads: 2, dropout_fraction: 0.1}\n")
    config = load_config("my.yaml", ["model.preset=gpt2-124m", "model.num_layers=5"])
    model = config.model
    assert (model.family, model.preset, model.num_layers, model.hidden_size) == ("gpt2", "gpt2-124m", 5, 768)
    assert (model.num_kv_heads, model.dropout_fraction, model.qk_norm) == (None, 0.0, False)


def test_a_family_over_a_size_keeps_the_size(small: str) -> None:
    model = load_config(small, ["model.preset=gpt2-124m", "model.family=llama"]).model
    assert (model.family, model.hidden_size, model.norm, model.positions) == ("llama", 768, "rms_norm", "rope")


def test_every_size_and_family_loads_and_is_what_the_table_says(small: str) -> None:
    presets = model_presets()
    for name, size in presets.sizes.items():
        model = load_config(small, [f"model.preset={name}"]).model.model_dump()
        expected = {**presets.families[str(size["family"])], **size}
        assert {key: model[key] for key in expected} == expected
    for family, knobs in presets.families.items():
        model = load_config(small, [f"model.family={family}"]).model.model_dump(mode="json")
        assert {key: model[key] for key in knobs} == dict(knobs)


def test_the_schema_defaults_are_the_default_family(small: str) -> None:
    assert load_config(small).model == load_config(small, ["model.family=llama"]).model


# What has no effect is refused, what was overruled goes


@pytest.mark.parametrize(
    ("override", "needs"),
    [
        ("schedule.decay_fraction=0.3", "schedule.name=wsd"),
        ("optimizer.muon_lr=0.1", "muon"),
        ("precision.initial_loss_scale=8", "fp16"),
        ("tokenizer.path=t.json", "tokenizer.kind=file"),
        ("data.sources.0.text_field=body", "jsonl"),
        ("schedule.final_weight_decay_fraction=0.5", "schedule.weight_decay"),
        ("eval.sample_top_k=5", "eval.prompts"),
        ("model.norm_bias=true", "layer_norm"),
        ("train.spike_deviations=4", "train.spike_policy"),
        ("train.spike_window_steps=32", "train.spike_policy"),
        ("train.max_spike_steps=3", "train.spike_policy=skip"),
    ],
)
def test_an_option_without_effect_is_refused(small: str, override: str, needs: str) -> None:
    text = refusal(small, override)
    assert "has no effect" in text
    assert needs in text
    assert f"override {override}" in text


def test_chunks_of_the_loss_are_of_the_native_decoder(small: str) -> None:
    """Other models compute whole logits."""
    assert load_config(small, ["loss.chunk_tokens=512"]).loss.chunk_tokens == 512
    foreign = ("model.kind=huggingface", "model.name_or_path=somewhere", "loss.chunk_tokens=512")
    assert "loss.chunk_tokens=512 has no effect with model.kind=huggingface" in refusal(small, *foreign)


def test_what_a_later_switch_overrules_goes_back_to_its_default(small: str) -> None:
    written(SMALL + "tokenizer: {kind: bpe, vocab_size: 512}\nmodel: {rope_theta: 5e5}\n")
    config = load_config("my.yaml", ["tokenizer.kind=byte", "model.positions=learned"])
    assert config.tokenizer.vocab_size == 4096
    assert config.model.rope_theta == 10_000.0
    text = refusal("my.yaml", "tokenizer.kind=byte", "tokenizer.vocab_size=600")
    assert "tokenizer.vocab_size=600 has no effect with tokenizer.kind=byte" in text
    assert load_config("quickstart", ["data.sources=[{name: t, format: txt, paths: [x]}]"]).data.sources[0].name == "t"


@pytest.mark.parametrize(
    ("section", "asked_for", "override", "needs"),
    [
        ("train", "quantization_aware: int8-weight-only", "backend=jax", "backend=torch"),
        ("precision", "{float8: tensorwise, float8_emulate: true}", "backend=jax", "backend=torch"),
        ("train", "distillation: {teacher: somewhere}", "backend=jax", "backend=torch"),
        ("train", "distillation: {teacher: somewhere}", "parallel.tensor_parallel_size=2", "tensor_parallel_size=1"),
        ("train", "distillation: {logits: somewhere}", "loss.name=dpo", "loss.name=cross_entropy"),
        ("runtime", "{recompute_every_steps: 5}", "runtime.determinism=data", "determinism=bitwise"),
        ("runtime", "{rehearsal: true}", "parallel.kind=deepspeed", "parallel.kind=native"),
        ("eval", "{tasks: [piqa]}", "tokenizer.kind=none", "a tokenizer"),
        ("data", "cache: {grow: true}", "data.mode=streaming", "data.mode=cached"),
    ],
)
def test_a_feature_of_the_file_is_never_dropped_by_an_override(
    small: str, section: str, asked_for: str, override: str, needs: str
) -> None:
    """The run would be another one, and nothing would say so."""
    head = f"\n{section}:\n"
    written(SMALL.replace(head, f"{head}  {asked_for}\n") if head in SMALL else f"{SMALL}{section}: {asked_for}\n")
    load_config("my.yaml")
    text = refusal("my.yaml", override)
    assert "has no effect" in text or "is not supported with" in text
    assert needs in text
    assert "my.yaml:" in text


def test_knobs_of_a_family_never_count_as_said_by_the_user(small: str) -> None:
    written(SMALL + "model: {family: qwen3, positions: learned}\n")
    assert load_config("my.yaml").model.rope_theta == 10_000.0


# Refusals


def test_all_problems_come_in_one_report_with_their_places(small: str) -> None:
    written(
        SMALL
        + "optimizer:\n  lr: -1\n  lr: 2\nmodel:\n  num_layer: 3\n  num_heads: six\n"
        + "schedule:\n  warmup_steps: 1\n  warmup_tokens: 5\n"
    )
    text = refusal("my.yaml", "optimiser.lr=3", "train.micro_batch_sequences=5", "eval.every_steps=true", "foo=", "bar")
    lines = text.splitlines()
    assert lines[0] == "10 problems in my.yaml:"
    assert [line.split(". ")[0] for line in lines[1:]] == [f"  {number}" for number in range(1, 11)]
    for part in (
        "duplicate key optimizer.lr; the first is in line 10 [my.yaml:11]",
        "optimizer.lr=-1 must be a number, greater than 0 [my.yaml:10]",
        "Unknown key model.num_layer; did you mean model.num_layers? [my.yaml:13]",
        'model.num_heads="six" must be an integer, at least 1 [my.yaml:14]',
        "schedule.warmup_steps and schedule.warmup_tokens both set the warm-up; keep one [my.yaml:16, my.yaml:17]",
        "Unknown key optimiser.lr; did you mean optimizer.lr? [override optimiser.lr=3]",
        "train.global_batch_sequences=16 is not a multiple of train.micro_batch_sequences=5; "
        "global_batch_sequences=15 or 20, or micro_batch_sequences=4 or 8 would fit "
        "[override train.micro_batch_sequences=5]",
        "eval.every_steps=true must be an integer or null, at least 1 [override eval.every_steps=true]",
        "foo has an empty value",
        "bar has no value; write bar=VALUE [override bar]",
    ):
        assert any(part in line for line in lines), part


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.num_steps=null"], "the run has no length"),
        (["train.num_tokens=5", "train.num_epochs=1"], "train.num_tokens and train.num_epochs both set the length"),
        (["train.global_batch_sequences=24"], "24 is not a multiple of train.micro_batch_sequences=16"),
        (
            ["parallel.data_parallel_size=3"],
            "16 is not a multiple of train.micro_batch_sequences=16 x 3 (parallel.data_parallel_size x "
            "parallel.fsdp_size); global_batch_sequences=48 would fit",
        ),
        (["tokenizer.kind=file"], "needs tokenizer.path"),
        (["tokenizer.end_of_text=''"], "tokenizer.end_of_text is empty"),
        (["data.sources.0.paths=[]"], "format txt but no paths"),
        (["data.sources.0.weight=0"], "not positive"),
        (["data.sources.0.weight=1/0"], "not a number or a fraction"),
        (["data.sources.0.weight=x"], "not a number or a fraction"),
        (
            ["data.sources=[{name: a, format: txt, paths: [x]}, {name: a, format: txt, paths: [y]}]"],
            "also the name of data.sources.0",
        ),
        (
            [
                "data.sources=[{name: a, format: txt, paths: [x], split_by: tokens_per_document}, "
                "{name: a.hard, format: txt, paths: [y]}]"
            ],
            "data.sources.1.name=a.hard is also the name of data.sources.0",
        ),
        (["data.sources.0.name=a/b"], "text matching"),
        (["data.sources.1.weight=2"], "data.sources has 1 entries"),
        (["data.sources.weight=2"], "data.sources is a list; write data.sources.0.weight"),
        (["model.hidden_size=100"], "model.hidden_size=100 is not divisible by model.num_heads=6"),
        (["model.num_kv_heads=4"], "model.num_heads=6 is not divisible by model.num_kv_heads=4"),
        (["model.max_positions_tokens=64"], "data.sequence_length_tokens=256 is more than"),
        (["model.vocab_size=1000"], "less than the tokenizer's 4096"),
        (
            ["data.validation.held_out_fraction=0", "eval.every_steps=5"],
            "eval.every_steps=5 has no effect with data.validation.held_out_fraction=0",
        ),
        (
            ["data.validation.held_out_fraction=0", "eval.prompts=[x]"],
            "has no effect with data.validation.held_out_fraction=0",
        ),
        (["eval.prompts=[a]", "eval.every_steps=null", "eval.at_end=false"], "completed at every validation"),
        (
            ["data.validation.sources=[{name: v, format: txt, paths: [v]}]", "data.validation.held_out_fraction=0.3"],
            "data.validation.held_out_fraction=0.3 has no effect",
        ),
        (["data.validation.sources=[{name: v, format: txt, paths: [v], weight: 2}]"], "sources.0.weight has no effect"),
        (["data.validation.sources=[{name: v, format: txt}]"], "set data.validation.sources.0.paths"),
        (["data.validation.split=named", "data.validation.held_out_fraction=0.3"], "held_out_fraction=0.3 has no eff"),
        (["eval.prompts=['']"], "empty text"),
        (["eval.prompts=[a]", "eval.sample_tokens=256"], "leaves no room for a prompt within 256 positions"),
        (["checkpoint.keep_best=1", "eval.every_steps=null"], "needs validations"),
        (["checkpoint.keep_every_steps=10"], "without checkpoint.every_steps"),
        (["checkpoint.keep_every_steps=10", "checkpoint.every_steps=4"], "not a multiple of"),
        (["model.preset=gpt2-125m"], "did you mean gpt2-124m"),
        (["model.family=lama"], "did you mean llama"),
        (["backend=mxnet"], "must be one of torch"),
        (["precision.dtype=fp8"], "must be one of fp32, bf16, fp16"),
        (["log.tensorboard=yes"], "must be true or false"),
        (["train.num_steps=true"], "must be an integer"),
        (['train.num_steps="10"'], "it is text, write 10 without quotes"),
        (["train.num_steps=1_000"], "write 1000 without quotes or separators"),
        (["optimizer.lr=.nan"], "must be a number"),
        (["optimizer.lr=1e999"], "must be a number"),
        (["optimizer.lr.x=1"], "optimizer.lr holds a value, not keys"),
        (["optimizer=3"], "must be a section"),
        (["data.sources={}"], "must be a list of sections"),
        (["data.sources=[3]"], "must be a section"),
        (["data.sources=[x.txt]"], "write data.sources=[{name: x, format: txt, paths: [x.txt]}]"),
        (["data.transforms=[f.py:g]"], 'write data.transforms=[{name: "f.py:g"}]'),
        (["data.transforms=length"], "write data.transforms=[{name: length}]"),
        (["optimizer.groups=muon"], "must be a list of sections"),
        (["data.sources=[{format: txt, paths: [x]}]"], "data.sources.0.name is missing"),
        (["run.seed=9223372036854775808"], "run.seed"),
        (["a.b.c=1"], "Unknown key a.b.c"),
        (["model.learning_rate=1"], "did you mean optimizer.lr"),
        (["model.hiden_size=64"], "did you mean model.hidden_size"),
        (["data.sources.0.wieght=1"], "did you mean data.sources.0.weight"),
        (["9x=1"], "is not a key"),
        (["optimizer..lr=1"], "is not a key"),
        (["optimizer.lr"], "has no value"),
        (["optimizer.lr= "], "empty value"),
        (["eval.prompts=[a"], "Invalid YAML"),
        (["preset=3"], "is not a name"),
        (["preset=quickstrt"], "did you mean quickstart"),
    ],
)
def test_refusals_name_key_value_and_remedy(small: str, overrides: list[str], message: str) -> None:
    text = refusal(small, *overrides)
    assert message in text
    assert "problems in" not in text, "one fault must not be reported twice"


def test_nothing_at_all_says_what_is_needed() -> None:
    text = refusal(None)
    assert "data.sources is missing" in text
    assert "the run has no length" in text


def test_the_end_of_a_text_is_one_of_the_ids(small: str) -> None:
    shards = ["data.sources.0.format=bin", "data.sources.0.ids_dtype=uint16", "tokenizer.kind=none"]
    assert load_config(small, [*shards, "tokenizer.vocab_size=100", "tokenizer.end_of_text_id=99"])
    text = refusal(small, *shards, "tokenizer.vocab_size=100", "tokenizer.end_of_text_id=100")
    assert "tokenizer.end_of_text_id=100 is not below tokenizer.vocab_size=100" in text


def test_what_follows_from_a_wrong_value_is_not_reported_too(small: str) -> None:
    assert "problems" not in refusal(small, "model.num_heads=x", "model.hidden_size=100")
    assert "problems" not in refusal(small, "schedule.name=cosin", "schedule.decay_fraction=0.3")


@pytest.mark.parametrize(
    "override",
    [
        "data.sources.0.paths=[postgresql://alice:CANARY@db/x]",
        "tokenizer.kind=file tokenizer.path=https://alice:CANARY@host/tokenizer.json",
        "run.directory=https://alice:CANARY@host/runs",
        "data.dsn=postgresql://alice:CANARY@db/x",
        "optimizer.lr=postgresql://alice:CANARY@db/x",
    ],
)
def test_credentials_are_refused_and_not_repeated(small: str, override: str) -> None:
    assert "CANARY" not in refusal(small, *override.split())


def test_files_that_cannot_be_used(small: str) -> None:
    Path("latin.yaml").write_bytes(b"a: \xff\n")
    Path("folder.yaml").mkdir()
    assert "Invalid UTF-8 at byte 3 [latin.yaml]" in refusal("latin.yaml")
    assert "is a folder" in refusal("folder.yaml")
    assert "did you mean quickstart" in refusal("quickstat")
    assert "No preset or file missing.yaml" in refusal("missing.yaml")
    assert "my.yaml:2" in refusal(written("a: 1\n b: 2\n"))
    assert "`key: value`" in refusal(written("- 1\n"))


def test_a_byte_order_mark_and_windows_lines_are_fine(small: str) -> None:
    Path("windows.yaml").write_bytes(b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode())
    assert differences(load_config(small), load_config("windows.yaml", ["run.name=small-llama-6x384"])) == []


def test_empty_sections_say_nothing(small: str) -> None:
    assert load_config(written(SMALL + "model:\noptimizer:\n  # lr: 3\n")).model == load_config(small).model


# Origins and explanations


def test_every_value_knows_where_it_was_said(small: str) -> None:
    source = "    - name: b\n      format: txt\n      paths: [b]\n"
    written(f"preset: quickstart\noptimizer:\n  lr: 3e-4\ndata:\n  sources:\n{source}")
    resolved = resolve_config("my.yaml", ["data.sources.0.weight=2", "model.preset=gpt2-124m"])
    assert resolved.origin("optimizer.lr") == "my.yaml:3"
    assert resolved.origin("data.sources.0.format") == "my.yaml:7"
    assert resolved.origin("data.sources.0.weight") == "override data.sources.0.weight=2"
    assert resolved.origin("data.sources.0.text_field") == "default"
    assert resolved.origin("checkpoint.every_steps").startswith("preset quickstart:")
    assert resolved.origin("model.hidden_size").startswith("model.preset=gpt2-124m")
    assert resolved.origin("optimizer.beta1") == "default"
    text = dump_yaml(resolved.config, resolved)
    assert "  lr: 0.0003  # my.yaml:3\n" in text


@pytest.mark.parametrize(
    ("key", "may_change"),
    [
        ("optimizer.lr", True), ("train.num_steps", True), ("data.stages.0.weights", True),
        ("data.sources.0.weight", True), ("data.sources.0.stall_seconds", True), ("data.cache.codec", True),
        ("data.sources.0.text_field", False), ("model.num_layers", False), ("run.seed", False),
        ("train.global_batch_sequences", False),
    ],
)  # fmt: skip
def test_explain_tells_what_may_change_at_a_resume(key: str, may_change: bool) -> None:
    assert explain(key).resume.startswith("may change" if may_change else "may not change")


def test_explain_a_setting(small: str) -> None:
    resolved = resolve_config(small, ["optimizer.lr=1e-3"])
    found = explain("optimizer.lr", resolved)
    assert (found.default, found.field.type_name, found.field.accepted) == ("0.0006", "number", "greater than 0")
    assert [(value.value, value.origin) for value in found.values] == [(1e-3, "override optimizer.lr=1e-3")]
    assert found.changes_run
    assert not explain("log.every_steps").changes_run
    assert explain("schedule.decay_fraction").needs == "schedule.name=wsd"
    assert explain("eval.prompts", resolved).values[0].value == []
    json.dumps(found.to_json())


def test_explain_sections_lists_and_indices(small: str) -> None:
    resolved = resolve_config(small)
    assert "schedule.warmup_steps" in explain("schedule").keys
    assert "data.sources" in explain("data").keys
    assert all("sources.*" not in key for key in explain("data").keys)
    assert "data.sources.*.weight" in explain("data.sources").keys
    for key in ("data.sources.0.weight", "data.sources.weight", "data.sources.*.weight"):
        assert [value.key for value in explain(key, resolved).values] == ["data.sources.0.weight"]
    with pytest.raises(ConfigError, match=r"did you mean optimizer\.lr"):
        explain("optimiser.lr")


@pytest.fixture(scope="module")
def quickstart() -> ResolvedConfig:
    return resolve_config("quickstart")


@pytest.mark.parametrize("key", leaf_keys())
def test_every_key_is_explained_with_its_value(key: str, quickstart: ResolvedConfig) -> None:
    found = explain(key, quickstart)
    json.dumps(found.to_json())
    assert found.field.key == key
    assert found.field.description
    configured = {name: value for name, value in flat_values(quickstart.config).items() if wildcard(name) == key}
    assert {value.key: value.value for value in found.values} == configured
    assert all(value.origin for value in found.values)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("optimiser.lr", "optimizer.lr"),
        ("model.lr", "optimizer.lr"),
        ("lr", "optimizer.lr"),
        ("seed", "run.seed"),
        ("model.num_layer", "model.num_layers"),
        ("train.steps", "train.num_steps"),
        ("model.dropout", "model.dropout_fraction"),
        ("checkpoint.every", "checkpoint.every_steps"),
        ("data.seq_len", "data.sequence_length_tokens"),
        ("shuffle", "data.shuffle"),
    ],
)
def test_nearest_names(wrong: str, right: str) -> None:
    assert nearest(wrong)[0] == right


def test_nothing_near_is_nothing() -> None:
    assert nearest("zzzzqqq") == []


# Digest, dump, differences, schema


def test_dump_reads_back_equal(small: str) -> None:
    for source, overrides in ((small, []), ("quickstart", ["model.preset=qwen3-0.6b", "data.sources.0.weight=1/3"])):
        config = load_config(source, overrides)
        again = load_config(written(dump_yaml(config), "again.yaml"))
        assert again == config
        assert config_digest(again) == config_digest(config)
        resolved = resolve_config(source, overrides)
        assert load_config(written(dump_yaml(config, resolved), "again.yaml")) == config


def test_the_digest_covers_everything_but_what_changes_no_bit(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change every key in turn and see whether the digest moves. The list is written out here a second time."""
    changes_no_bit = {"model.preset", "model.family", "data.cache.directory", "run.name", "run.directory"}
    changes_no_bit |= {"parallel.reshard_after_forward", "parallel.start_timeout_seconds"}
    changes_no_bit |= {"runtime.stall_timeout_seconds", "runtime.profile_steps", "runtime.cuda_graphs"}
    changes_no_bit |= {"runtime.long_stall_timeout_seconds"}
    changes_no_bit |= {"runtime.recompute_every_steps", "runtime.rehearsal"}
    changes_no_bit |= {
        "data.mode",
        "data.cache.grow",
        "data.growth.build",
        "data.sources.0.preset",
        "data.sources.0.metadata_fields",
        "data.cache.codec",
        "data.cache.block_rows",
    }
    changes_no_bit |= {"data.sources.0.max_decompressed_bytes", "data.sources.0.max_decompression_ratio"}
    changes_no_bit |= {"data.sources.0.max_retries_per_unit", "data.sources.0.stall_seconds", "tokenizer.fast_path"}
    sections = ("data.loader.", "data.pipeline.", "data.streaming.", "checkpoint.", "eval.", "log.")
    config = load_config(small)
    values, digest = flat_values(config), config_digest(config)
    for key in values:
        monkeypatch.setattr("vorox.core.config.digest.flat_values", lambda _, key=key: {**values, key: "another value"})
        same = key in changes_no_bit or key.startswith(sections)
        is_decided = key == "train.auto_micro_batch_sequences"  # changes bits, but not which run it is
        assert (config_digest(config) == digest) == (same or is_decided), key
        assert decides_bits(key) != same


def test_the_digest_is_frozen(small: str) -> None:
    """Runs are found by it: it may only change together with the schema, knowingly."""
    config = load_config(small)
    assert config_digest(config) == config_digest(load_config(small, ["run.name=x", "log.every_steps=3"]))
    assert config_digest(config) != config_digest(load_config(small, ["run.seed=1"]))
    assert len(config_digest(config)) == 64


def test_groups_of_the_optimizer(small: str) -> None:
    """Without groups a run keeps its digest; every field of a group changes it, and one without effect is refused."""

    def digest(*groups: str) -> str:
        return config_digest(load_config(small, [f"optimizer.groups=[{', '.join(groups)}]"]))

    plain, scaled = "{match: a}", "{match: a, lr_scale: 2}"
    found = [digest(plain), digest(scaled), digest("{match: a, frozen: true}"), digest("{match: b}"), digest()]
    assert len({*found}) == 5
    assert digest() == config_digest(load_config(small))
    assert digest(plain, scaled) != digest(scaled, plain)
    with pytest.raises(
        ConfigError, match=r"groups\.0\.lr_scale=2 has no effect with optimizer\.groups\.0\.frozen=true"
    ):
        digest("{match: a, frozen: true, lr_scale: 2}")


def test_differences(small: str) -> None:
    before = load_config(small)
    after = load_config(small, ["optimizer.lr=1e-4", "eval.prompts=[x]", "data.sources.0.weight=1/2"])
    assert [str(difference) for difference in differences(before, after)] == [
        'data.sources.0.weight: 1.0 -> "1/2"',
        "optimizer.lr: 0.001 -> 0.0001",
        "eval.prompts: [] -> [x]",
    ]
    assert differences(before, before) == []


def test_json_schema_is_for_editors(small: str) -> None:
    schema = json_schema()
    assert schema["properties"]["preset"]["type"] == "string"
    assert "required" not in schema
    assert schema["additionalProperties"] is False
    assert "gpt2-124m" in schema["$defs"]["ModelConfig"]["properties"]["preset"]["examples"]
    assert schema["$defs"]["SourceConfig"]["required"] == ["name"]
    json.dumps(schema)


def test_run_names_come_from_the_file_and_the_model(small: str) -> None:
    assert load_config(small).run.name == "small-llama-6x384"
    assert load_config(small, ["model.preset=gpt2-124m"]).run.name == "small-gpt2-124m"
    assert load_config(written(SMALL, "gpt2_124m.yaml"), ["model.preset=gpt2-124m"]).run.name == "gpt2_124m"
    assert load_config(small, ["run.name=mine"]).run.name == "mine"
    assert load_config(small, ["run.name=null"]).run.name is None
    assert load_config("quickstart", ["model.num_layers=2"]).run.name == "quickstart-llama-2x128"


@pytest.mark.parametrize(
    ("weight", "value"),
    [
        (1.0, Fraction(1)),
        (0.1, Fraction(1, 10)),
        ("1/3", Fraction(1, 3)),
        ("0.25", Fraction(1, 4)),
        ("2 / 5", Fraction(2, 5)),
    ],
)
def test_weights_are_exact(weight: float | str, value: Fraction) -> None:
    assert exact_weight(weight) == value


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("a.b=1", True),
        ("--a.b=1", True),
        ("a=1", True),
        ("data.sources.0.weight=2", True),
        ("configs/a=b.yaml", False),
        ("a.b", False),
        ("-a=1", False),
        ("a b=1", False),
    ],
)
def test_is_override(argument: str, expected: bool) -> None:
    assert is_override(argument) is expected


def test_presets_are_listed() -> None:
    assert "quickstart" in run_presets()


# Growing caches, parts and stages


def test_target_epochs_is_a_second_name_of_num_epochs(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data: {sources: [{name: a, format: txt, paths: [/x]}]}\ntrain: {target_epochs: 5}\n")
    config = load_config(file)
    assert config.train.num_epochs == 5
    assert load_config(file, ["train.target_epochs=2"]).train.num_epochs == 2
    assert load_config(file, ["train.num_steps=7"]).train.num_epochs is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.growth.on_starve=repeat", "data.growth.mode=strict"], "on_starve=repeat"),
        (["data.growth.mode=strict", "data.growth.first_segment_units=65"], "is more than"),
        (["data.growth.on_starve=stop"], "has no effect"),
        (["data.growth.mode=elastic", "data.growth.first_segment_units=2"], "has no effect"),
        (["data.sources.0.on_exhausted=drop"], "has no effect"),
        (["data.sources.0.split_by=bytes_per_token", "data.sources.0.split_quantiles=[0.5, 0.2]"], "must increase"),
        (["data.sources.0.split_by=bytes_per_token", "data.sources.0.split_quantiles=[0, 0.5]"], "must increase"),
        (["data.sources.0.split_by=bytes_per_token", "data.sources.0.split_quantiles=[0.5, 1]"], "must increase"),
        (["data.sources.0.split_by=bytes_per_token", "data.sources.0.split_names=[one]"], "must be 2 different names"),
        (["data.stages=[{start_tokens: 0, weights: {b: 1}}]"], "has no source 'b'; known are a"),
        (["data.stages=[{start_tokens: 0, weights: {a: 0}}]"], "not positive"),
        (["data.stages=[{start_tokens: 9}, {start_tokens: 9}]"], "not larger than that of the previous stage"),
        (["data.stages=[{start_tokens: 0, sequence_length_tokens: 100}]"], "does not divide"),
        (["train.follow_growth=true"], "has no effect"),
    ],
)
def test_growth_and_stages_that_contradict_themselves(tmp_path: Path, overrides: list[str], message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data: {sources: [{name: a, format: txt, paths: [/x]}]}\ntrain: {num_steps: 5}\n")
    with pytest.raises(ConfigError, match=message):
        load_config(file, overrides)


def test_weights_by_stage_and_part(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "data:\n  sources: [{name: a, format: txt, paths: [/x], split_by: tokens_per_document}]\n"
        "  sequence_length_tokens: 64\n"
        "  stages:\n    - {start_tokens: 0, weights: {a.easy: 1}, sequence_length_tokens: 16}\n"
        "    - {start_tokens: 5000, weights: {a.easy: '1/3', a.hard: 0.7}}\n"
        "train: {num_steps: 5}\n"
    )
    stages = load_config(file).data.stages
    assert [dict(stage.weights) for stage in stages] == [{"a.easy": 1}, {"a.easy": "1/3", "a.hard": 0.7}]
    assert [stage.sequence_length_tokens for stage in stages] == [16, None]


# Synonyms


def test_names_of_other_codebases_are_taken_and_translated() -> None:
    config = load_config(
        "quickstart",
        [
            "--model.n_layer=3", "--model.n_head=2", "--model.n_embd=64", "model.num_kv_heads=null", "--batch_size=8",
            "--per_device_batch_size=2", "--seq_len=128", "--num_tokens=10000", "--save_dir=./kept",
            "--save_interval=7", "--model.dropout=0.1", "--from_pretrained=some-run",
        ],
    )  # fmt: skip
    assert (config.model.num_layers, config.model.num_heads, config.model.hidden_size) == (3, 2, 64)
    assert (config.train.global_batch_sequences, config.train.micro_batch_sequences) == (8, 2)
    assert config.data.sequence_length_tokens == 128
    assert (config.train.num_tokens, config.train.num_steps) == (10_000, None)
    assert (config.run.directory, config.checkpoint.every_steps) == ("./kept", 7)
    assert (config.model.dropout_fraction, config.train.from_weights) == (0.1, "some-run")


def test_a_folder_of_shards_is_a_source() -> None:
    """Once it is said who wrote them."""
    with pytest.raises(ConfigError, match="their tokenizer is not set"):
        resolve_config("quickstart", ["--data_dir=shards", "tokenizer.kind=byte"])
    said = ["--data_dir=shards", "tokenizer.kind=byte", "data.sources.0.tokenizer=byte"]
    (source,) = resolve_config("quickstart", said).config.data.sources
    assert (source.format, source.paths) == ("bin", ("shards",))


def test_a_synonym_is_explained_by_the_key_that_it_means(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("preset: quickstart\nbatch_size: 32\nmodel:\n  n_layer: 5\n")
    explanation = explain("model.n_layer", resolve_config(file))
    assert explanation.field.key == "model.num_layers"
    assert "n_layer" in explanation.synonyms
    assert [(value.value, value.origin) for value in explanation.values] == [(5, f"{file}:4")]


# Slips, each answered with its correction


@pytest.mark.parametrize(
    ("override", "correction"),
    [
        ("optimizer.clip_norm=None", "write optimizer.clip_norm=null"),
        ("runtime.device=gpu", "did you mean cuda?"),
        ("data.sources.0.format=md", "format txt"),
        ("data.sources.0.format=jsonlines", "did you mean jsonl or json?"),
        ("data.sources.0.paths=txt/", "write data.sources.0.paths=[txt/]"),
        ("data.sources.0.paths=txt/*.txt", 'write data.sources.0.paths=["txt/*.txt"]'),
        ("data.sources=txt/", "--data txt/"),
        ("data.validation.sources=txt/", "write data.validation.sources=[{name: txt, format: txt, paths: [txt/]}]"),
        ("data.sources.0.paths=[a, 1]", "data.sources.0.paths.1=1 must be text; write it in quotes"),
        ("run.name=007", "write it in quotes: run.name="),
        ("train.num_steps=10k", "write 10000"),
        ("train.num_tokens=2.5B", "write 2500000000"),
        ("train.num_tokens=2,5B", "write 2500000000"),
        ("train.num_steps=1,000,000", "write 1000000 without"),
        ("optimizer.lr=0,001", "write 0.001 without"),
        ("optimizer.lr=3,5e-4", "write 3.5e-4 without"),
        ("optimizer.lr=1,000", "write 1.000 or 1000 without"),
    ],
)
def test_a_slip_is_answered_with_its_correction(small: str, override: str, correction: str) -> None:
    assert correction in refusal(small, override)


def test_a_number_out_of_range_is_not_to_be_quoted_where_text_is_a_choice_as_well(small: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(small, ["data.sources.0.weight=.inf"])
    assert "must be a number" in str(caught.value)
    assert "quotes" not in str(caught.value)


def test_half_a_character_is_refused_and_two_halves_are_one(small: str) -> None:
    assert "eval.prompts.0 holds half of a character (U+D83D)" in refusal(small, r'eval.prompts=["\ud83d"]')
    assert "eval.prompts.1" in refusal(small, r'eval.prompts=["a", "b\udead"]')
    assert load_config(small, [r'eval.prompts=["a\ud83d\ude00"]']).eval.prompts == ("a\U0001f600",)


@pytest.mark.parametrize("text", ["9007199254740993.0", "123456789012345678.0", "9223372036854775807.0", "1e18"])
def test_a_whole_number_written_as_a_float_is_taken_exactly(small: str, text: str) -> None:
    assert load_config(small, [f"run.seed={text}"]).run.seed == Fraction(text)
    assert load_config(written(SMALL + f"run: {{seed: {text}}}\n")).run.seed == Fraction(text)
    assert load_config(small, [f"optimizer.eps={text}"]).optimizer.eps == float(text)


def test_what_was_misread_comes_first_and_nothing_is_called_missing_because_of_it(small: str) -> None:
    text = refusal(written("train: {num_steps: 3}\ndata:\n  loader: {num_threads: 1}\n" + SMALL.partition("train")[0]))
    assert "duplicate key data; the first is in line 2" in text
    assert "missing" not in text


def test_holding_out_nothing_takes_validations_of_lower_layers_along(small: str) -> None:
    written(SMALL + "eval: {every_steps: 5, prompts: [a], sample_tokens: 7}\n")
    config = load_config("my.yaml", ["data.validation.held_out_fraction=0"])
    assert (config.eval.every_steps, config.eval.prompts, config.eval.sample_tokens) == (250, (), 48)
    assert load_config("quickstart", ["data.validation.held_out_fraction=0"]).eval.prompts == ()


@pytest.mark.parametrize("count", [130, 600])
def test_a_mixture_of_many_sources_is_read_from_the_file_that_a_run_writes(count: int, tmp_path: Path) -> None:
    sources = [{"name": f"s{index}", "format": "txt", "paths": [f"/data/part{index}/*.txt"]} for index in range(count)]
    config = load_config({"data": {"sources": sources}, "train": {"num_steps": 5}})
    check_recordable(config)
    (tmp_path / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
    assert load_config(tmp_path / "config.yaml") == config


def test_a_configuration_that_could_not_be_read_again_is_refused(tmp_path: Path) -> None:
    names = ["x" * 60_000 + str(index) for index in range(80)]
    sources = [{"name": f"s{index}", "format": "txt", "paths": [name]} for index, name in enumerate(names)]
    config = load_config({"data": {"sources": sources}, "train": {"num_steps": 5}})
    with pytest.raises(ConfigError) as caught:
        check_recordable(config)
    assert "combine sources" in caught.value.hint
    deep: object = 1
    for _ in range(29):
        deep = [deep]
    nested = load_config("quickstart", [f"data.transforms=[{{name: length, args: {{minimum: {json.dumps(deep)}}}}}]"])
    with pytest.raises(ConfigError, match="Nested more than"):
        check_recordable(nested)
