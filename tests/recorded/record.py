"""Record runs and caches that every later version must open: ``PYTHONPATH=tests python -m recorded.record FILE``.

A recording is never changed. A version whose forms have something new adds a recording of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tiny_runs
from base_models import write as write_base
from vorox.cli import main
from vorox.core.run_layout import RunLayout
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_events import MaskedDocument, MaskEvent, SkipEvent
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.experiments.tracking import read_metrics
from vorox.records.replay_chain import read_chain

FIRST, KEPT, LAST, LATER = 8, 8, 12, 16
"""Steps of the first attempt, of the checkpoint that a test resumes, of the recorded run, and of its continuation."""

COMMON: Mapping[str, Any] = {
    "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2},
    "tokenizer": {"kind": "byte"},
    "optimizer": {"lr": 0.01},
    "schedule": {"name": "constant", "warmup_steps": 2},
    "train": {"num_steps": FIRST, "global_batch_sequences": 4, "micro_batch_sequences": 2},
    "checkpoint": {"every_steps": 4},
    "eval": {"every_steps": 4, "num_sequences": 4},
    "log": {"every_steps": 1},
    "runtime": {"num_threads": 1, "device": "cpu"},
}
FROM_WEIGHTS = ("chat", "pairs")
LENGTH = {"sequence_length_tokens": 32, "cache": {"directory": "cache", "chunk_rows": 16, "unit_bytes": 2000}}


def _jsonl(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "format": "jsonl", "paths": [f"text/{name}.jsonl"], **fields}


RUNS: Mapping[str, Mapping[str, Any]] = {
    "mixture": {
        "data": {
            **LENGTH, "sources": [_jsonl("prose", weight="2/3"), _jsonl("verse", weight="1/3")],
            "stages": [
                {"start_tokens": 0, "weights": {"prose": 0.5, "verse": 0.5}},
                {"start_tokens": 1280, "weights": {"prose": 0.25, "verse": 0.75}, "sequence_length_tokens": 16},
            ],
            "document_mask": True,
        },
        "tokenizer": {"kind": "bpe", "vocab_size": 300},
        "train": {"ema_decay": 0.9},
    },
    "growing": {
        "data": {**LENGTH, "sources": [_jsonl("prose", split_by="tokens_per_document", split_quantiles=[0.5])],
                 "growth": {"mode": "strict"}, "validation": {"held_out_fraction": 0}},
        "eval": {"every_steps": None},
        "optimizer": {"name": "muon"},
    },
    "sharded": {
        "data": {**LENGTH, "sources": [_jsonl("prose")]},
        "parallel": {"fsdp_size": 2},
        "model": {"num_experts": 2, "experts_per_token": 1},
    },
    "jax": {
        "data": {**LENGTH, "sources": [_jsonl("verse")]},
        "backend": "jax",
        "runtime": {"num_threads": None},
    },
    "chat": {
        "data": {**LENGTH, "sources": [_jsonl("talks", chat_fields=["messages"])]},
        "model": {"kind": "huggingface", "name_or_path": "base"},
        "tokenizer": {"kind": "huggingface", "path": "base"},
        "adapter": {"kind": "lora", "rank": 2},
    },
    "pairs": {
        "data": {**LENGTH, "sources": [_jsonl("choices", chat_fields=["prompt", "chosen", "rejected"],
                                              preference_pairs=True)]},
        "loss": {"name": "dpo"},
        "train": {"from_weights": "mixture"},
        "model": {}, "tokenizer": {},
    },
}  # fmt: skip


def _write_inputs(folder: Path) -> None:
    chooser = random.Random(2)

    def words(most: int) -> str:
        return " ".join(chooser.choices(tiny_runs.WORDS, k=chooser.randint(3, most)))

    def write(name: str, records: Sequence[Mapping[str, Any]]) -> None:
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / "text" / f"{name}.jsonl").write_text(lines, encoding="utf-8")

    (folder / "text").mkdir()
    for name in ("prose", "verse"):
        write(name, [{"text": words(40)} for _ in range(80)])
    turns = ("user", "assistant")
    write("talks", [{"messages": [{"role": role, "content": words(6)} for role in turns]} for _ in range(60)])
    write("choices", [{"prompt": words(3), "chosen": words(3), "rejected": words(4)} for _ in range(60)])


def vorox(folder: Path, *arguments: str, codes: Sequence[int] = (0,)) -> str:
    """Run a command in a folder, and return what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VOROX_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "vorox", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode in codes, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def train(folder: Path, name: str, *arguments: str) -> Path:
    """Train or resume a run, with the processes that it had."""
    ranks = ["--nproc", "2"] if name == "sharded" else []
    vorox(folder, "train", *arguments, *ranks)
    (directory,) = (folder / "runs").glob(f"{name}*")
    return directory


def answers(folder: Path, run_directory: Path) -> dict[str, Any]:
    """What a run answers: documents, batch digest and loss of each step."""
    documents: dict[int, Any] = {}
    for step in read_chain(run_directory):
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main(["data", "where", run_directory.name, "--step", str(step), "--json"]) == 0
        documents[step] = json.loads(printed.getvalue())
    return {
        "documents": documents,
        "batches": {step: entry.batch for step, entry in read_chain(run_directory).items()},
        "losses": {step: values["loss"] for step, values in read_metrics(run_directory).items()},
    }


def _add_events(run_directory: Path) -> None:
    """A step without an update, and a document that is masked from there on."""
    plan = DataPlan.open(RunLayout(run_directory).plan)
    position = plan.start.batch_sizes.position_of(FIRST)
    with RunDataIndex.open(run_directory) as run_data:
        file = run_data.readers[0].files[0]
    masked = tuple(MaskedDocument("prose", file.version, ordinal) for ordinal in range(20, 40))
    plan.add([SkipEvent(position, "loss_spike", 9.0, 8.0), MaskEvent(position, masked)])


def record(folder: Path) -> dict[str, Any]:
    """Train all runs below ``folder``, and return what they answer, also after steps that are not kept."""
    _write_inputs(folder)
    write_base(folder / "base", "qwen")
    expected: dict[str, Any] = {}
    for name, settings in RUNS.items():
        own = {key: value for key, value in settings.items() if isinstance(value, Mapping)}
        merged = {section: {**COMMON.get(section, {}), **own.get(section, {})} for section in {*COMMON, *own}}
        merged |= {"backend": settings.get("backend", "torch"), "run": {"directory": "runs", "name": name}}
        if name in FROM_WEIGHTS:
            merged |= {section: dict(own.get(section, {})) for section in ("model", "tokenizer")}
        (folder / f"{name}.yaml").write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
        run_directory = train(folder, name, f"{name}.yaml")
        if name == "mixture":
            _add_events(run_directory)
        train(folder, name, "--resume", run_directory.name, f"train.num_steps={LAST}")
    for name in RUNS:
        with tempfile.TemporaryDirectory() as scratch:
            twin = Path(shutil.copytree(folder, Path(scratch, folder.name)))
            directory = train(twin, name, "--resume", name, f"train.num_steps={LATER}")
            expected[name] = answers(twin, directory)
    return expected


def write_recording() -> None:
    """Record into the file of the command line."""
    target = Path(sys.argv[1]).resolve()
    if target.exists():
        sys.exit(f"{target} exists: a recording is never changed")
    folder = Path(tempfile.gettempdir(), "recorded")
    folder.mkdir()
    expected = record(folder)
    (folder / "expected.json").write_text(json.dumps(expected, sort_keys=True), encoding="utf-8")
    with tarfile.open(target, "x:xz") as archive:
        archive.add(folder, arcname=".")


if __name__ == "__main__":
    write_recording()
