"""Draw passages of the project's prose, for a reader to judge by ear: pages of the docs and docstrings.

    python tests/prose_sample.py [--seed 9] [--pages 10] [--docstrings 50]

The same seed draws the same passages of the same tree.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SEED = 9


def docstrings() -> Iterator[tuple[str, str]]:
    """Every docstring of the package, as (place, text)."""
    for path in sorted((ROOT / "src" / "vorox").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    line = getattr(node, "lineno", 1)
                    yield f"{path.relative_to(ROOT).as_posix()}:{line} {getattr(node, 'name', 'module')}", text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--docstrings", type=int, default=50)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    pages = sorted((ROOT / "docs").glob("**/*.md"))
    for page in draw.sample(pages, min(arguments.pages, len(pages))):
        print(f"==== {page.relative_to(ROOT).as_posix()}\n{page.read_text(encoding='utf-8')}")
    every = list(docstrings())
    for place, text in draw.sample(every, min(arguments.docstrings, len(every))):
        print(f"---- {place}\n{text}\n")


if __name__ == "__main__":
    main()
