"""Print the structure of vorox: every module with its summary, packages with their lines, rooms by floor, call paths.

    python tests/structure.py [--no-paths]

A call path is measured: a tiny run with the numpy engine executes it once to warm up (lazy imports, caches), and once
more under a profile hook that notes, in every thread, the module of ``src/vorox`` that defines each called function.
Backends are not part of any path, because the engine is numpy's. ``make structure`` runs this.
"""

from __future__ import annotations

import argparse
import ast
import graphlib
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from numpy_engine import NumpyEngine
from servers.web import http_server
from tiny_runs import configuration, run, use_numpy_engine, write_text
from vorox.core.batch import Progress
from vorox.core.files import json_lines
from vorox.core.files.staged_directory import StagedDirectory
from vorox.data.cache.building.scheduler import BuildScheduler
from vorox.data.corpus.corpus import prepare
from vorox.experiments.tracking import JsonLinesSink
from vorox.training.loop.saving import Saving
from vorox.training.loop.step_records import StepRecords
from vorox.training.resume import resume as resume_module

SOURCE = Path(__file__).parents[1] / "src" / "vorox"
LOOP = SOURCE / "training" / "loop" / "loop.py"
SAVED_STEP = 4  # tiny_runs.configuration saves every 4 steps
LOGGED_STEP = 6  # and logs every 2


@dataclass(frozen=True)
class Lines:
    """Lines of one module: all of them, and those that are docstrings, comments or empty."""

    total: int
    docstring: int
    code: int


def count_lines(path: Path) -> Lines:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                documented.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    code = [
        number
        for number, line in enumerate(lines, 1)
        if number not in documented and line.strip() and not line.lstrip().startswith("#")
    ]
    return Lines(len(lines), len(documented), len(code))


def package_of(path: Path) -> str:
    """The folder of a module; modules at the top stand alone."""
    folder = path.relative_to(SOURCE).parent.as_posix()
    return path.name if folder == "." else folder


def imported_modules(path: Path) -> set[Path]:
    """The modules of the package that a module imports, at any depth of its code."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vorox":
            folder = SOURCE.joinpath(*(node.module or "").split(".")[1:])
            for name in [alias.name for alias in node.names]:
                candidates = (folder / f"{name}.py", folder.with_suffix(".py"), folder / "__init__.py")
                found.update([candidate for candidate in candidates if candidate.exists()][:1])
    return found - {path}


def first_line(path: Path) -> str:
    """Return the summary of a module, without its last period."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split()).removesuffix(".").replace("``", "")


def print_modules(folder: Path = SOURCE, depth: int = 1) -> None:
    """Print every module under its folder, with its summary."""
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            print(f"{'  ' * depth + path.name:29} {first_line(path)}")
    for child in sorted(path for path in folder.iterdir() if (path / "__init__.py").exists()):
        print(f"{'  ' * depth + child.name + '/':29} {first_line(child / '__init__.py')}")
        print_modules(child, depth + 1)


def print_packages() -> None:
    packages: dict[str, list[tuple[Path, Lines]]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        packages.setdefault(package_of(path), []).append((path, count_lines(path)))
    print(f"{'package':24} {'modules':>8} {'lines':>8} {'code':>8} {'docs':>8}  imports from other packages")
    totals = Counter[str]()
    for package, modules in sorted(packages.items()):
        targets = Counter(
            package_of(target)
            for path, _ in modules
            for target in imported_modules(path)
            if package_of(target) != package
        )
        row = {
            "modules": len(modules),
            "lines": sum(lines.total for _, lines in modules),
            "code": sum(lines.code for _, lines in modules),
            "docs": sum(lines.docstring for _, lines in modules),
        }
        totals.update(row)
        arrows = ", ".join(f"{target} {count}" for target, count in targets.most_common())
        print(f"{package:24} " + " ".join(f"{value:8,}" for value in row.values()) + f"  {arrows}")
    print(f"{'all':24} " + " ".join(f"{value:8,}" for value in totals.values()))


def print_rooms() -> None:
    """Print the rooms of every folder, floor by floor: a room imports only from rooms on floors below it."""
    for folder in [SOURCE, *sorted(path.parent for path in SOURCE.rglob("__init__.py") if path.parent != SOURCE)]:
        arrows: dict[str, set[str]] = {}
        for path in folder.rglob("*.py"):
            if path != folder / "__init__.py":
                targets = {room_of(folder, other) for other in imported_modules(path) if other.is_relative_to(folder)}
                room = room_of(folder, path)
                arrows.setdefault(room, set()).update(targets - {room, "__init__"})
        if not any((folder / room / "__init__.py").exists() for room in arrows):
            continue
        name = folder.relative_to(SOURCE.parent).as_posix()
        print(f"\n{name}: {len(arrows)} rooms, {sum(map(len, arrows.values()))} arrows", end="")
        try:
            order = [*graphlib.TopologicalSorter(arrows).static_order()]
        except graphlib.CycleError as error:
            print(f", in a circle: {' -> '.join(error.args[1])}")
            continue
        print(", all down")
        floors: dict[str, int] = {}
        for room in order:
            floors[room] = 1 + max((floors[other] for other in arrows[room]), default=0)
        for floor in range(max(floors.values()), 0, -1):
            print(f"  {floor:2}  {', '.join(sorted(room for room in floors if floors[room] == floor))}")


def room_of(folder: Path, path: Path) -> str:
    """The room of a folder that a module is in: a folder, or the module beside them."""
    return path.relative_to(folder).parts[0].removesuffix(".py")


class ModuleTrace:
    """The modules of the package whose functions are called while recording, in the order of their first call."""

    def __init__(self) -> None:
        self.modules: dict[Path, None] = {}
        self._is_recording = False
        self._thread: int | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch this thread and every thread started from here on."""
        threading.setprofile(self._on_call)
        sys.setprofile(self._on_call)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def start(self, *, only_this_thread: bool = False, running: Path | None = None) -> None:
        """Start to record; ``running`` is a module on the path whose function was called before."""
        self.modules = {} if running is None else {running: None}
        self._thread = threading.get_ident() if only_this_thread else None
        self._is_recording = True

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record inside the block, in addition to what is recorded already."""
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside the block."""
        before, self._is_recording = self._is_recording, False
        try:
            yield
        finally:
            self._is_recording = before

    def stop(self) -> None:
        self._is_recording = False

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._is_recording and event == "call" and self._thread in (None, threading.get_ident()):
            code = frame.f_code
            path = Path(code.co_filename)
            if SOURCE in path.parents and not code.co_name.startswith("<module"):
                self.modules.setdefault(path)


@contextmanager
def around_steps(before: Callable[[int], None], after: Callable[[int], None]) -> Iterator[None]:
    """Call ``before(step)`` and ``after(step)``, counted from 1, around every training step of the numpy engine."""
    original = NumpyEngine.train_step

    def train_step(self: NumpyEngine, batch: Any, **arguments: float) -> Any:
        before(batch.step + 1)
        result = original(self, batch, **arguments)
        after(batch.step + 1)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NumpyEngine, "train_step", train_step)
        yield


def document_to_chunk(directory: Path, trace: ModuleTrace) -> None:
    """From a jsonl file on a web server to committed chunks, once the units of work are listed."""
    text = write_text(directory / "text")
    build_units = BuildScheduler.run

    def traced(self: BuildScheduler, *arguments: Any, **options: Any) -> Any:
        trace.start()
        try:
            return build_units(self, *arguments, **options)
        finally:
            trace.stop()

    with http_server(text) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(BuildScheduler, "run", traced)
        prepare(configuration(directory, [f"data.sources.0.paths=[{server.url}/text.jsonl]"])).close()


def chunk_to_batch(directory: Path, trace: ModuleTrace) -> None:
    """From chunk files to the batches that a run's threads read ahead, some steps after its start.

    Without the report of stalls, which the heartbeat of the run reads every few seconds, whatever the step; for the
    same reason the metadata database is off.
    """
    write_text(directory / "text", documents=600)
    settings = ["checkpoint.every_steps=null", "eval.every_steps=null", "train.num_steps=60", "log.metadata=off"]
    with around_steps(
        lambda step: trace.stop() if step == 50 else None, lambda step: trace.start() if step == 20 else None
    ):
        run(configuration(directory, settings))
    keep_packages(trace, "data")
    trace.modules.pop(SOURCE / "data" / "storage" / "stalls.py", None)


def step_to_disk(directory: Path, trace: ModuleTrace) -> None:
    """From the return of the engine's step to its line in the replay chain and in the metrics; the step is not saved.

    A step settles while the next one runs. So the trace starts when the engine returns step 7, which the loop then
    counts and decides about, and ends when the line of step 6 is in both files: the loop settles it in between. The
    chain writes 256 lines at a time; here it writes each one. Not recorded: the display, which shows the line after it
    is written; the start of the next step (its batch, its learning rate); saves and validation, of which no step here
    has any; other threads, which read batches ahead. The metadata database is off: a thread writes it every few
    seconds, whatever the step.
    """
    write = JsonLinesSink.write

    def traced(self: JsonLinesSink, step: int, values: Mapping[str, float]) -> None:
        write(self, step, values)
        if step == LOGGED_STEP:
            trace.stop()

    def start(step: int) -> None:
        if step == LOGGED_STEP + 1:
            trace.start(only_this_thread=True, running=LOOP)

    settings = ["checkpoint.every_steps=null", "eval.every_steps=null", "log.metadata=off"]
    with around_steps(lambda step: None, start), pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "BUFFERED_LINES", 1)
        patch.setattr(JsonLinesSink, "write", traced)
        run(configuration(directory, settings))
    keep_packages(trace, "core", "experiments", "models", "runtime", "training")


def save(directory: Path, trace: ModuleTrace) -> None:
    """From the decision of the loop to save to the committed checkpoint.

    Recorded from ``Saving.save`` to the rename that makes the checkpoint visible. The step in flight settles first;
    this is the path ``step_to_disk`` and not recorded again. Not recorded either: what follows the commit (retention,
    the log, the mirror). The checkpoint is written synchronously, so that one thread does all of it.
    """
    save_state, settle, commit = Saving.save, StepRecords.settle, StagedDirectory.commit

    def traced_save(self: Saving, progress: Progress, **options: bool) -> Progress:
        trace.start(only_this_thread=True, running=LOOP)
        try:
            return save_state(self, progress, **options)
        finally:
            trace.stop()

    def traced_settle(self: StepRecords, progress: Progress) -> Progress:
        with trace.paused():
            return settle(self, progress)

    def traced_commit(self: StagedDirectory, metadata: Mapping[str, Any]) -> Path:
        try:
            return commit(self, metadata)
        finally:
            trace.stop()

    settings = ["checkpoint.asynchronous=false", "log.metadata=off"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saving, "save", traced_save)
        patch.setattr(StepRecords, "settle", traced_settle)
        patch.setattr(StagedDirectory, "commit", traced_commit)
        run(configuration(directory, settings))
    keep_packages(trace, "core", "experiments", "models", "runtime", "training")


def resume(directory: Path, trace: ModuleTrace) -> None:
    """From opening the checkpoint of an interrupted run to its restored engine, plan, data cursor and replay chain.

    Recorded in the two functions that do this. Comparing the configurations, which happens between them, opening the
    data and starting the loop belong to the start of every run and are left out, as are the data packages.
    """
    config = configuration(directory)

    class Stop(Exception):
        pass

    def fail(step: int) -> None:
        if step == SAVED_STEP + 2:
            raise Stop

    with pytest.raises(Stop), around_steps(fail, lambda step: None):
        run(config)

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with trace.recording():
                return function(*arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        trace.modules.clear()
        for name in ("choose_checkpoint", "restore"):
            patch.setattr(resume_module, name, recorded(getattr(resume_module, name)))
        run(config)
    keep_packages(trace, "core", "models", "training")


def keep_packages(trace: ModuleTrace, *packages: str) -> None:
    for path in list(trace.modules):
        if path.relative_to(SOURCE).parts[0] not in packages:
            del trace.modules[path]


def print_paths() -> None:
    for path in (document_to_chunk, chunk_to_batch, step_to_disk, save, resume):
        trace = ModuleTrace()
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
            use_numpy_engine(patch)
            patch.setenv("VOROX_CACHE", f"{folder}/home")
            for attempt in ("first", "second"):
                with trace.installed():
                    path(Path(folder) / attempt, trace)
        lines = sum(count_lines(module).total for module in trace.modules)
        print(f"\n{path.__name__.replace('_', ' ')}: {len(trace.modules)} modules, {lines:,} lines")
        for module in trace.modules:
            print(f"    {module.relative_to(SOURCE).as_posix()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--no-paths", action="store_true", help="only modules, packages, lines and imports")
    arguments = parser.parse_args()
    print("src/vorox/")
    print_modules()
    print()
    print_packages()
    print_rooms()
    if not arguments.no_paths:
        print_paths()


if __name__ == "__main__":
    main()
