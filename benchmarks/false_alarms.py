"""Whether the watchdog ends a healthy run whose data is slow: false_alarms.py [--minutes 30] [--timeout 10] [--seed 1]

``vorox train`` streams from a web server on this machine that answers as a bad store does: each response is delayed by
up to 1.25 times the time limit of the watchdog, one connection in ten is closed instead, and one response in forty
begins an outage of three times the limit, in which every request gets status 503. The model is small, so the run waits
for data most of the time. The given time after its first request, Ctrl-C ends the run.

A stall that the watchdog reports is a false alarm. The result is its number (0 or 1, because it ends the run), with
what the run met: steps, the longest time between two of them, times without data as the run reports them, responses.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import interleave

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from servers.recorded import Handler, Request, serving  # noqa: E402
from servers.web import WebServer  # noqa: E402

STALLED, STOPPED = 6, 75
NUM_FILES, FILE_CHARACTERS, DOCUMENT_CHARACTERS = 8, 1_200_000, 2_000
MAX_DELAY = 1.25
"""In units of the time limit, which is also the client's: a fifth of the responses come too late."""
BROKEN_FRACTION, OUTAGE_FRACTION = 1 / 10, 1 / 40
RETENTION_BYTES = 3 << 20
"""Less than the text, so that it is fetched again in every epoch."""
_END_SECONDS = 300.0


@dataclass
class SlowStore:
    """Delays, breaks and refuses the responses of a web server.

    Attributes:
        counts: Responses by what happened to them.
        is_asked: Set once a request has come.
    """

    server: WebServer
    timeout_seconds: float
    random: random.Random
    counts: Counter[str] = field(default_factory=Counter[str])
    is_asked: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _outage_ends_at: float = 0.0

    def respond(self, handler: Handler, request: Request) -> None:
        with self._lock:
            now, chance = time.monotonic(), self.random.random()
            if chance < OUTAGE_FRACTION and now > self._outage_ends_at:
                self._outage_ends_at = now + 3 * self.timeout_seconds
                self.counts["outages"] += 1
            is_out = now < self._outage_ends_at
            is_broken = chance > 1 - BROKEN_FRACTION
            delay_seconds = self.random.uniform(0, MAX_DELAY * self.timeout_seconds)
            self.counts["refused" if is_out else "broken" if is_broken else "sent"] += 1
        self.is_asked.set()
        if is_out:
            handler.send(request, 503, {"Retry-After": "1"}, b"")
            return
        time.sleep(delay_seconds)
        if is_broken:
            handler.close_connection = True
        else:
            self.server.respond(handler, request)


def write_texts(folder: Path) -> None:
    """Write documents of the standard library's source as files of JSON lines."""
    library = Path(sysconfig.get_path("stdlib"))
    text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in sorted(library.rglob("*.py"))[:900])
    for number in range(NUM_FILES):
        part = text[number * FILE_CHARACTERS : (number + 1) * FILE_CHARACTERS]
        documents = [part[start : start + DOCUMENT_CHARACTERS] for start in range(0, len(part), DOCUMENT_CHARACTERS)]
        lines = "".join(json.dumps({"text": document}) + "\n" for document in documents)
        (folder / f"{number:02d}.jsonl").write_text(lines, encoding="utf-8")


def write_config(folder: Path, url: str, timeout_seconds: float) -> Path:
    """Write the configuration of the run as JSON, which is YAML."""
    file = folder / "slow.yaml"
    urls = [f"{url}/{number:02d}.jsonl" for number in range(NUM_FILES)]
    source = {"name": "slow", "format": "jsonl", "paths": urls, "stall_seconds": timeout_seconds}
    config = {
        "data": {
            "mode": "streaming", "sources": [source],
            "validation": {"held_out_fraction": 0}, "sequence_length_tokens": 128,
            "growth": {"max_segment_units": 4}, "streaming": {"retention_bytes": RETENTION_BYTES},
            "cache": {"directory": str(folder / "cache"), "unit_bytes": 1 << 17},
        },
        "tokenizer": {"kind": "byte"},
        "model": {"num_layers": 1, "hidden_size": 32, "num_heads": 2},
        "train": {"global_batch_sequences": 16, "micro_batch_sequences": 16, "num_steps": 1_000_000},
        "eval": {"every_steps": None, "at_end": False, "prompts": []},
        "checkpoint": {"every_steps": 2000},
        "log": {"every_steps": 1, "matmul_peak": False},
        "run": {"directory": str(folder / "runs")},
        "runtime": {"rehearsal": False, "stall_timeout_seconds": timeout_seconds},
    }  # fmt: skip
    file.write_text(json.dumps(config), encoding="utf-8")
    return file


def train(words: Sequence[str], is_asked: threading.Event, seconds: float) -> tuple[int, str, float]:
    """Run a command, interrupt it some time after its first request; return exit code, output and seconds.

    The start of the command is not counted: on a busy machine it may take longer than the time to measure.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )

    def interrupt() -> None:
        if is_asked.wait(_END_SECONDS) and not has_ended.wait(seconds):
            process.send_signal(signal.SIGINT)

    has_ended = threading.Event()
    interrupter = threading.Thread(target=interrupt, daemon=True)
    interrupter.start()
    try:
        output, _ = process.communicate(timeout=seconds + 2 * _END_SECONDS)
    finally:
        has_ended.set()
        process.kill()
    return process.returncode, output, time.monotonic() - started


def step_times(runs: Path) -> list[float]:
    """Return the times at which steps were logged, in seconds."""
    lines = [line for path in runs.glob("*/metrics.jsonl") for line in path.read_text().splitlines()]
    return [float(record["time"]) for record in map(json.loads, lines) if "values" in record]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--timeout", type=float, default=10.0, help="runtime.stall_timeout_seconds.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=interleave.RESULTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "texts").mkdir()
        write_texts(folder / "texts")
        store = SlowStore(WebServer(folder / "texts"), given.timeout, random.Random(given.seed))
        with serving(store.respond) as (url, _):
            words = [sys.executable, "-m", "vorox", "train", str(write_config(folder, url, given.timeout))]
            code, output, seconds = train(words, store.is_asked, 60 * given.minutes)
        times = step_times(folder / "runs")
    gaps = [after - before for before, after in itertools.pairwise(times)]
    outages = [float(text) for text in re.findall(r"data flows again after ([\d.]+) s", output)]
    found: dict[str, Any] = {
        "machine": interleave.machine(), "minutes": seconds / 60, "timeout_seconds": given.timeout,
        "false_alarms": int(code == STALLED), "exit_code": code, "steps": len(times),
        "longest_wait_seconds": max(gaps, default=0.0), "waits_above_timeout": sum(gap > given.timeout for gap in gaps),
        "outages": len(outages), "longest_outage_seconds": max(outages, default=0.0), "responses": dict(store.counts),
    }  # fmt: skip
    given.results.mkdir(parents=True, exist_ok=True)
    (given.results / "false_alarms.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(output[-2000:])
    print(json.dumps(found, indent=1))
    sys.exit(0 if code in {0, STOPPED} else 1)


if __name__ == "__main__":
    main()
