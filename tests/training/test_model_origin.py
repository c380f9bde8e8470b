"""Starting weights by their files alone: adopted where the configuration is silent, refused where it differs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import base_models
from pretrained_models import VOCAB, reference, write_pretrained
from servers.hub import model_hub
from tiny_runs import configuration, use_numpy_engine, write_text
from vorox.cli import main
from vorox.cli.data.loading import load as load_for_data
from vorox.cli.settings.arguments import parse_arguments
from vorox.cli.training.run_choice import choose_run
from vorox.core.config import flat_values, load_config
from vorox.core.engine import NamedArray
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.files.staged_directory import StagedDirectory
from vorox.core.schema import RunConfig
from vorox.core.schema.model import ModelConfig
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.data.corpus.corpus import prepare
from vorox.data.tokenizers import loading as tokenizers
from vorox.data.tokenizers.store import configured_untrained
from vorox.models.arrays.weights_file import write_weights
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.models.huggingface.config import huggingface_files, spec_from_huggingface
from vorox.models.huggingface.weights import huggingface_entries, to_huggingface
from vorox.planned_run import resolve_model
from vorox.run import train
from vorox.training.origin import origin_checks
from vorox.training.origin.configuration import load_config as load_with_origin
from vorox.training.origin.configuration import load_resolved
from vorox.training.origin.model_origin import ModelOrigin
from vorox.training.origin.origin_checks import check_origin
from vorox.training.weights.init_from import init_from_weights, open_weights

BYTE = tokenizers.train(TokenizerConfig(kind="byte"), [])
MODEL = ModelConfig(
    family="gpt2", num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=4, positions="learned", norm="layer_norm",
    norm_bias=True, activation="gelu_tanh", attention_bias=True, mlp_bias=True, max_positions_tokens=128,
)  # fmt: skip
SPEC = decoder_spec(MODEL, tokenizer_vocab_size=BYTE.vocab_size, sequence_length_tokens=128)


def companions(spec: DecoderSpec) -> dict[str, bytes]:
    return huggingface_files(spec, end_of_text_id=BYTE.end_of_text_id) | BYTE.files(spec.max_positions_tokens)


def write_model(directory: Path) -> Path:
    """A transformers directory with zeros for weights."""
    directory.mkdir(parents=True)
    for name, data in companions(SPEC).items():
        (directory / name).write_bytes(data)
    weights = to_huggingface(SPEC, ((part.name, np.zeros(part.shape, np.float32)) for part in SPEC.parameters))
    with (directory / "model.safetensors").open("wb") as file:
        write_weights(file, huggingface_entries(SPEC), weights)
    return directory


def write_checkpoint(directory: Path) -> Path:
    with StagedDirectory(directory) as staged:
        for name, data in companions(SPEC).items():
            staged.write(name, data)
        return staged.commit({"step": 4, "spec": SPEC.to_json()})


def write_run(directory: Path) -> Path:
    """A run that has saved once."""
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "config.yaml").write_text("{}")
    (directory / "run.json").write_text("{}")
    write_checkpoint(directory / "checkpoints" / "step-00000004")
    BYTE.save(directory / "tokenizer")
    return directory


class WeightsTaker:
    """As much of an engine as starting from weights uses."""

    def import_weights(self, weights: Iterable[NamedArray]) -> None:
        self.weights = dict(weights)

    def fingerprint(self) -> str:
        return "taken"


@pytest.mark.parametrize("write", [write_model, write_checkpoint, write_run])
def test_a_silent_configuration_adopts_architecture_and_tokenizer(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    place = write(tmp_path / "weights")
    config = load_with_origin("quickstart", [f"train.from_weights={place}"])
    found = decoder_spec(config.model, tokenizer_vocab_size=BYTE.vocab_size, sequence_length_tokens=128)
    assert found == SPEC
    assert config.model.family == "gpt2"
    assert config.tokenizer.kind == "huggingface"
    assert tokenizers.load(str(config.tokenizer.path)).fingerprint == BYTE.fingerprint
    assert config.data.sequence_length_tokens == 128, "no row is longer than the model's positions"
    check_origin(config, tokenizer=BYTE)


LLAMA_CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": BYTE.vocab_size, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip
EXPECTED_OF: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (LLAMA_CONFIG, "llama", {"model.rope_scaling.rope_type": "llama3", "model.rope_scaling.factor": 8.0}),
    (LLAMA_CONFIG | {"model_type": "mistral", "sliding_window": 32}, "mistral", {"model.sliding_window_tokens": 32}),
    (
        LLAMA_CONFIG | {
            "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1,
        },
        "qwen2",
        {"model.attention_bias": "qkv", "model.layer_types": ["full_attention", "sliding_attention"]},
    ),
    (
        LLAMA_CONFIG | {"model_type": "phi3", "rope_scaling": None, "partial_rotary_factor": 0.5},
        "phi3",
        {"model.rotary_fraction": 0.5},
    ),
    (
        LLAMA_CONFIG | {
            "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 32, "rope_local_base_freq": 50.0,
            "query_pre_attn_scalar": 12,
        },
        "gemma3_text",
        {"model.sliding_rope_theta": 50.0, "model.query_pre_attn_scalar": 12, "model.norm_placement": "both"},
    ),
    (
        LLAMA_CONFIG | {"model_type": "olmo2"},
        "olmo2",
        {"model.qk_norm": "full_width", "model.norm_placement": "post", "model.rope_scaling.factor": 8.0},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "family", "settings"), EXPECTED_OF, ids=lambda value: str(value)[:20])
def test_a_published_architecture_is_adopted_with_every_part(
    config: dict[str, Any], family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    place = tmp_path / "weights"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    BYTE.save(place)
    spec = decoder_spec(spec_from_huggingface(config), tokenizer_vocab_size=2, sequence_length_tokens=2)
    with (place / "model.safetensors").open("wb") as file:
        zeros = ((part.name, np.zeros(part.shape, np.float32)) for part in spec.parameters)
        write_weights(file, huggingface_entries(spec), to_huggingface(spec, zeros))
    adopted = load_with_origin("quickstart", [f"train.from_weights={place}"])
    assert decoder_spec(adopted.model, tokenizer_vocab_size=2, sequence_length_tokens=2) == spec
    assert adopted.model.family == family
    assert settings.items() <= flat_values(adopted).items()
    check_origin(adopted, tokenizer=BYTE)
    again = load_config(dict_of(adopted))
    check_origin(again, tokenizer=BYTE)
    for key, value in settings.items():
        if isinstance(value, float | int) and not isinstance(value, bool):
            with pytest.raises(ConfigError, match=key.removeprefix("model.")):
                load_with_origin("quickstart", [f"train.from_weights={place}", f"{key}={value * 2}"])
            with pytest.raises(ConfigError, match=key.removeprefix("model.")):
                check_origin(load_config(dict_of(adopted), [f"{key}={value * 2}"]), tokenizer=BYTE)


def dict_of(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def test_what_the_user_sets_is_kept_where_it_agrees_and_refused_where_not(tmp_path: Path) -> None:
    place = f"train.from_weights={write_model(tmp_path / 'weights')}"
    kept = load_with_origin(
        "quickstart", [place, "model.num_layers=3", "model.dropout_fraction=0.1", "tokenizer.kind=byte"]
    )
    assert (kept.model.dropout_fraction, kept.tokenizer.kind, kept.tokenizer.path) == (0.1, "byte", None)
    for setting in ("model.num_layers=4", "model.preset=gpt2-124m"):
        with pytest.raises(ConfigError) as caught:
            load_with_origin("quickstart", [place, setting])
        assert caught.value.exit_code == 2
        assert "model.num_layers" in caught.value.what + caught.value.hint
        assert setting in caught.value.where
    file = tmp_path / "mine.yaml"
    file.write_text(
        f"preset: quickstart\ntrain: {{from_weights: {tmp_path / 'weights'}}}\nmodel: {{hidden_size: 48}}\n"
    )
    with pytest.raises(ConfigError, match="hidden_size") as caught:
        load_with_origin(file)
    assert caught.value.where.startswith(str(file))


def test_another_model_is_refused_before_anything_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    config = configuration(tmp_path, [f"train.from_weights={write_run(tmp_path / 'runs' / 'begun')}"])
    with pytest.raises(ConfigError) as caught:
        train(config)
    assert caught.value.where == "train.from_weights"
    assert "model.num_layers=3" in caught.value.hint
    assert not (tmp_path / "cache").exists()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["begun"]


ANOTHER_TOKENIZER = [
    pytest.param(["tokenizer.kind=byte", "tokenizer.end_of_text=<stop>"], id="ready"),
    pytest.param(["tokenizer.kind=bpe", "tokenizer.vocab_size=257"], id="still to be trained"),
]


@pytest.mark.parametrize("settings", ANOTHER_TOKENIZER)
def test_another_tokenizer_is_refused_before_anything_is_built(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_numpy_engine(monkeypatch)
    place = write_model(tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    text = write_text(tmp_path / "text")
    source = f"data.sources=[{{name: text, format: jsonl, paths: [{text}]}}]"
    words = [f"train.from_weights={place}", source, "data.cache.directory=cache", *settings]
    with pytest.raises(ConfigError, match="another tokenizer") as caught:
        train(load_with_origin("quickstart", words))
    assert caught.value.where == "tokenizer"
    assert main(["train", "--dry-run", *words]) == 2
    assert "another tokenizer" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text", "weights"], "nothing was built or written"


def test_a_vocabulary_that_training_cannot_reach_is_refused(tmp_path: Path) -> None:
    weights = ModelOrigin("weights", tmp_path, None, {}, replace(SPEC, vocab_size=1024), None, {}, {})
    config = load_config("quickstart", ["tokenizer.kind=bpe", "tokenizer.vocab_size=512"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(origin_checks, "find_origin", lambda config: weights)
        patch.setattr(origin_checks, "require_equal_models", lambda *arguments, **named: None)
        with pytest.raises(ConfigError, match="1,024") as caught:
            check_origin(config)
        assert caught.value.where == "tokenizer.vocab_size"
        check_origin(load_config("quickstart", ["tokenizer.kind=bpe", "tokenizer.vocab_size=1024"]))


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda place: (place / "model.safetensors").write_bytes(b"1234567890"), CheckpointError),
        (lambda place: (place / "model.safetensors").unlink(), CheckpointError),
        (lambda place: (place / "config.json").write_text("{"), CheckpointError),
        (lambda place: (place / "config.json").write_text(json.dumps({"model_type": "mamba"})), ConfigError),
    ],
    ids=["header", "no weights", "no JSON", "other family"],
)
def test_damage_is_seen_in_the_headers(damage: Callable[[Path], Any], error: type[Exception], tmp_path: Path) -> None:
    place = write_model(tmp_path / "weights")
    damage(place)
    with pytest.raises(error):
        check_origin(load_config("quickstart", [f"train.from_weights={place}"]))


def test_a_dry_run_says_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = write_model(tmp_path / "weights")
    text = write_text(tmp_path / "text")
    source = f"data.sources=[{{name: text, format: jsonl, paths: [{text}]}}]"
    words = ["train", "--dry-run", "--from-weights", str(place), source, f"data.cache.directory={tmp_path / 'cache'}"]
    assert main([*words, "model.num_layers=4"]) == 2
    assert "model.num_layers" in capsys.readouterr().err
    main(words)  # with or without a framework
    assert "3 layers x 32" in capsys.readouterr().out


@pytest.mark.hf
def test_a_model_of_the_hub_is_pinned_to_its_commit(tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in write_model(tmp_path / "weights").iterdir()}
    with model_hub(tmp_path / "hub") as hub:
        first = hub.commit("owner/model", files)
        hub.commit("owner/model", {"config.json": b"{}"})
        config = load_with_origin("quickstart", [f"train.from_weights=hf://owner/model@{first}"])
        assert config.train.from_weights == f"hf://owner/model@{first}"
        assert (config.tokenizer.path, config.tokenizer.revision) == ("owner/model", first)
        assert config.model.num_layers == 3
        assert not any("safetensors" in request.path for request in hub.log.requests), "the description suffices"
        with pytest.raises(ConfigError, match="another tokenizer") as caught:
            check_origin(
                load_with_origin(
                    "quickstart",
                    [
                        f"train.from_weights=hf://owner/model@{first}",
                        "tokenizer.kind=byte",
                        "tokenizer.end_of_text=<stop>",
                    ],
                )
            )
        assert "tokenizer.revision=" in caught.value.hint
        assert first in caught.value.hint
        assert not any("safetensors" in request.path for request in hub.log.requests), "the tokenizer suffices"
        with pytest.raises(ConfigError, match="model_type"):
            load_with_origin("quickstart", ["train.from_weights=hf://owner/model"])
        engine: Any = WeightsTaker()
        started = init_from_weights(config, SPEC, engine)
        assert started == {"from_weights": f"hf://owner/model@{first}", "fingerprint": "taken", "weights_of": []}
        assert {name: array.shape for name, array in engine.weights.items()} == {
            part.name: part.shape for part in SPEC.parameters
        }


NAMED_BY: dict[str, Callable[[Path], list[str]]] = {
    "from_weights": lambda place: [f"train.from_weights={place}"],
    "huggingface": lambda place: ["model.kind=huggingface", f"model.name_or_path={place}"],
}
KEYS = {
    "fast_path": "off", "chat_template": "chatml", "special_tokens": ["<a>", "<b>"], "end_of_text": "<|endoftext|>",
}  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("named", NAMED_BY)
@pytest.mark.parametrize("from_file", [False, True], ids=["command line", "file"])
def test_a_key_of_the_tokenizer_changes_that_key_and_nothing_else(
    named: str, key: str, from_file: bool, tmp_path: Path
) -> None:
    """Public report: any key of the section dropped the model's tokenizer, and a new BPE was trained."""
    words = NAMED_BY[named](write_model(tmp_path / "weights"))
    plain = load_with_origin("quickstart", words)
    assert (plain.tokenizer.kind, plain.tokenizer.path) == ("huggingface", str(tmp_path / "weights"))
    if from_file:
        file = tmp_path / "mine.yaml"
        file.write_text(json.dumps({"preset": "quickstart", "tokenizer": {key: KEYS[key]}}))
        changed = load_with_origin(file, words)
    else:
        changed = load_with_origin("quickstart", [*words, f"tokenizer.{key}={json.dumps(KEYS[key])}"])
    before, after = dict_of(plain)["tokenizer"], dict_of(changed)["tokenizer"]
    assert {name for name in before if before[name] != after[name]} <= {key}
    assert after == before | {key: KEYS[key]}
    assert tokenizer_of(changed).first_conflict(BYTE) is None, "ids are those of the model's tokenizer"


def tokenizer_of(config: RunConfig) -> tokenizers.Tokenizer:
    found = configured_untrained(config.tokenizer)
    assert found is not None, "no tokenizer is trained"
    return found


@pytest.mark.parametrize("named", NAMED_BY)
def test_a_named_tokenizer_is_compared_with_the_weights_or_refused(named: str, tmp_path: Path) -> None:
    words = NAMED_BY[named](write_model(tmp_path / "weights"))
    BYTE.save(tmp_path / "same")
    tokenizers.train(TokenizerConfig(kind="byte", end_of_text="<stop>"), []).save(tmp_path / "other")
    same = load_with_origin("quickstart", [*words, f"tokenizer.path={tmp_path / 'same'}"])
    assert (same.tokenizer.kind, same.tokenizer.path) == ("huggingface", str(tmp_path / "same"))
    check_origin(same)
    for settings in (
        [f"tokenizer.path={tmp_path / 'other'}"],
        ["tokenizer.kind=huggingface", f"tokenizer.path={tmp_path / 'other'}"],
        ["tokenizer.kind=bpe", "tokenizer.vocab_size=257", "tokenizer.end_of_text=<stop>"],
    ):
        config = load_with_origin("quickstart", [*words, *settings])
        with pytest.raises(ConfigError, match="another tokenizer") as caught:
            check_origin(config)
        typed = shlex.split(caught.value.hint.partition("or add ")[2])
        check_origin(load_with_origin("quickstart", [*words, *typed]))


@pytest.mark.parametrize("named", NAMED_BY)
def test_weights_without_a_tokenizer_train_none(named: str, tmp_path: Path) -> None:
    place = write_model(tmp_path / "weights")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (place / name).unlink()
    with pytest.raises(ConfigError, match="has no tokenizer") as caught:
        load_with_origin("quickstart", NAMED_BY[named](place))
    assert "tokenizer.path=" in caught.value.hint
    load_with_origin("quickstart", [*NAMED_BY[named](place), "tokenizer.kind=byte"])


@pytest.mark.parametrize("named", [*NAMED_BY, "--from-weights"])
def test_data_commands_see_the_tokenizer_and_the_cache_of_train(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_text(tmp_path / "text")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.yaml"
    sources = [{"name": "text", "format": "jsonl", "paths": [str(text)]}]
    file.write_text(json.dumps({"preset": "quickstart", "data": {"sources": sources, "cache": {"directory": "cache"}}}))
    place = write_model(tmp_path / "weights")
    words = [str(file), *([named, str(place)] if named == "--from-weights" else NAMED_BY[named](place))]
    parsed = parse_arguments(words, options=(), max_positional=1)
    trained = choose_run(parsed, "auto", None, is_quiet=True).config
    assert load_for_data(words, ()) == trained
    assert main(["data", "build", *words]) == 0
    assert not (tmp_path / "cache" / "tokenizers").exists(), "nothing is trained"
    capsys.readouterr()
    corpus = prepare(trained, build=False)
    assert corpus.tokenizer.fingerprint == BYTE.fingerprint
    built = sorted(path.parent for path in (tmp_path / "cache").rglob("RECIPE.json"))
    opened = [Path(source.train.directory).absolute() for source in corpus.sources]
    opened += [Path(reader.directory).absolute() for reader in corpus.validation]
    assert sorted(opened) == built


def test_the_file_that_trained_a_run_starts_another_from_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key of the file was compared with the default of the family, not with itself."""
    use_numpy_engine(monkeypatch)
    text = write_text(tmp_path / "text")
    other = write_text(tmp_path / "other", seed=5)
    file = tmp_path / "mine.yaml"
    settings = {
        "preset": "quickstart",
        "data": {
            "sources": [{"name": "text", "format": "jsonl", "paths": [str(text)]}], "sequence_length_tokens": 16,
            "cache": {"directory": str(tmp_path / "cache")}, "validation": {"held_out_fraction": 0.1},
        },
        "tokenizer": {"kind": "bpe", "vocab_size": 280},
        "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2},
        "train": {"num_steps": 2, "global_batch_sequences": 2, "micro_batch_sequences": 2},
        "eval": {"at_end": False},
        "run": {"directory": str(tmp_path / "runs")},
    }  # fmt: skip
    file.write_text(json.dumps(settings))
    first = train(load_with_origin(file, ["run.name=a"])).run_directory
    for words in ([], [f"data.sources.0.paths=[{other}]"]):
        config = load_with_origin(file, ["run.name=b", f"train.from_weights={first}", *words])
        assert config.model.num_kv_heads == 2
        assert config.tokenizer.path == str((first / "tokenizer").absolute())
        check_origin(config)
    with pytest.raises(ConfigError) as caught:
        load_with_origin(file, [f"train.from_weights={first}", "model.num_kv_heads=1", "model.num_layers=3"])
    assert caught.value.where == "override model.num_layers=3, override model.num_kv_heads=1"
    typed = shlex.split(caught.value.hint.partition("or add ")[2])
    assert load_with_origin(file, [f"train.from_weights={first}", "model.num_kv_heads=1", "model.num_layers=3", *typed])


def foreign_model(directory: Path, model_type: str) -> Path:
    """A directory whose architecture the native decoder does not compute; transformers is not asked here."""
    place = write_model(directory)
    values = {"model_type": model_type, "hidden_size": 32, "max_position_embeddings": 128, "vocab_size": 257}
    (place / "config.json").write_text(json.dumps(values))
    return place


def test_weights_that_the_native_decoder_lacks_go_to_transformers_with_a_note(tmp_path: Path) -> None:
    place = foreign_model(tmp_path / "weights", "gemma2")
    resolved = load_resolved("quickstart", [f"train.from_weights={place}"])
    model = resolved.config.model
    assert (model.kind, model.name_or_path, resolved.config.train.from_weights) == ("huggingface", str(place), None)
    assert resolved.config.tokenizer.path == str(place)
    assert resolved.config.data.sequence_length_tokens == 128, "no row is longer than the model's positions"
    assert resolved.pretrained is not None
    (note,) = resolved.pretrained.notes
    assert "gemma2" in note
    assert "model.kind=huggingface" in note
    assert load_with_origin("quickstart", [f"train.from_weights={place}", "model.kind=huggingface"]).model == model
    with pytest.raises(ConfigError, match="gemma2") as caught:
        load_with_origin("quickstart", [f"train.from_weights={place}", "model.kind=decoder"])
    assert caught.value.hint == "add model.kind=huggingface"
    with pytest.raises(ConfigError, match="both name the weights"):
        load_with_origin(
            "quickstart", [f"train.from_weights={place}", "model.kind=huggingface", f"model.name_or_path={place}"]
        )
    with pytest.raises(ConfigError, match="pretrained=false contradicts"):
        load_with_origin(
            "quickstart", [f"train.from_weights={place}", "model.kind=huggingface", "model.pretrained=false"]
        )


def test_an_adapter_starts_from_the_weights_that_a_file_describes(tmp_path: Path) -> None:
    """The file that trained a native run also trains an adapter of it; what it contradicts is refused."""
    place, file = write_model(tmp_path / "weights"), tmp_path / "mine.yaml"
    sizes = {"num_layers": 3, "hidden_size": 32, "num_heads": 4}
    file.write_text(json.dumps({"preset": "quickstart", "model": sizes}))
    config = load_with_origin(file, [f"train.from_weights={place}", "adapter.kind=lora"])
    assert (config.model.kind, config.model.name_or_path) == ("huggingface", str(place))
    whole = {"preset": "quickstart", "model": sizes, "train": {"from_weights": str(place)}, "adapter": {"kind": "lora"}}
    file.write_text(json.dumps(whole))
    assert load_with_origin(file).model == config.model
    with pytest.raises(ConfigError, match=r"have model\.num_layers=3, not model\.num_layers=2") as caught:
        load_with_origin(file, ["model.num_layers=2"])
    assert caught.value.where == "override model.num_layers=2"


@pytest.mark.parametrize("first", ["file", "command line"])
def test_of_two_names_for_the_weights_the_later_one_counts(first: str, tmp_path: Path) -> None:
    one, two = foreign_model(tmp_path / "one", "gemma2"), foreign_model(tmp_path / "two", "mamba2")
    file = tmp_path / "mine.yaml"
    model = {"kind": "huggingface", "name_or_path": str(one), "pretrained": False}
    file.write_text(json.dumps({"preset": "quickstart", "model": model}))
    words = [] if first == "file" else [f"train.from_weights={two}"]
    config = load_with_origin(file, words)
    assert config.model.name_or_path == str(one if first == "file" else two)
    assert config.model.pretrained == (first != "file")
    assert config.train.from_weights is None


@pytest.mark.hf
@pytest.mark.torch
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_tokens_without_room_are_refused_with_the_settings_that_add_rows(adapter: str, tmp_path: Path) -> None:
    """What the error says to type has a row for each token; a tokenizer of transformers is the oracle."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    size = len(base_models.write(tmp_path / "base", "llama3")) + 2
    added = "tokenizer.special_tokens=['<a>', '<b>']"
    words = [f"train.from_weights={tmp_path / 'base'}", added, "backend=torch"]
    config = load_with_origin("quickstart", [*words, f"adapter.kind={adapter}"])
    with pytest.raises(ConfigError, match=f"{size} tokens.* {size - 2} rows") as refusal:
        check_origin(config) if adapter == "none" else resolve_model(config, size)
    assert refusal.value.hint.endswith("or remove tokenizer.special_tokens=['<a>', '<b>']")
    typed = re.findall(r"\b(?:model|adapter)\.\w+=\w+", refusal.value.hint)
    config = load_with_origin("quickstart", [*words, f"adapter.kind={adapter}", *typed])
    check_origin(config)
    assert resolve_model(config, size).vocab_size == size


@pytest.mark.hf
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("room", [0, 20])
@pytest.mark.parametrize("kind", ["lora", "dora", "qlora"])
def test_an_adapter_refuses_tokens_that_are_new_to_its_base(kind: str, room: int, tmp_path: Path) -> None:
    """peft has no trained parameter for their rows: nothing would train them, also where the embedding has room."""
    peft = pytest.importorskip("peft")
    place = write_pretrained(tmp_path / "base", "llama", vocab_size=VOCAB + room)
    module, tokenizer = reference(place)
    wrapped = peft.get_peft_model(module, peft.LoraConfig(target_modules="all-linear"))
    assert not any("embed" in name for name, part in wrapped.named_parameters() if part.requires_grad)
    assert len(tokenizer) == VOCAB
    assert tokenizer.convert_tokens_to_ids("<|end|>") is not None
    words = [f"train.from_weights={place}", f"adapter.kind={kind}", "backend=torch"]
    added = "tokenizer.special_tokens=['<|end|>', '<new>', '<other>']"
    for words_of_base in (words, [*words, f"tokenizer.path={place}", "tokenizer.kind=huggingface"]):
        config = load_with_origin("quickstart", [*words_of_base, added])
        with pytest.raises(ConfigError, match=rf"adapter.kind={kind} .* tokens <new>, <other> are new to") as refusal:
            check_origin(config)
        assert refusal.value.where == "tokenizer.special_tokens"
        full, fewer = refusal.value.hint.split("; or use the tokens that the base knows: ")
        for typed in (full.partition(", add ")[2], fewer):
            remedied = load_with_origin("quickstart", [*words_of_base, added, *shlex.split(typed)])
            check_origin(remedied)
            size = VOCAB + 2 * (remedied.tokenizer.special_tokens != ("<|end|>",))
            assert resolve_model(remedied, size).vocab_size >= size
    check_origin(load_with_origin("quickstart", [*words, "tokenizer.special_tokens=['<|end|>']"]))
    check_origin(load_with_origin("quickstart", [*words, "tokenizer.special_tokens=[]"]))


@pytest.mark.hf
@pytest.mark.torch
def test_another_tokenizer_with_tokens_that_are_new_is_refused_under_an_adapter(tmp_path: Path) -> None:
    import transformers

    place = write_pretrained(tmp_path / "base", "llama", vocab_size=VOCAB + 20)
    larger: Any = transformers.AutoTokenizer.from_pretrained(place)
    larger.add_special_tokens({"additional_special_tokens": ["<new>"]})
    larger.save_pretrained(tmp_path / "larger")
    words = [f"train.from_weights={place}", "backend=torch", f"tokenizer.path={tmp_path / 'larger'}"]
    check_origin(load_with_origin("quickstart", words))
    with pytest.raises(ConfigError, match="tokens <new> are new") as refusal:
        check_origin(load_with_origin("quickstart", [*words, "adapter.kind=lora"]))
    typed = shlex.split(refusal.value.hint.partition("the base knows: ")[2])
    check_origin(load_with_origin("quickstart", [*words, "adapter.kind=lora", *typed]))


def test_weights_that_lack_a_tensor_are_named_with_their_place(tmp_path: Path) -> None:
    place = write_model(tmp_path / "weights")
    entries = [entry for entry in huggingface_entries(SPEC) if "ln_f" not in entry.name]
    with (place / "model.safetensors").open("wb") as file:
        write_weights(file, entries, ((entry.name, np.zeros(entry.shape, np.float32)) for entry in entries))
    config = load_with_origin("quickstart", [f"train.from_weights={place}"])
    with open_weights(config, SPEC) as weights, pytest.raises(CheckpointError, match=r"ln_f.* is missing \(2") as found:
        list(weights)
    assert found.value.where == str(place)
    assert "config.json describes another model" in found.value.hint
