"""What a run keeps of its sources: a fallback that was read is in its events and in its record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiny_runs import at_step, configuration, events, result, run, use_numpy_engine
from vorox.core.files.json_lines import read_lines


def test_a_run_records_that_it_read_its_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    overrides = [f"data.sources.0.paths=[{tmp_path}/missing]", f"data.sources.0.fallback=[{tmp_path}/text]"]
    directory = run(configuration(tmp_path, overrides)).run_directory
    (event,) = [line for line in read_lines(directory / "events.jsonl") if line["kind"] == "source_fallback"]
    assert event["level"] == "warning"
    assert f"read from its fallback {tmp_path}/text, because of {tmp_path}/missing" in event["message"]
    (attempt,) = json.loads((directory / "run.json").read_bytes())["attempts"]
    assert attempt["notes"]["sources"] == [event["message"]]


def test_a_run_keeps_the_text_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paths come back between two attempts, with other content: the run has its view of the fallback's."""
    use_numpy_engine(monkeypatch)
    first = tmp_path / "first.jsonl"
    overrides = [f"data.sources.0.paths=[{first}]", f"data.sources.0.fallback=[{tmp_path}/text]"]
    begun = run(configuration(tmp_path, [*overrides, "train.num_steps=4"])).run_directory
    first.write_text((tmp_path / "text" / "text.jsonl").read_text().replace("plan", "plant"))
    run(configuration(tmp_path, [*overrides, "train.num_steps=8"]), resume_from=begun)
    first_attempt, second = json.loads((begun / "run.json").read_bytes())["attempts"]
    assert second["outcome"] == "finished"
    assert second["notes"]["caches"] == first_attempt["notes"]["caches"]


@pytest.mark.parametrize("names_the_run", [True, False])
def test_a_resume_keeps_its_text_and_names_the_file_that_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names_the_run: bool
) -> None:
    use_numpy_engine(monkeypatch)
    straight = run(configuration(tmp_path / "straight"))

    def stop() -> None:
        raise KeyboardInterrupt

    at_step(monkeypatch, 6, stop)
    config = configuration(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    (begun,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir() and not path.is_symlink())
    text = tmp_path / "text" / "text.jsonl"
    text.write_text(text.read_text() + '{"text": "a new line"}\n')
    outcome = run(config, resume_from=begun if names_the_run else "auto")
    assert (outcome.run_directory, outcome.progress.step) == (begun, 12)
    (said,) = events(begun, "source_changed_files")
    assert f"1 file of source 'text' is other than the run has read: {text}" in said
    assert result(outcome) == result(straight)
