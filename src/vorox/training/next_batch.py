"""Agree on whether every rank can read the next batch, so that all of them save if one cannot.

In: the batches of this rank. Out: what prevents the next step, the same on all ranks. A step is a collective of the
devices, so a rank without a batch must report it before the others start the step. Invariant: a rank that gives up
ends the wait for rows on all ranks, so the exchange never waits for a batch that does not come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vorox.core.distributed_context import DistributedContext, reported_error
from vorox.data.growth import DataNotReady
from vorox.data.loader import BatchStream
from vorox.training.stop import Stop


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
    """

    def __init__(self, dist: DistributedContext, stop: Stop) -> None:
        self._dist, self._stop = dist, stop
        self._given_up = dist.flag("waits for rows")
        self._error: Exception | None = None

    def ends_wait(self) -> bool:
        """Whether this rank must no longer wait for rows: of a stop request, or because another rank gave up."""
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
