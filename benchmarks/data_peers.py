"""Data formats side by side: the same packed rows in ours and in six peers', every measurement in a fresh process.

    data_peers.py [--quick] [--rounds 7] [--rows 24000,1000000,10000000] [--flips 1000] [--folder PLACE]

Start-up is from "library imported" to the first batch of a shuffled epoch in hand, in a new run; resume from "library
imported" and a state saved at 50% of the epoch to the next batch in hand. Contenders take turns in every round. Batches
are 64 rows, shuffled over the whole corpus (Parquet streaming: a buffer of 1,000), one process, page cache warm as far
as it holds them all. Ours checks every row that it reads and delivers labels, segment ids, position ids and row
digests; peers deliver tokens. ``--quick`` takes the smallest corpus only, and about five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import interleave
from bench_cache import FEW_BYTES, MANY_BYTES
from data_formats import checking_contenders, contenders, folder_of, is_payload
from data_report import print_flips, print_reads, print_starts
from data_trials import flip

BATCH, SEED, NEW_SEED = 64, 7, 1000
MOST_PASSED_ROWS = 1_000_000
SCALED_ROW_TOKENS = 129
OURS = "vorox"
Found = dict[str, dict[str, list[Any]]]


def run_trial(name: str, trial: str, folder: Path, *arguments: int, timeout_seconds: int = 3600) -> dict[str, Any]:
    """The result of a trial in a process of its own; empty, and said aloud, if it failed."""
    command = [sys.executable, str(Path(__file__).with_name("data_trials.py")), name, trial, str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder.parent / "hf")}
    result = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, check=False, env=environment,
        timeout=timeout_seconds,
    )  # fmt: skip
    if result.returncode:
        print(f"{name}, {trial}: failed: {result.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return {}
    return json.loads(result.stdout.splitlines()[-1])


def write_text(root: Path, max_bytes: int) -> None:
    """Our caches of the text, the rows that they hold, and the same rows in every other format."""
    from bench_cache import build, save_rows, text_configuration

    for codec in ("lz4", "raw"):
        place = folder_of(root, f"{OURS}, {codec}")
        reader = build(text_configuration(place, codec, max_bytes), place)
    save_rows(reader, root / "rows.npy")
    write_peers(root, [*contenders(), *(checking_contenders() if max_bytes == FEW_BYTES else ())])


def write_scaled(root: Path, text: Path, num_rows: int, codecs: Sequence[str] = ("lz4", "raw")) -> None:
    """The same for the tokens of ``text``, repeated to so many rows."""
    from bench_cache import build, save_rows, scaled_configuration, write_scaled_shards

    shards = root / "shards"
    root.mkdir()
    write_scaled_shards(shards, np.load(text / "rows.npy", mmap_mode="r"), num_rows, SCALED_ROW_TOKENS)
    (tokenizer,) = folder_of(text, f"{OURS}, lz4").glob("tokenizers/*/tokenizer.json")
    for codec in codecs:
        place = folder_of(root, f"{OURS}, {codec}")
        reader = build(scaled_configuration(place, codec, shards, tokenizer, SCALED_ROW_TOKENS), place)
    save_rows(reader, root / "rows.npy")
    shutil.rmtree(shards)
    write_peers(root, contenders())


def write_peers(root: Path, names: Iterable[str]) -> None:
    for name in names:
        if not folder_of(root, name).exists():
            began = time.perf_counter()
            folder_of(root, name).mkdir()
            run_trial(name, "write", folder_of(root, name), BATCH, SEED)
            print(f"  {name}: written in {time.perf_counter() - began:.0f} s", file=sys.stderr)


def measure(root: Path, rounds: int, *, reads: int) -> Found:
    """Start-up and resume ``rounds`` times, whole epochs ``reads`` times, contenders in turn within each round.

    Without reads, and beyond a million rows, the state in the middle is not reached by reading half the epoch.
    """
    num_rows = len(np.load(root / "rows.npy", mmap_mode="r"))
    names, found = list(contenders()), Found()
    passes = int(reads > 0 or num_rows <= MOST_PASSED_ROWS)
    for name in names:
        saved = run_trial(name, "save", folder_of(root, name), BATCH, SEED, num_rows, passes)
        files = (path for path in folder_of(root, name).rglob("*") if is_payload(path))
        found[name] = {"disk_bytes": [sum(path.stat().st_size for path in files)], "rows": [num_rows], "save": [saved]}
    for number in range(rounds):
        trials = [("begin", (BATCH, NEW_SEED + number)), ("resume", (BATCH, SEED))]
        if number == 0:
            trials += [("memory", (BATCH, NEW_SEED - 1)), *([("origin", (BATCH, SEED, num_rows))] if reads else [])]
        if number < reads:
            trials += [("read", (BATCH, SEED))]
        for trial, arguments in trials:
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                if result := run_trial(name, trial, folder_of(root, name), *arguments):
                    found[name].setdefault(trial, []).append(result)
    return found


def measure_flips(root: Path, count: int, peer_count: int) -> dict[str, dict[str, int]]:
    found, seen = dict[str, dict[str, int]](), set[Path]()
    for name in [*contenders(), *checking_contenders()]:
        # Crops are no epoch: that something changed cannot be told from them. What others read is flipped once.
        if name != "bare memmap" and folder_of(root, name) not in seen:
            seen.add(folder_of(root, name))
            mine = name.startswith(OURS)
            found[name] = flip_all(name, folder_of(root, name), count if mine else peer_count)
    return found


def flip_all(name: str, place: Path, count: int) -> dict[str, int]:
    """Outcomes of so many flips; a process that dies of one is started again behind it."""
    outcomes: dict[str, int] = {}
    number = 0
    while number < count:
        script = str(Path(__file__).with_name("data_trials.py"))
        command = [sys.executable, script, name, "flips", str(place), *map(str, (BATCH, SEED, number, count))]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        for line in lines:
            if "outcome" in line:
                outcomes[line["outcome"]] = outcomes.get(line["outcome"], 0) + 1
                number = line["number"] + 1
        if number < count:
            if not lines or "outcome" in lines[-1]:
                print(f"{name}: flips failed: {result.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
                return {}
            flip(Path(lines[-1]["path"]), lines[-1]["place"], lines[-1]["bit"])
            outcomes["crash"] = outcomes.get("crash", 0) + 1
            number += 1
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds of the smallest corpus, few flips")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--rows", default="24000,1000000,10000000", help="sizes of 128-token rows, for start and resume"
    )
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--folder", help="where to write, about 2.2 KB per row; default: the temporary directory")
    options = parser.parse_args()
    rounds, sizes, flips = options.rounds, [int(size) for size in options.rows.split(",") if size], options.flips
    if options.quick:
        rounds, sizes, flips = 3, [], 100
    record: dict[str, Any] = {"machine": interleave.machine(), "load": [os.getloadavg()], "rounds": rounds}
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        text, few = Path(place) / "text", Path(place) / "few"
        write_text(text, MANY_BYTES)
        record["text"] = measure(text, rounds, reads=1 if options.quick else min(rounds, 3))
        print_starts([record["text"]])
        print_reads(record["text"])
        write_text(few, FEW_BYTES)
        record["flips"] = measure_flips(few, flips, 8 if options.quick else flips)
        print_flips(record["flips"])
        record["scaled"] = []
        for size in sizes:
            root = Path(place) / f"scaled-{size}"
            write_scaled(root, text, size)
            record["scaled"].append(measure(root, rounds, reads=0))
            shutil.rmtree(root)
        if sizes:
            print_starts(record["scaled"])
    record["load"].append(os.getloadavg())
    interleave.RESULTS.mkdir(exist_ok=True)
    (interleave.RESULTS / "data_peers.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
