"""Synchronise ranks during each step: save and stop decisions, global batch digest.

In: what each rank knows by itself: the rows that it read, whether it can read the next ones, a signal that it got, and
on the main rank the clock and a request for a checkpoint. Out: the same ``StepDecision`` on all ranks, so that none
saves or stops alone. A single process decides without communication. With several ranks, a thread of each exchanges the
reports of a step while the main thread computes it; all apply the decision after the step. A step is a collective of
the devices, so a rank without a batch must report it before the others start the step. The exchange uses the key-value
store only, so it cannot interleave with collectives of the devices.
Invariant: a rank that gives up ends the wait for rows on all ranks, so the exchange never waits for a batch that does
not come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
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
        """Whether this rank must no longer wait for rows: a stop was requested, or another rank failed."""
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


class Exchange:
    """The exchange of one step, which a thread runs while the main thread computes the step.

    Args:
        progress: The progress, including this step.
        batch: The batch of the step.
        batches: The batches that follow; ``None`` after the last step.
    """

    def __init__(self, progress: Progress, batch: Batch, batches: BatchStream | None) -> None:
        self.progress, self.batch, self.batches = progress, batch, batches
        self.is_batch_known = threading.Event()
        self.decision: Future[dict[str, Any]] = Future()
        self.reports: list[dict[str, Any]] = []


class StepSync:
    """Synchronises one rank with the others during every step; a context manager that ends the exchange in progress.

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
        self._thread = None if dist.world_size == 1 else ThreadPoolExecutor(1, "vorox-sync")
        self._is_closed = threading.Event()
        self._running: Exchange | None = None

    def start(self, progress: Progress, batch: Batch, batches: BatchStream | None) -> Exchange:
        """Start the exchange of a step, before the step.

        Args:
            progress: The progress, including this step.
            batch: The batch of the step.
            batches: The batches that follow; ``None`` after the last step. Nothing else may read them until ``finish``.
        """
        exchange = self._running = Exchange(progress, batch, batches)
        if self._thread is not None:
            report = {
                "chain": self._chain.head, "statistics": self._statistics.report(progress.step),
                **rows_of(batch, self._shard),
            }  # fmt: skip
            exchange.decision = self._thread.submit(self._agree, exchange, report)
        return exchange

    def finish(self, exchange: Exchange) -> StepDecision:
        """Return what all ranks do after a step that has been started; wait for their reports.

        Raises:
            NumericalError: The ranks computed different numbers.
            CheckpointError: The checkpoint that was being written failed.
        """
        progress = exchange.progress
        if self._thread is None:
            self._running = None
            return StepDecision(exchange.batch.digest(), self._due(progress))
        self._statistics.end_step()
        heartbeat = self._next_batch.heartbeat
        heartbeat.enter("data", progress.step + 1)
        exchange.is_batch_known.wait()
        heartbeat.enter("sync", progress.step)
        decided = exchange.decision.result()
        self._running = None
        if exchange.reports:
            self._statistics.receive([report["statistics"] for report in exchange.reports])
        if decided["stop"] and not self.stop.requested:
            self.stop.requested = decided["stop"]
            self.stop.requested_at = self._local_stop.requested_at or time.monotonic()
        return StepDecision(decided["batch_digest"], decided["save"], self._next_batch.missing(decided["missing"]))

    def _agree(self, exchange: Exchange, report: dict[str, Any]) -> dict[str, Any]:
        """Report and receive the decision; in the thread."""

        def decide(reports: list[dict[str, Any]]) -> dict[str, Any]:
            _check_heads([report["chain"] for report in reports], exchange.progress)
            exchange.reports = reports
            stop = next((report["stop"] for report in reports if report["stop"]), "")
            missing = self._next_batch.find([report["missing"] for report in reports])
            save = self._due(exchange.progress)
            return {"batch_digest": digest_of(reports), "save": save, "stop": stop, "missing": missing}

        try:
            missing = None if exchange.batches is None else self._next_batch.report(exchange.batches)
        finally:
            exchange.is_batch_known.set()
        report |= {"stop": self._local_stop.requested, "missing": missing}
        return self._dist.agree("step", report, decide, self._is_closed.is_set)

    def __enter__(self) -> StepSync:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the exchange of a step that failed, and the thread."""
        self._is_closed.set()
        if self._thread is not None:
            if self._running is not None and self._running.batches is not None:
                self._running.batches.close()
            self._thread.shutdown()


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
