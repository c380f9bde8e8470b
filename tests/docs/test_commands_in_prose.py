"""Commands that the prose names exist, with the options that it gives them; blocks of commands are run elsewhere."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer

from docs.test_documentation import PAGES, ROOT
from vorox.cli import app
from vorox.core.config.layers.synonyms import key_of
from vorox.core.config.schema_fields import find_field

IN_PROSE = sorted(
    {
        (page.relative_to(ROOT).as_posix(), " ".join(command.split()))
        for page in PAGES
        for command in re.findall(
            r"`(vorox [^`]+)`", re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        )
    }
)
SHOWN_AS_A_MISTAKE = "vorox train quickstart optimizer.lrr=1"


def check(command: str) -> None:
    """Fail unless there is such a command, with these options and settings."""
    found: Any = typer.main.get_command(app)
    words = shlex.split(command)[1:]
    while hasattr(found, "get_command") and words and not words[0].startswith("-"):
        name = words.pop(0)
        found = found.get_command(typer.Context(found), name)
        assert found is not None, f"{name} is no command"
    options = {"--help"} | {option for parameter in found.params for option in parameter.opts}
    for word in words:
        name, equals, _ = word.partition("=")
        if word.startswith("-"):
            assert name in options or find_field(key_of(name.lstrip("-"))), f"{name} is no option"
        elif equals and command != SHOWN_AS_A_MISTAKE:
            assert name == "preset" or find_field(key_of(name)), f"{name} is no setting"


@pytest.mark.parametrize(("page", "command"), IN_PROSE)
def test_a_command_in_the_prose_exists(page: str, command: str) -> None:
    check(command)


@pytest.mark.parametrize("command", ["vorox trian", "vorox data wen", "vorox plan --nodess", "vorox train o.lr=1"])
def test_one_that_does_not_exist_is_found(command: str) -> None:
    with pytest.raises(AssertionError, match="is no"):
        check(command)
