"""One module names the files of a run directory: ``core/run_layout.py``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from vorox.core.run_layout import RUN_FILES, RunLayout, parse_checkpoint_name, run_of_checkpoint

SOURCE = Path(__file__).parents[2] / "src" / "vorox"
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "run_layout.py")
NAMES = {file.name for file in RUN_FILES if file is not RunLayout.temporary}
FILE_NAMES = {name for name in NAMES if "." in name}
"""Names that stand for nothing else in the package; ``tokenizer`` alone is a section of the configuration too."""


def spelled(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every run file that a module names: its whole name as a string, or any name in a path."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in FILE_NAMES:
            yield node.lineno, str(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            texts = [part.value for part in ast.walk(node.right) if isinstance(part, ast.Constant)]
            for text in filter(lambda value: isinstance(value, str), texts):
                if str(text).partition("/")[0] in NAMES or str(text).startswith("step-"):
                    yield node.lineno, str(text)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_no_other_module_names_a_file_of_a_run(path: Path) -> None:
    assert not list(spelled(ast.parse(path.read_text(encoding="utf-8")))), "take the path from RunLayout"


@pytest.mark.parametrize(
    "code",
    ['PLAN = "plan.jsonl"', 'directory / "tokenizer"', 'directory / "checkpoints/step-1"', 'd / f"step-{step:08d}"'],
)
def test_the_check_finds_names(code: str) -> None:
    assert list(spelled(ast.parse(code)))


def test_names_are_paths_and_parse_back(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    assert layout.plan == tmp_path / "plan.jsonl"
    assert layout.of_rank(layout.log, 0).name == "log.txt"
    assert layout.of_rank(layout.events, 3).name == "events-00003.jsonl"
    assert run_of_checkpoint(layout.checkpoint(12)) == tmp_path
    assert run_of_checkpoint(tmp_path) is None
    assert parse_checkpoint_name(layout.checkpoint(123_456_789).name) == (123_456_789, "")
    assert parse_checkpoint_name("step-00000012.corrupt-2") == (12, "corrupt")
    assert parse_checkpoint_name("step-00000012.elsewhere-1") is None
    assert parse_checkpoint_name("step-12") is None
