"""The command line raises its limit of open files, for itself and its children only."""

from __future__ import annotations

import subprocess
import sys

import pytest

resource = pytest.importorskip("resource")


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be() -> None:
    program = (
        "import resource\n"
        "hard = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\n"
        "from vorox.cli import main\n"
        "main(['--version'])\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "True"
