"""An engine is a row: its names stand in one place, its modules in one table, and nothing else is a table by engine."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

from vorox import backends
from vorox.backends import engine_table, node_collectives
from vorox.backends.installation_probe import probe_installation
from vorox.cli.checks import parity
from vorox.core.errors import ConfigError
from vorox.core.ranks.distributed_context import Membership
from vorox.core.schema.setting import ENGINES
from vorox.models.decoder.document_separation import ENGINE_MASKS

SOURCE = Path(__file__).parents[2] / "src" / "vorox"
TABLES = {
    "core/schema/setting.py",  # the names
    "backends/engine_table.py",  # what each has
    "models/decoder/document_separation.py",  # what estimates of memory know of each
    "core/platform/environment.py",  # packages whose versions are recorded
    "runtime/node_checks.py",  # packages whose versions are compared
}


def test_every_table_has_every_engine_in_order_of_preference() -> None:
    assert tuple(engine_table.ENGINE_TABLE) == ENGINES == backends.BACKENDS
    assert tuple(ENGINE_MASKS) == ENGINES
    assert ENGINES[:2] == (parity.FIRST, parity.SECOND)


def named_together(node: ast.AST) -> bool:
    """Whether a literal lists two engines: the keys of a mapping, or the elements of a sequence or a type."""
    parts = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
    return {one.value for one in parts if isinstance(one, ast.Constant)} >= set(ENGINES[:2])


def test_no_other_module_lists_engines() -> None:
    texts = {path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    candidates = {name: text for name, text in texts.items() if all(f'"{engine}"' in text for engine in ENGINES[:2])}
    found = {name for name, text in candidates.items() if any(map(named_together, ast.walk(ast.parse(text))))}
    assert found == TABLES, "a fact about each engine belongs to its row"


def test_every_module_of_a_row_exists() -> None:
    for name, row in engine_table.ENGINE_TABLE.items():
        values = [getattr(row, field) for field in row.__dataclass_fields__]
        modules = [value for value in values if isinstance(value, str) and value]
        assert len(modules) >= 3
        for module in modules:
            path = SOURCE.parent.joinpath(*module.split(".")).with_suffix(".py")
            assert path.is_file(), f"{name}: {module}"
            assert path.is_relative_to(SOURCE / "backends")


def test_a_third_engine_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is loaded, probed and joined by what its row says."""
    for name, text in {
        "third_engine": "",
        "third_report": 'print(\'{"version": "3"}\')',
        "third_collectives": "def join(member, timeout_seconds): return 'context', timeout_seconds",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    row = engine_table.EngineRow(
        packages=("json",), engine="third_engine", installation_report="third_report", collectives="third_collectives"
    )
    table: Any = engine_table.ENGINE_TABLE
    monkeypatch.setitem(table, "third", row)
    assert backends.load("third") is importlib.import_module("third_engine")
    assert probe_installation("third").report == {"version": "3"}
    assert node_collectives.collective_engine("third") == "third"
    assert node_collectives.join("third", Membership("127.0.0.1:1", 0, 1, 0), 5.0) == ("context", 5.0)
    assert not backends.always_compiles("third")


@pytest.mark.parametrize("installed", [*ENGINES, "none"])
def test_the_first_installed_engine_is_chosen(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table: Any = engine_table.ENGINE_TABLE
    packages = table[installed].packages if installed in table else ()
    monkeypatch.setattr(backends, "_is_installed", lambda package: package in packages)
    assert backends.preferred() == (installed if installed in table else ENGINES[0])
    if installed in table:
        assert node_collectives.collective_engine(None) == installed
    else:
        with pytest.raises(ConfigError, match="none is installed") as caught:
            node_collectives.collective_engine(None)
        assert ENGINES[0] in caught.value.hint


def test_an_unknown_engine_is_no_crash() -> None:
    probe = probe_installation("third")
    assert not probe.is_installed
    assert "Unknown backend 'third'" in probe.problem
