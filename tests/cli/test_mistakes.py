"""A newcomer's mistakes: each ends with the right exit code and names the key, command or file that helps.

The wording may change; what is named may not. ``None`` names nothing: the command is no mistake and simply works.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import tiny_runs
from vorox.cli import main

pytestmark = pytest.mark.torch


@dataclass(frozen=True)
class Mistake:
    """
    Attributes:
        what: What goes wrong.
        command: Words after ``vorox``; RUN is the directory name of a finished run.
        exit_code: What the process leaves with.
        names: Each must be in what is printed; alternatives are separated by ``|``.
        unnamed: Must not be in it.
    """

    what: str
    command: str
    exit_code: int
    names: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()


def row(what: str, command: str, exit_code: int, *names: str, unnamed: tuple[str, ...] = ()) -> Mistake:
    return Mistake(what, command, exit_code, names, unnamed)


COMMAND_LINE = [
    row("typo in a command", "trian quickstart", 2, "train"),
    row("typo in a preset", "train quikstart", 2, "quickstart"),
    row("restarts of a run without a known length", "train tiny.yaml --minutes 1 --max-restarts 2", 2, "--minutes"),
    row("restarts of a dry run", "train tiny.yaml --dry-run --max-restarts 2", 2, "--max-restarts"),
    row("half the name of a preset", "train gpt2", 2, "gpt2-124m"),
    row("a text as the configuration", "train my.txt", 2, "--data my.txt"),
    row("a jsonl as the configuration", "train a.jsonl", 2, "--data a.jsonl"),
    row("a folder as the configuration", "train txt", 2, "--data txt"),
    row("a YAML that is not there", "train my.yml", 2, "my.yml"),
    row("a text to look at", "data stats my.txt", 2, "--data|data.sources|vorox data build"),
    row("a run to generate from is a YAML", "generate tiny.yaml -p hi", 2, "vorox runs list|latest|tiny-"),
    row("a prompt without -p", "generate latest hello", 0),
    row("an option of another library", "generate latest -p hi --max_new_tokens 10", 2, "--tokens"),
    row("a prompt that is too long", f"generate latest -p {'x' * 300} --tokens 5", 2, "--tokens|shorten"),
    row("more tokens than positions", "generate latest -p The --tokens 100", 2, "--tokens|fewer"),
    row("temperature 0", "generate latest -p The --temperature 0 --tokens 5", 0),
    row("an empty prompt", "generate latest -p '' --tokens 5", 0),
    row("a checkpoint's path", "generate runs/RUN/checkpoints/step-00000005 -p The --tokens 3", 0),
    row("an unknown run", "generate tinny -p hi", 2, "vorox runs list|tiny-"),
    row("replay beyond the end", "replay RUN --from 0 --to 100", 2, "5"),
    row("replay backwards", "replay RUN --from 4 --to 2", 2, "--from", "--to"),
    row("a replay without a range", "replay RUN", 0),
    row("an unknown form of export", "export RUN --to onnx", 2, "gguf"),
    row("an evaluation without tasks", "eval RUN", 2, "--tasks"),
    row("an evaluation of no task", "eval RUN --tasks ,", 2, "--tasks"),
    row("two runs to compare, one named", "runs compare RUN", 2, "OTHER"),
    row("hardware that nobody sells", "plan tiny.yaml --hardware rtx4091", 2, "rtx4090"),
    row(
        "a plan of a model that the hub does not have",
        "plan tiny.yaml backend=torch model.kind=huggingface model.name_or_path=OWNER/NAME",
        4,
        "model.name_or_path",
    ),
    row("fewer devices than shards", "plan tiny.yaml --hardware h200x2 parallel.fsdp_size=4", 3, "parallel.fsdp_size"),
    row("a run's name with a slip", "runs show tiny-lama-1x32", 2, "tiny-"),
    row("removal without anybody to ask", "runs remove RUN", 2, "--yes"),
    row("SQL without quotes", "data sql RUN select 1", 0, "1"),
    row("a step beyond the end", "data where RUN --step 9999", 2, "step"),
    row("a step in no run", "data where nowhere --step 1", 2, "nowhere"),
    row("a document in no run", "data when --source my.txt", 2, "--all-runs"),
    row("a record up to a later step", "runs record RUN --step 9999", 2, "--step"),
    row("a file that the run never read", "data when RUN --source nofile.txt", 2, "nofile.txt"),
    row("an evaluation set that is missing", "data contamination RUN --against nofile.jsonl", 4, "nofile.jsonl"),
    row("too long n-grams", "data contamination RUN --against my.txt --ngram-tokens 9999", 2, "--ngram-tokens"),
    row("the version by its short name", "-V", 0, "vorox 0."),
    row("the version by its long name", "--version", 0, "vorox 0."),
    row("help by its short name", "-h", 0, "train"),
    row("help as a command", "help", 0, "train"),
    row("help on a command", "help train", 0, "--resume"),
    row("short help of a command", "train -h", 0, "--resume"),
    row("no minutes", "train tiny.yaml --minutes 0", 2, "--minutes|minutes"),
    row("negative minutes in a dry run", "train tiny.yaml --minutes -3 --dry-run", 2, "--minutes"),
    row("no minutes in a dry run", "train tiny.yaml --minutes 0 --dry-run", 2, "--minutes"),
    row("minutes in letters", "train tiny.yaml --minutes abc", 2, "--minutes"),
    row("a key without a value", "train tiny.yaml optimizer.lr", 2, "optimizer.lr="),
    row("blanks around =", "train tiny.yaml optimizer.lr = 1e-3", 2, "optimizer.lr=1e-3", unnamed=("[redacted]",)),
]

OPTIONS = [
    row("--learning_rate=", "train tiny.yaml --learning_rate=3e-4 --dry-run", 0),
    row("--learning_rate with a blank", "train tiny.yaml --learning_rate 3e-4 --dry-run", 0),
    row("--lr", "train tiny.yaml --lr 1e-3 --dry-run", 0),
    row("--bs", "train tiny.yaml --bs 16 --dry-run", 0),
    row("--batch_size with a blank", "train tiny.yaml --batch_size 8 --dry-run", 0),
    row("--epochs", "train tiny.yaml --epochs 3 --dry-run", 0),
    row("--max_steps=", "train tiny.yaml --max_steps=10 --dry-run", 0),
    row("--steps", "train tiny.yaml --steps 10 --dry-run", 0),
    row("--config", "train --config tiny.yaml --dry-run", 0),
    row("--device", "train tiny.yaml --device cpu --dry-run", 0),
    row("--seed", "train tiny.yaml --seed 7 --dry-run", 0),
    row("--key value", "train tiny.yaml --optimizer.lr 1e-3 --dry-run", 0),
    row("--vocab_size", "train tiny.yaml --vocab_size 300", 2, "tokenizer.vocab_size="),
    row("--text", "train --text my.txt", 2, "--data"),
    row("-d", "train -d my.txt", 2, "--data"),
    row("--val_data", "train tiny.yaml --val_data my.txt", 2, "data.validation.sources="),
    row("--gpu", "train tiny.yaml --gpu", 2, "runtime.device=cuda"),
    row("--bf16", "train tiny.yaml --bf16", 2, "precision.dtype=bf16"),
    row("--gradient-accumulation-steps", "train tiny.yaml --gradient-accumulation-steps 4", 2, "train.global_batch"),
    row("--wandb", "train tiny.yaml --wandb", 2, "log.wandb=true"),
    row("an option that nobody knows", "train tiny.yaml --frobnicate 3", 2, "--frobnicate"),
    row("a device that is not there", "train tiny.yaml runtime.device=cuda", 2, "runtime.device"),
    row("a device by another name", "train tiny.yaml runtime.device=gpu", 2, "cuda"),
    row("typo in a section", "train tiny.yaml optimzer.lr=1e-3", 2, "optimizer.lr"),
    row("typo in a key", "train tiny.yaml optimizer.lrr=1e-3", 2, "optimizer.lr"),
    row(
        "three typos", "train tiny.yaml optimizer.lrr=1 model.layers=3 train.steps=4", 2, "optimizer.lr", "model.layers"
    ),
    row("a word for a number", "train tiny.yaml model.num_layers=four", 2, "model.num_layers"),
    row("a whole number as 1e3", "train tiny.yaml train.num_steps=1e3 --dry-run", 0),
    row("Python's True", "train tiny.yaml runtime.compile=True --dry-run", 0),
    row("Python's None", "train tiny.yaml optimizer.clip_norm=None --dry-run", 2, "null"),
    row("negative steps", "train tiny.yaml train.num_steps=-5", 2, "train.num_steps"),
    row("steps that round", "train tiny.yaml run.seed=9007199254740993.5", 2, "run.seed"),
    row("half a character", r"""train tiny.yaml 'eval.prompts=["\ud83d"]'""", 2, "eval.prompts"),
    row(
        "a batch that does not divide",
        "train tiny.yaml train.global_batch_sequences=10 train.micro_batch_sequences=4",
        2,
        "train.global_batch_sequences",
        "train.micro_batch_sequences",
    ),
    row("heads that do not divide", "train tiny.yaml model.num_heads=5", 2, "model.num_heads", "model.hidden_size"),
    row(
        "a model beyond the memory",
        "train tiny.yaml model.hidden_size=65536 model.num_heads=64 model.num_layers=100",
        3,
        "model.",
        unnamed=("alloc_cpu", "micro_batch"),
    ),
    row(
        "rows of four million tokens, dry",
        "train tiny.yaml data.sequence_length_tokens=4000000 --dry-run",
        3,
        "data.sequence_length_tokens=",
        "16,000,000 tokens per step|8,000,000 tokens per step",
    ),
    row(
        "rows of four million tokens",
        "train tiny.yaml data.sequence_length_tokens=4000000",
        3,
        "data.sequence_length_tokens=",
    ),
    row("a vocabulary that is too small", "train tiny.yaml model.vocab_size=100", 2, "model.vocab_size"),
    row(
        "a vocabulary beyond the text",
        "train tiny.yaml tokenizer.kind=bpe tokenizer.vocab_size=4000",
        0,
        "not tokenizer.vocab_size=4,000|tokenizer.vocab_size=4000",
    ),
    row("an unknown family", "train tiny.yaml model.family=falcon", 2, "llama"),
    row("typo in a size", "train tiny.yaml model.preset=gpt2-124", 2, "gpt2-124m"),
    row("fp16 on a CPU", "train tiny.yaml precision.dtype=fp16", 0),
    row("bf16 by its long name", "train tiny.yaml precision.dtype=bfloat16 --dry-run", 2, "bf16"),
    row(
        "two devices in one process of torch",
        "train tiny.yaml parallel.fsdp_size=2 train.micro_batch_sequences=2",
        2,
        "--nproc 2",
    ),
    row("steps and epochs", "train tiny.yaml train.num_epochs=3 --dry-run", 0),
    row("epochs alone", "train tiny.yaml train.num_steps=null train.num_epochs=1 --dry-run", 0),
    row("a warm-up beyond the end", "train tiny.yaml schedule.warmup_steps=100 --dry-run", 0),
    row(
        "a learning rate beyond reason",
        "train tiny.yaml optimizer.lr=1e6 optimizer.clip_norm=null train.num_steps=30",
        7,
        "optimizer.lr",
    ),
]

FILES = [
    row("tabs in YAML", "train tabs.yaml", 2, "tab", unnamed=("token",)),
    row("JSON", "train cfg.json --dry-run", 0),
    row("TOML", "train cfg.toml", 2, "TOML|YAML", unnamed=("<document start>",)),
    row("an empty YAML", "train empty.yaml", 2, "train.num_steps", "data.sources"),
    row("wrong indentation", "train ind.yaml", 2, "ind.yaml:3"),
    row("keys of nanoGPT in YAML", "train flat.yaml", 2, "data.sources", "train.num_steps"),
    row("a key twice", "train dup.yaml", 2, "twice|more than once|duplicate|two times"),
    row("BOM and CRLF", "train crlf.yaml --dry-run", 0),
    row("blanks and umlauts in paths", "train 'mein korpus/übung 1.yaml' --dry-run", 0),
    row("a Python file", "train config.py --dry-run", 0),
    row("a Python file with an error", "train broken.py", 2, "broken.py"),
    row("slash in --name", "train tiny.yaml --name a/b --dry-run", 0),
    row("blanks in --name", "train tiny.yaml --name 'my first run' --dry-run", 0),
    row("--name ..", "train tiny.yaml --name .. --dry-run", 0),
]

DATA = [
    row("a path that is not there", "train tiny.yaml data.sources.0.paths=[nothere/]", 4, "nothere"),
    row(
        "a folder without files",
        "train tiny.yaml data.sources.0.paths=[emptydir/]",
        4,
        "emptydir",
        unnamed=("every file has 0 bytes",),
    ),
    row("an empty file", "train tiny.yaml data.sources.0.paths=[empty.txt]", 4, "data.sources.0.paths"),
    row("one short file", "train tiny.yaml data.sources.0.paths=[one.txt]", 0),
    row("a path without brackets", "train tiny.yaml data.sources.0.paths=txt/", 2, "data.sources.0.paths=[txt/]"),
    row("a path for sources", "train tiny.yaml data.sources=txt/", 2, "--data txt/"),
    row(
        "a glob without brackets",
        "train tiny.yaml 'data.sources.0.paths=txt/*.txt'",
        2,
        'data.sources.0.paths=["txt/*.txt"]',
    ),
    row("nothing held out", "train tiny.yaml data.validation.held_out_fraction=0 --dry-run", 0),
    row("a program as text", "train tiny.yaml data.sources.0.paths=[b.txt]", 4, "b.txt"),
    row("UTF-16", "train tiny.yaml data.sources.0.paths=[u16.txt]", 4, "UTF-8"),
    row("Latin-1", "train tiny.yaml data.sources.0.paths=[l1.txt]", 4, "UTF-8"),
    row("an archive as text", "train tiny.yaml data.sources.0.paths=[archive.zip] data.sources.0.format=txt", 4, "zip"),
    row("the wrong format", "train tiny.yaml data.sources.0.format=jsonl", 4, "data.sources.0.format=txt"),
    row(
        "the wrong format of a source that validates",
        "train tiny.yaml 'data.validation.sources=[{name: v, format: csv, paths: [txt/]}]'",
        4,
        "data.validation.sources.0.format=txt",
        unnamed=("set data.sources.0",),
    ),
    row(
        "the wrong field of jsonl",
        "train tiny.yaml data.sources=[{name:\\ j,format:\\ jsonl,paths:\\ [a.jsonl],text_field:\\ content}]",
        2,
        "text_field",
    ),
    row(
        "the wrong column of csv",
        "train tiny.yaml data.sources=[{name:\\ c,format:\\ csv,paths:\\ [c.csv]}]",
        2,
        "text_field",
    ),
    row("an unknown format", "train tiny.yaml data.sources.0.format=tsv", 2, "csv"),
    row("markdown", "train tiny.yaml data.sources.0.format=md", 2, "txt"),
    row("a cache that is not built", "data peek tiny.yaml data.sequence_length_tokens=32", 4, "vorox data build"),
    row("a tokenizer that is not there", "train tiny.yaml tokenizer.kind=file tokenizer.path=tok.json", 4, "tok.json"),
    row(
        "a preset's data replaced", "train gpt2-124m data.sources.0.paths=[txt/] --dry-run", 2, "data.sources.0.format"
    ),
    row(
        "a store without credentials",
        "train tiny.yaml data.sources.0.paths=[s3://nosuch-bucket-xyz/a.txt]",
        4,
        "AWS_PROFILE",
    ),
    row("configs of others' paths", "train {configs}/gpt2_124m.yaml --dry-run", 4, "path"),
    row(
        "own text in a shipped configuration",
        "train {configs}/char_demo.yaml data.sources.0.paths=[my.txt] --dry-run",
        0,
    ),
    row("own text", "train --data my.txt --dry-run", 0),
    row("own folder", "train --data txt --dry-run", 0),
    row("own jsonl", "train --data a.jsonl --dry-run", 0),
    row("own csv", "train --data c.csv --dry-run", 0, "content"),
    row("options of a GPT trainer without shards", "train --batch_size 8", 2, "--data_dir", "data download", "--data "),
    row(
        "some lines that are not JSON", "train --data bad.jsonl --steps 1", 4, "data.sources.0.bad_record_fraction=0.1 "
    ),
    row(
        "some lines that are not JSON, allowed",
        "train --data bad.jsonl --steps 1 model.num_layers=1 data.sources.0.bad_record_fraction=0.1",
        0,
        "10 unreadable records",
    ),
    row("token shards without a header", "train --data train.bin", 4, "data.sources.0.ids_dtype=uint16"),
]

RUNS = [
    row("another model at resume", "train --resume RUN model.num_layers=2", 2, "model.num_layers"),
    row("fewer steps than done", "train --resume RUN train.num_steps=2", 2, "train.num_steps"),
    row("a run directory that cannot be", "train tiny.yaml run.directory=/proc/x", 2, "run.directory"),
    row("a run directory that is a file", "train tiny.yaml run.directory=one.txt", 2, "run.directory"),
    row("an export twice", "export RUN --to hf", 0),
    row("two runs to remove", "runs remove nowhere-1 nowhere-2 --yes", 2, "nowhere-1"),
    row("failed runs to remove", "runs remove --failed --yes", 0),
    row("a run compared with itself", "runs compare RUN RUN", 0),
]

MISTAKES = [*COMMAND_LINE, *OPTIONS, *FILES, *DATA, *RUNS]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("stage")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(directory)
        monkeypatch.setenv("VOROX_CACHE", str(directory / "cache"))
        for name in ("txt", "emptydir", "mein korpus"):
            Path(name).mkdir()
        for number in range(60):
            Path(f"txt/{number}.txt").write_text(f"{number} {tiny_runs.TEXT}\n", encoding="utf-8")
        tiny = {
            "model": {"num_layers": 1, "hidden_size": 32, "num_heads": 4},
            "data": {"sources": [{"name": "t", "format": "txt", "paths": ["txt/"]}], "sequence_length_tokens": 64},
            "tokenizer": {"kind": "byte"},
            "train": {"num_steps": 5, "global_batch_sequences": 4, "micro_batch_sequences": 4},
            "log": {"matmul_peak": False},
            "runtime": {"num_threads": 1},
        }
        text = json.dumps(tiny)
        for name, content in {
            "tiny.yaml": text,
            "cfg.json": text,
            "mein korpus/übung 1.yaml": text,
            "empty.yaml": "",
            "empty.txt": "",
            "crlf.yaml": "\ufeff" + json.dumps(tiny, indent=1).replace("\n", "\r\n"),
            "tabs.yaml": "model:\n\tnum_layers: 2\n",
            "cfg.toml": "[model]\nnum_layers = 2\n",
            "ind.yaml": "model:\n  num_layers: 2\n hidden_size: 3\n",
            "flat.yaml": "n_layer: 2\nbatch_size: 4\nlearning_rate: 1e-3\n",
            "dup.yaml": "model: {num_layers: 1}\nmodel: {num_layers: 2}\n",
            "config.py": f"import json\nconfig = json.loads({text!r})\n",
            "broken.py": "config = {'model': \n",
            "my.txt": (tiny_runs.TEXT + "\n\n") * 400,
            "one.txt": tiny_runs.TEXT * 30,
            "a.jsonl": "".join(json.dumps({"text": tiny_runs.TEXT, "id": n}) + "\n" for n in range(200)),
            "bad.jsonl": "".join((json.dumps({"text": tiny_runs.TEXT}) if n % 20 else "{") + "\n" for n in range(200)),
            "c.csv": "id,content\n" + "".join(f"{n},{tiny_runs.TEXT}\n" for n in range(200)),
        }.items():
            Path(name).write_text(content, encoding="utf-8", newline="")
        Path("b.txt").write_bytes(b"\x7fELF" + struct.pack("<200I", *range(200)))
        Path("train.bin").write_bytes(struct.pack("<4000H", *range(4000)))
        Path("u16.txt").write_bytes((tiny_runs.TEXT * 20).encode("utf-16"))
        Path("l1.txt").write_bytes("Größe, Maß und Öl für alle. ".encode("latin-1") * 50)
        shutil.make_archive("archive", "zip", "txt")
        assert main(["train", "tiny.yaml"]) == 0
        (directory / "first.txt").write_text(next((directory / "runs").iterdir()).name)
        yield directory


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_mistake(
    mistake: Mistake, stage: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(stage)
    monkeypatch.setenv("VOROX_CACHE", str(stage / "cache"))
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(stage))
    run = (stage / "first.txt").read_text()
    configs = Path(__file__).parents[2] / "configs"
    words = [word.replace("RUN", run).replace("{configs}", str(configs)) for word in shlex.split(mistake.command)]
    before = {path.name for path in (stage / "runs").iterdir()}
    capfd.readouterr()
    code = main(words)
    captured = capfd.readouterr()
    said = captured.out + captured.err
    assert code == mistake.exit_code, said
    for alternatives in mistake.names:
        assert any(name in said for name in alternatives.split("|")), f"{alternatives} is not in:\n{said}"
    for name in (*mistake.unnamed, "Traceback"):
        assert name not in said
    if code in (2, 3, 4):
        assert {path.name for path in (stage / "runs").iterdir()} == before, "a refused run left a directory"


def test_there_are_at_least_a_hundred() -> None:
    names = [mistake.what for mistake in MISTAKES]
    assert len(names) == len(set(names)) >= 100
