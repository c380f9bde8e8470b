"""Loss spikes: the largest loss whose update is applied, from the losses of earlier steps.

In: the loss of every settled step. Out: the limit of the next step, which the engine compares on the device. The limit
of step N is a function of the settings, of the plan and of the recorded losses up to step N-2, the last one that is
settled when step N starts. So every rank, a resumed run and a replay compute the same limit.

The engine applies no update above the limit (``optimizers/optimizer.py``); ``pending_steps`` counts the spike when the
step is settled; ``session.record`` stops, plans the skip, or requests a rollback, which ``vorox/run.py`` turns into the
next attempt.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vorox.core.batch_sizes import BatchSizes
from vorox.core.engine import StepValues
from vorox.core.schema import TrainConfig
from vorox.data.order.plan_events import RollbackEvent
from vorox.records.replay_chain import ChainEntry, number

SKIP_STEP = -math.inf
"""The limit of a step whose update is never applied."""

_NORMAL_DEVIATION = 1.4826
"""Standard deviation of a normal distribution, in units of its median absolute deviation."""
_LEAST_DEVIATION = 0.01
"""Smallest deviation, as a fraction of the median: losses that hardly vary make no spike of the smallest change."""
_SETTLED_DISTANCE = 2


@dataclass(frozen=True, slots=True)
class Rollback:
    """A request to return to a state before a spike.

    Attributes:
        step: The spike.
        num_steps: Steps up to the spike, with it, that are undone and then skipped.
        loss: Its loss.
        max_loss: The limit that it is above.
        number: Number of the rollback in the run, from 1.
    """

    step: int
    num_steps: int
    loss: float
    max_loss: float
    number: int

    @property
    def target(self) -> int:
        """The newest state that holds none of the steps."""
        return max(0, self.step - self.num_steps)

    def event(self, state: int, sizes: BatchSizes) -> RollbackEvent:
        """Return the plan event of the return to a state, given the rows of every step."""
        start, end = sizes.position_of(max(state, self.target)), sizes.position_of(self.step)
        return RollbackEvent(start, end, self.loss, self.max_loss, sizes.position_of(state))


class RollbackRequested(Exception):
    """Ends the loop of an attempt; the next one starts from an earlier state."""

    def __init__(self, rollback: Rollback) -> None:
        super().__init__(f"the run returns to a state before step {rollback.step:,}")
        self.rollback = rollback


class LossSpikes:
    """The limit of the next step, and the count of spikes.

    Args:
        config: The policy (``train.spike_*``).
        losses: Recorded losses before the first step, by step, ascending.
        num_skipped: Steps that were skipped before, over the whole run.
        rollbacks: The rollbacks of the run so far, whose steps are skipped under every policy.
        sizes: Rows of every step; needed with rollbacks.
    """

    def __init__(
        self,
        config: TrainConfig,
        losses: Mapping[int, float],
        num_skipped: int = 0,
        rollbacks: Sequence[RollbackEvent] = (),
        sizes: BatchSizes | None = None,
    ) -> None:
        self._config = config
        finite = [(step, loss) for step, loss in losses.items() if math.isfinite(loss)]
        self._losses = deque(finite, maxlen=config.spike_window_steps + _SETTLED_DISTANCE - 1)
        step_at = (sizes or BatchSizes(1)).step_at
        self._windows = [range(step_at(one.start_position) + 1, step_at(one.end_position) + 1) for one in rollbacks]
        self.num_skipped = num_skipped

    @property
    def is_active(self) -> bool:
        """Whether there is a limit at all."""
        return self._config.spike_policy != "off"

    def max_loss(self, step: int) -> float | None:
        """Return the limit of a step (from 1), exact in fp32; ``None`` with policy ``off``."""
        if any(step in window for window in self._windows):
            return SKIP_STEP
        if not self.is_active:
            return None
        settled = [loss for known, loss in self._losses if known <= step - _SETTLED_DISTANCE]
        window = settled[-self._config.spike_window_steps :]
        return (
            spike_limit(window, self._config.spike_deviations)
            if len(window) == self._config.spike_window_steps
            else math.inf
        )

    def record(self, step: int, values: StepValues, max_loss: float | None) -> bool:
        """Add the loss of a settled step; return whether it is a spike. A step that is skipped anyway is none."""
        if not self.is_active or not math.isfinite(values.loss):
            return False
        self._losses.append((step, values.loss))
        limit = math.inf if max_loss is None or max_loss == SKIP_STEP else max_loss
        is_spike = values.finite and values.loss > limit
        self.num_skipped += is_spike
        return is_spike

    @property
    def ends_run(self) -> bool:
        """Whether the run ends at the spike that was just recorded."""
        match self._config.spike_policy:
            case "skip":
                return self.num_skipped > self._config.max_spike_steps
            case "rollback":
                return len(self._windows) >= self._config.max_spike_rollbacks
            case _:
                return True

    @property
    def rolls_back(self) -> bool:
        """Whether the run returns to an earlier state at the spike that was just recorded."""
        return self._config.spike_policy == "rollback" and not self.ends_run

    def rollback(self, step: int, loss: float, max_loss: float) -> Rollback:
        """Return the request to return to a state before a spike."""
        return Rollback(step, self._config.spike_rollback_steps, loss, max_loss, len(self._windows) + 1)


def spike_limit(losses: Sequence[float], deviations: float) -> float:
    """Return the limit for a window of finite losses."""
    median = float(np.median(losses))
    spread = _NORMAL_DEVIATION * float(np.median(np.abs(np.subtract(losses, median))))
    return float(np.float32(median + deviations * max(spread, _LEAST_DEVIATION * abs(median))))


def losses_before(entries: Mapping[int, ChainEntry], step: int, config: TrainConfig) -> dict[int, float]:
    """Return the losses in a replay chain up to ``step``, as many as the limit of the next step needs."""
    found: list[tuple[int, float]] = []
    for known in sorted(entries, reverse=True):
        loss = number(entries[known].loss)
        if known <= step and math.isfinite(loss):
            found.append((known, loss))
        if len(found) == config.spike_window_steps + _SETTLED_DISTANCE:
            break
    return dict(reversed(found))
