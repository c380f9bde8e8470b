"""Every file of a run directory, in one table: what removing a run may take, and what its mirror copies."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from pathlib import Path

from vorox.core.atomic import TEMPORARY_PREFIX


@dataclass(frozen=True, slots=True)
class RunFile:
    """One kind of file or folder right inside a run directory.

    Attributes:
        pattern: Of its name.
        mirrored: Pattern, relative to the run directory, of what a mirror copies of it beside checkpoints; empty for
            what can be made of the rest again and for what counts on one machine only.
    """

    pattern: str
    mirrored: str = ""


RUN_FILES = (
    RunFile("LOCK"),
    RunFile("attempts.bin", mirrored="attempts.bin"),
    RunFile("chain.jsonl", mirrored="chain.jsonl"),
    RunFile("checkpoints"),
    RunFile("config.yaml", mirrored="config.yaml"),
    RunFile("configs", mirrored="configs/*.yaml"),
    RunFile("control"),
    RunFile("evaluations.jsonl", mirrored="evaluations.jsonl"),
    RunFile("events*.jsonl", mirrored="events*.jsonl"),
    RunFile("export"),
    RunFile("failure.json"),
    RunFile("log*.txt", mirrored="log*.txt"),
    RunFile("metadata.spool"),
    RunFile("metadata.sqlite*"),
    RunFile("metrics.jsonl", mirrored="metrics.jsonl"),
    RunFile("nonfinite", mirrored="nonfinite/*"),
    RunFile("plan.jsonl", mirrored="plan.jsonl"),
    RunFile("run.json", mirrored="run.json"),
    RunFile("tensorboard"),
    RunFile("tokenizer", mirrored="tokenizer/*"),
    RunFile("wandb"),
    RunFile(f"{TEMPORARY_PREFIX}*"),
)


def foreign_files(run_directory: Path) -> list[str]:
    """Names in a run directory that no run gives to anything."""
    names = sorted(path.name for path in run_directory.iterdir())
    return [name for name in names if not any(fnmatch.fnmatchcase(name, known.pattern) for known in RUN_FILES)]


def mirrored_files(run_directory: Path) -> list[Path]:
    """The files that a mirror keeps beside the checkpoints: all that a run needs to go on elsewhere."""
    found = [path for known in RUN_FILES if known.mirrored for path in sorted(run_directory.glob(known.mirrored))]
    return [path for path in found if path.is_file() and not path.name.startswith(TEMPORARY_PREFIX)]
