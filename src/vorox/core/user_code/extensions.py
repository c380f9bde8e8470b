"""User functions by import path: loading, and their identity in recipes and checkpoints.

``package.module:function`` is imported; ``path/to/file.py:function`` is loaded from the file. The identity of a
function is its name and its declared version, or the SHA-256 of its file; cache recipes and checkpoints record it, so
that a changed function is detected.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from vorox.core.errors import ConfigError, VoroxError
from vorox.core.user_code.trusted_code import require_trusted

_VERSION = "__transform_version__"
_IMPORT_PATH = re.compile(r"[^:\s]+:[A-Za-z_]\w*")
_USED: dict[str, str] = {}
"""Functions that this process has loaded: name to ``setting=path``, for errors in calls of them."""

Function = TypeVar("Function", bound=Callable[..., Any])


def version(number: int) -> Callable[[Function], Function]:
    """Declare the version of a function; increment it whenever its results change.

    Without a declared version, the SHA-256 of the function's file is its version, so any edit of the file is a change.
    """

    def declare(function: Function) -> Function:
        setattr(function, _VERSION, number)
        return function

    return declare


def is_extension(name: object) -> bool:
    """Whether a setting names a function by import path."""
    return isinstance(name, str) and _IMPORT_PATH.fullmatch(name) is not None


def load_function(
    name: str, *, kind: str, where: str, known: Iterable[str] = (), path: str | None = None
) -> Callable[..., Any]:
    """Return the function that a setting names.

    Args:
        name: The value of the setting.
        kind: The purpose of the function, such as ``transform``, for messages.
        where: The setting, for messages.
        known: Built-in names, for suggestions.
        path: The import path, if ``name`` is a short name for it.

    Raises:
        ConfigError: The name is unknown, its module cannot be imported, it is not a function, or only a run that is not
            trusted names it.
    """
    path = name if path is None else path
    module_name, colon, function_name = path.rpartition(":")
    if not colon:
        near = difflib.get_close_matches(name, list(known), n=2)
        builtin = f"one of {', '.join(known)}, or " if known else ""
        raise ConfigError(
            f"Unknown {kind} {name!r}", where=where,
            hint=f"did you mean {' or '.join(near)}?" if near else
            f"{builtin}a function of your own: my_package.my_module:function or path/to/file.py:function",
        )  # fmt: skip
    require_trusted(path, where)
    is_file = module_name.endswith(".py")
    try:
        module = _module_of_file(Path(module_name)) if is_file else importlib.import_module(module_name)
        function = getattr(module, function_name, None)  # may import another module
    except VoroxError:
        raise
    except Exception as error:  # importing a user's module can raise anything
        raise ConfigError(
            f"Cannot import {kind} {path}: {type(error).__name__}: {error}", where=where,
            hint="use an absolute path, or one relative to the working directory" if is_file else
            "install its package, or add its folder to PYTHONPATH",
        ) from error  # fmt: skip
    if function is None:
        public = {key: value for key, value in vars(module).items() if callable(value) and not key.startswith("_")}
        own = [key for key, value in public.items() if getattr(value, "__module__", "") == module.__name__] or list(
            public
        )
        near = difflib.get_close_matches(function_name, own, n=2)
        raise ConfigError(
            f"Cannot import {kind} {path}: {module_name} has no function {function_name}", where=where,
            hint=f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(own[:8]) or 'none'}",
        )  # fmt: skip
    if not callable(function):
        raise ConfigError(f"{path} is not a function", where=where, hint="name a function or a class")
    _USED[function_name] = f"{where}={path}"
    return function


def refused_call(error: BaseException) -> str | None:
    """Return ``setting=path`` of the user function that cannot be called as it is; ``None`` for another error."""
    if not isinstance(error, TypeError):
        return None
    called = re.match(r"(?:[\w<>]+\.)*(\w+)\(\) ", str(error))  # f() takes 1 positional argument but 3 were given
    name = None if called is None else called[1]
    if name == "__init__":
        name = str(error).partition(".")[0]
    return None if name is None else _USED.get(name)


def source_of(path: str) -> str:
    """Return the file of a function; its import path if it has none."""
    module_name, _, _ = path.rpartition(":")
    if module_name.endswith(".py"):
        return str(Path(module_name).expanduser().resolve())
    return getattr(sys.modules.get(module_name), "__file__", None) or path


def raised_in(path: str, error: BaseException) -> bool:
    """Whether an error came from the file of a function."""
    frames, source = error.__traceback__, source_of(path)
    while frames is not None:
        if frames.tb_frame.f_code.co_filename == source:
            return True
        frames = frames.tb_next
    return False


def call_error(
    path: str, error: BaseException, *, where: str, signature: str, arguments: str, returns: str
) -> ConfigError:
    """Return the error of a user's function that failed when it was called.

    Args:
        path: Its import path.
        error: What it raised.
        where: The setting that names it.
        signature: How it is called.
        arguments: What it is called with.
        returns: What it has to return.
    """
    return ConfigError(
        f"{path.rpartition(':')[2]} in {source_of(path)} failed with {type(error).__name__}: {error}", where=where,
        hint=f"it is called as {signature}, with {arguments}; it returns {returns}",
    )  # fmt: skip


def _module_of_file(path: Path) -> ModuleType:
    """Load a Python file as a module; reload it only if its content has changed."""
    path = path.expanduser().resolve()
    digest = hashlib.sha256(str(path).encode() + b"\0" + path.read_bytes()).hexdigest()[:16]
    return _loaded(path, f"vorox_extension_{digest}")


@functools.cache
def _loaded(path: Path, name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None, path
    assert specification.loader is not None, path
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def identity_of(path: str, function: Callable[..., Any], args: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the identity of a function for a cache recipe, as JSON values.

    Args:
        path: Its import path. For a file, only the name counts, so it may be moved.
        function: The function.
        args: Its arguments.
        where: The setting, for messages.

    Raises:
        ConfigError: The function declares no version and has no source file.
    """
    module_name, _, function_name = path.rpartition(":")
    name = f"{Path(module_name).name}:{function_name}" if module_name.endswith(".py") else path
    declared: int | None = getattr(function, _VERSION, None)
    if declared is not None:
        return {"function": name, "version": declared, "args": dict(args)}
    try:
        source = Path(inspect.getfile(inspect.unwrap(function))).read_bytes()
    except (OSError, TypeError) as error:
        raise ConfigError(
            f"{path} has no source file, so changes of it cannot be detected", where=where,
            hint="declare its version with @version(1) from vorox.core.user_code.extensions",
        ) from error  # fmt: skip
    return {"function": name, "source_sha256": hashlib.sha256(source).hexdigest(), "args": dict(args)}


def identity_text(path: str, where: str, *, kind: str) -> str:
    """Return the identity of a function without configured arguments as a string."""
    identity = identity_of(path, load_function(path, kind=kind, where=where), {}, where)
    number = identity.get("version")
    return f"{identity['function']} " + (f"version {number}" if number else f"{identity['source_sha256'][:16]}")
