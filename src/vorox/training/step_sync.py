"""Synchronise ranks after each step: save and stop decisions, global batch digest.

In: what each rank knows by itself: the rows that it read, whether it can read the next ones, a signal that it got, and
on the main rank the clock and a request for a checkpoint. Out: the same ``StepDecision`` on all ranks, so that none
saves or stops alone. A single process decides without communication. The exchange runs while the devices compute. A
step is a collective of the devices, so a rank without a batch must report it before the others start the step.
Invariant: a rank that gives up ends the wait for rows on all ranks, so the exchange never waits for a batch that does
not come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vorox.core.batch import Batch, DataShard, Progress, rows_digest
from vorox.core.distributed_context import DistributedContext, reported_error
from vorox.core.errors import NumericalError
from vorox.data.growth import DataNotReady
from vorox.data.loader import BatchStream
from vorox.runtime.heartbeat import Heartbeat
from vorox.training.rank_statistics import RankStatistics
from vorox.training.replay_chain import ReplayChain
from vorox.training.stop import Stop, StopRequest


@dataclass(frozen=True, slots=True)
class MissingBatch:
    """Why the next step cannot start.

    Attributes:
        error: The error of the rank that cannot read its batch; on that rank the original one.
        is_awaited: Whether its rows are not built yet, so that the run can continue later.
    """

    error: BaseException
    is_awaited: bool


class NextBatch:
    """The next batch of all ranks, as one rank sees it. With a single rank, nothing is exchanged.

    Args:
        dist: This process's rank and its communication.
        stop: Stop request of this process.
        heartbeat: Records that rows are awaited.
    """

    def __init__(self, dist: DistributedContext, stop: Stop, heartbeat: Heartbeat) -> None:
        self._dist, self._stop, self.heartbeat = dist, stop, heartbeat
        self._given_up = dist.flag("waits for rows")
        self._error: Exception | None = None

    def ends_wait(self) -> bool:
        """Whether this rank must no longer wait for rows: of a stop request, or because another rank gave up."""
        self.heartbeat.progressed()  # polled while rows are not built yet
        return bool(self._stop.requested) or self._given_up.is_set()

    def report(self, batches: BatchStream) -> dict[str, Any] | None:
        """Wait for this rank's next batch; return what prevents it, as plain JSON for ``find``."""
        self._error = batches.next_error()
        if self._error is None:
            return None
        self._given_up.set()
        return {**self._dist.report(self._error), "is_awaited": isinstance(self._error, DataNotReady)}

    def find(self, reports: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
        """Return the report that decides: a failure, else a wait that ended, else ``None``."""
        return min(filter(None, reports), key=lambda report: bool(report["is_awaited"]), default=None)

    def missing(self, report: Mapping[str, Any] | None) -> MissingBatch | None:
        """Return the agreed reason on this rank; ``None`` if every rank has its batch."""
        if report is None:
            return None
        own = self._error if report["rank"] == self._dist.rank else None
        return MissingBatch(own or reported_error(report), bool(report["is_awaited"]))

    def agree(self, batches: BatchStream) -> MissingBatch | None:
        """Return why the first step cannot start, on all ranks."""
        if self._dist.world_size == 1:
            return None
        return self.missing(self._dist.agree("first batch", self.report(batches), self.find))


@dataclass(frozen=True, slots=True)
class StepDecision:
    """What every rank does after a step.

    Attributes:
        batch_digest: Digest of the rows of all ranks, in slot order, for the replay chain.
        save: Whether a checkpoint is due.
        missing: Why the next step cannot start; ``None`` if every rank has its batch.
    """

    batch_digest: str
    save: bool
    missing: MissingBatch | None = None


class StepSync:
    """Synchronises one rank with the others after every step.

    Args:
        dist: This process's rank and its communication.
        shard: The rows that it reads.
        stop: Stop request of this process.
        due: Whether a checkpoint is due; called on the main rank.
        chain: Replay chain of this rank; all ranks must have the same.
        next_batch: Agrees on whether every rank can read the next batch.
        statistics: Times and metrics of the ranks, which travel in the same exchange.

    Attributes:
        stop: Stop request of the run: ``stop`` itself for one process, the common decision for several.
    """

    def __init__(
        self,
        dist: DistributedContext,
        shard: DataShard,
        stop: StopRequest,
        due: Callable[[Progress], bool],
        chain: ReplayChain,
        next_batch: NextBatch,
        statistics: RankStatistics,
    ) -> None:
        self._next_batch, self._statistics = next_batch, statistics
        self._dist, self._shard, self._local_stop, self._due, self._chain = dist, shard, stop, due, chain
        self.stop: Stop = stop if dist.world_size == 1 else _AgreedStop()

    def after(
        self, progress: Progress, batch: Batch, batches: BatchStream | None, waited_seconds: float = 0.0
    ) -> StepDecision:
        """Decide what to do after a started step.

        Args:
            progress: The progress, including this step.
            batch: The batch of the step.
            batches: The batches that follow; ``None`` after the last step.
            waited_seconds: Total time that the loop has waited for batches.

        Raises:
            NumericalError: The ranks computed different numbers.
        """
        if self._dist.world_size == 1:
            return StepDecision(batch.digest(), self._due(progress))

        def decide(reports: list[dict[str, Any]]) -> dict[str, Any]:
            _check_heads([report["chain"] for report in reports], progress)
            self._statistics.receive([report["statistics"] for report in reports])
            stop = next((report["stop"] for report in reports if report["stop"]), "")
            missing = self._next_batch.find([report["missing"] for report in reports])
            return {
                "batch_digest": digest_of(reports), "save": self._due(progress), "stop": stop, "missing": missing
            }  # fmt: skip

        heartbeat = self._next_batch.heartbeat
        heartbeat.enter("data", progress.step + 1)
        missing = None if batches is None else self._next_batch.report(batches)
        heartbeat.enter("sync", progress.step)
        report = {
            "stop": self._local_stop.requested, "chain": self._chain.head, "missing": missing,
            "statistics": self._statistics.report(progress.step, waited_seconds), **rows_of(batch, self._shard),
        }  # fmt: skip
        decided = self._dist.agree("step", report, decide)
        if decided["stop"] and not self.stop.requested:
            self.stop.requested = decided["stop"]
            self.stop.requested_at = self._local_stop.requested_at or time.monotonic()
        return StepDecision(decided["batch_digest"], decided["save"], self._next_batch.missing(decided["missing"]))


class _AgreedStop:
    """A stop request that all ranks agree on."""

    def __init__(self) -> None:
        self.requested, self.requested_at = "", 0.0


def _check_heads(heads: list[str], progress: Progress) -> None:
    """Check that all ranks have the same chain head: each sees the numbers of the whole step."""
    different = [rank for rank, head in enumerate(heads) if head != heads[0]]
    if different:
        raise NumericalError(
            f"Ranks diverged: rank {different[0]} recorded other numbers than rank 0",
            where=f"step {progress.step - 1:,}", hint="resume from the last checkpoint; if it happens again on the "
            "same machine, replace that machine",
        )  # fmt: skip


def batch_digest(dist: DistributedContext, shard: DataShard, batch: Batch) -> str:
    """Return the digest of the rows of all ranks, on every rank."""
    return dist.agree("digest", rows_of(batch, shard), digest_of)


def rows_of(batch: Batch, shard: DataShard) -> dict[str, Any]:
    """Return a rank's report of the rows of its batch."""
    return {"shard": shard.index, "count": len(batch.row_digests_AB), "rows": batch.row_digests_AB.tobytes().hex()}


def digest_of(reports: list[dict[str, Any]]) -> str:
    """Return the digest of a global batch from the ranks' reports.

    Some ranks may have read the same rows. Rows that pad a shorter shard have digest 0 and do not count, so the digest
    does not depend on the number of ranks.
    """
    parts = {report["shard"]: report for report in reports}
    rows = [
        np.frombuffer(bytes.fromhex(report["rows"]), np.uint64).reshape(report["count"], -1)
        for _, report in sorted(parts.items())
    ]
    all_rows = np.concatenate(rows, axis=1)
    return rows_digest(all_rows[all_rows != 0])
