"""Budgets of the code: modules, functions, the loop, and what must not be in the tree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

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


def test_modules_and_functions_stay_small() -> None:
    long = [
        f"{name_of(path)}: {lines} lines; does it have two subjects?"
        for path in MODULES
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MODULE_LINES
    ]
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                body = node.body[1:] if ast.get_docstring(node) else node.body
                first = body[0].lineno if body else node.lineno
                if node.end_lineno - first >= FUNCTION_LINES:
                    long.append(f"{name_of(path)}:{node.lineno}: {node.name} is too long")
    assert not long, "\n".join(long)


def test_the_loop_is_a_page() -> None:
    assert len((SOURCE / "training" / "loop.py").read_text(encoding="utf-8").splitlines()) <= LOOP_LINES


def test_every_module_has_a_docstring_whose_first_line_fits_the_architecture_page() -> None:
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{name_of(path)}: no module docstring"
    long = [name_of(path) for path in MODULES if len(module_tree.first_line(path)) > module_tree.SUMMARY_COLUMNS]
    assert not long, "shorten the first line of these modules"


def test_names_and_dangers() -> None:
    found: list[str] = []
    for path in MODULES:
        source = path.read_text(encoding="utf-8")
        found += [match[0] for match in [re.search(r"utils|helpers|common|manager", name_of(path))] if match]
        for pattern in DANGERS:
            found += [f"{name_of(path)}: {match[0]}" for match in re.finditer(pattern, source)]
    assert not found, "\n".join(found)


def test_architecture_page_matches_the_tree() -> None:
    """The page lists every module with the first line of its docstring; ``python tests/module_tree.py`` rewrites it."""
    page = module_tree.PAGE.read_text(encoding="utf-8")
    assert page == module_tree.page_with(module_tree.module_list()), "run python tests/module_tree.py"


def test_files_named_in_docstrings_exist() -> None:
    files = [*MODULES, *(ROOT / "tests").rglob("*.py"), ROOT / "mine.py"]  # the last stands for a user's own
    known = [name_of(path) for path in files]
    dangling = [
        f"{name_of(path)}: {named}"
        for path in MODULES
        for named in re.findall(r"``([a-z_/0-9]+\.py)``", path.read_text(encoding="utf-8"))
        if not any(one.endswith(f"/{named}") or one == named for one in known)
    ]
    assert not dangling, dangling
