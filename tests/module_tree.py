"""The module list of docs/architecture.md: every module under its folder, with the first line of its docstring.

    python tests/module_tree.py

writes the list into the page. ``tests/contract/test_shape.py`` compares the two.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "vorox"
PAGE = ROOT / "docs" / "architecture.md"
COLUMN = 30  # where descriptions start
SUMMARY_COLUMNS = 99  # a longer summary fails ``tests/contract/test_shape.py``
FENCE = "```"


def first_line(path: Path) -> str:
    """The summary of a module, without its last period."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split()).removesuffix(".").replace("``", "")


def entries(folder: Path, depth: int) -> Iterator[str]:
    modules = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    for name, summary in [(path.name, first_line(path)) for path in modules]:
        yield f"{'  ' * depth + name:{COLUMN - 1}} {summary}"
    for child in sorted(path for path in folder.iterdir() if (path / "__init__.py").exists()):
        yield f"{'  ' * depth + child.name + '/':{COLUMN - 1}} {first_line(child / '__init__.py')}"
        yield from entries(child, depth + 1)


def module_list() -> str:
    return "\n".join(["src/vorox/", *entries(SOURCE, 1)])


def page_with(modules: str) -> str:
    before, fence, rest = PAGE.read_text(encoding="utf-8").partition(f"{FENCE}text\n")
    _, end, after = rest.partition(f"\n{FENCE}")
    return before + fence + modules + end + after


if __name__ == "__main__":
    PAGE.write_text(page_with(module_list()), encoding="utf-8")
