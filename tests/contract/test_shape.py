"""What must not be in the tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "vorox"
MODULES = sorted(SOURCE.rglob("*.py"))
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


def test_no_dangerous_calls() -> None:
    found: list[str] = []
    for path in MODULES:
        source = path.read_text(encoding="utf-8")
        for pattern in DANGERS:
            found += [f"{name_of(path)}: {match[0]}" for match in re.finditer(pattern, source)]
    assert not found, "\n".join(found)


def choices_in(path: Path) -> Iterator[frozenset[str]]:
    """The values of every ``Literal`` of several texts."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            values = [getattr(one, "value", None) for one in getattr(node.slice, "elts", [])]
            if values and all(isinstance(value, str) for value in values):
                yield frozenset(map(str, values))


def test_the_values_of_a_choice_stand_once() -> None:
    """``cli/commands`` imports only typer; ``test_commands.py`` compares its choices with those of the workers."""
    places: dict[frozenset[str], list[str]] = {}
    for path in MODULES:
        if SOURCE / "cli" / "commands" not in path.parents:
            for values in choices_in(path):
                places.setdefault(values, []).append(name_of(path))
    twice = {", ".join(sorted(values)): found for values, found in places.items() if len(found) > 1}
    assert not twice, twice


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
