"""What must not be in the tree."""

from __future__ import annotations

import re
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
