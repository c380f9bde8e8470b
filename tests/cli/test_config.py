"""``vorox config``: what is printed is right, and what is mistyped is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vorox.cli.commands.config import app
from vorox.cli.settings.arguments import parse_arguments
from vorox.core.config import config_values, load_config
from vorox.core.errors import ConfigError
from vorox.records.run_context import RunContext

YAML = "preset: quickstart\noptimizer:\n  lr: 3e-4\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(YAML, encoding="utf-8")
    return tmp_path


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: str) -> ConfigError:
    result = CliRunner().invoke(app, list(arguments))
    assert isinstance(result.exception, ConfigError), result.output
    return result.exception


def test_show_prints_what_load_config_reads_back(folder: Path) -> None:
    text = printed("show", "my.yaml", "model.num_layers=2", "--train.num_tokens=1e6")
    Path("again.yaml").write_text(text, encoding="utf-8")
    assert load_config("again.yaml") == load_config("my.yaml", ["model.num_layers=2", "train.num_tokens=1e6"])


def test_show_with_origins() -> None:
    text = printed("show", "--origins", "my.yaml", "--seed=3".replace("seed", "run.seed"))
    assert "  lr: 0.0003  # my.yaml:3\n" in text
    assert "  seed: 3  # override --run.seed=3\n" in text


def test_show_as_json() -> None:
    assert json.loads(printed("show", "my.yaml", "--json")) == config_values(load_config("my.yaml"))


def test_explain_without_and_with_a_configuration() -> None:
    text = printed("explain", "optimizer.lr")
    assert text.splitlines()[:3] == ["optimizer.lr", "  Peak learning rate.", "  type      number, greater than 0"]
    assert "0.0003  (my.yaml:3)" in printed("explain", "optimizer.lr", "my.yaml")
    assert "0.1  (override optimizer.lr=0.1)" in printed("explain", "optimizer.lr", "my.yaml", "optimizer.lr=0.1")
    assert "schedule.warmup_steps" in printed("explain", "schedule")
    assert "needs     schedule.name=wsd" in printed("explain", "schedule.decay_fraction")
    assert "not part of the run's identity" in printed("explain", "log.every_steps")
    assert json.loads(printed("explain", "optimizer.lr", "my.yaml", "--json"))["values"][0]["value"] == 3e-4
    assert "did you mean optimizer.lr" in refused("explain", "optimiser.lr").hint


def test_schema_is_json() -> None:
    schema = json.loads(printed("schema"))
    assert {"preset", "model", "data", "train"} <= set(schema["properties"])
    assert "None:" not in json.dumps(schema)


def test_diff_marks_what_makes_another_run() -> None:
    text = printed("diff", "quickstart", "my.yaml", "log.every_steps=3")
    lr = load_config("quickstart").optimizer.lr
    assert f"* optimizer.lr: {lr} -> 0.0003\n" in text
    assert "  log.every_steps: 10 -> 3\n" in text
    assert printed("diff", "my.yaml", "my.yaml") == "No difference\n"
    found = json.loads(printed("diff", "quickstart", "my.yaml", "--json"))
    assert {"key": "optimizer.lr", "before": lr, "after": 3e-4, "changes_run": True} in found


def test_a_run_stands_for_its_recorded_configuration() -> None:
    with RunContext.create(load_config("my.yaml")) as run:
        pass
    for name in (run.run_id, str(run.directory), "latest"):
        assert printed("diff", name, "my.yaml") == "No difference\n"


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        (["show", "my.yaml", "--orgins"], "Unknown option --orgins", "--origins"),
        (["show", "my.yaml", "--optimizer.lr"], "Option --optimizer.lr has no value", "--optimizer.lr=VALUE"),
        (["show", "my.yaml", "more.yaml"], "Unexpected argument 'more.yaml'", ""),
        (["show", "my.yaml", "--lrr=3"], "Unknown option --lrr", "--lr"),
        (["show", "my.yaml", "-x"], "Unknown option -x", "options"),
        (["show", "missing.yaml"], "No preset or file missing.yaml", ""),
        (["diff", "my.yaml", "quickstrt"], "No preset or file quickstrt", "quickstart"),
    ],
)
def test_slips_are_refused(arguments: list[str], what: str, hint: str) -> None:
    error = refused(*arguments)
    assert what in error.what
    assert hint in error.hint
    assert error.exit_code == 2


def test_words_are_sorted() -> None:
    words = parse_arguments(["--a.b=1", "x.yaml", "c.d=2", "--backend=torch", "preset=y"], options=(), max_positional=1)
    assert words.positional == ("x.yaml",)
    assert words.overrides == ("--a.b=1", "c.d=2", "--backend=torch", "preset=y")
    words = parse_arguments(
        ["--config", "x.yaml", "--lr", "1e-3", "--batch-size=8", "--eval.x", "-1", "--data=t.txt", "--data", "u/"],
        options=(), max_positional=1,
    )  # fmt: skip
    assert (words.positional, words.data) == (("x.yaml",), ("t.txt", "u/"))
    assert words.overrides == ("--lr=1e-3", "--batch_size=8", "--eval.x=-1")
    assert parse_arguments(["--data={mode: cached}"], options=(), max_positional=0).overrides == (
        "--data={mode: cached}",
    )
    assert parse_arguments(["configs/a=b.yaml"], options=(), max_positional=1).positional == ("configs/a=b.yaml",)


def test_without_a_key_the_sections_are_listed() -> None:
    text = printed("explain")
    for section in ("model", "optimizer", "data", "train", "eval", "run"):
        assert re.search(rf"^{section} +\S", text, re.MULTILINE), section
    assert "vorox config explain SECTION" in text
    assert json.loads(printed("explain", "--json"))["optimizer"]


def test_a_default_that_depends_on_the_training_is_explained() -> None:
    text = printed("explain", "optimizer.lr")
    assert "2e-05 for full fine-tuning" in text
    assert "0.0002 for LoRA" in text
    words = ("explain", "optimizer.lr", "my.yaml", "train.from_weights=gs://bucket/run")
    assert "0.0003  (my.yaml:3)" in printed(*words), "what the file sets stays"


@pytest.mark.parametrize(("command", "page"), [("reference", "settings.md"), ("support", "support.md")])
def test_a_generated_page_is_current(command: str, page: str) -> None:
    path = Path(__file__).parents[2] / "docs" / page
    assert path.read_text(encoding="utf-8") == printed(command), f"vorox config {command} > docs/{page}"
