"""``vorox doctor``: check this machine and its installation, and name the remedy of every problem."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import typer

from vorox.backends import BACKENDS, check_installed
from vorox.backends.installation_probe import probe_installation
from vorox.backends.node_collectives import collective_engine
from vorox.cli.checks.node_doctor import NodeChecks, rank_arguments, rank_or_launch
from vorox.cli.commands.doctor import TIMEOUT_SECONDS
from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import print_json, print_wrapped, terminal_width
from vorox.core.errors import ConfigError
from vorox.core.pluralize import pluralize
from vorox.data.corpus.cache_location import root_of
from vorox.runtime import framework_checks, machine_checks
from vorox.runtime.machine_checks import Finding

_NAME_COLUMNS = 15
_TEXT_COLUMN = len("warn  ") + _NAME_COLUMNS + 1
_COLOURS = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED}


def doctor(
    network: bool, nodes: bool, nproc: int, backend: str | None, timeout: float | None, root: str, as_json: bool
) -> None:
    if nodes:
        _check_nodes(nproc, backend, timeout or TIMEOUT_SECONDS, root, network=network, as_json=as_json)
    _refuse_without_nodes({"--nproc": nproc > 1, "--backend": backend is not None, "--timeout": timeout is not None})
    findings: list[Finding] = []
    for finding in _findings(Path(root), network=network):
        findings.append(finding)
        if not as_json:
            _print(finding)
    _finish(findings, {}, as_json=as_json)


def _check_nodes(
    nproc: int, backend: str | None, timeout_seconds: float, root: str, *, network: bool, as_json: bool
) -> NoReturn:
    """Check the ranks of a job; rank 0 prints, and all end with its exit code.

    Raises:
        ConfigError: The options contradict each other, or this process is not one of several ranks.
        typer.Exit: Always.
    """
    if network:
        raise ConfigError("--nodes does not check huggingface.co", where="--network", hint="check it in a second call")
    if backend is not None:
        check_installed(backend)
    member = rank_or_launch(nproc, rank_arguments(root, backend, timeout_seconds, as_json=as_json))
    engine = collective_engine(backend)
    findings: list[Finding] = []

    def on_finding(finding: Finding) -> None:
        findings.append(finding)
        if not as_json:
            _print(finding)

    checks = NodeChecks(member, Path(root), engine, timeout_seconds, on_finding)
    passed = checks.run()
    if member.rank == 0:
        _finish(findings, {"nodes": checks.figures}, as_json=as_json)
    raise typer.Exit(int(not passed))


def _refuse_without_nodes(given: Mapping[str, bool]) -> None:
    for name in (name for name, is_given in given.items() if is_given):
        raise ConfigError(f"{name} needs --nodes", where=name, hint=f"add --nodes, or remove {name}")


def _finish(findings: Sequence[Finding], figures: Mapping[str, Any], *, as_json: bool) -> NoReturn:
    """Print the verdict, and end with its exit code."""
    num_failed = sum(finding.status == "fail" for finding in findings)
    num_warnings = sum(finding.status == "warn" for finding in findings)
    if as_json:
        print_json({"ok": not num_failed, "checks": [asdict(finding) for finding in findings], **figures})
    else:
        verdict = "Not ready to train" if num_failed else "Ready to train"
        counts = f"{pluralize(num_failed, 'failure')}, {pluralize(num_warnings, 'warning')}"
        typer.echo(f"\n{verdict}: {pluralize(len(findings), 'check')}, {counts}.")
    raise typer.Exit(int(num_failed > 0))


def _print(finding: Finding) -> None:
    status = typer.style(f"{finding.status:<4}", fg=_COLOURS[finding.status])
    head, *rest = _wrapped(f"{finding.name:<{_NAME_COLUMNS}} {finding.text}")
    typer.echo(f"{status}  {head}")
    for line in rest:
        typer.echo(f"      {line}")
    if finding.remedy:
        print_wrapped([f"{'':{_TEXT_COLUMN - 3}}-> {finding.remedy}"], indent_columns=_TEXT_COLUMN)


def _wrapped(line: str) -> list[str]:
    width = terminal_width()
    if width is None:
        return [line]
    return humanize.wrap(line, width - len("warn  "), indent_columns=_NAME_COLUMNS + 1).split("\n")


def _findings(root: Path, *, network: bool) -> Iterator[Finding]:
    """Yield what the checks find, quick ones first."""
    environment = os.environ
    yield machine_checks.check_python()
    yield machine_checks.check_processor(environment)
    yield machine_checks.check_memory()
    gpus = framework_checks.driver_gpus()
    yield framework_checks.check_driver(gpus)
    probes = {name: probe_installation(name) for name in BACKENDS}
    yield from framework_checks.check_frameworks(
        {name: probe.report for name, probe in probes.items() if probe.report},
        {name: probe.problem for name, probe in probes.items() if probe.is_installed and not probe.report},
        {name: probe.install for name, probe in probes.items()},
        gpus,
    )
    yield machine_checks.check_compiler(environment)
    yield from machine_checks.check_triton_cache(environment)
    yield machine_checks.check_allocator(environment)
    yield machine_checks.check_shared_memory()
    yield machine_checks.check_open_files()
    yield from machine_checks.check_disk("disk of runs", root, "run.directory to a folder on another disk")
    caches = root_of(None)
    yield from machine_checks.check_disk("disk of caches", caches, "VOROX_CACHE to a folder on another disk")
    yield machine_checks.check_clock()
    if network:
        yield machine_checks.check_network()
