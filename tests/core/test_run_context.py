"""Run directories: one configuration, one directory; one process at a time; every attempt on record."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
from vorox.core.config import config_digest, load_config
from vorox.core.errors import CheckpointError, ConfigError, DataError, Preempted, VoroxError
from vorox.core.files import atomic
from vorox.core.files.atomic import FileOperation
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.records.run_context import RunContext, recorded_config, run_id
from vorox.records.run_lookup import (
    CONFIG_NOTE,
    RUN_FORMAT,
    find_run,
    is_config_as_written,
    run_attempts,
    run_directories,
)

OVERRIDES = ["data.sources=[{name: a, format: txt, paths: [a.txt]}]", "train.num_steps=10"]


def make_config(root: Path, *overrides: str) -> RunConfig:
    return load_config(None, [*OVERRIDES, f"run.directory={root / 'runs'}", *overrides])


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(tmp_path)
    return make_config(tmp_path)


def record_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "run.json").read_text())


# Ids


def test_the_id_is_readable_and_depends_on_what_changes_bits_only(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    assert run_id(config) == f"llama-6x384-a-{config_digest(config)[:8]}"
    assert run_id(make_config(tmp_path, "log.every_steps=3")) == run_id(config)
    assert run_id(make_config(tmp_path, "run.seed=3")) != run_id(config)
    named = make_config(tmp_path, "run.name='My run / nr. 1'")
    assert run_id(named) == f"My-run-nr.-1-{config_digest(config)[:8]}"
    assert run_id(make_config(tmp_path, "run.name=../../x")).startswith("x-")


# One directory, one record


@pytest.mark.parametrize(
    ("written", "expected"),
    [(["old", "new", None], True), (["new", "old", None], False), (["new", None], True), ([None], None)],
)
def test_the_newest_attempt_that_wrote_the_configuration_tells_whether_it_was_edited(
    tmp_path: Path, written: list[str | None], expected: bool | None
) -> None:
    attempts = [
        {"notes": {} if text is None else {CONFIG_NOTE: hashlib.sha256(text.encode()).hexdigest()}} for text in written
    ]
    (tmp_path / "run.json").write_text(json.dumps({"format": RUN_FORMAT, "attempts": attempts}))
    (tmp_path / "config.yaml").write_text("new")
    assert is_config_as_written(tmp_path) is expected


def test_a_new_run_has_configuration_record_and_lock(config: RunConfig) -> None:
    with RunContext.open_or_create(config, argv=["vorox", "train", "x"]) as run:
        assert run.directory == Path(config.run.directory) / run_id(config)
        assert (run.attempt, run.run_id) == (1, run_id(config))
        assert run.layout.control.is_dir()
        assert recorded_config(run.directory) == config
        record = record_of(run.directory)
        assert record["run_id"] == run.run_id
        assert record["config_digest"] == config_digest(config)
        attempt = record["attempts"][0]
        assert (attempt["outcome"], attempt["ended_at"], attempt["pid"]) == ("running", None, os.getpid())
        assert attempt["argv"] == ["vorox", "train", "x"]
        assert attempt["environment"]["python"]["version"] == sys.version.split()[0]
        assert attempt["working_directory"] == str(Path.cwd())
    assert record_of(run.directory)["attempts"][0]["outcome"] == "finished"
    assert record_of(run.directory)["attempts"][0]["ended_at"]
    assert {path.name for path in run.directory.iterdir()} == {"config.yaml", "run.json", "LOCK", "control"}


def test_the_same_configuration_finds_its_run_again(config: RunConfig, tmp_path: Path) -> None:
    with RunContext.open_or_create(config) as first:
        pass
    with RunContext.open_or_create(make_config(tmp_path, "eval.every_steps=5")) as second:
        assert second.attempt == 2
        assert second.directory == first.directory
    with RunContext.open_or_create(make_config(tmp_path, "optimizer.lr=1")) as other:
        assert other.directory != first.directory
    assert len(run_attempts(first.directory)) == 2


def test_a_fresh_run_gets_a_number_and_is_the_one_that_is_resumed(config: RunConfig) -> None:
    names = []
    for _ in range(3):
        with RunContext.create(config) as run:
            names.append(run.run_id)
    base = run_id(config)
    assert names == [base, f"{base}-2", f"{base}-3"]
    with RunContext.open_or_create(config) as run:
        assert run.run_id == f"{base}-3"
    assert [path.name for path in run_directories(Path(config.run.directory))] == sorted(names)


def test_opening_with_another_configuration_records_it_only_when_asked(config: RunConfig, tmp_path: Path) -> None:
    with RunContext.open_or_create(config) as run:
        pass
    longer = make_config(tmp_path, "train.num_steps=20")
    with RunContext.open(run.directory, longer) as second:
        assert recorded_config(run.directory).train.num_steps == 10
        second.record_config()
    assert recorded_config(run.directory) == longer
    assert record_of(run.directory)["config_digest"] == config_digest(config)
    assert record_of(run.directory)["attempts"][1]["config_digest"] == config_digest(longer)
    with RunContext.open(run.directory) as third:
        assert third.config == longer


def test_recorded_config_takes_overrides(config: RunConfig) -> None:
    with RunContext.open_or_create(config) as run:
        pass
    assert recorded_config(run.directory, ["train.num_steps=30"]).train.num_steps == 30
    with pytest.raises(ConfigError) as lost:
        recorded_config(run.directory / "missing")
    assert f"vorox train CONFIG --resume runs/{run.directory.name}/missing" in lost.value.hint


def test_notes_are_kept_and_redacted(config: RunConfig) -> None:
    with RunContext.create(config, argv=["vorox", "x=postgresql://alice:CANARY@db/x", "--password", "CANARY"]) as run:
        run.note(determinism="bitwise", device={"name": "cpu"})
        run.note(dsn="postgresql://alice:CANARY@db/x")
    text = (run.directory / "run.json").read_text()
    assert "CANARY" not in text
    notes = json.loads(text)["attempts"][0]["notes"]
    assert notes["determinism"] == "bitwise"
    assert notes["device"] == {"name": "cpu"}


def test_hashes_survive_redaction(config: RunConfig) -> None:
    with RunContext.create(config) as run:
        pass
    assert "[redacted]" not in (run.directory / "run.json").read_text()


# How attempts end


def outcome(run: RunContext) -> str:
    return record_of(run.directory)["attempts"][-1]["outcome"]


def test_a_failure_is_written_with_its_four_lines(config: RunConfig) -> None:
    error = CheckpointError("the file is torn", where="step-10", hint="vorox checkpoints list", saved="step 5")
    with pytest.raises(CheckpointError), RunContext.create(config) as run:
        raise error
    failure = json.loads(run.layout.failure.read_text())
    assert {key: failure[key] for key in ("what", "where", "hint", "saved", "exit_code", "error", "attempt")} == {
        "what": "the file is torn",
        "where": "step-10",
        "hint": "vorox checkpoints list",
        "saved": "step 5",
        "exit_code": 5,
        "error": "CheckpointError",
        "attempt": 1,
    }
    assert outcome(run) == "failed"


def test_a_crash_keeps_its_traceback_without_secrets(config: RunConfig) -> None:
    with pytest.raises(ZeroDivisionError), RunContext.create(config) as run:
        raise ZeroDivisionError("postgresql://alice:CANARY@db")
    failure = json.loads(run.layout.failure.read_text())
    assert failure["exit_code"] == 1
    assert failure["what"].startswith("ZeroDivisionError: ")
    assert "test_run_context.py" in failure["traceback"]
    assert "CANARY" not in run.layout.failure.read_text()


@pytest.mark.parametrize(("error", "expected"), [(Preempted("saved"), "stopped"), (KeyboardInterrupt(), "interrupted")])
def test_being_stopped_is_no_failure(config: RunConfig, error: BaseException, expected: str) -> None:
    with pytest.raises(type(error)), RunContext.create(config) as run:
        raise error
    assert outcome(run) == expected
    assert not run.layout.failure.exists()


def test_a_resumed_run_keeps_the_failure_on_record_only(config: RunConfig) -> None:
    with pytest.raises(CheckpointError), RunContext.create(config):
        raise CheckpointError("torn")
    with RunContext.open_or_create(config) as run:
        run.begin()
        assert not run.layout.failure.exists()
    attempts = run_attempts(run.directory)
    assert [attempt["outcome"] for attempt in attempts] == ["failed", "finished"]
    assert attempts[0]["failure"]["what"] == "torn"


def contents(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Every file of a run but its lock, with the time of its last change."""
    found = (path for path in directory.rglob("*") if path.is_file() and path.name != "LOCK")
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def test_a_refused_attempt_leaves_no_trace(config: RunConfig) -> None:
    with pytest.raises(CheckpointError), RunContext.create(config) as first:
        raise CheckpointError("torn")
    first.layout.control.rmdir()
    before, done = contents(first.directory), list[str]()

    def refuse() -> None:
        with RunContext.open(first.directory) as run:
            run.note(device="cpu")
            run.at_begin(lambda: done.append("never"))
            raise ConfigError("not this one")

    with pytest.raises(ConfigError, match="not this one"):
        refuse()
    assert contents(first.directory) == before
    assert not first.layout.control.exists()
    assert done == []
    with RunContext.open(first.directory) as run:  # the lock is free
        assert run.attempt == 2


@pytest.mark.parametrize(("error", "begins"), [(DataError("gone"), False), (ConfigError("late"), True)])
def test_an_attempt_that_fails_is_recorded_whether_or_not_it_had_begun(
    config: RunConfig, error: VoroxError, begins: bool
) -> None:
    RunContext.create(config).close("finished")

    def fail() -> None:
        with RunContext.open_or_create(config) as run:
            run.note(device="cpu")
            if begins:
                run.begin()
            raise error

    with pytest.raises(type(error)):
        fail()
    directory = Path(config.run.directory) / run_id(config)
    first, second = run_attempts(directory)
    assert (first["outcome"], second["outcome"], second["notes"]) == ("finished", "failed", {"device": "cpu"})
    assert json.loads((directory / "failure.json").read_text())["what"] == error.what


def test_closing_early_decides_the_outcome(config: RunConfig) -> None:
    with RunContext.create(config) as run:
        run.close("stopped")
        RunContext.open(run.directory).close("finished")  # the lock is free
    assert [attempt["outcome"] for attempt in run_attempts(run.directory)] == ["stopped", "finished"]


def test_a_full_disk_does_not_hide_the_error(config: RunConfig) -> None:
    def full(_: FileOperation) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = RunContext.create(config)
    with atomic.observe(full), pytest.raises(CheckpointError, match="torn"), run:
        raise CheckpointError("torn")
    RunContext.open(run.directory).close("finished")


# One process at a time

HOLDER = """
import sys
from vorox.core.config import load_config
from vorox.records.run_context import RunContext
run = RunContext.open_or_create(load_config(None, sys.argv[1:]))
print(run.run_id, flush=True)
sys.stdin.readline()
"""


@contextmanager
def live_run(config: RunConfig) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, *OVERRIDES, f"run.directory={config.run.directory}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == run_id(config)
        try:
            yield process
        finally:
            process.kill()


def test_a_run_in_use_is_refused_with_pid_and_host(config: RunConfig) -> None:
    directory = Path(config.run.directory) / run_id(config)
    with live_run(config) as process:
        before = (directory / "run.json").read_bytes()
        for enter in (lambda: RunContext.open_or_create(config), lambda: RunContext.open(directory)):
            with pytest.raises(ConfigError) as caught:
                enter()
            assert caught.value.exit_code == 2
            assert f"in use by process {process.pid} on " in caught.value.what
        assert (directory / "run.json").read_bytes() == before


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_a_killed_process_leaves_no_stale_lock(config: RunConfig) -> None:
    with live_run(config) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        with RunContext.open_or_create(config) as run:
            assert run.attempt == 2
    assert [attempt["outcome"] for attempt in run_attempts(run.directory)] == ["killed", "finished"]


def test_every_crash_while_opening_leaves_a_run_that_opens(config: RunConfig, tmp_path: Path) -> None:
    class Crash(BaseException):
        pass

    def crash_after(count: int) -> Any:
        left = [count]

        def observer(_: FileOperation) -> None:
            if left[0] == 0:
                raise Crash
            left[0] -= 1

        return observer

    for resumed in (False, True):
        count = 0
        while True:
            own = make_config(tmp_path / f"{resumed}-{count}")
            if resumed:
                RunContext.create(own).close("finished")
            opened: list[RunContext] = []
            try:
                with atomic.observe(crash_after(count)):
                    run = RunContext.open_or_create(own)
                    opened.append(run)
                    run.begin()
            except Crash:
                for dead in opened:  # its lock ends with it
                    with atomic.observe(crash_after(0)), pytest.raises(Crash):
                        dead.close("finished")
                run = RunContext.open_or_create(own)
                run.close("finished")
                assert run.run_id == run_id(own)
                assert recorded_config(run.directory) == own
                count += 1
            else:
                run.close("finished")
                break
        assert count > 3


# Refusals


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = make_config(tmp_path / "file")
    with pytest.raises(ConfigError) as caught:
        RunContext.open_or_create(config)
    assert caught.value.exit_code == 2
    assert str(tmp_path / "file") in caught.value.where


def test_no_permission_is_named(config: RunConfig) -> None:
    def refuse(operation: FileOperation) -> None:
        if operation.kind == "mkdir":
            raise PermissionError(errno.EACCES, "Permission denied", str(operation.path))

    with atomic.observe(refuse), pytest.raises(ConfigError, match="cannot be written: Permission denied") as caught:
        RunContext.open_or_create(config)
    assert config.run.directory in caught.value.where
    assert "run.directory" in caught.value.hint


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="permissions do not hold for root")
def test_no_permission_for_real(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="cannot be written"):
        RunContext.open_or_create(config)


def test_a_failed_opening_releases_the_lock(config: RunConfig) -> None:
    RunContext.create(config).close("finished")
    directory = Path(config.run.directory) / run_id(config)
    (directory / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="Record of the run is damaged"):
        RunContext.open(directory)
    (directory / "run.json").unlink()
    RunContext.open(directory).close("finished")


def test_there_must_be_a_run_to_open(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Run directory does not exist"):
        RunContext.open(tmp_path / "missing")


def test_other_processes_of_a_run_neither_lock_nor_write(config: RunConfig) -> None:
    second = DistributedContext(rank=1, world_size=2)
    with RunContext.open_or_create(config) as main:
        before = {path: path.stat().st_mtime_ns for path in main.directory.rglob("*")}

        def fail() -> None:
            with RunContext.open_or_create(config, distributed=second) as run:
                assert run.directory == main.directory
                run.note(x=1)
                run.record_config()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert {path: path.stat().st_mtime_ns for path in main.directory.rglob("*")} == before


# Finding runs


def runs_named(root: Path, *names: str) -> None:
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        attempts = [{"started_at": f"2030-01-0{number + 1}T00:00:00.000Z"}]
        (root / name / "run.json").write_text(json.dumps({"attempts": attempts}))


def test_runs_are_found_by_id_beginning_hash_path_and_latest(tmp_path: Path) -> None:
    runs_named(tmp_path, "quick-llama-6x384-0a1b2c3d", "demo-gpt2-11112222", "demo-gpt2-11112222-2", "alpha-99998888")
    (tmp_path / "notes").mkdir()

    def name(wanted: str) -> str:
        return find_run(tmp_path, wanted).name

    assert name("demo-gpt2-11112222") == "demo-gpt2-11112222"
    assert name("quick") == name("0a1b2c3d") == "quick-llama-6x384-0a1b2c3d"
    assert name("latest") == "alpha-99998888"
    assert find_run("elsewhere", str(tmp_path / "alpha-99998888")) == tmp_path / "alpha-99998888"
    with pytest.raises(ConfigError, match="it matches 2 runs, demo-gpt2-11112222, demo-gpt2-11112222-2"):
        name("demo")
    with pytest.raises(ConfigError, match="did you mean alpha-99998888"):
        name("alpha-99998880")
    with pytest.raises(ConfigError, match="the latest run is alpha"):
        name("zzz")
    with pytest.raises(ConfigError):
        name("")
    with pytest.raises(ConfigError):
        name("notes")


def test_an_exact_name_wins_and_a_part_of_one_removes_nothing(tmp_path: Path) -> None:
    runs_named(tmp_path, "exp1-0a1b2c3d", "exp10-11112222", "exp10-11112222-2", "big-exp1-99998888", "moved")
    for wanted, found in {
        "exp1": "exp1-0a1b2c3d", "exp10-11112222": "exp10-11112222", "moved": "moved", "big exp1": "big-exp1-99998888",
    }.items():  # fmt: skip
        for exact in (False, True):
            assert find_run(tmp_path, wanted, exact=exact).name == found
    for other in ("exp1-", "exp1 ", "-exp1", "exp1."):  # what a shell completes, or a slip
        with pytest.raises(ConfigError):
            find_run(tmp_path, other, exact=True)
    for part in ("mov", "big", "99998888", "exp1-0a"):
        assert find_run(tmp_path, part) in list(tmp_path.iterdir())
        with pytest.raises(ConfigError, match=f"No run is named {part}; it is only a part of"):
            find_run(tmp_path, part, exact=True)
    for exact in (False, True):
        with pytest.raises(ConfigError, match="exp10 is ambiguous: it matches 2 runs, exp10-1"):
            find_run(tmp_path, "exp10", exact=exact)
        with pytest.raises(ConfigError, match="not found"):
            find_run(tmp_path, "1", exact=exact)
        with pytest.raises(ConfigError, match="not found") as caught:
            find_run(tmp_path, "*exp10*", exact=exact)
        assert caught.value.hint == "no pattern is expanded; write the ids: exp10-11112222 exp10-11112222-2"
    with pytest.raises(ConfigError, match="ex is ambiguous: it matches 3 runs"):
        find_run(tmp_path, "ex")
    with pytest.raises(ConfigError, match=r"No run is named ex; it is only a part of exp1-0a1b2c3d, exp10-1") as caught:
        find_run(tmp_path, "ex", exact=True)
    assert caught.value.hint == "write the whole id of the one that you mean"
    assert find_run(tmp_path, "latest", exact=True) == find_run(tmp_path, "latest")


def test_latest_is_the_one_begun_last_not_the_one_touched_last(tmp_path: Path) -> None:
    runs_named(tmp_path, "b-1", "a-2")
    os.utime(tmp_path / "b-1" / "run.json")
    assert find_run(tmp_path, "latest").name == "a-2"


def test_no_runs_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains no runs"):
        find_run(tmp_path / "runs", "latest")
    assert run_directories(tmp_path / "runs") == []


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"model: {num_lay"], ids=["empty", "zeros", "cut"])
def test_a_damaged_configuration_is_restored_by_the_command_of_the_error(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    monkeypatch.chdir(tmp_path)
    run = tiny_runs.run(tiny_runs.configuration(tmp_path)).run_directory
    before = recorded_config(run)
    (run / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.yaml of the run is (empty|damaged)") as caught:
        recorded_config(run, ["train.num_steps=24"])
    assert "step 12 is safe in step-00000012" in caught.value.saved
    command = shlex.split(caught.value.hint.split("checkpoint: ")[1].split("; then run")[0])
    assert command[:2] == ["python", "-c"]
    subprocess.run([sys.executable, *command[1:]], check=True)
    assert recorded_config(run) == before
    assert recorded_config(run, ["train.num_steps=24"]).train.num_steps == 24
