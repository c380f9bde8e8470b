"""Start Vorox's own child processes with the import path of this process.

``python -m`` puts the working directory in front of the import path, so a module in a downloaded folder that has the
name of a library would run in every child. Children start with ``-P`` instead, by this file, which sets their import
path to that of the parent: ``PYTHONPATH``, the folder of a script and that of a notebook stay on it, the working
directory is on it only if it is on the parent's. ``PYTHONSAFEPATH`` is not set, because programs that users start would
inherit it.

This file is also the program of the children: nothing outside the standard library may be imported at its top.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Generator, MutableMapping

_SAFE_PATH = "PYTHONSAFEPATH"


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a child: ``python -m MODULE ARGUMENTS`` with the import path of this process."""
    paths = json.dumps([os.path.abspath(path) for path in sys.path])  # noqa: PTH100 - "" is the working directory
    return [sys.executable, "-P", os.path.abspath(__file__), paths, module, *arguments]  # noqa: PTH100


@contextlib.contextmanager
def safe_spawning(environment: MutableMapping[str, str] = os.environ) -> Generator[None]:
    """Start processes of ``multiprocessing`` without the working directory on their import path.

    ``multiprocessing`` takes no options of the interpreter; the started process calls ``forget_safe_spawning`` first.
    """
    before = environment.get(_SAFE_PATH)
    environment[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del environment[_SAFE_PATH]
        else:
            environment[_SAFE_PATH] = before


def forget_safe_spawning(was_set: bool) -> None:
    """Unset the variable of ``safe_spawning``, which children of this process would inherit, unless the user set it."""
    if not was_set:
        os.environ.pop(_SAFE_PATH, None)


def is_safe_path_set() -> bool:
    """Whether the user's environment sets ``PYTHONSAFEPATH``."""
    return _SAFE_PATH in os.environ


if __name__ == "__main__":
    import runpy

    parents = json.loads(sys.argv[1])
    sys.path[:] = [*(path for path in sys.path if path not in parents), *parents]  # first: what PYTHONPATH names since
    name = sys.argv[2]
    sys.argv = [name, *sys.argv[3:]]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
