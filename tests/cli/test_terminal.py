"""What others wrote cannot operate the terminal: no control sequence is printed, on a terminal or through a pipe."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vorox.cli import main
from vorox.cli.terminal.humanize import printable_line
from vorox.cli.terminal.standard_streams import ResilientStream, raw_stream

TITLE, CLEAR, CLIPBOARD = "\x1b]0;title\x07", "\x1b[2J\x1b[H", "\x1b]52;c;ZXZpbA==\x07"
HOSTILE = {
    "title": TITLE, "clear": CLEAR, "clipboard": CLIPBOARD, "8-bit": "\x9b2J", "string": "\x1bP1$r\x1b\\",
    "hidden": "\x1b[8mhidden\x1b[0m", "hidden too": "\x1b[1;8m", "line": "a\rb", "back": "a\x08\x08b", "delete": "\x7f",
    "right to left": "\u202egpj.exe", "isolate": "\u2066a\u2069", "mark": "\u200f", "separator": "\u2028",
    "surrogate": "\udcff",
}  # fmt: skip
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("stream_class", [io.StringIO, Terminal])
def test_no_control_sequence_passes_the_stream(kind: str, stream_class: type[io.StringIO]) -> None:
    real = stream_class()
    stream = ResilientStream(real, is_needed=True)
    text = f"before {HOSTILE[kind]} after\n"
    assert stream.write(text) == len(text)
    found = re.sub(r"\x1b\[0m", "", real.getvalue()) if stream_class is Terminal else real.getvalue()
    assert not CONTROL.search(found), repr(found)
    assert found.startswith("before ")
    assert found.endswith(" after\n")


def test_colours_are_for_terminals_and_displays_move_the_cursor() -> None:
    red = "\x1b[1;31mx\x1b[0m\ty\n"
    terminal, pipe = Terminal(), io.StringIO()
    ResilientStream(terminal, is_needed=True).write(red)
    ResilientStream(pipe, is_needed=True).write(red)
    assert terminal.getvalue() == red
    assert "\x1b" not in pipe.getvalue()
    display = Terminal()
    raw_stream(ResilientStream(display, is_needed=True)).write("\r\x1b[2K")  # pyright: ignore[reportArgumentType]
    assert display.getvalue() == "\r\x1b[2K"


def test_a_stream_that_has_no_replacement_character_gets_a_question_mark() -> None:
    raw = io.BytesIO()
    real = io.TextIOWrapper(raw, encoding="ascii")
    stream = ResilientStream(real, is_needed=True)
    stream.write(f"a{TITLE}b\n")
    stream.flush()
    assert raw.getvalue() == b"a?]0;title?b\n"


def test_a_name_is_one_line() -> None:
    assert printable_line("a\nrun  finished\tb") == "a\ufffdrun  finished b"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose name and files are full of control sequences."""
    monkeypatch.chdir(tmp_path)
    evil = "".join(HOSTILE[kind] for kind in ("title", "clear", "clipboard", "8-bit", "right to left", "hidden"))
    run = tmp_path / "runs" / f"evil-{evil.replace('/', '')}"
    run.mkdir(parents=True)
    attempt = {"attempt": 1, "outcome": "failed", "started_at": evil, "ended_at": evil, "argv": ["vorox", evil]}
    (run / "run.json").write_text(json.dumps({"attempts": [attempt]}))
    failure = {"what": evil, "where": evil, "saved": evil, "hint": evil, "exit_code": 1}
    (run / "failure.json").write_text(json.dumps(failure))
    verdict = {"kind": "replay", "passed": True, "text": evil, "time": evil}
    (run / "verdicts.jsonl").write_text(json.dumps(verdict) + "\n")
    (run / "checkpoints" / "step-00000004").mkdir(parents=True)
    (run / "checkpoints" / "step-00000004" / "MANIFEST.json").write_text(evil)
    (run / "config.yaml").write_text(f'train: {{"{TITLE.encode().hex()}": 1}}\n')
    return tmp_path / "runs"


COMMANDS = [
    ["runs", "list"], ["runs", "show", "{run}"], ["runs", "show", "{run}", "--json"], ["checkpoints", "list", "{run}"],
    ["checkpoints", "verify", "{run}"], ["runs", "show", f"none{TITLE}"], [f"none{TITLE}"],
    ["train", f"a{CLIPBOARD}.yaml"], ["train", f"x{TITLE}=1"], ["runs", "record", "{run}"],
    ["data", "where", "{run}", "--step", "1"],
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_no_command_prints_one(number: int, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = root.iterdir()
    main([str(run) if word == "{run}" else word for word in COMMANDS[number]])
    printed = "".join(capsys.readouterr())
    assert printed
    assert not CONTROL.search(printed), repr(CONTROL.findall(printed))


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_a_real_terminal_gets_colours_at_most(root: Path) -> None:
    import pty

    (run,) = root.iterdir()
    ours, theirs = pty.openpty()
    words = [sys.executable, "-P", "-m", "vorox", "runs", "show", str(run)]
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, cwd=root.parent) as process:
        os.close(theirs)
        printed = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:
                break
            if not part:
                break
            printed += part
        process.wait()
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;]*m", "", printed.decode().replace("\r\n", "\n"))
    assert "attempts" in text
    assert not CONTROL.search(text), repr(text)
