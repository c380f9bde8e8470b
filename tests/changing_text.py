"""Runs over folders of text that change, their replay and what they answer about their data."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import vorox
from tiny_runs import configuration, write_text
from vorox import backends
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.data.provenance.queries import when, where
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.records.log import RunLog
from vorox.run import make_workload
from vorox.training import replay as replaying

GROW = "data.cache.grow=true"


def config_of(folder: Path, *overrides: str, name: str = "tiny", text: str = "text") -> RunConfig:
    """A run in ``folder``; runs of other names, or over other folders of text, share its caches."""
    paths = [] if text == "text" else [f'data.sources.0.paths=["{folder / text}"]']
    return configuration(folder, [f"run.name={name}", *paths, *overrides])


def replay(directory: Path) -> replaying.ReplayReport:
    def workload(config: RunConfig) -> Any:
        kept = RunLayout(directory).tokenizer
        return make_workload(
            config, backends.connect(config), RunLog(None), None, build=False, tokenizer_directory=kept
        )

    return replaying.replay(directory, workload)


def queries(directory: Path) -> list[Any]:
    with RunDataIndex.open(directory) as data:
        uri = data.readers[0].files[0].uri
        found = [one for one in when(data, uri, ordinal=5) if one.step <= 12]  # a longer run has more of them
        seen = [where(data, 3), where(data, 7, 1), [replace(one, state="kept", attempt=1) for one in found]]
    return [*seen, [batch.tokens_ABT.tolist() for batch in vorox.open_run(directory).validation_batches()]]


def write(folder: Path, name: str, seed: int) -> Path:
    write_text(folder.parent / f".{name}-{seed}", seed=seed)
    (folder.parent / f".{name}-{seed}" / "text.jsonl").rename(folder / f"{name}.jsonl")
    shutil.rmtree(folder.parent / f".{name}-{seed}")
    return folder / f"{name}.jsonl"


def add(text: Path) -> None:
    write(text, "zzz", 7)


def insert(text: Path) -> None:
    write(text, "aaa", 8)


def rename(text: Path) -> None:
    (text / "text.jsonl").rename(text / "renamed.jsonl")


def touch(text: Path) -> None:
    os.utime(text / "text.jsonl", (1, 1))


def rewrite(text: Path) -> None:
    write(text, "text", 9)


def latest(folder: Path) -> Path:
    (directory,) = [path for path in (folder / "runs").iterdir() if path.is_dir()]
    return directory
