"""The tables of ``data_peers.py`` as Markdown: medians, and in brackets the smallest and largest."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Trials = Mapping[str, Sequence[Any]]
OUTCOMES = {
    "detected": "detected on reading",
    "silent": "wrong tokens, silently",
    "silent, verify finds it": "wrong tokens, verify finds it",
    "harmless": "harmless",
    "harmless, verify finds it": "harmless, verify finds it",
    "hangs": "hangs",
    "crash": "process dies",
}


def spread(trials: Sequence[Mapping[str, Any]], key: str, scale: float = 1, form: str = ".1f") -> str:
    values = [trial[key] * scale for trial in trials if key in trial]
    if not values:
        return "-"
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print("\n| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def print_starts(sizes: Sequence[Mapping[str, Trials]]) -> None:
    """Start-up and resume by size of the corpus: milliseconds of wall and CPU time, and memory.

    The last figure is of the whole process, interpreter and imports included.
    """
    counts = [f"{next(iter(size.values()))['rows'][0]:,} rows" for size in sizes]
    for trial, title in (("begin", "start-up"), ("resume", "resume at 50%")):
        units = ("seconds", "wall ms"), ("cpu_seconds", "CPU ms"), ("process_cpu_seconds", "CPU ms of the process")
        for key, unit in units:
            print_by_size(sizes, counts, f"{title}, {unit}", trial, key, 1e3)
    print_by_size(sizes, counts, "start-up, private MiB at most", "memory", "private_bytes", 2**-20)


def print_by_size(
    sizes: Sequence[Mapping[str, Trials]], counts: Sequence[str], title: str, trial: str, key: str, scale: float
) -> None:
    cells: Callable[[str], list[str]] = lambda name: [spread(size[name].get(trial, ()), key, scale) for size in sizes]  # noqa: E731
    print_table([title, *counts], [[name, *cells(name)] for name in sizes[0]])


def print_reads(found: Mapping[str, Trials]) -> None:
    """What a format costs: on disk, per token, in memory; and whether it resumes with the same rows."""
    base_bytes = found["bare memmap"]["disk_bytes"][0]
    rows: list[list[str]] = []
    for name, trials in found.items():
        reads, resumes = trials.get("read", ()), trials.get("resume", ())
        exact = [resume["exact"] for resume in resumes if "exact" in resume]
        rows.append(
            [
                name, f"{trials['disk_bytes'][0] / base_bytes:.0%}", spread(reads, "tokens_per_second", 1e-6),
                spread(reads, "cpu_seconds_per_million", 1e3, ".2f"), spread(reads, "private_bytes", 2**-20, ".0f"),
                spread(resumes, "import_seconds", 1, ".2f"),
                "cannot resume" if not exact else "yes" if all(exact) else "no", _told(trials.get("origin", ())),
            ]
        )  # fmt: skip
    header = [
        "",
        "disk, of uint16",
        "M tokens/s",
        "CPU ms/M tokens",
        "private MiB",
        "imports, s",
        "same rows after resume",
        "tells of a batch",
    ]
    print_table(header, rows)


def _told(origins: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(key for origin in origins for key in ("rows", "steps", "text") if origin[key]) or "nothing"


def print_flips(found: Mapping[str, Mapping[str, int]]) -> None:
    """What became of single flipped bits."""
    unknown = sorted({outcome for outcomes in found.values() for outcome in outcomes} - set(OUTCOMES))
    header = [*OUTCOMES.values(), *unknown]
    rows = [[name, *(str(outcomes.get(key, 0)) for key in [*OUTCOMES, *unknown])] for name, outcomes in found.items()]
    print_table(["flipped bits", *header], rows)
