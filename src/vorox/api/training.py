"""Training in Python: the same run as ``vorox train``, with optional taps on its engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vorox.api.arguments import check_argument
from vorox.api.configuration import Configuration, Overrides, as_config
from vorox.api.displays import DisplayChoice, display_of
from vorox.core.engine import Tap
from vorox.core.errors import ConfigError
from vorox.core.run_layout import ResumeFrom
from vorox.data.cache.building.report import PrepareProgress
from vorox.run import Outcome
from vorox.run import train as train_run

__all__ = ["Outcome", "Tap", "train"]


def train(
    config: Configuration,
    overrides: Overrides = (),
    *,
    resume_from: ResumeFrom | str = "auto",
    minutes: float | None = None,
    taps: Sequence[Tap] = (),
    display: DisplayChoice = None,
    on_progress: PrepareProgress | None = None,
) -> Outcome:
    """Start a run, or resume it, and train to the end of its schedule.

    A notebook shows a progress bar; elsewhere nothing is printed, unless ``display`` says so.

    Args:
        config: A configuration returned by ``load_config``, or any argument of ``load_config``.
        overrides: Settings that replace those of ``config``.
        resume_from: ``auto`` resumes the latest run of this configuration, or starts one; ``never`` starts a new run;
            a path resumes that run, or starts from that checkpoint.
        minutes: Replaces the length of the run by the number of steps that fit into this time.
        taps: Functions called in every forward pass. The run records their names; they are not part of the
            configuration, so ``vorox replay`` does not call them.
        display: True shows progress, False shows nothing; a function receives the numbers of every logged step
            (``training.loop.display.StepView``); an object has methods ``step(view)``, ``message(text, level)``,
            ``sample(prompt, completion)``, ``waiting(text)`` and ``close()``, or some of them. ``None``: a progress bar
            in a notebook, else nothing.
        on_progress: Called with the progress of data preparation.

    Returns:
        The run directory and how the run ended; ``open_run(outcome.run_directory)`` reads the run.

    Raises:
        VoroxError: The run failed or was stopped. The error names the cause, the place and the remedy.
    """
    check_argument("vorox.train", "resume_from", resume_from, (str, Path))
    check_argument("vorox.train", "minutes", minutes, (float, type(None)))
    check_argument("vorox.train", "taps", taps, (list, tuple))
    for tap in taps:
        check_argument("vorox.train", "a tap", tap, (Tap,))
    if on_progress is not None and not callable(on_progress):
        raise ConfigError(f"on_progress={on_progress!r} must be a function", where="vorox.train")
    target = Path(resume_from) if resume_from not in ("auto", "never") else resume_from
    shown = display_of(display)
    try:
        return train_run(
            as_config(config, overrides), resume_from=target, minutes=minutes, taps=taps, display=shown,
            on_progress=on_progress,
        )  # fmt: skip
    finally:
        shown.close()
