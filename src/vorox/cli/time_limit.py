"""``--minutes``: parse the time, and find the unfinished run of the same command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from vorox.core.pluralize import pluralize

if TYPE_CHECKING:
    from vorox.core.schema import RunConfig

_MANY_TOKENS = 1 << 60
"""A dataset of which any fraction is a long warm-up: the size is unknown before the caches are open."""


def parse_minutes(text: str) -> float:
    """Parse a duration in minutes, or with units: 2, 0.5, 90s, 2m, 1h30m.

    Raises:
        ConfigError: The text is not a duration.
    """
    from vorox.core.errors import ConfigError

    bare = text.strip().lower()
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", bare):
        return float(bare)
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(h|m|s)[a-z]*\s*", bare)
    if not parts or "".join(re.findall(r"\d+(?:\.\d+)?\s*[hms][a-z]*\s*", bare)) != bare:
        raise ConfigError(
            f"--minutes {text} is not a duration", where="--minutes", hint="write --minutes=2, 0.5, 90s or 1h30m"
        )
    return sum(float(number) * {"h": 60.0, "m": 1.0, "s": 1 / 60}[unit] for number, unit in parts)


def unfinished_run(config: RunConfig, minutes: float) -> tuple[RunConfig, Literal["auto"] | Path, float | None]:
    """Return the unfinished run of the same ``--minutes`` command, whose length was measured when it started."""
    from vorox.core.config import differences, in_digest
    from vorox.core.errors import ConfigError
    from vorox.core.run_context import recorded_config
    from vorox.core.run_lookup import run_attempts, run_directories
    from vorox.training.time_budget import fit_warmup, with_num_steps

    for directory in reversed(run_directories(Path(config.run.directory))):
        attempts = run_attempts(directory)
        argv = [str(word) for word in attempts[0].get("argv", [])] if attempts else []
        if argv[-2:] != ["--minutes", f"{minutes:g}"] or attempts[-1].get("outcome") == "finished":
            continue
        try:
            recorded = recorded_config(directory)
        except ConfigError:
            continue  # of a version that cannot be read
        if recorded.train.num_steps is None:
            continue
        timed = with_num_steps(config, recorded.train.num_steps)
        for same in (timed, fit_warmup(timed, _MANY_TOKENS)[0]):
            changed = (item.key for item in differences(recorded, same))
            if not any(in_digest(key) or key == "run.name" for key in changed):
                steps = pluralize(recorded.train.num_steps, "step")
                typer.echo(
                    f"Resuming {directory.name} (--minutes {minutes:g}, {steps}). `--resume never` starts a new run."
                )
                return same, directory, None
    return config, "auto", minutes
