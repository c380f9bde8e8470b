"""Training tokens/s on the CPU, fp32: our engine against peers of the same size, all in one process, taking turns.

Two workloads: nanoGPT's published character demo, and 6 layers x 384 with 256 positions and 4,096 tokens. Ours runs the
full engine step (forward, backward, clipping, AdamW, finite check, loss read back), as peers do theirs. The ceiling
is torch.mm over the model's own products. A second table compares whole trainers on the demo: our loop with its data
path, replay chain and logging against nanoGPT's and transformers.Trainer.
"""

from __future__ import annotations

import argparse
import os
import statistics

import interleave
import peers
from peers import Step, Workload


def ours(workload: Workload, *, family: str, compiled: bool = False) -> Step:
    """Our engine's step on random tokens."""
    import numpy as np

    from vorox import backends
    from vorox.core.config import load_config
    from vorox.core.distributed_context import DistributedContext
    from vorox.core.records import Batch, DataCursor
    from vorox.models.spec import model_spec

    config = load_config(
        "quickstart",
        [
            f"model.family={family}",
            f"model.num_layers={workload.num_layers}",
            f"model.num_heads={workload.num_heads}",
            "model.num_kv_heads=null",
            f"model.hidden_size={workload.hidden_size}",
            *(
                ["model.attention_bias=false", "model.mlp_bias=false", "model.norm_bias=false", "model.activation=gelu"]
                if family == "gpt2"
                else []
            ),
            f"data.sequence_length_tokens={workload.sequence_length_tokens}",
            f"train.global_batch_sequences={workload.batch_sequences}",
            f"train.micro_batch_sequences={workload.batch_sequences}",
            "runtime.num_threads=2",
            f"runtime.compile={str(compiled).lower()}",
        ],
    )
    spec = model_spec(
        config.model,
        tokenizer_vocab_size=workload.vocab_size,
        sequence_length_tokens=workload.sequence_length_tokens,
    )
    engine = backends.load("torch").create(config, spec, DistributedContext())
    random = np.random.default_rng(0)
    state = {"step": 0}

    def step() -> None:
        shape = (1, workload.batch_sequences, workload.sequence_length_tokens + 1)
        rows = random.integers(0, workload.vocab_size, shape, dtype=np.int32)
        batch = Batch(
            step=state["step"],
            tokens_ABT=np.ascontiguousarray(rows[..., :-1]),
            labels_ABT=np.ascontiguousarray(rows[..., 1:]),
            segment_ids_ABT=None,
            position_ids_ABT=None,
            row_digests_AB=np.zeros(shape[:2], dtype=np.uint64),
            num_target_tokens=workload.tokens_per_step,
            cursor_after=DataCursor("", 0, 0, 0, 0),
        )
        engine.train_step(batch, lr=workload.lr, weight_decay=0.1).fetch()
        state["step"] += 1

    return step


def repeat(step: Step, workload: Workload, steps: int):
    def run() -> float:
        for _ in range(steps):
            step()
        return float(steps * workload.tokens_per_step)

    return run


def compare_steps(workload: Workload, *, rounds: int, steps: int, compile_too: bool) -> None:
    contenders = {}
    for family in ("gpt2", "llama"):
        step = ours(workload, family=family)
        contenders[f"vorox {family}"] = repeat(step, workload, steps)
    if compile_too:
        step = ours(workload, family="gpt2", compiled=True)
        contenders["vorox gpt2, compiled"] = repeat(step, workload, steps)
    builders = {
        "nanoGPT": lambda: peers.nanogpt(workload),
        "litgpt": lambda: peers.litgpt(workload),
        "transformers GPT-2, bare loop": lambda: peers.huggingface(workload, family="gpt2"),
        "transformers Llama, bare loop": lambda: peers.huggingface(workload, family="llama"),
    }
    if compile_too:
        builders["nanoGPT, compiled"] = lambda: peers.nanogpt(workload, compiled=True)
        builders["litgpt, compiled"] = lambda: peers.litgpt(workload, compiled=True)
    for name, build in builders.items():
        try:
            contenders[name] = repeat(build(), workload, steps)
        except ImportError as error:
            print(f"{name} is absent: {error}; run benchmarks/setup.sh")
    trainer = peers.huggingface_trainer(workload)

    ceiling = peers.matmul_ceiling(workload)
    rates = interleave.measure({**contenders, "torch.mm": ceiling}, rounds=rounds)
    ceiling_rates = rates.pop("torch.mm")
    title = f"Training step, {workload.name}"
    rows = interleave.table(rates, reference="nanoGPT", unit="tokens/s")
    interleave.report(title, rows, reference="nanoGPT", rounds=rounds)
    print(f"\ntorch.mm ceiling over the model's own products: {statistics.median(ceiling_rates) / 1e9:,.0f} GFLOP/s")
    for name in [name for name in rates if name.startswith("vorox gpt2") or name.startswith("nanoGPT")]:
        fractions = [rate * flops_of(workload) / top for rate, top in zip(rates[name], ceiling_rates, strict=True)]
        print(f"{name}: {statistics.median(fractions):.0%} of it")
    seconds = [trainer(steps) for _ in range(max(3, rounds // 2))]
    theirs = steps * workload.tokens_per_step / statistics.median(seconds)
    best = statistics.median(rates["vorox gpt2"])
    print(f"transformers.Trainer, GPT-2: {theirs:,.0f} tokens/s; vorox gpt2 is {best / theirs:.2f} x as fast")


def flops_of(workload: Workload) -> float:
    """6N + 12 L D T of the GPT-2 shape, N without embeddings but with the head."""
    width, layers = workload.hidden_size, workload.num_layers
    parameters = layers * 12 * width * width + width * workload.vocab_size
    return 6.0 * parameters + 12.0 * layers * width * workload.sequence_length_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workload", choices=["char", "small", "both"], default="both")
    parser.add_argument("--compile", action="store_true", help="also the compiled contenders (minutes to compile)")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    import torch

    torch.set_num_threads(2)
    if arguments.workload in {"char", "both"}:
        compare_steps(peers.CHAR_DEMO, rounds=arguments.rounds, steps=30, compile_too=arguments.compile)
    if arguments.workload in {"small", "both"}:
        compare_steps(peers.SMALL, rounds=arguments.rounds, steps=2, compile_too=arguments.compile)


if __name__ == "__main__":
    main()
