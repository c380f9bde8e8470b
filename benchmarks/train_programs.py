"""Whole training programs side by side: each in a process of its own, as its user starts it, taking turns in rounds.

    train_programs.py [--rounds 5] [--sizes demo small] [--peers NAME ...] [--steps N] [--nanogpt DIR] [--write-docs]

In: one text, and the same model and batch for everybody. Out: ``results/train_programs.json`` and a table, with
``--write-docs`` in docs/performance.md. Two numbers per program: seconds from the start of the process to its end, and
tokens/s as the program itself reports them (the median over its log). Each has its own defaults and environment; no
thread count, wait policy or allocator is set here. Text is tokenized before, by each in its own way, and not timed.
Every program evaluates one batch and saves once. A contender that is not installed is named as absent.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent
DOCS = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- train_programs: begin -->", "<!-- train_programs: end -->"
VOROX = "vorox"
TEXT_CHARACTERS = 1_115_394  # as many as the text of nanoGPT's published demo has
OWN_BUSINESS = re.compile(
    r"(OMP|MKL|KMP|GOMP|OPENBLAS|MALLOC|VOROX|XLA|TORCH|TOKENIZERS|MASTER)_|(LOCAL_)?(RANK|WORLD_SIZE)$"
    r"|PYTHONDONTWRITEBYTECODE$"
)
"""Variables that a program sets for itself, or that would let one contender alone compile its modules at every start:
what this process has of them is not passed on."""


@dataclass(frozen=True)
class Size:
    """One model and batch. ``vocab_size`` of ``None`` stands for a vocabulary of characters."""

    name: str
    num_layers: int
    num_heads: int
    hidden_size: int
    row_tokens: int
    batch_rows: int
    vocab_size: int | None
    steps: int

    @property
    def tokens_per_step(self) -> int:
        return self.row_tokens * self.batch_rows


SIZES = {
    "demo": Size("4 x 128, T 64, batch 12, characters", 4, 4, 128, 64, 12, None, 300),
    "small": Size("6 x 384, T 256, batch 8, 4,096 tokens", 6, 6, 384, 256, 8, 4096, 20),
}


@dataclass(frozen=True)
class Contender:
    """A program.

    Attributes:
        command: Its command line, from the size and the folder of the data.
        rate: Tokens/s as it reports them, from the size, what it printed and the folder that it wrote to.
        directory: Where it is started.
        missing: Why it cannot be run here; empty if it can.
        prepare: Turns the text into its own form, once.
    """

    command: Callable[[Size, Path], list[str]]
    rate: Callable[[Size, str, Path], float]
    directory: Path = ROOT
    missing: str = ""
    prepare: Callable[[Size, Path], list[str]] | None = None


def vorox_command(verb: Sequence[str], size: Size, folder: Path) -> list[str]:
    tokenizer = ["tokenizer.kind=char"]
    if size.vocab_size is not None:
        tokenizer = ["tokenizer.kind=bpe", f"tokenizer.vocab_size={size.vocab_size}"]
    return [
        str(Path(sys.executable).parent / "vorox"), *verb, str(ROOT / "configs" / "char_demo.yaml"), *tokenizer,
        f"data.sources.0.paths=[{folder}/input.txt]", f"data.cache.directory={folder}/cache",
        f"run.directory={folder}/out", f"model.num_layers={size.num_layers}", f"model.num_heads={size.num_heads}",
        f"model.hidden_size={size.hidden_size}", f"data.sequence_length_tokens={size.row_tokens}",
        f"train.global_batch_sequences={size.batch_rows}", f"train.micro_batch_sequences={size.batch_rows}",
        f"train.num_steps={size.steps}", f"schedule.warmup_steps={size.steps // 20}", "checkpoint.every_steps=null",
        "eval.every_steps=null", f"eval.num_sequences={size.batch_rows}", "eval.prompts=[]",
        f"log.every_steps={max(1, min(10, size.steps // 4))}",
    ]  # fmt: skip


def vorox_rate(size: Size, printed: str, folder: Path) -> float:
    (run,) = (folder / "out").iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["values"]["step_seconds"] for line in lines if "step_seconds" in line.get("values", {})]
    return size.tokens_per_step / statistics.median(seconds)


def nanogpt(directory: Path) -> Contender:
    def command(size: Size, folder: Path) -> list[str]:
        flags = {
            "dataset": folder, "out_dir": folder / "out", "device": "cpu", "compile": False, "eval_iters": 1,
            "log_interval": 1, "eval_interval": size.steps - 1, "always_save_checkpoint": True,
            "block_size": size.row_tokens, "batch_size": size.batch_rows, "n_layer": size.num_layers,
            "n_head": size.num_heads, "n_embd": size.hidden_size, "dropout": 0.0, "max_iters": size.steps - 1,
            "lr_decay_iters": size.steps, "warmup_iters": size.steps // 20,
        }  # fmt: skip
        return [sys.executable, "train.py", "config/train_shakespeare_char.py",
                *(f"--{key}={value}" for key, value in flags.items())]  # fmt: skip

    def rate(size: Size, printed: str, folder: Path) -> float:
        milliseconds = [float(found) for found in re.findall(r"^iter \d+: .*time ([\d.]+)ms", printed, re.MULTILINE)]
        return size.tokens_per_step / statistics.median(milliseconds[1:]) * 1e3

    missing = "" if (directory / "train.py").exists() else f"no train.py in {directory}"
    return Contender(command, rate, directory, missing)


def script(name: str, needs: Sequence[str], rate: Callable[[Size, str, Path], float]) -> Contender:
    """A program of ``contenders/``."""

    def command(size: Size, folder: Path) -> list[str]:
        return [sys.executable, str(HERE / "contenders" / f"{name}.py"), json.dumps(asdict(size)), str(folder)]

    absent = [package for package in needs if find_spec(package) is None]
    return Contender(command, rate, missing=f"not installed: {', '.join(absent)}" if absent else "")


def trainer_rate(size: Size, printed: str, folder: Path) -> float:
    return size.tokens_per_step / statistics.median(json.loads(printed.splitlines()[-1])["step_seconds"][1:])


def litgpt_rate(size: Size, printed: str, folder: Path) -> float:
    milliseconds = [float(found) for found in re.findall(r"iter time: ([\d.]+) ms", printed)]
    return size.tokens_per_step / statistics.median(milliseconds[1:]) * 1e3


def write_data(size: Size, folder: Path) -> None:
    """Write the text, and its ids as nanoGPT's prepare.py does, for those that take ids."""
    from vorox.core.schema.tokenizer import TokenizerConfig
    from vorox.data.tokenizers.loading import train

    library = Path(sysconfig.get_path("stdlib"))
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(library.glob("*.py")))[:TEXT_CHARACTERS]
    (folder / "input.txt").write_text(text, encoding="utf-8")
    kind = {"kind": "char"} if size.vocab_size is None else {"kind": "bpe", "vocab_size": size.vocab_size}
    tokenizer = train(TokenizerConfig.model_validate(kind), [text])
    ids = tokenizer.encode(text).astype(np.uint16)
    split = int(len(ids) * 0.9)
    ids[:split].tofile(folder / "train.bin")
    ids[split:].tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": tokenizer.vocab_size}))
    (folder / "meta.json").write_text(json.dumps({"vocab_size": tokenizer.vocab_size}))


def run(command: Sequence[str], directory: Path) -> tuple[float, str]:
    """Run a program to its end: seconds, and what it printed.

    Raises:
        RuntimeError: It failed.
    """
    environment = {name: value for name, value in os.environ.items() if not OWN_BUSINESS.match(name)}
    environment |= {"HF_HUB_OFFLINE": "1"}
    started = time.perf_counter()
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command[:3])} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    return seconds, done.stdout


def measure(size: Size, contenders: dict[str, Contender], rounds: int) -> dict[str, list[dict[str, float]]]:
    trials: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(size, folder)
        for contender in contenders.values():
            if contender.prepare is not None:
                run(contender.prepare(size, folder), contender.directory)
        names = list(contenders)
        for number in range(rounds):
            for who in names[number % len(names) :] + names[: number % len(names)]:
                contender = contenders[who]
                shutil.rmtree(folder / "out", ignore_errors=True)
                seconds, printed = run(contender.command(size, folder), contender.directory)
                trials[who].append({"seconds": seconds, "tokens_per_second": contender.rate(size, printed, folder)})
                print(
                    f"round {number + 1}, {who}: {seconds:.1f} s, {trials[who][-1]['tokens_per_second']:,.0f} tokens/s"
                )
    return trials


def machine() -> dict[str, Any]:
    """Processor, instruction set, memory, load, and the versions of everything that computes."""
    from vorox.core.platform.environment import usable_cores

    facts = dict(
        line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line
    )  # of the last core
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    known = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "asimd", "sve")
    flags = set((facts.get("flags") or facts.get("Features", "")).split())
    versions: dict[str, str] = {"python": sys.version.split()[0]}
    for package in ("vorox", "torch", "numpy", "transformers", "accelerate", "litgpt", "lightning"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "processor": facts.get("model name", "unknown"), "cores": usable_cores(),
        "instruction_set": [flag for flag in known if flag in flags],
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "load_before": os.getloadavg()[0], "versions": versions,
    }  # fmt: skip


def commit_of(directory: Path) -> str:
    command = ["git", "-C", str(directory), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def comparisons(record: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per size, peer and number, where we are slowest first."""
    rows: list[dict[str, Any]] = []
    for size in record["sizes"].values():
        ours = size["trials"][VOROX]
        for peer, theirs in size["trials"].items():
            if peer == VOROX:
                continue
            for key, better in (("seconds", "lower"), ("tokens_per_second", "higher")):
                pairs = [(mine[key], other[key]) for mine, other in zip(ours, theirs, strict=True)]
                ratios = [other / mine if better == "lower" else mine / other for mine, other in pairs]
                mine, other = zip(*pairs, strict=True)
                rows.append({"size": size["name"], "steps": size["steps"], "peer": peer, "key": key,
                             "ours": mine, "theirs": other, "ratios": ratios})  # fmt: skip
    return sorted(rows, key=lambda row: statistics.median(row["ratios"]))


def table(record: dict[str, Any]) -> str:
    """The results as Markdown, losses first."""

    def spread(values: Sequence[float], form: str) -> str:
        return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"

    facts = record["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    lines = [
        f"{facts['processor']}, {facts['cores']} cores ({', '.join(facts['instruction_set'])}), "
        f"{facts['memory_gib']} GiB, load average {facts['load_before']:.1f} at start; {versions}; commits: "
        + ", ".join(f"{name} {commit}" for name, commit in record["commits"].items())
        + f". {record['rounds']} interleaved rounds, medians (smallest to largest); above 1.00 vorox is faster.",
        "",
        "| model and batch | measured | compared with | peer | vorox | vorox / peer (speed ratio) |",
        "|---|---|---|---|---|---|",
    ]
    for row in comparisons(record):
        whole = row["key"] == "seconds"
        form, what = (".1f", f"whole program of {row['steps']} steps, s") if whole else (",.0f", "tokens/s as reported")
        ratio = statistics.median(row["ratios"])
        shown = f"**{ratio:.2f}**" if ratio < 1 else f"{ratio:.2f}"
        shown += f" ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})"
        lines.append(f"| {row['size']} | {what} | {row['peer']} | {spread(row['theirs'], form)} | "
                     f"{spread(row['ours'], form)} | {shown} |")  # fmt: skip
    lines += ["", *(f"Absent: {name} ({why})." for name, why in record["absent"].items())]
    return "\n".join(lines).rstrip()


def write_docs(text: str) -> None:
    """Replace the table of the page, between its two marks."""
    page = DOCS.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCS.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--peers", nargs="+", metavar="NAME", help="Only these; litgpt compiles for a minute a run.")
    parser.add_argument("--steps", type=int, help="Instead of the steps of each size; to try the harness.")
    parser.add_argument("--nanogpt", type=Path, default=HERE / ".peers" / "nanoGPT", help="Its checkout.")
    parser.add_argument("--write-docs", action="store_true", help="Put the table into docs/performance.md.")
    given = parser.parse_args()
    contenders = {
        VOROX: Contender(
            lambda size, folder: [*vorox_command(["train"], size, folder), "--resume", "never"], vorox_rate,
            prepare=lambda size, folder: vorox_command(["data", "build"], size, folder),
        ),
        "nanoGPT": nanogpt(given.nanogpt.absolute()),
        "transformers.Trainer": script("transformers_trainer", ["transformers", "accelerate"], trainer_rate),
        "litgpt pretrain": script("litgpt_pretrain", ["litgpt", "lightning", "docstring_parser"], litgpt_rate),
    }  # fmt: skip
    absent = {name: contender.missing for name, contender in contenders.items() if contender.missing}
    absent |= {name: "not requested" for name in contenders if given.peers and name not in {VOROX, *given.peers}}
    present = {name: contender for name, contender in contenders.items() if name not in absent}
    commits = {name: commit_of(present[name].directory) for name in (VOROX, "nanoGPT") if name in present}
    record: dict[str, Any] = {
        "machine": machine(), "rounds": given.rounds, "sizes": {}, "commits": commits, "absent": absent,
    }  # fmt: skip
    for name in given.sizes:
        size = SIZES[name] if given.steps is None else Size(**{**asdict(SIZES[name]), "steps": given.steps})
        record["sizes"][name] = {**asdict(size), "trials": measure(size, present, given.rounds)}
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    (results / "train_programs.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("\n" + table(record))
    if given.write_docs:
        write_docs(table(record))


if __name__ == "__main__":
    main()
