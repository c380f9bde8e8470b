"""What Windows needs is set before PyTorch is imported, by every command, through a pipe and without POSIX modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny_runs

pytestmark = [pytest.mark.slow, pytest.mark.torch]
PROGRAM = """
import json, os, sys
for name in ("curses", "readline", "termios", "tty"):
    sys.modules[name] = None  # as on Windows: an import fails
NAMES = ("TRITON_CACHE_DIR", "PYTORCH_CUDA_ALLOC_CONF")
seen = {}

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            seen.setdefault(name, [os.environ.get(variable) for variable in NAMES])

sys.meta_path.insert(0, Watch())
import vorox.cli
set_variables = vorox.cli.set_windows_variables
vorox.cli.set_windows_variables = lambda environment, folder: set_variables(environment, folder, "win32")
code = vorox.cli.main(sys.argv[1:])
print(json.dumps(seen.get("torch")))
sys.exit(code)
"""


def last_line(folder: Path, *words: str) -> Any:
    """What PyTorch's import found in a command whose input and output are pipes."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTORCH_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], cwd=folder, env=inherited, input="", capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_variables_are_set_before_torch_is_imported(tmp_path: Path) -> None:
    tiny_runs.configuration(tmp_path)
    expected = [str(tmp_path / ".triton_cache"), "max_split_size_mb:128"]
    assert last_line(tmp_path, "train", "tiny.yaml", "runtime.rehearsal=false") == expected
    assert last_line(tmp_path, "generate", "latest", "--prompt", "the", "--tokens", "2") == expected
