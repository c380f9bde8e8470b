"""Builds and streams from an object store: one version of Vorox against another, whole programs in turn.

    store_reads.py --checkout PATH [--python PATH] [--rounds 5] [--megabytes 64] [--latency-milliseconds 0 30]

Writes jsonl files to a local S3 (moto, in a process of its own, behind a proxy that answers every request that much
later), then runs `vorox data build` and 40 streamed steps of a small model with the source trees of ``--checkout`` and
of this repository, each in a new process with an empty cache. Out: seconds from start to end, and the processor time of
the process; a ratio above 1 means that this repository is faster. ``--python`` is the other version's interpreter, if
it needs packages of its own.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import interleave

ROOT = Path(__file__).parents[1]
NUM_FILES = 16
BUCKET = "corpus"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
MODEL = [
    "model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "data.sequence_length_tokens=256",
    "tokenizer.kind=byte", "train.num_steps=40", "train.global_batch_sequences=64", "train.micro_batch_sequences=64",
    "data.sources=[{name: corpus, format: jsonl, paths: ['s3://corpus/']}]", "data.cache.unit_bytes=4194304",
    "checkpoint.every_steps=null", "eval.every_steps=null",
]  # fmt: skip


class Delayed(BaseHTTPRequestHandler):
    """Forwards a request to the store after a delay."""

    protocol_version = "HTTP/1.1"
    store: tuple[str, int]
    delay_seconds: float

    def do_GET(self) -> None:
        time.sleep(self.delay_seconds)
        connection = http.client.HTTPConnection(*self.store)
        connection.request(self.command, self.path, headers=dict(self.headers))
        answer = connection.getresponse()
        body = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(body)
        connection.close()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@contextmanager
def delayed(store: str, delay_seconds: float) -> Any:
    """The address of a proxy in front of the store."""
    parts = urlsplit(store)
    handler = type("Handler", (Delayed,), {"store": (parts.hostname, parts.port), "delay_seconds": delay_seconds})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def serve(megabytes: int, delays_milliseconds: list[float]) -> None:
    """Fill a store, print the addresses of its proxies and wait: what the child process does."""
    import botocore.session
    from moto.server import ThreadedMotoServer

    store = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    store.start()
    host, port = store.get_host_and_port()
    client = botocore.session.get_session().create_client("s3", endpoint_url=f"http://{host}:{port}")
    client.create_bucket(Bucket=BUCKET)
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(5000)]
    for number in range(NUM_FILES):
        lines: list[str] = []
        num_bytes = 0
        while num_bytes < megabytes * 1_000_000 // NUM_FILES:
            lines.append(json.dumps({"text": " ".join(rng.choices(words, k=rng.randint(50, 600)))}))
            num_bytes += len(lines[-1]) + 1
        client.put_object(Bucket=BUCKET, Key=f"{number:03}.jsonl", Body="\n".join(lines).encode())
    proxies = [delayed(f"http://{host}:{port}", delay / 1000) for delay in delays_milliseconds]
    print(json.dumps([proxy.__enter__() for proxy in proxies]), flush=True)
    sys.stdin.read()


def run(tree: Path, python: str, store: str, command: list[str], folder: Path) -> tuple[float, float]:
    """Seconds and processor seconds of one command."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    environment = {
        **os.environ, **CREDENTIALS, "AWS_ENDPOINT_URL_S3": store, "PYTHONPATH": str(tree / "src"),
        "VOROX_CACHE": str(folder / "home"), "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    arguments = [python, "-m", "vorox", *command, *MODEL]
    found = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if found.returncode:
        raise SystemExit(f"{tree}: {arguments} ended with {found.returncode}\n{found.stdout}{found.stderr}")
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, help="The other version: a checkout with a folder src.")
    parser.add_argument("--python", default=sys.executable, help="The interpreter of the other version.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--latency-milliseconds", type=float, nargs="+", default=[0, 30])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.megabytes, given.latency_milliseconds)
        return
    other = given.checkout or parser.error("--checkout is required")
    child = subprocess.Popen(
        [sys.executable, __file__, "--serve", "--megabytes", str(given.megabytes), "--latency-milliseconds",
         *map(str, given.latency_milliseconds)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, **CREDENTIALS},
    )  # fmt: skip
    assert child.stdin
    assert child.stdout
    commands = {
        "data build": ["data", "build", "quickstart"],
        "40 streamed steps": ["train", "quickstart", "backend=torch", "data.mode=streaming"],
    }
    print("| command | delay of a request | measured | this version | the other | ratio (spread) |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        for delay, store in zip(given.latency_milliseconds, json.loads(child.stdout.readline()), strict=True):
            for title, command in commands.items():
                times: dict[Path, list[tuple[float, float]]] = {ROOT: [], other: []}
                for number in range(given.rounds):
                    for tree in list(times)[:: 1 if number % 2 else -1]:
                        python = sys.executable if tree == ROOT else given.python
                        times[tree].append(run(tree, python, store, command, Path(temporary) / "run"))
                for column, unit in enumerate(("seconds", "processor seconds")):
                    ours, theirs = ([pair[column] for pair in times[tree]] for tree in times)
                    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
                    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                    print(
                        f"| {title} | {delay:g} ms | {unit} | {statistics.median(ours):.1f} | "
                        f"{statistics.median(theirs):.1f} | {spread} |", flush=True,
                    )  # fmt: skip
    child.stdin.close()
    child.wait()
    print(interleave.machine())


if __name__ == "__main__":
    main()
