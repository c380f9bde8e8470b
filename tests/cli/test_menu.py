"""The start menu with scripted answers: every choice leads to a command, and to the run that the command describes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_runs
from vorox.cli import main
from vorox.cli.terminal import humanize
from vorox.cli.training import train
from vorox.cli.training.menu import checkpoint_list, machine
from vorox.cli.training.menu import start_menu as menu
from vorox.cli.training.menu.machine import settings_for_machine
from vorox.cli.training.menu.new_run import next_run_number, suggest_names
from vorox.core.config import load_config
from vorox.core.files.file_holder import FileLock
from vorox.core.run_layout import step_directories
from vorox.data.corpus.corpus import prepare
from vorox.planned_run import planned_model
from vorox.planning.hardware import Hardware, named_hardware
from vorox.planning.resource_plan import plan_resources
from vorox.records.run_lookup import run_directories

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, configuration and cache, but without a run."""
    directory = tmp_path_factory.mktemp("prepared")
    prepare(tiny_runs.configuration(directory))
    return directory


@pytest.fixture
def vorox(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in a folder of its own; the menu gets ``answers`` and then the end of the input."""
    settings = json.loads((prepared / "tiny.yaml").read_text())
    settings["run"] = {"name": "tiny"}
    (tmp_path / "tiny.yaml").write_text(json.dumps(settings))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VOROX_CACHE", str(tmp_path / "cache"))
    tiny_runs.use_numpy_engine(monkeypatch)
    monkeypatch.setattr(train, "has_terminal", lambda: True)

    def run(*words: str, answers: str = "") -> tuple[int, str, str]:
        waiting = answers.split()

        def ask(prompt: str) -> str:
            print(prompt, end="")
            if not waiting:
                raise EOFError
            answer = waiting.pop(0)
            print(answer)
            return "" if answer == "-" else answer

        monkeypatch.setattr("builtins.input", ask)
        capsys.readouterr()
        code = main(list(words))
        captured = capsys.readouterr()
        assert not waiting, f"not asked for: {waiting}\n{captured.out}"
        return code, captured.out, captured.err

    return run


def run_ids() -> list[str]:
    return [path.name for path in run_directories(Path("runs"))]


def kill_at(step: int, vorox: Run, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    with monkeypatch.context() as patch:
        tiny_runs.at_step(patch, step, tiny_runs.kill)
        with pytest.raises(tiny_runs.Killed):
            vorox("train", "tiny.yaml", *words)


def printed_command(out: str) -> list[str]:
    """The words of the command that the menu prints."""
    after = out.partition("The same without this menu:\n")[2].splitlines()
    return shlex.split(after[0])[1:]


def test_a_new_run_and_its_command(vorox: Run) -> None:
    code, out, err = vorox("train", answers="n tiny.yaml 2 y")
    assert code == 0, err
    assert "GiB available" in out
    if sys.platform == "linux":
        assert "free in /dev/shm" in out
    assert "None in runs yet." in out
    assert "tiny.yaml    a configuration in this folder" in out
    command = printed_command(out)
    assert command[:3] == ["train", "tiny.yaml", "--name"]
    assert command[3].startswith("experiment_")
    assert command[3].endswith("_text_16_run_1")
    (first,) = run_ids()
    assert first.startswith(command[3])
    chain = (Path("runs") / first / "chain.jsonl").read_bytes()
    shutil.rmtree("runs")
    assert vorox(*command)[0] == 0  # the printed command leads to the same run
    assert run_ids() == [first]
    assert (Path("runs") / first / "chain.jsonl").read_bytes() == chain


@pytest.mark.parametrize("answers", ["n b q", "n B n b q", "n tiny.yaml b q"])
def test_a_new_run_can_be_left_for_the_list(vorox: Run, answers: str) -> None:
    code, out, _ = vorox("train", answers=answers)
    assert code == 0
    assert out.count("start a new training") == 1 + answers.lower().count("b ")
    assert "Nothing was started." in out


@pytest.mark.parametrize(("lines", "expected"), [(24, 7), (40, 9), (12, 3), (100, 9)])
def test_the_list_fits_on_the_screen(
    vorox: Run, lines: int, expected: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vorox("train", "tiny.yaml", "--name", "one")[0] == 0
    (newest, *_) = checkpoint_list.list_entries(Path("runs"))
    monkeypatch.setattr("shutil.get_terminal_size", lambda fallback: os.terminal_size((80, lines)))
    capsys.readouterr()
    checkpoint_list.print_entries([newest] * 12, Path("runs"))
    shown = capsys.readouterr().out
    assert shown.count(newest.run.run_id) == expected
    assert len(shown.splitlines()) < max(lines, 18)


def test_run_numbers_and_own_names(vorox: Run) -> None:
    assert vorox("train", answers="n tiny.yaml my:model y")[0] == 0
    code, out, _ = vorox("train", answers="n 1 my-model n q")
    assert code == 0
    assert "The run is named my-model_run_2." in out
    assert "Nothing was started." in out
    assert [name.rpartition("-")[0] for name in run_ids()] == ["my-model_run_1"]
    (Path("runs") / "my-model_run_12-00000000").mkdir()
    (Path("runs") / "my-model_run_12-00000000" / "run.json").write_text("{}")
    assert next_run_number(Path("runs"), "my-model") == 13
    assert next_run_number(Path("runs"), "model") == 1


def test_resuming_an_unfinished_run(vorox: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_at(6, vorox, monkeypatch)
    (name,) = run_ids()
    code, out, err = vorox("train", answers="1 y")
    assert code == 0, err
    assert f"  1  {name}\n     Step 4 of 12 | Loss " in out
    assert printed_command(out) == ["train", "--resume", name]
    assert "Resuming from step 4" in out
    assert max(step_directories(Path("runs") / name)) == 12


def test_a_finished_run_is_extended_and_an_older_checkpoint_resumed(vorox: Run) -> None:
    assert vorox("train", "tiny.yaml")[0] == 0
    (name,) = run_ids()
    code, out, err = vorox("train", answers="7 1 3 16 y")
    assert code == 0, err
    assert "  Please type 1, A, N, X or Q." in out
    assert "This run is finished after 12 steps." in out
    assert "  Please type a number of at least 13." in out
    assert printed_command(out) == ["train", "train.num_steps=16", "--resume", name]
    assert max(step_directories(Path("runs") / name)) == 16
    code, out, err = vorox("train", answers="a 2 n q")
    assert code == 0, err
    assert "A  show 1 older one as well" in out
    assert "the newer checkpoints are renamed and kept" in out
    assert printed_command(out) == ["train", "--resume", f"runs/{name}/checkpoints/step-00000012"]


def test_deleting_checkpoints_runs_and_orphaned_logs(vorox: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert vorox("train", "tiny.yaml")[0] == 0
    kill_at(2, vorox, monkeypatch, "--name", "orphan")
    kept, orphan = sorted(run_ids(), reverse=True)
    assert orphan.startswith("orphan")
    code, out, err = vorox("train", answers="x o n o y 1 1 n 1 1 y 1 1 y 1 r n 1 r y b q")
    assert code == 0, err
    assert "O  delete the logs of 1 run without a checkpoint" in out
    assert "Delete this run? [y/N]" in out
    assert out.count(f"Removed {orphan}") == 1
    assert "Removed step-00000008 (" in out
    assert "Removed step-00000012 (" not in out
    assert "No valid checkpoint would remain" in out
    assert "delete the whole run (R)" in out
    assert "Kept: the caches of its data" in out
    assert out.count(f"Removed {kept}") == 1
    assert run_ids() == []


def commands_of_the_quickstart() -> dict[str, list[list[str]]]:
    """The words of the commands beside each action of the menu."""
    page = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text(encoding="utf-8")
    table = page.partition("| in the menu | command |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = (row.strip("| ").split(" | ") for row in table.splitlines())
    return {action: [found.split() for found in re.findall("`vorox (.+?)`", commands)] for action, commands in rows}


def test_every_action_of_the_menu_has_a_command(vorox: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the quickstart's table, in its order, on the runs of one folder."""
    actions = commands_of_the_quickstart()
    assert {letter for action in actions for letter in re.findall("`([A-Z])`", action)} == set("ANXRO")
    tiny_runs.write_text(tmp_path / "own")
    kill_at(6, vorox, monkeypatch)
    kill_at(2, vorox, monkeypatch, "--name", "orphan")
    orphan, run = sorted(run_ids())
    steps: dict[str, list[int]] = {}
    for action, commands in actions.items():
        for words in commands:
            if "train.follow_growth=true" in words:
                continue  # test_growth_is_found_and_the_run_extended
            known = {"RUN": run, "CONFIG": "tiny.yaml", "PATH": "own", "NAME": "named"}
            known["STEP"] = f"step-{min(steps.get('last') or [4]):08d}"
            filled = ["/".join(known.get(part, part) for part in word.split("/")) for word in words]
            code, out, err = vorox(*filled, *(["--dry-run"] if "--data" in filled else []))
            assert code == 0, (words, out, err)
        steps[action] = steps["last"] = sorted(step_directories(Path("runs") / run)) if run in run_ids() else []
    assert steps["list of checkpoints"] == [4]
    assert steps["a number: resume the newest checkpoint of a run"] == [8, 12]
    assert steps["`A`, then a number: resume an older checkpoint"] == [8, 12]
    assert steps["new length of a finished run"][-1] == 16
    assert min(steps["`X`: delete a checkpoint"]) > min(steps["`X`: details of a run"])
    assert steps["`X`, `R`: delete a run"] == []
    assert [name.partition("-")[0] for name in run_ids()] == ["named"], orphan


def test_a_run_in_use_is_neither_resumed_nor_deleted(vorox: Run) -> None:
    assert vorox("train", "tiny.yaml")[0] == 0
    (name,) = run_ids()
    with FileLock(Path("runs") / name / "LOCK", blocking=False, purpose="run"):
        code, out, _ = vorox("train", answers="1 x 1 b q")
    assert code == 0
    assert f"{name} is in use by process" in out
    assert "nothing of it can be deleted until it stops" in out
    assert sorted(step_directories(Path("runs") / name)) == [8, 12]


def test_growth_is_found_and_the_run_extended(vorox: Run, tmp_path: Path) -> None:
    text = tiny_runs.write_text(tmp_path / "text")
    grown = [
        f"data.sources=[{{name: text, format: jsonl, paths: ['{text}']}}]", "data.cache.grow=true",
        f"data.cache.directory={tmp_path / 'cache'}", "train.num_steps=null", "train.num_epochs=1",
        "schedule.warmup_steps=null", "schedule.warmup_fraction=0.1",
    ]  # fmt: skip
    code, _, err = vorox("train", "tiny.yaml", *grown)
    assert code == 0, err
    (name,) = run_ids()
    total = max(step_directories(Path("runs") / name))
    code, out, err = vorox("train", "tiny.yaml", *grown, "--dry-run")
    assert code == 0, err
    assert "growth" not in out  # nothing was added yet
    more = tmp_path / "more"
    tiny_runs.write_text(more, documents=90, seed=1)
    (more / "text.jsonl").rename(text / "z.jsonl")
    code, _, err = vorox("data", "build", "tiny.yaml", *grown)
    assert code == 0, err
    code, out, err = vorox("train", "--menu", answers="1 n 120 n 1 y y")
    assert code == 0, err
    assert "the data grew from " in out
    last = out.rpartition("The same without this menu:\n")[2].splitlines()[0].split()
    assert last == ["vorox", "train", "train.follow_growth=true", "--resume", name]
    grown_total = max(step_directories(Path("runs") / name))
    assert grown_total > 2 * total
    assert f"Extend the run to {grown_total:,} steps?" in out


def test_a_run_is_extended_on_its_own_files_and_names_those_that_were_added(vorox: Run, tmp_path: Path) -> None:
    text = tiny_runs.write_text(tmp_path / "text")
    source = f"data.sources=[{{name: text, format: jsonl, paths: ['{text}']}}]"
    assert vorox("train", "tiny.yaml", source, f"data.cache.directory={tmp_path / 'cache'}")[0] == 0
    (name,) = run_ids()
    tiny_runs.write_text(tmp_path / "more", documents=20, seed=1)
    (tmp_path / "more" / "text.jsonl").rename(text / "z.jsonl")
    caches = sorted((tmp_path / "cache").iterdir())
    assert vorox("train", "--resume", name, "train.num_steps=24", "--dry-run")[0] == 0
    code, out, err = vorox("train", answers="1 24 y")
    assert code == 0, err
    assert "z.jsonl" in out + err
    assert sorted((tmp_path / "cache").iterdir()) == caches
    assert max(step_directories(Path("runs") / name)) == 24


def test_the_menu_stays_closed_without_a_terminal(vorox: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "has_terminal", lambda: False)
    code, _, err = vorox("train", "--menu")
    assert code == 2
    assert "The menu needs a terminal" in err
    code, out, err = vorox("train", "model.num_layers=0")  # as ever: the default preset, whose settings are checked
    assert code == 2
    assert "Checkpoints" not in out


def test_the_menu_chooses_the_run(vorox: Run) -> None:
    code, _, err = vorox("train", "--menu", "--name", "mine")
    assert code == 2
    assert "--menu chooses the run and its name" in err
    code, out, err = vorox("train", "--menu", "tiny.yaml", "train.num_steps=8", "--minutes", "1", answers="n 3 n q")
    assert code == 0, err
    assert "What to train" not in out
    assert printed_command(out)[1:4] == ["tiny.yaml", "train.num_steps=8", "--name"]
    assert printed_command(out)[-2:] == ["--minutes", "1"]


def test_a_configuration_that_is_refused_leads_back(vorox: Run) -> None:
    Path("broken.yaml").write_text("preset: quickstart\nmodel: {num_layers: -1}\n")
    code, out, err = vorox("train", answers="n broken.yaml n nowhere.txt tiny.yaml - n q")
    assert code == 0, err
    assert "num_layers" in out
    assert "nowhere.txt is neither a number of the list nor a file or folder" in out


def test_the_plan_estimates_the_speed_of_the_gpus_that_the_run_would_use(
    vorox: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(menu, "this_machine", lambda: named_hardware("rtx4090x4"))
    speeds: list[str] = []
    for words in ([], ["--nproc", "2"]):
        code, out, err = vorox("train", "--menu", *words, answers="n tiny.yaml 1 n q")
        assert code == 0, err
        assert "--nproc 4 uses all" in out
        speeds += re.findall(r"^speed +about ([\d.]+\w) tok/s at an assumed MFU of 40%", out, re.MULTILINE)
        assert re.search(r"^duration +about .* for 768 tokens$", out, re.MULTILINE)
    one, two = (float(speed[:-1]) * {"M": 1e6, "B": 1e9}[speed[-1]] for speed in speeds)
    assert two == pytest.approx(2 * one, rel=0.01)
    monkeypatch.setattr(menu, "this_machine", lambda: Hardware("this machine", 1, 1 << 33))
    assert "assumed MFU" not in vorox("train", answers="n tiny.yaml 1 n q")[1], "a CPU has no data-sheet peak"


def test_names_say_size_data_and_length() -> None:
    config = load_config("gpt2-124m", ["data.sources=[{name: FineWeb, format: txt, paths: [x]}]"])
    names = [one.name for one in suggest_names(config)]
    assert names == ["124M_FineWeb_1024", "experiment_124M_FineWeb_1024", "gpt2_124M", "test_124M"]


def test_settings_for_a_machine() -> None:
    config = load_config("quickstart")
    assert settings_for_machine(config, Hardware("this machine", 1, 1 << 30)) == [], "a CPU"
    ((setting, why),) = settings_for_machine(config, named_hardware("rtx4090"))
    assert setting == "precision.dtype=bf16"
    assert "RTX 4090" in why
    assert settings_for_machine(config, named_hardware("v100-16")) == [], "it computes no bf16"


FOUR_LAYERS = ["model.preset=null", "model.hidden_size=512", "model.num_heads=8", "model.num_layers=4"]


@pytest.mark.parametrize(
    ("settings", "has_triton", "is_compiled"),
    [
        ([], True, True),
        ([], False, False),
        (["runtime.compile=true"], True, False),
        (["runtime.determinism=bitwise"], True, False),
        (["backend=jax"], True, False),
        (["model.preset=null", "model.hidden_size=256", "model.num_heads=4"], True, False),
        (["train.activation_checkpointing=dots"], True, False),
        (["parallel.tensor_parallel_size=2"], True, False),
        ([*FOUR_LAYERS, "model.layer_pattern=*-*-"], True, True),
        ([*FOUR_LAYERS, "model.layer_pattern=M-*-"], True, False),
    ],
    ids=[
        "larger model",
        "no Triton",
        "already",
        "bitwise",
        "jax",
        "smaller model",
        "dots",
        "tensor parallelism",
        "pattern",
        "Mamba-2",
    ],
)
def test_larger_models_are_compiled_on_a_gpu(
    settings: list[str], has_triton: bool, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_has_triton", lambda: has_triton)
    found = [setting for setting, _ in settings_for_machine(load_config("gpt2-124m", settings), named_hardware("h200"))]
    assert ("runtime.compile=true" in found) == is_compiled


@pytest.mark.parametrize("name", ["rtx3070", "rtx4090", "h200"])
def test_chosen_settings_fill_the_memory_of_a_gpu_and_fit_into_it(name: str) -> None:
    config, gpu = load_config("gpt2-124m"), named_hardware(name)
    chosen = settings_for_machine(config, gpu)
    (setting, why), *_ = [one for one in chosen if one[0].startswith("train.micro_batch")]
    rows = int(setting.partition("=")[2])
    assert (rows < 16) == (name == "rtx3070"), "fewer rows than the preset's where these do not fit"
    assert f"90% of {humanize.size(gpu.memory_bytes)}" in why
    used = plan_resources(load_config("gpt2-124m", [one for one, _ in chosen]), planned_model(config), gpu)
    assert used.memory_bytes <= 0.9 * gpu.memory_bytes
    next_rows = [f"train.micro_batch_sequences={2 * rows}"] if rows < 512 else []
    if next_rows and name != "rtx3070":
        more = plan_resources(load_config("gpt2-124m", next_rows), planned_model(config), gpu)
        assert more.memory_bytes > 0.9 * gpu.memory_bytes, "twice as many do not"
