"""How fast ``vorox dash`` opens many long runs: dashboard_open.py [--runs 200] [--trials 5] [--write-docs]

Every run has one line of metrics per step. A few files are written and hard-linked into all run directories, so the
disk holds ``--files`` of them; the dashboard reads each link as a file of its own. Chromium runs without a window at
1,280 x 900. Times are from the browser's ``goto``:

* list: until the rows of all runs are on the page, with their loss curves.
* curves: until the loss of one run is drawn; a file above 64 MiB is sampled at first.
* all points: until its metrics are complete.
* frame: the longest and the 99th percentile of times between two frames while the list scrolls, and while the pointer
  moves over the curves.

The first trial is the first request after the server's start; the others open a new page of the same server.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

import interleave

CHROMIUM = "/usr/bin/chromium"
DOCS = Path(__file__).parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- dashboard_open: begin -->", "<!-- dashboard_open: end -->"
ROWS = {
    "list_seconds": "list of all runs with their loss curves",
    "curves_seconds": "curves of one run",
    "all_points_seconds": "all of its points",
    "scroll_longest_ms": "longest time between two frames while the list scrolls",
    "hover_longest_ms": "the same while the pointer moves over the curves",
}
"""Rows of the table, by figure."""
FRAMES = """() => new Promise(done => {
  const gaps = [], end = performance.now() + 3000; let last = performance.now();
  const next = now => {
    gaps.push(now - last); last = now;
    now < end ? requestAnimationFrame(next) : done(gaps.slice(1));
  };
  requestAnimationFrame(next);
})"""
SCROLL = "() => { const timer = setInterval(() => scrollBy(0, 40), 16); setTimeout(() => clearInterval(timer), 2800); }"


def write_metrics(file: Path, num_steps: int, seed: int) -> None:
    noise = random.Random(seed)
    with file.open("w", encoding="utf-8") as out:
        for step in range(1, num_steps + 1):
            values = {
                "loss": 2 + 8 / math.sqrt(step) + noise.gauss(0, 0.05), "learning_rate": 1e-3 * (1 - step / num_steps),
                "grad_norm": abs(noise.gauss(1, 0.2)), "tokens_per_second": noise.gauss(1e5, 1e3),
                "tokens_total": step * 4096.0, "step_seconds": 0.04, "model_flops_per_second": 8e13,
                "memory/host_bytes": 1e9, "queue_depth": 4.0,
            }  # fmt: skip
            out.write(json.dumps({"step": step, "attempt": 1, "time": 1.7e9 + 0.04 * step, "values": values}) + "\n")


def write_runs(folder: Path, num_runs: int, num_steps: int, num_files: int) -> None:
    files = [folder / f"metrics-{number}.jsonl" for number in range(num_files)]
    for number, file in enumerate(files):
        write_metrics(file, num_steps, number)
    for number in range(num_runs):
        run = folder / "runs" / f"run-{number:03d}-0123abcd"
        run.mkdir(parents=True)
        started = f"2026-01-01T{number // 60 % 24:02d}:{number % 60:02d}:00.000Z"
        record = {
            "format": "vorox-run/2", "run_id": run.name, "config_digest": "0" * 64, "created_at": started,
            "attempts": [{"attempt": 1, "started_at": started, "ended_at": started, "outcome": "finished"}],
        }  # fmt: skip
        (run / "run.json").write_text(json.dumps(record), encoding="utf-8")
        os.link(files[number % num_files], run / "metrics.jsonl")


@contextlib.contextmanager
def dashboard(folder: Path) -> Generator[str]:
    command = [sys.executable, "-u", "-m", "vorox", "dash", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
        finally:
            server.terminate()


def trial(page: Page, url: str, num_runs: int) -> dict[str, float]:
    """Open the list and one run; return seconds, and milliseconds between frames."""
    found: dict[str, float] = {}
    started = time.perf_counter()
    page.goto(url)
    page.locator("tbody tr svg").nth(num_runs - 1).wait_for(state="attached", timeout=120_000)
    found["list_seconds"] = time.perf_counter() - started
    page.evaluate(SCROLL)
    found |= frames("scroll", page.evaluate(FRAMES))
    run = f"run-{random.randrange(num_runs):03d}-0123abcd"
    started = time.perf_counter()
    page.goto(f"{url.split('?')[0]}#/run/{run}/curves")
    page.wait_for_selector(".uplot canvas", timeout=120_000)
    found["curves_seconds"] = time.perf_counter() - started
    page.locator(".controls [role=status]").wait_for(state="hidden", timeout=120_000)
    found["all_points_seconds"] = time.perf_counter() - started
    chart = page.locator(".u-over").first.bounding_box()
    assert chart is not None
    page.evaluate(f"() => {{ window.frames_ = ({FRAMES})(); }}")
    for number in range(90):
        page.mouse.move(chart["x"] + chart["width"] * (number % 45) / 45, chart["y"] + chart["height"] / 2)
    found |= frames("hover", page.evaluate("() => window.frames_"))
    return found


def frames(name: str, gaps: list[float]) -> dict[str, float]:
    ordered = sorted(gaps)
    return {f"{name}_p99_ms": ordered[int(0.99 * (len(ordered) - 1))], f"{name}_longest_ms": ordered[-1]}


def table(trials: list[dict[str, Any]]) -> str:
    """The first trial and the median, as Markdown."""
    lines = [f"| | first trial | median of {len(trials)} |", "|---|---|---|"]
    for key, name in ROWS.items():
        form = "{:.0f} ms" if key.endswith("_ms") else "{:.1f} s"
        cells = (trials[0][key], statistics.median(one[key] for one in trials))
        lines.append(f"| {name} | {' | '.join(map(form.format, cells))} |")
    return "\n".join(lines)


def write_docs(text: str) -> None:
    """Replace the table of the page, between its two marks."""
    before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCS.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--files", type=int, default=10, help="Different metrics files.")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--results", type=Path, default=interleave.RESULTS)
    parser.add_argument("--write-docs", action="store_true", help="Put the table into docs/performance.md.")
    given = parser.parse_args()
    trials: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        write_runs(Path(name), given.runs, given.steps, min(given.files, given.runs))
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        with dashboard(Path(name) / "runs") as url:
            for _ in range(given.trials):
                context = browser.new_context(viewport={"width": 1280, "height": 900})
                trials.append(trial(context.new_page(), url, given.runs))
                context.close()
                print(json.dumps({key: round(value, 3) for key, value in trials[-1].items()}), flush=True)
        browser.close()
    record = {"machine": interleave.machine(), "runs": given.runs, "steps": given.steps, "trials": trials}
    given.results.mkdir(parents=True, exist_ok=True)
    (given.results / "dashboard_open.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    text = f"{given.runs} runs of {given.steps:,} steps.\n\n{table(trials)}"
    print("\n" + text)
    if given.write_docs:
        write_docs(text)


if __name__ == "__main__":
    main()
