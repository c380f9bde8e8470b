"""``--minutes``: parse the time, and find the unfinished run of the same command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from vorox.core.pluralize import pluralize

if TYPE_CHECKING:
    from vorox.core.schema import RunConfig


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
    from vorox.training.time_budget import with_num_steps

    for directory in reversed(run_directories(Path(config.run.directory))):
        attempts = run_attempts(directory)
        argv = [str(word) for word in attempts[0].get("argv", [])] if attempts else []
        if argv[-2:] != ["--minutes", f"{minutes:g}"] or attempts[-1].get("outcome") == "finished":
            continue
        try:
            recorded = recorded_config(directory)
        except ConfigError:
            continue  # of a version that cannot be read
        lengths = {"train.num_steps", "train.num_tokens", "train.num_epochs"}
        changed = {item.key for item in differences(recorded, config) if in_digest(item.key) or item.key == "run.name"}
        if changed <= lengths and recorded.train.num_steps is not None:
            typer.echo(
                f"Resuming {directory.name} (--minutes {minutes:g}, {pluralize(recorded.train.num_steps, 'step')}). "
                "`--resume never` starts a new run."
            )
            return with_num_steps(config, recorded.train.num_steps), directory, None
    return config, "auto", minutes
