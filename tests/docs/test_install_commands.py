"""No page and no message recommends to install Vorox from a package index, where it is not."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "Dockerfile", *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("configs/**/*.yaml"), *ROOT.glob("src/**/*.yaml"), *ROOT.glob("src/**/*.html"),
        ROOT / "pyproject.toml", *ROOT.glob("examples/**/*.md"), *ROOT.glob("benchmarks/**/*.md"),
    ]
)  # fmt: skip
MODULES = sorted(path for folder in ("src", "examples", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py"))
INSTALLER = re.compile(
    r"\b(?:pip3?|pipx|uv|poetry|conda|mamba|pixi)\s+(?:\w+\s+)?(?:install|add|inject|run)\s([^;&|#]*)"
)
FROM_AN_INDEX = re.compile(r"(?i)vorox(\[[^\]]*\])?([=<>~!].*)?")


def lines_of(text: str) -> Iterator[str]:
    """The lines of a text, those that a backslash continues as one, and every span of inline code as one."""
    yield from text.replace("\\\n", " ").split("\n")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose))


def installs_from_an_index(text: str) -> list[str]:
    """The commands in a text that install Vorox by its name alone."""
    found: list[str] = []
    for line in lines_of(text):
        for command in INSTALLER.finditer(line.replace("`", " ; ")):
            try:
                words = shlex.split(command[1])
            except ValueError:  # an apostrophe of the prose
                words = [word.strip("'\".,:)") for word in command[1].split()]
            followed = zip(words, [*words[1:], ""], strict=True)
            if any(FROM_AN_INDEX.fullmatch(word.rstrip(".,:)")) and after != "@" for word, after in followed):
                found.append(command[0].strip())
    return sorted(set(found))


def strings_of(module: Path) -> Iterator[str]:
    """Every text in a module; the values in it are braces."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield "".join(map(str, parts))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_installs_from_an_index(page: Path) -> None:
    assert installs_from_an_index(page.read_text(encoding="utf-8")) == []


def test_no_message_installs_from_an_index() -> None:
    found = {
        str(module.relative_to(ROOT)): commands
        for module in MODULES
        for text in strings_of(module)
        if (commands := installs_from_an_index(text))
    }
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "Get it by `pip install vorox`.", "`pip install 'vorox[jax]'` adds JAX", 'run pip install -U "vorox[torch,hf]"',
        "python -m pip install vorox==1.0", "```console\n$ uv pip install vorox[s3]\n```", "uv add vorox",
        "it needs `pip install\n'vorox[eval]'`, and", "pip install -c constraints.txt \\\n  vorox[jax]",
    ],
)  # fmt: skip
def test_such_a_command_is_found(text: str) -> None:
    assert len(installs_from_an_index(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "`pip install -e '.[torch]'`, then `vorox train quickstart`", "pip install -e ./vorox[jax] -c constraints.txt",
        "```console\n$ pip install -e '.[s3]'\n$ vorox train my.yaml\n```", "pip install vorox-tools",
        "pip install 'vorox[s3] @ https://example.org/vorox.whl'", "included in `vorox[jax]`",
        "pip install jax; vorox train quickstart",
    ],
)  # fmt: skip
def test_other_commands_are_not(text: str) -> None:
    assert installs_from_an_index(text) == []
