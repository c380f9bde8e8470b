"""The interface between the loop and a progress display.

The loop fills a ``StepView`` per logged step and calls a ``Display``; it does not depend on terminals. The command line
has two displays (``cli/terminal/progress.py``): a live block on a terminal, plain lines elsewhere. An unknown value is
``None``, never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from vorox.records.log import Level


@dataclass(frozen=True, slots=True)
class StepView:
    """The numbers of one logged step.

    Attributes:
        step: Finished steps.
        total_steps: Length of the run in steps.
        loss: Training loss, nats per token.
        num_tokens: Positions processed so far.
        total_tokens: Positions of the whole run.
        learning_rate: Learning rate of this step.
        grad_norm: Gradient norm of this step, before clipping.
        epoch: Passes over the data so far, fractional.
        tokens_per_second: Positions per second of training since the last logged step, without saves and validation.
        mfu_fraction: Share of the device's data-sheet peak.
        matmul_peak_fraction: Share of the measured matmul rate.
        eta_seconds: Time left, once it is stable.
        time_fractions: Shares of the time since the last logged step (compute, data, save, eval), summing to 1.
        memory_bytes: Memory in use by kind (host, device).
        planned_memory_bytes: Estimated device memory.
        queue_depth: Prefetched batches.
        queue_capacity: Largest number of prefetched batches.
        seconds_since_save: Age of the newest checkpoint of this process.
        slow_cause: What slows the run down most, and the setting to change; ``None`` if little does.
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
    slow_cause: str | None = None


class Display(Protocol):
    """Shows the progress of a run. Its methods never raise and never block."""

    def step(self, view: StepView) -> None:
        """Show a logged step."""
        ...

    def message(self, text: str, level: Level = "info") -> None:
        """Show the text of an event."""
        ...

    def sample(self, prompt: str, completion: str) -> None:
        """Show a completion of one of the fixed prompts."""
        ...

    def waiting(self, text: str | None) -> None:
        """Show which data the run waits for, since when and why; ``None`` when it continues. From any thread."""
        ...

    def close(self) -> None:
        """Restore the terminal and leave the last state on it. May be called again."""
        ...


class NoDisplay:
    """Shows nothing: for ranks other than the main one, and tests."""

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
