"""Commands that are imported when their name is typed, and their work when they run.

Help, mistakes and completion need only the declarations of this folder, which import only typer.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import typer
from typer.core import TyperGroup

Options = ParamSpec("Options")
Result = TypeVar("Result")


def implemented_in(module: str) -> Callable[[Callable[Options, Result]], Callable[Options, Result]]:
    """Declare a command, or its slow part: the function of the same name in a module, imported when it runs.

    It takes no ``_``, which stands for an option that is taken off the command line before (``TrustCode``).
    """

    def of(declaration: Callable[Options, Result]) -> Callable[Options, Result]:
        @functools.wraps(declaration)
        def run(*args: Options.args, **values: Options.kwargs) -> Result:
            values.pop("_", None)
            return getattr(importlib.import_module(module), declaration.__name__)(*args, **values)

        vars(run)["implemented_in"] = module
        return run

    return of


class Commands(Mapping[str, Any]):
    """The commands of a group by name; reading one imports its module, which has it as ``app``."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        self._modules = modules
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            app: typer.Typer = importlib.import_module(self._modules[name]).app
            _unwrap_help(app)
            self._loaded[name] = typer.main.get_command(app)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __contains__(self, name: object) -> bool:
        return name in self._modules


def lazy_group(modules: Mapping[str, str]) -> type[TyperGroup]:
    """Return the class of a group with the commands of some modules."""

    class LazyGroup(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**{**attributes, "commands": Commands(modules)})

    return LazyGroup


def _unwrap_help(commands: typer.Typer) -> None:
    """Join the lines of each paragraph of the help, which the terminal breaks again at its own width."""
    for command in commands.registered_commands:
        text = command.help or inspect.getdoc(command.callback) or ""
        command.help = "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
