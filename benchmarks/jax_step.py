"""The JAX engine's training step beside a plain jitted optax loop over the same model, and beside the torch engine.

    jax_step.py [--rounds 7] [--size small|demo|124m] [--dtype fp32|bf16] [--device cpu|cuda] [--compile]
    jax_step.py --device cuda --dtype bf16 --size 124m --compile          # the same on a GPU
    jax_step.py --pairs 300 [--size ...] [--dtype ...] [--device ...]     # only what the engine adds to the plain loop

Plain: flax and optax as their manuals write it: ``value_and_grad`` of the mean cross entropy over full logits, clipping
and AdamW chained, one jitted function with donation. Ours: ``engine.train_step(batch).fetch()`` with everything that a
run does in a step (checks, placement, chunked loss, finite check, numbers read back). All take turns on the same
random tokens.

What a variant costs besides is measured before, each in a process of its own, because a process has one peak: seconds
to compile, the peak of the process or of the device, and what XLA says that its compiled step needs.

With ``--pairs``, the plain loop and the engine alone do a step each in turn, so many times, and what is printed is the
median ratio of a pair with its confidence interval.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import interleave
from vorox import backends
from vorox.core.batch import Batch, DataCursor
from vorox.core.config import load_config
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.planning import flops
from vorox.runtime.device_peaks import peak_flops_per_second
from vorox.runtime.matmul_peak import measure_matmul_peak, training_shapes

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes most of a GPU that torch shares here

PLAIN, JAX, SCANNED = "plain jitted optax loop", "vorox, jax engine", "vorox, jax engine, layers scanned"
TORCH, TORCH_COMPILED = "vorox, torch engine", "vorox, torch engine, compiled"
ENGINES: Mapping[str, list[str]] = {
    JAX: ["backend=jax"],
    SCANNED: ["backend=jax", "runtime.scan_layers=true"],
    TORCH: ["backend=torch"],
    TORCH_COMPILED: ["backend=torch", "runtime.compile=true"],
}
MEMORY_STEPS = 3
SIZES = {
    "demo": ["model.num_layers=4", "model.num_heads=4", "model.hidden_size=128", "data.sequence_length_tokens=64"],
    "small": ["model.num_layers=6", "model.num_heads=6", "model.hidden_size=384", "data.sequence_length_tokens=256"],
    "124m": ["model.num_layers=12", "model.num_heads=12", "model.hidden_size=768", "data.sequence_length_tokens=1024"],
}
ROWS = {"demo": 12, "small": 8, "124m": 16}
VOCABULARY = {"demo": 65, "small": 4096, "124m": 50257}
LR, WEIGHT_DECAY = 1e-3, 0.1


def configuration(options: argparse.Namespace, *extra: str) -> RunConfig:
    rows = ROWS[options.size]
    return load_config(
        "quickstart",
        [
            "model.family=llama", *SIZES[options.size], "model.num_kv_heads=null", "model.intermediate_size=null",
            f"train.global_batch_sequences={rows}", f"train.micro_batch_sequences={rows}", "optimizer.name=adamw",
            f"runtime.device={options.device}", f"precision.dtype={options.dtype}", "eval.sample_tokens=16", *extra,
        ],
    )  # fmt: skip


def spec_of(config: RunConfig, options: argparse.Namespace) -> DecoderSpec:
    return decoder_spec(
        config.model,
        tokenizer_vocab_size=VOCABULARY[options.size],
        sequence_length_tokens=config.data.sequence_length_tokens,
    )


def random_batch(config: RunConfig, options: argparse.Namespace, step: int) -> Batch:
    length = config.data.sequence_length_tokens
    shape = (1, ROWS[options.size], length + 1)
    tokens = np.random.default_rng(step).integers(0, VOCABULARY[options.size], shape, np.int32)
    return Batch(
        step, tokens[:, :, :-1].copy(), tokens[:, :, 1:].copy(), None, None, np.zeros(shape[:2], np.uint64),
        tokens[0, :, 1:].size, DataCursor("", 0, step + 1, 0, 0),
    )  # fmt: skip


@dataclass
class Variant:
    """One way to train.

    Attributes:
        step: Does one step and waits for its numbers.
        engine: The engine, which the plain loop uses for its model only.
        compiled: What XLA compiled for the step; filled by the first one.
        compile_seconds: Of the plain loop; an engine knows its own.
    """

    step: Callable[[], None]
    engine: Any
    compiled: Callable[[], Any] = field(default=lambda: None)
    compile_seconds: float | None = None


def build(name: str, options: argparse.Namespace) -> Variant:
    return plain_step(options) if name == PLAIN else engine_step(options, *ENGINES[name])


def engine_step(options: argparse.Namespace, *extra: str) -> Variant:
    config = configuration(options, *extra)
    engine: Any = backends.load(config.backend).create(config, spec_of(config, options), DistributedContext())
    count = iter(range(1 << 60))

    def step() -> None:
        engine.train_step(random_batch(config, options, next(count)), lr=LR, weight_decay=WEIGHT_DECAY).fetch()

    return Variant(step, engine, lambda: next(iter(getattr(engine, "_compiled_steps", {}).values()), None))


def plain_step(options: argparse.Namespace) -> Variant:
    import jax
    import jax.numpy as jnp
    import optax

    config = configuration(options, "backend=jax")
    engine: Any = backends.load("jax").create(config, spec_of(config, options), DistributedContext())
    decoder = engine._decoder  # the same model; everything around it is written out here
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(LR, b1=0.9, b2=0.95, weight_decay=WEIGHT_DECAY)
    )  # fmt: skip
    state = {"params": engine.state.params, "moments": optimizer.init(engine.state.params)}
    engine.state = None  # the buffers are given away below

    def mean_loss(params: Any, tokens_BT: Any, labels_BT: Any) -> Any:
        hidden_BTD, _, _ = decoder(params, tokens_BT, engine._context({"tokens": tokens_BT}))
        logits = engine._head_logits(params, hidden_BTD)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels_BT).mean()

    def update(params: Any, moments: Any, tokens_BT: Any, labels_BT: Any) -> Any:
        loss, gradients = jax.value_and_grad(mean_loss)(params, tokens_BT, labels_BT)
        changes, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, changes), moments, loss, optax.tree.norm(gradients)

    def arrays(batch: Batch) -> tuple[Any, ...]:
        return state["params"], state["moments"], jnp.asarray(batch.tokens_ABT[0]), jnp.asarray(batch.labels_ABT[0])

    count = iter(range(1 << 60))
    began = time.perf_counter()
    with engine.compute.precision():
        example = arrays(random_batch(config, options, 0))
        compiled = jax.jit(update, donate_argnums=(0, 1)).lower(*example).compile()
    compile_seconds = time.perf_counter() - began

    def step() -> None:
        given = arrays(random_batch(config, options, next(count)))
        state["params"], state["moments"], loss, norm = compiled(*given)
        float(loss), float(norm)

    return Variant(step, engine, lambda: compiled, compile_seconds)


def costs(name: str, options: argparse.Namespace) -> dict[str, float]:
    """What a variant costs in this process, where no other has been."""
    variant = build(name, options)
    for _ in range(MEMORY_STEPS):
        variant.step()
    stats = dict(variant.engine.device_stats())
    compile_seconds = variant.compile_seconds
    found = {
        "compile_seconds": stats.get("runtime/compile_seconds", 0.0) if compile_seconds is None else compile_seconds,
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
    }
    if "memory/device_peak_bytes" in stats:
        found["device_peak_bytes"] = stats["memory/device_peak_bytes"]
    analysis = None if variant.compiled() is None else variant.compiled().memory_analysis()
    if analysis is not None:
        state = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        found |= {"step_arguments_bytes": state, "step_temporary_bytes": analysis.temp_size_in_bytes}
    return found


def costs_alone(name: str, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--costs-of", name, *(
        f"--{key}={getattr(options, key)}" for key in ("size", "device", "dtype")
    )]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def print_costs(table: Mapping[str, Mapping[str, float]]) -> None:
    print("\nEach in a process of its own; the step's arrays and temporaries as XLA plans them.\n")
    print("| | compile, s | peak of the process, MiB | of the device, MiB | step: arrays, MiB | temporaries, MiB |")
    print("|---|---|---|---|---|---|")
    keys = ("process_peak_bytes", "device_peak_bytes", "step_arguments_bytes", "step_temporary_bytes")
    for name, found in table.items():
        cells = [f"{found[key] / 2**20:,.0f}" if key in found else "-" for key in keys]
        compiles = f"{found['compile_seconds']:.1f}" if found["compile_seconds"] else "-"
        print(f"| {name} | {compiles} | {' | '.join(cells)} |")


def print_use(options: argparse.Namespace, rates: Mapping[str, list[float]], engines: Mapping[str, Any]) -> None:
    """Arithmetic per second, of the data sheet (MFU) where it is known and of the model's own products here."""
    config = configuration(options)
    spec, length = spec_of(config, options), config.data.sequence_length_tokens
    weights = [row.shape for row in spec.parameters if row.kind == "matrix"] + [(spec.vocab_size, spec.hidden_size)]
    shapes = training_shapes([(shape[0], shape[1]) for shape in weights], ROWS[options.size] * length)
    ceilings = {
        framework: measure_matmul_peak(shapes, engines[name].matmul_seconds, warmup_seconds=1.0, repeats=5)
        for framework, name in (("JAX", JAX), ("torch", TORCH))
    }
    device = str(engines[JAX].environment()["device"])
    peak = peak_flops_per_second(device, options.dtype)
    print(f"\nMatrix products of this model alone: {ceilings['JAX'].flops_per_second / 1e9:,.0f} GFLOP/s in JAX, "
          f"{ceilings['torch'].flops_per_second / 1e9:,.0f} in torch; data sheet of {device}: "
          f"{'not known, so no MFU' if peak is None else f'{peak / 1e12:,.0f} TFLOP/s'}.\n")  # fmt: skip
    print("| | GFLOP/s | of its framework's products | MFU |\n|---|---|---|---|")
    for name, values in rates.items():
        achieved = interleave.quantile(values, 0.5) * flops.flops_per_token(spec, length)
        ceiling = ceilings["torch" if "torch" in name else "JAX"].flops_per_second
        mfu = "-" if peak is None else f"{achieved / peak:.1%}"
        print(f"| {name} | {achieved / 1e9:,.0f} | {achieved / ceiling:.0%} | {mfu} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--compile", action="store_true", help="Also the torch engine compiled.")
    parser.add_argument("--pairs", type=int, default=0, help="Only the overhead, from so many pairs of steps.")
    parser.add_argument("--costs-of", choices=[PLAIN, *ENGINES], help="Measure what one variant costs and print JSON.")
    options = parser.parse_args()
    if options.costs_of:
        print(json.dumps(costs(options.costs_of, options)))
        return
    if options.pairs:
        plain, ours = build(PLAIN, options), build(JAX, options)
        median, low, high = interleave.paired_ratio(ours.step, plain.step, pairs=options.pairs)
        print(f"{JAX}, {options.size} {options.device} {options.dtype}: {median:.3f} ({low:.3f} to {high:.3f}, 95%) of "
              f"the {PLAIN}, {options.pairs} pairs of steps")  # fmt: skip
        return
    names = [PLAIN, *(name for name in ENGINES if options.compile or name != TORCH_COMPILED)]
    table = {name: costs_alone(name, options) for name in names}
    variants = {name: build(name, options) for name in names}
    tokens = ROWS[options.size] * configuration(options).data.sequence_length_tokens
    repeats = 20 if options.size == "demo" else 2

    def contender(variant: Variant) -> Callable[[], float]:
        def run() -> float:
            for _ in range(repeats):
                variant.step()
            return float(tokens * repeats)

        return run

    rates = interleave.measure({name: contender(one) for name, one in variants.items()}, rounds=options.rounds)
    interleave.report(
        f"jax step {options.size} {options.device} {options.dtype}",
        interleave.table(rates, reference=PLAIN, unit="tokens/s"), reference=PLAIN, rounds=options.rounds,
    )  # fmt: skip
    print_costs(table)
    print_use(options, rates, {name: one.engine for name, one in variants.items()})


if __name__ == "__main__":
    main()
