"""Budgets of the code: modules, functions, the loop, and what must not be in the tree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "vorox"
MODULES = sorted(SOURCE.rglob("*.py"))
MODULE_LINES = 400
FUNCTION_LINES = 60
LOOP_LINES = 100
# Patterns that must not occur in the package; prose may say "pickle", code may not use it.
DANGERS = (
    r"torch\.load\(",
    r"\bimport\b.*\bpickle\b|\bfrom pickle\b|\bpickle\.\w",
    r"shell=True",
    r"trust_remote_code=True",
    r"TODO|FIXME|HACK",
)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_and_functions_stay_small(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MODULE_LINES, "is there a second noun inside?"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            body = node.body[1:] if ast.get_docstring(node) else node.body
            first = body[0].lineno if body else node.lineno
            assert node.end_lineno - first < FUNCTION_LINES, f"{node.name} is too long"


def test_the_loop_is_a_page() -> None:
    assert len((SOURCE / "training" / "loop.py").read_text(encoding="utf-8").splitlines()) <= LOOP_LINES


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_says_what_it_owns(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), "no module docstring"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_names_and_dangers(path: Path) -> None:
    assert not re.search(r"utils|helpers|common|manager", name_of(path))
    source = path.read_text(encoding="utf-8")
    for pattern in DANGERS:
        found = re.search(pattern, source)
        assert found is None, f"{found[0]} at offset {found.start()}"


def test_architecture_page_matches_the_tree() -> None:
    """Every module is on the page, and every module on the page exists."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = page.split("```")[1]
    named: set[str] = set()
    folders: list[str] = []
    for line in block.splitlines():
        match = re.match(r"^(?P<indent> *)(?P<names>[\w./ ]+?)(?:  +.*)?$", line)
        if match is None:
            continue
        depth = len(match["indent"]) // 2
        for name in match["names"].split():
            if name.endswith("/"):
                folders = [*folders[:depth], name]
            elif name.endswith(".py"):
                named.add("".join(folders[:depth]) + name)
    actual = {name_of(path) for path in MODULES if path.name != "__init__.py" or path.parent.name == "backends"}
    assert named == actual, f"missing on the page: {sorted(actual - named)}; gone: {sorted(named - actual)}"
