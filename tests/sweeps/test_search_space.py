"""Distributions as written, against the values that they stand for; and everything that is refused before a start."""

from __future__ import annotations

from pathlib import Path

import pytest

from vorox.cli import main
from vorox.core.errors import ConfigError
from vorox.sweeps.search_space import Parameter, all_combinations, extreme_combinations, parse_parameter, read_space


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("lr", "loguniform(1e-4, 1e-2)", Parameter("optimizer.lr", low=1e-4, high=1e-2, is_log=True)),
        ("optimizer.lr", " uniform( 0,1 ) ", Parameter("optimizer.lr", low=0.0, high=1.0)),
        ("model.num_layers", "uniform(2, 12)", Parameter("model.num_layers", low=2, high=12, is_integer=True)),
        ("schedule.warmup_steps", "loguniform(1, 1e3)",
         Parameter("schedule.warmup_steps", low=1, high=1000, is_log=True, is_integer=True)),
        ("schedule.name", "choice(cosine, constant)", Parameter("schedule.name", choices=("cosine", "constant"))),
        ("optimizer.clip_norm", "choice(null, 1.0)", Parameter("optimizer.clip_norm", choices=(None, 1.0))),
        ("model.preset", "choice(tiny, small)", Parameter("model.preset", choices=("tiny", "small"))),
    ],
)  # fmt: skip
def test_distributions(key: str, text: str, expected: Parameter) -> None:
    assert parse_parameter(key, text, where="test") == expected
    assert parse_parameter(expected.key, str(expected), where="test") == expected


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("optimizer.lrr=choice(1, 2)", "Unknown setting optimizer.lrr"),
        ("optimizer=choice(1, 2)", "optimizer is a section"),
        ("optimizer.lr=lognormal(1e-4, 1e-2)", "Unknown distribution lognormal"),
        ("optimizer.lr=loguniform(0, 1)", "needs 0 < LOW < HIGH"),
        ("optimizer.lr=uniform(2, 1)", "needs LOW < HIGH"),
        ("optimizer.lr=uniform(1e-3)", "needs two finite numbers"),
        ("optimizer.lr=uniform(0, .inf)", "needs two finite numbers"),
        ("optimizer.lr=choice(1e-3)", "at least two different values"),
        ("optimizer.lr=choice(1e-3, 0.001)", "at least two different values"),
        ("optimizer.name=uniform(1, 3)", "optimizer.name is not a number"),
        ("model.num_layers=uniform(1.5, 3)", "model.num_layers is an integer"),
        ("tokenizer.kind=choice(byte, bpe)", "changes what the validation loss measures"),
        ("data.validation.held_out_fraction=uniform(0.1, 0.2)", "changes what the validation loss measures"),
        ("log.every_steps=choice(1, 2)", "does not change the trained weights"),
        ("optimizer.lr=uniform(-1, 1)", "optimizer.lr"),
        ("optimizer.beta1=choice(0.9, 1.5)", "optimizer.beta1"),
        ("optimizer.name=choice(adamw, adamx)", "adamx"),
        ("model.hidden_size=choice(64, 65)", "not divisible"),
    ],
)
def test_a_wrong_space_is_refused_before_anything_starts(
    word: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "quickstart", "eval.every_steps=10", word]) == 2
    assert what in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["quickstart"], "No setting is searched"),
        (["quickstart", "lr=choice(1e-3, 1e-2)", "optimizer.lr=1e-3"], "optimizer.lr is set and searched"),
        (["quickstart", "lr=choice(1e-3, 1e-2)", "optimizer.lr=choice(1, 2)"], "optimizer.lr has two distributions"),
        (["lr=choice(1e-3, 1e-2)"], "No configuration is named"),
        (["quickstart", "lr=choice(1e-3, 1e-2)", "eval.every_steps=null"], "eval.every_steps=null"),
        (["quickstart", "lr=choice(1e-3, 1e-2)", "eval.at_end=false", "eval.every_steps=5"], "at their end"),
        (["quickstart", "--space", "missing.yaml"], "Search space cannot be read"),
        (["quickstart", "--trial", "3"], "Unknown option --trial"),
    ],
)
def test_a_wrong_command_is_refused(
    words: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *words]) == 2
    assert what in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_of_settings(tmp_path: Path) -> None:
    file = tmp_path / "lr.yaml"
    file.write_text(
        "optimizer.lr: loguniform(1e-4, 1e-2)  # a comment\nmodel:\n  num_layers: choice(2, 4)\n", encoding="utf-8"
    )
    assert [str(parameter) for parameter in read_space(file)] == ["loguniform(0.0001, 0.01)", "choice(2, 4)"]
    file.write_text("optimizer.lr: 1e-3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"optimizer.lr has no distribution: 0\.001"):
        read_space(file)
    file.write_text("optimizer.lr: choice(1, 2)\noptimizer.lr: choice(3, 4)\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"lr\.yaml:2"):
        read_space(file)


def test_combinations() -> None:
    layers = Parameter("model.num_layers", low=2, high=4, is_integer=True)
    names = Parameter("optimizer.name", choices=("adamw", "muon"))
    lr = Parameter("optimizer.lr", low=1e-4, high=1e-2, is_log=True)
    points = all_combinations([layers, names], 6)
    assert points is not None
    assert [tuple(point.values()) for point in points] == [(n, name) for n in (2, 3, 4) for name in ("adamw", "muon")]
    assert all_combinations([layers, names], 5) is None
    assert all_combinations([layers, lr], 1000) is None
    assert {tuple(point.values()) for point in extreme_combinations([layers, lr])} == {
        (n, value) for n in (2, 4) for value in (1e-4, 1e-2)
    }
    many = [Parameter(f"key{n}", choices=(0, 1)) for n in range(10)]
    spread = extreme_combinations(many)
    assert 32 <= len(spread) <= 64
    assert len({tuple(point.values()) for point in spread}) == len(spread)


def test_numbers_are_rounded_inside_the_range() -> None:
    lr = Parameter("optimizer.lr", low=1.00004e-4, high=1e-2)
    assert lr.rounded(0.00123456) == 0.001235
    assert lr.rounded(1.00004e-4) == lr.low
