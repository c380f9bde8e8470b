"""One measurement of ``data_peers.py``, made in the process that it is about.

    data_trials.py NAME TRIAL FOLDER [BATCH SEED [ARGUMENT]]

``begin``: from "library imported" to the first batch of a shuffled epoch in hand, in a new run: a seed that was never
used before. ``memory``: what ``begin`` needs. ``save``: half an epoch, then the state and the digests of the batches
that follow are kept. ``resume``: from "library imported" and that state to the next batch in hand, and whether it and
those behind it are the same ones. ``origin``: what can be told of a batch without reading the epoch. ``read``: a whole
epoch. ``flips``: single bits flipped, each put back after everything was read. Prints JSON lines.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data_formats import Contender, Tokens, checking_contenders, contenders, is_payload

COMPARED_BATCHES = 32
HANGING_SECONDS = 60
PRIVATE = ("RssAnon", "RssShmem")
_SAMPLED_BATCHES = 16
_FEW_STEPS = 3


def digest(tokens: Tokens) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens, np.int32).data)


def status_bytes(*fields: str) -> int:
    """Sum of fields of this process's memory status."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[field].split()[0]) * 1024 for field in fields)


def until_in_hand(opened: Callable[[], Iterator[Tokens]]) -> tuple[dict[str, Any], Tokens, Iterator[Tokens]]:
    """Open, take one batch, and say what it took: wall seconds, CPU seconds of all threads, and CPU seconds since the
    process was started, with the interpreter and all imports."""
    cpu_began, began = time.process_time(), time.perf_counter()
    batches = opened()
    first = next(batches)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    found = {"seconds": seconds, "cpu_seconds": cpu_seconds, "process_cpu_seconds": time.process_time()}
    return found, first, batches


def begin(contender: Contender, folder: Path, batch: int, seed: int) -> dict[str, Any]:
    return until_in_hand(lambda: contender.open(folder, batch, seed, None)[0])[0]


def memory(contender: Contender, folder: Path, batch: int, seed: int) -> dict[str, Any]:
    """As ``begin``, watched: the most private memory beyond the imports that a look every millisecond has seen."""
    before_bytes, seen, ended = status_bytes(*PRIVATE), list[int](), threading.Event()

    def watch() -> None:
        while not ended.wait(0.001):
            seen.append(status_bytes(*PRIVATE))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    _, _first, _batches = until_in_hand(lambda: contender.open(folder, batch, seed, None)[0])
    seen.append(status_bytes(*PRIVATE))
    ended.set()
    return {"private_bytes": max(seen) - before_bytes}


def origin(contender: Contender, folder: Path, batch: int, seed: int, num_rows: int) -> dict[str, Any]:
    """What a contender can tell of the batch in the middle of the epoch, without reading the epoch, and whether it is
    true: which rows it was made of, at which steps its first row is seen, and the text that the row comes from."""
    following = json.loads(state_path(contender, folder).read_text())["following"]
    rows, step = np.load(folder.parent / "rows.npy", mmap_mode="r"), num_rows // batch // 2
    found = {"rows": False, "steps": False, "text": False}
    chosen = np.zeros(0, np.int64)
    if hasattr(contender, "rows_of_step"):
        chosen = contender.rows_of_step(folder, batch, seed, step)
        found["rows"] = digest(rows[chosen][:, :-1]) == following[0]
    if hasattr(contender, "steps_of_row"):
        found["steps"] = contender.steps_of_row(folder, batch, seed, int(chosen[0])) == [step]
    if hasattr(contender, "texts_of_row"):
        texts = [pair for row in chosen.tolist() for pair in contender.texts_of_row(folder, row)]
        found["text"] = all(decoded in source for decoded, source in texts)
    return found


def save(contender: Contender, folder: Path, batch: int, seed: int, num_rows: int, passes: int) -> dict[str, Any]:
    """Keep the state in the middle of the epoch and the digests of the batches behind it.

    Args:
        passes: 1: half the epoch is read, without interruption, and ``advanced`` is compared with what comes out; 0:
            a few batches are, and the state behind them is ``advanced``.
    """
    batches, get_state = contender.open(folder, batch, seed, None)
    steps = num_rows // batch // 2
    for _ in itertools.islice(batches, _FEW_STEPS):
        pass
    state = advanced(json.loads(json.dumps(get_state(), default=_plain)), steps - _FEW_STEPS, batch)
    found, following = {"advanced": None}, list[int]()
    if passes:
        for _ in itertools.islice(batches, steps - _FEW_STEPS):
            pass
        real = json.loads(json.dumps(get_state(), default=_plain))
        found["advanced"], state = real == state, real
        following = [digest(tokens) for tokens in itertools.islice(batches, COMPARED_BATCHES)]
    state_path(contender, folder).write_text(json.dumps({"state": state, "following": following}))
    return {**found, "state_bytes": len(json.dumps(state))}


def state_path(contender: Contender, folder: Path) -> Path:
    name = "".join(filter(str.isalnum, f"{type(contender).__name__} {vars(contender)}"))
    return folder.parent / f"state-{name}.json"


def advanced(state: Any, steps: int, batch: int) -> Any:
    """A state so many steps later, of those that count rows or steps; None of others."""
    if isinstance(state, int):
        return state + steps * batch
    if not isinstance(state, dict) or "examples_iterable" in state:
        return None
    counted = {"num_samples_yielded": batch, "sample_in_epoch": batch, "position": batch, "step": 1, "next_index": 1}
    later = {key: value + counted[key] * steps if key in counted else value for key, value in state.items()}
    return later | ({"dataset": advanced(later["dataset"], steps, batch)} if "dataset" in later else {})


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value.item()


def resume(contender: Contender, folder: Path, batch: int, seed: int) -> dict[str, Any]:
    kept = json.loads(state_path(contender, folder).read_text())
    if kept["state"] is None:
        return {}
    measured, first, batches = until_in_hand(lambda: contender.open(folder, batch, seed, kept["state"])[0])
    found = [digest(first), *(digest(tokens) for tokens in itertools.islice(batches, COMPARED_BATCHES - 1))]
    return {**measured, **({"exact": found == kept["following"]} if kept["following"] else {})}


def read(contender: Contender, folder: Path, batch: int, seed: int) -> dict[str, Any]:
    """An epoch behind its first batch: rate, CPU seconds, and the most private memory seen beyond the imports."""
    before_bytes = status_bytes(*PRIVATE)
    batches, _ = contender.open(folder, batch, seed, None)
    next(batches)
    count, peak_bytes, sampling_seconds, sampling_cpu_seconds = 0, 0, 0.0, 0.0
    cpu_began, began = time.process_time(), time.perf_counter()
    for number, tokens in enumerate(batches):
        count += tokens.size
        if number % _SAMPLED_BATCHES == 0:
            sampling_cpu_began, sampling_began = time.thread_time(), time.perf_counter()
            peak_bytes = max(peak_bytes, status_bytes(*PRIVATE))
            sampling_seconds += time.perf_counter() - sampling_began
            sampling_cpu_seconds += time.thread_time() - sampling_cpu_began
    seconds = time.perf_counter() - began - sampling_seconds
    cpu_seconds = time.process_time() - cpu_began - sampling_cpu_seconds
    return {
        "tokens_per_second": count / seconds, "cpu_seconds_per_million": cpu_seconds / count * 1e6,
        "private_bytes": peak_bytes - before_bytes,
    }  # fmt: skip


def flips(contender: Contender, folder: Path, batch: int, seed: int, first: int, last: int) -> Iterator[dict[str, Any]]:
    """Flip bits number ``first`` to ``last`` of one random sequence over all bytes of the format's files."""
    expected = sorted(digest(tokens) for tokens in contender.open(folder, batch, seed, None)[0])
    files = sorted(path for path in folder.rglob("*") if is_payload(path))
    ends = np.cumsum([path.stat().st_size for path in files])
    random = np.random.default_rng(seed)
    places = random.integers(ends[-1], size=last).tolist()
    bits = random.integers(8, size=last).tolist()
    signal.signal(signal.SIGALRM, _hanging)
    for number in range(first, last):
        index = int(np.searchsorted(ends, places[number], side="right"))
        place = places[number] - int(ends[index] - files[index].stat().st_size)
        yield {"number": number, "path": str(files[index]), "place": place, "bit": bits[number]}
        flip(files[index], place, bits[number])
        outcome = _outcome(contender, folder, batch, seed, expected)
        flip(files[index], place, bits[number])
        yield {"number": number, "outcome": outcome}


def _outcome(contender: Contender, folder: Path, batch: int, seed: int, expected: list[int]) -> str:
    signal.alarm(HANGING_SECONDS)
    try:
        found = sorted(digest(tokens) for tokens in contender.open(folder, batch, seed, None)[0])
        outcome = "harmless" if found == expected else "silent"
    except TimeoutError:
        outcome = "hangs"
    except Exception:
        outcome = "detected"
    finally:
        signal.alarm(0)
    verify = getattr(contender, "verify", None)
    if outcome != "detected" and verify is not None:
        try:
            verify(folder)
        except Exception:
            outcome += ", verify finds it"
    return outcome


def _hanging(*_: Any) -> None:
    raise TimeoutError


def flip(path: Path, place: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ (1 << bit)]))


def main() -> None:
    warnings.simplefilter("ignore")
    name, trial, place, *arguments = sys.argv[1:]
    contender, folder = (contenders() | checking_contenders())[name], Path(place)
    began = time.perf_counter()
    contender.imports()
    import_seconds = time.perf_counter() - began
    batch, seed, *extra = (int(argument) for argument in arguments)
    if trial == "flips":
        for line in flips(contender, folder, batch, seed, *extra):
            print(json.dumps(line), flush=True)
    elif trial == "write":
        contender.write(folder, np.load(folder.parent / "rows.npy", mmap_mode="r"))
        print("{}")
    else:
        trials: dict[str, Callable[..., dict[str, Any]]] = {
            "begin": begin, "memory": memory, "save": save, "resume": resume, "read": read, "origin": origin,
        }  # fmt: skip
        print(json.dumps({**trials[trial](contender, folder, batch, seed, *extra), "import_seconds": import_seconds}))
    sys.stdout.flush()
    os._exit(0)  # some libraries' threads outlive the interpreter by seconds


if __name__ == "__main__":
    main()
