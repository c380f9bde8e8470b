"""The peers of the training benchmark, each doing its own usual training step on random tokens of one shape.

A peer is built by a function ``(workload) -> step`` whose step trains on one micro-batch: forward, backward, clipping
at 1.0 and AdamW, in fp32. nanoGPT and nanochat are not packages: ``benchmarks/setup.sh`` clones them at a fixed
commit into ``benchmarks/.peers``. A peer that is not installed is reported as absent, never left out in silence.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PEERS = Path(__file__).parent / ".peers"
Step = Callable[[], None]


@dataclass(frozen=True)
class Workload:
    """One model size and batch shape."""

    name: str
    num_layers: int
    num_heads: int
    hidden_size: int
    sequence_length_tokens: int
    batch_sequences: int
    vocab_size: int
    lr: float = 1e-3

    @property
    def tokens_per_step(self) -> int:
        return self.batch_sequences * self.sequence_length_tokens


CHAR_DEMO = Workload("character demo", 4, 4, 128, 64, 12, 65)
SMALL = Workload("6 layers x 384", 6, 6, 384, 256, 8, 4096)


def _random_batch(workload: Workload):
    import torch

    shape = (workload.batch_sequences, workload.sequence_length_tokens)
    tokens = torch.randint(workload.vocab_size, shape)
    return tokens, tokens.roll(-1, dims=1)


def nanogpt(workload: Workload, *, compiled: bool = False) -> Step:
    """karpathy/nanoGPT: model.py and the step of train.py (biases off, its default)."""
    import torch

    sys.path.insert(0, str(PEERS / "nanoGPT"))
    import model as nanogpt_model

    sys.path.pop(0)
    config = nanogpt_model.GPTConfig(
        block_size=workload.sequence_length_tokens,
        vocab_size=workload.vocab_size,
        n_layer=workload.num_layers,
        n_head=workload.num_heads,
        n_embd=workload.hidden_size,
        dropout=0.0,
        bias=False,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        model = nanogpt_model.GPT(config)
        optimizer = model.configure_optimizers(0.1, workload.lr, (0.9, 0.99), "cpu")
    run = torch.compile(model) if compiled else model

    def step() -> None:
        tokens, labels = _random_batch(workload)
        _, loss = run(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def huggingface_model(workload: Workload, family: str):
    import transformers

    if family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=workload.vocab_size,
            n_positions=workload.sequence_length_tokens,
            n_embd=workload.hidden_size,
            n_layer=workload.num_layers,
            n_head=workload.num_heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=workload.vocab_size,
        hidden_size=workload.hidden_size,
        intermediate_size=-(-workload.hidden_size * 8 // 3 // 64) * 64,
        num_hidden_layers=workload.num_layers,
        num_attention_heads=workload.num_heads,
        max_position_embeddings=workload.sequence_length_tokens,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def huggingface_trainer(workload: Workload, family: str = "gpt2") -> Callable[[int], float]:
    """transformers.Trainer. Returns ``run(steps) -> seconds`` of the steps after the first two, by its callbacks."""
    import time

    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    model = huggingface_model(workload, family)

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            row = torch.randint(workload.vocab_size, (workload.sequence_length_tokens,))
            return {"input_ids": row, "labels": row}

    def run(steps: int) -> float:
        marks: list[float] = []

        class Clock(transformers.TrainerCallback):
            def on_step_end(self, *arguments: object, **keywords: object) -> None:
                marks.append(time.perf_counter())

        with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
            arguments = transformers.TrainingArguments(
                output_dir=directory,
                max_steps=steps + 2,
                per_device_train_batch_size=workload.batch_sequences,
                learning_rate=workload.lr,
                weight_decay=0.1,
                max_grad_norm=1.0,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                logging_steps=10**9,
            )
            trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[Clock()])
            trainer.train()
        return marks[-1] - marks[1]

    return run


def huggingface(workload: Workload, *, family: str) -> Step:
    """A bare loop over the transformers model, for comparing models rather than trainers."""
    import torch

    model = huggingface_model(workload, family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr, weight_decay=0.1, fused=True)

    def step() -> None:
        tokens, _ = _random_batch(workload)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def litgpt(workload: Workload, *, compiled: bool = False) -> Step:
    """Lightning-AI/litgpt: its GPT in the pythia shape (LayerNorm, GELU MLP, rotary) and its chunk-free loss."""
    import torch
    from litgpt.config import Config
    from litgpt.model import GPT

    config = Config(
        name="benchmark",
        block_size=workload.sequence_length_tokens,
        vocab_size=workload.vocab_size,
        padded_vocab_size=workload.vocab_size,
        n_layer=workload.num_layers,
        n_head=workload.num_heads,
        n_embd=workload.hidden_size,
        bias=False,
        rotary_percentage=1.0,
    )
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr, weight_decay=0.1, fused=True)
    run = torch.compile(model) if compiled else model

    def step() -> None:
        tokens, labels = _random_batch(workload)
        logits = run(tokens)
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def matmul_ceiling(workload: Workload) -> Callable[[], float]:
    """torch.mm over the model's own products, forward and both backward ones; returns the FLOPs it did."""
    import torch

    rows = workload.tokens_per_step
    width = workload.hidden_size
    shapes = [(rows, width, 3 * width), (rows, width, width), (rows, width, 4 * width), (rows, 4 * width, width)]
    products = [shape for shape in shapes for _ in range(workload.num_layers)]
    products.append((rows, width, workload.vocab_size))
    operands = {shape: (torch.randn(shape[0], shape[1]), torch.randn(shape[1], shape[2])) for shape in set(products)}
    gradients = {shape: torch.randn(shape[0], shape[2]) for shape in set(products)}

    def run() -> float:
        flops = 0.0
        for shape in products:
            left, right = operands[shape]
            gradient = gradients[shape]
            torch.mm(left, right)
            torch.mm(gradient, right.t())
            torch.mm(left.t(), gradient)
            flops += 6.0 * shape[0] * shape[1] * shape[2]
        return flops

    return run
