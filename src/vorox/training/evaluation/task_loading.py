"""Load lm-evaluation-harness tasks by name or from YAML files.

The harness parses all its thousands of YAML files to find one task, which takes 20 s. Here, a search for the names in
the text of the files limits the parsing to the directories that mention them. A name that no file mentions is refused
after the search.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import re
import sys
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from vorox.core.errors import ConfigError
from vorox.core.platform.installation import install_command

_YAML_SUFFIXES = (".yaml", ".yml")


@contextlib.contextmanager
def prints_aside() -> Generator[None]:
    """Send to standard error what the harness, its metrics and the code of tasks print."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@prints_aside()
def load_tasks(names: Sequence[str], task_path: Path | None, where: str = "--tasks") -> dict[str, Any]:
    """Load tasks; groups and tags become their tasks.

    Args:
        names: Tasks, groups or tags, or paths of YAML files with one of them.
        task_path: Directory of YAML tasks, in addition to those of the harness.
        where: The option or setting with the names, for messages.

    Raises:
        ConfigError: The harness is not installed, or a task is unknown or cannot be loaded.
    """
    manager = find_tasks(names, task_path, where)
    try:
        tasks: dict[str, Any] = dict(manager.load(list(names))["tasks"])
    except Exception as error:  # the harness and datasets raise any exception
        raise ConfigError(
            f"Task cannot be loaded: {type(error).__name__}: {error}", where=where,
            hint="check the dataset of the task; it is downloaded unless it is local",
        ) from error  # fmt: skip
    for task in tasks.values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=1234)  # the harness's default
    return tasks


def find_tasks(names: Sequence[str], task_path: Path | None, where: str = "--tasks") -> Any:
    """Return a ``TaskManager`` of the harness that knows the tasks; no dataset is read.

    Raises:
        ConfigError: The harness is not installed, or a task is unknown.
    """
    try:
        module: Any = import_module("lm_eval.tasks")
    except ImportError as error:
        raise ConfigError(
            f"Tasks need the package lm_eval ({error})", where=where, hint=install_command("eval")
        ) from error
    for logger in ("lm_eval", "datasets"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    if task_path is not None and not task_path.is_dir():
        raise ConfigError(f"Directory of tasks does not exist: {task_path}", where=where)
    own = [] if task_path is None else [str(task_path)]
    wanted = [name for name in names if not _is_file(name, where)]
    manager = module.TaskManager(include_path=own, include_defaults=False)
    missing = _unresolved(wanted, manager.task_index)
    if not missing:
        return manager
    defaults = Path(str(module.__file__)).parent
    texts = dict(_yaml_texts(defaults))
    _check_mentioned(sorted(missing & {*wanted}), texts, manager.all_tasks, where)
    folders: set[str] = set()
    while more := _folders_with(missing, texts, defaults) - folders:  # members of groups are in further directories
        folders |= more
        # Of equal names, the harness takes the first file within a directory, and the last directory.
        manager = module.TaskManager(include_path=[*sorted(folders, reverse=True), *own], include_defaults=False)
        missing = _unresolved(wanted, manager.task_index)
    for name in wanted:
        if name not in manager.all_tasks:
            raise _unknown(name, manager.all_tasks, where)
    return manager


def _is_file(name: str, where: str) -> bool:
    if not name.endswith(_YAML_SUFFIXES):
        return False
    if not Path(name).expanduser().is_file():
        raise ConfigError(f"Task file does not exist: {name}", where=where)
    return True


def _unresolved(names: Iterable[str], index: Mapping[str, Any]) -> set[str]:
    """Return the names that are not in an index, with the members of groups."""
    missing: set[str] = set()
    for name in names:
        entry: Any = index.get(name)
        if entry is None:
            missing.add(name)
        elif entry.kind.name == "GROUP":
            missing |= _unresolved(_members(entry.cfg["task"]), index)
    return missing


def _members(tasks: object) -> Iterator[str]:
    """Yield the names in the list ``task`` of a group; an entry is a name or a mapping, possibly of another group."""
    for item in cast("list[Any]", tasks) if isinstance(tasks, list) else []:
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            settings = cast("dict[str, Any]", item)
            if isinstance(settings.get("task"), str):
                yield settings["task"]
            elif "task" in settings:
                yield from _members(settings["task"])
            elif "group" in settings:
                yield str(settings["group"])


def _yaml_texts(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield path and text of the YAML files, and of the templates that they include."""
    for folder, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            if "yaml" in name and not name.endswith(".py"):
                path = Path(folder, name)
                yield str(path), path.read_text("utf-8", errors="replace")


def _folders_with(names: Collection[str], texts: Mapping[str, str], root: Path) -> set[str]:
    """Return the directories of the harness, one per family of tasks, whose files mention one of the names."""
    if not names:
        return set()
    pattern = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, sorted(names)))})(?![\w-])")
    return {str(root / Path(path).relative_to(root).parts[0]) for path, text in texts.items() if pattern.search(text)}


def _check_mentioned(names: Iterable[str], texts: Mapping[str, str], own: Sequence[str], where: str) -> None:
    for name in names:
        if not any(name in text for text in texts.values()):
            pattern = re.compile(r"^(?:task|group):\s*[\"']?([\w.-]+)", re.MULTILINE)
            raise _unknown(name, [*own, *(known for text in texts.values() for known in pattern.findall(text))], where)


def _unknown(name: str, known: Sequence[str], where: str) -> ConfigError:
    near = difflib.get_close_matches(name, sorted({*known}), n=3)
    return ConfigError(
        f"Unknown task {name}", where=where,
        hint=f"did you mean {' or '.join(near)}?" if near else "name its YAML file, or its directory with "
        f"{'--task-path' if where.startswith('--') else 'eval.task_path'}",
    )  # fmt: skip
