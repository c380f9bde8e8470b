"""What the loop shows to a person, and the shape of whatever shows it.

The loop fills one ``StepView`` per logged step and calls a ``Display``; it knows nothing of terminals. The command
line has two (``cli/progress.py``): a live block on a terminal, plain lines elsewhere. Both show the same fields. A
value that is not known is ``None``, never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

Level = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class StepView:
    """One logged step as a person sees it.

    Attributes:
        step: Steps finished.
        total_steps: Steps of the whole run.
        loss: Training loss, nats per token.
        num_tokens: Positions processed so far.
        total_tokens: Positions of the whole run.
        learning_rate: Of this step.
        grad_norm: Of this step, before clipping.
        epoch: Passes over the data so far, a fraction.
        tokens_per_second: Positions per second of training since the last logged step, saves and validation excluded.
        mfu_fraction: Share of the device's data-sheet peak.
        matmul_peak_fraction: Share of the measured matmul rate.
        eta_seconds: Time left, once it is stable.
        time_fractions: Where the time since the last logged step went (compute, data, save, eval), summing to 1.
        memory_bytes: Memory in use by what it is (host, device).
        planned_memory_bytes: What the plan says the device will need.
        queue_depth: Batches that are ready.
        queue_capacity: Batches that are kept ready at most.
        seconds_since_save: Age of the newest checkpoint of this process.
    """

    step: int
    total_steps: int
    loss: float
    num_tokens: int
    total_tokens: int
    learning_rate: float
    grad_norm: float
    epoch: float | None = None
    tokens_per_second: float | None = None
    mfu_fraction: float | None = None
    matmul_peak_fraction: float | None = None
    eta_seconds: float | None = None
    time_fractions: Mapping[str, float] = field(default_factory=dict[str, float])
    memory_bytes: Mapping[str, float] = field(default_factory=dict[str, float])
    planned_memory_bytes: float | None = None
    queue_depth: int | None = None
    queue_capacity: int | None = None
    seconds_since_save: float | None = None


class Display(Protocol):
    """Shows a run to a person. Its methods never raise and never wait."""

    def step(self, view: StepView) -> None:
        """A logged step."""
        ...

    def message(self, text: str, level: Level = "info") -> None:
        """One event, as a sentence."""
        ...

    def sample(self, prompt: str, completion: str) -> None:
        """A completion of one of the fixed prompts."""
        ...

    def waiting(self, text: str | None) -> None:
        """What data is waited for, since when and why; ``None`` when it flows again. From any thread."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was, with the last state on it. Repeatable."""
        ...


class NoDisplay:
    """Shows nothing: other processes than the first, and tests."""

    def step(self, view: StepView) -> None:
        pass

    def message(self, text: str, level: Level = "info") -> None:
        pass

    def sample(self, prompt: str, completion: str) -> None:
        pass

    def waiting(self, text: str | None) -> None:
        pass

    def close(self) -> None:
        pass
