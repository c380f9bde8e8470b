"""Budgets of the code: modules, functions, the loop, and what must not be in the tree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import module_tree

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


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_the_first_line_of_a_module_fits_the_architecture_page(path: Path) -> None:
    assert len(module_tree.first_line(path)) <= module_tree.SUMMARY_COLUMNS, (
        f"shorten the first line of {name_of(path)}"
    )


def test_architecture_page_matches_the_tree() -> None:
    """The page lists every module with the first line of its docstring; ``python tests/module_tree.py`` rewrites it."""
    page = module_tree.PAGE.read_text(encoding="utf-8")
    assert page == module_tree.page_with(module_tree.module_list()), "run python tests/module_tree.py"
