"""A training step of the PyTorch engine on a GPU: tokens/s, MFU, share of the matmul peak, and memory beside the plan.

    gpu_step.py [--sizes gpt2-124m ...] [--variants KEY=VALUE,KEY=VALUE ...] [--groups 5] [--kernels 15]
    gpu_step.py --device cpu --sizes gpt2-tiny --groups 1 --variants runtime.compile=false   # tests the harness

The engine alone on random tokens and weights, without data, display and checkpoints; ``gpu_programs.py`` times whole
programs. As in a run, the host reads the values of a step after it has started the next one. Each variant is the size
with some settings changed, and has an engine of its own in this process.

MFU counts 6 N + 12 L W T FLOPs per token (``planning/flops.py``) against the data sheet. The matmul peak is the rate
of a product of two bf16 matrices of 8,192 rows and columns of random numbers, measured in the same process. Host time
is what a step takes to start while the device is idle: where it is longer than the step, the host is the limit.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vorox.backends.torch_engine import engine as torch_engine
from vorox.backends.torch_engine.networks import decoder_network
from vorox.core.batch import Batch, DataCursor
from vorox.core.config import load_config
from vorox.core.engine import NamedArray
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.models.decoder.spec import decoder_spec
from vorox.models.spec import ModelSpec
from vorox.planning import flops
from vorox.planning.memory_estimate import memory_per_device
from vorox.runtime.device_peaks import peak_flops_per_second

VOCABULARY = 50_304
WARMUP_STEPS, STEPS_PER_GROUP = 4, 10
GIB = 2**30


def shape(family: str, layers: int, width: int, heads: int, mlp: int | None, tokens: int, rows: int) -> list[str]:
    return [
        f"model.family={family}", f"model.num_layers={layers}", f"model.hidden_size={width}",
        f"model.num_heads={heads}", "model.num_kv_heads=null", f"model.intermediate_size={mlp or 'null'}",
        f"data.sequence_length_tokens={tokens}", f"train.global_batch_sequences={rows}",
        f"train.micro_batch_sequences={rows}",
    ]  # fmt: skip


SIZES = {
    "gpt2-tiny": shape("gpt2", 2, 64, 2, None, 64, 2),
    "llama-tiny": [*shape("llama", 2, 64, 2, 192, 64, 2), "model.tie_embeddings=false"],
    "gpt2-124m": shape("gpt2", 12, 768, 12, None, 1024, 32),
    "gpt2-350m": shape("gpt2", 24, 1024, 16, None, 1024, 32),
    "gpt2-1.5b": shape("gpt2", 48, 1600, 25, None, 1024, 8),
    "llama-124m": [*shape("llama", 12, 768, 12, 2048, 2048, 16), "model.tie_embeddings=false"],
    "llama-350m": [*shape("llama", 24, 1024, 16, 2816, 2048, 16), "model.tie_embeddings=false"],
    "llama-1.5b": [*shape("llama", 24, 2048, 16, 6144, 2048, 8), "model.tie_embeddings=false"],
}


def configuration(size: str, variant: str, device: str) -> RunConfig:
    return load_config(
        "quickstart",
        [
            *SIZES[size], f"runtime.device={device}", "precision.dtype=bf16", "runtime.compile=true",
            "optimizer.name=adamw", "eval.sample_tokens=16", *(part for part in variant.split(",") if part),
        ],
    )  # fmt: skip


def random_batch(config: RunConfig, step: int) -> Batch:
    rows, micro_rows = config.train.global_batch_sequences, config.train.micro_batch_rows
    size = (rows // micro_rows, micro_rows, config.data.sequence_length_tokens + 1)
    tokens = np.random.default_rng(step).integers(0, VOCABULARY, size, np.int32)
    return Batch(
        step, tokens[:, :, :-1].copy(), tokens[:, :, 1:].copy(), None, None, np.zeros(size[:2], np.uint64),
        tokens[:, :, 1:].size, DataCursor("", 0, step + 1, 0, 0),
    )  # fmt: skip


def matmul_peak(device: torch.device) -> float:
    """FLOP/s of a bf16 product: the best of five series of ten."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    rates: list[float] = []
    for _ in range(6):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(10):
            a @ b
        synchronize(device)
        rates.append(10 * 2 * size**3 / (time.perf_counter() - started))
    return max(rates[1:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tiled_weights(spec: ModelSpec, seed: int) -> Iterator[NamedArray]:
    """Yield initial values cut from one buffer of random numbers, since a large model is sampled for a while."""
    buffer = np.random.default_rng(seed).standard_normal(1 << 22, np.float32) * np.float32(0.02)
    for parameter in spec.parameters:
        is_constant = parameter.init in {"ones", "zeros"}
        values = np.resize(np.float32(parameter.init == "ones") if is_constant else buffer, parameter.shape)
        yield parameter.name, values


def time_groups(step: Callable[[int], Any], device: torch.device, groups: int) -> tuple[list[float], float]:
    """Seconds per step of every group, and the loss of the last step."""
    seconds, last = list[float](), math.nan
    for _ in range(groups):
        synchronize(device)
        started_at, pending = time.perf_counter(), None
        for number in range(STEPS_PER_GROUP):
            started = step(number)
            last = pending.fetch().loss if pending is not None else last
            pending = started
        last = pending.fetch().loss if pending is not None else last
        synchronize(device)
        seconds.append((time.perf_counter() - started_at) / STEPS_PER_GROUP)
    return seconds, last


def measure(size: str, variant: str, options: argparse.Namespace, peak: float) -> dict[str, Any]:
    config = configuration(size, variant, options.device)
    length = config.data.sequence_length_tokens
    spec = decoder_spec(config.model, tokenizer_vocab_size=VOCABULARY, sequence_length_tokens=length)
    started_at = time.perf_counter()
    engine = torch_engine.create(config, spec, DistributedContext())
    device = engine.compute.device
    batches = [random_batch(config, step) for step in range(4)]

    def step(number: int) -> Any:
        return engine.train_step(batches[number % len(batches)], lr=1e-4, weight_decay=0.1)

    for number in range(WARMUP_STEPS):
        step(number).fetch()
    start_seconds, host = time.perf_counter() - started_at, list[float]()
    for number in range(3):
        synchronize(device)
        started_at = time.perf_counter()
        step(number)
        host.append(time.perf_counter() - started_at)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds, loss = time_groups(step, device, options.groups)
    tokens = batches[0].tokens_ABT.size
    per_second = tokens / statistics.median(seconds)
    rate = per_second * flops.flops_per_token(spec, length)
    sheet = peak_flops_per_second(torch.cuda.get_device_name(device), "bf16") if device.type == "cuda" else None
    found = {
        "size": size, "variant": variant, "parameters": spec.num_parameters, "tokens_per_step": tokens,
        "tokens_per_second": round(per_second), "step_milliseconds": round(1e3 * tokens / per_second, 2),
        "host_milliseconds": round(1e3 * min(host), 2), "spread": round(max(seconds) / min(seconds), 3),
        "teraflops": round(rate / 1e12, 1), "mfu": None if sheet is None else round(rate / sheet, 4),
        "of_matmul_peak": round(rate / peak, 4), "start_seconds": round(start_seconds, 1), "loss": round(loss, 4),
        "planned_gib": round(memory_per_device(spec, config, device.type).total_bytes / GIB, 2),
    }  # fmt: skip
    if device.type == "cuda":
        read = torch.cuda.max_memory_reserved if config.runtime.cuda_graphs else torch.cuda.max_memory_allocated
        found["peak_gib"] = round(read(device) / GIB, 2)  # PyTorch does not count what a graph has allocated
    if options.kernels:
        profile(step, device, options.kernels)
    return found


def profile(step: Any, device: torch.device, rows: int) -> None:
    """Print the kernels of two steps by time, in milliseconds per step."""
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with torch.profiler.profile(activities=activities) as found:
        for number in range(2):
            step(number).fetch()
        synchronize(device)
    times, counts = Counter[str](), Counter[str]()
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA or device.type != "cuda":
            times[event.name] += event.self_device_time_total or event.self_cpu_time_total
            counts[event.name] += 1
    print(f"  device time {sum(times.values()) / 2e3:.1f} ms per step")
    for name, microseconds in times.most_common(rows):
        print(f"  {microseconds / 2e3:8.2f} ms {counts[name] / 2:6.0f} x {name[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES)[2:])
    parser.add_argument("--variants", nargs="+", default=[""], metavar="KEY=VALUE,...")
    parser.add_argument("--groups", type=int, default=5, help="Groups of ten steps that are timed.")
    parser.add_argument("--kernels", type=int, default=0, help="Print so many kernels of a step.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, help="Append the figures to this file, one JSON object per line.")
    options = parser.parse_args()
    decoder_network.initial_weights = tiled_weights
    peak = matmul_peak(torch.device(options.device))
    print(f"torch {torch.__version__}, matmul peak {peak / 1e12:.0f} TFLOP/s", flush=True)
    for size in options.sizes:
        for variant in options.variants:
            try:
                found = measure(size, variant, options, peak)
            except Exception as error:  # the other variants are still worth their time
                found = {"size": size, "variant": variant, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
            print(json.dumps(found), flush=True)
            if options.results is not None:
                with options.results.open("a") as file:
                    file.write(json.dumps(found) + "\n")
            gc.collect()
            torch._dynamo.reset()
            if options.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
