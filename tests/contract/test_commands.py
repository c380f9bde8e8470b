"""The command line: what is declared is what does the work, and only what is typed is imported."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer

from vorox.cli.commands import app


def implementations() -> Iterator[Any]:
    """Every command: its declaration, and the module that does its work."""
    root: Any = typer.main.get_command(app)
    for name, command in root.commands.items():
        for inner in getattr(command, "commands", {"": command}).values():
            declared = inspect.unwrap(inner.callback, stop=lambda function: "implemented_in" in vars(function))
            if name != "help":
                yield pytest.param(inspect.unwrap(declared), declared.implemented_in, id=f"{name} {inner.name}")


@pytest.mark.parametrize(("declaration", "module"), list(implementations()))
def test_a_command_is_implemented_as_it_is_declared(declaration: Callable[..., None], module: str) -> None:
    """The same parameters of the same types; options, defaults and help are the declaration's alone."""
    implementation = getattr(importlib.import_module(module), declaration.__name__)
    declared = typing.get_type_hints(declaration)
    declared.pop("_", None)
    assert list(typing.get_type_hints(implementation).items()) == list(declared.items())
    assert all(one.default is one.empty for one in inspect.signature(implementation).parameters.values())


def test_only_the_command_that_is_typed_is_imported_and_no_work_for_its_help() -> None:
    lines = ["train --help", "data build --help", "runs", "eval -h", "trian"]
    program = (
        "import sys; from vorox.cli import main\n"
        "for line in sys.argv[1:]:\n"
        "    before = set(sys.modules); main(line.split())\n"
        "    print('loaded', *(name for name in set(sys.modules) - before if name.startswith('vorox.')))"
    )
    result = subprocess.run([sys.executable, "-c", program, *lines], capture_output=True, text=True, check=True)
    loaded = [set(line.split()[1:]) for line in result.stdout.splitlines() if line.startswith("loaded")]
    shared = {"vorox.cli.commands.options"}
    for line, names in zip(lines[:-1], loaded[:-1], strict=True):
        assert names - shared == {f"vorox.cli.commands.{line.split()[0]}"}
    assert not {name for name in loaded[-1] if name.startswith("vorox.cli.commands.")}
