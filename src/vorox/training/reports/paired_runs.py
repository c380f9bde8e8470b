"""Two runs that share their beginning, step by step: where they first differ, and by how much from there on.

In: the replay chains of two runs, and the losses of the same documents under a checkpoint of each. Out: the exact
difference of the loss at the shared steps, and the loss by source and by document. At a step whose rows are the same in
both runs, their noise is in both losses, so the difference is that of the weights.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vorox.core.errors import ConfigError
from vorox.core.run_layout import RunLayout, step_directories
from vorox.data.tokenizers.store import load_run_tokenizer
from vorox.records.replay_chain import number, read_chain
from vorox.records.run_context import recorded_config
from vorox.training.steps.document_losses import DocumentLoss


@dataclass(frozen=True, slots=True)
class PairedSpan:
    """Consecutive steps of two runs.

    Attributes:
        first_step: From 1.
        last_step: Inclusive.
        num_compared: Steps that are compared: those whose rows are the same in both runs.
        losses: Mean loss of each run over these steps, nats per target; ``None`` without any.
        deviation: Standard deviation of the difference of a step; 0 of a single step.
    """

    first_step: int
    last_step: int
    num_compared: int
    losses: tuple[float, float] | None
    deviation: float


def check_pair(first: Path, second: Path) -> None:
    """Check that two runs read the same tokens in rows of one length, so that their losses can be compared.

    Raises:
        ConfigError: They do not.
    """
    configs = [recorded_config(run) for run in (first, second)]
    kept = [
        load_run_tokenizer(RunLayout(run).tokenizer, one.tokenizer)
        for run, one in zip((first, second), configs, strict=True)
    ]
    tokenizers = {None if one is None else one.fingerprint for one in kept}
    if len(tokenizers) > 1 or len({one.data.sequence_length_tokens for one in configs}) > 1:
        raise ConfigError(
            "The runs have other tokenizers or rows, so no loss of the one can be compared with one of the other",
            where=str(second), hint="compare a run with its fork, or leave out --paired",
        )  # fmt: skip


def paired_spans(first: Path, second: Path, num_spans: int) -> tuple[list[PairedSpan], bool]:
    """Return the shared steps from the first difference on, in at most ``num_spans`` parts; empty without any.

    If no step has the same rows in both, as after a change of the mixture, all are compared, and the second value is
    false.

    Raises:
        DataError: A chain is missing or damaged.
    """
    chains = read_chain(first), read_chain(second)
    shared = sorted(set(chains[0]) & set(chains[1]))
    start = next((at for at, step in enumerate(shared) if chains[0][step].chain != chains[1][step].chain), len(shared))
    steps = shared[start:]
    same = {step for step in steps if chains[0][step].batch == chains[1][step].batch}
    compared = same or set(steps)
    size = max(1, math.ceil(len(steps) / num_spans))
    spans: list[PairedSpan] = []
    for part in (steps[at : at + size] for at in range(0, len(steps), size)):
        losses = [(number(chains[0][step].loss), number(chains[1][step].loss)) for step in part if step in compared]
        means = (
            (statistics.fmean(one for one, _ in losses), statistics.fmean(one for _, one in losses)) if losses else None
        )
        deviation = statistics.stdev(after - before for before, after in losses) if len(losses) > 1 else 0.0
        spans.append(PairedSpan(part[0], part[-1], len(losses), means, deviation))
    return spans, bool(same)


def last_shared_checkpoint(first: Path, second: Path) -> int:
    """Return the last step that both runs have a checkpoint of, else that one has and the other has recorded.

    Raises:
        ConfigError: There is none.
    """
    kept, chains = [set(step_directories(run)) for run in (first, second)], (read_chain(first), read_chain(second))
    shared = kept[0] & kept[1] or kept[0] & set(chains[1]) | kept[1] & set(chains[0])  # the other one is computed again
    if not shared:
        raise ConfigError(
            "The runs have no state in common: neither recorded a step that the other one keeps", where=str(second),
            hint="leave out --paired to compare settings and metrics",
        )  # fmt: skip
    return max(shared)


@dataclass(frozen=True, slots=True)
class PairedLoss:
    """The loss of a document, or of all documents of a source, in two runs.

    Attributes:
        name: The document as ``FILE:RECORD``; of a source, its name.
        source: The source.
        losses: Of each run, nats per target.
        num_target_tokens: Targets in the mean.
        steps: The steps that read it.
    """

    name: str
    source: str
    losses: tuple[float, float]
    num_target_tokens: int
    steps: tuple[int, ...]

    @property
    def difference(self) -> float:
        return self.losses[1] - self.losses[0]


def paired_documents(first: Iterable[DocumentLoss], second: Iterable[DocumentLoss]) -> list[PairedLoss]:
    """Return the documents of two lists, those with the largest difference first."""
    others = {(one.source, one.uri, one.ordinal, one.copy): one.loss for one in second}
    found = [
        PairedLoss(
            f"{one.uri}:{one.ordinal}", one.source,
            (one.loss, others[one.source, one.uri, one.ordinal, one.copy]), one.num_target_tokens, one.steps,
        )
        for one in first
    ]  # fmt: skip
    return sorted(found, key=lambda one: (-abs(one.difference), one.source, one.name))


def by_source(documents: Sequence[PairedLoss]) -> list[PairedLoss]:
    """Return the mean over the documents of each source, weighted by targets, in the order of their names."""
    found: list[PairedLoss] = []
    for name in sorted({one.source for one in documents}):
        parts = [one for one in documents if one.source == name]
        count = sum(one.num_target_tokens for one in parts)
        first, second = (
            sum(one.losses[run] * one.num_target_tokens for one in parts) / max(1, count) for run in (0, 1)
        )
        steps = sorted({step for one in parts for step in one.steps})
        found.append(PairedLoss(name, name, (first, second), count, tuple(steps)))
    return found
