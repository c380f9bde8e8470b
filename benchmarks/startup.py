"""CPU seconds of `vorox --help`, and seconds from process start to the end of the first training step, warm cache.

Peers: nanoGPT's train.py on its character demo (its own log of the first iteration), where it is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def cpu_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_step_seconds(command: list[str], marker: str, cwd: Path, environment: dict[str, str]) -> float:
    """Seconds until the command prints a line with ``marker``; the process is stopped then."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=cwd, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if re.search(marker, line):
                return time.perf_counter() - started
    finally:
        process.kill()
        process.wait()
    raise SystemExit(f"{command} ended without printing {marker!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    vorox = str(Path(sys.executable).parent / "vorox")
    nanogpt = Path(__file__).parent / ".peers" / "nanoGPT"

    print("| | median | spread |\n|---|---|---|")
    rows: dict[str, list[float]] = {"vorox --help, CPU seconds": [], "python -c pass, CPU seconds": []}
    for _ in range(rounds):
        rows["vorox --help, CPU seconds"].append(cpu_seconds([vorox, "--help"]))
        rows["python -c pass, CPU seconds"].append(cpu_seconds([sys.executable, "-c", "pass"]))

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        text = "".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("src/vorox/**/*.py")))
        (folder / "input.txt").write_text(text[:1_000_000], encoding="utf-8")
        ours = [
            vorox, "train", str(ROOT / "configs" / "char_demo.yaml"), f"data.sources.0.paths=[{folder}/input.txt]",
            f"run.directory={folder}/runs", f"data.cache.directory={folder}/cache", "log.every_steps=1",
            "--resume", "never",
        ]  # fmt: skip
        contenders = {"vorox, first step": (ours, r"Step +1/", ROOT, {})}
        if nanogpt.exists():
            theirs = [
                sys.executable, "train.py", "config/train_shakespeare_char.py", "--device=cpu", "--compile=False",
                "--eval_iters=1", "--log_interval=1", "--block_size=64", "--batch_size=12", "--n_layer=4",
                "--n_head=4", "--n_embd=128", "--max_iters=20", "--lr_decay_iters=20", "--dropout=0.0",
                f"--out_dir={folder}/out",
            ]  # fmt: skip
            prepare = nanogpt / "data" / "shakespeare_char"
            if not (prepare / "train.bin").exists():
                (prepare / "input.txt").write_text(text[:1_000_000], encoding="utf-8")
                subprocess.run([sys.executable, "prepare.py"], cwd=prepare, check=True, capture_output=True)
            contenders["nanoGPT, first iteration"] = (theirs, "iter 0:", nanogpt, {})
        else:
            print("nanoGPT is absent: run benchmarks/setup.sh", file=sys.stderr)
        for name, (command, marker, cwd, environment) in contenders.items():
            first_step_seconds(command, marker, cwd, environment)  # warms the page cache and our token cache
            rows[name + ", seconds"] = []
        for _ in range(rounds):
            for name, (command, marker, cwd, environment) in contenders.items():
                rows[name + ", seconds"].append(first_step_seconds(command, marker, cwd, environment))
    for name, values in rows.items():
        print(f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} to {max(values):.2f} |")
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "startup.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
