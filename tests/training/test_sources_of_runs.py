"""What a run keeps of its sources: a fallback that was read is in its events and in its record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiny_runs import configuration, run, use_numpy_engine
from vorox.core.errors import DataError
from vorox.core.json_lines import read_lines


def test_a_run_records_that_it_read_its_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    overrides = [f"data.sources.0.paths=[{tmp_path}/missing]", f"data.sources.0.fallback=[{tmp_path}/text]"]
    directory = run(configuration(tmp_path, overrides)).run_directory
    (event,) = [line for line in read_lines(directory / "events.jsonl") if line["kind"] == "source_fallback"]
    assert event["level"] == "warning"
    assert f"read from its fallback {tmp_path}/text, because of {tmp_path}/missing" in event["message"]
    (attempt,) = json.loads((directory / "run.json").read_bytes())["attempts"]
    assert attempt["notes"]["sources"] == [event["message"]]


def test_a_run_does_not_go_on_with_other_text_than_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paths come back between two attempts, with other content: the plan was made for the fallback's."""
    use_numpy_engine(monkeypatch)
    first = tmp_path / "first.jsonl"
    overrides = [f"data.sources.0.paths=[{first}]", f"data.sources.0.fallback=[{tmp_path}/text]"]
    begun = run(configuration(tmp_path, [*overrides, "train.num_steps=4"])).run_directory
    first.write_text((tmp_path / "text" / "text.jsonl").read_text().replace("plan", "plant"))
    with pytest.raises(DataError) as caught:
        run(configuration(tmp_path, [*overrides, "train.num_steps=8"]), resume_from=begun)
    assert caught.value.hint
