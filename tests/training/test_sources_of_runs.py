"""What a run keeps of its sources: a fallback that was read is in its events and in its record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiny_runs import at_step, configuration, run, use_numpy_engine
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


@pytest.mark.parametrize("names_the_run", [True, False])
def test_text_that_changed_ends_a_resume_with_the_two_ways_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names_the_run: bool
) -> None:
    use_numpy_engine(monkeypatch)

    def stop() -> None:
        raise KeyboardInterrupt

    at_step(monkeypatch, 6, stop)
    config = configuration(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    (begun,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir() and not path.is_symlink())
    again = {"resume_from": begun if names_the_run else "auto"}
    text = tmp_path / "text" / "text.jsonl"
    original = text.read_text()
    text.write_text(original + '{"text": "a new line"}\n')
    for _ in range(2):  # the first refusal leaves everything as it was
        with pytest.raises(DataError) as caught:
            run(config, **again)
        assert caught.value.saved == "training state up to step 4 is safe in step-00000004"
        assert caught.value.exit_code == 4
        assert "--resume never" in (caught.value.hint or "")
        assert "restore the files" in (caught.value.hint or "")
    text.write_text(original)
    outcome = run(config, **again)
    assert (outcome.run_directory, outcome.progress.step) == (begun, 12)
