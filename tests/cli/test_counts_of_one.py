"""A run of one step, one row, one file: everything that it prints and logs counts one thing in the singular."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tiny_runs import configuration, use_numpy_engine
from vorox.cli import main
from vorox.core.files.json_lines import read_lines
from vorox.records.run_lookup import run_directories

ONE = [
    "train.num_steps=1", "train.global_batch_sequences=1", "train.micro_batch_sequences=1", "schedule.warmup_steps=1",
    "checkpoint.every_steps=1", "eval.every_steps=1", "eval.num_sequences=1", "log.every_steps=1", "model.num_heads=1",
]  # fmt: skip
_SINGULAR = {"is", "was", "has", "loss", "process", "pass"}


def plurals_of_one(text: str) -> list[str]:
    """Nouns in the plural after the number one."""
    found = re.finditer(r"(?<![\w.,/:-])1 (?:[a-z]+ )?([a-z]{2,}s)\b(?!/)", text)
    return [match[0] for match in found if match[1] not in _SINGULAR]


def test_the_search_finds_one() -> None:
    assert plurals_of_one("after 1 steps, 1 saved states, 1 step, 21 steps, 0.1 steps") == ["1 steps", "1 saved states"]


def test_nothing_says_one_things(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_numpy_engine(monkeypatch)
    configuration(tmp_path)
    command = [str(tmp_path / "tiny.yaml"), *ONE]
    runs = str(tmp_path / "runs")
    for words in (
        ["train", *command], ["train", *command], ["train", "--dry-run", *command], ["data", "stats", *command],
        ["data", "verify", *command], ["data", "peek", *command], ["checkpoints", "list", "latest", "--root", runs],
        ["runs", "show", "latest", "--root", runs], ["replay", "latest", "--from", "0", "--to", "1", "--root", runs],
        ["data", "where", "latest", "--step", "1", "--root", runs],
    ):  # fmt: skip
        main(words)  # the engine of the tests lacks some of what the commands ask for
        shown = capsys.readouterr()
        assert plurals_of_one(shown.out + shown.err) == [], words
    (directory,) = run_directories(tmp_path / "runs")
    messages = [str(event["message"]) for event in read_lines(directory / "events.jsonl")]
    assert any("after 1 step" in message for message in messages)
    assert plurals_of_one("\n".join(messages)) == []
