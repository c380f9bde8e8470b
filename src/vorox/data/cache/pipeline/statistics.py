"""Counters of a pipeline: what its stages did, what its queues hold, and its bottleneck."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class BuildStageStatistics:
    """Counters of a stage.

    Attributes:
        name: ``fetch``, ``decode``, ``filter``, ``tokenize``, ``augment``, ``gather``, ``pack`` or ``write``.
        threads: Number of threads.
        items: Items produced.
        size_bytes: Their bytes.
        busy_seconds: Working time, summed over the threads.
        wait_seconds: The rest of their time: without input, or without room in the output queue.
    """

    name: str
    threads: int
    items: int = 0
    size_bytes: int = 0
    busy_seconds: float = 0.0
    wait_seconds: float = 0.0


@dataclass(slots=True)
class QueueStatistics:
    """Counters of a queue.

    Attributes:
        name: The stages before and after it: ``decode>tokenize``.
        depth: Items waiting now.
        held_bytes: Bytes reserved or waiting now.
        producer_wait_seconds: Time that a producer waited for room.
        consumer_wait_seconds: Time that a consumer waited for an item.
    """

    name: str
    depth: int = 0
    held_bytes: int = 0
    producer_wait_seconds: float = 0.0
    consumer_wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class BuildStatistics:
    """Counters of a pipeline at one moment.

    Attributes:
        seconds: Running time so far.
        stages: In the order of the flow; the last is the consumer.
        queues: The queues between them.
    """

    seconds: float
    stages: tuple[BuildStageStatistics, ...]
    queues: tuple[QueueStatistics, ...]

    @property
    def bottleneck(self) -> str:
        """The stage whose threads were busy for the largest share of the time; empty before any item is done."""
        if self.seconds <= 0 or not any(stage.items for stage in self.stages):
            return ""
        return max(self.stages, key=lambda stage: stage.busy_seconds / stage.threads).name

    def metrics(self) -> dict[str, float]:
        """Return the counters under their names in the metric registry."""
        return {f"pipeline/{name}": float(value) for name, value in self._metrics()}

    def _metrics(self) -> Iterator[tuple[str, float]]:
        for stage in self.stages:
            yield f"{stage.name}/items", stage.items
            yield f"{stage.name}/bytes", stage.size_bytes
            yield f"{stage.name}/busy_seconds", stage.busy_seconds
            yield f"{stage.name}/wait_seconds", stage.wait_seconds
        for queue in self.queues:
            place = queue.name.replace(">", "_to_")
            yield f"{place}/depth", queue.depth
            yield f"{place}/held_bytes", queue.held_bytes
            yield f"{place}/producer_wait_seconds", queue.producer_wait_seconds
            yield f"{place}/consumer_wait_seconds", queue.consumer_wait_seconds
