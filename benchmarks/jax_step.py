"""The JAX engine's training step beside a plain jitted optax loop over the same model, and beside the torch engine.

    jax_step.py [--rounds 7] [--device cpu|cuda] [--dtype fp32|bf16] [--size small|demo|124m] [--compile]

Plain: flax and optax as their manuals write it: ``value_and_grad`` of the mean cross entropy over full logits, clipping
and AdamW chained, one jitted function with donation. Ours: ``engine.train_step(batch).fetch()`` with everything that a
run does in a step (checks, placement, chunked loss, finite check, numbers read back). All take turns on the same
random tokens. Reported besides: seconds to compile, memory of the device or of the process.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import interleave
from vorox import backends
from vorox.core.config import load_config
from vorox.core.distributed_context import DistributedContext
from vorox.core.records import Batch, DataCursor
from vorox.core.schema import RunConfig
from vorox.models.spec import ModelSpec, model_spec

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


def spec_of(config: RunConfig, options: argparse.Namespace) -> ModelSpec:
    return model_spec(
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


def engine_step(options: argparse.Namespace, *extra: str) -> tuple[Callable[[], None], Any]:
    config = configuration(options, *extra)
    engine = backends.load(config.backend).create(config, spec_of(config, options), DistributedContext())
    count = iter(range(1 << 60))

    def step() -> None:
        engine.train_step(random_batch(config, options, next(count)), lr=LR, weight_decay=WEIGHT_DECAY).fetch()

    return step, engine


def plain_step(options: argparse.Namespace) -> Callable[[], None]:
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

    def mean_loss(params: Any, tokens_BT: Any, labels_BT: Any) -> Any:
        hidden_BTD, _, _ = decoder(params, tokens_BT, engine._pass({"tokens": tokens_BT}))
        logits = engine._head_logits(params, hidden_BTD)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels_BT).mean()

    def update(params: Any, moments: Any, tokens_BT: Any, labels_BT: Any) -> Any:
        loss, gradients = jax.value_and_grad(mean_loss)(params, tokens_BT, labels_BT)
        changes, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, changes), moments, loss, optax.tree.norm(gradients)

    jitted = jax.jit(update, donate_argnums=(0, 1))
    count = iter(range(1 << 60))

    def step() -> None:
        batch = random_batch(config, options, next(count))
        with engine.compute.precision():
            state["params"], state["moments"], loss, norm = jitted(
                state["params"], state["moments"], jnp.asarray(batch.tokens_ABT[0]), jnp.asarray(batch.labels_ABT[0])
            )
        float(loss), float(norm)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--compile", action="store_true", help="Also the torch engine compiled.")
    options = parser.parse_args()
    steps: dict[str, Callable[[], None]] = {}
    started = time.perf_counter()
    steps["plain jitted optax loop"] = plain_step(options)
    steps["plain jitted optax loop"]()
    plain_seconds = time.perf_counter() - started
    steps["vorox, jax engine"], engine = engine_step(options, "backend=jax")
    steps["vorox, jax engine, layers scanned"], scanned = engine_step(
        options, "backend=jax", "runtime.scan_layers=true"
    )  # fmt: skip
    steps["vorox, torch engine"], _ = engine_step(options)
    if options.compile:
        steps["vorox, torch engine, compiled"], _ = engine_step(options, "runtime.compile=true")
    config = configuration(options)
    tokens = ROWS[options.size] * config.data.sequence_length_tokens
    repeats = 20 if options.size == "demo" else 2

    def contender(step: Callable[[], None]) -> Callable[[], float]:
        def run() -> float:
            for _ in range(repeats):
                step()
            return float(tokens * repeats)

        return run

    rates = interleave.measure({name: contender(step) for name, step in steps.items()}, rounds=options.rounds)
    reference = "plain jitted optax loop"
    interleave.report(
        f"jax step {options.size} {options.device} {options.dtype}",
        interleave.table(rates, reference=reference, unit="tokens/s"), reference=reference, rounds=options.rounds,
    )  # fmt: skip
    print(
        f"first step with compilation: plain {plain_seconds:.1f} s; engine compiled in {engine.compile_seconds:.1f} s, "
        f"with layers scanned in {scanned.compile_seconds:.1f} s"
    )
    print(f"memory: {dict(engine.device_stats())}, process peak "
          f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")  # fmt: skip


if __name__ == "__main__":
    main()
