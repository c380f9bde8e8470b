"""The page on migration is true: each row's command runs, and each setting means the same as the option it replaces."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from vorox.cli import main
from vorox.core.config import flat_values, load_config
from vorox.core.config.yaml.reader import read_value

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
ROWS = [
    tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| original")
]
CODES = {row[1]: match[1] for row in ROWS if (match := re.fullmatch(r"`(.*)`", row[1]))}
COMMANDS = sorted({code for code in CODES.values() if code.startswith("vorox ")})
SETTINGS = sorted({code for code in CODES.values() if not code.startswith("vorox ")})
OPTIONS = [
    (option[1], code[1])
    for row in ROWS
    if (option := re.fullmatch(r"`(--.*)`", row[0])) and (code := re.fullmatch(r"`(.*)`", row[1]))
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VOROX_CACHE", "cache")
    for name in ("texts", "fineweb100B"):
        Path(name).mkdir()
    Path("texts/a.txt").write_text("A cat sat on the mat. " * 2000, encoding="utf-8")
    Path("my.yaml").write_text(
        "preset: quickstart\ntokenizer: {kind: byte}\ndata: {sources: [{name: texts, format: txt, paths: [texts/]}]}\n"
    )
    header = (20240520).to_bytes(4, "little") + (1).to_bytes(4, "little") + (4096).to_bytes(4, "little")
    for name in ("train_000001", "val_000000"):
        shard = header + bytes(1024 - len(header)) + bytes(2 * 4096)
        Path(f"fineweb100B/fineweb_{name}.bin").write_bytes(shard)


def test_every_row_is_one_of_the_known_kinds() -> None:
    assert len(ROWS) > 50
    for row in ROWS:
        assert row[1].startswith("[") or row[1] in CODES, row
    assert len(OPTIONS) >= 14


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_are_accepted(setting: str) -> None:
    shards = "format: bin" in setting
    needed = ["train.num_epochs=1"] if "epoch_dataset_fraction" in setting else []
    size = ["model.hidden_size=1536", "model.num_heads=24"] if "num_heads" in setting else []
    rows = ["train.global_batch_sequences=48"] if "micro_batch" in setting else []
    if "data_parallel" in setting or "pipeline" in setting:
        rows = ["train.micro_batch_sequences=4"]
    settings = [setting] if "[" in setting else setting.split()
    config = load_config("gpt2-shards" if shards else "quickstart", [*needed, *size, *rows, *settings])
    for key, _, value in (one.partition("=") for one in settings):
        if not value.startswith("["):
            assert flat_values(config)[key] == read_value(value, "value")


def test_a_warm_up_by_ratio_has_the_steps_of_transformers() -> None:
    """transformers takes the ratio of all steps of the run, not of an epoch."""
    arguments = pytest.importorskip("transformers").TrainingArguments
    rows = [(match[1], row[1], row[2]) for row in ROWS if (match := re.match(r"`warmup_ratio\W+([0-9.]+)`", row[0]))]
    assert len(rows) == 2
    for ratio, setting, note in rows:
        steps = int(note.partition("here of ")[2].partition(";")[0].replace(",", ""))
        expected = arguments(output_dir=".", warmup_steps=float(ratio), report_to=[]).get_warmup_steps(steps)
        assert setting == f"`schedule.warmup_steps={expected}`"


@pytest.mark.parametrize(("option", "setting"), OPTIONS)
def test_an_option_means_the_setting_beside_it(option: str, setting: str) -> None:
    assert flat_values(load_config("gpt2-shards", [option])) == flat_values(load_config("gpt2-shards", [setting]))


@pytest.mark.parametrize("blank", [False, True])
def test_a_command_line_of_options_only_starts_from_the_shapes_of_gpt2(
    blank: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        "--model.n_layer=12 --model.n_head=12 --model.n_embd=768 --batch_size=4 --num_tokens=8192 --save_dir=./saved"
    )
    words = shlex.split(options.replace("=", " ") if blank else options)
    assert main(["train", *words, "--data_dir", "fineweb100B", "--dry-run"]) == 0, capsys.readouterr().err
    output = capsys.readouterr().out
    assert "gpt2-shards" in output
    assert max(len(line.replace(str(Path.cwd()), ".")) for line in output.splitlines()) < 120
    assert "124,4" in output, "124 million parameters with a vocabulary of 50,304"
    assert not Path("saved").exists()


def test_a_folder_of_shards_is_recognised(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--data", "fineweb100B", "--dry-run"]) == 0, capsys.readouterr().err
    assert main(["train", "fineweb100B"]) == 2
    assert "vorox train --data fineweb100B" in capsys.readouterr().err
