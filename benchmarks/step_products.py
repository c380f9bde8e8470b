"""A training step against the sum of its own matrix products: how much a step costs besides them.

    step_products.py [--sizes demo small 124m] [--seconds 60] [--threads N] [--operators] [--write-docs] [--results DIR]

In: the fp32 torch engine on the CPU with its defaults, and random tokens. Out: the ratio of a step to its products,
``results/step_products.json``, and with ``--write-docs`` a table in docs/performance.md. One step runs under a
recorder, which keeps every matrix product of forward and backward with its operands: ``mm``, ``addmm``, ``bmm``,
products of oneDNN, and both directions of fused attention, which are products with a softmax between them. Then steps
and all recorded products take turns in one process, with the same threads, so each round has a ratio. Outputs of
repeated products are freed at once and may stay in the cache, so the products are, if anything, timed too fast. A step
is ``engine.train_step(batch).fetch()``: forward, backward, clipping, the update and the numbers on the host.

``--operators`` times every operator inside steps instead: the lowest of each call over all steps, added up by operator.
So operands are as warm as a step leaves them, and a busy machine adds little. ``torch.profiler`` adds up to 0.4 ms to
each oneDNN operator.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import interleave
from vorox import backends
from vorox.core.batch import Batch, DataCursor
from vorox.core.config import load_config
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.models.decoder.spec import decoder_spec

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- step_products: begin -->", "<!-- step_products: end -->"
PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "mkldnn::_linear_pointwise"}
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
LEAST_ROUNDS, SETTLE_ROUNDS = 3, 1
LEAST_SECONDS = 1e-4
"""Operators that need less of a step have no row of their own."""


@dataclass(frozen=True)
class Size:
    """A model and a batch.

    Attributes:
        title: For the table.
        settings: Overrides of configs/char_demo.yaml.
        vocabulary: Rows of the head.
    """

    title: str
    settings: list[str]
    vocabulary: int


SIZES = {
    "demo": Size("demo, 4 x 128, 12 rows of 64", [], 65),
    "small": Size(
        "6 x 384, 8 rows of 256",
        [
            "model.num_layers=6", "model.num_heads=6", "model.hidden_size=384", "data.sequence_length_tokens=256",
            "train.global_batch_sequences=8", "train.micro_batch_sequences=8",
        ],
        4096,
    ),
    "124m": Size(
        "124M, 12 x 768, 2 rows of 512",
        [
            "model.num_layers=12", "model.num_heads=12", "model.hidden_size=768", "data.sequence_length_tokens=512",
            "train.global_batch_sequences=2", "train.micro_batch_sequences=2",
        ],
        50257,
    ),
}  # fmt: skip


@dataclass
class Recorder(TorchDispatchMode):
    """Keeps the matrix products that run while it is active, with their operands.

    Attributes:
        calls: Operation and arguments, in the order of the step.
        num_flops: Of the products outside of attention.
    """

    calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    num_flops: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        name = func._schema.name
        found = func(*args, **kwargs)
        if name in PRODUCTS:
            left = args[1] if "addmm" in name or "baddbmm" in name else args[0]
            self.num_flops += 2 * prod(found.shape) * left.shape[-1]
        if name in PRODUCTS or name.startswith(ATTENTION):
            self.calls.append((func, args, kwargs))
        return found

    def repeat(self) -> None:
        """Run the products again."""
        for func, args, kwargs in self.calls:
            func(*args, **kwargs)


@dataclass
class OperatorTimes(TorchDispatchMode):
    """The lowest time of each operator call of a step.

    Attributes:
        clock: Processor time with one thread, which leaves out waits for a core; else wall time.
        lowest: Operator and seconds, by place in the step.
    """

    clock: Callable[[], float]
    lowest: dict[int, tuple[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._place = 0

    def begin_step(self) -> None:
        self._place = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        started = self.clock()
        found = func(*args, **(kwargs or {}))
        seconds = self.clock() - started
        _, least = self.lowest.get(self._place, ("", seconds))
        self.lowest[self._place] = func._schema.name, min(least, seconds)
        self._place += 1
        return found


def operator_table(step: Callable[[], None], seconds: float) -> str:
    """Return the milliseconds of each operator in a step, and those of whole steps without the recorder."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times, whole, ends = OperatorTimes(clock), list[float](), time.perf_counter() + seconds
    step()
    while not whole or time.perf_counter() < ends:
        started = clock()
        step()
        whole.append(clock() - started)
        with times:
            times.begin_step()
            step()
    sums: dict[str, tuple[int, float]] = {}
    for name, least in times.lowest.values():
        count, total = sums.get(name, (0, 0.0))
        sums[name] = count + 1, total + least
    rows = [(name, count, 1e3 * total) for name, (count, total) in sums.items() if total > LEAST_SECONDS]
    rows.sort(key=lambda row: -row[2])
    rows.append(("all operators", len(times.lowest), 1e3 * sum(total for _, total in sums.values())))
    rows.append(("step, lowest", len(whole), 1e3 * min(whole)))
    return "\n".join(["| operator | calls | ms |", "|---|---|---|", *(f"| {a} | {b} | {c:.2f} |" for a, b, c in rows)])


def configuration(size: Size, extra: list[str]) -> RunConfig:
    return load_config(str(ROOT / "configs" / "char_demo.yaml"), [*size.settings, "backend=torch", *extra])


def random_batch(config: RunConfig, vocabulary: int) -> Batch:
    rows, length = config.train.global_batch_sequences, config.data.sequence_length_tokens
    tokens = np.random.default_rng(0).integers(0, vocabulary, (1, rows, length + 1), np.int32)
    return Batch(
        0, tokens[:, :, :-1].copy(), tokens[:, :, 1:].copy(), None, None, np.zeros((1, rows), np.uint64),
        rows * length, DataCursor("", 0, 1, 0, 0),
    )  # fmt: skip


def make_step(size: Size, extra: list[str]) -> Callable[[], None]:
    """Create an engine with a batch, and return what runs a step."""
    config = configuration(size, extra)
    length = config.data.sequence_length_tokens
    spec = decoder_spec(config.model, tokenizer_vocab_size=size.vocabulary, sequence_length_tokens=length)
    engine: Any = backends.load("torch").create(config, spec, DistributedContext())
    batch = random_batch(config, size.vocabulary)

    def step() -> None:
        engine.train_step(batch, lr=1e-4, weight_decay=0.1).fetch()

    return step


def measure(size: Size, seconds: float, extra: list[str]) -> dict[str, Any]:
    """Return times of steps and of their products, in turn, and what was counted."""
    step = make_step(size, extra)
    step()
    with Recorder() as recorder:
        step()
    times: dict[str, list[float]] = {"step": [], "products": []}
    ends = time.perf_counter() + seconds
    number = -SETTLE_ROUNDS
    while number < LEAST_ROUNDS or time.perf_counter() < ends:
        pair: list[tuple[str, Callable[[], None]]] = [("step", step), ("products", recorder.repeat)]
        for name, run in pair[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            with torch.no_grad() if name == "products" else torch.enable_grad():
                run()
            if number >= 0:
                times[name].append(time.perf_counter() - started)
        number += 1
    return {
        "title": size.title, "threads": torch.get_num_threads(), "num_calls": len(recorder.calls),
        "num_flops": recorder.num_flops, **times,
    }  # fmt: skip


def row(found: dict[str, Any]) -> str:
    ratios = [step / products for step, products in zip(found["step"], found["products"], strict=True)]
    low, high = interleave.quantile(ratios, 0.1), interleave.quantile(ratios, 0.9)
    step, products = (1e3 * statistics.median(found[name]) for name in ("step", "products"))
    ratio = f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"
    return f"| {found['title']} | {found['threads']} | {step:.1f} ms | {products:.1f} ms | {ratio} | {len(ratios)} |"


def table(results: list[dict[str, Any]]) -> str:
    head = "| model | threads | step | its products | step / products, median (10th to 90th percentile) | rounds |"
    return "\n".join([head, "|---|---|---|---|---|---|", *map(row, results)])


def write_docs(text: str, page: Path = DOCS) -> None:
    """Replace the table of the page, between its two marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["demo", "small"])
    parser.add_argument("--seconds", type=float, default=60.0, help="Time of the rounds of each size.")
    parser.add_argument("--threads", type=int, help="Instead of the engine's default.")
    parser.add_argument("--operators", action="store_true", help="Time the operators of a step instead.")
    parser.add_argument("--write-docs", action="store_true", help="Put the table into docs/performance.md.")
    parser.add_argument("--results", type=Path, default=interleave.RESULTS)
    given = parser.parse_args()
    if given.operators and (given.write_docs or given.results != interleave.RESULTS):
        parser.error("--operators only prints; leave out --write-docs and --results")
    extra = ["runtime.device=cpu", *([f"runtime.num_threads={given.threads}"] if given.threads else [])]
    results: list[dict[str, Any]] = []
    for name in given.sizes:
        if given.operators:
            print(
                f"{SIZES[name].title}\n\n{operator_table(make_step(SIZES[name], extra), given.seconds)}\n", flush=True
            )
            continue
        results.append(measure(SIZES[name], given.seconds, extra))
        print(row(results[-1]), flush=True)
    if given.operators:
        return
    given.results.mkdir(exist_ok=True)
    record = json.dumps({"machine": interleave.machine(), "results": results}, indent=1)
    (given.results / "step_products.json").write_text(record + "\n", encoding="utf-8")
    print("\n" + table(results))
    if given.write_docs:
        write_docs(table(results))


if __name__ == "__main__":
    main()
