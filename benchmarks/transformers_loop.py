"""Our loop against transformers.Trainer: the same model of transformers, the same batches, the same optimizer.

    transformers_loop.py [--size small] [--device cpu|cuda] [--dtype fp32|bf16] [--steps 20] [--rounds 5] [--threads N]

In: a model with random weights, written by transformers, and rows of random ids. Out: tokens/s, peak memory (of the
process; on a GPU, of tensors on the device) and seconds from the start of the process to the end of its first step, as
medians over rounds, and the median ratio within rounds; ``results/transformers_loop_DEVICE.json``. Every trial is a
process of its own, and contenders alternate. Before the first round, both train three steps and their losses are
compared, so that they provably do the same work. On a loaded machine, read the ratio of processor seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import vorox
from train_programs import OWN_BUSINESS, machine
from vorox.experiments.tracking import read_metrics

HERE = Path(__file__).parent
LR, END_OF_TEXT = 1e-4, 0
TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}
"""Relative difference of the losses of both contenders that is rounding."""
Trial = dict[str, float]


class Size(NamedTuple):
    """A Llama and its batch."""

    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    row_tokens: int
    rows: int


SIZES = {
    "tiny": Size(2, 32, 2, 256, 32, 4),
    "small": Size(6, 384, 6, 4096, 256, 8),
    "medium": Size(12, 768, 12, 32000, 1024, 16),
    "large": Size(24, 2048, 16, 32000, 2048, 8),
}


def write_model(size: Size, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

    set_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocab_size, hidden_size=size.hidden_size, intermediate_size=size.hidden_size * 8 // 3 // 8 * 8,
        num_hidden_layers=size.num_layers, num_attention_heads=size.num_heads, max_position_embeddings=size.row_tokens,
        bos_token_id=None, eos_token_id=END_OF_TEXT, use_cache=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")


def write_shard(size: Size, num_tokens: int, folder: Path) -> None:
    """Write random ids as one llm.c shard, in documents of 1,000 tokens."""
    ids = np.random.default_rng(0).integers(1, size.vocab_size, num_tokens, dtype=np.uint16)
    ids[::1000] = END_OF_TEXT
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(ids)
    (folder / "shards").mkdir()
    (folder / "shards" / "ids_train_000000.bin").write_bytes(header.tobytes() + ids.tobytes())


def configuration(size: Size, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return {
        "model": {"kind": "huggingface", "name_or_path": str(folder / "model")},
        "data": {
            "sources": [{"name": "ids", "format": "bin", "paths": [str(folder / "shards")]}],
            "sequence_length_tokens": size.row_tokens, "packing": "concat", "document_mask": False,
            "validation": {"held_out_fraction": 0, "split": "document"},
            "cache": {"directory": str(folder / "cache")},
        },
        "tokenizer": {"kind": "none", "vocab_size": size.vocab_size, "end_of_text_id": END_OF_TEXT},
        "optimizer": {"name": "adamw", "lr": LR, "beta2": 0.95, "weight_decay": 0.0, "clip_norm": 1.0},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "train": {"global_batch_sequences": size.rows, "micro_batch_sequences": size.rows},
        "precision": {"dtype": given.dtype},
        "checkpoint": {"at_end": False},
        "runtime": {"device": given.device, "num_threads": given.threads},
    }  # fmt: skip


class Bench:
    """Both contenders on one model and its batches."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given, self._folder, self._size = given, folder, SIZES[given.size]
        self.contenders: dict[str, Callable[[int, int], list[float]]] = {
            "vorox": self.run_vorox, "transformers.Trainer": self.run_trainer
        }  # fmt: skip

    def prepare(self) -> None:
        """Write model, ids, cache and batches."""
        size, steps = self._size, self._given.steps
        write_model(size, self._folder)
        write_shard(size, 2 * steps * size.rows * size.row_tokens, self._folder)
        settings = configuration(size, self._given, self._folder)
        (self._folder / "loop.yaml").write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
        self.run_vorox(steps, 1)
        batches = list(vorox.open_run(self._latest_run()).batches(1, steps))
        tokens, labels = ([getattr(batch, name)[0] for batch in batches] for name in ("tokens_ABT", "labels_ABT"))
        np.savez(self._folder / "batches.npz", tokens=np.stack(tokens), labels=np.stack(labels))

    def check_losses(self) -> None:
        """Train three steps with both.

        Raises:
            SystemExit: Their losses differ by more than rounding.
        """
        ours, theirs = (run(3, 1) for run in self.contenders.values())
        if not np.allclose(ours, theirs, rtol=TOLERANCE[self._given.dtype]):
            raise SystemExit(f"The contenders do different work: losses {ours} and {theirs}")
        print(f"Losses of three steps: vorox {ours}, transformers.Trainer {theirs}")

    def trial(self, name: str) -> Trial:
        self.contenders[name](self._given.steps, 10)
        found: Trial = json.loads((self._folder / "report.json").read_text())
        found["tokens_per_second"] = self._size.rows * self._size.row_tokens / found["step_seconds"]
        return found

    def run_vorox(self, steps: int, log_every: int) -> list[float]:
        """Train with our loop; return the losses of logged steps."""
        shutil.rmtree(self._folder / "runs", ignore_errors=True)
        options = [f"run.directory={self._folder}/runs", f"train.num_steps={steps}", f"log.every_steps={log_every}"]
        self._run("clocked_vorox.py", steps, ["train", str(self._folder / "loop.yaml"), *options])
        return [values["loss"] for values in read_metrics(self._latest_run()).values() if "loss" in values]

    def run_trainer(self, steps: int, log_every: int) -> list[float]:
        """Train with transformers.Trainer; return the losses of logged steps."""
        settings = {
            "steps": steps, "log_every": log_every, "rows": self._size.rows, "lr": LR, "device": self._given.device,
            "dtype": self._given.dtype, "threads": self._given.threads,
        }  # fmt: skip
        return json.loads(self._run("clocked_trainer.py", steps, [json.dumps(settings)]).splitlines()[-1])

    def _latest_run(self) -> Path:
        (run,) = (path for path in (self._folder / "runs").iterdir() if path.is_dir())
        return run

    def _run(self, script: str, steps: int, words: Sequence[str]) -> str:
        environment = {name: value for name, value in os.environ.items() if not OWN_BUSINESS.match(name)}
        warmup = min(max(1, steps // 4), steps - 1)
        clock = {"warmup_steps": warmup, "last_step": steps, "device": self._given.device, "started_at": time.time()}
        environment |= {"HF_HUB_OFFLINE": "1", "STEP_CLOCK": json.dumps(clock)}
        command = [sys.executable, HERE / "contenders" / script, self._folder / "report.json", *words]
        done = subprocess.run(command, cwd=self._folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{script} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
        return done.stdout


def measure(bench: Bench, rounds: int) -> dict[str, list[Trial]]:
    names, trials = list(bench.contenders), {name: list[Trial]() for name in bench.contenders}
    for number in range(rounds):
        for name in names[number % 2 :] + names[: number % 2]:
            trials[name].append(bench.trial(name))
            found = trials[name][-1]
            print(f"round {number + 1}, {name}: {found['tokens_per_second']:,.0f} tokens/s", file=sys.stderr)
    return trials


def table(trials: dict[str, list[Trial]]) -> str:
    """Return medians, and the median ratio within rounds, as Markdown: above 1, vorox is faster or smaller."""
    lines = ["| | vorox | transformers.Trainer | ratio |", "|---|---|---|---|"]
    figures = (
        ("tokens/s", "tokens_per_second", 1.0, ",.0f", False),
        ("processor s per step", "step_cpu_seconds", 1.0, ".3f", True),
        ("peak memory, MiB", "peak_bytes", 2**20, ",.0f", True),
        ("first step after, s", "first_step_seconds", 1.0, ".1f", True),
    )
    for label, key, unit, form, lower_is_better in figures:
        ours, theirs = ([trial[key] / unit for trial in found] for found in trials.values())
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        ratio = statistics.median([1 / value for value in ratios] if lower_is_better else ratios)
        lines.append(
            f"| {label} | {statistics.median(ours):{form}} | {statistics.median(theirs):{form}} | {ratio:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="fp32")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--results", type=Path, default=HERE / "results")
    given = parser.parse_args()
    if given.steps < 4:
        parser.error("--steps is at least 4: three steps are compared, and a quarter of them is warm-up")
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(given, Path(name))
        bench.prepare()
        bench.check_losses()
        trials = measure(bench, given.rounds)
    print(table(trials))
    given.results.mkdir(parents=True, exist_ok=True)
    record = {**vars(given), "results": None, "trials": trials, "machine": machine()}
    (given.results / f"transformers_loop_{given.device}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
