"""Every command on real small runs, through ``main``: what is printed, what is returned, what is left alone."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
from eventually import PATIENCE_SECONDS, wait_until
from vorox.cli import main
from vorox.records.run_context import run_id

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of 12 steps and its cache."""
    directory = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as monkeypatch:
        tiny_runs.use_numpy_engine(monkeypatch)
        tiny_runs.run(tiny_runs.configuration(directory))
    return directory


@pytest.fixture
def house(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it with the current directory in it; the cache is shared and only read."""
    shutil.copytree(trained / "runs", tmp_path / "runs")
    (tmp_path / "tiny.yaml").write_bytes((trained / "tiny.yaml").read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("VOROX_CACHE", str(tmp_path / "cache"))
    tiny_runs.use_numpy_engine(monkeypatch)
    return tmp_path


@pytest.fixture
def vorox(house: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(words))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def the_run(house: Path) -> Path:
    (directory,) = (path for path in (house / "runs").iterdir() if path.name.startswith("tiny-"))
    return directory


def flip_a_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def as_json(found: tuple[int, str, str]) -> Any:
    code, out, err = found
    assert code == 0, err
    return json.loads(out)


def test_help_is_quick(tmp_path: Path) -> None:
    """Against the same library drawing the help of an empty program, in turn: at most twice as much."""
    libraries = (
        "import sys, time, typer\n"
        "app = typer.Typer()\n"
        "for name in 'abcdefghijkl': app.command(name)(lambda: None)\n"
        "app(['--help'], standalone_mode=False)\n"
        "print(time.process_time(), file=sys.stderr)\n"
    )
    program = (
        "import sys, time\n"
        "from vorox.cli import main\n"
        "code = main(['--help'])\n"
        "print(time.process_time(), file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    # As in an installation, bytecode is written once.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    finished = [
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, env=environment)
        for _ in range(5)
        for text in (program, libraries)
    ]  # fmt: skip
    assert [one.returncode for one in finished] == [0] * 10, finished[0].stderr
    ours, theirs = (min(float(one.stderr) for one in finished[first::2]) for first in (0, 1))
    assert ours < 2 * theirs
    for command in ("data", "runs", "checkpoints", "replay", "generate", "export", "config"):
        assert command in finished[0].stdout


def test_python_dash_m_is_the_same_command() -> None:
    finished = subprocess.run([sys.executable, "-m", "vorox", "--version"], capture_output=True, text=True, check=True)
    assert finished.stdout.startswith("vorox 0.")


@pytest.mark.parametrize(
    "words", [["rnus"], ["runs", "list", "--jsn"], ["replay"], ["generate", "x", "--top-k", "many"]]
)
def test_wrong_words_are_refused_with_2(vorox: Run, words: list[str]) -> None:
    assert vorox(*words)[0] == 2


def test_no_words_are_help(vorox: Run) -> None:
    code, out, err = vorox()
    assert "Usage" in out + err
    assert code in {0, 2}


# runs


def test_runs_list(vorox: Run, house: Path) -> None:
    code, out, _ = vorox("runs", "list")
    assert code == 0
    titles, row = out.splitlines()
    assert titles.split() == ["RUN", "STATE", "STEP", "LOSS", "EVAL", "SAVED", "SIZE", "CHANGED"]
    assert row.split()[:3] == [the_run(house).name, "finished", "12/12"]
    (entry,) = as_json(vorox("runs", "list", "--json"))
    assert (entry["state"], entry["step"], entry["total_steps"]) == ("finished", 12, 12)
    assert 0 < entry["loss"] < 6
    assert entry["age_seconds"] >= 0


def test_runs_list_of_nothing(vorox: Run, house: Path) -> None:
    shutil.rmtree(house / "runs")
    code, out, _ = vorox("runs", "list")
    assert code == 0
    assert "vorox train quickstart" in out
    assert as_json(vorox("runs", "list", "--json")) == []


@pytest.mark.parametrize("name", ["latest", "tiny", "whole", "path"])
def test_a_run_is_found_by_any_of_its_names(vorox: Run, house: Path, name: str) -> None:
    chosen = {"whole": the_run(house).name, "path": str(the_run(house))}.get(name, name)
    code, out, _ = vorox("runs", "show", chosen)
    assert code == 0
    assert out.startswith(the_run(house).name)


def test_runs_show(vorox: Run, house: Path) -> None:
    _, out, _ = vorox("runs", "show", "latest")
    assert "finished" in out
    assert "12 of 12" in out
    assert "  steps      8, 12\n" in out
    shown = as_json(vorox("runs", "show", "latest", "--json"))
    assert [entry["step"] for entry in shown["metrics"]] == [1, 2, 4, 6, 8, 10, 12]
    assert "eval/loss" in shown["metrics"][3]
    assert [entry["step"] for entry in shown["checkpoints"]] == [8, 12]
    assert shown["attempts"][0]["outcome"] == "finished"


def test_an_unknown_run_is_refused(vorox: Run) -> None:
    code, out, err = vorox("runs", "show", "tinny")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 4
    assert "Run tinny not found" in err


def test_compare_with_itself_and_with_another_learning_rate(vorox: Run, house: Path, trained: Path) -> None:
    first = the_run(house)
    other = tiny_runs.configuration(trained, [f"run.directory={house}/runs", "optimizer.lr=0.02"])
    tiny_runs.run(other)
    same = as_json(vorox("runs", "compare", first.name, first.name, "--json"))
    assert same["settings"] == []
    assert same["chain"]["num_equal_steps"] == 12
    assert same["chain"]["difference"] is None
    found = as_json(vorox("runs", "compare", first.name, run_id(other), "--json"))
    assert [item["key"] for item in found["settings"]] == ["optimizer.lr", "run.directory"]
    difference = found["chain"]["difference"]
    assert (difference["step"], difference["quantity"]) == (2, "loss"), "step 1 does not depend on the learning rate"
    assert {"loss", "eval/loss", "tokens_total"} <= {row["name"] for row in found["metrics"]}
    code, out, _ = vorox("runs", "compare", first.name, run_id(other))
    assert code == 0
    assert "optimizer.lr: 0.01 -> 0.02" in out
    assert "Bit-equal for 1 step; loss differs at step 2" in out


def test_removing_a_run_needs_consent(vorox: Run, house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = the_run(house)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    code, _, err = vorox("runs", "remove", directory.name)
    assert code == 2
    assert "add --yes" in err
    assert directory.exists()
    code, out, _ = vorox("runs", "remove", directory.name, "--yes")
    assert code == 0
    assert "Removed" in out
    assert not directory.exists()


def test_everything_that_a_run_writes_is_known(vorox: Run, house: Path) -> None:
    """A file that ``run_layout.RUN_FILES`` does not know would keep a run from being removed."""
    shutil.copytree(the_run(house), house / "copy" / "runs" / the_run(house).name)
    assert vorox("runs", "remove", str(house / "copy" / "runs" / the_run(house).name), "-y")[0] == 0


# checkpoints


def test_checkpoints_list_and_verify(vorox: Run, house: Path) -> None:
    listed = as_json(vorox("checkpoints", "list", "latest", "--json"))
    assert [(entry["step"], entry["state"]) for entry in listed] == [(8, "unverified"), (12, "unverified")]
    assert listed[0]["eval_loss"] is None, "the validations are at steps 6 and 12"
    assert listed[1]["eval_loss"] is not None
    code, out, _ = vorox("checkpoints", "verify", "latest")
    assert code == 0
    assert out.count(" valid ") == 2
    flip_a_bit(max((the_run(house) / "checkpoints" / "step-00000012").iterdir(), key=lambda path: path.stat().st_size))
    code, out, err = vorox("checkpoints", "verify", "latest")
    assert code == 5
    assert "corrupt" in out
    assert err.splitlines()[0] == "x checkpoint: 1 of 2 checkpoints is corrupt: step-00000012  [exit 5]"
    assert "step 8 is valid" in err
    assert vorox("checkpoints", "verify", "latest", "--step", "8")[0] == 0
    assert vorox("checkpoints", "verify", "latest", "--step", "9")[0] == 2


def test_checkpoints_remove(vorox: Run, house: Path) -> None:
    code, out, _ = vorox("checkpoints", "remove", "latest", "8", "--yes")
    assert code == 0
    assert "step-00000008" in out
    assert vorox("checkpoints", "remove", "latest", "12", "--yes")[0] == 5
    assert vorox("checkpoints", "remove", "latest", "12", "--yes", "--force")[0] == 0
    code, out, _ = vorox("checkpoints", "list", "latest")
    assert out == "No checkpoints.\n"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("export", "latest", "--to", "peft"), "has no "),
        (("export", "latest", "--to", "hf", "--output", "new/folder/hf"), "not valid"),
        (("checkpoints", "average", "latest", "8", "12", "--to", "new/folder/mean"), "not valid"),
    ],
)
def test_a_refused_export_leaves_nothing(vorox: Run, house: Path, words: tuple[str, ...], what: str) -> None:
    before = {path for path in house.rglob("*") if path.is_dir()}
    code, _, err = vorox(*words)
    assert code in {2, 5}
    assert what in err
    assert {path for path in house.rglob("*") if path.is_dir()} == before


def test_saving_needs_a_running_run(vorox: Run, house: Path) -> None:
    code, _, err = vorox("checkpoints", "save", "latest")
    assert code == 2
    assert "is not running" in err
    assert not (the_run(house) / "control" / "save").exists()


LONG_RUN = """
import pathlib, sys
import pytest
import tiny_runs
tiny_runs.use_numpy_engine(pytest.MonkeyPatch())
config = tiny_runs.configuration(pathlib.Path(sys.argv[1]), [
    f"run.directory={sys.argv[2]}", "train.num_steps=1000000", "checkpoint.every_steps=1000000",
    "eval.every_steps=1000000", "run.name=long",
])
tiny_runs.run(config)
"""


def test_a_run_that_is_running(vorox: Run, house: Path, trained: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", LONG_RUN, str(trained), str(house / "runs")], env=environment, stderr=subprocess.PIPE
    ) as process:
        try:
            wait_until(lambda: vorox("checkpoints", "save", "long", "--wait", "0")[0] == 0)
            code, out, err = vorox("checkpoints", "save", "long")
            assert code == 0, err
            assert "step-" in out
            listed = {run["run_id"]: run for run in as_json(vorox("runs", "list", "--json"))}
            (long,) = (run for name, run in listed.items() if name.startswith("long"))
            assert long["state"] == "running"
            assert str(process.pid) in long["holder"]
            assert long["checkpoint_step"] > 0
            step = str(long["checkpoint_step"])
            for words in (("runs", "remove", "long", "-y"), ("checkpoints", "remove", "long", step, "-y", "--force")):
                code, _, err = vorox(*words)
                assert code == 2
                assert f"in use by process {process.pid}" in err
            process.terminate()
            assert process.wait(timeout=PATIENCE_SECONDS) == 1, (
                "Preempted ends this script, which has no main of its own"
            )
        finally:
            process.kill()
    code, out, _ = vorox("runs", "show", "long")
    assert "stopped" in out
    assert vorox("runs", "remove", "long", "-y")[0] == 0


def test_no_secret_reaches_any_file_or_screen(vorox: Run, house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that dies while secrets are everywhere: environment, command line, error, traceback."""
    from numpy_engine import NumpyEngine

    monkeypatch.setenv("HF_TOKEN", "plainCANARYvalue")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrCANARY/K7MDENG")
    original, calls = NumpyEngine.train_step, []

    def dying(engine: NumpyEngine, *arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        if len(calls) > 6:
            dsn = "postgresql://alice:CANARYpassword@db.example.org/meta"
            raise RuntimeError(f"lost {dsn} with plainCANARYvalue, sk-CANARY0123456789 and wJalrCANARY/K7MDENG")
        return original(engine, *arguments, **keywords)

    monkeypatch.setattr(NumpyEngine, "train_step", dying)
    code, out, err = vorox("train", "tiny.yaml", "--name", "hf_CANARY0123456789abcdef", "--resume", "never")
    assert code == 2, "a credential is no name"
    assert "CANARY" not in out + err
    code, out, err = vorox("train", "tiny.yaml", "run.directory=runs", "--name", "dying", "--resume", "never")
    assert code == 1
    assert "RuntimeError: lost postgresql://[redacted]@db.example.org/meta" in err
    assert "CANARY" not in out + err
    files = [path for path in sorted(house.rglob("*")) if path.is_file()]
    assert any(b"Traceback" in path.read_bytes() for path in files if path.name == "log.txt")
    assert any(b"Traceback" in path.read_bytes() for path in files if path.parent.name == "crashes")
    assert any(path.name == "failure.json" for path in files)
    for path in files:
        assert b"CANARY" not in path.read_bytes(), path


# replay


def test_replay_is_exact_from_the_start_and_from_a_checkpoint(vorox: Run, house: Path) -> None:
    def content() -> dict[str, bytes]:
        files = [path for path in sorted(the_run(house).rglob("*")) if path.is_file()]
        kept = [path for path in files if path.name != "verdicts.jsonl" and path.suffix != ".pin"]
        return {str(path): path.read_bytes() for path in kept}

    before = content()
    code, out, _ = vorox("replay", "latest")
    assert code == 0
    assert out.startswith("bit-exact, 12 steps\n")
    assert "3 checkpoints compared" in out
    report = as_json(vorox("replay", "latest", "--from", "8", "--to", "11", "--json"))
    assert (report["is_exact"], report["num_steps"], report["start_step"]) == (True, 3, 8)
    assert before == content(), "nothing but verdicts, and the place of a run that was copied, is written"


def test_replay_names_what_differs(vorox: Run, house: Path) -> None:
    chain = the_run(house) / "chain.jsonl"
    lines = chain.read_text().splitlines()
    record = json.loads(lines[9])
    record["loss"] = f"{int(record['loss'], 16) ^ 1:016x}"
    from vorox.records.replay_chain import link

    previous = json.loads(lines[8])["chain"]
    record["chain"] = link(previous, 10, record["batch"], record["loss"], record["grad_norm"])
    chain.write_text("\n".join([*lines[:9], json.dumps(record)]) + "\n")
    code, _, err = vorox("replay", "latest", "--from", "8")
    assert (code, "Step 11 cannot be compared" in err) == (4, True), "checkpoint 12 says that there were more"
    code, out, err = vorox("replay", "latest", "--from", "8", "--to", "10")
    assert code == 7
    assert "differs after 1 bit-exact steps; step 10: loss was" in out
    assert "x numerical: Replay differs at step 10: loss" in err


def test_replay_of_another_range_is_refused(vorox: Run) -> None:
    code, _, err = vorox("replay", "latest", "--from", "5", "--to", "99")
    assert code == 2
    assert "--from 0 --to 12" in err


# generate


def test_generate_repeats_itself(vorox: Run) -> None:
    words = ("generate", "latest", "-p", "the step", "--tokens", "5", "--json")
    first = as_json(vorox(*words))
    assert first["step"] == 12
    (completion,) = first["completions"]
    assert completion["prompt"] == "the step"
    assert completion["completion"]
    assert as_json(vorox(*words)) == first
    other = as_json(vorox(*words, "--seed", "7"))["completions"]
    assert other != first["completions"]
    several = as_json(vorox(*words, "-n", "3"))["completions"]
    assert several[0] == completion
    assert len({entry["completion"] for entry in several}) > 1
    assert as_json(vorox(*words, "--step", "8"))["step"] == 8


def test_generated_text_cannot_touch_the_terminal(vorox: Run) -> None:
    code, out, _ = vorox("generate", "latest", "-p", "the \x1b[2J", "--tokens", "3")
    assert code == 0
    assert out.startswith("the \ufffd[2J")
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((), "No prompt is given"),
        (("-p", "x", "--step", "99"), "has no step 99"),
        (("-p", "x", "--tokens", "100"), "more than the"),
    ],
)
def test_generate_refuses(vorox: Run, words: tuple[str, ...], what: str) -> None:
    code, _, err = vorox("generate", "latest", *words)
    assert code == 2
    assert what in err


def test_generate_passes_over_a_corrupt_checkpoint_loudly(vorox: Run, house: Path) -> None:
    state = the_run(house) / "checkpoints" / "step-00000012" / "state.json"
    state.write_text(state.read_text() + " ")
    code, out, err = vorox("generate", "latest", "-p", "the", "--tokens", "2", "--json")
    assert code == 0
    assert json.loads(out)["step"] == 8
    assert "Skipping step-00000012" in err
    assert (the_run(house) / "checkpoints" / "step-00000012").exists(), "reading renames nothing"


# data


def test_data_verbs(vorox: Run, house: Path) -> None:
    built = as_json(vorox("data", "build", "tiny.yaml", "--json"))
    assert sorted(built["caches"]) == ["text train", "text validation"]
    assert all(report["units_built"] == 0 for report in built["caches"].values()), "the cache was there"
    code, out, _ = vorox("data", "build", "tiny.yaml")
    assert code == 0
    assert "text train" in out
    verified = as_json(vorox("data", "verify", "latest", "--json"))
    assert verified["caches"] == {name: report["digest"] for name, report in built["caches"].items()}
    counted = as_json(vorox("data", "stats", "tiny.yaml", "--json"))
    assert counted["weights"] == {"text": "1"}
    assert counted["caches"][0]["report"]["documents"] == built["caches"]["text train"]["documents"]
    code, out, _ = vorox("data", "stats", "tiny.yaml", "--xz")
    assert code == 0
    assert "xz baseline: " in out
    rows = as_json(vorox("data", "peek", "tiny.yaml", "--rows", "3", "--split", "validation", "--json"))
    assert len(rows) == 3
    code, out, _ = vorox("data", "peek", "tiny.yaml")
    assert code == 0
    assert "text.jsonl, record " in out


def test_data_verbs_never_build_unless_told(vorox: Run, house: Path) -> None:
    for verb in ("verify", "stats", "peek"):
        code, _, err = vorox("data", verb, "tiny.yaml", f"data.cache.directory={house}/other")
        assert code == 4, verb
        assert "vorox data build" in err
    assert not list((house / "other").rglob("*.psc"))


def test_damage_is_found_and_repaired(vorox: Run, house: Path) -> None:
    words = ("tiny.yaml", f"data.cache.directory={house}/other")
    assert vorox("data", "build", *words)[0] == 0
    chunk = sorted((house / "other").rglob("*.psc"))[0]
    flip_a_bit(chunk)
    code, _, err = vorox("data", "verify", *words)
    assert code == 4
    assert chunk.name in err
    assert "--repair" in err
    assert vorox("data", "build", *words, "--repair")[0] == 0
    assert vorox("data", "verify", *words)[0] == 0


def test_data_takes_configurations_only(vorox: Run) -> None:
    code, _, err = vorox("data", "build", "nosuch.yaml")
    assert code == 2
    assert "nosuch.yaml" in err
