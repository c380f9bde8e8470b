"""Memory that ``vorox plan`` predicts, beside the peak of the real run: peak minus resident memory after the imports.

    plan_memory.py [--rounds 3] [--backend torch|jax] [--only NAME ...] [--scale small|124m]

Plan and run are child processes of their own, with the same settings. The run trains two steps of two micro-batches on
generated text, saves a checkpoint in the background and trains one more step, so that everything that the plan counts
exists at once. The peak is VmHWM of Linux; with more than one round, the median counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GPT2 = ["model.positions=learned", "model.norm=layer_norm", "model.norm_bias=true", "model.activation=gelu_tanh",
        "model.attention_bias=true", "model.mlp_bias=true", "model.family=gpt2"]  # fmt: skip
SCALES = {
    "124m": {
        "gpt2": ["model.preset=gpt2-124m", "model.vocab_size=50257"],
        "llama": ["model.family=llama", "model.num_layers=12", "model.hidden_size=768", "model.num_heads=12",
                  "model.num_kv_heads=4", "model.intermediate_size=2048", "model.vocab_size=50257",
                  "model.tie_embeddings=false"],
    },
    "small": {
        "gpt2": [*GPT2, "model.num_layers=6", "model.hidden_size=384", "model.num_heads=6", "model.vocab_size=30000"],
        "llama": ["model.family=llama", "model.num_layers=6", "model.hidden_size=384", "model.num_heads=6",
                  "model.num_kv_heads=2", "model.intermediate_size=1024", "model.vocab_size=30000",
                  "model.tie_embeddings=false"],
    },
}  # fmt: skip
BLOCK = ["train.micro_batch_sequences=2", "train.activation_checkpointing=block"]
LONG, SHORT = ["data.sequence_length_tokens=1024"], ["data.sequence_length_tokens=256"]
CASES: dict[str, tuple[str, list[str]]] = {
    "gpt2, T 256": ("gpt2", [*SHORT, "train.micro_batch_sequences=4"]),
    "gpt2, T 1,024": ("gpt2", [*LONG, "train.micro_batch_sequences=1"]),
    "gpt2, T 1,024, block": ("gpt2", [*LONG, *BLOCK]),
    "gpt2, T 256, muon": ("gpt2", [*SHORT, "train.micro_batch_sequences=4", "optimizer.name=muon"]),
    "gpt2, T 256, no copy": ("gpt2", [*SHORT, "train.micro_batch_sequences=4", "checkpoint.asynchronous=false"]),
    "llama, T 256": ("llama", [*SHORT, "train.micro_batch_sequences=4"]),
    "llama, T 1,024": ("llama", [*LONG, "train.micro_batch_sequences=1"]),
    "llama, T 1,024, block": ("llama", [*LONG, *BLOCK]),
    "llama, T 256, muon": ("llama", [*SHORT, "train.micro_batch_sequences=4", "optimizer.name=muon"]),
}  # fmt: skip
"""Name to model and settings; a step has two micro-batches."""


def settings(name: str, scale: str, backend: str, text: Path) -> list[str]:
    """Return the settings of a case."""
    model, more = CASES[name]
    rows = next(int(item.partition("=")[2]) for item in more if item.startswith("train.micro_batch_sequences"))
    return [
        f"backend={backend}", "tokenizer.kind=byte", f"data.sources.0.paths=[{text}]", "data.sources.0.format=txt",
        "eval.prompts=[]", "eval.at_end=false", "train.num_steps=2", "checkpoint.every_steps=1",
        "checkpoint.at_end=false", f"train.global_batch_sequences={2 * rows}", "precision.dtype=fp32",
        "runtime.device=cpu", "log.tensorboard=false", "runtime.rehearsal=false", *SCALES[scale][model], *more,
    ]  # fmt: skip


def plan(arguments: list[str]) -> dict[str, Any]:
    """Return what ``vorox plan`` says, in a process of its own; with JAX, of the compiled step."""
    compiles = ["--compile"] if "backend=jax" in arguments else []
    done = subprocess.run(
        [sys.executable, "-m", "vorox", "plan", "quickstart", *arguments, *compiles, "--json"], capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def train(arguments: list[str], directory: Path) -> dict[str, int]:
    """Return resident memory after the imports and peak of a run, in a process of its own."""
    command = [sys.executable, __file__, "--child", str(directory), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def child(directory: Path, arguments: list[str]) -> None:
    """Train, and print resident memory after the imports and the peak."""
    from vorox import backends, run
    from vorox.core.config import load_config

    arguments += [f"run.directory={directory / 'runs'}", f"data.cache.directory={directory / 'cache'}"]
    config = load_config("quickstart", arguments)
    backends.load(config.backend)
    before = status_bytes("VmRSS")
    run.train(config, resume_from="never", argv=["plan_memory"])
    print(json.dumps({"imports": before, "peak": status_bytes("VmHWM")}))


def status_bytes(name: str) -> int:
    """Return a figure of this process's memory as Linux reports it. The peak of ``getrusage`` may be the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", choices=["torch", "jax"], default="torch")
    parser.add_argument("--scale", choices=sorted(SCALES), default="124m")
    parser.add_argument("--only", nargs="*", choices=sorted(CASES), default=sorted(CASES))
    options = parser.parse_args()
    print(f"{options.backend}, {options.scale}, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}\n")
    print("| | plan, MiB | run, MiB | plan / run |\n|---|---|---|---|")
    for name in (name for name in CASES if name in options.only):
        with tempfile.TemporaryDirectory() as scratch:
            text = Path(scratch) / "text.txt"
            text.write_text("The quick brown fox jumps over the lazy dog. " * 4000, encoding="utf-8")
            arguments = settings(name, options.scale, options.backend, text)
            planned = plan(arguments)["memory_bytes"]
            runs = [train(arguments, Path(scratch) / str(number)) for number in range(options.rounds)]
            peak = statistics.median(found["peak"] - found["imports"] for found in runs)
        print(f"| {name} | {planned / 2**20:,.0f} | {peak / 2**20:,.0f} | {planned / peak:.3f} |", flush=True)


if __name__ == "__main__":
    main()
