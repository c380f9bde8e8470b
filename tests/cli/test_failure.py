"""Four lines, the exit code, and nothing secret."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vorox.cli.failure import report_failure
from vorox.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DoesNotFitError,
    LostRankError,
    NumericalError,
    Preempted,
    StalledError,
    VoroxError,
)
from vorox.core.user_code.extensions import load_function


@pytest.mark.parametrize(
    ("kind", "word", "code"),
    [
        (VoroxError, "crash", 1), (LostRankError, "lost rank", 1), (ConfigError, "configuration", 2),
        (DoesNotFitError, "does not fit", 3),
        (DataError, "data", 4), (CheckpointError, "checkpoint", 5), (StalledError, "stalled", 6),
        (NumericalError, "numerical", 7), (Preempted, "stopped", 75),
    ],
)  # fmt: skip
def test_every_kind_has_four_lines_and_its_code(
    kind: type[VoroxError], word: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    error = kind("it broke", where="file.yaml:3", saved="step 800 is safe", hint="vorox train x --resume auto")
    assert report_failure(error, ["train", "x"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        f"{'-' if code == 75 else 'x'} {word}: it broke  [exit {code}]",
        "  where   file.yaml:3",
        "  saved   step 800 is safe",
        "  do      vorox train x --resume auto",
    ]


def test_missing_parts_are_filled_in(capsys: pytest.CaptureFixture[str]) -> None:
    report_failure(ConfigError("wrong"), ["train", "--db.password", "hunter2"])
    assert capsys.readouterr().err.splitlines()[1:] == [
        "  where   vorox train --db.password [redacted]",
        "  saved   -",
        "  do      correct it and run the same command again",
    ]


def crash(secret: str) -> None:
    raise ZeroDivisionError(f"divided by {secret}")


def test_a_crash_leaves_its_traceback_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VOROX_CACHE", str(tmp_path))
    try:
        crash("postgresql://alice:CANARY@db/x")
    except ZeroDivisionError as error:
        report_failure(error, ["train"])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "x crash: ZeroDivisionError: divided by postgresql://[redacted]@db/x  [exit 1]"
    assert re.fullmatch(r"  where   .*test_failure\.py:\d+ in crash", lines[1])
    (path,) = (tmp_path / "crashes").iterdir()
    assert str(path) in lines[3]
    text = path.read_text()
    assert "Traceback" in text
    assert "in crash" in text
    assert "CANARY" not in text


def test_a_crash_without_a_writable_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("VOROX_CACHE", str(blocker))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    try:
        crash("x")
    except ZeroDivisionError as error:
        report_failure(error, ["train"])
    assert re.search(rf"{tmp_path}/crash-\S+\.txt", capsys.readouterr().err.splitlines()[3])


def test_a_missing_permission_is_no_crash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = PermissionError(13, "Permission denied", str(tmp_path / "runs"))
    report_failure(error, ["runs", "list"])
    assert capsys.readouterr().err.splitlines()[:2] == [
        "x crash: Permission denied  [exit 1]",
        f"  where   {tmp_path / 'runs'}",
    ]


def test_a_function_that_takes_other_arguments_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("def attention(q): return q\n", encoding="utf-8")
    path = f"{tmp_path}/mine.py:attention"
    function = load_function(path, kind="attention", where="model.attention_kernel")
    with pytest.raises(TypeError) as caught:
        function(1, 2, is_causal=True)
    assert report_failure(caught.value, ["train", "x.yaml"]) == 2
    text = capsys.readouterr().err
    assert f"The function of model.attention_kernel={path} is called with other arguments than it takes" in text
    assert "docs/extending.md" in text
    assert "report" not in text
