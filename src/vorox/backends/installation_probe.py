"""Probe an engine's framework in a child process: a broken installation is a finding, not a crash."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vorox.backends import check_installed
from vorox.backends.engine_table import engine_row
from vorox.core.errors import ConfigError
from vorox.core.platform.installation import install_command
from vorox.core.processes.child_process import child_command

TIMEOUT_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class InstallationProbe:
    """What the child process found.

    Attributes:
        backend: Name of the engine.
        is_installed: Whether all packages of the engine are present.
        install: The command that installs them.
        report: The report of the engine's ``installation_report`` module; empty if there is none.
        problem: Why there is no report.
    """

    backend: str
    is_installed: bool
    install: str
    report: dict[str, Any] = field(default_factory=dict[str, Any])
    problem: str = ""


def probe_installation(backend: str, command: Sequence[str] | None = None) -> InstallationProbe:
    """Import the framework of an engine in a child process.

    Args:
        backend: Name of the engine.
        command: The program that prints the report; default: the engine's ``installation_report`` module.
    """
    install = install_command(backend)
    try:
        check_installed(backend)
    except ConfigError as error:
        return InstallationProbe(backend, False, install, problem=error.what)
    command = command or child_command(engine_row(backend).installation_report)
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return InstallationProbe(
            backend, True, install, problem=f"the import did not end within {TIMEOUT_SECONDS:.0f} s"
        )
    if ended.returncode < 0:
        name = signal.Signals(-ended.returncode).name
        return InstallationProbe(backend, True, install, problem=f"the import ended with {name}")
    try:
        return InstallationProbe(backend, True, install, report=json.loads(ended.stdout.strip().split("\n")[-1]))
    except ValueError:
        last = ended.stderr.strip().split("\n")[-1] or f"exit code {ended.returncode}"
        return InstallationProbe(backend, True, install, problem=f"the import failed: {last}")
