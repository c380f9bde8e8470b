"""Continued pretraining: what a domain gains, what the general corpus loses, with and without replay of it.

    continued_pretraining.py [--steps 120] [--replay 0 1/4] [--base RUN] [--folder DIRECTORY] [--write-docs]

In: the quickstart, which pretrains on the source code of Python's standard library, or ``--base``, a finished run of
it. The domain is the Python language reference in English (``pydoc_data.topics``), which every Python has and the
quickstart does not read. A tenth of both corpora is held out. Out: one run per share of general rows, validated on both
held-out sets every few steps (``eval.by_source``), a table, ``results/continued_pretraining.json`` and a plot; with
``--write-docs`` also table and plot of docs/continued_pretraining.md. Every number is a function of the seed and of the
Python version.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from interleave import machine
from vorox.dashboard.exports.plotting import COLOURS, STYLE, render
from vorox.experiments.tracking import read_metrics
from vorox.records.run_lookup import find_run

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "continued_pretraining.md"
PLOT = ROOT / "docs" / "pictures" / "continued_pretraining.svg"
BEGIN, END = "<!-- continued_pretraining: begin -->", "<!-- continued_pretraining: end -->"
DOMAIN, GENERAL = "reference", "stdlib"
TITLES = {DOMAIN: "Domain: Python language reference", GENERAL: "General: Python source code"}
HELD_OUT_FRACTION = 0.1
"""Of both corpora, and of the quickstart: a larger one in the runs that continue would hold out files it has read."""
Curve = dict[int, float]
"""Bits per byte by step."""


def write_domain(path: Path) -> None:
    """Write the topics of the language reference, one per line."""
    lines = [json.dumps({"topic": name, "text": topics[name].strip()}) for name in sorted(topics)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def general_source(folder: Path | None) -> dict[str, Any]:
    """Return the quickstart's source, or a folder of text files in its place."""
    files = {"format": "python_stdlib"} if folder is None else {"format": "txt", "paths": [str(folder)]}
    return {"name": GENERAL, **files}


def settings(domain: Path, general: Mapping[str, Any], replay: Fraction, num_steps: int) -> dict[str, Any]:
    """Return the configuration of a run, as docs/continued_pretraining.md shows it."""
    weights = {DOMAIN: str(1 - replay)} | ({GENERAL: str(replay)} if replay else {})
    return {
        "preset": "quickstart",
        "data": {
            "sources": [
                {"name": DOMAIN, "format": "jsonl", "paths": [str(domain)]},
                dict(general),
            ],
            "validation": {"held_out_fraction": HELD_OUT_FRACTION},
            "stages": [{"start_tokens": 0, "weights": weights}],
        },
        "optimizer": {"name": "muon", "lr": 3.0e-3, "muon_lr": 6.0e-3},
        "schedule": {"name": "cosine", "warmup_steps": min(20, num_steps // 3), "min_lr_fraction": 0.1},
        "train": {"num_steps": num_steps},
        "eval": {"every_steps": max(1, num_steps // 4), "num_sequences": 64, "at_start": True, "by_source": True},
    }


def train(folder: Path, name: str, words: Sequence[str], options: Sequence[str]) -> Path:
    """Train a run in ``folder``, or find the finished one."""
    command = [sys.executable, "-m", "vorox", "train", *words, "--name", name, f"run.directory={folder}/runs", *options]
    subprocess.run(command, check=True, cwd=folder, stdout=sys.stderr)
    return find_run(folder / "runs", name)


def pretrain(folder: Path, general: Mapping[str, Any], options: Sequence[str]) -> Path:
    """Train the quickstart with the holdout of the runs that continue it."""
    words = ["quickstart", f"data.validation.held_out_fraction={HELD_OUT_FRACTION}"]
    if general != general_source(None):
        words.append(f"data.sources={json.dumps([general])}")
    return train(folder, "base", words, options)


def curves(run: Path) -> dict[str, Curve]:
    """Return the bits per byte of both held-out sets by step."""
    metrics = read_metrics(run)
    names = {source: f"eval/sources/{source}/bits_per_byte" for source in (DOMAIN, GENERAL)}
    return {
        source: {step: values[name] for step, values in metrics.items() if name in values}
        for source, name in names.items()
    }


def table(found: Mapping[str, Mapping[str, Curve]]) -> str:
    """Return the bits per byte before and after, as Markdown."""
    first = next(iter(found.values()))
    lines = ["| general rows | domain | change | general | change |", "|---|---|---|---|---|"]
    before = {source: curve[0] for source, curve in first.items()}
    lines.append(f"| before | {before[DOMAIN]:.3f} | | {before[GENERAL]:.3f} | |")
    for replay, by_source in found.items():
        cells = []
        for source in (DOMAIN, GENERAL):
            after = by_source[source][max(by_source[source])]
            cells += [f"{after:.3f}", f"{after / before[source] - 1:+.1%}"]
        lines.append(f"| {float(Fraction(replay)):.0%} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: Mapping[str, Mapping[str, Curve]]) -> bytes:
    """Return the plot: bits per byte of both sets by step, a line per share of general rows."""
    with matplotlib.style.context(STYLE, after_reset=True):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        axes: list[Axes] = figure.subplots(1, 2).tolist()
        for source, axis in zip((DOMAIN, GENERAL), axes, strict=True):
            for colour, (replay, by_source) in zip(COLOURS, found.items(), strict=False):
                curve = by_source[source]
                label = f"{float(Fraction(replay)):.0%} general rows"
                axis.plot([*curve], [*curve.values()], color=colour, marker="o", label=label)
            axis.axhline(next(iter(found.values()))[source][0], color="#808080", linestyle=":", linewidth=1)
            axis.set_title(TITLES[source])
            axis.set_xlabel("step of continued pretraining")
            axis.set_ylabel("bits per byte, held out")
        axes[1].legend()
        return render(figure, "svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--replay", nargs="+", type=Fraction, default=[Fraction(0), Fraction(1, 4)])
    parser.add_argument("--base", help="A finished run of the quickstart with that holdout. Default: train it.")
    parser.add_argument("--general", type=Path, help="A folder of .txt files as the general corpus.")
    parser.add_argument("--folder", type=Path, help="Where runs are kept; a repeated command continues them.")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--set", nargs="*", default=[], help="Settings of all runs, to test the harness.")
    parser.add_argument("--write-docs", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = (arguments.folder or Path(name)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        general = general_source(arguments.general)
        base = Path(arguments.base).resolve() if arguments.base else pretrain(folder, general, arguments.set)
        domain = folder / "reference.jsonl"
        write_domain(domain)
        found: dict[str, dict[str, Curve]] = {}
        for replay in arguments.replay:
            label = f"replay-{float(replay):g}"
            file = folder / f"{label}.yaml"
            file.write_text(json.dumps(settings(domain, general, replay, arguments.steps)))  # JSON is YAML
            run = train(folder, label, [str(file), "--from-weights", str(base)], arguments.set)
            found[str(replay)] = curves(run)
        plot = draw(found)
    print(table(found))
    arguments.results.mkdir(parents=True, exist_ok=True)
    record = {"steps": arguments.steps, "bits_per_byte": found, "machine": machine()}
    (arguments.results / "continued_pretraining.json").write_text(json.dumps(record, indent=2) + "\n")
    (arguments.results / "continued_pretraining.svg").write_bytes(plot)
    if arguments.write_docs:
        PLOT.write_bytes(plot)
        before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        DOCS.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
