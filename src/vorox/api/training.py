"""Training in Python: the same run as ``vorox train``, with optional taps on its engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from vorox.api.configuration import Configuration, Overrides, as_config
from vorox.core.engine import Tap
from vorox.data.cache.report import PrepareProgress
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
    """Start a run, or resume it, and train to the end of its schedule. Prints nothing.

    Args:
        config: A configuration returned by ``load_config``, or any argument of ``load_config``.
        overrides: Settings that replace those of ``config``.
        resume_from: ``auto`` resumes the latest run of this configuration, or starts one; ``never`` starts a new run;
            a path resumes that run, or starts from that checkpoint.
        minutes: Replaces the length of the run by the number of steps that fit into this time.
        taps: Functions called in every forward pass. The run records their names; they are not part of the
            configuration, so ``vorox replay`` does not call them.
        display: Receives every logged step, message and sample, for example a notebook's progress bar.
        on_progress: Called with the progress of data preparation.

    Returns:
        The run directory and how the run ended; ``open_run(outcome.run_directory)`` reads the run.

    Raises:
        VoroxError: The run failed or was stopped. The error names the cause, the place and the remedy.
    """
    target = Path(resume_from) if resume_from not in ("auto", "never") else resume_from
    return train_run(
        as_config(config, overrides), resume_from=target, minutes=minutes, taps=taps, display=display,
        on_progress=on_progress,
    )  # fmt: skip
