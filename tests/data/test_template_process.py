"""Hostile chat templates: a limit of time or memory refuses a conversation by itself, and names it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

import chats
from vorox.data.chat import template_process
from vorox.data.chat.template import BUILT_IN, ChatTemplate, rendered, rendered_all
from vorox.data.chat.template_process import TemplateProcess
from vorox.data.documents import BadRecord, Document, Message

OTHER = BUILT_IN["chatml"].replace("for message in messages", "for message in messages ")
"""A template that Vorox did not write."""
ON_BAD = "{% if messages[0].content == 'bad' %}HOSTILE{% endif %}" + BUILT_IN["chatml"]
SPIN = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROW = "{% set x = messages[0].content %}" + "{% set x = x ~ x ~ x ~ x %}" * 20
STUCK = "{% set n = messages | length %}{% set x = (n + 8) ** (n * 50000000) %}"
"""One operation of C, which no signal interrupts."""


def documents(contents: list[str]) -> list[Document]:
    return [
        Document(0, number, 0, 0, "", messages=(Message("user", content), Message("assistant", f"x{number}")))
        for number, content in enumerate(contents)
    ]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemplateProcess]:
    """A process of its own, so that limits can be changed."""
    made = TemplateProcess()
    monkeypatch.setattr(template_process, "_process", made)
    yield made
    made.stop()


def test_a_template_of_others_gives_the_same_records() -> None:
    given = documents([content for chat in chats.conversations(300, 3) for content in [chat[0]["content"]]])
    given[7] = BadRecord(0, 7, 0, 0, None, "other")  # type: ignore[call-overload]
    ours = list(rendered_all(given, ChatTemplate(BUILT_IN["chatml"], "", "")))
    assert ChatTemplate(BUILT_IN["chatml"], "", "").is_own
    assert not ChatTemplate(OTHER, "", "").is_own
    assert list(rendered_all(given, ChatTemplate(OTHER, "", ""))) == ours
    assert isinstance(ours[7], BadRecord)
    assert sum(isinstance(one, Document) for one in ours) == 299


@pytest.mark.parametrize(
    ("code", "reason"), [(SPIN, "needs more than 1 s"), (GROW, "MiB for this conversation")], ids=["spin", "grow"]
)
def test_a_limit_refuses_one_conversation_and_names_it(
    code: str, reason: str, process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "CPU_SECONDS", 1.0)
    found = list(rendered_all(documents(["a", "bad", "b"]), ChatTemplate(ON_BAD.replace("HOSTILE", code), "", "")))
    assert [type(one) for one in found] == [Document, BadRecord, Document]
    assert isinstance(found[1], BadRecord)
    assert found[1].ordinal == 1
    assert reason in found[1].reason


def test_a_child_that_dies_is_started_again(process: TemplateProcess) -> None:
    template = ChatTemplate(OTHER, "", "")
    assert isinstance(rendered(documents(["a"])[0], template), Document)
    child = process._child
    assert child is not None
    os.kill(child._process.pid, signal.SIGKILL)
    assert all(isinstance(one, Document) for one in rendered_all(documents(["a"] * 9), template))
    assert process._child is not child


@pytest.mark.slow
def test_a_conversation_that_hangs_the_child_is_found(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "SILENT_SECONDS", 10.0)  # a child starts in less
    template = ChatTemplate(ON_BAD.replace("HOSTILE", STUCK), "", "")
    before = time.monotonic()
    found = list(rendered_all(documents(["a", "bad", "b"]), template))
    assert [type(one) for one in found] == [Document, BadRecord, Document]
    assert "does not end" in getattr(found[1], "reason", "")
    assert time.monotonic() - before < 60
