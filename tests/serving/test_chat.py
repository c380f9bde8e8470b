"""``vorox chat``: lines through a pipe, and a conversation on a terminal."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

import tiny_runs
from eventually import PATIENCE_SECONDS
from vorox.api.model import Model, find_model
from vorox.cli import main
from vorox.data.documents import Message
from vorox.data.tokenizers.loading import load
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.training.inference.sampling import generate
from vorox.training.inference.text_generation import answer_stop_strings, encode_conversation
from vorox.training.materialize import StateNotices

pytest.importorskip("jinja2")

PROGRAM = """
import os, sys, time
sys.path.insert(0, os.environ["TESTS"])
import tiny_runs, vorox.run
from numpy_engine import NumpyDecoder
from vorox.cli import main
vorox.run.backends.load = lambda name: tiny_runs.NumpyBackend()
feed = NumpyDecoder.feed
def slow_feed(self, tokens):
    time.sleep(0.05)
    return feed(self, tokens)
NumpyDecoder.feed = slow_feed
sys.exit(main(sys.argv[1:]))
"""


def chat(
    run: Path, lines: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[str, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["chat", str(run), *words]) == 0
    said = capsys.readouterr()
    return said.out, said.err


def answers(model: Model, lines: list[str], seed: int) -> list[str]:
    """Whole completions of the rendered conversation, cut at the first text that ends an answer."""
    messages: list[Message] = []
    for line in lines:
        messages.append(Message("user", line))
        prompt = encode_conversation(model.tokenizer, messages)
        (ids,) = generate(model.engine, [prompt], model.sampling_settings(9, None, None, seed))
        text = model.tokenizer.decode(ids)
        ends = [text.find(end) for end in answer_stop_strings(model.tokenizer) if end in text]
        messages.append(Message("assistant", text[: min(ends, default=None)]))
    return [message.content for message in messages if message.role == "assistant"]


def printed(text: str) -> str:
    from vorox.cli.terminal.humanize import printable

    return printable(text) + "\n"


def test_lines_of_a_pipe(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = find_model(str(run), step=None, root="runs", device=None, notices=StateNotices())
    words = ("--tokens", "9", "--seed", "5")
    first, second = answers(model, ["hi", "and then"], seed=5)
    out, err = chat(run, "hi\n\nand then\n", monkeypatch, capsys, *words)
    assert out == printed(first) + printed(second)
    assert "its chat template" in err
    (other,) = answers(model, ["hi"], seed=6)
    lines = "hi\n/reset\nhi\n/reset\n/seed 6\nhi\n/quit\nhi\n"
    out, _ = chat(run, lines, monkeypatch, capsys, *words)
    assert out == printed(first) * 2 + printed(other)
    assert first != other


def test_mistakes_do_not_end_it(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = f"/seed x\n/temperature -1\n/temperature nan\n/color\n<|im_end|>\n{'long ' * 60}\n"
    out, err = chat(run, lines, monkeypatch, capsys)
    assert out == ""
    for text in ("/seed needs a number", "not '-1'", "not 'nan'", "Unknown command /color", "special token", "/reset"):
        assert text in err
    assert chat(run, f"{'long ' * 60}\nhi\n", monkeypatch, capsys, "--tokens", "3")[0].endswith("\n"), "as if not said"


def test_without_a_chat_template_it_continues_the_text(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load_without(path: Path, *, end_of_text: str | None) -> Tokenizer:
        tokenizer = load(path, end_of_text=end_of_text)
        tokenizer.chat_template = None
        return tokenizer

    monkeypatch.setattr("vorox.api.model.load_tokenizer", load_without)
    model = find_model(str(run), step=None, root="runs", device=None, notices=StateNotices())
    first = model.generate("a", num_tokens=4)
    second = model.generate(f"a{first}\nb", num_tokens=4)
    capsys.readouterr()
    out, err = chat(run, "a\nb\n", monkeypatch, capsys, "--tokens", "4")
    assert out == printed(first) + printed(second)
    assert "no chat template: it continues what you type" in err
    assert main(["chat", str(run), "--system", "be brief"]) == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="a pseudo-terminal of POSIX")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_ctrl_c_stops_the_answer_and_not_the_program(run: Path) -> None:
    pexpect = pytest.importorskip("pexpect", exc_type=ImportError)
    environment = {**os.environ, "TESTS": str(Path(tiny_runs.__file__).parent), "TERM": "dumb"}
    process = pexpect.spawn(
        sys.executable, ["-c", PROGRAM, "chat", str(run), "--tokens", "200"], encoding="utf-8",
        timeout=PATIENCE_SECONDS, env=environment,
    )  # fmt: skip
    try:
        process.expect_exact("> ")
        process.sendline("hi")
        process.expect_exact("hi\r\n")
        process.expect(r"[^\r\n]")
        process.sendintr()
        process.expect_exact("[stopped]")
        process.expect_exact("> ")
        process.sendintr()
        process.expect_exact("Ctrl-D ends")
        process.expect_exact("> ")
        process.sendline("/seed 4")
        process.expect_exact("> ")
        process.sendeof()
        process.expect(pexpect.EOF)
        process.close()
        assert process.exitstatus == 0
    finally:
        process.close(force=True)
