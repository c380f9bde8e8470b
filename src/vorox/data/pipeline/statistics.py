"""What a pipeline says of itself: per stage what it did, per queue who waited, and which stage holds the others up.

Counters of stages and queues go in, one immutable record comes out, as often as anybody asks. The bottleneck is the
stage whose input is full while its output is empty, which is the one that never waits: of all stages the one whose
threads were busy for the largest share of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vorox.data.pipeline.queues import QueueStatistics


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """What a stage did.

    Attributes:
        name: ``fetch``, ``decode``, ``filter``, ``tokenize``, ``augment``, ``gather``, ``pack`` or ``write``.
        threads: Its threads.
        items: Items that it gave out.
        size_bytes: Their bytes.
        busy_seconds: Time spent working, summed over its threads.
        wait_seconds: Time spent waiting for input or for room behind it, summed over its threads.
    """

    name: str
    threads: int
    items: int
    size_bytes: int
    busy_seconds: float
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class PipelineStatistics:
    """A pipeline at one moment.

    Attributes:
        seconds: Since it started, or how long it ran.
        stages: In the order of the flow; the last is whoever takes what the pipeline makes.
        queues: Those between them.
    """

    seconds: float
    stages: tuple[StageStatistics, ...]
    queues: tuple[QueueStatistics, ...]

    @property
    def bottleneck(self) -> str:
        """The stage that the others wait for; empty before anything was done."""
        if self.seconds <= 0 or not any(stage.items for stage in self.stages):
            return ""
        return max(self.stages, key=lambda stage: stage.busy_seconds / stage.threads).name

    def metrics(self) -> dict[str, float]:
        """The same as numbers under the names of the registry of metrics."""
        return dict(self._metrics())

    def _metrics(self) -> Iterator[tuple[str, float]]:
        for stage in self.stages:
            yield f"pipeline/{stage.name}/items", float(stage.items)
            yield f"pipeline/{stage.name}/bytes", float(stage.size_bytes)
            yield f"pipeline/{stage.name}/busy_seconds", stage.busy_seconds
            yield f"pipeline/{stage.name}/wait_seconds", stage.wait_seconds
        for queue in self.queues:
            place = queue.name.replace(">", "_to_")
            yield f"pipeline/{place}/depth", float(queue.depth)
            yield f"pipeline/{place}/held_bytes", float(queue.held_bytes)
            yield f"pipeline/{place}/producer_wait_seconds", queue.producer_wait_seconds
            yield f"pipeline/{place}/consumer_wait_seconds", queue.consumer_wait_seconds
