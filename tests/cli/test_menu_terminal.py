"""The start menu on a real terminal: a process of its own behind a pseudo-terminal, with the numpy engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny_runs
from eventually import PATIENCE_SECONDS
from vorox.core.run_layout import step_directories
from vorox.data.corpus.corpus import prepare
from vorox.records.run_lookup import run_directories

pexpect = pytest.importorskip("pexpect", exc_type=ImportError)
pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="a pseudo-terminal of POSIX"),
    # A test before in the same process may have loaded JAX, whose hook warns. pexpect forks to execute at once.
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
]

PROGRAM = """
import os, sys, time
for name in ("curses", "readline", "termios", "tty"):
    sys.modules[name] = None  # as on Windows: an import fails
sys.path.insert(0, os.environ["TESTS"])
import tiny_runs, vorox.run
from numpy_engine import NumpyEngine
from vorox.cli import main
vorox.run.backends.load = lambda name: tiny_runs.NumpyBackend()
import vorox.cli
if "AS_ON_WINDOWS" in os.environ:
    set_variables = vorox.cli.set_windows_variables
    vorox.cli.set_windows_variables = lambda environment, folder: set_variables(environment, folder, "win32")
train_step = NumpyEngine.train_step
def slow_step(self, batch, **rates):
    time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
    return train_step(self, batch, **rates)
NumpyEngine.train_step = slow_step
code = main(sys.argv[1:])
if "AS_ON_WINDOWS" in os.environ:
    print("Set:", os.environ["TRITON_CACHE_DIR"], os.environ["PYTORCH_CUDA_ALLOC_CONF"])
sys.exit(code)
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, configuration and cache, but without a run."""
    directory = tmp_path_factory.mktemp("prepared")
    prepare(tiny_runs.configuration(directory))
    return directory


@pytest.fixture
def folder(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a configuration that keeps its runs in ``runs``."""
    settings = json.loads((prepared / "tiny.yaml").read_text())
    settings["run"] = {"name": "tiny"}
    (tmp_path / "tiny.yaml").write_text(json.dumps(settings))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VOROX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TESTS", str(Path(tiny_runs.__file__).parent))
    return tmp_path


class Screen:
    """A ``vorox`` process on a terminal."""

    def __init__(self, *words: str, rows: int = 50, columns: int = 80, **environment: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = pexpect.spawn(
            sys.executable, ["-c", PROGRAM, *words], encoding="utf-8", timeout=PATIENCE_SECONDS,
            codec_errors="replace",  # the terminal may echo ^C within a character
            dimensions=(rows, columns), env={**inherited, "TERM": "xterm", **environment},
        )  # fmt: skip
        self.text = ""

    def expect(self, text: str) -> str:
        """Wait until the terminal shows a text, and return what it showed since the last one."""
        self.process.expect_exact(text)
        shown = self.process.before + text
        self.text += shown
        return shown

    def answer(self, prompt: str, line: str) -> str:
        shown = self.expect(prompt)
        self.process.sendline(line)
        return shown

    def end(self) -> int:
        self.process.expect(pexpect.EOF)
        self.text += self.process.before
        self.process.close()
        return self.process.exitstatus


@pytest.fixture(autouse=True)
def _no_process_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End every process that a failed test leaves behind."""
    started: list[pexpect.spawn] = []
    spawn = pexpect.spawn
    monkeypatch.setattr(
        pexpect, "spawn", lambda *words, **options: started.append(spawn(*words, **options)) or started[-1]
    )
    yield
    for process in started:
        process.close(force=True)


def run_names() -> list[str]:
    return [path.name for path in run_directories(Path("runs"))]


def steps(name: str) -> list[int]:
    return sorted(step_directories(Path("runs") / name))


def test_a_tiny_terminal_from_an_empty_folder_to_a_run(folder: Path) -> None:
    """40 columns, 10 rows, without termios, readline and curses, with the variables that Windows needs."""
    screen = Screen("train", rows=10, columns=40, AS_ON_WINDOWS="1")
    screen.answer("[N]: ", "")
    screen.answer("[2]: ", "tiny.yaml")
    screen.answer("= back [1]: ", "4")
    screen.answer("Start? [Y/n]: ", "")
    screen.expect("Finished after 12 steps")
    assert screen.end() == 0
    (name,) = run_names()
    assert name.startswith("test_8.3K_run_1-")
    assert f"Set: {folder / '.triton_cache'} max_split_size_mb:128" in screen.text
    menu, _, _ = screen.text.partition("Start?")
    too_long = [line for line in menu.replace("\r", "").split("\n") if len(line) > 40 and " " in line.strip()]
    assert not too_long


@pytest.mark.slow
def test_ctrl_c_once_saves_and_the_menu_resumes(folder: Path) -> None:
    settings = ["train.num_steps=300", "checkpoint.every_steps=100", "eval.every_steps=null"]
    screen = Screen("train", "tiny.yaml", *settings, STEP_SECONDS="0.1")
    screen.expect("Step 1 loss")
    screen.process.sendintr()
    screen.expect("Ctrl-C again exits without saving")
    assert screen.end() == 75
    (name,) = run_names()
    saved = max(steps(name))
    assert 0 < saved < 300
    screen = Screen("train")
    assert f"Step {saved:,} of 300" in screen.answer("Choose 1", "1")
    screen.answer("Start? [Y/n]: ", "y")
    screen.expect(f"Resuming from step {saved}")
    assert "--resume" in screen.text
    assert screen.end() == 0
    assert max(steps(name)) == 300


@pytest.mark.slow
def test_ctrl_c_twice_stops_at_once(folder: Path) -> None:
    screen = Screen("train", "tiny.yaml", "train.num_steps=2000", "checkpoint.every_steps=null", STEP_SECONDS="3")
    screen.expect("Model: ")
    screen.expect("peak")
    screen.process.sendintr()
    screen.expect("Ctrl-C again exits without saving")
    screen.process.sendintr()
    screen.expect("exiting without saving")
    assert screen.end() == 130
    (name,) = run_names()
    assert steps(name) == []


@pytest.mark.slow
def test_a_run_in_use_is_refused_and_a_stopped_one_deleted(folder: Path) -> None:
    running = Screen("train", "tiny.yaml", "train.num_steps=2000", STEP_SECONDS="0.1")
    running.expect("Saved step-00000004")
    (name,) = run_names()
    screen = Screen("train")
    screen.answer("Choose 1", "1")
    screen.expect("is in use by process")
    screen.answer("Choose 1", "x")
    screen.answer("[B]: ", "1")
    screen.expect("until it stops")
    running.process.sendintr()
    assert running.end() == 75
    screen.answer("[B]: ", "1")
    screen.answer("[B]: ", "r")
    screen.answer("[y/N]: ", "y")
    screen.expect(f"Removed {name}")
    screen.answer("[B]: ", "q")
    assert screen.end() == 0
    assert run_names() == []


@pytest.mark.slow
def test_resuming_after_the_other_process_has_stopped(folder: Path) -> None:
    """The list was printed while the run was in use; the answer is checked against the lock of now."""
    running = Screen("train", "tiny.yaml", "train.num_steps=2000", STEP_SECONDS="0.1")
    running.expect("Saved step-00000004")
    screen = Screen("train")
    screen.answer("Choose 1", "1")
    screen.expect("is in use by process")
    running.process.sendintr()
    assert running.end() == 75
    screen.answer("Choose 1", "1")
    screen.answer("Start? [Y/n]: ", "n")
    screen.answer("Choose 1", "q")
    assert screen.end() == 0


@pytest.mark.slow
def test_the_logs_of_a_run_without_a_checkpoint_are_deleted(folder: Path) -> None:
    killed = Screen("train", "tiny.yaml", "train.num_steps=2000", "checkpoint.every_steps=null", STEP_SECONDS="0.1")
    killed.expect("Run directory: ")
    killed.process.kill(signal.SIGKILL)
    killed.process.wait()
    (name,) = run_names()
    screen = Screen("train")
    screen.answer("[N]: ", "x")
    assert "O  delete the logs of 1 run without a checkpoint" in screen.answer("[B]: ", "o")
    screen.answer("[y/N]: ", "")
    screen.answer("[B]: ", "o")
    screen.answer("[y/N]: ", "y")
    screen.expect(f"Removed {name}")
    screen.answer("[B]: ", "q")
    assert screen.end() == 0
    assert run_names() == []


@pytest.mark.slow
def test_growth_is_found_and_a_name_of_ones_own_is_kept(folder: Path) -> None:
    text = tiny_runs.write_text(folder / "text")
    grown = [
        f"data.sources=[{{name: text, format: jsonl, paths: ['{text}']}}]", "data.cache.grow=true",
        f"data.cache.directory={folder / 'cache'}", "train.num_steps=null", "train.num_epochs=1",
    ]  # fmt: skip
    screen = Screen("train", "--menu", "tiny.yaml", *grown)
    screen.answer("[N]: ", "")
    screen.answer("= back [1]: ", "of my own")
    screen.answer("Start? [Y/n]: ", "")
    assert screen.end() == 0
    (name,) = run_names()
    assert name.startswith("of-my-own_run_1-")
    before = max(steps(name))
    tiny_runs.write_text(folder / "more", documents=90, seed=1)
    (folder / "more" / "text.jsonl").rename(text / "z.jsonl")
    assert Screen("data", "build", "tiny.yaml", *grown).end() == 0
    screen = Screen("train")
    screen.answer("Choose 1", "1")
    screen.expect("the data grew from")
    assert "Extend the run to" in screen.answer("[Y/n]: ", "y")
    screen.answer("Start? [Y/n]: ", "y")
    assert screen.end() == 0
    assert max(steps(name)) > 2 * before


@pytest.mark.slow
def test_without_a_terminal_and_leaving_the_menu(folder: Path) -> None:
    words = [sys.executable, "-c", PROGRAM, "train", "--menu"]
    ended = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
    )
    assert ended.returncode == 2
    assert "The menu needs a terminal" in ended.stderr
    screen = Screen("train")
    screen.expect("[N]: ")
    screen.process.sendeof()
    screen.expect("Nothing was started.")
    assert screen.end() == 0
    screen = Screen("train")
    screen.expect("[N]: ")
    screen.process.sendintr()
    assert screen.end() == 130
