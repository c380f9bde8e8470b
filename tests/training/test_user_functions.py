"""Functions of the user in a run: schedule, metric, sink, evaluation; called as documented, reported when changed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
import vorox
from vorox.core.config import load_config
from vorox.core.errors import ConfigError
from vorox.core.schema import OptimizerConfig, ScheduleConfig
from vorox.training.replay import replay
from vorox.training.steps.schedule import Horizon, Schedule
from vorox.training.user_functions import changed_functions, identities

FUNCTIONS = """
import math


def falling(step, total_steps, warmup_steps):
    return (total_steps - step) / total_steps


def loss_in_bits(step, values):
    return values["loss"] / math.log(2)


def several(step, values):
    return {"twice": 2 * values["loss"], "step": step}


def next_letter(model):
    token = model.tokenizer.encode_batch(["t"])[0]
    letters = len(model.generate("the ", num_tokens=4))
    return {"logit": model.logits(token)[-1, 104], "letters": letters, "at": model.step}


def breaks(*arguments):
    raise RuntimeError("as it does")


class Lines:
    name = "lines"

    def __init__(self, path, settings):
        self.file, self.settings = path.open("a"), settings

    def write(self, step, values):
        self.file.write(f"{step} {values['loss']}\\n")

    def flush(self):
        self.file.flush()

    def close(self):
        self.file.close()


def lines(run_directory, resume_step, settings):
    return Lines(run_directory / f"lines-from-{resume_step}.txt", settings)


def no_sink(**arguments):
    return object()
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_runs.use_numpy_engine(monkeypatch)
    (tmp_path / "mine.py").write_text(FUNCTIONS, encoding="utf-8")
    return tmp_path / "mine.py"


def run(directory: Path, overrides: Sequence[str], **arguments: Any) -> Path:
    return tiny_runs.run(tiny_runs.configuration(directory, overrides), **arguments).run_directory


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_schedule(tmp_path: Path, functions: Path) -> None:
    settings = [f"schedule.name={functions}:falling", f"schedule.weight_decay={functions}:falling"]
    directory = run(tmp_path, settings)
    rates = {step: values["learning_rate"] for step, values in vorox.open_run(directory).metrics().items()}
    decays = {step: values["weight_decay"] for step, values in vorox.open_run(directory).metrics().items()}
    expected = {step: 0.01 * ((step / 3) if step <= 3 else (12 - (step - 1)) / 12) for step in (1, 2, 4, 6, 8, 10, 12)}
    assert rates == pytest.approx(expected)
    assert decays == pytest.approx({step: 0.1 * (12 - (step - 1)) / 12 for step in expected})


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.5])
def test_a_schedule_that_returns_no_share_is_refused(value: float, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(f"def shape(*arguments):\n    return float('{value}')\n")
    config = ScheduleConfig.model_validate({"name": f"{tmp_path}/wrong.py:shape"})
    schedule = Schedule.from_config(config, OptimizerConfig(), Horizon(10, 0, 1))
    with pytest.raises(ConfigError, match="for step 4 of 10"):
        schedule.lr(4)


def test_metrics_sinks_and_evaluations(tmp_path: Path, functions: Path) -> None:
    settings = [
        f"log.metrics=['{functions}:loss_in_bits', '{functions}:several']", f"log.sinks=['{functions}:lines']",
        f"eval.functions=['{functions}:next_letter']",
    ]  # fmt: skip
    directory = run(tmp_path, settings)
    found = vorox.open_run(directory).metrics()
    for step in (1, 2, 12):
        values = found[step]
        assert values["custom/loss_in_bits"] == pytest.approx(values["loss"] / math.log(2))
        assert (values["custom/several/twice"], values["custom/several/step"]) == (2 * values["loss"], step)
    evaluation = lines_of(directory / "evaluations.jsonl")[-1]
    assert evaluation["custom"]["eval/custom/next_letter/at"] == 12
    assert evaluation["custom"]["eval/custom/next_letter/logit"] == found[12]["eval/custom/next_letter/logit"]
    model = vorox.load_model(directory)
    token = model.tokenizer.encode_batch(["t"])[0]
    assert found[12]["eval/custom/next_letter/logit"] == pytest.approx(model.logits(token)[-1, 104], rel=1e-5)
    written = [line.split() for line in (directory / "lines-from-0.txt").read_text().splitlines()]
    assert {int(step): float(loss) for step, loss in written if step != "None"} == {
        step: values["loss"] for step, values in found.items() if "loss" in values
    }


def test_measuring_changes_no_bit(tmp_path: Path, functions: Path) -> None:
    plain = tiny_runs.run(tiny_runs.configuration(tmp_path / "plain")).fingerprint
    measured = tiny_runs.configuration(
        tmp_path / "measured",
        [f"log.metrics=['{functions}:several']", f"eval.functions=['{functions}:next_letter']"],
    )
    assert tiny_runs.run(measured).fingerprint == plain


def test_what_fails_is_reported_once_and_stops_nothing(tmp_path: Path, functions: Path) -> None:
    directory = run(tmp_path, [f"log.metrics=['{functions}:breaks']", f"eval.functions=['{functions}:breaks']"])
    log = (directory / "log.txt").read_text()
    assert log.count("The metric breaks failed (RuntimeError: as it does)") == 1
    assert log.count("The evaluation breaks failed (RuntimeError: as it does)") == 1
    assert len(lines_of(directory / "chain.jsonl")) == 12


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (["schedule.name=nowhere.module:shape"], "Cannot import schedule nowhere.module:shape"),
        (["schedule.name=no/such/file.py:shape"], "Cannot import schedule no/such/file.py:shape"),
        (["schedule.name={file}:FUNCTIONS"], "Cannot import"),  # no such name
        (["log.sinks=['{file}:no_sink']"], "has no name and no write and no flush and no close"),
        (["log.sinks=['{file}:breaks']"], "cannot be opened"),
        (["log.metrics=['{file}:several', '{file}:several']"], "2 functions named several"),
    ],
)
def test_what_cannot_work_is_refused(settings: list[str], what: str, tmp_path: Path, functions: Path) -> None:
    with pytest.raises(ConfigError, match=what) as refused:
        run(tmp_path, [setting.replace("{file}", str(functions)) for setting in settings])
    assert refused.value.hint
    assert refused.value.where.startswith(("schedule.name", "log."))


def test_a_misspelled_function_is_refused_with_the_nearest(tmp_path: Path, functions: Path) -> None:
    with pytest.raises(ConfigError, match="has no function fallin") as refused:
        run(tmp_path, [f"schedule.name={functions}:fallin"])
    assert "falling" in refused.value.hint


def test_a_function_whose_module_imports_it_late_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("def __getattr__(name):\n    raise ImportError(f'{name} needs a backend')\n")
    with pytest.raises(ConfigError, match=r"Cannot import schedule .*: ImportError: shape needs a backend"):
        run(tmp_path, [f"schedule.name={tmp_path / 'late.py'}:shape"])


def test_other_words_are_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"one of cosine, linear, wsd, constant, hold or package.module:function"):
        load_config("quickstart", ["schedule.name=sinus"])
    with pytest.raises(ConfigError, match=r"eval.functions.0=\"mine\" must be package.module:function"):
        load_config("quickstart", ["eval.functions=[mine]"])


def test_a_function_that_changed_is_reported_by_resume_and_replay(tmp_path: Path, functions: Path) -> None:
    settings = [f"schedule.name={functions}:falling", f"eval.functions=['{functions}:next_letter']"]
    directory = run(tmp_path, settings)
    log = directory / "log.txt"
    run(tmp_path, [*settings, "train.num_steps=13"], resume_from=directory)
    assert "Functions changed" not in log.read_text()
    changed = FUNCTIONS.replace("(total_steps - step) / total_steps", "0.5")
    functions.write_text(changed, encoding="utf-8")
    run(tmp_path, [*settings, "train.num_steps=14"], resume_from=directory)
    text = log.read_text()
    assert "Functions changed since step 13" in text
    assert "schedule.name (mine.py:falling)" in text
    assert "eval.functions.0 (mine.py:next_letter)" in text

    def make_workload(config: Any) -> Any:
        from vorox.core.ranks.distributed_context import DistributedContext
        from vorox.records.log import RunLog

        return vorox.run.make_workload(config, DistributedContext(), RunLog(None), None, build=False)

    report = replay(directory, make_workload, last_step=12)
    assert report.difference is not None  # the learning rates are other ones now
    assert "schedule.name (mine.py:falling)" in str(report)


def test_a_function_with_a_version_may_be_edited(tmp_path: Path, functions: Path) -> None:
    versioned = "from vorox.core.user_code.extensions import version\n\n" + FUNCTIONS.replace(
        "def falling", "@version(3)\ndef falling"
    )
    functions.write_text(versioned, encoding="utf-8")
    settings = [f"schedule.name={functions}:falling"]
    directory = run(tmp_path, settings)
    functions.write_text(versioned + "\n# a remark\n", encoding="utf-8")
    run(tmp_path, [*settings, "train.num_steps=13"], resume_from=directory)
    assert "Functions changed" not in (directory / "log.txt").read_text()
    functions.write_text(versioned.replace("@version(3)", "@version(4)"), encoding="utf-8")
    run(tmp_path, [*settings, "train.num_steps=14"], resume_from=directory)
    assert "was version 3, is version 4" in (directory / "log.txt").read_text()


@pytest.mark.parametrize(
    "keys",
    [
        ("model.activation", "model.attention_kernel", "model.mlp", "optimizer.name", "train.forward_backward"),
        ("model.block", "loss.name", "schedule.name"),
        ("model.kind",),
    ],
)
def test_parts_of_the_model_and_the_loss_are_recorded(tmp_path: Path, functions: Path, keys: tuple[str, ...]) -> None:
    config = tiny_runs.configuration(tmp_path, [f"{key}={functions}:falling" for key in keys])
    before = identities(config)
    assert set(before) == set(keys)
    functions.write_text(FUNCTIONS + "\n# a remark\n", encoding="utf-8")
    changes = changed_functions({"functions": before}, config)
    assert [change.split(" ")[0] for change in changes] == list(before)


def test_a_loss_function_has_no_smoothing(tmp_path: Path, functions: Path) -> None:
    with pytest.raises(ConfigError, match=r"loss\.label_smoothing_fraction"):
        tiny_runs.configuration(tmp_path, [f"loss.name={functions}:breaks", "loss.label_smoothing_fraction=0.1"])
