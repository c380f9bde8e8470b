"""What can be proved of a run: kill, resume, replay, any step, a fork, a culprit, unlearning, an audit, an export.

``make demo`` runs it, in less than six minutes on two CPU cores. It types the commands that a user would, shows what
they print, and after each says what was proved, from their JSON and from the records of the runs. It ends with exit
code 1 at the first thing that is not so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BAD_RECORD = 17
"""Index of the planted document in notes.jsonl."""
STEPS = 120
CONFIG = f"""\
# A byte-level decoder of 0.4M parameters on two sources.
model: {{family: llama, num_layers: 2, hidden_size: 96, num_heads: 4}}
data:
  sources:
    - {{name: library, format: txt, paths: [library/]}}
    - {{name: notes, format: jsonl, paths: [notes.jsonl]}}
  stages:
    - {{start_tokens: 0, weights: {{library: 1}}}}
    - {{start_tokens: 61440, weights: {{library: 3, notes: 1}}}}  # after 60 steps
  sequence_length_tokens: 128
  cache: {{directory: cache}}
tokenizer: {{kind: byte}}
optimizer: {{lr: 0.003}}
train: {{num_steps: {STEPS}, global_batch_sequences: 8, micro_batch_sequences: 8}}
checkpoint: {{every_steps: 20, keep_last: 2}}
eval: {{every_steps: 60, num_sequences: 16, prompts: []}}
log: {{every_steps: 10, matmul_peak: false}}
run: {{name: demo}}
"""


class Demo:
    """The commands of the demo, and what they proved.

    Args:
        folder: Where everything is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._started, self._proved = folder, time.monotonic(), list[str]()
        self._environment = {**os.environ, "NO_COLOR": "1"}

    def run(self, *words: str | Path, quiet: bool = False) -> str:
        """Type a command and show what it prints; return that.

        Raises:
            SystemExit: It fails.
        """
        if not quiet:
            print(f"\n$ vorox {shlex.join(map(str, words))}", flush=True)
        command = [sys.executable, "-m", "vorox", *map(str, words)]
        found = subprocess.run(command, cwd=self._folder, env=self._environment, stdout=subprocess.PIPE, text=True)
        if not quiet:
            print(found.stdout, end="", flush=True)
        if found.returncode:
            raise SystemExit(
                f"This command ended with exit code {found.returncode}: vorox {shlex.join(map(str, words))}"
            )
        return found.stdout

    def json(self, *words: str | Path) -> Any:
        """Return what a command prints as JSON, without showing it."""
        return json.loads(self.run(*words, "--json", quiet=True))

    def kill_after(self, step: int, *words: str) -> None:
        """Type a command that trains, and kill its process once it has logged a step."""
        print(f"\n$ vorox {shlex.join(words)}", flush=True)
        command = [sys.executable, "-m", "vorox", *words]
        process = subprocess.Popen(command, cwd=self._folder, env=self._environment)
        while process.poll() is None and self.last_logged() < step:
            time.sleep(0.05)
        if process.poll() is not None:
            raise SystemExit("The training ended before it could be killed")
        process.send_signal(signal.SIGKILL)
        process.wait()
        print(f"\n$ kill -9 {process.pid}", flush=True)

    def last_logged(self) -> int:
        """Return the last step in the metrics of the run; 0 without one."""
        lines = [line for path in self._folder.glob("runs/*/metrics.jsonl") for line in path.read_text().splitlines()]
        return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else 0

    def proves(self, is_so: bool, text: str) -> None:
        """Say what was proved.

        Raises:
            SystemExit: It is not so.
        """
        if not is_so:
            raise SystemExit(f"NOT proved: {text}")
        self._proved.append(text)
        print(f"Proved: {text}", flush=True)

    def end(self) -> None:
        """Print all that was proved."""
        print(f"\nProved in {time.monotonic() - self._started:.0f} s:")
        for number, text in enumerate(self._proved, 1):
            print(f"  {number}. {text}")


def write_data(folder: Path) -> None:
    """Write the configuration, a source of Python's own library, and notes with a document of zero bytes."""
    (folder / "library").mkdir(parents=True)
    for name in ("ast", "bisect", "calendar", "csv", "fractions", "heapq", "queue", "statistics", "textwrap", "uuid"):
        source = Path(sysconfig.get_path("stdlib"), f"{name}.py")
        (folder / "library" / f"{name}.txt").write_bytes(source.read_bytes())
    chooser = random.Random(1)
    words = [*"abcdefgh", "run", "step", "seed", "loss", "plan", "cache", "batch", "token", "order", "state", "chain"]
    notes = [" ".join(chooser.choices(words, k=60)) for _ in range(40)]
    notes[BAD_RECORD] = "\0" * 126  # as a file that was cut short has them
    (folder / "notes.jsonl").write_text("".join(json.dumps({"text": note}) + "\n" for note in notes))
    (folder / "demo.yaml").write_text(CONFIG)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="a new folder; default: a temporary one, which stays")
    folder: Path = parser.parse_args(arguments).folder or Path(tempfile.mkdtemp(prefix="vorox-"), "demo")
    if folder.exists():
        raise SystemExit(f"{folder} is already there: remove it, or name another folder")
    write_data(folder)
    print(f"$ cd {folder}")
    demo = Demo(folder)

    demo.kill_after(50, "train", "demo.yaml")
    demo.run("train", "demo.yaml")
    run = next((folder / "runs").iterdir()).name
    attempts = json.loads((folder / "runs" / run / "run.json").read_text())["attempts"]
    outcomes = [attempt["outcome"] for attempt in attempts]
    demo.proves(outcomes == ["killed", "finished"], "killed at a random moment, the same command went on to the end")

    demo.run("replay", run)
    verdict = json.loads((folder / "runs" / run / "verdicts.jsonl").read_text().splitlines()[-1])
    demo.proves(verdict["passed"], f"all {STEPS} steps have the recorded rows, losses and gradients, bit for bit")

    demo.run("checkpoints", "materialize", run, "--step", "77")
    demo.run("generate", f"{run}@77", "-p", "def ", "--tokens", "40")
    kept = [one["step"] for one in demo.json("checkpoints", "list", run)]
    demo.proves(
        77 not in kept, f"the weights of step 77, which nobody saved (kept are {kept}), are exactly what they were"
    )

    demo.run("fork", run, "--step", "90", "--without-source", "notes", "--name", "library-only")
    demo.run("runs", "compare", run, "library-only", "--paired")
    pair = demo.json("runs", "compare", run, "library-only", "--paired")
    first = pair["chain"]["difference"]["step"]
    demo.proves(first == 91, "the fork without a source differs from its first own step on, and never before")

    found = demo.json("data", "when", run, "--source", "notes.jsonl", "--record", str(BAD_RECORD))
    step = min(one["step"] for one in found if one["state"] == "kept")
    demo.run("explain", run, "--step", str(step))
    explained = demo.json("explain", run, "--step", str(step))
    culprit = Path((explained["culprit"] or {"name": "nobody"})["name"]).name
    demo.proves(
        culprit == f"notes.jsonl:{BAD_RECORD}",
        f"a document of zero bytes raised the gradient of step {step}: {culprit}",
    )

    demo.run("unlearn", run, "--document", f"notes.jsonl:{BAD_RECORD}", "--name", "clean", "--erase", "--yes")
    statement = next((folder / "runs").glob("clean-*/statements/*.json"))
    predicate = json.loads(statement.read_text())["predicate"]
    demo.proves(step in predicate["masked_steps"], f"trained again without it: {predicate['claim']}")

    demo.run("audit", "clean", "--segments", "3", "--output", "audit.json")
    found = json.loads((folder / "audit.json").read_text())["predicate"]
    demo.proves(found["verdict"] == "passed", "segments of the new run, chosen at random, have the recorded bits")

    demo.run("export", "clean", "--to", "hf", "--output", "model", "--check")
    demo.proves((folder / "model" / "config.json").exists(), "transformers computes the same logits from the export")
    demo.end()


if __name__ == "__main__":
    main(sys.argv[1:])
