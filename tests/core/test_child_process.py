"""Own children import what this process would import, and nothing from the working directory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import vorox

SOURCE = str(Path(vorox.__file__).parents[1])
HOSTILE = ("typer", "yaml", "numpy", "psutil", "pydantic", "rich", "click", "json", "sitecustomize")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A downloaded folder whose modules have the names of libraries; each leaves a file behind when it runs."""
    for name in HOSTILE:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'RAN')!r}, 'a').write({name!r})\nraise SystemExit(9)\n"
        )
    return tmp_path


def variables(**changed: str) -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | {
        "PYTHONPATH": SOURCE, "VOROX_CACHE": "cache", **changed
    }  # fmt: skip


def run(words: Sequence[str], folder: Path, **changed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=variables(**changed), capture_output=True, text=True, timeout=120
    )


CHILD = """
import subprocess, sys
sys.path[:] = [path for path in sys.path if path not in ("", {folder!r})]
from vorox.core.processes.child_process import child_command
done = subprocess.run(child_command({module!r}, {argument!r}), capture_output=True, text=True)
print(done.returncode, done.stdout, done.stderr)
"""


@pytest.mark.parametrize(
    ("module", "argument", "said"),
    [("vorox", "--version", "0 vorox "), ("vorox.runtime.watchdog", "", ""), ("vorox.experiments.end_notice", "", "")],
)
def test_a_child_runs_no_module_of_the_working_directory(module: str, argument: str, said: str, folder: Path) -> None:
    done = run(["-P", "-c", CHILD.format(folder=str(folder), module=module, argument=argument)], folder)
    assert not (folder / "RAN").exists(), done.stdout
    assert said in done.stdout


def test_the_program_itself_drops_the_working_directory(folder: Path) -> None:
    """As torchrun starts it: ``python -u -m vorox``."""
    (folder / "json.py").unlink()  # ``python -m`` itself has the folder in front until our first line runs
    done = run(["-u", "-m", "vorox", "runs", "list"], folder)
    assert not (folder / "RAN").exists(), done.stderr
    assert "No runs" in done.stdout + done.stderr


def test_a_child_has_the_import_path_of_its_parent(tmp_path: Path) -> None:
    """A script's folder, a path that it adds, and ``PYTHONPATH``, in the parent's order; not its variables."""
    for name in ("scripts", "added", "listed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"own_{name}.py").write_text("")
    (tmp_path / "scripts" / "start.py").write_text(
        "import subprocess, sys\n"
        f"sys.path.insert(0, {str(tmp_path / 'added')!r})\n"
        "from vorox.core.processes.child_process import child_command\n"
        "print(repr(sys.path))\n"
        "print(subprocess.run(child_command('shown'), capture_output=True, text=True).stdout)\n"
    )
    (tmp_path / "listed" / "shown.py").write_text(
        "import os, sys, own_scripts, own_added, own_listed\n"
        "print(repr(sys.path), __name__, os.environ.get('PYTHONSAFEPATH'), sys.flags.safe_path)\n"
    )
    listed = os.pathsep.join([str(tmp_path / "listed"), SOURCE])
    done = run([str(tmp_path / "scripts" / "start.py")], tmp_path, PYTHONPATH=listed)
    parent, child = done.stdout.strip().splitlines()
    assert child == f"{parent} __main__ None True", done.stderr


def test_a_notebook_finds_the_modules_of_its_folder_in_its_children(tmp_path: Path) -> None:
    """A notebook has the empty string, the working directory, on its import path."""
    (tmp_path / "own_part.py").write_text("print('found')\n")
    program = "import subprocess, sys; sys.path.insert(0, ''); "
    program += "from vorox.core.processes.child_process import child_command; "
    program += "print(subprocess.run(child_command('own_part'), cwd='/', capture_output=True, text=True))"
    assert "found" in run(["-P", "-c", program], tmp_path).stdout


SPAWN = """
import multiprocessing, os, subprocess, sys
from vorox.core.processes.child_process import forget_safe_spawning, is_safe_path_set, safe_spawning

def work(connection, was_set):
    forget_safe_spawning(was_set)
    connection.send((os.environ.get("PYTHONSAFEPATH"), sys.flags.safe_path))

if __name__ == "__main__":
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=work, args=(theirs, is_safe_path_set()))
    with safe_spawning():
        process.start()
    print(ours.recv(), os.environ.get("PYTHONSAFEPATH"))
    process.join()
"""


@pytest.mark.parametrize("value", [None, "1"])
def test_workers_of_multiprocessing_do_not_either_and_their_children_keep_the_users_variable(
    value: str | None, tmp_path: Path
) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "spawn.py").write_text(SPAWN)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("multiprocessing", "socket", "pickle", "struct", "tempfile"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'RAN')!r}, 'a').write({name!r})\n")
    changed = {} if value is None else {"PYTHONSAFEPATH": value}
    done = run([str(scripts / "spawn.py")], folder, **changed)
    assert not (folder / "RAN").exists(), done.stderr
    assert done.stdout.strip() == f"({value!r}, True) {value}"


def test_every_own_child_is_started_by_one_function() -> None:
    """No other module builds a command line of this interpreter."""
    sources = Path(SOURCE, "vorox")
    allowed = {
        "core/processes/child_process.py", "core/platform/environment.py", "core/platform/installation.py",
        "runtime/machine_checks.py",
    }  # fmt: skip
    found = {
        path.relative_to(sources).as_posix()
        for path in sources.rglob("*.py")
        if "sys.executable" in path.read_text(encoding="utf-8")
    }
    assert found == allowed, "the last three print it"
