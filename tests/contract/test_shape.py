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


def modules_meant(named: str, path: Path) -> list[str]:
    """The modules that a name in a module may mean: that beside it, one below a folder around it, else any so named.

    A name without its room never means a module of a folder around: what is near changes when modules move.
    """
    around = [path.parent, *(path.parents if "/" in named else ())]
    nearest = next((folder / named for folder in around if (folder / named).is_file()), None)
    if nearest is not None and nearest.is_relative_to(ROOT):
        return [name_of(nearest)]
    known = map(name_of, (*MODULES, *(ROOT / "tests").rglob("*.py")))
    return [one for one in known if one.endswith(f"/{named}")]


def test_a_module_named_in_a_text_is_one_module() -> None:
    """``mine.py`` and ``path/to/file.py`` stand for a user's own."""
    unclear: list[str] = []
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        for named in re.findall(r"``([a-z_0-9]+(?:/[a-z_0-9]+)*\.py)\b", text):
            meant = modules_meant(named, path)
            if len(meant) != 1 and named not in {"mine.py", "path/to/file.py"}:
                unclear.append(f"{name_of(path)}: {named} is {' or '.join(meant) or 'no module'}; write its folder too")
        rooms = "|".join(folder.name for folder in SOURCE.iterdir() if folder.is_dir())
        for named in re.findall(rf"``((?:{rooms})(?:/[a-z_0-9]+)+)``", text):
            if not (SOURCE / named).exists() and not (SOURCE / f"{named}.py").exists():
                unclear.append(f"{name_of(path)}: {named} does not exist")
    assert not unclear, "\n".join(unclear)
