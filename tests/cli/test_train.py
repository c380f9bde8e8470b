"""``vorox train`` through ``main``: real small runs under the numpy engine, and every way to be refused before one."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
from vorox.cli import main
from vorox.cli.terminal import humanize
from vorox.core.run_layout import step_directories
from vorox.experiments.tracking import read_metrics
from vorox.records.run_lookup import run_attempts, run_directories

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, configuration and cache, but without a run."""
    directory = tmp_path_factory.mktemp("prepared")
    config = tiny_runs.configuration(directory)
    from vorox.data.corpus.corpus import prepare

    prepare(config)
    return directory


@pytest.fixture
def vorox(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Calls a command in a folder of its own, with runs in ``runs``."""
    settings = json.loads((prepared / "tiny.yaml").read_text())
    settings["run"] = {"name": "tiny"}
    (tmp_path / "tiny.yaml").write_text(json.dumps(settings))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VOROX_CACHE", str(tmp_path / "cache"))
    tiny_runs.use_numpy_engine(monkeypatch)

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(words))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def runs() -> list[Path]:
    return run_directories(Path("runs"))


def chain_heads(directory: Path) -> dict[int, str]:
    lines = [json.loads(line) for line in (directory / "chain.jsonl").read_text().splitlines()]
    return {line["step"]: line["chain"] for line in lines if "chain" in line}


def test_a_run_ends_with_commands_that_work(vorox: Run) -> None:
    code, out, err = vorox("train", "tiny.yaml")
    assert code == 0, err
    (directory,) = runs()
    assert out.startswith("tiny: llama-1x16 on text, 12 steps, 4 x 16 tokens per step\n")
    assert f" Run directory: {directory}\n" in out.partition(" Step 1 loss ")[2], "it is named once it stays"
    commands = dict(line.split(None, 1) for line in out.splitlines()[-5:])
    assert list(commands) == ["resume", "generate", "export", "replay", "dash"]
    assert commands["dash"] == "vorox dash"
    held = "train.num_steps=24 schedule.name=hold"
    assert commands["resume"] == f"vorox train --resume {directory.name} {held}"
    assert re.search(r"Model: [\d,]+ parameters on .* \(torch, fp32\), 12 steps", out.replace("\n         ", " "))
    assert "nats/token after step" in out
    losses = {step: values["loss"] for step, values in read_metrics(directory).items() if "loss" in values}
    best = min(losses, key=losses.__getitem__)
    assert f"  loss      final {losses[12]:.4f}, best {losses[best]:.4f} (step {best})\n" in out
    assert re.search(r"^  memory    peak [\d.,]+ \w+; estimated [\d.,]+ \w+ of tensors$", out, re.MULTILINE)
    assert "(xz: " in out
    assert str(step_directories(directory)[12]) in out

    def typed(name: str, *more: str) -> tuple[int, str, str]:
        words = shlex.split(commands[name])
        assert words[0] == "vorox"
        return vorox(*words[1:], *more)

    code, out, err = typed("replay")
    assert code == 0, err
    assert "bit-exact" in out
    code, out, err = typed("generate")
    assert code == 0, err
    code, out, err = typed("resume")
    assert code == 0, err
    assert f"{directory.name}: 24 steps" in out
    assert [path.name for path in runs()] == [directory.name]
    assert [attempt["outcome"] for attempt in run_attempts(directory)] == ["finished", "finished"]


@pytest.mark.parametrize("is_known", [True, False])
def test_the_last_screen_names_the_environment_if_the_shell_does_not_know_vorox(
    vorox: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """As after `make train`, whose environment is in `.venv` and is not activated."""
    folder = Path(".venv", "Scripts" if os.name == "nt" else "bin")
    folder.mkdir(parents=True)
    (folder / "activate").write_text("")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if is_known else None)
    code, out, err = vorox("train", "tiny.yaml")
    assert code == 0, err
    shown = [line for line in out.splitlines() if line.startswith("  activate ")]
    assert [line.endswith(str(folder / "activate")) for line in shown] == ([] if is_known else [True])


def test_a_new_run_that_is_refused_names_no_directory(vorox: Run) -> None:
    code, out, err = vorox("train", "tiny.yaml", "log.metrics=[nowhere:function]")
    assert code == 2
    assert "nowhere" in err
    assert runs() == []
    assert list(Path("runs").iterdir()) == []
    assert "runs" not in out + err.replace("run the same command", "")


def test_a_refused_resume_is_no_failure_in_the_list_of_runs(vorox: Run) -> None:
    assert vorox("train", "tiny.yaml")[0] == 0
    (run,) = json.loads(vorox("runs", "list", "--json")[1])
    assert vorox("train", "--resume", "latest", "train.num_steps=5")[0] == 2
    (again,) = json.loads(vorox("runs", "list", "--json")[1])
    assert again["state"] == "finished"
    for found in (run, again):
        assert found.pop("age_seconds") >= 0
        found.pop("size_bytes")  # of the lock, which names the last process
    assert again == run


def test_the_last_screen_offers_only_what_works(vorox: Run) -> None:
    """A prompt that cannot be typed on one line, and a model that transformers does not know."""
    words = ['eval.prompts=["\\n", "the \'step\'"]', "eval.sample_tokens=4", "model.activation=relu"]
    code, out, err = vorox("train", "tiny.yaml", *words)
    assert code == 0, err
    commands = dict(line.split(None, 1) for line in out.splitlines()[-4:])
    assert list(commands) == ["resume", "generate", "replay", "dash"]
    assert shlex.split(commands["generate"])[-1] == "the 'step'"


def test_records_that_cannot_be_read_are_told_with_place_and_reason(vorox: Run) -> None:
    lines = [json.dumps({"text": f"line {number} of a text with some words"}) for number in range(400)]
    lines[100] = "not json"
    Path("a.jsonl").write_text("\n".join(lines))
    words = ["data.sources.0.format=jsonl", "data.sources.0.paths=[a.jsonl]", "data.validation.split=span"]
    code, out, err = vorox("train", "tiny.yaml", *words)
    assert code == 0, err
    assert "a.jsonl:101: invalid JSON" in out + err
    (summary,) = [line for line in out.splitlines() if line.startswith("  skipped   1 ")]
    assert Path(summary.split()[-1]).is_dir()


def test_the_same_command_again_says_that_it_has_finished(vorox: Run) -> None:
    assert vorox("train", "tiny.yaml")[0] == 0
    code, out, _ = vorox("train", "tiny.yaml")
    assert code == 0
    assert "is already finished (12 steps)" in out
    assert "train.num_steps=24" in out
    assert len(runs()) == 1


def test_a_run_of_one_step_has_done_it(vorox: Run) -> None:
    code, out, err = vorox("train", "tiny.yaml", "train.num_steps=1", "schedule.warmup_steps=0")
    assert code == 0, err
    assert re.search(r"^\S+: 1 step, \S+ tokens; [\d.]+ s$", out, re.MULTILINE), "a single step has no speed"
    assert "already" not in out
    assert ": 1 step, 64 tokens" in out


def test_resume_never_begins_another_run(vorox: Run) -> None:
    assert vorox("train", "tiny.yaml")[0] == 0
    assert vorox("train", "tiny.yaml", "--resume", "never")[0] == 0
    first, second = runs()
    assert f"Resuming {second}\n" in vorox("train", "tiny.yaml")[1]
    assert second.name == f"{first.name}-2"
    assert chain_heads(first) == chain_heads(second)


def test_overrides_make_another_run_and_names_name_it(vorox: Run) -> None:
    assert vorox("train", "tiny.yaml", "--optimizer.lr=0.02", "--name", "7")[0] == 0
    (directory,) = runs()
    assert directory.name.startswith("7-")
    assert "lr: 0.02" in (directory / "config.yaml").read_text()
    assert run_attempts(directory)[0]["argv"][:4] == ["vorox", "train", "tiny.yaml", "--optimizer.lr=0.02"]


def test_resume_from_a_run_by_name_beginning_and_checkpoint(vorox: Run) -> None:
    assert vorox("train", "tiny.yaml")[0] == 0
    (directory,) = runs()
    whole = chain_heads(directory)
    for word in (directory.name, "tiny", "latest", str(directory)):
        code, out, err = vorox("train", "--resume", word)
        assert code == 0, err
        assert "already" in out
    checkpoint = step_directories(directory)[8]
    code, out, err = vorox("train", "--resume", str(checkpoint))
    assert code == 0, err
    assert "Resuming from step 8" in out
    assert chain_heads(directory) == whole


def test_a_run_may_stand_for_its_configuration(vorox: Run) -> None:
    assert vorox("train", "tiny.yaml")[0] == 0
    (directory,) = runs()
    code, out, _ = vorox("train", directory.name)
    assert code == 0
    assert "already" in out


def test_minutes_set_the_length_once(vorox: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vorox.training.time_budget.steps_within", lambda *_: 5)
    code, out, err = vorox("train", "tiny.yaml", "--minutes", "0.5")
    assert code == 0, err
    (directory,) = runs()
    assert "num_steps: 5" in (directory / "config.yaml").read_text()
    assert "Warm-up of 3 steps would take more than half of the run: shortened to 0 steps" in out
    assert "Warm-up takes" not in out, "no warning about a warm-up that was shortened"
    record = json.loads((directory / "run.json").read_text())
    record["attempts"][-1]["outcome"] = "killed"
    (directory / "run.json").write_text(json.dumps(record))
    monkeypatch.setattr("vorox.training.time_budget.steps_within", lambda *_: 6)
    code, out, err = vorox("train", "tiny.yaml", "--minutes", "0.5")
    assert code == 0, err
    assert f"Resuming {directory.name} (--minutes 0.5, 5 steps)" in out
    assert len(runs()) == 1
    assert vorox("train", "tiny.yaml", "--minutes", "0.5")[0] == 0  # the first one has finished
    assert len(runs()) == 2


def test_other_settings_are_never_taken_for_the_run_that_minutes_began(
    vorox: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vorox.training.time_budget.steps_within", lambda *_: 5)
    assert vorox("train", "tiny.yaml", "--minutes", "0.5")[0] == 0
    (directory,) = runs()
    record = json.loads((directory / "run.json").read_text())
    record["attempts"][-1]["outcome"] = "killed"
    (directory / "run.json").write_text(json.dumps(record))
    for words in (["optimizer.lr=0.5"], ["--name", "other"], ["run.seed=3"], ["schedule.warmup_steps=2"]):
        assert vorox("train", "tiny.yaml", "--minutes", "0.5", *words)[0] == 0
    assert len(runs()) == 5
    assert len(run_attempts(directory)) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny.yaml", "--resum", "never"], "did you mean --resume?"),
        (["tiny.yaml", "--minute=3"], "did you mean --minutes?"),
        (["tiny.yaml", "--optimizer.lr"], "--optimizer.lr has no value"),
        (["tiny.yaml", "other.yaml"], "Unexpected argument 'other.yaml'"),
        (["tiny.yam"], "did you mean tiny.yaml?"),
        (["tiny.yaml", "optimizer.lrr=1"], "did you mean optimizer.lr?"),
        (["tiny.yaml", "--minutes", "0"], "not a valid training time"),
        (["--resume", "nothing"], "Run nothing not found: "),
        (["--resume", "runs/x/checkpoints/step-00000004"], "No such checkpoint"),
        (["--resume", "nothing", "--name", "x"], "keeps its name"),
        (["tiny.yaml", "run.directory=tiny.yaml"], "cannot be written"),
    ],
)
def test_refusals_leave_with_2_and_touch_nothing(vorox: Run, words: list[str], message: str) -> None:
    code, _, err = vorox("train", *words)
    assert code == 2
    assert message in err
    assert not Path("runs").exists()


def test_a_changed_architecture_is_refused_on_resume_and_nothing_is_lost(vorox: Run) -> None:
    assert vorox("train", "tiny.yaml")[0] == 0
    (directory,) = runs()
    before = (directory / "config.yaml").read_bytes(), chain_heads(directory)
    code, _, err = vorox("train", "--resume", directory.name, "model.num_layers=2")
    assert code == 2
    assert "model.num_layers: 1 -> 2" in err
    assert ((directory / "config.yaml").read_bytes(), chain_heads(directory)) == before
    assert vorox("train", "--resume", directory.name)[0] == 0


def test_a_run_in_use_is_refused(vorox: Run) -> None:
    from vorox.records.run_context import RunContext, recorded_config

    assert vorox("train", "tiny.yaml")[0] == 0
    (directory,) = runs()
    with RunContext.open(directory, recorded_config(directory)):
        code, _, err = vorox("train", "tiny.yaml")
    assert code == 2
    assert "is in use by process" in err


def test_a_failure_prints_four_lines_and_is_recorded(vorox: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = vorox("train", "tiny.yaml", "data.sources.0.paths=[missing/]")
    assert code == 4
    assert [line.split()[0] for line in err.strip().splitlines()] == ["x", "where", "saved", "do"]


def test_no_configuration_is_the_quickstart(vorox: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def fake(config: Any, **arguments: Any) -> Any:
        seen.append((config, arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr("vorox.cli.training.run.train_run", fake)
    code, out, _ = vorox("train", "model.num_layers=2")
    assert code == 130
    assert "Preset: quickstart" in out
    config, arguments = seen[0]
    assert config.run.name == "quickstart-llama-2x128"
    assert arguments["resume_from"] == "auto"


def test_a_dry_run_says_what_would_happen_and_writes_nothing(vorox: Run, prepared: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    code, out, err = vorox("train", "tiny.yaml", "--dry-run")
    assert code == 0, err
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*")} == before
    assert not Path("runs").exists()
    assert not Path("cache").exists()
    lines = {line.split(None, 1)[0]: line.split(None, 1)[1] for line in out.splitlines() if not line.startswith(" ")}
    assert lines["configuration"].startswith("tiny, digest ")
    assert lines["run"].endswith("(new)")
    assert "text: 1 file," in lines["data"]
    assert lines["tokenizer"] == "byte, 257 tokens: ready"
    assert "cache          text train: ready, " in out
    assert lines["batch"] == "4 rows = 2 x 2 rows x 1 device; 64 tokens per step"
    assert lines["length"].startswith("12 steps, 768 tokens, ")
    assert lines["checkpoints"] == "every 4 steps, at the end; validation every 6 steps, at the end"
    # 257 x 16 embedding, 2 norms a layer and 1 at the end, 4 x 16 x 16 attention and 3 x 64 x 16 MLP, by hand
    expected = {"embedding": 257 * 16, "norm": 3 * 16, "matrix": 4 * 16 * 16 + 3 * 64 * 16}
    for kind, number in {**expected, "total": sum(expected.values())}.items():
        assert any(line.split()[:2] == [kind, f"{number:,}"] for line in out.splitlines()), kind
    assert humanize.count(6 * (257 * 16 + expected["matrix"]) + 12 * 16 * 16) in out
    assert "memory" in lines


def test_a_dry_run_knows_what_is_missing(vorox: Run, tmp_path: Path) -> None:
    code, out, err = vorox("train", "tiny.yaml", "--dry-run", f"data.cache.directory={tmp_path / 'elsewhere'}")
    assert code == 0, err
    assert "cache          text train: not built yet" in out
    assert not (tmp_path / "elsewhere").exists()
    code, out, err = vorox("train", "tiny.yaml", "--dry-run", "tokenizer.kind=char")
    assert code == 0, err
    assert "vocabulary from the text: not trained yet" in out


def test_a_dry_run_knows_what_is_held_out(vorox: Run) -> None:
    code, out, err = vorox("train", "tiny.yaml", "--dry-run")
    assert code == 0, err
    assert "validation     16.7% of the documents of text" in out, "10 of 60; the setting is 10%"
    code, out, err = vorox("train", "tiny.yaml", "--dry-run", "data.validation.split=file")
    assert code == 2
    assert "data.validation.held_out_fraction=0" in err
    code, out, err = vorox(
        "train", "tiny.yaml", "--dry-run", "data.validation.split=file", "data.validation.held_out_fraction=0"
    )
    assert code == 0, err
    assert "validation     nothing of text" in out
    assert "validation never" in out


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["parallel.tensor_parallel_size=3"], "model.num_heads = 2 is not divisible by tensor_parallel_size = 3"),
        (["parallel.pipeline_parallel_size=2"], "1 layer cannot be divided into 2 stages"),
        (["parallel.context_parallel_size=4"], "model.num_heads = 2 is not divisible by context_parallel_size = 4"),
    ],
    ids=["tensor parallel", "pipeline parallel", "context parallel"],
)
def test_a_dry_run_knows_what_devices_cannot_divide(vorox: Run, settings: list[str], named: str) -> None:
    code, _, err = vorox("train", "tiny.yaml", "--dry-run", *settings)
    assert code == 2
    assert named in err


def test_a_dry_run_is_one_process(vorox: Run) -> None:
    code, _, err = vorox("train", "tiny.yaml", "--dry-run", "--nproc", "2")
    assert code == 2
    assert "remove --nproc" in err


def test_a_dry_run_sees_the_run_that_it_would_go_on_with(vorox: Run) -> None:
    assert vorox("train", "tiny.yaml")[0] == 0
    (directory,) = runs()
    assert f"{directory} (resume from step 12)" in vorox("train", "tiny.yaml", "--dry-run")[1]
    assert f"{directory}-2 (new)" in vorox("train", "tiny.yaml", "--dry-run", "--resume", "never")[1]
    assert "(resume from step 12)" in vorox("train", "--dry-run", "--resume", "latest")[1]


@pytest.mark.parametrize(
    ("override", "code", "message"),
    [
        ("data.sources.0.paths=[missing/]", 4, "missing"),
        ("model.num_heads=3", 2, "not divisible"),
        ("data.sources.0.weight=-1", 2, "not positive"),
    ],
)
def test_a_dry_run_ends_as_the_run_would(vorox: Run, override: str, code: int, message: str) -> None:
    found, _, err = vorox("train", "tiny.yaml", "--dry-run", override)
    assert found == code
    assert message in err


def test_a_model_that_does_not_fit_leaves_with_3(vorox: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    monkeypatch.setattr("tiny_runs.NumpyEngine.environment", lambda self: {"device_kind": "cpu"})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"total": 1000})())
    code, _, err = vorox("train", "tiny.yaml", "--dry-run")
    assert code == 3
    assert "model.num_layers or model.hidden_size" in err
    assert "micro_batch_sequences" not in err, "no batch is small enough"


def test_an_edited_configuration_counts_only_where_the_command_says_it(vorox: Run) -> None:
    assert vorox("train", "tiny.yaml")[0] == 0
    (directory,) = runs()
    path = directory / "config.yaml"
    path.write_text(path.read_text().replace("  lr: 0.01", "  lr: 0.03"))
    for dry in ((), ("--dry-run",)):
        code, _, err = vorox("train", "--resume", directory.name, "train.num_steps=14", *dry)
        assert code == 2
        assert f"vorox train --resume {directory.name} optimizer.lr=0.03" in err
        code, _, err = vorox("train", "--resume", directory.name, "train.num_steps=2", "optimizer.lr=0.01", *dry)
        assert code == 2
        assert "train.num_steps" in err
    code, _, err = vorox("train", "--resume", directory.name, "train.num_steps=14", "optimizer.lr=0.03", "--dry-run")
    assert code == 0, err
    code, _, err = vorox("train", "--resume", directory.name, "train.num_steps=14", "optimizer.lr=0.03")
    assert code == 0, err
    assert max(chain_heads(directory)) == 14
