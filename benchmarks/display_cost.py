"""What display, tracker, monitors and an open dashboard cost a run: whole programs, one process per contender, in turn.

    display_cost.py [--rounds 7] [--steps 300] [--hidden-size 192] [--wandb] [--results DIR] [--write-docs]

Contenders, each ``vorox train`` of the same model and batches:

* silent: nothing is logged between the first and the last step; the reference of every ratio.
* plain lines: output into a pipe, ``log.every_steps`` at its default; metrics file, TensorBoard where it is installed;
  watchdog.
* live display: the same on a pseudo-terminal.
* live display and dashboard: that, ``vorox dash`` on its folder, and a client that follows the server-sent events and
  loads the page of the run after each, as the page in a browser does.

Wall time of two programs cannot show half a percent on a machine that is noisier than that, so each process also
reports its processor time per step and the time that its training thread spends in calls of the display, the tracker
and all monitors (``contenders/timed_train.py`` defines the figures). The dashboard's own processor time is given per
second of its life.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import pty
import re
import shutil
import statistics
import struct
import subprocess
import sys
import sysconfig
import tempfile
import termios
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import interleave

ROOT = Path(__file__).parents[1]
TIMED_TRAIN = Path(__file__).parent / "contenders" / "timed_train.py"
DOCS = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- display_cost: begin -->", "<!-- display_cost: end -->"
SILENT = "silent"
TEXT_CHARACTERS = 1_000_000
ROWS, COLUMNS = 40, 120
REALISTIC_SECONDS = (0.05, 0.2)
BUDGET_FRACTION = 0.005
_START_SECONDS = 30.0
FIGURES = ("step_seconds", "cpu_seconds", "display_seconds", "tracker_seconds", "record_seconds")


@dataclass(frozen=True)
class Contender:
    """How a run is shown."""

    name: str
    is_logged: bool = True
    has_terminal: bool = False
    has_dashboard: bool = False


CONTENDERS = (
    Contender(SILENT, is_logged=False),
    Contender("plain lines"),
    Contender("live display", has_terminal=True),
    Contender("live display and dashboard", has_terminal=True, has_dashboard=True),
)


@dataclass(frozen=True)
class Job:
    """The run that every contender trains."""

    folder: Path
    steps: int
    warmup_steps: int
    hidden_size: int
    sinks: Sequence[str]

    def words(self, contender: Contender) -> list[str]:
        """The command line of ``vorox train``."""
        every = [] if contender.is_logged else [f"log.every_steps={self.steps}"]
        return [
            str(ROOT / "configs" / "char_demo.yaml"), f"data.sources.0.paths=[{self.folder}/input.txt]",
            f"data.cache.directory={self.folder}/cache", f"run.directory={self.folder}/out",
            f"model.hidden_size={self.hidden_size}", "data.sequence_length_tokens=128",
            "train.global_batch_sequences=8", "train.micro_batch_sequences=8", f"train.num_steps={self.steps}",
            "schedule.warmup_steps=1", "checkpoint.every_steps=null", "checkpoint.at_end=false",
            "eval.every_steps=null", "eval.at_end=false", "eval.prompts=[]", "log.every_steps=10", *every,
            *((*self.sinks, "runtime.stall_timeout_seconds=600") if contender.is_logged else ()), "--resume", "never",
        ]  # fmt: skip


def write_text(folder: Path) -> None:
    library = Path(sysconfig.get_path("stdlib"))
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(library.glob("*.py")))
    (folder / "input.txt").write_text(text[:TEXT_CHARACTERS], encoding="utf-8")


def train(job: Job, contender: Contender) -> dict[str, Any]:
    """Run one contender to its end; return its figures.

    Raises:
        RuntimeError: The run or the dashboard failed.
    """
    shutil.rmtree(job.folder / "out", ignore_errors=True)
    (job.folder / "out").mkdir()
    report = job.folder / "report.json"
    report.unlink(missing_ok=True)
    command = [sys.executable, str(TIMED_TRAIN), str(report), str(job.warmup_steps), *job.words(contender)]
    with contextlib.ExitStack() as stack:
        dashboard = stack.enter_context(Dashboard.open(job.folder / "out")) if contender.has_dashboard else None
        code, output = run_on_terminal(command) if contender.has_terminal else run_in_pipe(command)
        if code:
            raise RuntimeError(f"{contender.name} ended with {code}:\n{output[-3000:]}")
        found: dict[str, Any] = json.loads(report.read_text())
        if dashboard is not None:
            found |= dashboard.figures()
    return found


def environment() -> dict[str, str]:
    return {**os.environ, "TERM": "xterm-256color", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


def run_in_pipe(command: Sequence[str]) -> tuple[int, str]:
    done = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def run_on_terminal(command: Sequence[str]) -> tuple[int, str]:
    """Run a command on a pseudo-terminal that is read as fast as it is written."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    parts: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the terminal is closed
            while part := os.read(ours, 1 << 16):
                parts.append(part)

    process = subprocess.Popen(command, env=environment(), stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    code = process.wait()
    reader.join(10)
    os.close(ours)
    return code, b"".join(parts).decode(errors="replace")


class Dashboard:
    """``vorox dash`` in a process of its own, with one client.

    Attributes:
        num_events: Server-sent events that named a changed run.
        num_pages: Pages that the client has loaded after them.
    """

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.num_events = self.num_pages = 0
        self._process, self._port = process, port
        self._started, self._is_open = time.perf_counter(), True
        self._client = threading.Thread(target=self._follow, daemon=True)
        self._client.start()

    @classmethod
    @contextlib.contextmanager
    def open(cls, folder: Path) -> Generator[Dashboard]:
        command = [sys.executable, "-m", "vorox", "dash", str(folder), "--port", "0", "--no-token"]
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if found := re.search(r"http://[^:]+:(\d+)", line):
                    break
            else:
                raise RuntimeError("vorox dash did not print its address")
            dashboard = cls(process, int(found[1]))
            yield dashboard
            dashboard._is_open = False
        finally:
            process.terminate()
            process.wait()

    def figures(self) -> dict[str, float]:
        """Processor seconds of the server per second since its start, and what the client has received.

        Raises:
            RuntimeError: It has received nothing, so the run did without a dashboard.
        """
        if not self.num_pages:
            raise RuntimeError("The client of the dashboard has loaded no page")
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return {
            "dashboard_cpu_per_second": cpu / (time.perf_counter() - self._started), "events": self.num_events,
            "pages": self.num_pages,
        }  # fmt: skip

    def _follow(self) -> None:
        """Follow the events and load the page of a run that has changed, until the server ends."""
        with contextlib.suppress(OSError, http.client.HTTPException):  # figures() notices if nothing was received
            response = self._connect()
            while self._is_open and (line := response.readline()):
                if line.startswith(b"data: ["):
                    self.num_events += 1
                    for run in json.loads(line.removeprefix(b"data: ")):
                        self._load_page(run)

    def _connect(self) -> http.client.HTTPResponse:
        """Open the stream of events as soon as the server accepts connections: it prints its address before that."""
        ends_at = time.monotonic() + _START_SECONDS
        while True:
            try:
                return self._get("/api/live")
            except ConnectionRefusedError:
                if time.monotonic() > ends_at:
                    raise
                time.sleep(0.05)

    def _load_page(self, run: str) -> None:
        """Request what the page of a run requests when the run has changed (static/main.js, pages/curves.js)."""
        for path in ("runs", f"curves?{urlencode({'id': run})}", f"events?{urlencode({'id': run})}"):
            self._get(f"/api/{path}").read()
        self.num_pages += 1

    def _get(self, path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        connection.request("GET", path)
        return connection.getresponse()


def measure(job: Job, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Run every contender once per round, in an order that rotates."""
    trials: dict[str, list[dict[str, Any]]] = {contender.name: [] for contender in CONTENDERS}
    for number in range(rounds):
        shift = number % len(CONTENDERS)
        for contender in CONTENDERS[shift:] + CONTENDERS[:shift]:
            found = train(job, contender)
            trials[contender.name].append(found)
            print(f"round {number + 1}, {contender.name}: {found['step_seconds'] * 1e3:.1f} ms a step", flush=True)
    return trials


def spread(values: Sequence[float], form: str) -> str:
    low, high = interleave.quantile(list(values), 0.1), interleave.quantile(list(values), 0.9)
    return f"{statistics.median(values):{form}} ({low:{form}} to {high:{form}})"


def table(record: dict[str, Any]) -> str:
    """The results as Markdown: times per step, and ratios to the silent run of the same round."""
    trials, facts = record["trials"], record["machine"]
    lines = [
        f"{facts['cpu_count']} cores, {facts['platform']}, Python {facts['python']}, load average "
        f"{record['load_before']:.1f} at start; {record['steps']} steps of width {record['hidden_size']}, sinks: "
        f"{', '.join(record['sinks'])}; {record['rounds']} interleaved rounds, median (10th to 90th percentile). "
        "Ratios are to silent.",
        "",
        "| | ms per step | ratio | CPU ms per step | ratio | display, us per step | tracker, us per step | both | "
        "both, CPU | all monitors | all monitors, CPU |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in trials.items():
        ratios = {
            key: [one[key] / base[key] for one, base in zip(found, trials[SILENT], strict=True)]
            for key in ("step_seconds", "cpu_seconds")
        }
        columns = {key: [one[key] for one in found] for key in FIGURES}
        shares = [
            [100 * sum(one[f"{call}{kind}_seconds"] for call in calls) / one["step_seconds"] for one in found]
            for calls in (("display", "tracker"), ("monitor",))
            for kind in ("", "_cpu")
        ]
        cells = [
            spread([1e3 * value for value in columns["step_seconds"]], ".1f"), spread(ratios["step_seconds"], ".3f"),
            spread([1e3 * value for value in columns["cpu_seconds"]], ".1f"), spread(ratios["cpu_seconds"], ".3f"),
            spread([1e6 * value for value in columns["display_seconds"]], ".0f"),
            spread([1e6 * value for value in columns["tracker_seconds"]], ".0f"),
            *(f"{spread(share, '.3f')}%" for share in shares),
        ]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(cells)} |")
    dash = [one for found in trials.values() for one in found if "events" in one]
    rate = spread([100 * one["dashboard_cpu_per_second"] for one in dash], ".1f")
    lines += ["", f"The dashboard used {rate}% of one core, for {spread([one['pages'] for one in dash], '.0f')} pages."]
    return "\n".join(lines)


def verdict(record: dict[str, Any]) -> str:
    """Whether the cost is within the budget: time of the training thread in display and tracker, with a dashboard open.

    Each run is compared with its own steps, so the noise between runs does not count.
    """
    shares = [
        (one["display_seconds"] + one["tracker_seconds"]) / one["step_seconds"]
        for one in record["trials"][CONTENDERS[-1].name]
    ]
    share = statistics.median(shares)
    within = "within" if share < BUDGET_FRACTION else "ABOVE"
    return (
        f"Verdict: display and tracker, with the dashboard open, take {share:.3%} of the time of a step in the "
        f"training thread (worst round {max(shares):.3%}): {within} the budget of {BUDGET_FRACTION:.1%}."
    )


def write_docs(text: str) -> None:
    """Replace the table of the page, between its two marks."""
    page = DOCS.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCS.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup-steps", type=int, default=20, help="The first steps, which do not count.")
    parser.add_argument("--hidden-size", type=int, default=192, help="Sets the length of a step.")
    parser.add_argument("--wandb", action="store_true", help="Also log to Weights & Biases, offline.")
    parser.add_argument("--results", type=Path, default=interleave.RESULTS)
    parser.add_argument("--write-docs", action="store_true", help="Put the table into docs/performance.md.")
    given = parser.parse_args()
    if given.steps < given.warmup_steps + 2:
        parser.error("--steps must exceed --warmup-steps by at least 2")
    sinks = ["log.tensorboard=true"] if find_spec("tensorboard") else []
    if given.wandb:
        os.environ["WANDB_MODE"] = "offline"
        sinks.append("log.wandb=true")
    with tempfile.TemporaryDirectory() as name:
        job = Job(Path(name), given.steps, given.warmup_steps, given.hidden_size, sinks)
        write_text(job.folder)
        load_before = os.getloadavg()[0]
        train(Job(job.folder, given.warmup_steps + 2, given.warmup_steps, given.hidden_size, sinks), CONTENDERS[0])
        trials = measure(job, given.rounds)
    record = {
        "machine": interleave.machine(), "load_before": load_before, "rounds": given.rounds, "steps": given.steps,
        "hidden_size": given.hidden_size, "sinks": ["metrics file", *sinks], "trials": trials,
    }  # fmt: skip
    given.results.mkdir(parents=True, exist_ok=True)
    (given.results / "display_cost.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    text = f"{table(record)}\n\n{verdict(record)}"
    print("\n" + text)
    seconds = statistics.median(one["step_seconds"] for one in trials[SILENT])
    if not REALISTIC_SECONDS[0] <= seconds <= REALISTIC_SECONDS[1]:
        print(f"\nA step took {seconds * 1e3:.0f} ms, not 50 to 200 ms: choose another --hidden-size.")
    if given.write_docs:
        write_docs(text)


if __name__ == "__main__":
    main()
