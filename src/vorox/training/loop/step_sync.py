"""Synchronise ranks during each step: save and stop decisions, batch digest.

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

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from types import TracebackType
from typing import Any

from vorox.core.batch import Batch, DataShard, Progress
from vorox.core.errors import DataError, NumericalError
from vorox.core.ranks.distributed_context import DistributedContext, reported_error
from vorox.core.row_set_hash import add_encoded, decode_lanes, encode_lanes, finish, no_lanes
from vorox.data.order.growth import DataNotReady
from vorox.data.order.loader import BatchStream
from vorox.records.replay_chain import ReplayChain
from vorox.runtime.heartbeat import Heartbeat
from vorox.training.loop.rank_statistics import RankStatistics
from vorox.training.steps.stop import Stop, StopRequest

_WORD = 1 << 64


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

    @staticmethod
    def find(reports: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
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
        batch_digest: Digest of the rows of all ranks, for the replay chain.
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
        self.statistics: list[dict[str, Any]] = []


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
        self._dist, self._local_stop, self._due, self._chain = dist, stop, due, chain
        self._rows = RankRows(dist, shard)
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
            statistics = [[self._dist.rank, self._statistics.report(progress.step)]]
            report = {"heads": {self._chain.head: self._dist.rank}, "statistics": statistics}
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
        if exchange.statistics:
            self._statistics.receive(exchange.statistics)
            heartbeat.wait_for_ranks(self._statistics.behind_seconds)
        if decided["stop"] and not self.stop.requested:
            self.stop.requested = decided["stop"]
            self.stop.requested_at = self._local_stop.requested_at or time.monotonic()
        return StepDecision(decided["batch_digest"], decided["save"], self._next_batch.missing(decided["missing"]))

    def _agree(self, exchange: Exchange, report: dict[str, Any]) -> dict[str, Any]:
        """Report and receive the decision; in the thread."""

        def decide(report: dict[str, Any]) -> dict[str, Any]:
            _check_heads(report["heads"], exchange.progress)
            exchange.statistics = [statistics for _, statistics in sorted(report["statistics"], key=itemgetter(0))]
            digest = digest_of(exchange.progress.step, report["rows"])
            save = self._due(exchange.progress)
            return {"batch_digest": digest, "save": save, "stop": report["stop"], "missing": report["missing"]}

        try:
            missing = None if exchange.batches is None else self._next_batch.report(exchange.batches)
        finally:
            exchange.is_batch_known.set()
        rows = self._rows.report(exchange.batch)
        report |= {"rows": rows, "stop": self._local_stop.requested, "missing": missing}
        return self._dist.reduce("step", report, combine_reports, decide, self._is_closed.is_set)

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


def _check_heads(heads: Mapping[str, int], progress: Progress) -> None:
    """Check that all ranks have the same chain head: each sees the numbers of the whole step.

    Args:
        heads: The lowest rank that has each head.
        progress: Progress of the step.
    """
    different = [rank for rank in heads.values() if rank]
    if different:
        raise NumericalError(
            f"Ranks diverged: rank {min(different)} recorded other numbers than rank 0",
            where=f"step {progress.step - 1:,}", hint="resume from the last checkpoint; if it happens again on the "
            "same machine, replace that machine",
        )  # fmt: skip


def combine_reports(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report of two groups of ranks in the exchange of a step."""
    heads = [first["heads"], second["heads"]]
    return {
        "heads": {head: min(ranks[head] for ranks in heads if head in ranks) for head in {**heads[0], **heads[1]}},
        "statistics": first["statistics"] + second["statistics"],
        "rows": combine_rows(first["rows"], second["rows"]),
        "stop": first["stop"] or second["stop"],
        "missing": NextBatch.find([first["missing"], second["missing"]]),
    }


class RankRows:
    """The rows of this rank as its part of the batch digest.

    Ranks with the same shard (tensor and pipeline parallelism, pieces of rows) read the same rows. The lowest of them
    adds the rows to the digest. A second sum, which is zero modulo 2^64 if all of them read the same rows, has the
    hash of the rows from each: ``n - 1`` times from the lowest of ``n`` ranks, subtracted by the others.

    Args:
        dist: This process's rank and its communication.
        shard: The rows that it reads.
    """

    def __init__(self, dist: DistributedContext, shard: DataShard) -> None:
        self._dist = dist
        self._weight = dist.agree("shards", [shard.index, shard.width], _weights)[dist.rank]

    def report(self, batch: Batch) -> dict[str, Any]:
        """Return the part of this rank, as plain JSON."""
        assert batch.lanes is not None
        lanes = no_lanes() if self._weight < 0 else batch.lanes
        return {"lanes": encode_lanes(lanes), "replicas": self._weight * int(batch.digest()[:16], 16) % _WORD}

    def digest(self, batch: Batch) -> str:
        """Return the digest of the rows of all ranks, on every rank."""
        return self._dist.reduce(
            "digest", self.report(batch), combine_rows, functools.partial(digest_of, batch.step + 1)
        )


def _weights(shards: list[list[int]]) -> list[int]:
    """Return for each rank: how many others read its rows if it is the lowest that does, else -1."""
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, shard in enumerate(shards):
        ranks.setdefault(tuple(shard), []).append(rank)
    lowest = {group[0]: len(group) - 1 for group in ranks.values()}
    return [lowest.get(rank, -1) for rank in range(len(shards))]


def combine_rows(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sum of two reports of rows."""
    replicas = (first["replicas"] + second["replicas"]) % _WORD
    return {"lanes": add_encoded(first["lanes"], second["lanes"]), "replicas": replicas}


def digest_of(step: int, rows: Mapping[str, Any]) -> str:
    """Return the batch digest of the sum over all ranks.

    Raises:
        DataError: Ranks that train on the same rows read different ones.
    """
    if rows["replicas"]:
        raise DataError(
            "Ranks that train on the same rows read different ones", where=f"step {step:,}",
            hint="compare the caches of the machines with `vorox data verify`, then resume from the last checkpoint",
        )  # fmt: skip
    return finish(decode_lanes(rows["lanes"]))
