"""Runs listed, compared and removed: which one is ``latest``, what a refused one leaves, what fits a terminal."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tiny_runs
from vorox import load_model
from vorox.cli import main
from vorox.core.config import load_config
from vorox.core.errors import ConfigError, DataError, DoesNotFitError
from vorox.core.files.staged_directory import StagedDirectory
from vorox.core.run_layout import RUN_FILES, RunLayout
from vorox.records.run_context import RunContext
from vorox.records.run_lookup import find_run, run_argument, run_directories
from vorox.training.checkpoints.store import quarantine

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def vorox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VOROX_CACHE", str(tmp_path / "cache"))

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(words))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def make_run(name: str, *, step: int | None, error: Exception | None = None) -> Path:
    """A run as it lies on disk after it ended, with a checkpoint or without one."""
    config = load_config("quickstart", [f"run.name={name}"])
    try:
        with RunContext.create(config, argv=["vorox", "train", "quickstart"]) as run:
            if step is not None:
                with StagedDirectory(run.layout.checkpoints / f"step-{step:08d}") as staged:
                    staged.write("state.json", b"{}")
                    staged.commit({"step": step})
            if error is not None:
                raise error
    except type(error or OSError()):
        pass
    return run.directory


def test_latest_is_the_last_run_with_a_checkpoint(vorox: Run) -> None:
    first = make_run("first", step=None)
    assert find_run(Path("runs").absolute(), "latest") == first, "as long as no run has one"
    saved = make_run("saved", step=10)
    make_run("later", step=None, error=ConfigError("no such device"))
    aside = make_run("damaged", step=20)
    (aside / "checkpoints" / "step-00000020").rename(aside / "checkpoints" / "step-00000020.corrupt-1")
    assert find_run(Path("runs").absolute(), "latest") == saved
    assert saved.name in vorox("runs", "show", "nothing-like-it")[2]


def test_several_runs_are_removed_at_once_and_all_names_are_looked_at_first(vorox: Run) -> None:
    one, two, three = (make_run(name, step=5) for name in ("one", "two", "three"))
    code, _, err = vorox("runs", "remove", one.name, "nobody", "--yes")
    assert code == 2
    assert "nobody" in err
    assert one.exists()
    (two / "thesis.tex").touch()
    code, out, err = vorox("runs", "remove", one.name, two.name, three.name, "--yes")
    assert code == 2
    assert f"already removed: {one.name}" in err
    assert "thesis.tex" in err
    assert [one.exists(), two.exists(), three.exists()] == [False, True, True]
    (two / "thesis.tex").unlink()
    code, out, _ = vorox("runs", "remove", two.name, three.name, three.name, "--yes")
    assert (code, out.count("Removed")) == (0, 2)
    assert run_directories(Path("runs")) == []


def test_failed_collects_what_has_no_checkpoint_and_nothing_else(vorox: Run) -> None:
    kept = [make_run("saved", step=5), make_run("torn", step=5, error=DataError("gone")), make_run("whole", step=None)]
    failed = [make_run(f"failed{index}", step=None, error=DataError("gone")) for index in range(2)]
    kept.append(make_run("aside", step=5, error=DataError("gone")))
    (kept[-1] / "checkpoints" / "step-00000005").rename(kept[-1] / "checkpoints" / "step-00000005.corrupt-1")
    with RunContext.create(load_config("quickstart", ["run.name=running"])) as running:
        assert vorox("runs", "remove", "--failed")[0] == 2, "nobody can be asked"
        assert all(path.exists() for path in failed)
        assert vorox("runs", "remove", "--failed", "--yes")[0] == 0
        assert not any(path.exists() for path in failed)
        assert set(run_directories(Path("runs").absolute())) == {*kept, running.directory}
        code, out, _ = vorox("runs", "remove", "--failed", "--yes")
        assert code == 0
        assert "ended without a checkpoint" in out
        code, _, err = vorox("runs", "remove", running.run_id, "--yes")
        assert code == 2
        assert "in use" in err


def test_remove_wants_a_name(vorox: Run) -> None:
    code, _, err = vorox("runs", "remove", "--yes")
    assert code == 2
    assert "--failed" in err


def test_every_kind_of_file_is_removed_and_the_mirrored_ones_are_found(vorox: Run) -> None:
    """One table says both; W&B, TensorBoard, shards of other processes and what a dead writer left are in it."""
    directory = make_run("all", step=5)
    written = (
        "wandb/run-1/files/x", "tensorboard/events.out", "configs/step-00000005.yaml", "events-00001.jsonl",
        "log-00001.txt", "metadata.sqlite-wal", "tokenizer/tokenizer.json", "export/hf/config.json",
        "attempts.bin", "chain.jsonl", ".tmp-host-1-0123abcd-x/y",
    )  # fmt: skip
    for name in written:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()
    mirrored = {path.relative_to(directory).as_posix() for path in RunLayout(directory).mirrored_files()}
    assert mirrored == {
        "attempts.bin", "chain.jsonl", "config.yaml", "configs/step-00000005.yaml", "events-00001.jsonl",
        "log-00001.txt", "run.json", "tokenizer/tokenizer.json",
    }  # fmt: skip
    assert len({known.name for known in RUN_FILES}) == len(RUN_FILES)
    assert vorox("runs", "remove", "all", "--yes")[0] == 0
    assert not directory.exists()


# Commands that messages print


def printed_commands(text: str) -> list[list[str]]:
    return [shlex.split(command) for command in re.findall(r"vorox ((?:train|runs|checkpoints) [^`();\n]*)", text)]


def test_printed_commands_work_for_a_run_in_any_folder(
    vorox: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    config = tiny_runs.configuration(tmp_path, ["run.directory=else where", "checkpoint.keep_last=9"])
    directory = tiny_runs.run(config).run_directory
    path = f"else where/{directory.name}"
    tried: list[str] = []

    def follow(text: str) -> None:
        commands = printed_commands(text.replace("CONFIG", "tiny.yaml train.num_steps=24"))
        assert commands, text
        for words in commands:
            code, _, err = vorox(*words)
            assert code == 0, (words, err)
            tried.append(" ".join(words[:2]))

    follow(vorox("runs", "show", path)[1])
    follow(vorox("checkpoints", "verify", path, "--step", "99")[2])
    follow(vorox("checkpoints", "save", path)[2])
    with pytest.raises(ConfigError) as refused:
        load_model(path, step=99)
    follow(refused.value.hint)
    follow(vorox("train", "--resume", path, "train.num_steps=2")[2])
    written = (directory / "config.yaml").read_text()
    (directory / "config.yaml").write_text(written.replace("lr: 0.01", "lr: 0.03"))
    follow(vorox("train", "--resume", path)[2])
    (directory / "config.yaml").unlink()
    follow(vorox("train", "--resume", path)[2])
    for checkpoint in (directory / "checkpoints").iterdir():
        quarantine(checkpoint, "corrupt", "of the test")
    follow(vorox("generate", path)[2])
    assert len(tried) >= 10
    assert set(tried) == {"train --resume", "train tiny.yaml", "checkpoints verify", "checkpoints list"}


def test_a_run_is_named_by_the_shortest_argument_that_finds_it(vorox: Run, tmp_path: Path) -> None:
    run = make_run("one", step=5)
    shadow, away = Path(run.name), tmp_path.parent / f"{tmp_path.name} away" / "run"
    assert run_argument(run) == run_argument(Path("runs") / run.name) == run.name
    shutil.copytree(run, shadow)
    shutil.copytree(run, away)
    for directory in (run, shadow, away):
        (word,) = shlex.split(run_argument(directory))
        assert find_run("runs", word).samefile(directory)


def test_verify_fails_when_every_checkpoint_is_quarantined(vorox: Run) -> None:
    run = make_run("one", step=5)
    assert vorox("checkpoints", "verify", run.name)[0] == 0
    quarantine(run / "checkpoints" / "step-00000005", "corrupt", "of the test")
    for words in ((), ("--step", "5")):
        code, _, err = vorox("checkpoints", "verify", run.name, *words)
        assert (code, "all are quarantined" in err) == (5, True)
    assert vorox("checkpoints", "verify", run.name, "--restore")[0] == 0


def test_a_checkpoint_that_does_not_exist_is_refused_before_anybody_is_asked(vorox: Run) -> None:
    run = make_run("one", step=5)
    code, _, err = vorox("checkpoints", "remove", run.name, "77")
    assert (code, "Checkpoint 77 does not exist" in err, "terminal" in err) == (2, True, False)
    code, _, err = vorox("checkpoints", "remove", run.name, "5")
    assert (code, "Remove step-00000005 of" in err) == (2, True)


def test_show_lists_checkpoints_by_step(vorox: Run) -> None:
    run = make_run("one", step=5)
    lines = vorox("runs", "show", run.name)[1].splitlines()
    at = lines.index("checkpoints")
    assert lines[at + 1 :] == ["  steps      5", f"  verify     vorox checkpoints verify {run.name}"]


def test_show_states_how_attempts_ended(vorox: Run) -> None:
    """A killed process records no end: its attempt neither runs nor lasts until now."""
    run = make_run("one", step=5)
    record = json.loads((run / "run.json").read_text())
    (attempt,) = record["attempts"]
    record["attempts"] = [attempt | {"ended_at": None, "outcome": "running"}]
    (run / "run.json").write_text(json.dumps(record))
    (line,) = (line for line in vorox("runs", "show", run.name)[1].splitlines() if line.startswith("  1. "))
    assert " to an unknown time: killed, " in line


def test_a_checkpoint_is_not_a_run(vorox: Run) -> None:
    run = make_run("one", step=5)
    code, _, err = vorox("runs", "show", str(run / "checkpoints" / "step-00000005"))
    assert (code, f"name its run: {run.name}" in err) == (2, True)


# What a run that is refused before its first step leaves


class RefusingBackend(tiny_runs.NumpyBackend):
    def __init__(self, error: BaseException) -> None:
        self._error = error

    def create(self, *_: object) -> tiny_runs.NumpyEngine:
        raise self._error


@pytest.mark.parametrize("error", [ConfigError("no device"), DoesNotFitError("too large"), KeyboardInterrupt()])
def test_a_run_that_the_engine_refuses_leaves_nothing(
    vorox: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    tiny_runs.configuration(tmp_path)
    monkeypatch.setattr("vorox.run.backends.load", lambda name: RefusingBackend(error))
    code = vorox("train", "tiny.yaml")[0]
    assert code == getattr(error, "exit_code", 130)
    assert list(Path("runs").iterdir()) == []


def test_a_run_without_data_leaves_nothing(vorox: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.configuration(tmp_path)
    tiny_runs.use_numpy_engine(monkeypatch)
    assert vorox("train", "tiny.yaml", "data.sources.0.paths=[missing/]")[0] == 4
    assert list(Path("runs").iterdir()) == []
    assert vorox("train", "tiny.yaml", "train.num_steps=2", "schedule.warmup_steps=0")[0] == 0
    (directory,) = run_directories(Path("runs"))
    before = sorted(path.name for path in directory.iterdir())
    tiny_runs.at_step(monkeypatch, 3, lambda: (_ for _ in ()).throw(DataError("gone")))
    words = ("train", "--resume", directory.name, "train.num_steps=4")
    assert vorox(*words)[0] == 4
    assert sorted({path.name for path in directory.iterdir()} - {"configs"}) == sorted([*before, "failure.json"])


# What fits a terminal


class Terminal:
    """Standard output that says that it is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as monkeypatch:
        tiny_runs.use_numpy_engine(monkeypatch)
        for rate in (0.01, 0.02):
            name = f"a-rather-long-name-of-a-run-that-somebody-chose-{rate}"
            tiny_runs.run(tiny_runs.configuration(directory, [f"optimizer.lr={rate}", f"run.name={name}"]))
    return directory


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_nothing_wraps_on_a_terminal(two_runs: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.chdir(two_runs)
    monkeypatch.setenv("COLUMNS", str(columns))
    first, second = (path.name for path in run_directories(Path("runs")))
    screens = [
        ("runs", "list"), ("runs", "show", first), ("runs", "compare", first, second), ("checkpoints", "list", first),
        ("checkpoints", "verify", first),
    ]  # fmt: skip
    for words in screens:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        assert main(list(words)) == 0
        long = [line for line in terminal.text.splitlines() if len(line) > columns]
        assert not [line for line in long if first not in line], "only a name in one piece may be wider"
        assert "\x1b[" not in terminal.text
    assert os.environ["COLUMNS"] == str(columns)


def test_compare_shows_what_people_compare(two_runs: Path, vorox: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(two_runs)
    first, second = (path.name for path in run_directories(Path("runs")))
    _, common, _ = vorox("runs", "compare", first, second)
    _, every, _ = vorox("runs", "compare", first, second, "--all")
    table = common.split("METRIC")[1].splitlines()
    assert {"loss", "eval/loss", "grad_norm", "tokens_per_second"} <= {line.split()[0] for line in table[1:] if line}
    assert len(table) < 20 < len(every.split("METRIC")[1].splitlines())
    assert all(len(line) <= 80 for line in table)
    as_json = json.loads(vorox("runs", "compare", first, second, "--json")[1])
    assert len(as_json["metrics"]) > 20


def test_the_latest_run_is_one_that_this_version_reads(vorox: Run) -> None:
    old, own = make_run("old", step=3), make_run("own", step=1)
    shutil.rmtree(own / "checkpoints")
    record = json.loads((old / "run.json").read_text())
    (old / "run.json").write_text(json.dumps(record | {"format": "vorox-run/1"}))
    assert find_run("runs", "latest").samefile(own)


def test_a_folder_that_may_not_be_read_hides_no_run(vorox: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("own", step=1)
    (run.parent / "lost+found").mkdir()
    is_file = Path.is_file

    def refuse(self: Path) -> bool:
        if "lost+found" in self.parts:
            raise PermissionError(13, "Permission denied", str(self))
        return is_file(self)

    monkeypatch.setattr(Path, "is_file", refuse)
    assert find_run("runs", "own").samefile(run)
    assert [row["run_id"] for row in json.loads(vorox("runs", "list", "--json")[1])] == [run.name]


def test_a_run_of_another_format_is_refused_with_the_command_that_trains_it_again(vorox: Run) -> None:
    directory = make_run("old", step=3)
    record = json.loads((directory / "run.json").read_text())
    (directory / "run.json").write_text(json.dumps(record | {"format": "vorox-run/1"}))
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "LOCK"}
    name, again = directory.name, f"vorox train runs/{directory.name}/config.yaml --resume never"
    for words in (
        ("train", "--resume", name), ("replay", name), ("checkpoints", "verify", name),
        ("generate", name, "--prompt", "a"), ("export", name), ("data", "when", name, "--source", "a"),
        ("runs", "show", name),
    ):  # fmt: skip
        code, out, error = vorox(*words)
        said = " ".join(error.split())
        assert code == 4, (words, out, error)
        assert "format 'vorox-run/1', but this version reads 'vorox-run/2'" in said, words
        assert again in said, words
    assert {path: path.read_bytes() for path in before} == before
    code, out, _ = vorox("runs", "list")
    assert code == 0
    assert "unreadable" in out
    assert vorox("runs", "remove", name, "--yes")[0] == 0
    assert not directory.exists()
