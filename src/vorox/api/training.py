"""Training in Python: the run that ``vorox train`` would make, with taps attached to its engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from vorox.api.configuration import Configuration, Overrides, as_config
from vorox.core.engine import Tap
from vorox.data.corpus import PrepareProgress
from vorox.run import Outcome
from vorox.run import train as train_run
from vorox.training.display import Display

__all__ = ["Outcome", "Tap", "train"]


def train(
    config: Configuration,
    overrides: Overrides = (),
    *,
    resume_from: Literal["auto", "never"] | str | Path = "auto",
    minutes: float | None = None,
    taps: Sequence[Tap] = (),
    display: Display | None = None,
    on_progress: PrepareProgress | None = None,
) -> Outcome:
    """Train to the end of the schedule, from wherever the run stands, and print nothing.

    Args:
        config: A configuration of ``load_config``, or what ``load_config`` takes.
        overrides: Settings that replace those of ``config``.
        resume_from: ``auto`` continues the latest run of this configuration or starts one; ``never`` starts one; a
            path continues that run, or starts from that checkpoint of it.
        minutes: Replaces the length of the run by the number of steps that fit into this time.
        taps: Functions called in every forward pass of the run. The run records which they are; they are not part of
            the configuration, so ``vorox replay`` cannot call them.
        display: Is given every logged step, message and sample, such as a notebook's progress bar.
        on_progress: Is given the progress of preparing the data.

    Returns:
        Where the run is and how it ended; ``open_run(outcome.run_directory)`` reads it.

    Raises:
        VoroxError: Whatever stopped the run, with what happened, where, and what to do.
    """
    target = Path(resume_from) if resume_from not in ("auto", "never") else resume_from
    return train_run(
        as_config(config, overrides), resume_from=target, minutes=minutes, taps=taps, display=display,
        on_progress=on_progress,
    )  # fmt: skip
