"""Whole training programs on one GPU: ``vorox train``, torchtitan and nanoGPT, each in a process of its own.

    gpu_programs.py [--sizes llama-124m ...] [--torchtitan CHECKOUT] [--nanogpt CHECKOUT] [--rounds 1]
    gpu_programs.py --device cpu --sizes llama-tiny --settings runtime.compile=false          # tests the harness

Llama sizes are compared with torchtitan 0.2.2, GPT-2 sizes with nanoGPT; a peer without a checkout is left out. All
compute in bf16 with fp32 weights, compiled, with the same rows; torchtitan reads its test data, the others random
text. The figure is tokens/s as each program reports it, the median after the first ten steps.

The programs of the sizes of ``--compile-first`` run at the same time before, so that the measured ones find their
kernels in the compiler's cache: that saves time on a rented machine, and changes no figure after the first steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpu_step import VOCABULARY, configuration
from vorox.models.decoder.spec import decoder_spec
from vorox.planning import flops

ROOT, HERE = Path(__file__).parents[1], Path(__file__).parent
STEPS, WARMUP_STEPS, LOG_STEPS, TIMEOUT_SECONDS = 35, 10, 5, 240
SIZES: Mapping[str, tuple[int, int, int, int, int, int]] = {  # layers, width, heads, MLP, positions, rows
    "llama-tiny": (2, 64, 2, 192, 64, 2),
    "llama-124m": (12, 768, 12, 2048, 2048, 16),
    "llama-350m": (24, 1024, 16, 2816, 2048, 16),
    "llama-1.5b": (24, 2048, 16, 6144, 2048, 8),
    "gpt2-tiny": (2, 64, 2, 256, 64, 2),
    "gpt2-124m": (12, 768, 12, 3072, 1024, 32),
    "gpt2-350m": (24, 1024, 16, 4096, 1024, 32),
}
OURS = ["loss.chunk_tokens=8192", "runtime.compile=true", "precision.dtype=bf16"]
"""What the presets for GPUs set."""


@dataclass(frozen=True)
class Program:
    """A contender: its command for a size, a number of steps and a folder, and seconds per step from its output."""

    name: str
    command: Callable[[str, int, Path], list[str]]
    seconds: Callable[[str, str, Path], list[float]]
    directory: Path = ROOT


def tokens_per_step(size: str) -> int:
    return SIZES[size][4] * SIZES[size][5]


def vorox(settings: list[str]) -> Program:
    def command(size: str, steps: int, folder: Path) -> list[str]:
        layers, width, heads, mlp, tokens, rows = SIZES[size]
        return [
            sys.executable, "-m", "vorox", "train", "quickstart", f"model.family={size.split('-')[0]}",
            f"model.num_layers={layers}", f"model.hidden_size={width}", f"model.num_heads={heads}",
            "model.num_kv_heads=null", f"model.intermediate_size={mlp}", f"model.vocab_size={VOCABULARY}",
            *(["model.tie_embeddings=false"] if size.startswith("llama") else []),
            f"data.sources=[{{name: words, format: txt, paths: [{folder.parent}/words.txt]}}]",
            f"data.cache.directory={folder.parent}/cache", "tokenizer.kind=bpe", "tokenizer.vocab_size=2048",
            "data.document_mask=false", f"data.sequence_length_tokens={tokens}", f"train.global_batch_sequences={rows}",
            f"train.micro_batch_sequences={rows}", f"train.num_steps={steps}", "train.num_epochs=null",
            "optimizer.name=adamw", "optimizer.lr=3e-4", "schedule.warmup_steps=2", f"log.every_steps={LOG_STEPS}",
            "checkpoint.every_steps=null", "checkpoint.every_seconds=null", "eval.every_steps=null",
            "eval.num_sequences=8", "eval.prompts=[]", f"run.directory={folder}",
            *settings, "--resume", "never",
        ]  # fmt: skip

    def seconds(size: str, printed: str, folder: Path) -> list[float]:
        (run,) = folder.iterdir()
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found = [line["values"]["step_seconds"] for line in lines if "step_seconds" in line.get("values", {})]
        return [seconds for seconds in found[1:] for _ in range(LOG_STEPS)]  # without the report of step 1

    return Program("vorox", command, seconds)


def torchtitan(checkout: Path) -> Program:
    def command(size: str, steps: int, folder: Path) -> list[str]:
        names = ("layers", "width", "heads", "mlp", "tokens", "rows")
        shape = dict(zip(names, SIZES[size], strict=True)) | {"steps": steps, "vocabulary": VOCABULARY}
        script = HERE / "contenders" / "torchtitan_llama.py"
        return [sys.executable, str(script), json.dumps(shape), str(checkout), str(folder)]

    def seconds(size: str, printed: str, folder: Path) -> list[float]:
        rates = re.findall(r"step:\s*\d+ .*?tps:\s*([\d,]+)", re.sub(r"\x1b\[[0-9;]*m", "", printed))
        return [tokens_per_step(size) / float(rate.replace(",", "")) for rate in rates[1:] for _ in range(LOG_STEPS)]

    return Program("torchtitan", command, seconds)


def nanogpt(checkout: Path, device: str) -> Program:
    def command(size: str, steps: int, folder: Path) -> list[str]:
        layers, width, heads, _, tokens, rows = SIZES[size]
        flags = {
            "dataset": folder.parent, "out_dir": folder, "device": device, "compile": True, "dtype": "bfloat16",
            "eval_iters": 1, "eval_interval": 10**6, "log_interval": 1, "block_size": tokens, "batch_size": rows,
            "gradient_accumulation_steps": 1, "n_layer": layers, "n_head": heads, "n_embd": width, "bias": True,
            "dropout": 0.0, "max_iters": steps, "wandb_log": False,
        }  # fmt: skip
        return [sys.executable, "train.py", *(f"--{key}={value}" for key, value in flags.items())]

    def seconds(size: str, printed: str, folder: Path) -> list[float]:
        return [float(found) / 1e3 for found in re.findall(r"^iter \d+: .*time ([\d.]+)ms", printed, re.MULTILINE)]

    return Program("nanoGPT", command, seconds, checkout)


def write_data(folder: Path) -> None:
    """Write words for Vorox, and ids for nanoGPT."""
    chooser = random.Random(0)
    words = ["".join(chooser.choices("abcdefghijklmnopqrstuvwxyz", k=chooser.randint(2, 9))) for _ in range(5000)]
    (folder / "words.txt").write_text(" ".join(chooser.choices(words, k=1_000_000)), encoding="utf-8")
    ids = np.random.default_rng(0).integers(0, 50_257, 4_000_000).astype(np.uint16)
    for name in ("train", "val"):
        ids.tofile(folder / f"{name}.bin")


def measure(program: Program, size: str, folder: Path, timeout_seconds: float, steps: int = STEPS) -> dict[str, object]:
    """Run a program until it has reported so many steps, so that evaluation and saves at its end take no time."""
    started, log = time.perf_counter(), folder.with_suffix(".log")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(
            program.command(size, STEPS, folder), cwd=program.directory, env=environment, stdout=file,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
    while process.poll() is None and time.perf_counter() - started < timeout_seconds:
        if len(reported(program, size, log, folder)) >= steps:
            break
        time.sleep(0.5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    whole = time.perf_counter() - started
    found: dict[str, object] = {"size": size, "program": program.name, "program_seconds": round(whole, 1)}
    seconds = reported(program, size, log, folder)[WARMUP_STEPS:]
    if not seconds:
        printed = log.read_text(encoding="utf-8", errors="replace")
        return found | {"exit_code": code, "failed": printed[-600:]}
    per_second = tokens_per_step(size) / statistics.median(seconds)
    config = configuration(size, "", "cpu")
    spec = decoder_spec(
        config.model, tokenizer_vocab_size=VOCABULARY, sequence_length_tokens=SIZES[size][4]
    )  # fmt: skip
    rate = per_second * flops.flops_per_token(spec, SIZES[size][4])
    return found | {
        "steps": len(seconds), "tokens_per_second": round(per_second), "teraflops": round(rate / 1e12, 1),
        "step_milliseconds": round(1e3 * statistics.median(seconds), 1),
    }  # fmt: skip


def reported(program: Program, size: str, log: Path, folder: Path) -> list[float]:
    """Return the seconds of each step that a program has reported so far."""
    try:
        return program.seconds(size, log.read_text(encoding="utf-8", errors="replace"), folder)
    except (ValueError, OSError):
        return []


def compile_first(pairs: list[tuple[Program, str]], folder: Path) -> None:
    """Run some steps of several programs at the same time."""
    with ThreadPoolExecutor(len(pairs)) as pool:
        for program, size in pairs:
            place = folder / f"first-{program.name}-{size}"
            pool.submit(measure, program, size, place, TIMEOUT_SECONDS, LOG_STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["llama-124m", "llama-350m", "llama-1.5b"])
    parser.add_argument("--torchtitan", type=Path, metavar="CHECKOUT")
    parser.add_argument("--nanogpt", type=Path, metavar="CHECKOUT")
    parser.add_argument("--device", default="cuda", help="cpu tests the harness with the tiny sizes.")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--compile-first", nargs="*", default=[], choices=list(SIZES), metavar="SIZE")
    parser.add_argument("--settings", nargs="*", default=[], metavar="KEY=VALUE", help="Of Vorox.")
    parser.add_argument("--folder", type=Path, default=HERE / "results" / "gpu_programs")
    parser.add_argument("--until", type=float, default=3600, help="Seconds after which no program goes on.")
    options = parser.parse_args()
    started, folder = time.perf_counter(), options.folder.resolve() / str(int(time.time()))
    folder.mkdir(parents=True)
    write_data(folder)
    programs = [vorox([*OURS, f"runtime.device={options.device}", *options.settings])]
    if options.torchtitan is not None:
        programs.append(torchtitan(options.torchtitan.resolve()))
    if options.nanogpt is not None:
        programs.append(nanogpt(options.nanogpt.resolve(), options.device))
    pairs = [
        (program, size)
        for size in options.sizes
        for program in programs
        if program.name != ("torchtitan" if size.startswith("gpt2") else "nanoGPT")
    ]
    if options.compile_first:
        compile_first([pair for pair in pairs if pair[1] in options.compile_first], folder)
        print(f"compiled after {time.perf_counter() - started:.0f} s", flush=True)
    for number in range(options.rounds):
        for program, size in pairs if number % 2 == 0 else reversed(pairs):
            left = options.until - (time.perf_counter() - started)
            if left > 5:
                place = folder / f"{number}-{program.name}-{size}"
                print(json.dumps(measure(program, size, place, min(left, TIMEOUT_SECONDS))), flush=True)


if __name__ == "__main__":
    main()
