"""Slips on the command line: each is understood, or answered with the exit code and the words that help."""

from __future__ import annotations

from pathlib import Path

import pytest

from vorox.cli import main

CONFIGURATION = """
model: {num_layers: 1, hidden_size: 32, num_heads: 2}
data: {sources: [{name: t, format: txt, paths: [t.txt]}], sequence_length_tokens: 32}
tokenizer: {kind: byte}
train: {num_steps: 5, global_batch_sequences: 4, micro_batch_sequences: 4}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VOROX_CACHE", str(tmp_path / "cache"))
    Path("tiny.yaml").write_text(CONFIGURATION, encoding="utf-8")
    Path("t.txt").write_text("A cat sat on the mat. " * 500, encoding="utf-8")
    for name in ("twice.txt", "more.txt"):
        Path(name).write_text("A dog sat on the log. " * 500, encoding="utf-8")
    Path("tabs.yaml").write_text("train:\n\tnum_steps: 3\n", encoding="utf-8")
    Path("cfg.toml").write_text("[train]\nnum_steps = 3\n", encoding="utf-8")
    Path("indent.yaml").write_text("train:\n  num_steps: 3\n   num_tokens: 3\n", encoding="utf-8")
    Path("twice.yaml").write_text(CONFIGURATION + "train: {num_steps: 6}\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--learning_rate=3e-4", "lr: 0.0003"),
        ("--learning_rate 3e-4", "lr: 0.0003"),
        ("--lr 1e-3", "lr: 0.001"),
        ("--bs 16", "global_batch_sequences: 16"),
        ("--batch_size 2", "micro_batch_sequences: 2"),
        ("--epochs 3", "num_epochs: 3.0"),
        ("--steps 10", "num_steps: 10"),
        ("--max_steps=10", "num_steps: 10"),
        ("--device cuda", "device: cuda"),
        ("--seed 7", "seed: 7"),
        ("train.num_steps=1e3", "num_steps: 1000"),
        ("runtime.compile=True", "compile: true"),
    ],
)
def test_common_names_are_understood(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--config", "tiny.yaml", *words.split()]) == 0
    assert f" {line}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("train t.txt", "vorox train --data t.txt"),
        ("data stats t.txt", "vorox train --data t.txt"),
        ("train --data=", "--data is empty"),
        ("train --from-weights= quickstart", "--from-weights is empty"),
        ("train --data t.txt data.sources.0.nme=x", "did you mean data.sources.0.name?"),
        ("train --data t.txt data.sources.0.encoding=foo", "is no encoding of text that Python knows"),
        ("train --data t.txt data.sources.0.format=cvs", "did you mean csv?"),
        ("train --data t.txt data.sources.0.max_record_bytes=1GB", "data.sources.0.max_record_bytes="),
        ("train --data t.txt twice.txt more.txt", "write --data t.txt --data twice.txt --data more.txt, or quote the"),
        ("data show tiny.yaml", "use `vorox data stats CONFIG`"),
        ("data rows tiny.yaml", "use `vorox data peek CONFIG`"),
        ("data where latest --by loss", "use `vorox data losses RUN`"),
        ("eval latest --data held-out.txt", "use `vorox eval RUN --tasks TASK.yaml` with a task that reads the file"),
        ("data losses latest --from 20", "use `vorox data losses RUN --steps A:B`"),
        ("data where latest --from 20", "use `vorox data where RUN --step STEP, or"),
        ("launch k8s tiny.yaml", "use `vorox launch kubernetes`"),
        ("k8s", "use `vorox launch kubernetes`"),
        ("data export tiny.yaml", "Missing option '--to'. Choose from: bin, mds, npy"),
        ("data export tiny.yaml --to out", "Invalid value for '--to': 'out' is not one of 'bin', 'mds', 'npy'"),
        ("plan nope", "name a YAML file or a preset: a100"),
        ("train tiny.yaml optimizer.lr = 1e-3", "optimizer.lr=1e-3"),
        ("train tiny.yaml optimizer.lr= 1e-3", "optimizer.lr=1e-3"),
        ("train tiny.yaml optimizer.lr =1e-3", "optimizer.lr=1e-3"),
        ("train tiny.yaml more words", "section.key=VALUE"),
        ("train tiny.yaml --stepz 3", "--steps"),
        ("train tiny.yaml --qqqq 3", "--section.key=VALUE"),
        ("train tiny.yaml --bogus 3", "--section.key=VALUE"),
        ("train tiny.yaml --gpus 8", "--nproc"),
        ("plan tiny.yaml --gpus 8", "--hardware"),
        ("train tiny.yaml --use_lora", "adapter.kind=lora"),
        ("train tiny.yaml adapter=lora", "adapter.kind=lora"),
        ("train tiny.yaml optimizer=muon", "optimizer.name=muon"),
        ("train tiny.yaml schedule=3", "schedule.KEY=3"),
        ("config explain nothing", "sections: model, "),
        ("config explain optimizer.lrr", "did you mean optimizer.lr"),
        ("train tiny.yaml optimizer.clip_norm=None", "optimizer.clip_norm=null"),
        ("train tiny.yaml runtime.device=gpu", "cuda"),
        ("train tiny.yaml data.sources.0.format=md", "format=txt"),
        ("train tiny.yaml data.sources.0.format=sharegpt", "chat_fields=[messages]"),
        ("train tiny.yaml --minutes 2x", "--minutes=2"),
        ("train tabs.yaml", "indent with blanks"),
        ("train cfg.toml", "`train:`"),
        ("train indent.yaml", "indent all keys of a section equally"),
        ("train twice.yaml", "duplicate key train"),
        ("generate latest -p hi", "vorox train quickstart"),
        ("generate latest hi there", "vorox train quickstart"),
        ("replay tiny-llama", "--root"),
    ],
)
def test_slips_are_answered_with_what_to_write(command: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    assert answer in said
    assert "[redacted]" not in said


def test_the_folder_that_was_looked_in_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "show", "latest"]) == 2
    assert str(tmp_path / "runs") in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["-h"], ["--help"], ["help"], ["train", "-h"], ["help", "train"], ["help", "data", "build"]]
)
def test_help_has_many_names(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert (
        f"Usage: vorox {' '.join(word for word in words if word[0] != '-' and word != 'help')}"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("command", "what", "remedy"),
    [
        ("dashbord", "No such command 'dashbord'", "`vorox dash`"),
        ("resume", "No such command 'resume'", "`vorox train --resume latest`"),
        ("frobnicate", "No such command 'frobnicate'", "`vorox --help`"),
        ("runs shw", "No such command 'shw'", "`vorox runs show`"),
        ("help trainn", "No such command 'trainn'", "`vorox train`"),
        ("generate", "Missing argument 'RUN[@STEP]|MODEL'", "`vorox generate --help`"),
        ("dash --expot x.html", "No such option: --expot", "`vorox dash --export`"),
        ("data where RUN --by loss", "No such option: --by", "`vorox data losses RUN`"),
        ("train --minutes", "Option '--minutes' requires an argument", "`vorox train --help`"),
        ("train --nproc 0", "Invalid value for '--nproc'", "`vorox train --help`"),
    ],
)
def test_a_command_line_that_cannot_be_parsed_has_the_four_lines(
    command: str, what: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    printed = capsys.readouterr()
    first, where, saved, do = printed.err.splitlines()
    assert first.startswith(f"x configuration: {what}")
    assert first.endswith("[exit 2]")
    assert where == f"  where   vorox {command}"
    assert saved == "  saved   -"
    assert do.startswith("  do      ")
    assert remedy in do
    assert printed.out == ""


@pytest.mark.parametrize("words", [[], ["runs"]])
def test_a_group_without_a_command_prints_its_help_only(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert "Commands" in printed.out
    assert printed.err == ""


def test_where_names_the_command_for_documents_by_loss(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "where", "--help"]) == 0
    assert "vorox data losses" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["-V", "--version"])
def test_the_version_has_two_names(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    assert capsys.readouterr().out.startswith("vorox ")


@pytest.mark.parametrize(
    ("variable", "answer"),
    [("VOROX_CACH", "VOROX_CACHE"), ("VOROX_TRAIN_NUM_STEPS", "train.num_steps="), ("VOROX_OTHER_DSN", None)],
)
def test_a_variable_that_is_none_of_ours_is_warned_of(
    variable: str, answer: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "2")
    assert main(["--version"]) == 0
    said = capsys.readouterr().err
    assert (variable in said) == (answer is not None)
    assert answer is None or answer in said


def test_a_checkpoint_is_named_by_its_path_and_a_prompt_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(["train", "tiny.yaml", "--steps", "1", "--device", "cpu", "log.matmul_peak=false"]) == 0
    checkpoint = next(Path("runs").glob("*/checkpoints/step-*"))
    capsys.readouterr()
    assert main(["generate", str(checkpoint), "The cat", "--tokens", "3", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("The cat")
    run = checkpoint.parent.parent.name
    assert main(["data", "sql", run, "select", "count(*)", "from", "consumed"]) == 0
