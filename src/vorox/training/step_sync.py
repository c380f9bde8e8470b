"""Synchronise the ranks after every step: whether to save or stop, and the digest of all rows that were trained on.

In: what each rank knows by itself: the rows that it read, a signal that it got, and on the main rank the clock and a
request for a checkpoint. Out: the same ``StepDecision`` on all ranks, so that none saves or stops alone. A single
process decides without communication. The exchange runs while the devices compute the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vorox.core.batch import Batch, DataShard, Progress, rows_digest
from vorox.core.distributed_context import DistributedContext
from vorox.core.errors import NumericalError
from vorox.training.chain import ReplayChain
from vorox.training.stop import Stop, StopRequest


@dataclass(frozen=True, slots=True)
class StepDecision:
    """What every rank does after a step.

    Attributes:
        batch_digest: Of the rows of all processes, in slot order: what the replay chain records of the data.
        save: Whether a checkpoint is due.
    """

    batch_digest: str
    save: bool


class StepSync:
    """Synchronises one rank with the others after every step.

    Args:
        dist: Who this process is.
        shard: The rows that it reads.
        stop: What asks this process to stop.
        due: Whether a checkpoint is due by the clock, the step or a request; asked in the first process.
        chain: Of this process; those of all must be the same.

    Attributes:
        stop: What asks the run to stop: ``stop`` itself for one process, what was agreed upon for several.
    """

    def __init__(
        self,
        dist: DistributedContext,
        shard: DataShard,
        stop: StopRequest,
        due: Callable[[Progress], bool],
        chain: ReplayChain,
    ) -> None:
        self._dist, self._shard, self._asked, self._due, self._chain = dist, shard, stop, due, chain
        self.stop: Stop = stop if dist.process_count == 1 else _AgreedStop()

    def after(self, progress: Progress, batch: Batch) -> StepDecision:
        """What to do now that a step has been started; ``progress`` stands after it.

        Raises:
            NumericalError: The processes have computed different numbers.
        """
        if self._dist.process_count == 1:
            return StepDecision(batch.digest(), self._due(progress))

        def decide(told: list[dict[str, Any]]) -> dict[str, Any]:
            _check_together([one["chain"] for one in told], progress)
            stop = next((one["stop"] for one in told if one["stop"]), "")
            return {"batch_digest": digest_of(told), "save": self._due(progress), "stop": stop}

        said = {"stop": self._asked.requested, "chain": self._chain.head, **rows_of(batch, self._shard)}
        decided = self._dist.agree("step", said, decide)
        self.stop.requested = self.stop.requested or decided["stop"]
        return StepDecision(decided["batch_digest"], decided["save"])


class _AgreedStop:
    """A stop that all processes know of."""

    def __init__(self) -> None:
        self.requested = ""


def _check_together(heads: list[str], progress: Progress) -> None:
    """Every process sees the numbers of the whole step, so their chains are one."""
    different = [index for index, head in enumerate(heads) if head != heads[0]]
    if different:
        raise NumericalError(
            f"the processes have drifted apart: process {different[0]} recorded other numbers than process 0",
            where=f"step {progress.step - 1:,}", hint="resume from the last checkpoint; if it happens again on the "
            "same machine, take that machine out",
        )  # fmt: skip


def batch_digest(dist: DistributedContext, shard: DataShard, batch: Batch) -> str:
    """The digest of the rows of all processes, in each of them."""
    return dist.agree("digest", rows_of(batch, shard), digest_of)


def rows_of(batch: Batch, shard: DataShard) -> dict[str, Any]:
    """What a process tells of the rows of its batch."""
    return {"shard": shard.index, "count": len(batch.row_digests_AB), "rows": batch.row_digests_AB.tobytes().hex()}


def digest_of(told: list[dict[str, Any]]) -> str:
    """The digest of a global batch, by what the processes tell; some may have read the same rows."""
    parts = {one["shard"]: one for one in told}
    rows = [
        np.frombuffer(bytes.fromhex(one["rows"]), np.uint64).reshape(one["count"], -1)
        for _, one in sorted(parts.items())
    ]
    return rows_digest(np.concatenate(rows, axis=1))
