"""Which functions of a recorded configuration may be imported: code of a run is a program, and runs come from anyone.

A function that the user names, in a file or an override, is trusted. One that only a run, a checkpoint or other
recorded values name is imported if this user's store has the run with the SHA-256 of the function's file and of the
modules that it imports from the same folder. The store, ``$XDG_STATE_HOME/vorox/trusted/`` (mode 600), gets an entry
when a run starts here, and by ``--trust-code``. Runs are known by their id, so a run may be moved; an edited file is
another file.

``load_function`` (``core/user_code/extensions.py``) is the one gate; readers of recorded values call ``mark_recorded``.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import hashlib
import os
import re
import shlex
import stat
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from vorox.core.errors import ConfigError
from vorox.core.files import atomic
from vorox.core.files.atomic import MANIFEST_NAME
from vorox.core.files.json_reader import MalformedJson, mapping, read_json
from vorox.core.run_layout import RunLayout, run_of_checkpoint

FLAG = "--trust-code"
_NAME = re.compile(r"([^:\s]+:[A-Za-z_]\w*)(?:://\S*)?")
_MAX_LISTED = 20
_MAX_MODULES, _MAX_SOURCE_BYTES = 200, 2**20
_MAX_FILE_BYTES = 2**26
_LONG_NAME = re.compile(rb"\b(?:\w++\s*+\.\s*+){100}")
"""A name for which the parser takes quadratic time."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})

_stated: set[str] = set()
_recorded: dict[str, set[Path]] = {}
_trusted: set[tuple[str, str]] = set()
"""Names and the SHA-256 of their files, of runs in the store that this process has read."""


class _Command:
    """The command line of this process, and whether it may and does trust the code of the run that it names."""

    words: tuple[str, ...] = ()
    takes_flag = False
    trusts_code = False


def take_flag(arguments: Sequence[str], takes_flag: Callable[[Sequence[str]], bool]) -> list[str]:
    """Return a command line without ``--trust-code``; remember the flag and the command for the hint of a refusal.

    Args:
        arguments: The command line.
        takes_flag: Whether a command line is one of a command that declares the flag.

    Raises:
        ConfigError: The command does not declare it.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    words = [word for number, word in enumerate(arguments) if word != FLAG or number > end]
    _Command.words, _Command.trusts_code = tuple(words), len(words) < len(arguments)
    _Command.takes_flag = takes_flag(words)
    if _Command.trusts_code and not _Command.takes_flag:
        _Command.trusts_code = False
        raise ConfigError(
            f"{FLAG} trusts the code of one run, and this command does not take it",
            where=" ".join(["vorox", *arguments[:2]]),
            hint=f"trust a run with `vorox runs show RUN {FLAG}`, then run this command without {FLAG}",
        )  # fmt: skip
    return words


def given_flag() -> list[str]:
    """Return ``--trust-code`` if the command line of this process has it, for those of its ranks."""
    return [FLAG] if _Command.trusts_code else []


def state(values: object, *, but_recorded: bool = False) -> None:
    """Trust the functions that the user's own configuration names.

    Args:
        values: The configuration, as plain values.
        but_recorded: Leave out what has been marked as recorded.
    """
    _stated.update(name for name in function_names(values) if not (but_recorded and name in _recorded))


def mark_recorded(values: object, directory: Path) -> None:
    """Import functions that recorded values name only as far as they are trusted.

    Args:
        values: A configuration or a model's specification, as plain values.
        directory: The run, checkpoint or other directory that has recorded them.
    """
    names = set(function_names(values))
    if not names:
        return
    owner = _owner(directory)
    for name in names:
        _recorded.setdefault(name, set()).add(owner)
    if _Command.trusts_code and not names <= _stated:
        _report_trust(owner, trust(values, owner, is_asked=True))
    known = _read_store(_id_of(owner))
    _trusted.update((name, digest) for name in names for digest in known.get(name, ()))


def trust(values: object, directory: Path, *, is_asked: bool = False) -> dict[str, str]:
    """Record in the store that this user trusts the functions of a run as their files are now.

    Args:
        values: Its configuration, as plain values.
        directory: The run.
        is_asked: Trust also what is not trusted yet.

    Returns:
        The SHA-256 of the code of each function that has a file.
    """
    names = {
        name: digest
        for name in function_names(values)
        if (digest := file_digest(name)) is not None and (is_asked or _is_trusted(name))
    }
    if names:
        owner = _owner(directory)
        _write_store(_id_of(owner), names)
        _trusted.update(names.items())
    return names


def require_trusted(name: str, where: str) -> None:
    """Refuse to import a function that only recorded values of an unknown run name.

    Raises:
        ConfigError: The user has neither named nor trusted it.
    """
    if _is_trusted(name):
        return
    owner = min(_recorded[name])
    if file_of(name) is None:
        raise _not_here(name, owner, where)
    listed = [one for one, owners in sorted(_recorded.items()) if owner in owners and one not in _stated]
    found = {one: file_of(one) for one in listed}
    lines = [_line(one, found[one]) for one in listed if one == name or found[one] is not None]
    argument = shlex.quote(str(owner))
    with contextlib.suppress(OSError, ValueError):
        argument = shlex.quote(str(owner.relative_to(Path.cwd())))
    # What another directory than a run names, such as averaged weights, is trusted by a command that infers with it.
    other = ("runs", "show", argument) if RunLayout(owner).record.is_file() else ("generate", argument)
    words = _Command.words if _Command.takes_flag else other
    raise ConfigError(
        f"The run {owner.name} names code that you have not trusted:\n" + "\n".join(lines[:_MAX_LISTED]),
        where=f"{where} of {owner}", saved="nothing of it was run",
        hint=f"read the files; if you trust them: vorox {' '.join(_quoted(words))} {FLAG}",
    )  # fmt: skip


def _not_here(name: str, owner: Path, where: str) -> ConfigError:
    """Return the error of a function that is not found here: the run was started in another folder, or elsewhere."""
    module = name.rpartition(":")[0]
    folder = _start_folder(owner)
    places = [folder / module] if module.endswith(".py") else _candidates(folder, module.split("."))
    if folder.is_absolute() and any(place.is_file() for place in places):
        words = [str(owner) if "/" in word and Path(word).resolve() == owner else word for word in _Command.words]
        again = f"cd {shlex.quote(str(folder))} && vorox {' '.join(_quoted(words))}" if words else ""
        hint = f"it is in {folder}, where the run was started; run the command there" + (f": {again}" if again else "")
    else:
        hint = f"run the command in the folder that has {module}" + (
            "" if module.endswith(".py") else ", or install its package, or add its folder to PYTHONPATH"
        )
    return ConfigError(
        f"The run {owner.name} needs the function {name}, and there is no such file here", where=f"{where} of {owner}",
        saved="nothing of it was run", hint=hint,
    )  # fmt: skip


def _start_folder(owner: Path) -> Path:
    """Return the working directory of the newest attempt of a run; an empty path if it is not recorded."""
    with contextlib.suppress(OSError, MalformedJson, LookupError, TypeError, ValueError):
        attempts = mapping(read_json(RunLayout(owner).record))["attempts"]
        return Path(str(mapping(attempts[-1])["working_directory"]))
    return Path()


def require_all_trusted(values: object) -> None:
    """Refuse a configuration before anything is done with it, if a function of it is not trusted.

    Raises:
        ConfigError: As ``require_trusted``.
    """
    known = {name for name, _ in _trusted}
    for name in function_names(values):
        is_function = name in known or ".py:" in name or file_of(name) is not None  # other texts may look like one
        if is_function:
            require_trusted(name, RunLayout.config.name)


def _is_trusted(name: str) -> bool:
    return name in _stated or name not in _recorded or (name, file_digest(name)) in _trusted


def function_names(values: object) -> Iterator[str]:
    """Yield the texts in plain values that name a function by import path, also those of stores."""
    if isinstance(values, str):
        match = _NAME.fullmatch(values)
        if match is not None and not values.startswith("env:"):
            yield match[1]
    elif isinstance(values, Mapping):
        for item in cast("Mapping[Any, object]", values).values():
            yield from function_names(item)
    elif isinstance(values, list | tuple):
        for item in cast("Sequence[object]", values):
            yield from function_names(item)


def file_of(name: str) -> Path | None:
    """Return the file of a function, found without importing anything; ``None`` if there is none."""
    module = name.rpartition(":")[0]
    if module.endswith(".py"):
        path = Path(module).expanduser().resolve()
        return path if path.is_file() else None
    places: Sequence[str] | None = None
    parts, origin = module.split("."), None
    for number in range(len(parts)):
        spec = _find(".".join(parts[: number + 1]), places)
        if spec is None or (spec.submodule_search_locations is None and number < len(parts) - 1):
            return None
        places, origin = spec.submodule_search_locations, spec.origin if spec.has_location else None
    return None if origin is None else Path(origin)


def _find(module: str, places: Sequence[str] | None) -> Any:
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):  # the finders of other packages can raise anything
            if (spec := finder.find_spec(module, places)) is not None:
                return spec
    return None


def file_digest(name: str) -> str | None:
    """Return the SHA-256 of the code of a function; ``None`` if it has no file that can be read.

    It is that of the function's file, or of the list of all files if it imports others from the same folder.
    """
    path = file_of(name)
    try:
        found = {} if path is None else {file: _sha256(file) for file in code_files(name, path)}
    except OSError:
        return None
    if path is None or len(found) < 2:
        return found.get(path) if path else None
    lines = sorted(f"{os.path.relpath(file, path.parent)} {digest}" for file, digest in found.items())
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > _MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))  # no source; it would be read for hours
        return hashlib.file_digest(file, "sha256").hexdigest()


def code_files(name: str, path: Path) -> list[Path]:
    """Return the file of a function, and the modules of its folder or package that it imports, also indirectly.

    Imports are read from the source, without running it: one whose name is computed is not found. Of an installed
    package, the modules of the same package count.

    Args:
        name: The function.
        path: Its file.
    """
    module = name.rpartition(":")[0]
    is_file = module.endswith(".py")
    own = "" if is_file else module
    roots = [path.parent] if is_file else [path.parents[own.count(".") + (path.name == "__init__.py")]]
    if is_file and (package := _package_root(path.parent)) != path.parent:
        roots.append(package)
    only = own.partition(".")[0] if _is_installed(roots[0]) else None
    found, pending = [path], [(own, path)]
    while pending and len(found) < _MAX_MODULES:
        module, file = pending.pop()
        for imported in dict.fromkeys([module, *_imports(file, module)]):
            parts = imported.split(".")
            if not imported or (only is not None and parts[0] != only):
                continue
            for number in range(1, len(parts) + 1):
                new = [
                    one for root in roots for one in _candidates(root, parts[:number])
                    if one not in found and os.path.isfile(one)  # noqa: PTH113 - false for names that are too long
                ]  # fmt: skip
                found += new
                pending += [(".".join(parts[:number]), one) for one in new]
                if not any(os.path.isdir(root.joinpath(*parts[:number])) for root in roots):  # noqa: PTH112
                    break
    return found


def _package_root(folder: Path) -> Path:
    """Return the folder that holds the outermost package that a folder is in."""
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder = folder.parent
    return folder


def _is_installed(folder: Path) -> bool:
    return not _INSTALLED.isdisjoint(folder.parts) or str(folder) == sysconfig.get_paths()["stdlib"]


def _candidates(root: Path, parts: Sequence[str]) -> list[Path]:
    """Return the files that a module, given by the parts of its name, may have below a folder."""
    path = root.joinpath(*parts)
    return [path.with_name(f"{path.name}.py"), path / "__init__.py"]


def _imports(path: Path, module: str) -> Iterator[str]:
    """Yield the absolute names of the modules, or of their members, that a source file imports."""
    try:
        with path.open("rb") as file:
            source = file.read(_MAX_SOURCE_BYTES)
        if _LONG_NAME.search(source):
            return
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # it cannot be imported either
        return
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join(part for part in (*above, node.module or "") if part)
            yield base
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)


def _line(name: str, path: Path | None) -> str:
    try:
        files = [] if path is None else [(file, _sha256(file)) for file in code_files(name, path)]
    except OSError:
        files = []
    if not files:
        return f"  {name}  no file that can be read here"
    lines = [f"  {name}  {path}  sha256 {files[0][1]}"]
    lines += [f"    which imports {file}  sha256 {digest}" for file, digest in files[1 : _MAX_LISTED + 1]]
    return "\n".join(lines + [f"    and {len(files) - _MAX_LISTED - 1} more"] * (len(files) > _MAX_LISTED + 1))


def _report_trust(owner: Path, names: Mapping[str, str]) -> None:
    for name in sorted(names):
        sys.stderr.write(f"Trusted code of {owner.name}:\n{_line(name, file_of(name))}\n")


def _quoted(words: Sequence[str]) -> list[str]:
    from vorox.core.redaction import redact_arguments

    return [word if word.startswith("'") else shlex.quote(word) for word in redact_arguments(words)]


def _owner(directory: Path) -> Path:
    """Return the run that a checkpoint belongs to, else the directory itself."""
    return (run_of_checkpoint(directory) or directory).resolve()


def _id_of(directory: Path) -> str:
    """Return an id that a move of a run, or of derived weights, does not change."""
    with contextlib.suppress(OSError, MalformedJson):
        found = mapping(read_json(RunLayout(directory).record)).get("run_id")
        if isinstance(found, str):
            return f"run {found}"
    with contextlib.suppress(OSError, MalformedJson):
        return f"weights {mapping(read_json(directory / MANIFEST_NAME)).get('sha256')}"
    return f"run {directory.name}"


def _store_path(identity: str) -> Path:
    state_home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state_home).expanduser() / "vorox" / "trusted" / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"


def _read_store(identity: str) -> dict[str, list[str]]:
    """Return the trusted digests by function; nothing from a file that another user could have written."""
    path = _store_path(identity)
    try:
        status = path.stat()
        if os.name != "nt" and (status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022):
            return {}
        value = read_json(path, {"id": str, "functions": {...: [str]}})
    except (OSError, MalformedJson):
        return {}
    return value["functions"] if value.get("id") == identity and "functions" in value else {}


def _write_store(identity: str, names: Mapping[str, str]) -> None:
    """Add digests to the store; without a writable home, the user has to confirm again."""
    known = _read_store(identity)
    if all(digest in known.get(name, ()) for name, digest in names.items()):
        return
    for name, digest in names.items():
        known[name] = sorted({*known.get(name, ()), digest})
    path = _store_path(identity)
    with contextlib.suppress(OSError):
        atomic.make_directory(path.parent)
        path.parent.chmod(0o700)
        atomic.write_file(path, atomic.pretty_json({"id": identity, "functions": known}), private=True)
