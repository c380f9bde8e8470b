"""Starting weights by their files alone: adopted where the configuration is silent, refused where it differs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servers.hub import model_hub
from tiny_runs import configuration, use_numpy_engine, write_text
from vorox.cli import main
from vorox.core.config import flat_values, load_config
from vorox.core.engine import NamedArray
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.schema import RunConfig
from vorox.core.schema.model import ModelConfig
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.core.staged_directory import StagedDirectory
from vorox.data.tokenizers import loading as tokenizers
from vorox.models.decoder_spec import DecoderSpec, decoder_spec
from vorox.models.huggingface_config import huggingface_files, spec_from_huggingface
from vorox.models.huggingface_weights import huggingface_entries, to_huggingface
from vorox.models.weights_file import write_weights
from vorox.run import train
from vorox.training.checkpoints import weights_source
from vorox.training.checkpoints.init_from import init_from_weights
from vorox.training.checkpoints.weights_source import WeightsDescription, check_weights, load_config_with_weights

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
    config = load_config_with_weights("quickstart", [f"train.from_weights={place}"])
    found = decoder_spec(config.model, tokenizer_vocab_size=BYTE.vocab_size, sequence_length_tokens=128)
    assert found == SPEC
    assert config.model.family == "gpt2"
    assert config.tokenizer.kind == "huggingface"
    assert tokenizers.load(str(config.tokenizer.path)).fingerprint == BYTE.fingerprint
    assert config.data.sequence_length_tokens == 128, "no row is longer than the model's positions"
    check_weights(config, tokenizer=BYTE)


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
    adopted = load_config_with_weights("quickstart", [f"train.from_weights={place}"])
    assert decoder_spec(adopted.model, tokenizer_vocab_size=2, sequence_length_tokens=2) == spec
    assert adopted.model.family == family
    assert settings.items() <= flat_values(adopted).items()
    check_weights(adopted, tokenizer=BYTE)
    again = load_config(dict_of(adopted))
    check_weights(again, tokenizer=BYTE)
    for key, value in settings.items():
        if isinstance(value, float | int) and not isinstance(value, bool):
            with pytest.raises(ConfigError, match=key.removeprefix("model.")):
                load_config_with_weights("quickstart", [f"train.from_weights={place}", f"{key}={value * 2}"])
            with pytest.raises(ConfigError, match=key.removeprefix("model.")):
                check_weights(load_config(dict_of(adopted), [f"{key}={value * 2}"]), tokenizer=BYTE)


def dict_of(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def test_what_the_user_sets_is_kept_where_it_agrees_and_refused_where_not(tmp_path: Path) -> None:
    place = f"train.from_weights={write_model(tmp_path / 'weights')}"
    kept = load_config_with_weights(
        "quickstart", [place, "model.num_layers=3", "model.dropout_fraction=0.1", "tokenizer.kind=byte"]
    )
    assert (kept.model.dropout_fraction, kept.tokenizer.kind, kept.tokenizer.path) == (0.1, "byte", None)
    for setting in ("model.num_layers=4", "model.preset=gpt2-124m"):
        with pytest.raises(ConfigError) as caught:
            load_config_with_weights("quickstart", [place, setting])
        assert caught.value.exit_code == 2
        assert "model.num_layers" in caught.value.what + caught.value.hint
        assert setting in caught.value.where
    file = tmp_path / "mine.yaml"
    file.write_text(
        f"preset: quickstart\ntrain: {{from_weights: {tmp_path / 'weights'}}}\nmodel: {{hidden_size: 48}}\n"
    )
    with pytest.raises(ConfigError, match="hidden_size") as caught:
        load_config_with_weights(file)
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
        train(load_config_with_weights("quickstart", words))
    assert caught.value.where == "tokenizer"
    assert main(["train", "--dry-run", *words]) == 2
    assert "another tokenizer" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text", "weights"], "nothing was built or written"


def test_a_vocabulary_that_training_cannot_reach_is_refused(tmp_path: Path) -> None:
    weights = WeightsDescription("weights", replace(SPEC, vocab_size=1024), {})
    config = load_config("quickstart", ["tokenizer.kind=bpe", "tokenizer.vocab_size=512"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights_source, "describe_weights", lambda config: weights)
        patch.setattr(weights_source, "require_equal_models", lambda *arguments, **named: None)
        with pytest.raises(ConfigError, match="1,024") as caught:
            check_weights(config)
        assert caught.value.where == "tokenizer.vocab_size"
        check_weights(load_config("quickstart", ["tokenizer.kind=bpe", "tokenizer.vocab_size=1024"]))


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
        check_weights(load_config("quickstart", [f"train.from_weights={place}"]))


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
        config = load_config_with_weights("quickstart", [f"train.from_weights=hf://owner/model@{first}"])
        assert config.train.from_weights == f"hf://owner/model@{first}"
        assert (config.tokenizer.path, config.tokenizer.revision) == ("owner/model", first)
        assert config.model.num_layers == 3
        assert not any("safetensors" in request.path for request in hub.log.requests), "the description suffices"
        with pytest.raises(ConfigError, match="another tokenizer") as caught:
            check_weights(
                load_config_with_weights(
                    "quickstart",
                    [
                        f"train.from_weights=hf://owner/model@{first}",
                        "tokenizer.kind=byte",
                        "tokenizer.end_of_text=<stop>",
                    ],
                )
            )
        assert f"tokenizer.revision={first}" in caught.value.hint
        assert not any("safetensors" in request.path for request in hub.log.requests), "the tokenizer suffices"
        with pytest.raises(ConfigError, match="model_type"):
            load_config_with_weights("quickstart", ["train.from_weights=hf://owner/model"])
        engine: Any = WeightsTaker()
        started = init_from_weights(config, SPEC, engine)
        assert started == {"from_weights": f"hf://owner/model@{first}", "fingerprint": "taken"}
        assert {name: array.shape for name, array in engine.weights.items()} == {
            part.name: part.shape for part in SPEC.parameters
        }
