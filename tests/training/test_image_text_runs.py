"""Runs of Qwen-VL models on pictures: kill and resume, replay, generation, export, and what is refused."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from image_text_models import image_configuration, image_settings
from pictures import picture
from tiny_runs import Killed
from vorox.api.model import load_model
from vorox.cli import main
from vorox.core.batch import Batch
from vorox.core.errors import ConfigError, DataError
from vorox.data.corpus.corpus import prepare
from vorox.records.replay_chain import read_chain
from vorox.run import train

pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.hf]


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_bits_generates_and_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = image_configuration(tmp_path)
    straight = train(config, argv=["test"])
    from vorox.backends.torch_engine.engine import TorchEngine

    original = TorchEngine.train_step

    def killed_at_step_7(self: Any, batch: Batch, **arguments: float | None) -> Any:
        if batch.step == 6:
            raise Killed
        return original(self, batch, **arguments)

    other = image_configuration(tmp_path, [f"run.directory={tmp_path}/others"])
    with monkeypatch.context() as patch:
        patch.setattr(TorchEngine, "train_step", killed_at_step_7)
        with pytest.raises(Killed):
            train(other, argv=["test"])
    resumed = train(other, argv=["test"])
    assert resumed.start_step == 4
    assert resumed.fingerprint == straight.fingerprint
    chains = [[entry.chain for entry in read_chain(run.run_directory).values()] for run in (straight, resumed)]
    assert len(chains[0]) == 12
    assert chains[0] == chains[1]

    model = load_model(straight.run_directory)
    texts = {
        colour: model.generate("No. 7: <image> is", num_tokens=8, temperature=0, images=[picture(colour, 1, (30, 50))])
        for colour in ("red", "blue")
    }
    assert all(isinstance(text, str) for text in texts.values())
    (tmp_path / "one.png").write_bytes(picture("red", 1, (30, 50)))
    run = str(straight.run_directory)
    arguments = ["-p", "No. 7: <image> is", "--image", str(tmp_path / "one.png"), "--tokens", "8", "--temperature", "0"]
    assert main(["generate", run, *arguments]) == 0
    assert texts["red"] in capsys.readouterr().out
    assert main(["export", run, "--to", "hf", "--output", str(tmp_path / "exported"), "--check"]) == 0
    assert "AutoModelForImageTextToText" in capsys.readouterr().out
    processor = json.loads((tmp_path / "exported/preprocessor_config.json").read_bytes())
    assert processor["size"] == {"shortest_edge": 256, "longest_edge": 1024}
    again = image_configuration(tmp_path, [f"model.name_or_path={tmp_path}/exported"])
    assert again.model.image_processor == config.model.image_processor


@pytest.mark.slow
@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft calls it
@pytest.mark.parametrize("kind", ["lora", "dora", "qlora"])
def test_an_adapter_replays_generates_from_an_image_and_is_exported(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = image_configuration(tmp_path, [f"adapter.kind={kind}", "train.num_steps=6", "optimizer.lr=0.01"])
    run = str(train(config, argv=["test"]).run_directory)
    assert main(["replay", run, "--from", "2", "--to", "6"]) == 0
    (tmp_path / "one.png").write_bytes(picture("red", 1, (30, 50)))
    prompt = ["-p", "No. 7: <image> is", "--image", str(tmp_path / "one.png"), "--tokens", "8", "--temperature", "0"]
    capsys.readouterr()
    assert main(["generate", run, *prompt]) == 0
    said = capsys.readouterr().out
    assert main(["export", run, "--to", "peft", "--output", "adapter", "--check"]) == 0
    assert main(["export", run, "--to", "hf", "--output", "merged", "--check"]) == 0
    assert (tmp_path / "merged/preprocessor_config.json").exists()
    capsys.readouterr()
    images = [picture("red", 1, (30, 50))]
    model = load_model(run)
    text = model.generate("No. 7: <image> is", num_tokens=8, temperature=0, images=images)
    shown = "".join(sign if sign.isprintable() else "\ufffd" for sign in text)  # as a terminal gets it
    assert shown in said


def test_limits_of_pixels_are_the_users_and_build_another_cache(tmp_path: Path) -> None:
    found = [prepare(image_configuration(tmp_path, text)) for text in ([], ["model.image_processor.max_pixels=512"])]
    recipes = [corpus.sources[0].train.recipe for corpus in found]
    assert [recipe.to_json()["images"]["grid"]["max_pixels"] for recipe in recipes] == [1024, 512]
    assert recipes[0].digest != recipes[1].digest
    tokens = [corpus.sources[0].train_report.tokens for corpus in found]
    assert tokens[0] > tokens[1]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.packing=concat", "data.packing=best_fit"),
        ("data.mode=streaming", "data.mode=cached"),
        ("parallel.tensor_parallel_size=2", "replicas and FSDP2 are supported"),
        ("adapter.kind=lora parallel.fsdp_size=2", "replicas are supported"),
        ("model.image_processor.max_pixels=200", "max_pixels"),
        ("model.image_processor.min_pixels=100", "at least 256"),
        ("model.image_processor.merge_size=1", "remove the setting"),
        ("data.sequence_length_tokens=6", "data.sequence_length_tokens"),
        ("data.sources.0.images_field=null", ""),
    ],
)
def test_contradictions_name_the_setting(tmp_path: Path, override: str, named: str) -> None:
    if not named:
        override, extra = "model.image_processor.max_pixels=512", [override]
        with pytest.raises(ConfigError, match="no source has images_field"):
            image_configuration(tmp_path, [override, *extra])
        return
    with pytest.raises(ConfigError) as caught:
        image_configuration(tmp_path, override.split())
    assert named in f"{caught.value} {caught.value.hint}"


def test_images_with_a_model_that_reads_text_and_bad_images_are_refused(tmp_path: Path) -> None:
    settings = image_settings(tmp_path)
    model = Path(settings["model"]["name_or_path"])
    values = json.loads((model / "config.json").read_bytes())
    (model / "config.json").write_text(json.dumps(values | {"model_type": "llama"}))
    with pytest.raises(ConfigError, match="a llama model reads text only"):
        image_configuration(tmp_path)
    (model / "config.json").write_text(json.dumps(values))
    pictures = tmp_path / "text/pictures"
    for file in pictures.iterdir():
        file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(DataError, match="cannot be decoded"):
        prepare(image_configuration(tmp_path))


def test_a_document_whose_images_do_not_fit_into_a_row_names_the_settings(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="more than the 25 of a row: increase"):
        prepare(image_configuration(tmp_path, ["data.sequence_length_tokens=24"]))
