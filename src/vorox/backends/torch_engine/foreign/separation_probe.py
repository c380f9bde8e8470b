"""Measure, before step 1, what a model sees: whether it is causal, and how the documents of a row can run apart.

A model runs in fp32 on random tokens. It is causal if a later token changes no earlier logit. Documents can share a row
if each has the logits there that it has alone; documents of a micro-batch can share a forward pass, each as a row of
its own, if the same holds for those rows. Rows hold documents on both sides of every length that changes what the
model computes (``huggingface_probe.py`` brings those of a configuration into the range of the measurement).

Shape legend: B rows, T positions, L positions of a document, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from vorox.core.errors import ConfigError

Separation = Literal["packed", "rows", "single"]
"""Documents share rows, or each is a row of its own, in a shared forward pass or in its own."""

Run = Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]
"""(tokens, positions, is_token, documents), each ``[B, T]`` -> logits ``[B, T, V]``."""

PROBE_TOKENS = 32
"""Positions of a measured row."""
TOLERANCE = 1e-4
"""Largest difference of logits that is rounding, relative to the largest logit. Other effects are larger: rounding in
fp32 was below 2e-5 for every causal language model in transformers."""


def threshold(length: int) -> int:
    """Return a length between those of the documents of a measured row of ``length`` positions."""
    return max(2, 11 * length // PROBE_TOKENS)


def document_lengths(length: int) -> tuple[int, ...]:
    """Return the documents of a measured row: one longer than ``threshold``, others shorter."""
    first, second = max(1, 19 * length // PROBE_TOKENS), 9 * length // PROBE_TOKENS
    return tuple(one for one in (first, second, length - first - second) if one > 0)


@torch.no_grad()
def check_causal(run: Run, *, vocab_size: int, length: int, device: torch.device, name: str, where: str) -> None:
    """Check that the tokens behind a position do not change its logits.

    Args:
        run: The model.
        vocab_size: Tokens are below it.
        length: Positions of a row.
        device: Device of the model.
        name: The model or function, for messages.
        where: The setting that names it.

    Raises:
        ConfigError: They do.
    """
    tokens = _tokens(1, length, vocab_size, device)
    before = run(tokens, None, None, None).float()
    for start in {length - 1, length // 2} - {0}:
        changed = tokens.clone()
        changed[:, start:] = (changed[:, start:] + 1) % vocab_size
        if _differs(run(changed, None, None, None).float()[:, :start], before[:, :start]):
            raise ConfigError(
                f"{name} is not causal: a later token changes the logits of earlier positions", where=where,
                hint="use a causal language model" if "." not in name and ":" not in name
                else f"let {name} attend to earlier positions only",
            )  # fmt: skip


@torch.no_grad()
def measure_separation(run: Run, *, can_pack: bool, vocab_size: int, length: int, device: torch.device) -> Separation:
    """Return how the documents of a micro-batch can run without seeing each other.

    Args:
        run: The model.
        can_pack: Whether the model separates the documents of a row: by positions or by resets.
        vocab_size: Tokens are below it.
        length: Positions of a row.
        device: Device of the model.
    """
    lengths = document_lengths(length)
    tokens_BT = _tokens(2, length, vocab_size, device)
    documents = [*tokens_BT[0].split(lengths), tokens_BT[1]]
    alone = [run(one[None], None, None, None)[0].float() for one in documents]
    if can_pack:
        positions = torch.cat([torch.arange(one, device=device) for one in (*lengths, length)]).view(2, length)
        ids = [torch.full((one,), index + 1, device=device) for index, one in enumerate(lengths)]
        ids_BT = torch.stack([torch.cat(ids), torch.ones(length, dtype=torch.long, device=device)])
        packed = run(tokens_BT, positions, None, ids_BT).float()
        if not _any_differs([*packed[0].split(lengths), packed[1]], alone):
            return "packed"
    padded = torch.zeros((len(documents), length), dtype=torch.long, device=device)
    is_token = torch.zeros_like(padded)
    for row, one in enumerate(documents):
        padded[row, : len(one)], is_token[row, : len(one)] = one, 1
    rows = run(padded, None, is_token, None).float()
    found = [row[: len(one)] for row, one in zip(rows, documents, strict=True)]
    return "single" if _any_differs(found, alone) else "rows"


def randomise(module: nn.Module) -> None:
    """Fill all parameters so that every layer affects the logits: vectors near 1, and matrices that keep scale.

    Buffers keep their values: some hold masks.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim < 2:
                values = torch.empty(parameter.shape).uniform_(0.5, 1.5, generator=generator)
            else:
                values = torch.empty(parameter.shape).normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
            parameter.copy_(values)


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Inside the block, products of fp32 are in fp32, without autocast."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _tokens(rows: int, length: int, vocab_size: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (rows, length), generator=generator).to(device)


def _any_differs(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return any(_differs(one, other) for one, other in zip(found, expected, strict=True))


def _differs(found: Tensor, expected: Tensor) -> bool:
    """Whether logits differ by more than rounding; values that are not finite do."""
    difference = float((found - expected).abs().max())
    return not difference <= TOLERANCE * float(expected.abs().max())
