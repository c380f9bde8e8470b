"""A record of a run that is lost, shortened or overwritten changes no answer of a query: it stays, or is refused."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
from vorox.cli import main
from vorox.core.errors import DataError, VoroxError
from vorox.data.provenance.queries import RunDataIndex, when, where
from vorox.records.executed_steps import executed_attempts
from vorox.records.run_context import recorded_config
from vorox.training.replay import compare_chains
from vorox.training.reports.training_record import training_record

STEPS, KILLED_IN, SPIKE = 24, 11, 20
RECORDS = ["attempts.bin", "chain.jsonl", "run.json", "plan.jsonl", "config.yaml", "evaluations.jsonl", "tokenizer"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in step 11, resumed from step 8, skipped step 20 and finished."""
    directory = tmp_path_factory.mktemp("lost")
    settings = [
        f"train.num_steps={STEPS}", "train.spike_policy=skip", "train.spike_window_steps=4",
        "data.validation.held_out_fraction=0", "eval.every_steps=null",
    ]  # fmt: skip
    config = tiny_runs.configuration(directory, settings)
    with pytest.MonkeyPatch.context() as patch:
        tiny_runs.use_numpy_engine(patch)
        tiny_runs.scale_steps(patch, {SPIKE: 3})
        with pytest.MonkeyPatch.context() as killing:
            tiny_runs.at_step(killing, KILLED_IN, tiny_runs.kill)
            with pytest.raises(tiny_runs.Killed):
                tiny_runs.run(config)
        return tiny_runs.run(config).run_directory


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / finished.name)
    return tmp_path / finished.name


def as_killed(run: Path, number: int) -> None:
    """What ``kill -9`` leaves of an attempt in run.json: no end."""
    record = json.loads((run / "run.json").read_text())
    for key in ("last_step", "saved_step"):
        del record["attempts"][number - 1]["notes"]["steps"][key]
    record["attempts"][number - 1]["outcome"] = "killed"
    (run / "run.json").write_text(json.dumps(record))


def answers(run: Path) -> dict[str, Any]:
    """What the queries say about every step of a run."""
    with RunDataIndex.open(run) as run_data:
        states = [where(run_data, step, 0)[0].state for step in range(1, run_data.num_steps + 1)]
        places = [
            (one.step, one.slot, one.state, one.attempt)
            for reader in run_data.readers
            for file in reader.files
            for one in when(run_data, file.uri)
        ]
        applied = run_data.applied_steps().tolist()
    return {"states": states, "places": places, "applied": applied}


def test_the_answers_about_a_whole_run(run: Path) -> None:
    """The oracle of this file: what happened to each step is known from how the run was made."""
    found = answers(run)
    assert found["applied"] == [step for step in range(1, STEPS + 1) if step != SPIKE]
    assert found["states"][:STEPS] == ["skipped" if step == SPIKE else "kept" for step in range(1, STEPS + 1)]
    assert set(found["states"][STEPS:]) <= {"beyond"}
    lost = {(step, attempt) for step, _, state, attempt in found["places"] if state == "rolled_back"}
    assert lost == {(9, 1), (10, 1)}


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def cut(keep: Callable[[int], int]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        for file in [path] if path.is_file() else path.glob("*"):
            raw = file.read_bytes()
            file.write_bytes(raw[: keep(len(raw))])

    return change


def drop_last_record(path: Path) -> None:
    for file in [path] if path.is_file() else path.glob("*"):
        raw = file.read_bytes()
        end = len(raw) - 64 if file.suffix == ".bin" else raw[:-1].rfind(b"\n") + 1
        file.write_bytes(raw[:end])


def drop_first_record(path: Path) -> None:
    for file in [path] if path.is_file() else path.glob("*"):
        raw = file.read_bytes()
        file.write_bytes(raw[64:] if file.suffix == ".bin" else raw[raw.find(b"\n") + 1 :])


def overwrite(path: Path) -> None:
    for file in [path] if path.is_file() else path.glob("*"):
        file.write_bytes(b"\x5a" * file.stat().st_size)


ATTACKS = {
    "removed": remove, "empty": cut(lambda _: 0), "half": cut(lambda size: size // 2),
    "torn": cut(lambda size: size - 3), "without its last record": drop_last_record,
    "without its first record": drop_first_record, "overwritten": overwrite,
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(finished: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return answers(finished), training_record(finished)


def ask(query: Callable[[Path], dict[str, Any]], run: Path) -> dict[str, Any] | None:
    """Return the answer; ``None`` if it is refused as it should be."""
    try:
        return query(run)
    except VoroxError as error:
        refused = error
    assert refused.exit_code in {2, 4}
    assert str(run) in refused.where
    assert refused.hint
    return None


QUICK = [("attempts.bin", "removed"), ("attempts.bin", "without its last record"), ("plan.jsonl", "torn")]
CASES = [
    pytest.param(name, attack, killed, marks=[] if (name, attack) in QUICK else pytest.mark.slow)
    for name in RECORDS
    for attack in ATTACKS
    for killed in ([False, True] if name == "attempts.bin" else [True])
]


@pytest.mark.parametrize(("name", "attack", "killed"), CASES)
def test_one_lost_record_changes_no_answer(
    expected: tuple[dict[str, Any], dict[str, Any]], run: Path, name: str, attack: str, killed: bool
) -> None:
    answered, record = expected
    if killed:
        as_killed(run, 1)
    ATTACKS[attack](run / name)
    assert ask(answers, run) in (answered, None)
    found = ask(training_record, run)
    if found is not None:
        assert found["steps"]["applied"] == record["steps"]["applied"]
        assert found["general"] == record["general"]


def test_a_plan_without_its_last_event_is_refused(run: Path) -> None:
    """The event of the skipped step: without it, the step would read as kept."""
    assert b"loss_spike" in (run / "plan.jsonl").read_bytes().splitlines()[-1]
    drop_last_record(run / "plan.jsonl")
    with pytest.raises(DataError, match=r"has \d+ of \d+ events"):
        answers(run)


@pytest.mark.parametrize("last_step", [3, 1 << 40, (1 << 64) - 1])
def test_changed_counters_are_refused(run: Path, last_step: int) -> None:
    raw = bytearray((run / "attempts.bin").read_bytes())
    struct.pack_into("<Q", raw, 64 + 40, last_step)
    (run / "attempts.bin").write_bytes(raw)
    with pytest.raises(DataError, match="attempt 2"):
        answers(run)


def test_steps_of_a_killed_attempt_cannot_be_recovered(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even from the chain, which is buffered: the four lines, exit code 4, also where a database is refreshed."""
    (run / "attempts.bin").unlink()
    assert [one.last_step for one in executed_attempts(run)] == [KILLED_IN - 1, STEPS], "both have ended by themselves"
    as_killed(run, 1)
    for words in (["data", "where", str(run), "--step", "3"], ["data", "sql", str(run), "--refresh", "select 1"]):
        capsys.readouterr()
        assert main(words) == 4
        printed = capsys.readouterr()
        assert printed.out == ""
        assert "attempts.bin is missing, and attempt 1 is in run.json alone" in printed.err
        assert "mirror" in printed.err


def test_a_run_that_never_trained_is_not_refused(run: Path) -> None:
    tiny_runs.forget_steps(run)
    with RunDataIndex.open(run) as run_data:
        assert where(run_data, 3, 0)[0].state == "planned"
        assert not len(run_data.applied_steps())


def test_a_resume_reports_lost_attempts_and_keeps_the_rest(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = (run / "attempts.bin").read_bytes()
    (run / "attempts.bin").write_bytes(b"\x5a" * 64 + raw[64:])  # the first attempt's
    as_killed(run, 1)
    resume(run, monkeypatch)
    events = tiny_runs.events(run, "attempts_lost")
    assert len(events) == 1
    assert "attempt 1" in events[0]
    assert (run / "attempts.bin").read_bytes()[64:128] == raw[64:], "the intact record of the second attempt stays"
    with pytest.raises(DataError, match="attempt 1"):
        answers(run)


def test_a_resume_reports_a_missing_run_json(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "run.json").unlink()
    resume(run, monkeypatch)
    assert len(tiny_runs.events(run, "record_lost")) == 1


def resume(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    tiny_runs.run(recorded_config(run, [f"train.num_steps={STEPS + 4}"]), resume_from=run)


# Comparison of chains


@pytest.mark.parametrize(
    ("lines", "words", "num_equal"),
    [
        (slice(4, 6), "steps 5 to 6 are not recorded", STEPS - 2),
        (slice(STEPS - 4, None), f"steps {STEPS - 3} to {STEPS} are not recorded", STEPS - 4),
        (slice(0, None), f"steps 1 to {STEPS} are not recorded", None),
    ],
)
def test_a_comparison_names_what_a_chain_lacks(
    finished: Path, run: Path, lines: slice, words: str, num_equal: int | None
) -> None:
    kept = (run / "chain.jsonl").read_text().splitlines(keepends=True)
    by_step = {json.loads(line)["step"]: line for line in kept if "resume_step" not in line}
    ordered = [by_step[step] for step in sorted(by_step)]
    del ordered[lines]
    (run / "chain.jsonl").write_text("".join(ordered))
    for first, second, missing in ((finished, run, ["", words]), (run, finished, [words, ""])):
        found = compare_chains(first, second)
        assert found["missing"] == missing
        assert found["num_equal_steps"] == num_equal
        assert words in found["verdict"]
    assert compare_chains(finished, finished)["missing"] == ["", ""]
