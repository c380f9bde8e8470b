"""Fair timing on a noisy machine: contenders take turns, and what counts is the ratio within each round.

A contender is a function that does a fixed amount of work. In every round each contender runs once, in an order that
rotates, so a slow minute of the machine hits all of them. Reported are the median and the spread (10th to 90th
percentile) of the rate, and the median and spread of the per-round ratio to a reference.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def measure(contenders: Mapping[str, Callable[[], float]], *, rounds: int, settle: int = 1) -> dict[str, list[float]]:
    """Run every contender ``settle + rounds`` times in rotation.

    Args:
        contenders: Name to a function that returns the work it did (tokens, rows, floating point operations).

    Returns:
        Name to the rates (work per second) of the counted rounds.
    """
    names = list(contenders)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for round_index in range(-settle, rounds):
        shift = round_index % len(names)
        for name in names[shift:] + names[:shift]:
            started = time.perf_counter()
            work = contenders[name]()
            elapsed = time.perf_counter() - started
            if round_index >= 0:
                rates[name].append(work / elapsed)
    return rates


def paired_ratio(
    ours: Callable[[], None], reference: Callable[[], None], *, pairs: int, settle: int = 5
) -> tuple[float, float, float]:
    """How many times as fast as the reference ours is, piece by piece in turn: for differences of a few percent.

    Each pair is one call of both, the first of them changing from pair to pair, so that what the machine does for
    longer than a call hits both alike.

    Returns:
        The median ratio of the pairs, and the bounds of its 95% confidence interval (order statistics: Conover,
        Practical Nonparametric Statistics, 3.2), which hold for any distribution.
    """

    def seconds(call: Callable[[], None]) -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    ratios: list[float] = []
    for pair in range(-settle, pairs):
        if pair % 2:
            our_seconds, reference_seconds = seconds(ours), seconds(reference)
        else:
            reference_seconds, our_seconds = seconds(reference), seconds(ours)
        if pair >= 0:
            ratios.append(reference_seconds / our_seconds)
    ordered, half_width = sorted(ratios), 0.98 * pairs**0.5  # 1.96 standard deviations of the rank, sqrt(n) / 2 each
    low, high = max(0, int(pairs / 2 - half_width)), min(pairs - 1, int(pairs / 2 + half_width))
    return statistics.median(ratios), ordered[low], ordered[high]


def quantile(values: list[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(fraction * (len(ordered) - 1)))]


def table(rates: Mapping[str, list[float]], *, reference: str, unit: str) -> list[dict[str, float | str]]:
    """Rows for a report: rate and ratio to ``reference``, each as median, 10th and 90th percentile."""
    rows: list[dict[str, float | str]] = []
    for name, values in rates.items():
        ratios = [value / base for value, base in zip(values, rates[reference], strict=True)]
        rows.append(
            {
                "name": name,
                "unit": unit,
                "median": statistics.median(values),
                "low": quantile(values, 0.1),
                "high": quantile(values, 0.9),
                "ratio": statistics.median(ratios),
                "ratio_low": quantile(ratios, 0.1),
                "ratio_high": quantile(ratios, 0.9),
            }
        )
    return rows


def report(title: str, rows: list[dict[str, float | str]], *, reference: str, rounds: int) -> None:
    """Print the table as Markdown and keep it as JSON under ``benchmarks/results``."""
    print(f"\n### {title}\n")
    print(f"{rounds} rounds, interleaved; median (10th to 90th percentile); ratio to {reference} within each round.\n")
    print(f"| | {rows[0]['unit']} | ratio |\n|---|---|---|")
    for row in rows:
        spread = f"{row['median']:,.0f} ({row['low']:,.0f} to {row['high']:,.0f})"
        print(f"| {row['name']} | {spread} | {row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f}) |")
    RESULTS.mkdir(exist_ok=True)
    name = title.lower().replace(" ", "_").replace(",", "")
    record = {"title": title, "reference": reference, "rounds": rounds, "rows": rows, "machine": machine()}
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def machine() -> dict[str, str | int | None]:
    return {"cpu_count": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
