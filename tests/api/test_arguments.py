"""Arguments of the Python API: what ``display`` may be, and that a wrong argument is a VoroxError which names it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import tiny_runs
import vorox
from vorox.api.displays import ProgressLines, summary
from vorox.training.loop.display import StepView

STEPS = 12


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    tiny_runs.use_numpy_engine(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tiny_runs.configuration(tmp_path, ["log.every_steps=4"])


def test_a_function_receives_every_logged_step(config: Any) -> None:
    seen: list[StepView] = []
    vorox.train(config, display=seen.append)
    assert [view.step for view in seen] == [1, 4, 8, STEPS]
    assert all(view.total_steps == STEPS for view in seen)


def test_an_object_has_the_methods_that_it_needs(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    class Mine:
        def __init__(self) -> None:
            self.steps: list[int] = []
            self.messages: list[str] = []

        def step(self, view: StepView) -> None:
            self.steps.append(view.step)
            if view.step == 8:
                raise RuntimeError("mine")

        def message(self, text: str, level: str) -> None:
            self.messages.append(f"{level}: {text}")

    mine = Mine()
    outcome = vorox.train(config, display=mine)
    assert outcome.progress.step == STEPS, "a display that fails does not end the run"
    assert mine.steps == [1, 4, 8]
    assert any("Step 1 loss" in text for text in mine.messages)
    assert "display.step raised RuntimeError: mine" in capsys.readouterr().err


def test_true_prints_lines_and_the_default_and_false_nothing(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    vorox.train(config, display=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Step ")]
    assert lines[0].startswith(f"Step 1/{STEPS} | loss ")
    assert lines[-1].startswith(f"Step {STEPS}/{STEPS} | loss ")
    for choice in (None, False):
        vorox.train(config, display=choice, resume_from="never")
        assert capsys.readouterr() == ("", "")


def test_lines_come_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    display = ProgressLines(sys.stdout, clock=lambda: now[0])
    for step in range(1, 101):
        display.step(StepView(step, 100, 2.0, step, 100, 1e-3, 1.0, eta_seconds=4000.0))
        now[0] += 1.0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "Step 6/100 | loss 2 | lr 0.001 | 1:06:40 left"
    assert len(lines) == 21


class Notebook:
    """IPython in the kernel of a notebook, as far as a bar needs it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shown: list[dict[str, str]] = []
        self.updates = 0
        module, output = ModuleType("IPython"), ModuleType("IPython.display")
        module.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
        output.display = self.display  # type: ignore[attr-defined]
        module.display = output  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", module)
        monkeypatch.setitem(sys.modules, "IPython.display", output)

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> Notebook:
        assert raw
        assert display_id
        self.shown.append(bundle)
        return self

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.updates += 1
        self.shown.append(bundle)


@pytest.mark.parametrize("choice", [None, True])
def test_a_notebook_shows_one_bar_that_is_updated(choice: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook(monkeypatch)
    vorox.train(config, display=choice)
    assert len(notebook.shown) == notebook.updates + 1, "one output, then updates"
    last = notebook.shown[-1]
    assert f'<progress value="{STEPS}" max="{STEPS}"' in last["text/html"]
    assert last["text/plain"].startswith(f"Step {STEPS}/{STEPS} | loss ")


def test_a_summary_leaves_out_what_is_not_known() -> None:
    assert summary(StepView(1, 9, 2.5, 1, 9, 1e-4, 1.0)) == "Step 1/9 | loss 2.5 | lr 0.0001"


WRONG: dict[str, Callable[[], object]] = {
    "display": lambda: vorox.train("quickstart", display=5),
    "display class": lambda: vorox.train("quickstart", display=ProgressLines),
    "config": lambda: vorox.train(5),  # type: ignore[arg-type]
    "overrides": lambda: vorox.train("quickstart", "train.num_steps=1"),
    "overrides number": lambda: vorox.train("quickstart", 3),  # type: ignore[arg-type]
    "overrides entry": lambda: vorox.train("quickstart", [3]),  # type: ignore[list-item]
    "resume_from": lambda: vorox.train("quickstart", resume_from=5),  # type: ignore[arg-type]
    "minutes": lambda: vorox.train("quickstart", minutes="3"),  # type: ignore[arg-type]
    "taps": lambda: vorox.train("quickstart", taps=[print]),  # type: ignore[list-item]
    "taps function": lambda: vorox.train("quickstart", taps=print),  # type: ignore[arg-type]
    "on_progress": lambda: vorox.train("quickstart", on_progress=3),  # type: ignore[arg-type]
    "load_config": lambda: vorox.load_config(5),  # type: ignore[arg-type]
    "load_config list": lambda: vorox.load_config(["a"]),  # type: ignore[arg-type]
    "open_run": lambda: vorox.open_run(5),  # type: ignore[arg-type]
    "open_run none": lambda: vorox.open_run(None),  # type: ignore[arg-type]
    "open_run root": lambda: vorox.open_run("x", root=3),  # type: ignore[arg-type]
    "open_run absent": lambda: vorox.open_run("absent"),
    "load_model": lambda: vorox.load_model(5),  # type: ignore[arg-type]
    "load_model step": lambda: vorox.load_model("x", step="3"),  # type: ignore[arg-type]
    "load_model weights": lambda: vorox.load_model("x", weights="best"),  # type: ignore[arg-type]
    "create_model": lambda: vorox.create_model(5),  # type: ignore[arg-type]
    "create_model device": lambda: vorox.create_model("quickstart", device=3),  # type: ignore[arg-type]
    "load_quantized": lambda: vorox.load_quantized("absent"),
    "load_quantized number": lambda: vorox.load_quantized(3),  # type: ignore[arg-type]
    "dataset": lambda: vorox.dataset(5),  # type: ignore[arg-type]
    "dataset entries": lambda: vorox.dataset([5]),  # type: ignore[list-item]
    "dataset epochs": lambda: vorox.dataset("x", epochs=0),
    "dataset rank": lambda: vorox.dataset("x", rank=-1),
    "dataset batch": lambda: vorox.dataset("x", batch_size="2"),  # type: ignore[arg-type]
    "dataset weights": lambda: vorox.dataset("x", weights=[1]),  # type: ignore[arg-type]
    "dataset state": lambda: vorox.dataset("x", state=3),  # type: ignore[arg-type]
    "dataset length": lambda: vorox.dataset("x", sequence_length_tokens="64"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_a_vorox_error(
    call: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(vorox.VoroxError) as caught:
        call()
    assert str(caught.value)


def test_wrong_arguments_of_a_run_are_vorox_errors(config: Any) -> None:
    run = vorox.open_run(vorox.train(config).run_directory)
    calls: list[Callable[[], object]] = [
        lambda: list(run.batches(0)), lambda: list(run.batches("1")),  # type: ignore[arg-type]
        lambda: list(run.batches(1, 0)), lambda: list(run.batches(1, 10**6)),
        lambda: run.where("1"), lambda: run.where(0), lambda: run.where(1, -1),  # type: ignore[arg-type]
        lambda: run.where(10**6), lambda: run.when(3), lambda: run.when("text", -1),  # type: ignore[arg-type]
        lambda: run.when("text", ordinal="0"),  # type: ignore[arg-type]
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(vorox.VoroxError):
            call()


def test_steps_of_batches_count_from_1_as_those_of_queries(config: Any) -> None:
    run = vorox.open_run(vorox.train(config).run_directory)
    assert [batch.step for batch in run.batches(1, 3)] == [1, 2, 3]
    assert [batch.step for batch in run.batches(STEPS, 1)] == [STEPS]


def test_the_module_lists_only_its_names() -> None:
    assert dir(vorox) == sorted(vorox.__all__)
